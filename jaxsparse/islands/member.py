"""One island: how it joins, and how a round begins and ends for it.

All of this blocks for the store alone, and waits for nobody. All processes of an island do the
same, and the first of them asks the store: see `processes`.
"""

import functools
import logging
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.arrays.layout import narrow
from jaxsparse.islands import snapshots as stored
from jaxsparse.islands.arithmetic import Arithmetic, Begun, Shared
from jaxsparse.islands.processes import check_alike, check_weight, lead
from jaxsparse.islands.protocol import Rounds
from jaxsparse.islands.round import Report, Round
from jaxsparse.islands.store import Objects, check_name
from jaxsparse.outer.worker import check_unpacked

_LOG = logging.getLogger("jaxsparse.islands")  # a line for each round
_KEPT = 1000  # reports


class IslandState(NamedTuple):
    """The training state of an island. Save it as it is: with it an island goes on where it was."""

    worker: Any  #: the island's own training state
    #: the global parameters at the start of the round, equal on all islands, in float32 or wider
    #: Evaluate these.
    params: Any
    outer: Any  #: the states of the exchange, with this island's residual, and of the optimizer
    round: int  #: the number of the round, int
    steps: int  #: steps since the round began, int
    weight: float  #: total weight of the steps since its last counted message, float
    #: a number made of the island's name, int. What a state owes counts once, so no other island
    #: may go on from it.
    island: int
    owed: float = 0.0  #: the part of `weight` of steps whose moves are in the residual, float


class Member:
    """An island's settings, see `Islands`, and what it knows in this life.

    Members in one process may share `arithmetic`. `beside` is given functions that write a
    snapshot, and calls them beside training. `clock` tells seconds, for differences alone.
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
        beside: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arithmetic, self.clock, self.beside = arithmetic, clock, beside
        self.name, self.every_snapshot = check_name(name), snapshots
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

    def join(
        self,
        state: Any,
        settings: Mapping[str, Any] = {},
        tries: Callable[..., Any] = lambda ask, at=None: ask(),
    ) -> IslandState:
        """The state to go on from: the newest snapshot and decisions since, or the first of all.

        `settings` are what all processes of this island have in common besides, in JSON's types.
        `tries(ask, at)` calls a function until the store answers, and `at()` is how far that has
        come. For errors see `Islands`.
        """
        state, exchange = tries(lambda: self._begin_life(state, settings))
        tries(exchange.advance, lambda: exchange.round)
        if exchange.was_sent:  # more than this state knows of, so that what it had moved is dropped
            worker = self.arithmetic.put_back(state.worker, state.params)
            state = state._replace(worker=worker, steps=0, weight=0.0, owed=0.0)
        joined = self.finish(state, exchange)
        self._began = self.clock()
        return joined._replace(worker=self.arithmetic.copy(joined.worker))

    def _begin_life(self, state: Any, settings: Mapping[str, Any]) -> tuple[IslandState, Round]:
        """The state from which a life begins, and the replay of the rounds since."""
        check_unpacked(state, IslandState, "train.like(state)")
        is_saved = isinstance(state, IslandState)
        if is_saved and int(state.island) != self.rank:
            raise ValueError(
                f"the state is another island's than {self.name!r}. What it owes counts once, and "
                "under its own name: give it to that island, or join with state.worker"
            )
        worker = state.worker if is_saved else state
        shared, own = self.arithmetic.start(worker), self.arithmetic.pick(worker)
        if is_saved:
            self.arithmetic.check_optimizer_of(Shared(state.params, state.outer))
        words, digest = self.arithmetic.describe(shared, own)
        begins = {"digest of exchange and optimizer": digest, "round": "", "steps": ""}
        if is_saved:
            # Checkpoints make arrays of numbers.
            round, steps, weight = int(state.round), int(state.steps), float(state.weight)
            owed = float(state.owed)
            state = state._replace(round=round, steps=steps, weight=weight, owed=owed)
            begins |= {"round": f"{round}", "steps": f"{steps}"}
        check_alike({**settings, **begins}, [own, state.params] if is_saved else own)
        self.dtypes = jax.tree.map(jnp.result_type, own)
        self.rounds, self.is_restored = self._enter(settings=digest, words=words), is_saved
        if is_saved:
            stored.check_run(self.rounds, state.round)
        else:
            shared, round = stored.find_origin(self.rounds, shared)
            worker = self.arithmetic.put_back(worker, shared.params)
            state = IslandState(worker, *shared, round, 0, 0.0, self.rank)
        self.rounds.life = lead(self.rounds.begin_life)
        shared = Shared(state.params, state.outer)
        idle = self.begin_idle(shared, state.round)
        return state, Round(self, shared, state.round, idle, weight=state.owed, owed=state.owed)

    def begin(
        self, state: IslandState, loss: float | None = None
    ) -> tuple[IslandState, Round | None]:
        """Ends the local steps of a round: the state to go on from, and the exchange to advance.

        If parameters are not finite, there is no exchange: the island starts the round anew.
        """
        if self.arithmetic.is_weighted:
            check_weight(state.weight)
        shared = Shared(state.params, state.outer)
        begun = self._begin(self.arithmetic.pick(state.worker), *shared, state.round)
        took, self._began = self.clock() - self._began, self.clock()
        if not bool(begun.finite):
            self._tell_not_finite(state.round)
            worker = self.arithmetic.put_back(state.worker, state.params)
            return state._replace(worker=worker, steps=0, weight=state.owed), None
        weight = state.weight if self.arithmetic.is_weighted else 1.0
        weights = weight, state.owed
        exchange = Round(
            self, shared, state.round, begun, begun, *weights, took, loss, is_late=False
        )
        return state._replace(steps=0), exchange

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

    def finish(self, state: IslandState, exchange: Round) -> IslandState:
        """The state after an exchange, with the moves that the island made meanwhile."""
        if not exchange.is_done:
            raise RuntimeError(f"the exchange of round {exchange.round} is not at its end")
        shared = exchange.shared
        worker, finite = self.arithmetic.go_on(state.worker, exchange.begun, shared.params)
        # What the steps beside the exchange weigh goes with what they moved.
        beside = max(state.weight - exchange.weight, 0.0)
        if not bool(finite):
            self._tell_not_finite(exchange.round)
            state, beside = state._replace(steps=0), 0.0
        owed = exchange.owed_weight if self.arithmetic.is_weighted else 0.0
        weight, round = beside + owed, exchange.round
        return IslandState(worker, *shared, round, state.steps, weight, state.island, owed)

    def _tell_not_finite(self, round: int) -> None:
        warnings.warn(
            f"parameters of {self.name} are not finite in round {round}, or moved too far for "
            "float32: it starts the round anew from the global ones, and sends nothing of these "
            "steps",
            stacklevel=4,
        )

    def report(self, report: Report) -> None:
        """Keeps a report, and of older ones their numbers: a long run would fill the memory."""
        _LOG.info("%s: %s", self.name, report)
        counted, posted, sent, received = self.totals
        if report.sent:
            counted, posted, sent = counted + report.counted, posted + 1, sent + report.sent
        self.totals = counted, posted, sent, received + report.received
        self.reports.append(report)
        del self.reports[:-_KEPT]
