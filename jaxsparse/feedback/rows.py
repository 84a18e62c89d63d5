"""Gradients with a row for each worker, as `jaxsparse.value_and_grad` makes them, read and checked.

A trainer calls `tx.update` in its own `jax.jit`, where no axis is bound. The exchange enters the
mesh by itself (`devices.over_rows`), and what it returns are ordinary arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import (
    KeyPath,
    keystr,
    tree_flatten_with_path,
    tree_leaves_with_path,
    tree_map_with_path,
)

from jaxsparse.arrays.layout import short_names
from jaxsparse.comm.marks import PerWorker, own_leaves
from jaxsparse.comm.workers import RUNNING, Workers
from jaxsparse.feedback.front import check_front

_OVERWRITTEN = "_overwrite_with_gradient"  # Flax' collection of scales and histories of maxima


def read_rows(
    updates: Any,
    state: Any,
    params: Any,
    axis_name: str | None,
    mesh: Mesh | None,
    workers: int | None,
) -> tuple[Any, Any, Workers]:
    """Reads what `update` got where no axis is bound.

    Returns:
        Gradients, each with a row for each worker. Shapes and dtypes of one worker's. The workers.

    Raises:
        ValueError: gradients or the state have no row for each worker, or see `Workers.find`.
    """
    if (how := RUNNING.get()) is not None and how.checked is None and how.axis_name != axis_name:
        raise ValueError(
            f"axis_name={axis_name!r} is not bound here (axes in scope: [{how.axis_name!r}]): pass "
            f"axis_name={how.axis_name!r} if that is the workers' axis"
        )
    updates = _split_unreduced(updates, axis_name)
    one = _one_workers(updates, state, params, axis_name)
    found = Workers.find((updates, state), axis_name, mesh, workers)
    check_rows(updates, state, found, params)
    return updates, one, found


def _one_workers(updates: Any, state: Any, params: Any, axis_name: str | None) -> Any:
    """Shapes and dtypes of one worker's gradients, those of the parameters.

    Raises:
        ValueError: gradients have no row for each worker, or another transformation has replaced
            some, or neither `params` nor the state tells the parameters' shapes.
    """
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    leaves, treedef = tree_flatten_with_path(updates, is_leaf=is_masked)
    for path, x in leaves:
        if is_masked(x):
            raise ValueError(
                f"gradient{keystr(path)} is an optax.MaskedNode: a wrapper, such as optax.masked "
                "or optax.multi_transform, hides it from the exchange, and would return its rows. "
                "Give leaves exchanges of their own by jaxsparse.partition, freeze leaves behind "
                "the exchange, or do not differentiate with respect to them"
            )
        if _OVERWRITTEN in keystr(path):
            raise ValueError(
                f"gradient{keystr(path)} is no gradient but the parameter's new value, as Flax' "
                "fp8 has it: leave it out of the exchange, and take the maximum of its rows, "
                "jax.tree.map(lambda x: x.max(0), grads['_overwrite_with_gradient'])"
            )
    shapes: list[Any]
    shapes = _shapes_in(updates, state) if params is None else _shapes_of(params, len(leaves))
    for (path, _), shape in zip(leaves, shapes):
        if shape is None:
            raise ValueError(
                f"axis_name={axis_name!r} is not bound here, so gradients have a row for each "
                f"worker, but the shape of the parameter of gradient{keystr(path)} is not known: "
                "give tx.update(grads, state, params)"
            )
    _check_shapes(updates, shapes, axis_name)
    one = [jax.ShapeDtypeStruct(s, jnp.result_type(x)) for s, (_, x) in zip(shapes, leaves)]
    return jax.tree.unflatten(treedef, one)


def _shapes_of(params: Any, count: int) -> list[Any]:
    shapes = [jnp.shape(x) for x in jax.tree.leaves(params)]
    if len(shapes) != count:
        raise ValueError(
            f"params has {len(shapes)} leaves, and there are {count} gradients: give tx.update the "
            "gradients alone, as in loss, grads = jaxsparse.value_and_grad(loss_of)(params, "
            "batch), and the parameters that were differentiated, and put the exchange where it "
            "sees these alone, as in optax.lookahead(optax.chain(exchange, optimizer), ...)"
        )
    return shapes


def _check_shapes(updates: Any, shapes: Sequence[tuple[int, ...]], axis_name: str | None) -> None:
    """Raises ValueError unless gradients are rows of these shapes."""
    for (path, x), shape in zip(tree_leaves_with_path(updates), shapes):
        name = f"gradient{keystr(path)}"
        if jnp.shape(x) == shape:
            raise ValueError(
                f"axis_name={axis_name!r} is not bound here, and {name} of shape {shape} has no "
                "row for each worker: it has been averaged already, by JAX or by an exchange in "
                "front, or is one worker's row, or made anew. Take jaxsparse.value_and_grad in the "
                "place of jax.value_and_grad. A wrapper that keeps gradients, such as "
                "optax.MultiSteps, stands behind: jaxsparse.multi_steps(tx, k) stands around. (One "
                "worker's own gradients are exchanged where the axis is bound; axis_name=None is "
                "for a single worker)"
            )
        if jnp.shape(x)[1:] != shape:
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}, and its parameter {shape}: give each worker's "
                "gradient a row, as jaxsparse.value_and_grad does. A wrapper that reshapes them, "
                "such as optax.flatten, stands behind the exchange"
            )


def _shapes_in(updates: Any, state: Any) -> list[Any]:
    """The parameters' shapes, as far as accumulators of the state have them."""
    found: dict[str, tuple[int, ...]] = {}
    for field in (state.residual, state.momentum, state.pending or {}):
        for name, node in field.items():
            found[name] = node.value.shape[1:] if isinstance(node, PerWorker) else node.shape
    return [found.get(name) for name in short_names(updates)]


