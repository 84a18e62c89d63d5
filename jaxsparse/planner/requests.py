"""What islands ask of their store, item by item: how often, and how many bytes each way.

Operations are those of `jaxsparse.islands.store.Objects`, and folders those of
`jaxsparse.islands.rounds`. All is of one island, in the mean: what one island does for all, such as
a decision, counts for each as its share. `tests/test_planner_islands.py` counts the same in a run.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path

from jaxsparse.comm.marks import is_marked
from jaxsparse.islands.records import Decision, Member, Message

# Bytes of a request that are no object, as obstore's and moto's server's were measured, without TLS
# (benchmarks/results/failures.md): HTTP's headers each way, the text of an answer that an object is
# not there, and each name in a list.
HEADERS_SENT, HEADERS_RECEIVED, NOT_THERE, LISTED = 470, 400, 280, 260


class Item(NamedTuple):
    """A kind of request.

    Attributes:
        kind: the operation, and "messages", "decisions", "snapshots" or "lives", such as "get
            decisions". "names" lists. "delete" stands alone.
        requests: how many, in the mean.
        sent: bytes of objects to the store, all of these requests together.
        received: bytes of objects from it.
    """

    kind: str
    requests: float
    sent: float = 0.0
    received: float = 0.0


class Asked(NamedTuple):
    """Items, added up.

    Attributes:
        requests: how many.
        sent: bytes to the store, with headers.
        received: bytes from it, with headers.
    """

    requests: float
    sent: float
    received: float

    @property
    def bytes(self) -> float:
        """Both ways."""
        return self.sent + self.received


def added(items: Iterable[Item]) -> Asked:
    """The sum of items, each request with its headers."""
    items = tuple(items)
    requests = sum(item.requests for item in items)
    return Asked(
        requests,
        sum(item.sent for item in items) + HEADERS_SENT * requests,
        sum(item.received for item in items) + HEADERS_RECEIVED * requests,
    )


class Objects(NamedTuple):
    """Bytes of the objects of a run.

    Attributes:
        message: of an island's message, with its header.
        decision: of a decision.
        snapshot: of global parameters and outer state.
    """

    message: int
    decision: int
    snapshot: int


def objects(words: int, islands: int, params: Any, outer: Any) -> Objects:
    """Sizes of the objects of a run.

    Args:
        words: words of a message.
        islands: number of islands.
        params: shapes and dtypes of the global parameters.
        outer: those of the outer state. What is an island's own is in no snapshot.
    """
    name, digest, life = "amsterdam", "0" * 16, "0" * 17
    message = Message(1000, digest, name, life, 1.0, digest, False, 1 / 3)
    member = Member(name, life, 1.0, False, 1 / 3, "0" * 64)
    decision = Decision(1000, digest, (member,) * islands, digest, name, 1 / 3, words)
    leaves = tree_flatten_with_path((params, outer))[0]
    sizes = [
        math.prod(jnp.shape(leaf)) * jnp.result_type(leaf).itemsize
        for path, leaf in leaves
        if not is_marked(path)
    ]
    return Objects(len(message.to_bytes()) + 4 * words, len(decision.to_bytes()), sum(sizes))


def of_a_round(islands: int, sizes: Objects, *, snapshots: int, looks: float) -> tuple[Item, ...]:
    """What an island asks for in a round in which all take part.

    Args:
        islands: number of islands, N.
        sizes: of objects.
        snapshots: rounds from one snapshot to the next, S.
        looks: how often it looks in vain after its message, in the mean. Each costs a look for the
            decision and a list.
    """
    N, S = islands, snapshots
    # Of a list in vain, if messages come evenly. One that decides lists all, and so does deleting.
    listed = looks * (2 * N - 1) / 3 + 2
    lists = min(2, N) / (N * S)
    return (
        # Before its message, looks in vain, one that finds a decision, and one whether the others
        # are ahead. One that decides has looked in vain once more, and sees twice that the store
        # has the decision before.
        Item(
            "get decisions",
            looks + 3 + 3 / N,
            received=(1 + 2 / N) * sizes.decision + (looks + 2 + 1 / N) * NOT_THERE,
        ),
        Item("names messages", looks + 2 / N, received=listed * LISTED),
        Item("create messages", 1, sent=sizes.message),
        Item("get messages", N - 1, received=(N - 1) * sizes.message),
        Item("create decisions", 1 / N, sent=sizes.decision / N),
        # One writes a snapshot, and deletes what is older than the last two. The next one in turn
        # looks whether that of the last turn is there. Two stand, and for a moment a third one.
        Item("create snapshots", 1 / (N * S), sent=sizes.snapshot / (N * S)),
        Item("names snapshots", lists, received=2.2 * LISTED * lists),
        Item("delete", 1 / N + 1 / (N * S)),
    )


def to_join(islands: int, sizes: Objects, rounds: float) -> tuple[Item, ...]:
    """What an island asks for to join, or to come back without its state.

    Args:
        islands: number of islands.
        sizes: of objects.
        rounds: that were decided since the snapshot.
    """
    return (
        Item("names snapshots", 1, received=2 * LISTED),
        Item("get snapshots", 1, received=sizes.snapshot),
        # Which of its lives this is, without former ones. Its number is a word of 8 bytes.
        Item("names lives", 1, received=islands * LISTED),
        Item("create lives", 1, sent=8),
        Item("get lives", 1, received=8),
        Item("get decisions", rounds + 1, received=rounds * sizes.decision + NOT_THERE),
        Item("get messages", islands * rounds, received=islands * rounds * sizes.message),
    )


def at_start(islands: int, sizes: Objects) -> tuple[Item, ...]:
    """What an island asks for when a run begins: one writes the first snapshot, and all read it."""
    share = 1 / islands
    return (
        *to_join(islands, sizes, 0),
        Item("create snapshots", share, sent=share * sizes.snapshot),
        # Its second look, and those of who decides on the first round.
        Item("names snapshots", 4 * share),
        Item("get decisions", share, received=share * NOT_THERE),
    )
