"""What every selection asks of its arguments."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Integer, UInt32

from jaxsparse.hashing import as_uint32
from jaxsparse.settings import static_int


def check_vector(name: str, x: Array) -> None:
    """Raises ValueError unless `x` is a vector whose indices, and its size, fit into int32."""
    if x.ndim != 1:
        raise ValueError(f"{name} has shape {x.shape}, but must be a vector: pass {name}.ravel()")
    if x.size >= 2**31:
        raise ValueError(
            f"{name} has {x.size} elements, but indices are int32: split it into vectors of less "
            "than 2**31 (bucket_size of a transformation does)"
        )


def check_k(k: int, size: int, limit: str | None = None) -> int:
    """The number of elements to keep as an int; a ValueError unless it is one, 1 <= k <= size.

    Call it outside `jax.jit`, which takes True for 1 once it has seen that.

    Args:
        k: a Python or NumPy int.
        size: the largest k.
        limit: how the error names it; None: as the vector's size.
    """
    k = static_int("k", k)
    if not 1 <= k <= size:
        limit = limit or f"the vector's size, {size}"
        raise ValueError(f"k={k} must lie between 1 and {limit}: choose it there")
    return k


def check_seed(seed: Integer[Array, ""] | int) -> UInt32[Array, ""]:
    """The seed as uint32; a ValueError unless it is an int or an integer scalar."""
    dtype = jnp.int32 if type(seed) is int else getattr(seed, "dtype", None)
    if dtype is None or jnp.ndim(seed) or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"seed={seed!r} must be an integer scalar: pass an int or a uint32")
    return as_uint32(seed)


def check_slots(slots: int, size: int) -> int:
    """The number of slots as an int; a ValueError unless it is from 1 to `size`."""
    slots = static_int("slots", slots)
    if not 1 <= slots <= size:
        raise ValueError(
            f"slots={slots} must lie between 1 and the vector's size, {size}: choose "
            "density * size, rounded up"
        )
    return slots
