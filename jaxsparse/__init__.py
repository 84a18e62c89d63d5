"""Sketched and sparse gradient exchange for data-parallel training in JAX.

Chain one of the transformations before an Optax optimizer and run the training step through
`data_parallel`:

    tx = optax.chain(jaxsparse.sketched_sgd(compression=10, momentum=0.9), optax.sgd(0.1))
"""

from jaxsparse import codecs, collectives, cost, layout, quantize, select, sketch, stream
from jaxsparse.autotune import Autotuned, autotune
from jaxsparse.feedback import ErrorFeedbackState, error_feedback
from jaxsparse.parallel import data_parallel
from jaxsparse.per_worker import PerWorker, specs
from jaxsparse.reducers.base import Info, Laws, Reduced, Reducer
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.gtopk import GTopKReducer
from jaxsparse.reducers.ok_topk import OkTopkReducer
from jaxsparse.reducers.sketched import SketchedBudget, SketchedReducer
from jaxsparse.reducers.sparcml import SparCMLReducer
from jaxsparse.reducers.spardl import SparDLReducer
from jaxsparse.reducers.top_k import TopKReducer
from jaxsparse.reducers.true_top_k import TrueTopKReducer
from jaxsparse.sharding import local, shard
from jaxsparse.sketch import SketchSpec
from jaxsparse.stages import Stages, warm_up
from jaxsparse.stream import SparseStream
from jaxsparse.transforms import (
    dense,
    gtopk,
    ok_topk,
    sketched_sgd,
    sparcml,
    spardl,
    top_k,
    true_top_k,
)

__all__ = [
    "Autotuned",
    "DenseReducer",
    "ErrorFeedbackState",
    "GTopKReducer",
    "Info",
    "Laws",
    "OkTopkReducer",
    "PerWorker",
    "Reduced",
    "Reducer",
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
    "codecs",
    "collectives",
    "cost",
    "data_parallel",
    "dense",
    "error_feedback",
    "gtopk",
    "layout",
    "local",
    "ok_topk",
    "quantize",
    "select",
    "shard",
    "sketch",
    "sketched_sgd",
    "sparcml",
    "spardl",
    "specs",
    "stream",
    "top_k",
    "true_top_k",
    "warm_up",
]
