"""Sketched and sparse gradient exchange for data-parallel training in JAX.

Chain one of the transformations before an Optax optimizer and run the training step through
`data_parallel`:

    tx = optax.chain(jaxsparse.sketched_sgd(compression=10, momentum=0.9), optax.sgd(0.1))
"""

from jaxsparse import (
    blocks,
    codecs,
    collectives,
    layout,
    planner,
    quantize,
    select,
    sketch,
    stream,
    traffic,
)
from jaxsparse.autotune import Autotuned, autotune
from jaxsparse.blocks import BlockStream
from jaxsparse.diagnostics import Diagnostics, diagnose
from jaxsparse.feedback import ErrorFeedbackState, error_feedback
from jaxsparse.parallel import data_parallel
from jaxsparse.partition import partition
from jaxsparse.per_worker import PerWorker, Sharded, specs
from jaxsparse.planner import select_tensors
from jaxsparse.reducers.base import Info, Laws, Reduced, Reducer
from jaxsparse.reducers.block_gather import BlockGatherReducer
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.dragonn import DragonnReducer
from jaxsparse.reducers.gtopk import GTopKReducer
from jaxsparse.reducers.ok_topk import OkTopkReducer
from jaxsparse.reducers.omni_reduce import OmniReduceReducer
from jaxsparse.reducers.quantized import QuantizedReducer
from jaxsparse.reducers.random_k import RandomKReducer
from jaxsparse.reducers.s2 import S2Reducer
from jaxsparse.reducers.selection import Bisection, Sampled
from jaxsparse.reducers.sketched import SketchedBudget, SketchedReducer
from jaxsparse.reducers.sparcml import SparCMLReducer
from jaxsparse.reducers.spardl import SparDLReducer
from jaxsparse.reducers.top_k import TopKReducer
from jaxsparse.reducers.true_top_k import TrueTopKReducer
from jaxsparse.replicas import check_replicas
from jaxsparse.resharding import reshard
from jaxsparse.sharding import local, shard
from jaxsparse.sketch import SketchSpec
from jaxsparse.stages import Stages, warm_up
from jaxsparse.stream import SparseStream
from jaxsparse.transforms import (
    dense,
    dgc,
    dragonn,
    gtopk,
    ms_topk,
    ok_topk,
    omni_reduce,
    qsgd,
    random_k,
    s2_reducer,
    sign_sgd,
    sketched_sgd,
    sparcml,
    spardl,
    sparse_all_gather,
    top_k,
    true_top_k,
)

__all__ = [
    "Autotuned",
    "Bisection",
    "BlockGatherReducer",
    "BlockStream",
    "DenseReducer",
    "Diagnostics",
    "DragonnReducer",
    "ErrorFeedbackState",
    "GTopKReducer",
    "Info",
    "Laws",
    "OkTopkReducer",
    "OmniReduceReducer",
    "PerWorker",
    "QuantizedReducer",
    "RandomKReducer",
    "Reduced",
    "Reducer",
    "S2Reducer",
    "Sampled",
    "Sharded",
    "SketchSpec",
    "SketchedBudget",
    "SketchedReducer",
    "SparCMLReducer",
    "SparDLReducer",
    "SparseStream",
    "Stages",
    "TopKReducer",
    "TrueTopKReducer",
    "autotune",
    "blocks",
    "check_replicas",
    "codecs",
    "collectives",
    "data_parallel",
    "dense",
    "dgc",
    "diagnose",
    "dragonn",
    "error_feedback",
    "gtopk",
    "layout",
    "local",
    "ms_topk",
    "ok_topk",
    "omni_reduce",
    "partition",
    "planner",
    "qsgd",
    "quantize",
    "random_k",
    "reshard",
    "s2_reducer",
    "select",
    "select_tensors",
    "shard",
    "sign_sgd",
    "sketch",
    "sketched_sgd",
    "sparcml",
    "spardl",
    "sparse_all_gather",
    "specs",
    "stream",
    "top_k",
    "traffic",
    "true_top_k",
    "warm_up",
]
