"""The systems. Each has one file with its reducer and its transformation, and a row of `SYSTEMS`.

Benchmarks, tests and docs read this table. A new system is one file, and here its import and name.
"""

from jaxsparse.reducers.stages import Staged as Staged
from jaxsparse.systems.block_sparse import (
    OmniReduce as OmniReduce,
    SparseAllGather as SparseAllGather,
    omni_reduce,
    sparse_all_gather,
)
from jaxsparse.systems.chunked_top_k import (
    ChunkedTopK as ChunkedTopK,
    chunked_top_k,
)
from jaxsparse.systems.demo import DeMo as DeMo, demo
from jaxsparse.systems.dense import Dense as Dense, dense
from jaxsparse.systems.dragonn import Dragonn as Dragonn, dragonn
from jaxsparse.systems.ef21 import EF21State as EF21State, ef21_sgdm
from jaxsparse.systems.gtopk import GTopK as GTopK, gtopk
from jaxsparse.systems.ok_topk import OkTopk as OkTopk, ok_topk
from jaxsparse.systems.powersgd import PowerSGD as PowerSGD, powersgd
from jaxsparse.systems.quantized import (
    GatheredQuantized as GatheredQuantized,
    Quantized as Quantized,
    qsgd,
    quantized,
    sign_sgd,
)
from jaxsparse.systems.random_k import RandomK as RandomK, random_k
from jaxsparse.systems.s2_reducer import S2 as S2, s2_reducer
from jaxsparse.systems.sketched_sgd import (
    SketchedSGD as SketchedSGD,
    sketched_sgd,
)
from jaxsparse.systems.sparcml import SparCML as SparCML, sparcml
from jaxsparse.systems.spardl import SparDL as SparDL, spardl
from jaxsparse.systems.table import SYSTEMS as SYSTEMS, System as System
from jaxsparse.systems.top_k import TopK as TopK, dgc, ms_topk, top_k
from jaxsparse.systems.true_top_k import TrueTopK as TrueTopK, true_top_k

# The transformations, which `jaxsparse` exports, too.
__all__ = [
    "chunked_top_k",
    "demo",
    "dense",
    "dgc",
    "dragonn",
    "ef21_sgdm",
    "gtopk",
    "ms_topk",
    "ok_topk",
    "omni_reduce",
    "powersgd",
    "qsgd",
    "quantized",
    "random_k",
    "s2_reducer",
    "sign_sgd",
    "sketched_sgd",
    "sparcml",
    "spardl",
    "sparse_all_gather",
    "top_k",
    "true_top_k",
]
