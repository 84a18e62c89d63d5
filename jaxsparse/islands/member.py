"""One island: how it joins, and how a round begins and ends for it.

All of this blocks for the store alone, and waits for nobody. All processes of an island do the
same, and the first of them asks the store: see `processes`.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.islands import snapshots as stored
from jaxsparse.islands.arithmetic import Shared
from jaxsparse.islands.life import Life
from jaxsparse.islands.processes import check_alike, check_weight, lead
from jaxsparse.islands.round import Round
from jaxsparse.outer.worker import check_unpacked


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


class Member(Life):
    """An island as a member of a run: how it joins, and how its rounds begin and end."""

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
        if exchange.is_dropped:  # then what this state had moved is dropped, too
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
