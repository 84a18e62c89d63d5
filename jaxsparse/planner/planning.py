"""Predicts which system is fastest for a model on a network, or whether dense is.

The network's seconds come from a model, the device's from a profile.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import layout as layouts
from jaxsparse.planner import network as networks
from jaxsparse.planner.algorithms import choose_algorithm
from jaxsparse.planner.computing import check_shapes, measured_as
from jaxsparse.planner.leaf_groups import REST, Group, LeafGroups, Members
from jaxsparse.planner.plans import BY_GROUP, GroupChoice, Plan, Prediction
from jaxsparse.planner.profiles import SystemProfile
from jaxsparse.reducers.base import Budget, Reducer, SeededReducer
from jaxsparse.settings import check_density, static_count, static_float
from jaxsparse.systems import WITH_VARIANTS, Choice, Dense, SparCML, choose
from jaxsparse.traffic import WireBytes, traced_bytes
from jaxsparse.traffic.report import merged, scaled

# Indices are int32, so longer vectors travel in buckets, of which a program can have only so many.
_LONGEST, _BUCKET, _MOST = 2**31 - 1, 2**30, 2**44
_UNDIVIDED = (Reducer.split, SeededReducer.split)


def plan(
    params: Any,
    workers: int,
    *,
    network: networks.Network | networks.Link,
    density: float = 0.01,
    profile: SystemProfile | str | None = None,
    memory_bandwidth: float | None = None,
    step_seconds: float = 0.0,
    local_steps: int = 1,
    groups: Mapping[str, Group | None] | None = None,
    is_dense: layouts.IsDense | None = None,
    systems: Sequence[str] | None = None,
    on_system: Callable[[str], object] = lambda name: None,
) -> Plan:
    """Predicts the time of a step's exchange with dense all-reduce and with every system.

    The alpha-beta model gives network times. It gets the collectives from the traced program, which
    includes dense leaves and the flag of finite gradients. Computing times are interpolated between
    measured ones. A system without measured times is not predicted and not chosen. Compressed
    leaves travel as one vector, or in buckets of at most 2**30 elements if there are 2**31 or more,
    which int32 can't index. The times are those of usual steps, without Ok-Topk's extra work in one
    of 32. The plan does not predict contention, stragglers or accuracy.

    Args:
        params: a tree of arrays or `jax.ShapeDtypeStruct`s like the gradients, or the number of
            elements of one matrix.
        workers: number of workers, W.
        network: a measured `Network` (`jaxsparse.planner.measure_network`, `Network.load`), or a
            `Link` with latency in seconds and bandwidth in bytes a second.
        density: share of the compressed elements that a step delivers, in (0, 1]. See
            `jaxsparse.systems.choose` for each system's settings.
        profile: computing times of the device, or the name of a profile that the library contains
            (`SystemProfile.shipped`): "h100" or "cpu". None: "cpu".
        memory_bandwidth: memory bandwidth of the device in bytes a second. The profile is scaled to
            it, as if all times were passes over memory. This is a rough extrapolation from a CPU's
            times to a GPU's.
        step_seconds: time of forward and backward pass, which no system changes.
        local_steps: number of steps from one exchange to the next, H. More than 1 plans for
            `jaxsparse.LocalSteps`, which exchanges displacements. Speedups are then still over a
            dense exchange of gradients in each step.
        groups: mapping from regular expressions on key paths to groups of leaves, which may have
            their own systems, or to None for dense. The first expression found in a path counts.
            The leaves that no expression matches are a group, too.
        is_dense: function of a leaf's key path and shape: whether the leaf travels dense in any
            case. By default vectors, scalars and leaves below 1024 elements do.
        systems: systems to predict and to choose from, keys of `jaxsparse.systems.WITH_VARIANTS`.
            Dense is always included. None: all, but a system with a caveat is not chosen.
        on_system: called with the name of each system before it is predicted, for progress.

    Returns:
        The predictions and the choices. They print as a table.

    Raises:
        ValueError: settings out of range, an unknown system, an expression without a leaf, or see
            `jaxsparse.layout.plan`.

    Example:
        >>> from jaxsparse.planner.network import Link
        >>> slow = plan(10**7, 8, network=Link(50e-6, 12.5e6), systems=["spardl"])
        >>> slow.best, slow.transformation
        ('spardl', 'jaxsparse.spardl(0.01)')
        >>> fast = plan(10**7, 8, network=Link(1e-6, 1e12), systems=["spardl"])
        >>> fast.best
        'dense'
    """
    names = _names(systems)
    workers = static_count("workers", workers)
    step_seconds = static_float("step_seconds", step_seconds)
    if not 0 <= step_seconds < math.inf:
        raise ValueError(f"step_seconds={step_seconds} must be finite and at least 0")
    local_steps = static_count("local_steps", local_steps)
    check_density(density)
    leaves = LeafGroups.of(params, groups, is_dense)
    # A transformation of the whole tree has no groups.
    whole = dataclasses.replace(leaves, rules={})
    size = whole.elements(REST)
    if size > _MOST:
        raise ValueError(
            f"params have {size:,} elements to compress, which take {-(-size // _BUCKET):,} "
            f"buckets: plan at most {_MOST:,} elements"
        )
    bucket_size = _BUCKET if size > _LONGEST else None
    model = _Model(_network(network), workers, _profile(profile, memory_bandwidth), bucket_size)
    planner = _Predictor(model, leaves, whole, density)

    conditions = [_written(model.network), f"computing: {model.profile}"]
    if profile is None:
        conditions.append(
            "  measured on the library's machine: measure yours by python -m jaxsparse profile"
            + ("" if memory_bandwidth else ", take profile 'h100', or give its memory bandwidth")
        )
    by_dense = planner.dense()
    if math.isinf(by_dense.exchange):
        raise ValueError(f"network={network} takes for ever: give less latency, more bandwidth")
    found, left_out = [by_dense], []
    for name in names:
        on_system(name)
        try:
            found.append(
                planner.one(name, "" if systems is not None else WITH_VARIANTS[name].caveat)
            )
        except ValueError as error:
            left_out.append((name, str(error)))
    choices = None
    if groups:
        try:
            choices, together = planner.by_group(names, is_asked_for=systems is not None)
        except ValueError as error:
            left_out.append((BY_GROUP, str(error)))
        else:
            found.append(together)
    # Sorting is stable, so only faster systems come before dense.
    found.sort(key=lambda prediction: prediction.exchange)
    best = next(prediction for prediction in found if not prediction.caveat)
    if choices is None:
        choices = planner.as_whole(best, by_dense)
    return Plan(
        predictions=tuple(found),
        groups=choices,
        best=best.system,
        left_out=tuple(left_out),
        elements=planner.compressed + planner.dense_size,
        dense_elements=planner.dense_size,
        workers=workers,
        density=density,
        step_seconds=step_seconds,
        local_steps=local_steps,
        conditions=tuple(conditions),
    )


def _names(systems: Sequence[str] | None) -> list[str]:
    """The names without dense, which is always predicted."""
    names = list(WITH_VARIANTS) if systems is None else list(dict.fromkeys(systems))
    for name in names:
        if name not in WITH_VARIANTS:
            raise ValueError(
                f"systems has {name!r}, which is unknown: use {', '.join(WITH_VARIANTS)}"
            )
    return [name for name in names if name != "dense"]


def _network(given: Any) -> networks.Network:
    if isinstance(given, networks.Link):
        return networks.Network(given)
    if not isinstance(given, networks.Network):
        raise ValueError(
            f"network={given!r} must be a Network (jaxsparse.planner.measure_network, "
            "Network.load) or a Link(latency=..., bandwidth=...) in seconds and bytes a second"
        )
    return given


def _profile(given: SystemProfile | str | None, memory_bandwidth: float | None) -> SystemProfile:
    named = "cpu" if given is None else given
    profile = SystemProfile.shipped(named) if isinstance(named, str) else named
    if not isinstance(profile, SystemProfile):
        raise ValueError(
            f"profile={given!r} must be a SystemProfile, 'cpu' or 'h100': measure one by "
            "jaxsparse.planner.profile_systems(), or SystemProfile.load a saved one"
        )
    return profile if memory_bandwidth is None else profile.scaled(memory_bandwidth)


def _written(network: networks.Network) -> str:
    link = network.link
    text = f"network: latency {1e6 * link.latency:g} us, {8e-9 * link.bandwidth:g} Gbit/s"
    return text if network.device == "unknown" else f"{text}; measured: {network.device}"


@functools.lru_cache(maxsize=1024)
def _moved(reducer: Reducer, size: int, workers: int) -> WireBytes:
    """The bytes that a reducer moves, cached because tracing one takes up to 0.2 s."""
    return traced_bytes(reducer, size, workers)


@functools.lru_cache(maxsize=1024)
def _buckets(
    budget: Budget, size: int, dense_size: int, limit: int | None
) -> collections.Counter[tuple[Reducer, int]]:
    """The number of buckets of each reducer and number of elements. Seeds don't count."""
    sizes = layouts.plan(
        jax.ShapeDtypeStruct((size,), jnp.float32),
        is_dense=lambda path, shape: False,
        bucket_size=limit,
        alignment=budget.alignment,
    ).bucket_sizes
    # Totals are divided, and all buckets have the same other settings.
    if isinstance(budget, Reducer) and type(budget).split in _UNDIVIDED:
        lengths = collections.Counter(sizes)
        return collections.Counter({(_unseeded(budget), n): lengths[n] for n in lengths})
    reducers = budget.split(sizes, dense_size)
    return collections.Counter(zip(map(_unseeded, reducers), sizes))


