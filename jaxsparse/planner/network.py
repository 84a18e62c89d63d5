"""The alpha-beta model: the time of an exchange on a link of some latency and bandwidth."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from jaxsparse.arrays.settings import static_count, static_float
from jaxsparse.comm.links import Link as Link, rounds as rounds
from jaxsparse.planner.profiles import Measured
from jaxsparse.traffic import WireBytes


class Timing(NamedTuple):
    """One measured collective."""

    op: str  # XLA's opcode
    workers: int  # number of workers in its group
    received: float  # bytes that a worker receives, as `jaxsparse.wire_bytes` counts them
    seconds: float  # median time until the last worker is done

    @property
    def rounds(self) -> int:
        """The number of sequential messages."""
        return rounds(self.op, self.workers)

    def checked(self) -> "Timing":
        """The same in plain Python types.

        Raises:
            ValueError: the op is unknown, the workers are below 1, the time is not positive, the
                bytes are negative, or a number is not finite.
        """
        checked = Timing(
            str(self.op),
            static_count("workers", self.workers),
            static_float("received", self.received),
            static_float("seconds", self.seconds),
        )
        _ = checked.rounds  # raises if the op is unknown
        if not (0 < checked.seconds < math.inf and 0 <= checked.received < math.inf):
            raise ValueError(f"{checked} must have a positive time, and bytes of at least 0")
        return checked


_OPS = ("all_reduce", "all_gather", "all_to_all", "collective_permute", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Network(Measured):
    """A link for each kind of collective, because libraries run some kinds better than others.

    Attributes:
        link: link of single messages, and of kinds without a link of their own.
        all_reduce: link of sums and maxima over workers. None, here and below: not measured.
        all_gather: link of all-gathers.
        all_to_all: link of all-to-alls.
        collective_permute: link of permutations.
        reduce_scatter: link of reduce-scatters.
        workers: number of workers in the measurement. None: unknown.
        timings: times that the links were fitted to.

    Raises:
        ValueError: a link is no `Link`, or a timing has no positive time.

    Example:
        >>> network = Network(Link(latency=0.25, bandwidth=8.0))
        >>> network.of("all-gather").latency
        0.25
    """

    kind: ClassVar[str] = "networks"
    units: ClassVar[dict[str, str]] = {
        "links": "latency in seconds, bandwidth in bytes a second",
        "timings": "op, workers, bytes received, seconds",
    }
    how: ClassVar[str] = "jaxsparse.planner.measure_network(mesh), and save() it"

    link: Link = Link()  # noqa: RUF009
    all_reduce: Link | None = None
    all_gather: Link | None = None
    all_to_all: Link | None = None
    collective_permute: Link | None = None
    reduce_scatter: Link | None = None
    workers: int | None = None
    timings: tuple[Timing, ...] = ()

    def __post_init__(self):
        for name in ("link", *_OPS):
            given = getattr(self, name)
            if isinstance(given, Mapping):  # from a file
                given = Link(**given)
                object.__setattr__(self, name, given)
            if not isinstance(given, Link) and (name == "link" or given is not None):
                raise ValueError(f"{name}={given!r} must be a Link(latency=..., bandwidth=...)")
        if self.workers is not None:
            object.__setattr__(self, "workers", static_count("workers", self.workers))
        timings = tuple(Timing(*timing).checked() for timing in self.timings)
        object.__setattr__(self, "timings", timings)

    def of(self, op: str) -> Link:
        """The link for collectives with XLA's opcode `op`, for example `all-reduce`."""
        own = getattr(self, op.removeprefix("ragged-").replace("-", "_"), None)
        return own if isinstance(own, Link) else self.link

    def seconds(self, moved: WireBytes) -> float:
        """Time of all collectives of a program, in sequence.

        Args:
            moved: result of `jaxsparse.wire_bytes` or `jaxsparse.traffic.traced_bytes`. The dearest
                branch of a conditional counts.

        Returns:
            The sum, over collectives, of `rounds` times latency plus received bytes over bandwidth.
        """
        total = 0.0
        for each in moved.collectives:
            if each.group_size > 1:
                waits = rounds(each.op, each.group_size)
                total += each.count * self.of(each.op).seconds(waits, each.received_bytes)
        return total
