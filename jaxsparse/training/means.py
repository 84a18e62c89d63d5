"""Means over all items, such as tokens, of which workers and micro-batches have unequal numbers.

Sums add up over micro-batches and over workers, and means do not. So losses and gradients stay sums
until all are there, and are divided once.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_map_with_path


def mean_of(sums: Any, count: Any) -> Any:
    """Each worker's sums over its items, divided so that their mean is that over all items.

        def loss_of(params, batch):
            each = cross_entropy(params, batch) * batch["mask"]
            return each.sum(), batch["mask"].sum()  # and no mean: sums add up

        (total, tokens), grads = jaxsparse.value_and_grad(loss_of, has_aux=True)(params, batch)
        loss, grads = jaxsparse.mean_of((total, grads), tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        loss = loss.mean()  # over all tokens

    An exchange takes the mean over workers, and each counts alike. A mean over a worker's own
    tokens is therefore no part of the mean over all of them. This returns `W sums / count.sum()`,
    whose mean over workers is. It stands behind the gradients, where a scan over micro-batches has
    added up sums and counts. Workers send four bytes for it.

    Args:
        sums: arrays (W, ...) with a row for each worker, real numbers of any dtypes: sums of losses
            and of other outputs, and their gradients.
        count: (W,), real numbers of at least 0 in 32 bits or integers: how many items each worker
            has summed over.

    Returns:
        The tree in its shapes. Floats keep their dtypes, and other numbers become float32. All of
        it is 0 if no worker has items. All of it is NaN if a count is negative or NaN, or their sum
        infinite, so that the exchange skips the step.

    Raises:
        ValueError: `count` or an array has no such rows, or `count` is a float of 16 bits.

    Example:
        >>> totals, counts = jnp.float32([30, 40]), jnp.int32([30, 10])
        >>> mean_of(totals, counts).mean().tolist()  # 70 / 40
        1.75
    """
    shape: tuple[int, ...]
    dtype: Any
    found, shape, dtype = f"is a {type(count).__name__}", (), None
    with contextlib.suppress(TypeError, ValueError):  # of trees, such as auxiliary output
        count = jnp.asarray(count)
        shape, dtype = count.shape, count.dtype
        found = f"has shape {shape} and dtype {dtype}"
    if len(shape) != 1 or not _is_real(dtype):
        raise ValueError(
            f"count {found}, and needs a number for each worker, (W,). "
            "In the loss, return sums: `return total, count`. Divide behind the gradients: "
            "`(total, count), grads = jaxsparse.value_and_grad(loss_of, has_aux=True)(params, "
            "batch)` and `loss, grads = jaxsparse.mean_of((total, grads), count)`. (The step of "
            "jaxsparse.LocalSteps divides by its own count, and weight= gives that to LocalSteps)"
        )
    check_counts("count", dtype)
    wide = count.astype(jnp.result_type(float))
    mean = wide.mean()
    mean = jnp.where(jnp.all(wide >= 0) & jnp.isfinite(mean), mean, jnp.nan)

    def divided(path: Any, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.shape[:1] != shape or not (_is_real(x.dtype) or x.dtype == bool):
            raise ValueError(
                f"sums{keystr(path)} has shape {x.shape} and dtype {x.dtype}, and count has "
                f"{shape[0]} workers: give real numbers with a row for each, as "
                "jaxsparse.value_and_grad returns them. (Gradients of parameters that are cut over "
                "the workers are means of sums, without rows: divide them by count.mean())"
            )
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)
        own = mean.astype(jnp.float32 if dtype.itemsize < 4 else dtype)  # 70,000 is no float16
        return jnp.where(own == 0, 0, x.astype(own.dtype) / own).astype(dtype)

    return tree_map_with_path(divided, sums)


def check_counts(name: str, dtype: Any) -> None:
    """Raises ValueError if counts in this dtype are rounded already."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        raise ValueError(
            f"{name} has dtype {dtype}, which skips whole numbers from "
            f"{2 ** (jnp.finfo(dtype).nmant + 1)} on: count in 32 bits, as in "
            "mask.sum(dtype=jnp.float32)"
        )


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
