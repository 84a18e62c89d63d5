"""A store in memory whose links fail, and islands on it whose moves are whole numbers."""

import contextlib
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load

import jaxsparse
from jaxsparse.islands.arithmetic import Arithmetic
from jaxsparse.islands.member import Member
from jaxsparse.islands.records import Decision, Message, Snapshot
from jaxsparse.islands.store import UnreachableError

SIZE = 6
OUTER = {
    "top_k": lambda: jaxsparse.top_k(0.4, axis_name=None, is_dense=lambda *_: False),
    "most": lambda: jaxsparse.top_k(0.8, axis_name=None, is_dense=lambda *_: False),
    "int8": lambda: jaxsparse.quantized(
        "int8", gather=True, group_size=4, axis_name=None, is_dense=lambda *_: False
    ),
}


BROKEN = b"half"  # what somebody else writes


class Memory:
    """Objects in a dict. `history` has each object that was ever created."""

    def __init__(self):
        self.objects, self.history = {}, {}

    def create(self, key, data):
        if key in self.objects:
            return False
        assert self.history.setdefault(key, data) == data, f"{key} was created twice"
        self.objects[key] = data
        return True

    def get(self, key):
        return self.objects.get(key)

    def names(self, folder):
        keys = (key.rpartition("/") for key in self.objects)
        return sorted(name for place, _, name in keys if place == folder)

    def delete(self, keys):
        for key in keys:
            self.objects.pop(key, None)


