"""Outer optimizers by name: an exchange of displacements, and an optimizer that uses their mean.

A displacement is the global parameters less a worker's own after H steps. It takes the place of a
gradient, so each of these is an exchange, chained with an Optax optimizer.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxsparse.arrays.settings import static_float
from jaxsparse.feedback import error_feedback
from jaxsparse.feedback.options import RuleOption, part, transformation
from jaxsparse.systems.chunked_top_k import ChunkedTopK
from jaxsparse.systems.dense import dense


def mean(
    learning_rate: optax.ScalarOrSchedule = 1.0,
    *,
    exchange: optax.GradientTransformation | None = None,
    axis_name: str | None = "data",
) -> optax.GradientTransformationExtraArgs:
    """The workers' mean parameters: local SGD, federated averaging (arXiv 1602.05629).

    With D the mean displacement, theta -= learning_rate * D. No optimizer carries over from one
    exchange to the next, so it needs no state but the exchange's.

    Args:
        learning_rate: outer learning rate, or a schedule of it by outer steps. With 1, the global
            parameters are the mean of the workers'.
        exchange: the transformation that exchanges displacements, such as
            `jaxsparse.quantized("int4")`. None: `jaxsparse.dense`.
        axis_name: the mesh axis of the workers, for the default exchange.
    """
    return _behind(exchange, axis_name, _sgd(learning_rate, 0.0, nesterov=False))


def diloco(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float = 0.9,
    *,
    exchange: optax.GradientTransformation | None = None,
    axis_name: str | None = "data",
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo's outer optimizer: Nesterov momentum on mean displacements (arXiv 2311.08105).

    With D the mean displacement, m = momentum * m + D and theta -= learning_rate * (D + momentum *
    m). In the long run a displacement counts learning_rate / (1 - momentum) times: 7 with these
    defaults, which are those of OpenDiLoCo (H = 500, AdamW inside). MaxText has a rate of 0.3, and
    H = 36. A small model wanted less: in runs of 20 to 200 exchanges `diloco(0.7, 0.6)` ended lower
    than with 0.9, by AdamW and by Muon (as in MuLoCo, arXiv 2505.23725). In four bits it also ended
    lower than the plain mean, but for ten steps of Muon (`benchmarks/frontier_map.py --outer`).

    Args:
        learning_rate: outer learning rate, or a schedule of it by outer steps.
        momentum: outer momentum, in [0, 1).
        exchange: the transformation that exchanges displacements, such as
            `jaxsparse.quantized("int8")` (INTELLECT-1) or `jaxsparse.quantized("e3m0", decay=0)`
            (Streaming DiLoCo). None: `jaxsparse.dense`.
        axis_name: the mesh axis of the workers, for the default exchange.
    """
    return _behind(exchange, axis_name, _sgd(learning_rate, momentum, nesterov=True))


def bmuf(
    momentum: float,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    *,
    nesterov: bool = False,
    exchange: optax.GradientTransformation | None = None,
    axis_name: str | None = "data",
) -> optax.GradientTransformationExtraArgs:
    """Block momentum, blockwise model-update filtering (Chen and Huo, ICASSP 2016).

    m = momentum * m + D and theta -= learning_rate * m, with D the mean displacement of a block of
    H steps. The rule of its authors is momentum = 1 - 1 / W for W workers, and learning_rate = 1.
    SparCML compares with it in speech recognition (section 8.4).

    Args:
        momentum: block momentum, in [0, 1).
        learning_rate: block learning rate, or a schedule of it by outer steps.
        nesterov: whether workers start a block from theta - learning_rate * momentum * m, where
            momentum would carry theta. The parameters here are then these starting points.
        exchange: the transformation that exchanges displacements. None: `jaxsparse.dense`.
        axis_name: the mesh axis of the workers, for the default exchange.
    """
    return _behind(exchange, axis_name, _sgd(learning_rate, momentum, nesterov=nesterov))


