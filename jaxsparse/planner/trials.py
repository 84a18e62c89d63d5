"""Chooses a setting by timing exchanges."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse.arrays.settings import static_count
from jaxsparse.comm.marks import PerWorker
from jaxsparse.training.parallel import data_parallel
from jaxsparse.training.sharding import count_workers, shard

T = TypeVar("T")

# Number of exchanges before the timed ones. B-SAG's h crosses its whole range in 12.
_SETTLING = 20


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
    exchange differs between them, so this function times only exchanges. Each worker has gradients
    drawn at random, half of whose energy is common to all. They stay the same in all exchanges, and
    states go on from one to the next. The first 20 are not timed, so that messages that adapt
    (`spardl`, "bruck") have adapted to these gradients. Yours may overlap more, or less.

        teams = [t for t in range(1, workers + 1) if workers % t == 0]
        make = lambda teams: jaxsparse.spardl(0.01, teams=teams, gather="bruck")
        best, seconds = jaxsparse.planner.autotune(make, teams, params, mesh)

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
    gradients = _drawn(params, mesh, axis_name)
    runs, states = [], []
    for candidate in candidates:
        tx = make(candidate)
        step = data_parallel(
            lambda state, gradients, tx=tx: tx.update(PerWorker.unwrap(gradients), state),
            mesh,
            axis_name=axis_name,
            batch_argnums=(),
        )
        state = shard(tx.init(jax.tree.map(_zeros, params)), mesh, axis_name)
        for _ in range(_SETTLING):
            _, state = jax.block_until_ready(step(state, gradients))
        runs.append(step)
        states.append(state)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):  # in turn, so that a slow spell of the machine hits all alike
        for i, step in enumerate(runs):
            start = time.perf_counter()
            _, states[i] = jax.block_until_ready(step(states[i], gradients))
            times[i].append(time.perf_counter() - start)
    medians = jnp.array([statistics.median(elapsed) for elapsed in times])
    if jax.process_count() > 1:
        medians = multihost_utils.broadcast_one_to_all(medians)
    seconds = dict(zip(candidates, map(float, medians)))
    return Autotuned(min(candidates, key=seconds.__getitem__), seconds)


def _zeros(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def _drawn(params: Any, mesh: Mesh, axis_name: str) -> Any:
    """Normal gradients of all workers, marked `PerWorker`, each made on its worker's devices."""
    treedef: Any = jax.tree.structure(params)
    leaves = jax.tree.leaves(params)
    workers = count_workers(mesh, axis_name)

    def draw() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 2 * len(leaves))
        normal = lambda key, leaf, *rows: jax.random.normal(key, (*rows, *leaf.shape), leaf.dtype)
        return [
            normal(common, leaf)[None] + normal(own, leaf, workers)
            for common, own, leaf in zip(keys[::2], keys[1::2], leaves)
        ]

    rows = jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec(axis_name)))()
    return treedef.unflatten(map(PerWorker, rows))
