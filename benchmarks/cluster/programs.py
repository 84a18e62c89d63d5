"""The compiled programs of a cell: one that runs on the cluster, and one that only computes.

Compiling is most of a sweep's time. All ranks run the same program, so each is compiled by one rank
and loaded by the others, from files that later runs find again.
"""

import contextlib
import functools
import hashlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from alone import dry_run
from cells import Cell, budget
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse
from jaxsparse import traffic

_MESH_AXIS = "data"


class Program(NamedTuple):
    """A function of flat arrays that returns new values of the first of them."""

    function: Any  # jitted; takes carried arrays, which are donated, and fixed ones
    carried: list[jax.ShapeDtypeStruct]  # shapes with shardings
    fixed: list[jax.ShapeDtypeStruct]
    initial: Callable[[], list[np.ndarray]]  # this process's share of all arrays


class Loaded(NamedTuple):
    """A compiled program, and the bytes that it moves."""

    run: Callable[..., Any]
    moved: traffic.WireBytes


def program(cell: Cell, mesh: Mesh, *, alone: bool) -> Program:
    """Adds half of the residual to a vector that stays the same, and exchanges it.

    Args:
        cell: what to measure.
        mesh: mesh with one device of each process.
        alone: whether to send nothing. Each worker then receives its own messages.
    """
    workers, size = mesh.size, cell.params
    (reducer,) = budget(cell, workers).split((size,))
    start = reducer.init(size)
    treedef: Any
    leaves, treedef = jax.tree.flatten(start)
    split, whole = PartitionSpec(_MESH_AXIS), PartitionSpec()
    state_specs = jax.tree.leaves(jaxsparse.specs(start), is_leaf=lambda s: s in (split, whole))
    # The whole residual would pile up for the first 1 / density exchanges. Half of it settles in a
    # few. Without the other workers most selected entries would never arrive, so none is kept.
    kept = np.float32(0 if alone else 0.5)

    def body(mean: Any, residual: Any, *rest: Any) -> Any:
        del mean  # its memory is used again
        *state, gradient = rest
        with dry_run(workers) if alone else contextlib.nullcontext():
            x = gradient[0] + kept * residual[0]
            reduced = reducer.pmean(x, treedef.unflatten(state), _MESH_AXIS)
            own = reduced.kept.whole(x)
        return reduced.mean, own.residual[None], *jax.tree.leaves(own.state)

    carried_specs = [whole, split, *state_specs]
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(*carried_specs, split),
        out_specs=tuple(carried_specs),
        check_vma=False,  # a worker alone knows nothing of the others
    )
    donated = tuple(range(len(carried_specs)))
    function = jax.jit(mapped, donate_argnums=donated, keep_unused=True)

    def initial() -> list[np.ndarray]:
        zeros = np.zeros(size, np.float32)
        return [zeros, zeros[None], *map(np.asarray, leaves), _gradient(size)[None]]

    vector = jax.ShapeDtypeStruct((size,), jnp.float32)
    row = jax.ShapeDtypeStruct((1, size), jnp.float32)
    local = [vector, row, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves), row]
    shapes = _of_all(local, [*carried_specs, split], mesh)
    return Program(function, shapes[:-1], shapes[-1:], initial)


@functools.lru_cache(maxsize=1)
def _gradient(size: int) -> np.ndarray:
    """This process's gradient: cubed normals, as heavy in the tails as gradients are."""
    rng = np.random.default_rng(jax.process_index())
    return rng.standard_normal(size, np.float32) ** 3


def _of_all(
    local: Sequence[jax.ShapeDtypeStruct], specs: Sequence[PartitionSpec], mesh: Mesh
) -> list[jax.ShapeDtypeStruct]:
    """Shapes over all workers, from those of one."""
    result = []
    for shape, spec in zip(local, specs, strict=True):
        full = (mesh.size * shape.shape[0], *shape.shape[1:]) if len(spec) else shape.shape
        sharding = NamedSharding(mesh, spec)
        result.append(jax.ShapeDtypeStruct(full, shape.dtype, sharding=sharding))
    return result


def arguments(made: Program) -> tuple[list[jax.Array], list[jax.Array]]:
    """Carried and fixed arrays to start with, on all processes."""
    shapes = [*made.carried, *made.fixed]
    arrays = [
        jax.make_array_from_process_local_data(shape.sharding, value, shape.shape)
        for shape, value in zip(shapes, made.initial(), strict=True)
    ]
    return arrays[: len(made.carried)], arrays[len(made.carried) :]


@contextlib.contextmanager
def _newly_compiled() -> Iterator[None]:
    """Turns JAX's compilation cache off. Programs out of it can't be serialized again."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting once, and again after this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


class Store:
    """Compiled programs in a folder.

    The files are Python pickles: the folder must be one that only its owner can write to.
    """

    def __init__(self, folder: Path, workers: int):
        self._folder, self._workers = folder, workers
        sources = hashlib.sha256(jax.__version__.encode())
        library = Path(jaxsparse.__file__).parent
        for path in [
            *sorted(library.rglob("*.py")),
            Path(__file__),
            Path(__file__).parent / "cells.py",
        ]:
            sources.update(path.read_bytes())
        self._version = sources.hexdigest()

    def path(self, cell: Cell, alone: bool) -> Path:
        """The path where the program is, or will be."""
        key = (*cell, alone, self._workers, self._version)
        return self._folder / hashlib.sha256(repr(key).encode()).hexdigest()[:32]

    def compile(self, cell: Cell, alone: bool, mesh: Mesh) -> None:
        """Compiles the program, and puts it there."""
        made = program(cell, mesh, alone=alone)
        lowered = made.function.lower(*made.carried, *made.fixed)
        with _newly_compiled():
            compiled = lowered.compile()
        content = serialize_executable.serialize(compiled), traffic.wire_bytes(compiled)
        path = self.path(cell, alone)
        partial = path.with_suffix(f".{jax.process_index()}")
        partial.write_bytes(pickle.dumps(content))
        partial.rename(path)

    def load(self, cell: Cell, alone: bool, mesh: Mesh) -> Loaded:
        """Loads the program from there, and waits until it is there."""
        path = self.path(cell, alone)
        while not path.exists():  # if the rank that compiles it fails, the launcher ends this one
            time.sleep(0.05)
        serialized, moved = pickle.loads(path.read_bytes())
        binary, inputs, outputs = serialized
        run = serialize_executable.deserialize_and_load(
            binary, inputs, outputs, execution_devices=list(mesh.devices.flat)
        )
        return Loaded(run, moved)
