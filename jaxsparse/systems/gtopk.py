"""gTop-k SGD (Shi et al., ICDCS 2019)."""

import dataclasses
from typing import Any, Literal, Unpack

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxsparse import codecs
from jaxsparse.collectives import wire
from jaxsparse.collectives.gtopk import gtopk as gtopk_all_reduce
from jaxsparse.feedback import error_feedback
from jaxsparse.feedback.options import LeafOptions, exchange_options
from jaxsparse.reducers.base import Conservation, Reduced, Reducer
from jaxsparse.reducers.delivery import deliver_merged, marked
from jaxsparse.reducers.stages import Stages, staged
from jaxsparse.select.selection import Selection, check_selection, selector
from jaxsparse.settings import check_density, entries
from jaxsparse.systems.row import Case, System


@dataclasses.dataclass(frozen=True)
class GTopK(Reducer):
    """The k largest entries of sums of pairs of sums of ... of each worker's k largest.

    Its fields are the arguments of `gtopk`.
    """

    density: float
    residuals: Literal["global", "published"] = "global"
    codec: codecs.Codec = codecs.COO
    selection: Selection = "fast"

    def __post_init__(self):
        check_density(self.density)
        codecs.check_codec(self.codec)
        check_selection(self.selection)
        if self.residuals not in ("global", "published"):
            raise ValueError(
                f"residuals={self.residuals!r} is unknown: use 'global' or 'published'"
            )

    @property
    def conservation(self) -> Conservation:
        """As published it leaks."""
        if self.residuals != "global":
            return "leaks"
        return "exact" if self.codec.is_exact else "to rounding"

    @property
    def dense_at_full_budget(self) -> bool:
        """But for the codec's rounding."""
        return self.codec.is_exact

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        stream = selector(self.selection)(x, entries(self.density, x.size))
        total, discarded, _ = gtopk_all_reduce(
            stream, x.size, axis_name=axis_name, codec=self.codec
        )
        unselected = x.at[stream.indices].set(0, mode="drop")
        if self.residuals == "published":
            discarded = jnp.zeros_like(x)
        selected = marked(stream, x.size)
        workers = wire.axis_size(axis_name)
        return deliver_merged(x, total, unselected + discarded, selected, state, workers)


@exchange_options()
def gtopk(
    density: float | Stages[float],
    *,
    residuals: Literal["global", "published"] = "global",
    codec: codecs.Codec = codecs.COO,
    selection: Selection = "fast",
    **options: Unpack[LeafOptions],
) -> optax.GradientTransformationExtraArgs:
    """gTop-k SGD (Shi et al., ICDCS 2019): k entries are left after each addition of two workers'.

    Per step log2 W exchanges of k = density d entries, 2 k words each in COO; if W is no power of
    two, floor(log2 W) + 2 of them. (Published: a tree and a broadcast, twice that.)

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or `Stages` of it.
        residuals: "global" loses nothing; "published" is the paper's rule, which leaks.
        codec: of the messages.
        selection: "fast" or "exact" top-k of each worker's own vector.
        **options: as for all transformations.

    Raises:
        ValueError: settings out of range.
    """
    return error_feedback(
        staged(lambda density: GTopK(density, residuals, codec, selection), density), **options
    )


GTOPK = System(
    gtopk,
    GTopK,
    summary="[gTop-k](https://arxiv.org/abs/1901.04359): k entries left of each sum of two "
    "workers'",
    received="8 k log2 W; 8 k (floor(log2 W) + 2) if W is no power of two",
    cases={"": Case({"density": 0.03}, {"density": 1.0})},
)
