"""The table of systems. Each has one file with its reducer, its transformation and its row.

The benchmarks, the contract test and the docs all read `SYSTEMS`. A new system is one
file, and here its import, its row and its name.
"""

from jaxsparse.systems.chunked_top_k import (
    CHUNKED_TOP_K,
    ChunkedTopK as ChunkedTopK,
    chunked_top_k,
)
from jaxsparse.systems.demo import DEMO, DeMo as DeMo, demo
from jaxsparse.systems.dense import DENSE, Dense as Dense, dense
from jaxsparse.systems.dgc import DGC, dgc
from jaxsparse.systems.dragonn import DRAGONN, Dragonn as Dragonn, dragonn
from jaxsparse.systems.ef21 import EF21_SGDM, EF21State as EF21State, ef21_sgdm
from jaxsparse.systems.gtopk import GTOPK, GTopK as GTopK, gtopk
from jaxsparse.systems.ms_topk import MS_TOPK, ms_topk
from jaxsparse.systems.ok_topk import OK_TOPK, OkTopk as OkTopk, ok_topk
from jaxsparse.systems.omni_reduce import OMNI_REDUCE, OmniReduce as OmniReduce, omni_reduce
from jaxsparse.systems.powersgd import POWERSGD, PowerSGD as PowerSGD, powersgd
from jaxsparse.systems.qsgd import QSGD, qsgd
from jaxsparse.systems.quantized import (
    QUANTIZED,
    GatheredQuantized as GatheredQuantized,
    Quantized as Quantized,
    quantized,
)
from jaxsparse.systems.random_k import RANDOM_K, RandomK as RandomK, random_k
from jaxsparse.systems.row import Case as Case, System as System
from jaxsparse.systems.s2_reducer import S2 as S2, S2_REDUCER, s2_reducer
from jaxsparse.systems.sign_sgd import SIGN_SGD, sign_sgd
from jaxsparse.systems.sketched_sgd import (
    SKETCHED_SGD,
    SketchedSGD as SketchedSGD,
    sketched_sgd,
)
from jaxsparse.systems.sparcml import SPARCML, SparCML as SparCML, sparcml
from jaxsparse.systems.spardl import SPARDL, SparDL as SparDL, spardl
from jaxsparse.systems.sparse_all_gather import (
    SPARSE_ALL_GATHER,
    SparseAllGather as SparseAllGather,
    sparse_all_gather,
)
from jaxsparse.systems.top_k import TOP_K, TopK as TopK, top_k
from jaxsparse.systems.true_top_k import TRUE_TOP_K, TrueTopK as TrueTopK, true_top_k

# Tables show them in this order.
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        DENSE,
        TRUE_TOP_K,
        SKETCHED_SGD,
        SPARDL,
        SPARCML,
        OK_TOPK,
        GTOPK,
        TOP_K,
        CHUNKED_TOP_K,
        DGC,
        DRAGONN,
        MS_TOPK,
        RANDOM_K,
        S2_REDUCER,
        OMNI_REDUCE,
        SPARSE_ALL_GATHER,
        QSGD,
        QUANTIZED,
        SIGN_SGD,
        POWERSGD,
        DEMO,
        EF21_SGDM,
    )
}

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