class _Model(NamedTuple):
    """The network, the workers, the profile and the buckets that predictions use."""

    network: networks.Network
    workers: int
    profile: SystemProfile
    bucket_size: int | None

    def buckets(
        self, budget: Budget, size: int, dense_size: int = 0
    ) -> Mapping[tuple[Reducer, int], int]:
        """See `_buckets`. A dense vector has one, because it needs no indices."""
        limit = None if isinstance(budget, Dense) else self.bucket_size
        return _buckets(budget, size, dense_size, limit)

    def moved(self, budget: Budget, size: int, dense_size: int = 0) -> WireBytes:
        """The bytes that an exchange of `size` elements moves."""
        buckets = self.buckets(budget, size, dense_size)
        return merged(
            scaled(_moved(*bucket, self.workers), times) for bucket, times in buckets.items()
        )

    def exchange(self, budget: Budget, size: int) -> float:
        """Seconds on the network for `size` elements, in a usual step."""
        return self.network.seconds(self.moved(budget, size).usual)

    def added_to_dense(self, size: int, elements: int) -> float:
        """Seconds that `elements` add to a dense message of `size`, which is sent anyway."""
        whole = lambda size: self.exchange(Dense(), size) + self.dense_computing(size)
        return whole(size + elements) - whole(size)

    def computing(self, system: str, budget: Budget, size: int, density: float) -> float:
        """Seconds of computing.

        Raises:
            ValueError: the system was not measured.
        """
        check_shapes(budget)
        reducer, part = next(iter(self.buckets(budget, size)))
        name = measured_as(system, reducer, part, self.workers)
        if name not in self.profile.systems:
            raise ValueError("no measured profile")
        return self.profile.seconds(name, size, self.workers, density)

    def dense_computing(self, size: int) -> float:
        """Seconds of computing for a dense message; 0 for the flag alone."""
        return self.profile.seconds("dense", size, self.workers, 1.0) if size > 1 else 0.0


