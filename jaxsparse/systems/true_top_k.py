"""True top-k: the largest coordinates of the exact mean, the ceiling for sketches."""

import dataclasses
from typing import Any, Unpack

import optax
from jaxtyping import Array, Float

from jaxsparse import select
from jaxsparse.collectives import wire
from jaxsparse.feedback import error_feedback
from jaxsparse.feedback.options import LeafOptions, exchange_options
from jaxsparse.layout import split_evenly
from jaxsparse.reducers.base import Reduced, Reducer, deliver_means
from jaxsparse.settings import entries, static_int
from jaxsparse.systems.row import Case, System


@dataclasses.dataclass(frozen=True)
class TrueTopK(Reducer):
    """The k largest coordinates of the dense mean (Sketched-SGD, section 4, remark 2).

    It sums the whole vector, and delivers k coordinates of the sum. The field is the argument of
    `true_top_k`.
    """

    changes_few = True
    k: int

    def __post_init__(self):
        object.__setattr__(self, "k", static_int("k", self.k))

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        """Splits k in proportion to the buckets' sizes; each bucket gets at least 1."""
        if not sizes:
            return ()
        select.check_k(self.k, sum(sizes))
        return tuple(TrueTopK(max(1, k)) for k in split_evenly(self.k, sizes))

    def init(self, size: int) -> Any:
        """No state."""
        select.check_k(self.k, size)
        return ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        mean = wire.psum(x, axis_name) / wire.axis_size(axis_name)
        return deliver_means(x, select.threshold_top_k(mean, self.k), state)


@exchange_options()
def true_top_k(k: int, **options: Unpack[LeafOptions]) -> optax.GradientTransformationExtraArgs:
    """The k largest coordinates of the mean gradient, with error feedback. It saves no bytes.

    This is the ceiling for `sketched_sgd` at the same k (its section 4, remark 2). It shows how
    training goes if the heavy coordinates are found for certain.

    `momentum` acts before the exchange (momentum correction), and is masked at the coordinates that
    the update changes (momentum factor masking).

    With Adam, chain `jaxsparse.per_worker(optax.scale_by_adam())` before it. Adam behind it has
    moments of sparse gradients, and trains worse (`jaxsparse.per_worker` says why).

    Args:
        k: number of coordinates of the whole tree that a step updates.
        **options: as for all transformations.
    """
    return error_feedback(TrueTopK(k), **options)


TRUE_TOP_K = System(
    true_top_k,
    TrueTopK,
    summary="top k of the exact mean, error feedback: the ceiling for sketches",
    received="8 d (W-1)/W",
    cases={"": Case({"k": 19}, {"k": 601})},
    settings=lambda request: {"k": entries(request.density, request.size)},
    caveat="saves no bytes: a reference for accuracy",
)
