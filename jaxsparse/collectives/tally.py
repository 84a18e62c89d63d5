"""A count that rides along in the last word of a message, and so takes no round of its own."""

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32


def with_count(
    message: UInt32[Array, " words"], count: Int[Array, ""] | None
) -> UInt32[Array, " words+1"]:
    """The message with this worker's count behind it; None adds nothing."""
    if count is None:
        return message
    return jnp.concatenate([message, count.astype(jnp.uint32)[None]])


def split_counts(
    messages: UInt32[Array, "n words+1"], is_counted: bool
) -> tuple[UInt32[Array, "n words"], Int[Array, ""]]:
    """The messages of n workers without their counts, and the sum of these, or 0."""
    if not is_counted:
        return messages, jnp.int32(0)
    return messages[:, :-1], jnp.sum(messages[:, -1]).astype(jnp.int32)
