"""Histories of islands, drawn at random, and what must hold in each of them.

Messages come late, in another order, or twice. Islands join, die, come back with a saved state or
without, sleep, are replaced while they sleep, and decide at the same time. Stores fail in the
middle, keep what they do not confirm, do not keep what they confirm, show old objects, list late,
damage what is read, are not mounted, and are out of reach for some. Clocks jump, and parameters are
not finite. In each history there is one decision a round, all have the same parameters bit for bit,
these follow from the messages that count, what an island has delivered and what it owes add up to
what it has moved, no earlier life counts after a later one, who waits has a reason, and a quorum
goes on.
"""

import collections
import warnings

import numpy as np
import reference_islands as reference
from hypothesis import HealthCheck, Phase, seed as seeded, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from jax.tree_util import keystr, tree_flatten_with_path

from jaxsparse.islands.arithmetic import Shared
from jaxsparse.islands.store import UnreachableError

NAMES = ("amsterdam", "bergen", "cork", "dover")
GRACE = 5.0
MOVES = st.lists(st.integers(-8, 8), min_size=reference.SIZE, max_size=reference.SIZE)
KINDS = ["messages", "decisions", "snapshots", "lives"]
ISLANDS = st.integers(0, len(NAMES) - 1)
ORDERS = st.permutations(range(len(NAMES)))


def away(state):
    """How far an island is from the global parameters."""
    return reference.flat(state.params) - reference.flat(state.worker[0])


class Island:
    """One of them, alive or not.

    Attributes:
        owed: what it has moved in this life, and owed before, less what messages that counted have
            delivered of it. With a residual's sign: what it still has to subtract.
        beside: what it has moved since its exchange began.
        weight: of its steps since the last message that counted.
        weight_owed: the part of it whose moves are in the residual.
        settled: the first round whose decision is not in `owed` yet.
        has_counted: whether a message of this life has counted.
        saved: a state, and what it owes, or None.
        is_spoilt: whether its own parameters are not finite.
        ahead: what its clock is ahead of time by.
    """

    def __init__(self, name, link):
        self.name, self.link, self.saved = name, link, None
        self.die()
        self.is_busy, self.is_spoilt, self.ahead = False, False, 0.0

    def die(self):
        self.member = self.state = self.exchange = None


