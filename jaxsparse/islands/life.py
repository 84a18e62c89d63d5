"""What an island knows in its life: its settings, the store, and what became of its rounds."""

import functools
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxsparse.arrays.layout import narrow
from jaxsparse.islands.arithmetic import Arithmetic, Begun, Shared
from jaxsparse.islands.protocol import Rounds
from jaxsparse.islands.store import Objects, check_name

_LOG = logging.getLogger("jaxsparse.islands")  # a line for each round
_KEPT = 1000  # reports


class Report(NamedTuple):
    """What became of a round, seen from an island."""

    round: int  #: its number
    members: tuple[str, ...]  #: the islands whose messages counted
    counted: bool  #: whether this island's did
    #: seconds from its message to the decision, or None if it sent none in this round
    waited: float | None
    received: int  #: bytes of messages that it read
    sent: int  #: bytes of its own message
    applied: bool  #: whether the sum was applied. It is not, if it overflows.
    digest: str  #: digest of what islands share as the next round begins
    beyond: tuple[
        str, ...
    ] = ()  #: members whose messages were left out of the sum, see `norm_bound`

    def __str__(self) -> str:
        when = "replayed" if self.waited is None else f"decided after {self.waited:.1f} s"
        without = "" if self.counted or self.waited is None else ", without this island"
        without += "" if self.applied else ", not applied"
        without += f", {', '.join(self.beyond)} beyond the bound" if self.beyond else ""
        return (
            f"round {self.round} of {', '.join(self.members)}: {when}{without}, "
            f"{self.sent / 1e6:.2f} MB sent, {self.received / 1e6:.2f} MB received"
        )


class Life:
    """An island's settings, see `Islands`, and what it knows in this life.

    Those in one process may share `arithmetic`. `beside` is given functions that write a snapshot,
    and calls them beside training. `clock` tells seconds, for differences alone.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        store: Objects,
        name: str,
        *,
        quorum: int,
        grace: float,
        snapshots: int,
        age_bound: int | None = None,
        beside: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arithmetic, self.clock, self.beside = arithmetic, clock, beside
        self.name, self.every_snapshot, self.age_bound = check_name(name), snapshots, age_bound
        self.rank = zlib.crc32(name.encode()) & 0x7FFFFFFF
        self.reports: list[Report] = []  # of the last rounds
        self.totals = 0, 0, 0, 0  # rounds in which it counted, and sent; bytes sent, and received
        # Of this life, see `join`.
        self._enter = functools.partial(Rounds, store, name, quorum=quorum, grace=grace)
        self.rounds = self._enter(settings="", words=(0,))
        self.dtypes: Any = None  # of its own parameters
        # Whether it began from a saved state, and messages of a former life may have sent what that
        # owes: until one of these counts, or one of this life.
        self.is_restored = False
        self._began = 0.0  # when the last exchange began, or the first steps

    def begin_idle(self, shared: Shared, round: int) -> Begun:
        """An exchange that began right from the global parameters."""
        return self._begin(self._narrowed(shared.params), *shared, round)

    def begin_late(self, shared: Shared, round: int, begun: Begun) -> Begun:
        """An exchange of what an island owes, and had moved in this round's fragment by then."""
        own = self._narrowed(begun.origin) if begun.own is None else begun.own
        return self._begin(own, begun.origin, shared.outer, round)

    def _begin(self, own: Any, origin: Any, outer: Any, round: int) -> Begun:
        return self.arithmetic.begin(own, origin, outer, self.rank, part=self.rounds.part(round))

    def _narrowed(self, params: Any) -> Any:
        return jax.tree.map(narrow, params, self.dtypes)

    def report(self, report: Report) -> None:
        """Keeps a report, and of older ones their numbers: a long run would fill the memory."""
        _LOG.info("%s: %s", self.name, report)
        counted, posted, sent, received = self.totals
        if report.sent:
            counted, posted, sent = counted + report.counted, posted + 1, sent + report.sent
        self.totals = counted, posted, sent, received + report.received
        self.reports.append(report)
        del self.reports[:-_KEPT]