# What an island's way to the store may do to it.
FAULTS = ("down", "deaf", "slow", "repeats", "loses", "late", "damages", "unmounted")
DAMAGES = (
    lambda data: b"",
    lambda data: data[: len(data) // 2],
    lambda data: b"<html>login</html>",
    lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
)


class Link:
    """An island's way to a store.

    Its `fault` comes once `after` so many operations have passed. "down": nothing passes. "deaf":
    what it writes arrives, and it hears an error. "slow": the same, but it arrives by `deliver`.
    "repeats": what it writes arrives, and once more by `deliver`. "loses": the store says that it
    has what it writes, and has it not. "late": lists stay as they are. "damages": every other
    object that it reads comes cut or changed. "unmounted": it reads and writes in a folder of its
    own machine, which keeps what was written in it the last time.

    If it is `shown` other objects, it reads these, and what it creates itself, in folders of `old`.

    `meanwhile` is called once, right before the next decision is created: another island may decide
    just then.
    """

    def __init__(self, store):
        self.store, self.on_the_way, self.meanwhile = store, [], None
        self.mount, self.reads = Memory(), 0
        self.mend()

    @property
    def works(self):
        return self.fault in (None, "repeats") and self.shown is None

    def mend(self):
        self.fault, self.after, self.shown, self.old = None, 0, None, ()
        self.listed = None

    def show(self, objects, old):
        self.shown, self.old = Memory(), old
        self.shown.objects.update(objects)

    def deliver(self, last_first=False):
        operations, self.on_the_way = self.on_the_way, []
        for operation in reversed(operations) if last_first else operations:
            operation(self.store)

    def _fails(self):
        """The fault of an operation."""
        if self.after > 0:
            self.after -= 1
            return None
        if self.fault == "down":
            raise UnreachableError("down")
        return self.fault

    def _writes(self, operation):
        fault = self._fails()
        if fault == "loses":
            return True
        if fault in ("slow", "repeats"):
            self.on_the_way.append(operation)
        if fault == "slow":
            raise UnreachableError("slow")
        found = operation(self.mount if fault == "unmounted" else self.store)
        if fault == "deaf":
            raise UnreachableError("the answer was lost")
        return found

    def create(self, key, data):
        if self.meanwhile is not None and key.startswith("decisions/"):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return self._writes(lambda store: self._create(store, key, data))

    def _create(self, store, key, data):
        is_created = store.create(key, data)
        if is_created and self.shown is not None and store is self.store:
            self.shown.objects.setdefault(key, data)
        return is_created

    def get(self, key):
        fault = self._fails()
        data = self._view(key, fault).get(key)
        if data is None or fault != "damages":
            return data
        self.reads += 1
        return data if self.reads % 2 else DAMAGES[self.reads // 2 % len(DAMAGES)](data)

    def names(self, folder):
        fault = self._fails()
        found = self._view(folder, fault).names(folder)
        if fault == "late":
            if self.listed is None:
                self.listed = set(self.store.objects)
            found = [name for name in found if f"{folder}/{name}" in self.listed]
        return found

    def _view(self, path, fault):
        if fault == "unmounted":
            return self.mount
        return self.shown if path.split("/")[0] in self.old else self.store

    def delete(self, keys):
        self._writes(lambda store: store.delete(keys))


@functools.cache
def arithmetic(exchange="top_k", weighted=False, fragments=1):
    """Shared by tests, because it keeps compiled programs."""
    pair = OUTER[exchange](), optax.sgd(1.0, momentum=0.5)
    programs = Arithmetic(*pair, lambda state: state[0], weighted, fragments)
    first = start(fragments)
    found = programs.describe(programs.start(first), first[0])
    programs.describe = lambda shared, own: found  # all have the same shapes
    return programs


def at_once(write):
    """Writes a snapshot, or leaves it out, as islands do if the store is silent for long."""
    with contextlib.suppress(UnreachableError):
        write()


def member(store, name, clock, *, programs=None, **settings):
    usual = {"quorum": 1, "grace": 5.0, "snapshots": 3, "beside": at_once, "clock": clock}
    return Member(programs or arithmetic(), store, name, **{**usual, **settings})


def start(fragments=1):
    """A training state, with a leaf for each fragment."""
    if fragments == 1:
        return ({"w": jnp.zeros((2, 3))}, jnp.zeros(()))
    return ({f"w{i}": jnp.zeros(SIZE // fragments) for i in range(fragments)}, jnp.zeros(()))


def flat(tree):
    return np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(tree)])


def fragment(round, fragments):
    """The entries that a round exchanges. Each cycle begins with another fragment."""
    part, size = (round + round // fragments) % fragments, SIZE // fragments
    return slice(part * size, (part + 1) * size)


def moved(state, by):
    """A state after local steps that move its parameters."""
    params, count = state.worker
    leaves, treedef = jax.tree.flatten(params)
    parts = np.split(np.float32(by), len(leaves))
    moved = [np.asarray(x) + part.reshape(x.shape) for x, part in zip(leaves, parts)]
    params = treedef.unflatten(moved)
    return state._replace(worker=(params, np.float32(count + 1)), steps=state.steps + 1)


def residual(state):
    return flat([exchange.residual for exchange, _ in state.outer])


@functools.cache
def decoder(exchange="top_k", size=SIZE):
    """A function from a message of `OUTER` to what it alone delivers, both NumPy arrays."""
    tx, zeros = OUTER[exchange](), {"w": jnp.zeros(size)}
    state = tx.init(zeros)
    _, posted = tx.post(zeros, state)
    decode = jax.jit(lambda words: tx.receive(words, posted, zeros, state)[0]["w"])
    return lambda words: np.asarray(decode(words[None])).reshape(-1)


class Ledger:
    """What all objects that were ever created say, without the library's rounds.

    Attributes:
        decisions: the decision of each round.
        params, momentum: what follows from the decisions, as each round begins.
    """

    def __init__(self, store, exchange, weighted, quorum, grace, fragments=1):
        self.store, self.exchange, self.weighted = store, exchange, weighted
        self.fragments = fragments
        self.quorum, self.grace = quorum, grace
        self.decisions, self.params, self.momentum = [], [np.zeros(SIZE)], [np.zeros(SIZE)]
        self.delivered, self._lives = {}, {}
        self._stand, self._snapshots = {}, {}

    def update(self):
        """Reads what is new, and checks it."""
        there = {k: data for k, data in self.store.objects.items() if k.startswith("decisions/")}
        there = {key: data for key, data in there.items() if data != BROKEN}
        for key, data in self._stand.items():
            assert there.get(key) == data, f"{key} is gone, or there is a second one"
        self._stand = there
        while (key := f"decisions/{len(self.decisions):08d}") in there:
            self._add(there[key])

    def members(self, round):
        """The lives whose messages count in a round, by name."""
        return {member.name: member.life for member in self.decisions[round].members}

    def message(self, round, member):
        """A message as it was sent: its header, and what it delivers."""
        key = f"messages/{round:08d}/{member.name}.{member.life}"
        if key not in self.delivered:
            assert key in self.store.history, f"{key} counts, but nobody sent it"
            data = self.store.history[key]
            assert hashlib.sha256(data).hexdigest() == member.checksum, f"{key} was another one"
            header, body = Message.from_bytes(data, round)
            words = np.frombuffer(body, np.uint32)
            delivered = np.zeros(SIZE)
            found = decoder(self.exchange, SIZE // self.fragments)(words)
            delivered[fragment(round, self.fragments)] = found
            self.delivered[key] = header, delivered
        return self.delivered[key]

    def _add(self, data):
        round = len(self.decisions)
        decision, _ = Decision.from_bytes(data, round)  # raises BrokenError
        self._check(decision)
        self.decisions.append(decision)
        found = [self.message(round, member)[1] for member in decision.members]
        weights = [member.weight if self.weighted else 1.0 for member in decision.members]
        here, mean = fragment(round, self.fragments), np.average(found, 0, weights)
        params, momentum = self.params[-1].copy(), self.momentum[-1].copy()
        momentum[here] = 0.5 * momentum[here] + mean[here]
        params[here] -= momentum[here]
        self.params.append(params)
        self.momentum.append(momentum)

    def _check(self, decision):
        there = {member.name for member in decision.members}
        assert len(there) >= self.quorum, f"{len(there)} members are less than a quorum"
        for member in decision.members:
            header, _ = self.message(decision.round, member)
            assert (header.weight, header.late) == (member.weight, member.late)
            last = self._lives.setdefault(member.name, member.life)
            assert last <= member.life, f"an earlier life of {member.name} counts after a later one"
            self._lives[member.name] = member.life
        last = self.decisions[-1].members if self.decisions else ()
        expected = {member.name for member in last if not member.late}
        assert (expected and expected <= there) or decision.waited >= self.grace, (
            f"round {decision.round} did not wait for {expected - there}"
        )

    def check_snapshots(self, shared):
        """Snapshots hold what all have, and the last two stand, with the messages behind them.

        `shared` has the arrays that all have as a round begins, by round, as far as they are known.
        """
        for key, data in self.store.history.items():
            if key.startswith("snapshots/") and key not in self._snapshots:
                self._snapshots[key] = self._arrays(data, int(key[-8:]))
        for key, arrays in self._snapshots.items():
            known = shared.get(int(key[-8:]))
            if arrays is not None and known is not None:
                assert arrays.keys() == known.keys(), f"{key} is not all that islands share"
                for path, one in known.items():
                    np.testing.assert_array_equal(arrays[path], one, f"{key} is another state")
                self._snapshots[key] = None
        kept = sorted(self._snapshots)[-2:]
        for key in kept:
            assert key in self.store.objects, f"{key} was deleted too early"
        for round in range(int(kept[0][-8:]), len(self.decisions)):
            for name, life in self.members(round).items():
                key = f"messages/{round:08d}/{name}.{life}"
                assert key in self.store.objects, f"{key} was deleted too early"

    def _arrays(self, data, round):
        _, body = Snapshot.from_bytes(data, round)
        assert round <= len(self.decisions), f"a snapshot of round {round}, which has not begun"
        arrays = load(bytes(body))
        for part, expected in ((".params", self.params), ("trace", self.momentum)):
            found = [arrays[path] for path in sorted(arrays) if part in path]
            assert len(found) == self.fragments, f"the snapshot of round {round}: {list(arrays)}"
            near(flat(found), expected[round], f"the snapshot of round {round}")
        return arrays


def near(found, expected, text):
    """Whether arrays are equal up to rounding."""
    size = 1.0 + np.max(np.abs(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * size, err_msg=text)
