"""The alpha-beta model: what an exchange takes on a link of given latency and bandwidth."""

import dataclasses
from typing import NamedTuple


class Traffic(NamedTuple):
    """What one worker has to wait for and to receive."""

    rounds: int  # messages one after the other, each of which costs the latency
    words: float  # 4-byte words that it receives

    def __add__(self, other: object) -> "Traffic":
        """One exchange after the other."""
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.rounds + other.rounds, self.words + other.words)


@dataclasses.dataclass(frozen=True)
class Link:
    """A worker's connection to the others.

    Attributes:
        latency: seconds before a message arrives, the model's alpha.
        bandwidth: bytes a second, of which 4 take the model's beta.

    Example:
        >>> Link(latency=0.25, bandwidth=8.0).seconds(Traffic(rounds=2, words=4))
        2.5
    """

    latency: float = 50e-6
    bandwidth: float = 1.25e9

    def __post_init__(self):
        for name in ("latency", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    def seconds(self, traffic: Traffic) -> float:
        """Rounds times latency and words over bandwidth."""
        return traffic.rounds * self.latency + 4 * traffic.words / self.bandwidth


def dense_all_reduce(size: int, workers: int) -> Traffic:
    """A ring all-reduce of `size` words (reduce-scatter, then all-gather)."""
    return Traffic(2 * (workers - 1), 2 * (workers - 1) / workers * size)
