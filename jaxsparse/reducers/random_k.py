"""Random-k SGD: the same random coordinates on all workers."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse.arrays import hashing
from jaxsparse.arrays.settings import Density, check_size, check_vector, entries
from jaxsparse.arrays.stream import filled
from jaxsparse.reducers.base import (
    Conservation,
    Kept,
    Reducer,
    SeededReducer,
    Sums,
    bucket_seeds,
    settle,
)
from jaxsparse.reducers.dense import Dense


class RandomKState(NamedTuple):
    """State of `RandomK`."""

    draws: UInt32[Array, ""]  # uint32: the number of exchanges so far
    inner: Any  # the state of the reducer of the drawn values


@dataclasses.dataclass(frozen=True)
class RandomK(SeededReducer):
    """Random-k SGD (Stich et al., NeurIPS 2018): k random coordinates, the same on all workers.

    A step has one all-reduce of k = density d words, without indices, for any number of workers.
    Each exchange draws anew, without replacement. The selection is blind: a coordinate waits for 1
    / density steps on average. Momentum is masked at the drawn coordinates, or where `reducer`
    masks it.

    What waits comes late, as a sum of old gradients, which wants a rate far below dense's. With
    `decay=0` what is not drawn is dropped, as in coordinate descent. Each step then moves the drawn
    coordinates by what is new. Tune its rate: with momentum here, or behind Adam, it was mostly 4
    to 64 times dense's, and before Adam it was dense's. With momentum or a clip behind, begin at
    dense's. This trained better in nearly all that we tried (`benchmarks/training.py`), but not
    with under 1 % of the coordinates of a small model, where one run in five failed. `decay=0` also
    drops the errors of `reducer`, so round with `reducers.Quantized()`, which is right on average.
    The default is the paper's (Definition 2.1): values are not scaled up, and the residual keeps
    the rest.

    CocktailSGD (Wang et al., ICML 2023) is a composition: top-k within random coordinates, in 4
    bits, one step late. If each worker sends a tenth of a fifth of the coordinates, in 4 bits and
    about 8 for an index, that is 0.25 bits a parameter:

        top = reducers.TopK(0.1, codec=codecs.EliasFano(value_bits=4))
        random_k(0.2, reducer=top, delay=1)

    Args:
        density: k as a share of each bucket's elements, in (0, 1].
        reducer: the reducer of the drawn values. It can be any reducer of flat vectors, such as
            `reducers.TopK(0.1)` or `reducers.Quantized(quantize.Format("int4"), "nearest")`. Its
            indices are places among the k values. None: an exact sum.

    Example:
        >>> from jaxsparse import random_k
        >>> import jax, jax.numpy as jnp
        >>> tx = random_k(0.25, axis_name=None)
        >>> grads = {"kernel": jnp.ones((64, 32))}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"].sum().item()
        512.0
    """

    density: Density
    _: dataclasses.KW_ONLY
    reducer: Reducer | None = None

    @property
    def inner(self) -> Reducer:
        return Dense() if self.reducer is None else self.reducer

    def check(self) -> None:
        inner = self.inner
        if not isinstance(inner, Reducer) or inner.whole_leaves:
            raise ValueError(
                f"reducer={self.reducer!r} must be a reducer of flat vectors, such as "
                "jaxsparse.reducers.TopK(0.1) or reducers.Dense()"
            )

    @property
    def conservation(self) -> Conservation:
        return self.inner.conservation

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        """Another seed for each bucket. `reducer` splits its own budget."""
        inner = self.inner.split(tuple(entries(self.density, size) for size in sizes), dense_size)
        seeds = bucket_seeds(self.seed, len(sizes))
        pairs = zip(inner, seeds)
        return tuple(dataclasses.replace(self, reducer=one, seed=seed) for one, seed in pairs)

    def init(self, size: int) -> RandomKState:
        return RandomKState(jnp.uint32(0), self.inner.init(entries(self.density, size)))

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        """A sum that overflows counts as not sent."""
        check_vector("x", x)
        check_size("x.size", x.size)
        key = jax.random.fold_in(jax.random.key(self.seed), state.draws)
        k = entries(self.density, x.size)
        chosen = hashing.permuted(jnp.arange(k, dtype=jnp.int32), x.size, key)
        drawn = x.at[chosen].get(unique_indices=True)
        sums, kept = settle(drawn, *self.inner.reduce(drawn, state.inner, axis_name))
        kept = kept.whole(drawn)
        # A reducer that sends everything masks nothing, but here only drawn coordinates are sent.
        sent = (kept.residual != drawn) | (drawn == 0) if kept.sent is None else kept.sent
        total = filled(x.size, jnp.float32(0), chosen)
        total = total.at[chosen].set(sums.total, unique_indices=True)
        delivered = Sums(total, jnp.count_nonzero(sums.total), sums.overflow, is_settled=True)
        draws = RandomKState(state.draws + jnp.uint32(1), kept.state)
        return delivered, Kept(kept.residual, sent, draws, chosen)
