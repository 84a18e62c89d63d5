"""Data-parallel training in JAX with few bytes: in few bits, sparse, sketched, by local steps.

Chain one of the transformations before an Optax optimizer, and take this `value_and_grad` in the
place of JAX's. The step stays your own `jax.jit`:

    tx = optax.chain(jaxsparse.sketched_sgd(compression=10, momentum=0.9), optax.sgd(0.1))
    loss, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxsparse import (
    codecs as codecs,
    collectives as collectives,
    outer as outer,
    planner as planner,
    quantize as quantize,
    reducers as reducers,
    select as select,
    sketch as sketch,
    traffic as traffic,
)
from jaxsparse.arrays.settings import Stages
from jaxsparse.collectives.gather import Gather, gather
from jaxsparse.comm.links import Link
from jaxsparse.comm.marks import PerWorker, specs
from jaxsparse.exchanges import (
    chunked_top_k,
    dense,
    dgc,
    dragonn,
    omni_reduce,
    powersgd,
    qsgd,
    quantized,
    random_k,
    s2_reducer,
    sketched_sgd,
    sparcml,
    spardl,
    sparse_all_gather,
    top_k,
    true_top_k,
)
from jaxsparse.feedback import Exchange, exchange, partition
from jaxsparse.outer import LocalSteps
from jaxsparse.planner.planning import plan
from jaxsparse.processes.failing import fail_at_once
from jaxsparse.reducers.stages import warm_up
from jaxsparse.traffic import wire_bytes
from jaxsparse.training import checksums as checksums
from jaxsparse.training.check import check, check_loss
from jaxsparse.training.diagnostics import diagnose
from jaxsparse.training.finite import check_finite
from jaxsparse.training.fsdp import fsdp_specs, gather_residual
from jaxsparse.training.gradients import grad, value_and_grad
from jaxsparse.training.means import mean_of
from jaxsparse.training.multi_steps import multi_steps
from jaxsparse.training.per_worker import per_worker
from jaxsparse.training.replicas import check_replicas
from jaxsparse.training.resharding import reshard
from jaxsparse.training.sharding import local, shard
from jaxsparse.training.watching import watch
from jaxsparse.training.zero1 import zero1

__version__ = "0.9.0"

# The names that a training program uses. Building blocks are in the modules imported above.
__all__ = [
    "Exchange",
    "Gather",
    "Link",
    "LocalSteps",
    "PerWorker",
    "Stages",
    "check",
    "check_finite",
    "check_loss",
    "check_replicas",
    "chunked_top_k",
    "dense",
    "dgc",
    "diagnose",
    "dragonn",
    "exchange",
    "fail_at_once",
    "fsdp_specs",
    "gather",
    "gather_residual",
    "grad",
    "local",
    "mean_of",
    "multi_steps",
    "omni_reduce",
    "partition",
    "per_worker",
    "plan",
    "powersgd",
    "qsgd",
    "quantized",
    "random_k",
    "reshard",
    "s2_reducer",
    "shard",
    "sketched_sgd",
    "sparcml",
    "spardl",
    "sparse_all_gather",
    "specs",
    "top_k",
    "true_top_k",
    "value_and_grad",
    "warm_up",
    "watch",
    "wire_bytes",
    "zero1",
]

if TYPE_CHECKING:
    from jaxsparse import islands as islands
else:

    def __getattr__(name: str) -> Any:
        """`islands`, which need packages of their own, and so are imported where they are used."""
        if name != "islands":
            how = ": write 'from jaxsparse import contrib'" if name == "contrib" else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{how}")
        return importlib.import_module("jaxsparse.islands")
