"""Training on an island: local steps, and beside them a thread that exchanges with others.

The way of a round: `__call__` makes steps. After `every`, `_begin` has `Member.begin` compute a
message, and a `RunningExchange` calls `Round.advance`: it posts, asks `Rounds.decide`, reads
what counts, and computes the next round's parameters (`_absorb`, `Arithmetic.outer_step`). After
`overlap` more steps `_finish` takes these, with the moves made meanwhile (`Member.finish`). `join`
replays the rounds since a snapshot in the same way, without a message.
"""

import functools
import math
import numbers
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.arrays.settings import Stages, check_function, static_count, static_float
from jaxsparse.feedback import Exchange
from jaxsparse.islands.arithmetic import Arithmetic, Shared, has_residual, structs
from jaxsparse.islands.life import Report
from jaxsparse.islands.member import IslandState, Member
from jaxsparse.islands.processes import is_first, lead
from jaxsparse.islands.records import WEIGHTS
from jaxsparse.islands.round import Round
from jaxsparse.islands.store import Objects, UnreachableError
from jaxsparse.islands.threads import Asking, RunningExchange, Silence
from jaxsparse.outer.local_steps import params_of
from jaxsparse.outer.worker import Pick, Step, check_memory, stepped


class Status(NamedTuple):
    """How an island stands."""

    name: str  #: its name
    #: a word that its messages and decisions carry beside the name. It changes at `join`.
    life: str
    round: int  #: the round that it is in
    rounds: tuple[Report, ...]  #: reports of the last 1,000 rounds, the oldest first
    counted: int  #: in how many rounds its message counted, of those that it posted in
    posted: int  #: in how many rounds it posted
    sent: int  #: bytes of its messages
    received: int  #: bytes of the messages that it read
    waiting: float  #: the seconds that training has waited for exchanges
    #: why an exchange that is running does not go on: what the store said last, if it does not
    #: answer or shows what can't be read, or that fewer than `quorum` islands are there. Of several
    #: processes, the first one knows.
    trouble: str | None


