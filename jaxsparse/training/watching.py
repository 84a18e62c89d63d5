"""Checks a compiled step before its first call: do processes agree, what else crosses the axis?"""

import functools
import warnings
from typing import Any

import jax
from jax.sharding import Mesh

from jaxsparse import traffic
from jaxsparse.comm.marks import warn_of_copies
from jaxsparse.comm.meshes import SCOPE
from jaxsparse.comm.workers import Workers
from jaxsparse.processes.agreement import compare
from jaxsparse.processes.calls import CheckedStep
from jaxsparse.processes.group import group_of

# Below _FEW_BYTES there is no warning, because metrics may cross the axis. A warning names the
# _NAMED largest collectives.
_FEW_BYTES, _NAMED = 1024, 4


def watch(step: jax.stages.Wrapped, mesh: Mesh, *, axis_name: str = "data") -> CheckedStep:
    """Has a compiled step compared and read before its first call with given shapes.

        step = jaxsparse.watch(jax.jit(step), mesh)

    - **Several processes compare the step**: versions, mesh, shapes, program, constants, and the
      values of arguments that each holds whole. Of large arrays they compare a sample. If one has
      another learning rate, seed or reducer, collectives would match by chance, or wait for each
      other for ever. All processes must call the same steps in the same order. They wait for each
      other for the limit of `jaxsparse.fail_at_once`.
    - **It warns of collectives besides the exchange** that cross `axis_name`, from 1 KiB a device
      on: XLA may gather a batch, an embedding table, or what follows from moments that lie over the
      workers.
    - **It warns of per-worker state of which each device holds all rows**, as a state is that has
      not gone through `jaxsparse.shard`, or that came back by other `out_shardings`.

    Inside an outer `jax.jit` nothing is compared or read.

    Args:
        step: a function that `jax.jit` or `nnx.jit` made. Its arguments are arrays, and given by
            position.
        mesh: the mesh of the workers.
        axis_name: the mesh axis of the workers.

    Returns:
        A function that behaves as `step`.

    Raises:
        ValueError: the mesh has no such axis, or `step` is another function. At the call: an
            argument is given by name; or, with several processes, one is static.
        RuntimeError: at the call: processes differ, or one does not come.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> float(watch(jax.jit(lambda x: x + 1), mesh)(1.0))
        2.0
    """
    Workers.on(mesh, axis_name)  # raises where they are wrong
    if not hasattr(step, "trace"):
        raise ValueError(
            f"step is a {type(step).__name__}, and must be a function that jax.jit or nnx.jit "
            "made: give jax.jit(step), which takes Equinox modules here as they are"
        )
    return checks_of(step, mesh, axis_name, reads_all=True)


def checks_of(run: Any, mesh: Mesh, axis_name: str, reads_all: bool = False) -> CheckedStep:
    """`run` with what comes before its first call. See `watch`.

    Args:
        run: the compiled step.
        mesh: the mesh.
        axis_name: the axis of the workers.
        reads_all: whether collectives are read on a mesh without other axes, too.
    """
    named = lambda args: {f"argument {i}": arg for i, arg in enumerate(args)}
    before = [lambda args: warn_of_copies(axis_name, named(args), stacklevel=5)]
    if (group := group_of(mesh)) is not None:
        before.append(functools.partial(compare, group, run, mesh))
    if reads_all or Workers.on(mesh, axis_name).inner:
        before.append(functools.partial(_warn_of_strays, run, mesh, axis_name))
    return CheckedStep(run, before, group)


def _warn_of_strays(step: jax.stages.Wrapped, mesh: Mesh, axis_name: str, args: Any) -> None:
    """Warns of collectives besides the exchange that cross the axis, beyond a few metrics."""
    program = step.lower(*args).compile()  # JAX keeps it: the call does not compile again
    try:
        strays = traffic.crossing(program, axis_name=axis_name, mesh=mesh, outside=SCOPE)
    except ValueError as error:
        warnings.warn(f"what crosses {axis_name!r} could not be read: {error}", stacklevel=4)
        return
    received = sum(stray.received_bytes for stray in strays)
    if received < _FEW_BYTES:
        return
    largest = sorted(strays, key=lambda stray: -stray.received_bytes)[:_NAMED]
    warnings.warn(
        f"besides the exchange, {len(strays)} collectives of the step cross {axis_name!r}, and a "
        f"device receives {received:,.0f} bytes by them: {'; '.join(map(str, largest))}. Is a "
        f"batch not split over {axis_name!r}, a gradient or activation averaged over it, or do "
        "moments lie over it? XLA moves some lookups in sharded tables across all axes, and vmap "
        "convolutions: see jaxsparse.value_and_grad.",
        stacklevel=4,
    )
