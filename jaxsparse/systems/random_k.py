"""Random-k SGD: the same random coordinates on all workers."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxsparse import hashing
from jaxsparse.collectives import wire
from jaxsparse.feedback import error_feedback
from jaxsparse.feedback.options import LeafOptions, exchange_options
from jaxsparse.reducers.base import Reduced, SeededReducer, finite_sums, info
from jaxsparse.reducers.stages import Stages, staged
from jaxsparse.settings import check_density, check_vector, entries
from jaxsparse.systems.row import Case, System


@dataclasses.dataclass(frozen=True)
class RandomK(SeededReducer):
    """Draws k coordinates from a key that all workers share, and psums k values without indices.

    This is rand_k of Stich, Cordonnier and Jaggi (Sparsified SGD with Memory, NeurIPS 2018,
    Definition 2.1). Values are not scaled up, because the residual keeps the rest. Each exchange
    draws anew, without replacement. The fields are the arguments of `random_k`.
    """

    density: float

    def __post_init__(self):
        super().__post_init__()
        check_density(self.density)

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`. A sum that overflows counts as not sent."""
        check_vector("x", x)
        key = jax.random.fold_in(jax.random.key(self.seed), state)
        k = entries(self.density, x.size)
        chosen = hashing.permute(jnp.arange(k, dtype=jnp.int32), x.size, key)
        total, finite = finite_sums(wire.psum(x.at[chosen].get(unique_indices=True), axis_name))
        mean = total / wire.axis_size(axis_name)
        dense = jnp.zeros_like(mean, shape=x.shape).at[chosen].set(mean, unique_indices=True)
        sent = jnp.zeros_like(finite, shape=x.shape).at[chosen].set(finite, unique_indices=True)
        residual = jnp.where(sent, jnp.zeros_like(x), x)
        state = state + jnp.uint32(1)
        return Reduced(dense, residual, sent, state, info(jnp.count_nonzero(mean)))


@exchange_options()
def random_k(
    density: float | Stages[float],
    *,
    seed: int = 0,
    **options: Unpack[LeafOptions],
) -> optax.GradientTransformationExtraArgs:
    """Random-k SGD (Stich et al., NeurIPS 2018): k random coordinates, the same on all workers.

    A step has one all-reduce of k = density d words, without indices, for any number of workers.
    The selection is blind: a coordinate waits for 1 / density steps on average, and training needs
    a far higher density than with top-k.

    `momentum` is corrected, and masked at the chosen coordinates.

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or a warm-up
            (`jaxsparse.warm_up`).
        seed: seed of the draws.
        **options: as for all transformations.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = random_k(0.25, axis_name=None)
        >>> grads = {"kernel": jnp.ones((64, 32))}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"].sum().item()
        512.0
    """
    return error_feedback(staged(lambda density: RandomK(density, seed=seed), density), **options)


RANDOM_K = System(
    random_k,
    RandomK,
    summary="the same random coordinates on all workers, no indices",
    received="8 k (W-1)/W",
    cases={"": Case({"density": 0.03}, {"density": 1.0})},
    caveat="selects blindly: to train as well it needs a far higher density",
)
