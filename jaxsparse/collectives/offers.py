"""About the k largest elements, in their own order, in little more than one pass (Ok-Topk)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import select
from jaxsparse.select.thresholds import sample_size
from jaxsparse.stream import SparseStream, from_dense

# Slots for each of the k, so that more than they hold reach a sampled threshold in one of some
# thousand samples only.
_ROOM = 1.5


# Samples are read once for each bit of a magnitude, which takes a while from this size on.
_READS = 32
_LARGE = 2**17


def about_top_k(x: Float[Array, " d"], k: int) -> SparseStream:
    """The elements that reach a sampled threshold: on average k of them, k / 2 to 3 k / 2 + 1.

    Where more or fewer do, as among many that are equal, `select.fast_top_k` takes k; and where
    sampling a large vector would take longer, as for k below 2000. In increasing order of indices,
    but then. Slots without an entry have index d and value 0.

    Args:
        x: float32, without NaN.
        k: 1 <= k <= d.
    """
    if x.size >= _LARGE and _READS * sample_size(x.size, k) > x.size:
        return select.fast_top_k(x, k)
    capacity = min(int(_ROOM * k) + 1, x.size)
    threshold = select.sampled_threshold(x, k)
    indices = select.compact((jnp.abs(x) >= threshold) & (x != 0), capacity + 1)
    too_few = (indices[(k - 1) // 2] == x.size) & (threshold > 0)
    too_many = indices[capacity] < x.size

    def k_of_them() -> Array:
        chosen = select.fast_top_k(x, k).indices
        return jnp.pad(chosen, (0, capacity - k), constant_values=x.size)

    indices = jax.lax.cond(too_few | too_many, k_of_them, lambda: indices[:capacity])
    return from_dense(x, indices)
