"""The union of the workers' supports, as an OR of bit masks (OmniReduce, S2 Reducer)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from jaxsparse.arrays import bits
from jaxsparse.comm import wire


def union(mask: Bool[Array, " blocks"], axis_name: str | None) -> Bool[Array, " blocks"]:
    """The elements that are True on any worker.

    Masks travel as bits, 32 to a word. Each worker combines one of W ranges and sends the result to
    all: an all-to-all and an all-gather, with 2 (W - 1)/W words for every 32 elements. If it takes
    no more words (two workers, tiny masks), workers gather whole masks instead.

    JAX has no all-reduce that ORs. An all-reduce of counts would need floor(log2 W) + 1 bits an
    element, so that they don't carry into each other. Recursive doubling would take log2 W words
    for every 32 elements.
    """
    if mask.ndim != 1 or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask has shape {mask.shape} and dtype {mask.dtype}, but must be a bool vector: pass "
            "x != 0, or jaxsparse.arrays.blocks.non_zero(x, block_size)"
        )
    workers = wire.axis_size(axis_name)
    if not mask.size or axis_name is None:
        return mask
    packed = bits.pack_bits(mask)
    if _is_gathered_whole(packed.size, workers):
        combined = _any(wire.all_gather(packed, axis_name))
    else:
        ranges = jnp.pad(packed, (0, -packed.size % workers)).reshape(workers, -1)
        own = _any(wire.all_to_all(ranges, axis_name))
        combined = wire.all_gather(own, axis_name).reshape(-1)[: packed.size]
    return bits.unpack_bits(combined, mask.size)


def _is_gathered_whole(words: int, workers: int) -> bool:
    return words <= 2 * -(-words // workers)


def _any(masks: UInt32[Array, "n words"]) -> UInt32[Array, " words"]:
    return jnp.bitwise_or.reduce(masks, axis=0)