def _unseeded(reducer: Reducer) -> Reducer:
    return dataclasses.replace(reducer, seed=0) if isinstance(reducer, SeededReducer) else reducer


class _Predictor:
    """Predictions for one tree. `whole` is the tree without groups."""

    def __init__(self, model: _Model, leaves: LeafGroups, whole: LeafGroups, density: float):
        self.model, self.leaves, self.whole, self.density = model, leaves, whole, density
        self.dense_size = whole.elements(None)
        self.compressed = whole.elements(REST)

    def dense(self) -> Prediction:
        """The prediction for all leaves in one dense message."""
        size = self.compressed + self.dense_size
        computing = self.model.dense_computing(size)
        return self._prediction("dense", {}, size, computing, "jaxsparse.dense()")

    def one(self, name: str, caveat: str) -> Prediction:
        """The prediction for one system, for all leaves that may be compressed."""
        if not self.compressed:
            raise ValueError("no leaf may be compressed: see is_dense")
        choice = self._chosen(name, Group(), self.compressed, self.dense_size)
        computing = self.model.computing(name, choice.budget, self.compressed, self.density)
        computing += self.model.dense_computing(self.dense_size)
        more = [] if self.leaves.is_dense is None else ["is_dense=is_dense"]
        if self.model.bucket_size is not None:
            more.append(f"bucket_size={self.model.bucket_size}")
        call, _, given = choice.transformation[:-1].partition("(")
        written = f"{call}({', '.join([given, *more] if given else more)})"
        sizes = {choice.budget: self.compressed}
        return self._prediction(name, sizes, self.dense_size, computing, written, caveat)

    def by_group(
        self, names: Sequence[str], is_asked_for: bool
    ) -> tuple[tuple[GroupChoice, ...], Prediction]:
        """The fastest system for each group, and the prediction for all together.

        Raises:
            ValueError: they can't be combined.
        """
        groups = self.leaves.members
        dense_size = always_dense = self.leaves.elements(None)
        choices: list[GroupChoice] = []
        budgets: dict[str, Budget | None] = {}
        computing = 0.0
        for name, members in groups.items():
            if name is None:
                continue
            choice, budget, seconds = self._choose(name, members, always_dense, names, is_asked_for)
            choices.append(choice)
            budgets[name] = budget
            computing += seconds
            dense_size += members.elements if budget is None else 0
        computing += self.model.dense_computing(dense_size)
        if len({budget for budget in budgets.values() if budget is not None}) == 1:
            choices, budgets = self._as_only_one(choices, budgets, dense_size)
        sizes: collections.Counter[Budget] = collections.Counter()
        for name, budget in budgets.items():
            if budget is not None:
                sizes[budget] += groups[name].elements
        reducers = {choice.group: choice.expression for choice in choices}
        written = self.leaves.written(reducers, self.model.bucket_size)
        prediction = self._prediction(BY_GROUP, sizes, dense_size, computing, written)
        return tuple(choices), prediction

    def _as_only_one(
        self,
        choices: Sequence[GroupChoice],
        budgets: Mapping[str, Budget | None],
        dense_size: int,
    ) -> tuple[list[GroupChoice], dict[str, Budget | None]]:
        """The same choices, for compressed groups that all have equal budgets.

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
        """The system's settings for a group, with SparCML's algorithm for this network."""
        choice = choose(
            system,
            self.density if group.density is None else group.density,
            size=size,
            workers=self.model.workers,
            touched=group.touched,
            block_size=group.block_size,
            dense_size=dense_size,
        )
        if not isinstance(choice.budget, SparCML):
            return choice
        _, part = next(iter(self.model.buckets(choice.budget, size)))
        algorithm = choose_algorithm(
            choice.budget,
            part,
            self.model.workers,
            network=self.model.network,
            profile=self.model.profile,
        )
        return choice._replace(settings={**choice.settings, "algorithm": algorithm})

    def as_whole(self, best: Prediction, dense: Prediction) -> tuple[GroupChoice, ...]:
        """The choice if one system serves the whole tree."""
        leaves = self.whole.members.get(REST)
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
        """The choice for a group by itself, its budget and its seconds of computing."""
        model, (kind, leaves, size) = self.model, members
        density = self.density if kind.density is None else kind.density
        delivered = density if kind.touched is None else kind.touched
        dense_seconds = model.added_to_dense(always_dense + 1, size)
        best: tuple[float, str, Budget | None, float] = (dense_seconds, "dense", None, 0.0)
        written = "None"
        possible = [n for n in names if kind.touched is None or WITH_VARIANTS[n].is_of_blocks]
        for name in possible:
            if WITH_VARIANTS[name].caveat and not (is_asked_for or kind.touched):
                continue
            try:
                choice = self._chosen(name, kind, size)
                computing = model.computing(name, choice.budget, size, delivered)
                seconds = computing + model.exchange(choice.budget, size)
            except ValueError:  # left_out has the reason, for the whole tree
                continue
            if seconds < best[0]:
                best = (seconds, name, choice.budget, computing)
                written = choice.expression
        seconds, name, budget, computing = best
        row = GroupChoice(group, leaves, size, name, seconds, dense_seconds, written)
        return row, budget, computing

    def _prediction(
        self,
        name: str,
        sizes: Mapping[Budget, int],
        dense_size: int,
        computing: float,
        written: str,
        caveat: str = "",
    ) -> Prediction:
        """The prediction for vectors of these sizes, beside a dense message.

        Leaves with equal budgets are one vector. The dense message has a flag of finite gradients.
        A budget gets to know of the dense leaves if it is the only one.
        """
        model, beside = self.model, dense_size if len(sizes) == 1 else 0
        vectors = [model.moved(budget, size, beside) for budget, size in sizes.items()]
        usual = merged([model.moved(Dense(), dense_size + 1), *vectors]).usual
        seconds = model.network.seconds(usual)
        return Prediction(name, usual.rounds, usual.received, seconds, computing, written, caveat)
