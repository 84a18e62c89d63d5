"""Diagnostics of error feedback, computed on request.

They are not part of the state, because a norm costs passes over the residual. A step whose
diagnostics nobody reads should not pay for them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxsparse.arrays.magnitude import norms
from jaxsparse.comm import wire
from jaxsparse.comm.marks import warn_of_copies
from jaxsparse.feedback.step import count_moved, saturating_sum
from jaxsparse.feedback.store import states_in
from jaxsparse.processes.group import group_with
from jaxsparse.training.zero1 import Zero1State


class Diagnostics(NamedTuple):
    """Scalars, equal on all workers, for all transformations in the state together."""

    # Root mean square over workers of their residuals' l2 norms. 0 with decay=0, which keeps none.
    residual_norm: Float[Array, ""]
    update_norm: Float[Array, ""] | None  # l2 norm of the updates; None without updates
    delivered: Int[Array, ""]  # int32: number of coordinates that the last update carried. Skipped
    # steps don't count, here and in `overflow`.
    delivered_share: Float[Array, ""] | None  # the same over all coordinates; None without updates
    # Share of them that are 0 in the updates, lost to what stands behind the exchange, as frozen
    # leaves are; None without updates. 1 in a skipped step, and where a delay delivers nothing yet.
    dropped_share: Float[Array, ""] | None
    overflow: Int[Array, ""]  # int32: number of entries without room in the last step's messages
    skipped: Int[Array, ""]  # int32: number of steps skipped because something was not finite

    def to_dict(self) -> dict[str, Float[Array, ""]]:
        """What is known, in float32 and by the names `jaxsparse/...`, for a tracker's log."""
        known = {name: x for name, x in self._asdict().items() if x is not None}
        return {f"jaxsparse/{name}": x.astype(jnp.float32) for name, x in known.items()}


def diagnose(state: Any, updates: Any = None, *, axis_name: str | None = "data") -> Diagnostics:
    """Reports how much was delivered and how much was held back.

    Call it in the step, or by itself now and then: `jaxsparse.diagnose(opt_state)`. Of several
    processes, all must call it. One that calls it alone, outside of `jax.jit`, logs a warning after
    ten seconds, and raises an error after those of `jaxsparse.fail_at_once(limit=600)`.

    It reads residuals and updates twice and sends a few numbers. It costs nothing if it is not
    called. It warns of residuals of which each device holds those of all workers, where it sees how
    they lie: outside of `jax.jit`, or on Explicit axes. Bytes are not among the results:
    `jaxsparse.wire_bytes` reads those of a step from the compiled step, without running it.

    Args:
        state: an Optax state, or any tree that contains one, such as a `TrainState`, or the state
            of `LocalSteps` or islands.
        updates: this step's updates, of the whole chain or of the transformation alone. They give
            `update_norm`, `delivered_share` and `dropped_share`. If that is large in a step with a
            learning rate above 0, keep the leaves that do not move out of the exchange.
        axis_name: the axis of workers. None: a single worker.

    Raises:
        ValueError: `state` contains no state of a jaxsparse transformation.
        RuntimeError: another process did not call it.
    """
    is_owned = lambda node: isinstance(node, Zero1State)
    owned = filter(is_owned, jax.tree.leaves(state, is_leaf=is_owned))
    found = [*states_in(state), *owned]
    if not found:
        raise ValueError(
            f"state, of type {type(state).__name__}, holds no state of a jaxsparse transformation: "
            "pass the optimizer's state, as tx.init made it (after nnx.split, call nnx.merge(...) "
            "first and pass optimizer.opt_state)"
        )
    warn_of_copies(axis_name, {"state": state}, stacklevel=3)
    if (group := group_with((found, updates))) is not None:
        group.meet("jaxsparse.diagnose")
    leaves = jax.tree.leaves(updates)
    residuals = jax.tree.leaves([one.residual for one in found])
    if wire.is_bound(axis_name):
        residual_norm, update_norm = _norms([residuals, leaves], axis_name)
    else:  # residuals have a row for each worker
        workers = jnp.float32(residuals[0].shape[0] if residuals else 1)
        residual_norm, update_norm = _norm(residuals) / jnp.sqrt(workers), _norm(leaves)
    counts = [saturating_sum(jnp.stack(parts)) for parts in zip(*(one.info for one in found))]
    delivered, overflow = counts
    elements = sum(x.size for x in leaves)
    share = delivered.astype(jnp.float32) / jnp.float32(max(elements, 1))
    return Diagnostics(
        residual_norm=residual_norm,
        update_norm=None if updates is None else update_norm,
        delivered=delivered,
        delivered_share=None if updates is None else share,
        dropped_share=None if updates is None else _dropped(leaves, delivered),
        overflow=overflow,
        skipped=sum((one.skipped for one in found), jnp.int32(0)),
    )


def _dropped(updates: list[Any], delivered: Int[Array, ""]) -> Float[Array, ""]:
    """The share of delivered coordinates that are too many for those of the updates that move."""
    lost = jnp.maximum(delivered - count_moved(updates), 0).astype(jnp.float32)
    return lost / jnp.maximum(delivered, 1).astype(jnp.float32)


def _norms(groups: list[list[Any]], axis_name: str | None) -> Float[Array, " groups"]:
    """For each list of arrays, the root mean square over workers of its l2 norm."""
    own = wire.varying(jnp.stack([_norm(group) for group in groups]), axis_name)
    return norms(wire.all_gather(own, axis_name).T, reduce=jnp.mean)


def _norm(arrays: list[Any]) -> Float[Array, ""]:
    parts = [norms(jnp.asarray(x).astype(jnp.float32), axis=None) for x in arrays]
    return norms(jnp.stack([jnp.float32(0), *parts]), axis=None)