class Islands:
    """Trains on one of several islands, which exchange displacements through a store.

        store = jaxsparse.islands.Store("s3://bucket/run-7")
        exchange = jaxsparse.quantized("int4", gather=True, axis_name=None)
        optimizer = optax.sgd(0.7, 0.6, nesterov=True)
        train = jaxsparse.islands.Islands(step, exchange, optimizer, store, name="oslo", every=30)
        state = train.join((params, tx.init(params)))
        for batch in batches:
            state, loss = train(state, batch)
        state = train.leave(state)

    Each island is a JAX program of its own: it may start late, die, come back, or be slow. Others
    go on without it. After `every` steps of its own it sends its displacement, global parameters
    less its own, as one message. Then whoever sees that all who are expected have sent theirs, or
    that `quorum` have and `grace` seconds are over, decides whose messages count. All read these,
    add them up in the decision's order, and give the mean to `optimizer`. So all have the same
    parameters, bit for bit, though none are sent.

    An island that is late sends its displacement in the round that is open then. `join` reads the
    newest snapshot, and replays the decisions since. A thread exchanges beside `overlap` more
    steps, whose moves are kept. The logger "jaxsparse.islands" has a line for each round.
    docs/islands.md has failures, schedules, and islands of several processes. Quorum, grace and
    weights are those of Decoupled DiLoCo (arXiv 2604.21428).

    Args:
        step: `step(state, batch)` returns the next state and anything to be shown. It is called as
            it is: compile it yourself, over the island's own devices.
        exchange: the exchange of displacements, of one message and made with `axis_name=None`:
            `dense`, `top_k`, `chunked_top_k`, `dgc`, `dragonn`, `ms_topk`, `demo`,
            `quantized(gather=True)`, or a `partition` of these. Where uncompressed leaves matter,
            compress all (`is_dense=lambda *_: False`): they have no residual.
        optimizer: the Optax optimizer that applies their mean, see `jaxsparse.LocalSteps`.
            Schedules count rounds.
        store: where islands meet.
        name: this island's name: letters, digits, "-" and "_".
        every: local steps in a round, H. Islands may differ in it.
        quorum: the least number of islands that decide on a round. With fewer, all wait.
        grace: seconds after its own message, after which an island no longer waits for those that
            were in time in the last round. An island that dies costs the others this time, once.
            One that is slower by less makes all as slow.
        overlap: number of steps that are made beside an exchange, less than `every`.
        fragments: number of parts that the parameters are cut into, by the rule of
            `jaxsparse.outer.Streaming`. A round exchanges one of them, so that each is exchanged
            once in `fragments * every` steps.
        snapshots: rounds from one snapshot to the next. The island whose turn it is writes it, in a
            thread, from a copy on the host.
        norm_bound: largest l2 norm of a message, over the median of those that count, of at least
            1. A larger one is left out of the sum on all islands, and its sender begins anew from
            the global parameters. All islands must agree. None: none.
        age_bound: number of rounds after which an island no longer sends what it owes, as after it
            slept, and drops that. None: none.
        weighted: whether messages count by weights, which each call of a step gives, such as its
            number of tokens. All islands must agree.
        params: function that picks the parameters from a state, see `jaxsparse.LocalSteps`.
        loss: function that picks the loss, a scalar, from the second result of `step`. The means of
            rounds stand in the run's log, for `python -m jaxsparse islands`. None: no losses there.
        poll: seconds from one look at the store to the next.
        patience: seconds without an answer from the store, or without one that can be read, after
            which training, or `join`, ends with an error. So long `leave` waits for others.
            (Training waits for a quorum without end.)
        alone: number of steps that an island goes on beyond `overlap` while the store does not
            answer.

    Raises:
        ValueError: from `join`, `exchange` is none, or not of one message; `optimizer` needs a loss
            or changes the arrays of its state; the state is another island's, or another
            optimizer's; the store holds another run; or parameters are not on devices of all
            processes of this island.
        RuntimeError: from `join`, processes of this island differ. From a call, another process
            has joined under its name, or processes give unequal weights.
        ConnectionError: the store does not answer for `patience` seconds.
    """

    def __init__(
        self,
        step: Step,
        exchange: Exchange,
        optimizer: optax.GradientTransformation,
        store: Objects,
        *,
        name: str,
        every: int,
        quorum: int = 1,
        grace: float = 60.0,
        overlap: int = 0,
        fragments: int = 1,
        snapshots: int = 10,
        norm_bound: float | None = None,
        age_bound: int | None = None,
        weighted: bool = False,
        params: Pick | None = None,
        loss: Callable[[Any], Any] | None = None,
        poll: float = 0.2,
        patience: float = 600.0,
        alone: int = 0,
    ) -> None:
        if isinstance(every, Stages):
            raise ValueError(
                f"every={every} changes during training, and islands take one number of steps: "
                "give one. To go on with another, leave, and join with the state that leave "
                "returned by an Islands of the same name"
            )
        counts = {"every": every, "quorum": quorum, "snapshots": snapshots, "fragments": fragments}
        for label, count in counts.items():
            static_count(label, count)
        for label, count in (("overlap", overlap), ("alone", alone)):
            static_count(label, count, 0)
        if norm_bound is not None and not static_float("norm_bound", norm_bound) >= 1:
            raise ValueError(
                f"norm_bound={norm_bound} must be at least 1, or None: messages below the median "
                "always count"
            )
        if age_bound is not None:
            static_count("age_bound", age_bound)
        if overlap >= every:
            raise ValueError(
                f"overlap={overlap} must be less than every={every}: an exchange must arrive "
                "before the next one begins"
            )
        if weighted and fragments > 1:
            raise ValueError(
                f"weighted=True and fragments={fragments}: a fragment moves in more steps than the "
                "round that sends it has, so weights of rounds would be wrong: leave one out"
            )
        for label, seconds in (("grace", grace), ("poll", poll), ("patience", patience)):
            if not static_float(label, seconds) >= 0:
                raise ValueError(f"{label}={seconds} must be a number of seconds, at least 0")
        if isinstance(store, (str, os.PathLike)):
            raise ValueError(f"store={store!r} is a text: give jaxsparse.islands.Store({store!r})")
        operations = ("create", "get", "names", "delete")
        is_store = all(callable(getattr(store, each, None)) for each in operations)
        if isinstance(store, type) or not is_store:
            raise ValueError(
                f"store={store!r} is no store: give jaxsparse.islands.Store(url), as with "
                f'url="s3://bucket/run-7", or an object with the operations {operations}'
            )
        check_function("step", step, "state", "batch")
        check_function("params", params or params_of, "state")
        if loss is not None:
            check_function("loss", loss, "out")
        self._settings = {
            "name": name, "every": every, "quorum": quorum, "grace": grace, "overlap": overlap,
            "fragments": fragments, "snapshots": snapshots, "weighted": weighted, "poll": poll,
            "patience": patience, "alone": alone,
            "norm_bound": norm_bound, "age_bound": age_bound,
        }  # fmt: skip
        self._step, self._every, self._overlap, self._alone = step, every, overlap, alone
        self._is_weighted, self._fragments = weighted, fragments
        self._patience, self._silence = patience, functools.partial(Silence, poll, patience)
        # Numbers of members, and fragments, for which programs are compiled.
        self._prepared = {(0, part) for part in range(fragments)}
        self._member = Member(
            Arithmetic(exchange, optimizer, params or params_of, weighted, fragments, norm_bound),
            store,
            name,
            quorum=quorum,
            grace=grace,
            snapshots=snapshots,
            age_bound=age_bound,
            beside=self._write,
        )
        self._running: RunningExchange | None = None
        self._writing: Asking | None = None  # a snapshot
        self._waiting = 0.0
        self._round = 0  # that it is in
        self._has_joined = False  # and may train. Not if `leave` has left an exchange on its way
        self._loss_of = loss
        self._losses: list[Any] = []  # of steps, none of which has to wait for it
        self._is_checked = False  # whether the step returned what it must

    def like(self, state: Any) -> IslandState:
        """Shapes, dtypes and shardings of this island's state, made of a training state.

        It asks no store. Give it to Orbax as the target, and what Orbax reads to `join`:

            saved.restore(step, args=orbax.checkpoint.args.StandardRestore(train.like(state)))
        """
        worker, shared = structs((state, self._member.arithmetic.start(state)))
        return IslandState(worker, shared.params, shared.outer, 0, 0, 0.0, self._member.rank)

    def join(self, state: Any) -> IslandState:
        """The state to go on from: of the run in the store, or the first state of a new run.

        It takes a training state, or the `IslandState` that this island saved, and donates neither.
        """
        check_memory(state)
        self._has_joined = False
        # Else it would go on in the name of the new life.
        if self._running is not None and not self._running.stop(max(1.0, self._patience)):
            raise UnreachableError(
                f"{self._member.rounds.store} has not answered a request of the last life of "
                f"{self._member.name} for {self._patience:g} s, and it can't join before that"
            )
        self._running = None
        joined = self._member.join(state, self._settings, self._try)
        self._round, self._has_joined = joined.round, True
        return joined

    def _try(self, ask: Callable[[], Any], at: Callable[[], Any] = lambda: None) -> Any:
        """Calls a function until the store answers. `at()` is how far it has come."""
        silence = self._silence()
        while True:
            try:
                return ask()
            except UnreachableError as error:
                if is_first() and silence.said is None:
                    warnings.warn(
                        f"{self._member.name} can't join yet, and tries for {self._patience:g} s: "
                        f"{error}",
                        stacklevel=5,
                    )
                lead(silence.note, error, at())
            time.sleep(silence.wait)

    def __call__(
        self, state: Any, batch: Any, weight: float | None = None
    ) -> tuple[IslandState, Any]:
        """One step, and what is due of an exchange.

        Args:
            state: from `join`, or from the call before. A first state, as a trainer makes it, goes
                through `join`, so that an `Islands` stands where a trainer's jitted step stood.
            batch: the batch of this island's step.
            weight: what the step counts in the mean, above 0, if `weighted`. It counts also if the
                step changes nothing, and is dropped with its moves if these are not finite. It is
                that of the whole island: the same number in all of its processes.
        """
        if (weight is not None) != self._is_weighted:
            raise ValueError(
                f"weight={weight}, but weighted={self._is_weighted}: give each step a weight "
                "if messages are weighted, and none if not"
            )
        if weight is not None:
            weight = _checked(weight)
        if not isinstance(state, IslandState):
            if self._has_joined:
                raise ValueError(
                    f"state is a {type(state).__name__}, but {self._member.name} has joined: give "
                    "the one that join or the last call returned"
                )
            state = self.join(state)
        self._check(state)
        step = self._step if self._is_checked else functools.partial(stepped, self._step)
        (worker, out), self._is_checked = step(state.worker, batch), True
        if self._loss_of is not None:
            self._losses.append(loss := self._loss_of(out))
            is_number = isinstance(loss, numbers.Real | jax.Array | np.ndarray)
            if not is_number or jnp.shape(loss) != ():
                found = f"{jnp.shape(loss)} values" if is_number else repr(loss)
                raise ValueError(f"loss picks {found} of a step: pick one scalar")
        weighs = state.weight + (weight or 0.0)
        state = state._replace(worker=worker, steps=state.steps + 1, weight=weighs)
        if state.steps >= self._overlap:
            state = self._wait(state)
        if self._running is None and state.steps >= self._every:
            state = self._begin(state)
            if self._overlap == 0:
                state = self._wait(state)
        return state, out

    def _check(self, state: IslandState) -> None:
        """Raises ValueError unless it is the state that this life goes on from."""
        name = self._member.name
        if not self._has_joined:
            raise ValueError(f"{name} has not joined: go on with the state that join returns")
        if state.round != self._round:
            raise ValueError(
                f"the state is of round {state.round}, and {name} is in round {self._round}: give "
                "the one that the last call returned. If an interrupt has lost that, join with this"
            )

    def leave(self, state: IslandState, patience: float | None = None) -> IslandState:
        """Ends training on this island: exchanges what it still has to say, and waits for that.

        A message that others have not waited for is sent again. If there is no decision in time,
        because others are still in their steps or fewer than `quorum` islands are left, it warns,
        and the returned state still owes what it moved. What it has sent counts all the same, if
        others decide on that round later. It also warns of moves that came late and are lost, where
        `exchange` keeps no residual.

        Args:
            state: from the last call.
            patience: seconds that this may take, such as a machine has that is taken back. None:
                those of `Islands` for each exchange, and an error if the store is silent as long.
        """
        if patience is not None and not static_float("patience", patience) >= 0:
            raise ValueError(f"patience={patience} must be a number of seconds, at least 0")
        self._check(state)
        began = time.monotonic()

        def left() -> float:
            if patience is None:
                return self._patience
            return max(0.0, began + patience - time.monotonic())

        # Without steps, all fragments but the last one have moves. So has the state of a life that
        # ended in an exchange.
        part, parts, is_owed = self._member.rounds.part, self._fragments, state.steps > 0
        if self._running is None and not is_owed:
            is_owed = bool(self._member.arithmetic.has_moved(state.worker, state.params))
        state = self._finish(state, left())
        owed = set(range(parts)) if is_owed or state.steps or parts > 1 else set()
        lost = set[int]()
        for _ in range(3 * parts):  # others may be faster each time
            if not owed or self._running is not None:
                break
            round = state.round
            state = self._finish(self._begin(state), left())
            reports = [each for each in self._member.reports if each.round >= round]
            shared, one = Shared(state.params, state.outer), part(round)
            is_late = any(each.round == round and not each.counted for each in reports)
            if is_late and not self._member.arithmetic.keeps_all(shared, one):
                lost.add(one)
            owed -= {part(each.round) for each in reports if each.counted}
            if self._running is None and not has_residual(shared, [one]):
                owed.discard(one)
        if patience is None and self._running is not None and lead(self._running.is_silent):
            state = self._finish(state)  # it has an end of its own, of `patience` seconds
        if self._running is not None:
            self._running.stop(left())
            # Another message of this life in this round would not be sent.
            self._has_joined = False
            warnings.warn(
                f"{self._member.name} leaves in round {state.round}, whose decision it has waited "
                f"for in vain for {time.monotonic() - began:.0f} s: what it has sent counts if "
                "others decide later, and the rest is in its own state alone. To go on, give that "
                "to join",
                stacklevel=2,
            )
        elif owed or lost:
            warnings.warn(
                f"{self._member.name} leaves in round {state.round}, and others decided without "
                f"its messages: of {parts} fragments, what it moved of {sorted(owed)} is in its "
                f"own state alone, and what it moved of {sorted(lost)} is lost where exchange "
                "keeps no residual, as of uncompressed leaves",
                stacklevel=2,
            )
        lead(self._await_snapshot, left())
        return state

    def status(self) -> Status:
        """How this island stands."""
        member, running = self._member, self._running
        return Status(
            member.name,
            member.rounds.life,
            self._round,
            tuple(member.reports),
            *member.totals,
            self._waiting,
            None if running is None else running.trouble,
        )

    def _begin(self, state: IslandState) -> IslandState:
        losses, self._losses = self._losses, []
        state, exchange = self._member.begin(state, _mean(losses))
        if exchange is not None:
            self._running = RunningExchange(exchange, self._silence())
        return state

    def _wait(self, state: IslandState) -> IslandState:
        """As `_finish`, unless the store does not answer and the island may go on alone."""
        over = state.steps - self._overlap
        if self._running is None or (over < self._alone and lead(self._running.is_stuck)):
            return state
        return self._finish(state)

    def _finish(self, state: IslandState, seconds: float = math.inf) -> IslandState:
        if self._running is None:
            return state
        began = time.monotonic()
        exchange = self._running.result(seconds)
        self._waiting += time.monotonic() - began
        if exchange is None:
            return state
        part = self._member.rounds.part(state.round)
        # An interrupt on the way leaves all as it was, or a state that is refused.
        state = self._member.finish(state, exchange)
        self._round, self._running = state.round, None
        if not exchange.is_late:  # else its message is another fragment's
            self._prepare(exchange, part)
        return state

    def _write(self, write: Callable[[], None]) -> None:
        """Writes a snapshot beside training, unless the last one is on its way: they are large."""
        if self._await_snapshot(0.0):
            self._writing = Asking(write, self._silence(), name="islands-snapshot")
            self._writing.start()

    def _await_snapshot(self, seconds: float) -> bool:
        """Waits until none is on its way, at most so long. Returns whether that is so."""
        if (writing := self._writing) is None:
            return True
        if not writing.wait(seconds):
            return False
        self._writing = None
        if writing.error is not None:  # others write theirs
            warnings.warn(
                f"{self._member.name} could not write its snapshot, and leaves it out: "
                f"{writing.error}",
                stacklevel=2,
            )
        return True

    def _prepare(self, exchange: Round, part: int) -> None:
        """Compiles for a member fewer than in the last round, beside training.

        Else the first round after the death of a member would wait for that, after `grace`.
        """
        members = len(self._member.reports[-1].members) if self._member.reports else 0
        self._prepared.add((members, part))
        fewer = members - 1, part
        if self._member.rounds.quorum <= fewer[0] and fewer not in self._prepared:
            self._prepared.add(fewer)
            threading.Thread(
                target=self._member.arithmetic.prepare,
                args=(*fewer, exchange.begun, exchange.shared),
                name="islands-compile",
            ).start()


def _checked(weight: Any) -> float:
    """A step's weight. ValueError: it is no number, or out of range."""
    try:
        weight = float(weight)
    except (TypeError, ValueError):
        raise ValueError(
            f"weight={weight!r} must be a number, such as the step's number of tokens"
        ) from None
    if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
        raise ValueError(f"weight={weight} must lie in {list(WEIGHTS)}")
    return weight


def _mean(losses: list[Any]) -> float | None:
    """The mean of scalars, or None if there are none or it is not finite."""
    mean = sum(map(float, losses)) / len(losses) if losses else math.nan
    return mean if math.isfinite(mean) else None
