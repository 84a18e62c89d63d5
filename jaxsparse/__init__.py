"""Sketched and sparse gradient exchange for data-parallel training in JAX.

Chain one of the transformations before an Optax optimizer and run the training step through
`data_parallel`:

    tx = optax.chain(jaxsparse.sketched_sgd(compression=10, momentum=0.9), optax.sgd(0.1))
"""

from jaxsparse import (
    blocks,
    codecs,
    collectives,
    cost,
    layout,
    quantize,
    select,
    sketch,
    stream,
    systems,
    tensors,
)
from jaxsparse.autotune import autotune
from jaxsparse.diagnostics import diagnose
from jaxsparse.feedback import error_feedback, partition
from jaxsparse.parallel import data_parallel
from jaxsparse.per_worker import PerWorker, Sharded, specs
from jaxsparse.replicas import check_replicas
from jaxsparse.resharding import reshard
from jaxsparse.sharding import local, shard
from jaxsparse.stages import Stages, warm_up
from jaxsparse.systems import *
from jaxsparse.tensors import select_tensors
from jaxsparse.training.failing import fail_at_once

__all__ = [
    "PerWorker",
    "Sharded",
    "Stages",
    "autotune",
    "blocks",
    "check_replicas",
    "codecs",
    "collectives",
    "cost",
    "data_parallel",
    "diagnose",
    "error_feedback",
    "fail_at_once",
    "layout",
    "local",
    "partition",
    "quantize",
    "reshard",
    "select",
    "select_tensors",
    "shard",
    "sketch",
    "specs",
    "stream",
    "systems",
    "tensors",
    "warm_up",
]
__all__ += systems.__all__