def check_own(updates: Any, params: Any, axis_name: str | None) -> None:
    """Raises ValueError unless one worker's gradients have the shapes of its parameters."""
    leaves, others = tree_leaves_with_path(updates), jax.tree.leaves(params)
    if len(leaves) != len(others):  # of a wrapper that has parameters of its own
        return
    for (path, x), param in zip(leaves, others):
        if jnp.shape(x) != jnp.shape(param):
            raise ValueError(
                f"axis_name={axis_name!r} makes this one worker's code, but gradient{keystr(path)} "
                f"has shape {jnp.shape(x)}, and its parameter {jnp.shape(param)}: gradients with a "
                "row for each worker are exchanged where the axis is not bound. (axis_name=None is "
                "for a single worker: leave it out)"
            )


def check_rows(updates: Any, state: Any, found: Workers, params: Any = None) -> None:
    """Raises ValueError unless gradients and state have a row for each worker, its own."""
    workers, axis_name = found.count, found.axis_name
    if params is not None:
        _check_shapes(updates, _shapes_of(params, len(jax.tree.leaves(updates))), axis_name)
    for path, x in tree_leaves_with_path(updates):
        if jnp.shape(x)[:1] != (workers,):
            raise ValueError(
                f"gradient{keystr(path)} has shape {jnp.shape(x)}, but there are {workers} workers "
                f"along {axis_name!r}: give jaxsparse.value_and_grad the same mesh or workers="
            )
    for path, x in own_leaves(state):
        if jnp.shape(x)[:1] != (workers,):
            raise ValueError(
                f"the state{keystr(path)} has shape {jnp.shape(x)}, without a row for each of the "
                f"{workers} workers: spread it by jaxsparse.shard(state, mesh), or make it by "
                "tx.init(params) from parameters on the mesh, or give the transformation mesh= or "
                "workers=. A state of another number of workers is carried over by "
                "jaxsparse.reshard(state, mesh)"
            )
    if workers > 1 and RUNNING.get() is None:  # or `jaxsparse.check` reads the whole chain
        check_front(updates, params, state)


def check_extra_args(updates: Any, extra_args: Mapping[str, Any]) -> None:
    """Raises ValueError if Optax's arguments of a value and a gradient have rows, as `updates`.

    What stands behind the exchange takes one for all workers. It might broadcast them in silence.
    """
    rows = [jnp.shape(x) for x in jax.tree.leaves(updates)]
    for path, x in tree_leaves_with_path(extra_args.get("value")):
        if jnp.shape(x)[:1] in {row[:1] for row in rows}:
            raise ValueError(
                f"value{keystr(path)} has shape {jnp.shape(x)}, a row for each worker, but what "
                "stands behind the exchange takes one for all of them: pass the mean, "
                "value=loss.mean()"
            )
    for (path, x), row in zip(tree_leaves_with_path(extra_args.get("grad")), rows):
        if jnp.shape(x) == row:
            raise ValueError(
                f"grad{keystr(path)} has shape {row}, a row for each worker, but what stands "
                "behind the exchange takes one for all of them: pass the mean. The exchange makes "
                "it: means, kept = exchange.update(grads, kept, params), and then "
                "optimizer.update(means, state, params, grad=means, ...)"
            )


def _split_unreduced(gradients: Any, axis_name: str | None) -> Any:
    """Gives each worker's partial sum of an unreduced gradient a row. It moves no data.

    On a mesh of Explicit axes, `jax.grad` with respect to parameters that are typed as reduced over
    an axis leaves gradients unreduced over it:

        typed = lambda w, spec: jax.reshard(w, PartitionSpec(*spec, reduced={"data"}))
        grads = jax.grad(loss)(jax.tree.map(typed, params, partitions), batch)

    There the loss is the mean over the whole batch. Partial sums of its gradient add up to the
    gradient, and an exchange takes means, so they are multiplied by the number of workers, W.

    Returns:
        The same tree. An array whose type is unreduced over `axis_name` has the shape (W, ...),
        split over this axis. All others stay.

    Raises:
        ValueError: a gradient is unreduced over another axis, too.
    """

    def one(path: KeyPath, x: Any) -> Any:
        sharding = getattr(jax.typeof(x), "sharding", None)
        spec = PartitionSpec() if sharding is None else sharding.spec
        if sharding is None or axis_name not in spec.unreduced:
            return x
        if set(spec.unreduced) != {axis_name}:
            raise ValueError(
                f"gradient{keystr(path)} has the type {jax.typeof(x)}, which is unreduced over "
                f"{tuple(spec.unreduced)} and not over {axis_name!r} alone: type parameters by "
                f"jax.reshard(w, PartitionSpec(*spec, reduced={{{axis_name!r}}}))"
            )
        workers = sharding.mesh.shape[axis_name]
        return jax.shard_map(
            lambda x: workers * x[None],
            mesh=sharding.mesh,
            in_specs=spec,
            out_specs=PartitionSpec(axis_name, *spec.partitions),
            check_vma=False,
        )(x)

    return tree_map_with_path(one, gradients)
