"""Sorts the entries of a stream by ranges of their indices."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@functools.cache
def sorter(count: int) -> Callable[..., tuple[Array, Array, Array]]:
    """A function that sorts arrays along their last axis, by the last array's ints < `count`."""

    @jax.custom_batching.custom_vmap
    def in_order(*arrays: Array) -> tuple[Array, ...]:
        ranges = arrays[-1]

        def sort() -> tuple[Array, ...]:
            order = order_of(ranges, count)
            take = lambda x: jnp.take_along_axis(x, order, axis=-1, mode="promise_in_bounds")
            return tuple(map(take, arrays))

        # Many selections are already sorted.
        is_sorted = jnp.all(ranges[..., 1:] >= ranges[..., :-1])
        return jax.lax.cond(is_sorted, lambda: arrays, sort)

    @in_order.def_vmap
    def rows_in_order(axis_size, in_batched, *arrays):
        # Under vmap, a cond for each row would become a select and sort all rows.
        spread = lambda x, yes: x if yes else jnp.broadcast_to(x, (axis_size, *x.shape))
        return in_order(*map(spread, arrays, in_batched)), (True,) * len(arrays)

    return in_order


def order_of(ranges: Int[Array, "*rows k"], count: int) -> Int[Array, "*rows k"]:
    """The slots in the order of their ranges, which are numbers below `count`."""
    slots = jax.lax.broadcasted_iota(jnp.uint32, ranges.shape, ranges.ndim - 1)
    slot_bits = (ranges.shape[-1] - 1).bit_length()
    if (count - 1).bit_length() + slot_bits > 32:
        return jax.lax.sort((ranges, slots.astype(jnp.int32)), num_keys=1)[1]
    # XLA on CPU sorts one array 9 times faster than two.
    keys = (ranges.astype(jnp.uint32) << jnp.uint32(slot_bits)) | slots
    mask = jnp.uint32((1 << slot_bits) - 1)
    return (jax.lax.sort(keys, is_stable=False) & mask).astype(jnp.int32)
