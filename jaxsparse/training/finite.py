"""A check, for debugging, that names the leaf and the worker whose gradient skips steps."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.tree_util import keystr, tree_leaves_with_path

from jaxsparse.processes.group import whole_group

_MOST = 10  # an error names no more


def check_finite(grads: Any) -> None:
    """Raises an error that names the leaves and workers whose gradients are not finite.

        if jaxsparse.diagnose(opt_state).skipped:
            jaxsparse.check_finite(jaxsparse.grad(loss_of)(params, batch))

    An exchange skips a step if a gradient is not finite, and counts it. It names nothing, because
    the compiled step would have to stop, or to keep all gradients until it is known. What stands
    behind the exchange sees zeros in a skipped step, so the same batch shows it again.

    Args:
        grads: gradients with a row for each worker, from `jaxsparse.value_and_grad`. All processes
            must call it. One that calls it alone logs a warning after ten seconds, and raises an
            error after those of `jaxsparse.fail_at_once(limit=600)`.

    Raises:
        FloatingPointError: something is not finite. All processes raise it.
        ValueError: gradients are traced, inside a compiled function.
        RuntimeError: another process did not call it.

    Example:
        >>> check_finite({"w": jnp.ones((2, 3)).at[1, 0].set(jnp.nan)})
        Traceback (most recent call last):
        FloatingPointError: gradient['w'] of worker 1 has 1 NaN and 0 infinities among 3 elements
    """
    is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    leaves = [(path, x) for path, x in tree_leaves_with_path(grads) if is_float(x)]
    for path, x in leaves:
        if isinstance(x, jax.core.Tracer):
            raise ValueError(
                f"gradient{keystr(path)} is traced: call check_finite outside of jax.jit"
            )
        if not jnp.ndim(x):
            raise ValueError(
                f"gradient{keystr(path)} is a scalar: give gradients with a row for each worker"
            )
    if not leaves:
        return
    if jax.process_count() > 1 and (group := whole_group()) is not None:
        group.meet("jaxsparse.check_finite")
    counts = jax.jit(_count)([x for _, x in leaves])
    found = [
        f"gradient{keystr(path)} of worker {i}{_process_of(x, i)} has {nan} NaN and {infinite} "
        f"infinities among {math.prod(x.shape[1:])} elements"
        for (path, x), rows in zip(leaves, counts)
        for i, (nan, infinite) in enumerate(multihost_utils.process_allgather(rows, tiled=True))
        if nan or infinite
    ]
    if found:
        more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
        raise FloatingPointError("; ".join(found[:_MOST] + more))


def _count(leaves: list[Any]) -> list[Any]:
    """How many elements of each row are NaN, and how many infinite: one (W, 2) a leaf."""
    axes = lambda x: tuple(range(1, x.ndim))
    count = lambda is_it, x: is_it(x).sum(axes(x), dtype=jnp.int32)
    return [jnp.stack([count(jnp.isnan, x), count(jnp.isinf, x)], axis=1) for x in leaves]


def _process_of(x: Any, row: int) -> str:
    """The process that holds a row, in words. Nothing if there is only one."""
    if jax.process_count() == 1:
        return ""
    places: Any = x.sharding.devices_indices_map(x.shape)
    rows_of = lambda index: range(*index[0].indices(x.shape[0]))
    holders = [device for device, index in places.items() if row in rows_of(index)]
    return f" (process {min(device.process_index for device in holders)})"
