"""Seconds of an exchange: the network's from a model, the device's from a profile."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import optax

from jaxsparse import network as networks
from jaxsparse.cost.codecs import CodecProfile
from jaxsparse.cost.leaf_groups import REST, Group, LeafGroups, Members
from jaxsparse.cost.plans import BY_GROUP, GroupChoice, Prediction
from jaxsparse.cost.report import WireBytes
from jaxsparse.cost.traced import traced_bytes
from jaxsparse.feedback import error_feedback, partition
from jaxsparse.layout import split_evenly
from jaxsparse.reducers.base import Budget
from jaxsparse.systems import WITH_VARIANTS, Choice, Dense, choose, dense

# Indices are int32: longer vectors travel in buckets.
_LONGEST, _BUCKET = 2**31 - 1, 2**30


class Model(NamedTuple):
    """What predictions rest on."""

    network: networks.Network
    workers: int
    codecs: CodecProfile

    def seconds(self, moved: WireBytes) -> float:
        """On the network, in a usual step."""
        return usual(self.network.seconds, moved)

    def exchange(self, budget: Budget, size: int) -> float:
        """On the network, for `size` elements, in a usual step."""
        count = 1 if size <= _LONGEST or isinstance(budget, Dense) else -(-size // _BUCKET)
        sizes = tuple(split_evenly(size, [1] * count))
        moved = (traced_bytes(r, n, self.workers) for r, n in zip(budget.split(sizes), sizes))
        return sum(map(self.seconds, moved))

    def added_to_dense(self, size: int, elements: int) -> float:
        """What `elements` more take in a dense message of `size`, which is sent anyway."""
        whole = lambda size: self.exchange(Dense(), size) + self.dense_codec(size)
        return whole(size + elements) - whole(size)

    def codec(self, system: str, size: int, density: float) -> float:
        """Of computing."""
        return self.codecs.seconds(system, size, self.workers, density)

    def dense_codec(self, size: int) -> float:
        """Of computing, for a dense message; nothing for the flag alone."""
        return self.codec("dense", size, 1.0) if size > 1 else 0.0


class Predictor:
    """Predictions for one tree."""

    def __init__(self, model: Model, leaves: LeafGroups, density: float):
        self.model, self.leaves, self.density = model, leaves, density
        # One transformation for the whole tree knows no groups.
        self.whole = dataclasses.replace(leaves, rules={})
        self.dense_size = self.whole.elements(None)
        self.compressed = self.whole.elements(REST)
        self.bucket_size = _BUCKET if self.compressed > _LONGEST else None

    def dense(self) -> Prediction:
        """All leaves in one message."""
        codec = self.model.dense_codec(self.compressed + self.dense_size)
        return self._prediction("dense", dense(), codec, "jaxsparse.dense()")

    def one(self, name: str, caveat: str) -> Prediction:
        """All leaves that may be compressed, by one system."""
        if not self.compressed:
            raise ValueError("no leaf may be compressed: see is_dense")
        choice = choose(
            name,
            self.density,
            size=self.compressed,
            workers=self.model.workers,
            link=self.model.network.link,
            dense_size=self.dense_size,
        )
        tx = error_feedback(
            choice.budget, is_dense=self.whole.travels_dense, bucket_size=self.bucket_size
        )
        codec = self.model.codec(name, self.compressed, self.density)
        codec += self.model.dense_codec(self.dense_size)
        more = [] if self.leaves.is_dense is None else ["is_dense=is_dense"]
        if self.bucket_size is not None:
            more.append(f"bucket_size={self.bucket_size}")
        call, _, given = choice.transformation[:-1].partition("(")
        written = f"{call}({', '.join([given, *more] if given else more)})"
        return self._prediction(name, tx, codec, written, caveat)

    def by_group(
        self, names: Sequence[str], is_asked_for: bool
    ) -> tuple[tuple[GroupChoice, ...], Prediction]:
        """The fastest system for each group, and what they take together.

        Raises:
            ValueError: they can't be combined.
        """
        groups = self.leaves.members()
        dense_size = always_dense = self.leaves.elements(None)
        choices: list[GroupChoice] = []
        budgets: dict[str, Budget | None] = {}
        codec = 0.0
        for name, members in groups.items():
            if name is None:
                continue
            choice, budget, computing = self._choose(
                name, members, always_dense, names, is_asked_for
            )
            choices.append(choice)
            budgets[name] = budget
            codec += computing
            dense_size += members.elements if budget is None else 0
        codec += self.model.dense_codec(dense_size)
        if len({budget for budget in budgets.values() if budget is not None}) == 1:
            choices, budgets = self._as_only_one(choices, budgets, dense_size)
        tx = partition(self.leaves.policy(budgets), bucket_size=self.bucket_size)
        reducers = {choice.group: choice.expression for choice in choices}
        written = self.leaves.written(reducers, self.bucket_size)
        return tuple(choices), self._prediction(BY_GROUP, tx, codec, written)

    def _as_only_one(
        self,
        choices: Sequence[GroupChoice],
        budgets: Mapping[str, Budget | None],
        dense_size: int,
    ) -> tuple[list[GroupChoice], dict[str, Budget | None]]:
        """The same choices where all groups that are compressed have equal budgets.

        `partition` makes one vector of them, and counts the dense leaves against its budget.
        """
        compressed = [choice for choice in choices if budgets[choice.group] is not None]
        size = sum(choice.elements for choice in compressed)
        system, group = compressed[0].system, self.leaves.rules.get(compressed[0].group) or Group()
        again = self._chosen(system, group, size, dense_size)
        names = [choice.group for choice in compressed]
        return (
            [
                choice._replace(expression=again.expression) if choice.group in names else choice
                for choice in choices
            ],
            {name: again.budget if name in names else None for name in budgets},
        )

    def _chosen(self, system: str, group: Group, size: int, dense_size: int = 0) -> Choice:
        """The system's settings for a group."""
        return choose(
            system,
            self.density if group.density is None else group.density,
            size=size,
            workers=self.model.workers,
            link=self.model.network.link,
            touched=group.touched,
            block_size=group.block_size,
            dense_size=dense_size,
        )

    def as_whole(self, best: Prediction, dense: Prediction) -> tuple[GroupChoice, ...]:
        """The choice where one system serves the whole tree."""
        leaves = self.whole.members().get(REST)
        if leaves is None:
            return ()
        times = (best.exchange, dense.exchange)
        return (GroupChoice(REST, *leaves[1:], best.system, *times, best.transformation),)

    def _choose(
        self,
        group: str,
        members: Members,
        always_dense: int,
        names: Sequence[str],
        is_asked_for: bool,
    ) -> tuple[GroupChoice, Budget | None, float]:
        """The choice for a group by itself, its budget and what that computes."""
        model, (kind, leaves, size) = self.model, members
        density = self.density if kind.density is None else kind.density
        computed = density if kind.touched is None else kind.touched
        dense_seconds = model.added_to_dense(always_dense + 1, size)
        best: tuple[float, str, Budget | None, float] = (dense_seconds, "dense", None, 0.0)
        written = "None"
        possible = [n for n in names if kind.touched is None or WITH_VARIANTS[n].is_of_blocks]
        for name in possible:
            if WITH_VARIANTS[name].caveat and not (is_asked_for or kind.touched):
                continue
            try:
                choice = self._chosen(name, kind, size)
                codec = model.codec(name, size, computed)
                seconds = codec + model.exchange(choice.budget, size)
            except ValueError:  # of the whole tree, left_out says why
                continue
            if seconds < best[0]:
                best = (seconds, name, choice.budget, codec)
                written = choice.expression
        seconds, name, budget, codec = best
        row = GroupChoice(group, leaves, size, name, seconds, dense_seconds, written)
        return row, budget, codec

    def _prediction(
        self,
        name: str,
        tx: optax.GradientTransformation,
        codec: float,
        written: str,
        caveat: str = "",
    ) -> Prediction:
        moved = traced_bytes(tx, self.leaves.tree, self.model.workers)
        rounds = round(usual(lambda m: m.rounds, moved))
        received = usual(lambda m: m.received, moved)
        seconds = self.model.seconds(moved)
        return Prediction(name, rounds, received, seconds, codec, written, caveat)


def usual(amount: Callable[[WireBytes], float], moved: WireBytes) -> float:
    """An amount, such as bytes or seconds, with the cheapest branch of each conditional.

    Reducers branch where they do more in some steps: the cheapest is what most steps take. Totals
    of `WireBytes` are those of the dearest. Both are so by received bytes, whatever the amount, so
    that amounts of one program are of the same branches.

    Args:
        amount: of what a program moves, by its totals: for example `Network.seconds`.
        moved: by the program.
    """
    total = amount(moved)
    for conditional in moved.conditionals:
        cheapest = min(conditional.branches, key=lambda b: (b.received, b.rounds))
        total += usual(amount, cheapest) - amount(conditional.branches[conditional.dearest])
    return total
