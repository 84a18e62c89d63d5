"""What error feedback refuses, and why."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse import layout as layouts
from jaxsparse.collectives import wire
from jaxsparse.feedback.levels import Levels
from jaxsparse.feedback.state import ErrorFeedbackState
from jaxsparse.settings import static_int


def check_momentum(momentum: Any) -> None:
    """Raises ValueError unless it is None or a scalar in [0, 1); of traced ones, the shape only."""
    if momentum is None:
        return
    if jnp.ndim(momentum) != 0:
        raise ValueError(
            f"momentum has shape {jnp.shape(momentum)}: pass a scalar in [0, 1), the same for all "
            "leaves (optax.multi_transform treats leaves differently)"
        )
    if not isinstance(momentum, jax.core.Tracer) and not 0 <= float(momentum) < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1); use None for no momentum")


def check_delay(delay: Any) -> bool:
    """Whether the exchange is delayed; a ValueError unless it is 0, 1 or None (for 0)."""
    if delay is None:
        return False
    steps = static_int("delay", delay)
    if steps not in (0, 1):
        raise ValueError(
            f"delay={steps} must be 0, for the mean of this step's gradients, or 1, for last step's"
        )
    return steps == 1


def check_local(updates: Any, levels: Levels) -> None:
    """Raises ValueError if JAX knows that gradients have been summed which are to be exchanged."""
    for axis in levels.summed_axes:
        if not wire.tracks_replication(axis):
            continue
        axes = levels.summed_axes if len(levels.summed_axes) > 1 else axis
        for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
            if leaf.size and not wire.is_varying(leaf, axis):
                raise ValueError(
                    f"gradient{jax.tree_util.keystr(path)} is equal on all workers of axis "
                    f"{axis!r}: JAX has already summed it, uncompressed, because it was taken "
                    "with respect to replicated parameters. Differentiate with respect to "
                    f"jaxsparse.local(params, {axes!r}) instead, and do not average gradients "
                    "yourself. (If it is a constant, make it local with jaxsparse.local, too)"
                )


def check_shards(updates: Any, layout: layouts.Layout, levels: Levels) -> None:
    """Raises ValueError if a compressed leaf is no shard but equal along the fast axis."""
    axis = levels.dense_axis
    if not levels.sharded or axis is None or not wire.tracks_replication(axis):
        return
    leaves = layout.treedef.flatten_up_to(updates)
    for i in sorted({piece.leaf for bucket in layout.buckets for piece in bucket}):
        if not wire.is_varying(leaves[i], axis):
            raise ValueError(
                f"gradient{layout.paths[i]} is compressed and equal along dense_axis={axis!r}, "
                "where sharded=True expects shards: each device would deliver other parts of it, "
                "and its copies would drift apart. Let it go uncompressed "
                "(is_dense=lambda path, shape: ..., or None in a policy), or shard the parameter"
            )


def check_state(
    state: ErrorFeedbackState,
    shards: tuple[int, ...],
    dense_size: int,
    *,
    has_momentum: bool,
    is_delayed: bool,
    dtype: Any,
    parts: int | None,
) -> None:
    """Raises ValueError if the state was made for other gradients or settings."""
    sizes = tuple(node.value.shape[-1] for node in state.residual)
    if sizes != shards:
        raise ValueError(
            f"the state holds residuals of sizes {sizes}, the gradients fill buckets of sizes "
            f"{shards}: pass the state that init(params) made for the same tree and settings"
        )
    made_for = {getattr(node, "shards", None) for node in state.residual} - {parts}
    if made_for:
        raise ValueError(
            f"the state is of {made_for.pop()} shards along the fast axis, where there are {parts} "
            "(None: on one level): pass the state that init(params) made on this mesh"
        )
    kept = {str(leaf.dtype) for leaf in jax.tree.leaves((state.residual, state.momentum))}
    if kept - {str(dtype)}:
        raise ValueError(
            f"the state holds residuals or momenta in {sorted(kept)}, and accumulator_dtype is "
            f"{dtype}: pass the state that init(params) made for the same settings"
        )
    momenta = len(state.momentum), _size(state.dense_momentum)
    if momenta != ((len(sizes), dense_size or None) if has_momentum else (0, None)):
        raise ValueError(
            f"the state holds momentum for {momenta[0]} buckets and {momenta[1]} dense elements, "
            f"the gradients fill {len(sizes)} and {dense_size}, and momentum is "
            f"{'on' if has_momentum else 'off'}: pass the state that init(params) made for the "
            "same tree and settings"
        )
    if _size(state.pending) != (dense_size or None if is_delayed else None):
        raise ValueError(
            f"the state holds {_size(state.pending)} delayed dense elements, and the gradients "
            f"have {dense_size} with delay={int(is_delayed)}: pass the state that init(params) "
            "made for the same tree and settings"
        )


def _size(node: Any) -> int | None:
    """Elements of a buffer, or None if there is none."""
    leaves = jax.tree.leaves(node)
    return leaves[0].size if leaves else None