class History(RuleBasedStateMachine):
    """A quorum of one. Whole numbers are moved, so that sums are exact."""

    quorum, unit, exchange, weighted, fragments = 1, 1.0, "top_k", False, 1

    def __init__(self):
        super().__init__()
        self.store, self.time = reference.Memory(), 0.0
        self.islands = [Island(name, reference.Link(self.store)) for name in NAMES]
        self.replaced = []  # islands that sleep, while another process goes on in their name
        self.jumped = 0.0  # seconds forward, all clocks together
        self.past = collections.deque(maxlen=12)  # objects that were there
        self.shared, self.digests = {}, {}  # what all have as a round begins, by round
        self.agreed = []  # parameters that were compared last
        settings = self.exchange, self.weighted, self.quorum, GRACE, self.fragments
        self.ledger = reference.Ledger(self.store, *settings)

    def member(self, link, name, island=None):
        return reference.member(
            link,
            name,
            lambda: self.time + (island.ahead if island else 0.0),
            programs=reference.arithmetic(self.exchange, self.weighted, self.fragments),
            quorum=self.quorum,
            grace=GRACE,
        )

    @initialize(count=st.integers(2, len(NAMES)))
    def begins(self, count):
        for i in range(count):
            self.join(i, False)

    @rule(i=ISLANDS, is_saved=st.booleans())
    def join(self, i, is_saved):
        island = self.islands[i]
        # Nobody can tell an empty folder from a new run.
        if island.member is not None or island.link.fault == "unmounted":
            return
        member = self.member(island.link, NAMES[i], island)
        saved, owed, *weights = (is_saved and island.saved) or (None, 0.0, 0.0, 0.0)
        try:
            first = reference.start(self.fragments) if saved is None else saved
            island.state = member.join(first)
        except UnreachableError:
            return
        island.member, island.life = member, member.rounds.life
        self.ledger.update()
        now = island.state.round
        if saved is not None and any(
            NAMES[i] in self.ledger.members(round) for round in range(saved.round, now)
        ):
            owed, weights, saved = 0.0, [0.0, 0.0], None  # some of it was sent
        island.owed, (island.weight, island.weight_owed) = np.zeros(reference.SIZE) + owed, weights
        island.beside, island.weight_beside = np.zeros(reference.SIZE), 0.0
        island.settled = now
        island.is_restored, island.has_counted = saved is not None, False
        island.is_spoilt = False
        self.balance(island)

    @rule(i=ISLANDS, by=MOVES)
    def train(self, i, by):
        self.trains(self.islands[i], by)

    def trains(self, island, by):
        i = NAMES.index(island.name)
        if island.member is None:
            return
        by, weight = np.float32(by) * np.float32(self.unit), float(1 + i) * self.weighted
        island.state = reference.moved(island.state, by)
        island.state = island.state._replace(weight=island.state.weight + weight)
        if island.is_spoilt:
            return  # all of this is dropped
        island.owed, island.beside = island.owed - by, island.beside - by
        island.weight, island.weight_beside = island.weight + weight, island.weight_beside + weight

    @rule(i=ISLANDS)
    def begin(self, i):
        self.begins_exchange(self.islands[i])

    def begins_exchange(self, island):
        has_steps = island.state.weight > 0 or not self.weighted if island.member else False
        if has_steps and island.exchange is None:
            island.state, island.exchange = island.member.begin(island.state)
            island.is_spoilt = False
            island.beside, island.weight_beside = np.zeros(reference.SIZE), 0.0

    @rule(i=ISLANDS)
    def advance(self, i):
        self.advances(self.islands[i])

    def advances(self, island):
        if island.exchange is None or island.is_busy:
            return
        island.is_busy = True
        try:
            is_done = island.exchange.advance()
        except UnreachableError:
            return
        finally:
            island.is_busy = False
        if is_done:
            island.state = island.member.finish(island.state, island.exchange)
            island.exchange, island.is_spoilt = None, False
            self.settle(island)
        else:
            exchange = island.exchange
            waited = island.member.clock() - exchange.posted_at
            waited -= exchange.before_grace
            assert waited < GRACE or island.member.rounds.lacks, (
                f"{island.name} waits without a reason"
            )

    def settle(self, island):
        """Accounts for the rounds that have passed for an island, as the store tells them."""
        self.ledger.update()
        name = island.member.name
        for round in range(island.settled, island.state.round):
            life = self.ledger.members(round).get(name)
            if life == island.life:
                island.has_counted = True
                (counted,) = (m for m in self.ledger.decisions[round].members if m.name == name)
                message, delivered = self.ledger.message(round, counted)
                island.owed = island.owed - delivered
                island.weight -= message.weight * self.weighted
            elif life is not None and island.is_restored and not island.has_counted:
                # A former life sent this after the state was saved. What was saved is dropped, and
                # what was moved in this round, too.
                island.owed, island.weight = island.beside, island.weight_beside
                island.is_restored = False
        island.settled = island.state.round
        island.weight_owed = island.weight - island.weight_beside
        self.balance(island)

    def balance(self, island):
        state, name = island.state, island.member.name
        for report in island.member.reports:
            digest = self.digests.setdefault(report.round, report.digest)
            assert report.digest == digest, f"{name} differs from others after {report.round}"
        owed = reference.residual(state) + away(state)
        reference.near(owed, island.owed, f"{name} has moved more or less than it sent and owes")
        weights = island.weight, island.weight_owed
        assert (state.weight, state.owed) == weights, f"{name} weighs {state.weight}, not {weights}"

    @rule(order=ORDERS, by=MOVES, seconds=st.sampled_from([0.0, 6.0]))
    def turn(self, order, by, seconds):
        """What goes on as long as nothing happens."""
        self.past.append(dict(self.store.objects))
        for i in order:
            self.train(i, by[i:] + by[:i])
            self.begin(i)
            self.advance(i)
        self.time += seconds
        for i in order:
            self.advance(i)

    @rule(
        order=ORDERS,
        by=MOVES,
        without=ISLANDS,
        posts=st.booleans(),
        rounds=st.sampled_from([2, 3, 8]),
    )
    def turns(self, order, by, without, posts, rounds):
        """Rounds while one is asleep. It may have sent a message before."""
        if posts:
            self.send(without, by)
        for _ in range(rounds):
            self.turn([i for i in order if i != without], by, 6.0)

    def send(self, i, by):
        self.train(i, by)
        self.begin(i)
        self.advance(i)

    @rule(i=ISLANDS, j=ISLANDS, by=MOVES)
    def decide_meanwhile(self, i, j, by):
        """An island sees that it is time to decide. Before it does, another one is faster."""

        def meanwhile():
            self.send(j, by)
            self.time += 6.0
            self.advance(j)

        self.islands[i].link.meanwhile = meanwhile
        self.send(i, by)
        self.time += 6.0
        self.advance(i)

    @rule(i=ISLANDS, by=MOVES, after=st.integers(0, 12), fault=st.sampled_from(reference.FAULTS))
    def stumble(self, i, by, after, fault):
        """Its store fails in the middle of an exchange."""
        link = self.islands[i].link
        if link.works:
            link.fault, link.after = fault, after
            self.send(i, by)
            self.advance(i)
            link.mend()

    @rule(i=ISLANDS)
    def save(self, i):
        island = self.islands[i]
        if island.member is not None and island.exchange is None:
            island.saved = island.state, island.owed, island.weight, island.weight_owed

    @rule(i=ISLANDS)
    def kill(self, i):
        """Requests that are on the way still arrive."""
        self.islands[i].die()
        self.islands[i].link.mend()

    @rule(i=ISLANDS, by=MOVES, posts=st.booleans(), is_saved=st.booleans())
    def replace(self, i, by, posts, is_saved):
        """It falls asleep, before or after it has sent a message, and another process goes on."""
        before = self.islands[i]
        if before.member is None or before.is_busy or len(self.replaced) >= 3:
            return
        self.save(i)
        if posts:
            self.send(i, by)
        self.replaced.append(before)
        self.islands[i] = Island(before.name, reference.Link(self.store))
        self.islands[i].saved = before.saved
        self.join(i, is_saved)

    @rule(which=st.integers(0, 2), by=MOVES)
    def wake(self, which, by):
        """One that was replaced goes on, until it sees that."""
        if which >= len(self.replaced):
            return
        island = self.replaced[which]
        try:
            self.trains(island, by)
            self.begins_exchange(island)
            self.advances(island)
        except RuntimeError:  # a later life counts
            self.replaced.remove(island)

    @rule(i=ISLANDS, by=MOVES, is_saved=st.booleans(), order=ORDERS, asleep=st.sampled_from([0, 8]))
    def restart(self, i, by, is_saved, order, asleep):
        """It dies after it has sent a message, is back before the decision, and may sleep then."""
        if is_saved:
            self.save(i)
        self.send(i, by)
        self.kill(i)
        self.join(i, is_saved)
        for _ in range(asleep):
            self.turn([j for j in order if j != i], by, 6.0)

    @rule(i=ISLANDS, fault=st.sampled_from((None, *reference.FAULTS)), after=st.integers(0, 8))
    def weather(self, i, fault, after):
        self.islands[i].link.fault, self.islands[i].link.after = fault, after

    @rule(
        i=ISLANDS,
        ago=st.integers(0, 12),
        old=st.sampled_from([[each] for each in KINDS] + [KINDS]),
        order=ORDERS,
        by=MOVES,
        rounds=st.sampled_from([0, 1, 3]),
    )
    def look_at_the_past(self, i, ago, old, order, by, rounds):
        """Its store shows some objects as they are now, or were some turns ago, until it mends."""
        past = [*self.past, self.store.objects]
        self.islands[i].link.show(past[max(0, len(past) - 1 - ago)], old)
        for _ in range(rounds):
            self.turn(order, by, 6.0)

    @rule(i=ISLANDS, order=ORDERS, by=MOVES, rounds=st.sampled_from([1, 3]))
    def unmount(self, i, order, by, rounds):
        """Its store is an empty folder for a while."""
        if self.islands[i].link.works:
            self.islands[i].link.fault = "unmounted"
            for _ in range(rounds):
                self.turn(order, by, 6.0)
            self.islands[i].link.mend()

    @rule(i=ISLANDS)
    def look_up(self, i):
        self.islands[i].link.mend()

    @rule(
        i=ISLANDS,
        by=MOVES,
        seconds=st.sampled_from([7.0, 60.0, 3000.0]),
        is_left=st.booleans(),
    )
    def jump(self, i, by, seconds, is_left):
        """The clock of an island jumps, as it waits for a decision. All others may be dead then."""
        island = self.islands[i]
        self.send(i, by)
        island.ahead += seconds
        self.jumped += max(0.0, seconds)
        if is_left and island.member is not None and island.link.works:
            for j in range(len(NAMES)):
                if j != i:
                    self.kill(j)
            self.go_on([island])

    @rule(i=ISLANDS)
    def spoil(self, i):
        """Parameters are not finite, and what was moved since the last message is dropped."""
        island = self.islands[i]
        if island.member is None or island.is_spoilt:
            return
        # Then moves are dropped that no message has taken: which ones, its end alone tells.
        if self.fragments > 1 and island.exchange is not None:
            return
        if island.exchange is None:
            lost, weight = away(island.state), island.weight - island.weight_owed
        else:
            lost, weight = island.beside, island.weight_beside
        island.state = reference.moved(island.state, [np.nan] * reference.SIZE)
        island.is_spoilt = True
        island.owed, island.beside = island.owed - lost, np.zeros(reference.SIZE)
        island.weight, island.weight_beside = island.weight - weight, 0.0

    @rule(i=ISLANDS, last_first=st.booleans())
    def arrive_late(self, i, last_first):
        self.islands[i].link.deliver(last_first)

    @rule(name=st.sampled_from([*NAMES, "eve"]), what=st.sampled_from(["message", "decision"]))
    def litter(self, name, what):
        """Somebody writes what can't be read."""
        round = len(self.ledger.decisions)
        if what == "message":
            self.store.create(f"messages/{round:08d}/{name}.zzzz", reference.BROKEN)
        elif name == "eve":
            self.store.objects.setdefault(f"decisions/{round:08d}", reference.BROKEN)

    @rule()
    def clean(self):
        """Somebody deletes decisions that can't be read."""
        for key, data in list(self.store.objects.items()):
            if key.startswith("decisions/") and data == reference.BROKEN:
                del self.store.objects[key]

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds):
        self.time += seconds

    @invariant()
    def all_agree(self):
        self.ledger.update()
        self.ledger.check_snapshots(self.shared)
        for island in [*self.islands, *self.replaced]:
            if island.state is not None:
                self.agrees(island.state)

    def agrees(self, state):
        """Has all that others have as this round begins, and what follows from messages."""
        if any(state.params is one for one in self.agreed):
            return
        self.agreed = [state.params, *self.agreed[:7]]
        leaves = tree_flatten_with_path(Shared(state.params, state.outer))[0]
        found = {keystr(p): np.asarray(x) for p, x in leaves if "per_worker" not in str(p)}
        text = f"parameters of round {state.round}, before which one is not decided"
        assert state.round < len(self.ledger.params), text
        if state.round not in self.shared:
            expected = self.ledger.params[state.round]
            reference.near(
                reference.flat(state.params), expected, f"parameters of round {state.round}"
            )
            self.shared[state.round] = found
        for path, one in self.shared[state.round].items():
            np.testing.assert_array_equal(found[path], one, f"parameters of round {state.round}")

    def teardown(self):
        """Those who can go on do, and all do once the store is back. Whoever joins has the same."""
        self.go_on([island for island in self.islands if island.member and island.link.works])
        for island in [*self.islands, *self.replaced]:
            island.link.mend()
            island.link.deliver()
            island.link.meanwhile = None
        alive = [island for island in self.islands if island.member is not None]
        self.go_on(alive)
        if self.replaced:
            for _ in range(4):
                for which in reversed(range(len(self.replaced))):
                    self.wake(which, [1] * reference.SIZE)
                self.time += 6.0
            self.go_on(alive)
        self.all_agree()
        self.agrees(self.member(self.store, "observer").join(reference.start(self.fragments)))

    def go_on(self, islands):
        """Two rounds of some islands, if they are a quorum."""
        self.clean()
        if len(islands) < max(self.quorum, 1):
            return
        goal = 2 + max(island.state.round for island in islands)
        # One that is late gives others as much time as its own steps took.
        for _ in range(12 + int((self.time + self.jumped) / 6)):
            for i, island in enumerate(self.islands):
                if island in islands:
                    self.train(i, [i + 1] * reference.SIZE)
                    self.begin(i)
                    self.advance(i)
            self.time += 6.0
            if all(island.state.round >= goal for island in islands):
                return
        rounds = [island.state.round for island in islands]
        raise AssertionError(f"a quorum does not go on: in rounds {rounds}, and not in {goal}")


class Fractions(History):
    """A quorum of two. Most entries travel, and are rounded in sums, so that the order matters."""

    quorum, unit, exchange = 2, 0.1, "most"


class Weighted(History):
    """Messages weigh what the steps do that they hold."""

    weighted = True


class Fragments(History):
    """Rounds exchange three fragments in turn."""

    fragments = 3


MACHINES = (History, Fractions, Weighted, Fragments)


def run(machine, count, seed, steps=30):
    """Runs as many histories. AssertionError has the first one that fails, as a program."""
    options = settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # shrinking would take minutes
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        seeded(seed)(machine)
        run_state_machine_as_test(machine, settings=options)
