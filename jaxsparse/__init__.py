"""Sketched and sparse gradient exchange for data-parallel training in JAX.

Chain one of the transformations before an Optax optimizer and run the training step through
`data_parallel`:

    tx = optax.chain(jaxsparse.sketched_sgd(compression=10, momentum=0.9), optax.sgd(0.1))
"""

from jaxsparse import cost, layout, quantize, select, sketch
from jaxsparse.feedback import ErrorFeedbackState, error_feedback
from jaxsparse.parallel import data_parallel
from jaxsparse.per_worker import PerWorker, specs
from jaxsparse.reducers.base import Info, Laws, Reduced, Reducer
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.sketched import SketchedBudget, SketchedReducer
from jaxsparse.reducers.true_top_k import TrueTopKReducer
from jaxsparse.sharding import local, shard
from jaxsparse.sketch import SketchSpec
from jaxsparse.stream import SparseStream
from jaxsparse.transforms import dense, sketched_sgd, true_top_k

__all__ = [
    "DenseReducer",
    "ErrorFeedbackState",
    "Info",
    "Laws",
    "PerWorker",
    "Reduced",
    "Reducer",
    "SketchSpec",
    "SketchedBudget",
    "SketchedReducer",
    "SparseStream",
    "TrueTopKReducer",
    "cost",
    "data_parallel",
    "dense",
    "error_feedback",
    "layout",
    "local",
    "quantize",
    "select",
    "shard",
    "sketch",
    "sketched_sgd",
    "specs",
    "true_top_k",
]
