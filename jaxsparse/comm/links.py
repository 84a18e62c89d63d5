"""A link, and the time of messages on it: the alpha-beta model."""

import dataclasses
import math
from collections.abc import Callable

from jaxsparse.arrays.settings import static_count, static_float


@dataclasses.dataclass(frozen=True)
class Link:
    """A worker's connection to the others.

    Attributes:
        latency: seconds before a message arrives, the model's alpha.
        bandwidth: bytes a second. A 4-byte word takes the model's beta.

    Raises:
        ValueError: a value is not positive and finite.

    Example:
        >>> Link(latency=0.25, bandwidth=8.0).seconds(rounds=2, received=16)
        2.5
    """

    latency: float = 50e-6
    bandwidth: float = 1.25e9

    def __post_init__(self):
        for name in ("latency", "bandwidth"):
            value = static_float(name, getattr(self, name))
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be positive and finite")
            object.__setattr__(self, name, value)

    def seconds(self, rounds: float, received: float) -> float:
        """Time of `rounds` messages in sequence and of the bytes that a worker receives."""
        return rounds * self.latency + received / self.bandwidth


# The number of sequential messages of collectives of W workers, by XLA's opcode.
_ROUNDS: dict[str, Callable[[int], int]] = {
    "all-reduce": lambda W: 2 * (W - 1),
    "reduce-scatter": lambda W: W - 1,
    "all-gather": lambda W: W - 1,
    "all-to-all": lambda W: W - 1,
    "ragged-all-to-all": lambda W: W - 1,
    "collective-permute": lambda W: 1,
    "collective-broadcast": lambda W: (W - 1).bit_length(),
}


def rounds(op: str, workers: int) -> int:
    """The number of messages that a collective of `workers` sends in sequence.

    XLA's CPU backend (Gloo) and, except for small messages, NCCL sum and gather by rings. A ring
    takes 2 (W - 1) messages for an all-reduce, and W - 1 for an all-gather or a reduce-scatter
    (Gloo halves instead: ceil(log2 W)). An all-to-all posts W - 1 messages, whose costs at the
    sender and the receiver add up. A permutation is one message, a broadcast ceil(log2 W).

    The papers' formulas have ceil(log2 W) rounds for an all-gather. That is a tree, which neither
    library builds.

    Args:
        op: XLA's opcode, for example `all-reduce`.
        workers: number of workers in its group, W >= 1.

    Raises:
        ValueError: the opcode is unknown, or `workers` is below 1.
    """
    if op not in _ROUNDS:
        raise ValueError(f"op={op!r} is no collective of which rounds are known: {list(_ROUNDS)}")
    return _ROUNDS[op](static_count("workers", workers))
