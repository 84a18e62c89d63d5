"""Predicts which system is fastest for a model on a network, or whether dense is.

The network's seconds come from a model, the device's from a profile.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.printing import with_options
from jaxsparse.arrays.settings import check_density, static_count, static_float
from jaxsparse.planner.computing import check_shapes, measured_as
from jaxsparse.planner.network import Link, Network
from jaxsparse.planner.plans import Plan, Prediction
from jaxsparse.planner.profiles import SystemProfile
from jaxsparse.reducers.base import Budget, Reducer, SeededReducer
from jaxsparse.systems import WITH_VARIANTS, Choice, Dense, SparCML, choose
from jaxsparse.traffic import WireBytes, traced_bytes
from jaxsparse.traffic.report import merged, scaled

# Indices are int32, so longer vectors travel in buckets, of which a program can have only so many.
_LONGEST, _BUCKET, _MOST = 2**31 - 1, 2**30, 2**44

# What takes more than this share of dense's time is not worth the change.
MUCH_FASTER = 0.9


def plan(
    params: Any,
    workers: int,
    *,
    network: Network | Link,
    density: float = 0.01,
    profile: SystemProfile | str | None = None,
    memory_bandwidth: float | None = None,
    step_seconds: float = 0.0,
    local_steps: int = 1,
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
    of 32. SparDL has one team: what more teams send depends on how much their entries
    overlap, so `jaxsparse.planner.autotune` finds a number of teams by timing. The plan does not
    predict contention, stragglers or accuracy.

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
        is_dense: function of a leaf's key path and shape: whether the leaf travels dense in any
            case. By default vectors, scalars and leaves below 1024 elements do.
        systems: systems to predict and to choose from, keys of `jaxsparse.systems.WITH_VARIANTS`.
            Dense is always included. None: all, but a system with a caveat is not chosen.
        on_system: called with the name of each system before it is predicted, for progress.

    Returns:
        The predictions and the fastest system, or dense if that saves less than a tenth of the
        time. They print as a table.

    Raises:
        ValueError: settings out of range, an unknown system, or see `jaxsparse.layout.plan`.

    Example:
        >>> from jaxsparse.planner import Link
        >>> slow = plan(10**7, 8, network=Link(50e-6, 12.5e6), systems=["spardl"])
        >>> slow.best, slow.transformation
        ('spardl', 'jaxsparse.spardl(0.01)')
        >>> fast = plan(10**7, 8, network=Link(1e-6, 1e12), systems=["spardl"])
        >>> fast.best
        'dense'
    """
    names = _names(systems)
    step_seconds = static_float("step_seconds", step_seconds)
    if not 0 <= step_seconds < math.inf:
        raise ValueError(f"step_seconds={step_seconds} must be finite and at least 0")
    local_steps = static_count("local_steps", local_steps)
    predictor = Predictor.of(
        params,
        workers,
        network=network,
        density=density,
        profile=profile,
        memory_bandwidth=memory_bandwidth,
        is_dense=is_dense,
    )
    dense = predictor.dense()
    found, left_out = [dense], []
    for name in names:
        on_system(name)
        try:
            found.append(
                predictor.one(name, "" if systems is not None else WITH_VARIANTS[name].caveat)
            )
        except ValueError as error:
            left_out.append((name, str(error)))
    # Sorting is stable, so only faster systems come before dense.
    found.sort(key=lambda prediction: prediction.exchange)
    best = next(prediction for prediction in found if not prediction.caveat)
    step = lambda prediction: step_seconds + prediction.exchange / local_steps
    if step(best) > MUCH_FASTER * step(dense):
        best = dense
    return Plan(
        predictions=tuple(found),
        best=best.system,
        left_out=tuple(left_out),
        elements=predictor.size + predictor.dense_size,
        dense_elements=predictor.dense_size,
        workers=predictor.workers,
        density=density,
        step_seconds=step_seconds,
        local_steps=local_steps,
        conditions=predictor.conditions,
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


def _elements(params: Any, is_dense: layouts.IsDense | None) -> tuple[int, int]:
    """The number of elements that may be compressed, and of those that travel dense.

    Raises:
        ValueError: params are neither a number of elements nor a tree of arrays.
    """
    if isinstance(params, numbers.Number):  # the elements of one matrix
        params = {"params": jax.ShapeDtypeStruct((1, static_count("params", params)), jnp.float32)}
    if isinstance(params, str):
        raise ValueError(
            f"params={params!r} must be a number of elements, or a tree of arrays or "
            "jax.ShapeDtypeStructs"
        )
    rule = layouts.small_or_vector if is_dense is None else is_dense
    totals = [0, 0]
    for path, shape in layouts.named_leaves(params):
        if size := math.prod(shape):
            totals[bool(rule(path, shape))] += size
    return totals[0], totals[1]


def _network(given: Any) -> Network:
    if isinstance(given, Link):
        return Network(given)
    if not isinstance(given, Network):
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


def _described(network: Network) -> str:
    link = network.link
    text = f"network: latency {1e6 * link.latency:g} us, {8e-9 * link.bandwidth:g} Gbit/s"
    return text if network.device == "unknown" else f"{text}; measured: {network.device}"


@functools.lru_cache(maxsize=1024)
def _moved(reducer: Reducer, size: int, workers: int) -> WireBytes:
    """The bytes that a reducer moves, cached because tracing one takes up to 0.1 s."""
    return traced_bytes(reducer, size, workers)


@functools.lru_cache(maxsize=1024)
def _buckets(
    budget: Budget, size: int, dense_size: int, limit: int | None
) -> tuple[Reducer, int, int]:
    """The reducer of a bucket, its number of elements, and the number of buckets.

    Their sizes differ by less than twice the budget's alignment, and totals are divided as evenly.
    So all count as the first, which is the largest: to trace two sizes would take twice as long.
    """
    sizes = layouts.plan(
        jax.ShapeDtypeStruct((size,), jnp.float32),
        is_dense=lambda path, shape: False,
        bucket_size=limit,
        alignment=budget.alignment,
    ).bucket_sizes
    return _unseeded(budget.split(sizes, dense_size)[0]), sizes[0], len(sizes)


class Predictor(NamedTuple):
    """Predictions of the exchange of one tree."""

    network: Network
    workers: int
    profile: SystemProfile
    density: float
    size: int  # number of elements that may be compressed
    dense_size: int  # number of elements that travel dense
    bucket_size: int | None
    options: Sequence[str]  # Python code of options that all transformations take
    conditions: tuple[str, ...]  # the assumptions, a line each

    @classmethod
    def of(
        cls,
        params: Any,
        workers: int,
        *,
        network: Network | Link,
        density: float = 0.01,
        profile: SystemProfile | str | None = None,
        memory_bandwidth: float | None = None,
        is_dense: layouts.IsDense | None = None,
    ) -> "Predictor":
        """The arguments and errors are those of `plan`."""
        workers = static_count("workers", workers)
        check_density(density)
        size, dense_size = _elements(params, is_dense)
        if size > _MOST:
            raise ValueError(
                f"params have {size:,} elements to compress, which take {-(-size // _BUCKET):,} "
                f"buckets: plan at most {_MOST:,} elements"
            )
        options = [] if is_dense is None else ["is_dense=is_dense"]
        if size > _LONGEST:
            options.append(f"bucket_size={_BUCKET}")
        known = _network(network)
        computing = _profile(profile, memory_bandwidth)
        conditions = [_described(known), f"computing: {computing}"]
        if profile is None:
            hint = "measured on the library's machine: measure yours by python -m jaxsparse profile"
            bandwidth = ", take profile 'h100', or give its memory bandwidth"
            others = "" if memory_bandwidth else bandwidth
            conditions.append(f"  {hint}{others}")
        found = cls(
            network=known,
            workers=workers,
            profile=computing,
            density=density,
            size=size,
            dense_size=dense_size,
            bucket_size=_BUCKET if size > _LONGEST else None,
            options=options,
            conditions=tuple(conditions),
        )
        if math.isinf(found.dense().exchange):
            raise ValueError(f"network={network} takes for ever: give less latency, more bandwidth")
        return found

    def dense(self) -> Prediction:
        """The prediction for all leaves in one dense message."""
        size = self.size + self.dense_size
        moved = self._dense_message(size)
        return self._prediction("dense", moved, self._dense_computing(size), "jaxsparse.dense()")

    def one(self, name: str, caveat: str) -> Prediction:
        """The prediction for one system, for all leaves that may be compressed.

        Raises:
            ValueError: there is none, or the system can't meet the density or was not measured.
        """
        if not self.size:
            raise ValueError("no leaf may be compressed: see is_dense")
        return self.exchange(self._choice(name), name, self.density, caveat)

    def exchange(self, choice: Choice, name: str, density: float, caveat: str = "") -> Prediction:
        """The prediction for a system with these settings.

        Args:
            choice: the system and its settings.
            name: the system's name in profiles.
            density: share of the elements that it delivers.
            caveat: see `Prediction`.

        Raises:
            ValueError: the system can't be predicted or was not measured.
        """
        check_shapes(choice.budget)
        reducer, part, count = self._buckets(choice.budget)
        measured = measured_as(name, reducer, part, self.workers)
        if measured not in self.profile.systems:
            raise ValueError("no measured profile")
        computing = self.profile.seconds(measured, self.size, self.workers, density)
        computing += self._dense_computing(self.dense_size)
        written = with_options(choice.transformation, self.options)
        compressed = scaled(_moved(reducer, part, self.workers), count)
        moved = merged([self._dense_message(self.dense_size), compressed])
        return self._prediction(name, moved, computing, written, caveat)

    def _choice(self, name: str) -> Choice:
        """The system's settings for the density, with SparCML's algorithm for this network."""
        choice = choose(
            name, self.density, size=self.size, workers=self.workers, dense_size=self.dense_size
        )
        if not isinstance(choice.budget, SparCML):
            return choice
        _, part, _ = self._buckets(choice.budget)
        on_link = dataclasses.replace(choice.budget, link=self.network.link)
        algorithm = on_link.algorithm_for(part, self.workers)
        return choice._replace(settings={**choice.settings, "algorithm": algorithm})

    def _buckets(self, budget: Budget) -> tuple[Reducer, int, int]:
        limit = None if isinstance(budget, Dense) else self.bucket_size
        return _buckets(budget, self.size, self.dense_size, limit)

    def _dense_message(self, size: int) -> WireBytes:
        """The bytes of dense elements and of the flag of finite gradients, in one message.

        It is never cut into buckets, because it needs no indices.
        """
        return _moved(Dense(), size + 1, self.workers)

    def _dense_computing(self, size: int) -> float:
        return self.profile.seconds("dense", size, self.workers, 1.0) if size > 1 else 0.0

    def _prediction(
        self, name: str, moved: WireBytes, computing: float, written: str, caveat: str = ""
    ) -> Prediction:
        usual = moved.usual
        seconds = self.network.seconds(usual)
        return Prediction(name, usual.rounds, usual.received, seconds, computing, written, caveat)


def _unseeded(reducer: Reducer) -> Reducer:
    return dataclasses.replace(reducer, seed=0) if isinstance(reducer, SeededReducer) else reducer
