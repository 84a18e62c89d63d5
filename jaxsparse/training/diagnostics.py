"""What error feedback is doing, computed when asked for and carried nowhere.

It is a function and no part of the state, because a norm costs passes over the residual that a step
which nobody looks at should not pay.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxsparse.collectives import wire
from jaxsparse.feedback import ErrorFeedbackState
from jaxsparse.feedback.exchange import saturating_sum
from jaxsparse.training.marks import AxisName, is_sharded, shards_of


class Diagnostics(NamedTuple):
    """Scalars, equal on all workers; sums over the transformations found."""

    residual_norm: Float[Array, ""]  # root mean square over workers of their residuals' l2 norms
    update_norm: Float[Array, ""] | None  # l2 norm of the updates; None without these
    delivered: Int[Array, ""]  # int32: coordinates that the last update carried; skipped steps
    # don't count, here and for `overflow`
    delivered_share: Float[Array, ""] | None  # of all coordinates; None without updates
    overflow: Int[Array, ""]  # int32: entries kept back in the last step for want of capacity
    skipped: Int[Array, ""]  # int32: steps skipped so far because something was not finite


def diagnose(
    state: Any, updates: Any = None, *, axis_name: AxisName | None = "data"
) -> Diagnostics:
    """Norms and counts of what is delivered and what is held back.

    Runs where the axes of workers are bound: in the step, or by itself now and then,

        diagnose = jaxsparse.data_parallel(jaxsparse.diagnose, mesh, batch_argnums=())
        print(diagnose(opt_state))

    It reads residuals and updates twice and sends a few numbers, and where it is not called it
    costs nothing. The bytes of a step do not change from one to the next, and are
    read once from the compiled step, by `jaxsparse.traffic.wire_bytes`.

    Args:
        state: an Optax state, or any tree that contains one, such as a `TrainState`.
        updates: of this step, of the whole chain or of the transformation alone; their norm is
            reported, and delivered coordinates as a share of their elements.
        axis_name: the axis of workers, or both of a mesh with two levels, the fast one last; None
            for a single worker.

    Raises:
        ValueError: no state of a jaxsparse transformation is in `state`, or an axis is not bound.
    """
    found = _states(state)
    if not found:
        raise ValueError(
            f"state, of type {type(state).__name__}, holds no state of a jaxsparse transformation: "
            "pass the optimizer's state, as tx.init made it (of nnx.split, nnx.merge(...) first, "
            "and then optimizer.opt_state)"
        )
    axes = (axis_name,) if axis_name is None or isinstance(axis_name, str) else axis_name
    sizes = [wire.axis_size(axis) for axis in axes]
    workers, shards = math.prod(sizes), math.prod(sizes[1:])

    residuals = [
        (x, sizes[0] if shards_of(path) else workers)
        for one in found
        for path, x in jax.tree_util.tree_flatten_with_path(one.residual)[0]
    ]
    leaves = jax.tree_util.tree_flatten_with_path(updates)[0]
    changes = [(x, sizes[0] if is_sharded(path) else workers) for path, x in leaves]
    residual_norm, update_norm = _norms([residuals, changes], axes)
    counts = [saturating_sum(jnp.stack(parts)) for parts in zip(*(one.info for one in found))]
    delivered, overflow = counts
    elements = sum(x.size * (shards if is_sharded(path) else 1) for path, x in leaves)
    share = delivered.astype(jnp.float32) / jnp.float32(max(elements, 1))
    return Diagnostics(
        residual_norm=residual_norm,
        update_norm=None if updates is None else update_norm,
        delivered=delivered,
        delivered_share=None if updates is None else share,
        overflow=overflow,
        skipped=sum((one.skipped for one in found), jnp.int32(0)),
    )


def _states(tree: Any) -> list[ErrorFeedbackState]:
    is_state = lambda node: isinstance(node, ErrorFeedbackState)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]


def _norms(
    groups: list[list[tuple[Any, int]]], axes: tuple[str | None, ...]
) -> tuple[Float[Array, ""], ...]:
    """The l2 norm of each group's arrays, of which so many workers hold a copy or a peer."""
    # Squares of large numbers overflow, and of small ones vanish, unless scaled first.
    largest = _varying(jnp.stack([_largest(x for x, _ in group) for group in groups]), axes)
    for axis in axes:
        largest = wire.pmax(largest, axis)
    scale = jnp.where(largest > 0, largest, jnp.float32(1))

    squares = []
    for group, unit in zip(groups, scale):
        parts = [jnp.sum(jnp.square(_float(x) / unit)) / copies for x, copies in group]
        squares.append(sum((_varying(part, axes) for part in parts), jnp.float32(0)))
    total = wire.psum(_varying(jnp.stack(squares), axes), tuple(a for a in axes if a is not None))
    return tuple(scale * jnp.sqrt(total))


def _largest(arrays: Iterable[Any]) -> Float[Array, ""]:
    largest = (jnp.max(jnp.abs(_float(x)), initial=0) for x in arrays)
    return functools.reduce(jnp.maximum, largest, jnp.float32(0))


def _float(x: Any) -> Float[Array, "..."]:
    return jnp.asarray(x).astype(jnp.float32)


def _varying(x: Array, axes: tuple[str | None, ...]) -> Array:
    for axis in axes:
        x = wire.varying(x, axis)
    return x
