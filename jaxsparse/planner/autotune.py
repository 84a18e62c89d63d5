"""Chooses a setting by timing exchanges."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxsparse.arrays.settings import static_count
from jaxsparse.training.parallel import data_parallel
from jaxsparse.training.sharding import local, shard

T = TypeVar("T")


class Autotuned(NamedTuple, Generic[T]):
    """The result of `autotune`."""

    best: T
    seconds: dict[T, float]  # median time of one exchange with each candidate


def autotune(
    make: Callable[[T], optax.GradientTransformationExtraArgs],
    candidates: Sequence[T],
    params: Any,
    mesh: Mesh,
    *,
    axis_name: str = "data",
    repeats: int = 10,
) -> Autotuned[T]:
    """Times the exchange of gradients with each candidate, and returns the fastest.

    SparDL (section III-D) chooses its number of teams this way, from an epoch with each. Only the
    exchange differs between them, so this function times only exchanges:

        teams = [t for t in range(1, workers + 1) if workers % t == 0]
        make = lambda teams: jaxsparse.spardl(0.01, teams=teams, gather="bruck")
        best, seconds = jaxsparse.autotune(make, teams, params, mesh)

    With several processes, all must call it, and all return the first one's choice.

    Args:
        make: function from a candidate to the transformation with this setting.
        candidates: settings to try, distinct and hashable.
        params: tree of arrays or of `jax.ShapeDtypeStruct`s like the gradients.
        mesh: the mesh of the workers.
        axis_name: the mesh axis of the workers.
        repeats: number of timed exchanges with each candidate.

    Returns:
        The candidate with the shortest median, and the medians of all in seconds.

    Raises:
        ValueError: there is no candidate, or `repeats` is below 1.
    """
    if not candidates:
        raise ValueError(f"candidates={candidates} is empty: give at least one setting to try")
    repeats = static_count("repeats", repeats)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
    gradients = jax.tree.map(
        lambda leaf: jax.random.normal(next(keys), leaf.shape, leaf.dtype), params
    )
    runs = []
    for candidate in candidates:
        tx = make(candidate)
        step = data_parallel(
            lambda state, gradients, tx=tx: tx.update(local(gradients, axis_name), state),
            mesh,
            axis_name=axis_name,
            batch_argnums=(),
        )
        state = shard(tx.init(gradients), mesh, axis_name)
        jax.block_until_ready(step(state, gradients))  # compiles
        runs.append((step, state))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):  # in turn, so that a slow spell of the machine hits all alike
        for (step, state), elapsed in zip(runs, times):
            start = time.perf_counter()
            jax.block_until_ready(step(state, gradients))
            elapsed.append(time.perf_counter() - start)
    medians = jnp.array([statistics.median(elapsed) for elapsed in times])
    if jax.process_count() > 1:
        medians = multihost_utils.broadcast_one_to_all(medians)
    seconds = dict(zip(candidates, map(float, medians)))
    return Autotuned(min(candidates, key=seconds.__getitem__), seconds)
