"""Means over workers that count unequally, such as by their numbers of tokens."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxsparse.comm import wire

T = TypeVar("T")


def weighted(tree: T, weight: Any, *, axis_name: str | None = "data") -> T:
    """A worker's own means, scaled so that their mean over workers is that of all data together.

    An exchange takes the mean over workers, and each counts alike. If a loss is a mean over a
    worker's own tokens, and workers have unlike numbers of them, that is not the mean over all
    tokens. Multiplied by `weight / pmean(weight)`, it is:

        def loss_of(params, batch):
            each = cross_entropy(params, batch) * batch["mask"]
            tokens = batch["mask"].sum()
            return jaxsparse.weighted(each.sum() / jnp.maximum(tokens, 1), tokens)

        losses, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
        loss = losses.mean()  # over all tokens

    Scaling the gradients instead of the loss gives the same. It takes a message of four bytes.

    Args:
        tree: floating-point arrays: a loss, or gradients.
        weight: what this worker counts, a real scalar of any dtype, at least 0: its number of
            tokens. `jax.grad` takes it for a constant.
        axis_name: the axis of the workers, bound here. None: a single worker.

    Returns:
        The tree in its shapes and dtypes. All of it is 0 where the weight is 0, even if a mean over
        no tokens is NaN, and everywhere if all weights are 0. It is NaN where a weight is negative
        or NaN, so that the exchange skips the step.

    Raises:
        ValueError: the weight is no scalar, an array is not of floats, or the axis is not bound.

    Example:
        >>> step = lambda loss, tokens: jax.lax.pmean(weighted(loss, tokens), "data")
        >>> losses, tokens = jnp.float32([1, 4]), jnp.int32([30, 10])
        >>> float(jax.vmap(step, axis_name="data")(losses, tokens)[0])  # (30 + 40) / 40
        1.75
    """
    workers = wire.axis_size(axis_name)  # raises if it is not bound
    check_weight(weight)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise ValueError(
                f"leaf{jax.tree_util.keystr(path)} has dtype {jnp.result_type(x)}, which has no "
                "mean: give the loss or gradients alone, of floats"
            )
    own = jax.lax.stop_gradient(jnp.asarray(weight).astype(jnp.result_type(float)))
    mean = wire.psum(wire.varying(own, axis_name), axis_name) / workers
    share = jnp.where(own > 0, own / jnp.where(mean > 0, mean, 1), 0)
    share = jnp.where(own >= 0, share, jnp.nan)

    def scaled(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        wide = x.astype(share.dtype) if x.dtype.itemsize < share.dtype.itemsize else x
        return jnp.where(share == 0, 0, wide * share.astype(wide.dtype)).astype(x.dtype)

    return jax.tree.map(scaled, tree)


def mean_of(total: Any, count: Any, *, axis_name: str | None = "data") -> jax.Array:
    """A worker's share of a mean over all workers' items, such as a loss over tokens.

        def loss_of(params, batch):
            each = cross_entropy(params, batch) * batch["mask"]
            return jaxsparse.mean_of(each.sum(), batch["mask"].sum())

    An exchange takes the mean over workers, and each counts alike. `each.sum() / mask.sum()` is a
    mean over a worker's own tokens, so workers with few tokens count too much. This is
    `total / pmean(count)`: the mean of it over workers is the mean over all tokens. It takes a
    message of four bytes.

    Args:
        total: the sum over this worker's items, a floating-point scalar.
        count: their number, a real scalar, at least 0. `jax.grad` takes it for a constant.
        axis_name: the axis of the workers, bound here. None: a single worker.

    Returns:
        A scalar of the dtype of `total`. It is 0 if no worker has items.

    Raises:
        ValueError: the axis is not bound, or `count` is no such scalar.

    Example:
        >>> totals, counts = jnp.float32([30, 40]), jnp.int32([30, 10])
        >>> jax.vmap(mean_of, axis_name="data")(totals, counts).mean().tolist()  # 70 / 40
        1.75
    """
    workers = wire.axis_size(axis_name)  # raises if it is not bound
    check_weight(count)
    own = jax.lax.stop_gradient(jnp.asarray(count).astype(jnp.result_type(float)))
    mean = wire.psum(wire.varying(own, axis_name), axis_name) / workers
    has_items = mean > 0
    share = total / jnp.where(has_items, mean, 1).astype(total.dtype)
    return jnp.where(has_items, share, 0)


def check_weight(weight: Any) -> None:
    """Raises ValueError unless the weight is a real scalar."""
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    is_real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if shape or not is_real:
        raise ValueError(
            f"weight has shape {shape} and dtype {dtype}, but it is one number for a worker: give "
            "its number of tokens, as mask.sum() counts them"
        )
