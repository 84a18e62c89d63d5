"""Random-k SGD: the same random coordinates on all workers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import hashing
from jaxsparse.collectives import wire
from jaxsparse.reducers.base import Laws, Reduced, bucket_seeds, info
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.select.checks import check_vector
from jaxsparse.settings import static_seed


@dataclasses.dataclass(frozen=True)
class RandomKReducer:
    """k coordinates drawn from a key that all workers share: a psum of k values, and no indices.

    rand_k of Stich, Cordonnier and Jaggi (Sparsified SGD with Memory, NeurIPS 2018, Definition
    2.1): unscaled, because what is not sent is fed back. Drawn anew at each exchange, without
    replacement.

    Attributes:
        density: k as a share of the elements, in (0, 1].
        seed: 0 <= seed < 2**32, of the draws.
    """

    density: float
    seed: int = 0

    def __post_init__(self):
        check_density(self.density)
        object.__setattr__(self, "seed", static_seed("seed", self.seed))

    @property
    def laws(self) -> Laws:
        """All is delivered or kept."""
        return Laws(conserves=True, dense_at_full_budget=True)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["RandomKReducer", ...]:
        """The same for each bucket, but for the seed."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> Any:
        """The number of exchanges so far, uint32, for the draws."""
        return jnp.uint32(0)

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`. Sums that overflow count as not sent."""
        check_vector("x", x)
        key = jax.random.fold_in(jax.random.key(self.seed), state)
        k = entries(self.density, x.size)
        chosen = hashing.permute(jnp.arange(k, dtype=jnp.int32), x.size, key)
        total = wire.psum(x.at[chosen].get(unique_indices=True), axis_name)
        finite = jnp.isfinite(total)
        mean = jnp.where(finite, total, 0) / wire.axis_size(axis_name)
        dense = jnp.zeros_like(mean, shape=x.shape).at[chosen].set(mean, unique_indices=True)
        sent = jnp.zeros_like(finite, shape=x.shape).at[chosen].set(finite, unique_indices=True)
        residual = jnp.where(sent, jnp.zeros_like(x), x)
        state = state + jnp.uint32(1)
        return Reduced(dense, residual, sent, state, info(jnp.count_nonzero(mean)))
