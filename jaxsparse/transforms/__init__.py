"""The named systems as Optax transformations, each a few lines around `error_feedback`."""

from jaxsparse.transforms.baselines import dense as dense
from jaxsparse.transforms.baselines import true_top_k as true_top_k
from jaxsparse.transforms.blocks import omni_reduce as omni_reduce
from jaxsparse.transforms.blocks import sparse_all_gather as sparse_all_gather
from jaxsparse.transforms.dgc import dgc as dgc
from jaxsparse.transforms.dragonn import dragonn as dragonn
from jaxsparse.transforms.ms_topk import ms_topk as ms_topk
from jaxsparse.transforms.quantized import qsgd as qsgd
from jaxsparse.transforms.quantized import sign_sgd as sign_sgd
from jaxsparse.transforms.random_k import random_k as random_k
from jaxsparse.transforms.s2 import s2_reducer as s2_reducer
from jaxsparse.transforms.sketched import sketched_sgd as sketched_sgd
from jaxsparse.transforms.sparcml import sparcml as sparcml
from jaxsparse.transforms.spardl import spardl as spardl
from jaxsparse.transforms.sparse import gtopk as gtopk
from jaxsparse.transforms.sparse import ok_topk as ok_topk
from jaxsparse.transforms.sparse import top_k as top_k
