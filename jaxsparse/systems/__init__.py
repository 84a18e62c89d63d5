"""The table of systems. Each has one file with its reducer, its transformation and its row.

The planner, the benchmarks, the contract test and the docs all read `SYSTEMS`. A new system is one
file, and here its import, its row and its name.
"""

from jaxsparse.arrays.settings import check_density, static_int
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
from jaxsparse.systems.row import (
    Case as Case,
    Choice as Choice,
    Request as Request,
    System as System,
)
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

# The systems, each followed by its variants, such as "spardl_packed". The planner ranks these.
WITH_VARIANTS: dict[str, System] = {
    name: row for system in SYSTEMS.values() for name, row in system.with_variants()
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


def choose(
    name: str,
    density: float,
    *,
    size: int,
    workers: int,
    touched: float | None = None,
    block_size: int = 256,
    dense_size: int = 0,
) -> Choice:
    """Chooses settings that deliver about `density * size` elements of the mean in a step.

    Other settings are the defaults. `sketched_sgd` delivers that many coordinates and psums four
    times as many words, or eight times below a density of 1/40. `sparcml` takes k of each group of
    512, or one of larger groups. `dense`, `qsgd` (4 bits), `quantized` (8 bits) and `sign_sgd`
    deliver everything at any density. A name that ends in "_packed" has 4-byte entries.

    Args:
        name: a key of `WITH_VARIANTS`.
        density: share of the elements that a step delivers, in (0, 1].
        size: number of elements of the vector.
        workers: number of workers.
        touched: share of the blocks that are not zero on one worker, in (0, 1], for gradients that
            are zero in most blocks. Systems of blocks then send these blocks. Systems whose
            workers share the room make room for `workers` times as many. None: gradients are
            dense, and systems of blocks select.
        block_size: number of elements in a block, such as the width of an embedding.
        dense_size: number of elements of leaves that travel dense beside the vector. The
            compression of `sketched_sgd` counts them.

    Returns:
        The system and its settings, which can write themselves as Python.

    Raises:
        ValueError: no such system, settings out of range, or the system can't meet them.

    Example:
        >>> choose("sketched_sgd", 0.01, size=10**6, workers=8).transformation
        'jaxsparse.sketched_sgd(12.5, rows=3)'
        >>> choose("sparcml", 0.01, size=10**6, workers=8).transformation
        'jaxsparse.sparcml(5)'
    """
    if name not in WITH_VARIANTS:
        raise ValueError(f"system {name!r} is unknown: use one of {', '.join(WITH_VARIANTS)}")
    check_density(density)
    size, workers = static_int("size", size), static_int("workers", workers)
    dense_size = static_int("dense_size", dense_size)
    for setting, value, least in (
        ("size", size, 1),
        ("workers", workers, 1),
        ("dense_size", dense_size, 0),
    ):
        if value < least:
            raise ValueError(f"{setting}={value} must be at least {least}")
    request = Request(density, size, workers, touched, block_size, dense_size)
    choice = Choice(WITH_VARIANTS[name], WITH_VARIANTS[name].settings(request))
    _ = choice.budget  # raises where the settings are out of range
    return choice
