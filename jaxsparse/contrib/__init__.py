"""Exchanges that no recipe needs: nothing imports them, and they promise less.

    from jaxsparse import contrib

    tx = optax.chain(contrib.ok_topk(0.01), optax.sgd(0.1))

They pass the same tests as the others. A minor release may change or drop them.
"""

from jaxsparse.contrib.demo import DeMo as DeMo
from jaxsparse.contrib.ef21 import EF21State as EF21State, ef21_sgdm as ef21_sgdm
from jaxsparse.contrib.exchanges import (
    demo as demo,
    gtopk as gtopk,
    ms_topk as ms_topk,
    ok_topk as ok_topk,
    sign_sgd as sign_sgd,
)
from jaxsparse.contrib.gtopk import GTopK as GTopK
from jaxsparse.contrib.ok_topk import OkTopk as OkTopk