def slowmo(
    momentum: float,
    learning_rate: float = 1.0,
    *,
    inner_rate: optax.ScalarOrSchedule = 1.0,
    exchange: optax.GradientTransformation | None = None,
    axis_name: str | None = "data",
) -> optax.GradientTransformationExtraArgs:
    """Slow momentum (Wang et al., ICLR 2020, arXiv 1910.00643, algorithm 1).

    u = momentum * u + D / inner_rate and theta -= learning_rate * inner_rate * u. With a constant
    inner rate that is block momentum. With a schedule, momentum remembers displacements in units of
    the rate that made them. Inner optimizers keep their states (the paper's "maintain").

    Args:
        momentum: slow momentum, in [0, 1). The paper's are 0.4 to 0.8.
        learning_rate: slow learning rate, alpha.
        inner_rate: learning rate of the inner optimizer, or a schedule of it by *outer* steps.
        exchange: the transformation that exchanges displacements. None: `jaxsparse.dense`.
        axis_name: the mesh axis of the workers, for the default exchange.
    """
    _check_momentum(momentum)
    scale: Any = inner_rate if callable(inner_rate) else lambda _: inner_rate

    def inverse(count: Array) -> Array:
        rate = jnp.asarray(scale(count), jnp.float32)
        # A rate of 0, as at the start of a warm-up, moves nothing.
        return jnp.where(rate == 0, 0, 1 / jnp.where(rate == 0, 1, rate))

    slow = optax.chain(
        optax.scale_by_schedule(inverse),
        optax.trace(momentum),
        optax.scale_by_schedule(lambda count: -learning_rate * scale(count)),
    )
    return _behind(exchange, axis_name, slow)


@dataclasses.dataclass(frozen=True)
class _SparseLoCo(RuleOption, ChunkedTopK):
    """SparseLoCo: displacements by chunked top-k in 7 to 10 bits an entry (arXiv 2508.15706).

    The residual e = decay * e + D - sent is a worker's own outer momentum, and there is no other.
    The published code (templar) differs from the paper: it divides a sum by the number of workers
    that sent the coordinate, clips messages to the median norm, and rounds values to levels of a
    whole vector, of which its largest entries use only two of four in two bits (here 256 entries
    share them). Its 72B run lowered the outer rate from 1 to 0.4 by hand: give a schedule.

    Choose k by how long an entry may wait: n = chunk_size / k exchanges on average. What has waited
    for n exchanges arrives at decay**n, so (1 - decay**n) / (n * (1 - decay)) of a steady move
    arrives: with a decay of 0.95, 84 % at the default k, an eighth of a chunk, and 30 % at the
    paper's 64. A run should have several such waits, too. With 19 and more, the sparse exchange
    cost 0.04 nats or less over a dense mean of the same displacements; with two or three, up to 0.4
    (models of 0.1M and 11M parameters, decay 0.95, benchmarks/results/local_updates.md).

    Args:
        k: number of entries of each chunk that a worker sends.
        learning_rate: outer learning rate, or a schedule of it by outer steps.
    """

    k: int = 512
    _: dataclasses.KW_ONLY
    learning_rate: optax.ScalarOrSchedule = 1.0
    decay: float | None = 0.95

    def __post_init__(self):
        """The exchange checks its settings, once it is made."""

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(RuleOption)}
        exchange = error_feedback(part(self, ChunkedTopK), **shared)
        return optax.chain(exchange, optax.sgd(self.learning_rate))


sparse_loco = transformation(_SparseLoCo, "sparse_loco")


def _sgd(
    learning_rate: optax.ScalarOrSchedule, momentum: float, nesterov: bool
) -> optax.GradientTransformation:
    _check_momentum(momentum)
    return optax.sgd(learning_rate, momentum if momentum else None, nesterov)


def _check_momentum(momentum: float) -> None:
    if not 0 <= static_float("momentum", momentum) < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1): 0 is none")


def _behind(
    exchange: optax.GradientTransformation | None,
    axis_name: str | None,
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    return optax.chain(dense(axis_name=axis_name) if exchange is None else exchange, optimizer)
