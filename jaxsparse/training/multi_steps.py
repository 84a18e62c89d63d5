"""Gradients added up over calls of a chain, for trainers that call it once a micro-batch."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxsparse.arrays.layout import named_shapes
from jaxsparse.arrays.settings import static_count
from jaxsparse.comm import marks, wire
from jaxsparse.comm.marks import PerWorker
from jaxsparse.comm.workers import Workers
from jaxsparse.feedback.front import marked
from jaxsparse.feedback.options import check_transformation
from jaxsparse.feedback.rows import check_extra_args, check_rows
from jaxsparse.feedback.store import check_made
from jaxsparse.feedback.transformations import Exchange
from jaxsparse.training.per_worker import per_worker


def multi_steps(
    tx: optax.GradientTransformation,
    every_k: int,
    *,
    axis_name: str | None = "data",
    mesh: Mesh | None = None,
    workers: int | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a chain with an exchange at every k-th call, on the mean of k gradients.

        tx = jaxsparse.multi_steps(
            optax.chain(jaxsparse.top_k(0.01), optax.adamw(1e-3)), every_k=4
        )

    It is `optax.MultiSteps` for gradients with a row for each worker, for trainers that call the
    optimizer once a micro-batch. Calls in between send nothing, return zeros, and leave the chain's
    state as it is. Optax' own takes rows for one gradient, and runs its chain at every call. A step
    that can be edited needs neither: it adds up gradients in a scan, and exchanges once. Then
    messages may hide behind the backward pass, too, which those of a `lax.cond` do not.
    (`wire_bytes` counts the branch that exchanges at each call of a loop.)

    Each worker keeps the sum of its gradients in float32. If something in it is not finite, the
    exchange skips the step, and all k gradients are lost. With unequal numbers of tokens the mean
    of micro-batches' means is not the mean of all tokens: add up sums in the step.

    Args:
        tx: the whole chain. What stands in front of the exchange there sees means. What stands
            behind `multi_steps` would see zeros, as Adam's moments and a weight decay must not.
        every_k: the number of calls that make a step.
        axis_name: the axis of the workers, as for the exchange. None: a single worker.
        mesh: the mesh, as for the exchange.
        workers: number of workers to simulate, as for the exchange.
        specs: partitions of the parameters, as for the exchange.

    Returns:
        A transformation whose state is an `optax.MultiStepsState`. Its `acc_grads` are marked
        `PerWorker`, so they are saved, spread and resharded like residuals.

    Raises:
        ValueError: `tx` is no transformation, or an exchange alone, or `every_k` is no positive
            integer. From `update`: no exchange in `tx` takes the rows; see `per_worker`.

    Example:
        >>> import jaxsparse
        >>> chain = optax.chain(jaxsparse.dense(axis_name=None), optax.scale(-1.0))
        >>> tx = multi_steps(chain, 2, axis_name=None)
        >>> state = tx.init(jnp.zeros(2))
        >>> updates, state = tx.update(jnp.float32([1, 3]), state)
        >>> updates.tolist()
        [0.0, 0.0]
        >>> updates, state = tx.update(jnp.float32([3, 5]), state)
        >>> updates.tolist()
        [-2.0, -4.0]
    """
    check_transformation("tx", tx, "optax.chain(jaxsparse.top_k(0.01), optax.sgd(0.1))")
    if isinstance(tx, Exchange):
        raise ValueError(
            "tx is an exchange alone, and an optimizer behind multi_steps would see zeros in the "
            "calls in between: give the whole chain, as in jaxsparse.multi_steps(optax.chain("
            "exchange, optimizer), 4)"
        )
    every_k = static_count("every_k", every_k)
    tx = optax.with_extra_args_support(tx)
    zeros = lambda params: optax.tree.zeros_like(params, dtype=jnp.float32)
    sums = per_worker(
        optax.GradientTransformation(zeros, lambda updates, state, params=None: (updates, state)),
        axis_name=axis_name,
        mesh=mesh,
        workers=workers,
        specs=specs,
    )

    def init(params: Any) -> optax.MultiStepsState:
        start, inner = jnp.int32(0), tx.init(params)
        return optax.MultiStepsState(start, jnp.int32(0), inner, sums.init(params), ())

    def update(
        updates: Any, state: optax.MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, optax.MultiStepsState]:
        check_made(state, optax.MultiStepsState)
        is_own = wire.is_bound(axis_name)
        if is_own:
            before = PerWorker.unwrap(state.acc_grads)
        else:
            found = Workers.find((updates, state), axis_name, mesh, workers)
            check_rows(updates, state.acc_grads, found, params)
            check_extra_args(updates, extra_args)
            before = jax.tree.map(
                lambda node: getattr(node, "value", node),
                state.acc_grads,
                is_leaf=marks.is_per_worker,
            )
        if named_shapes(before) != named_shapes(updates):
            raise ValueError(
                f"the state has sums of {named_shapes(before)}, and the gradients are "
                f"{named_shapes(updates)}: pass the state that init(params) of this multi_steps "
                "made for the same tree. (That of optax.MultiSteps has no row for each worker)"
            )
        added = lambda g, total: jnp.where(state.mini_step == 0, 0, total) + g.astype(total.dtype)
        total = jax.tree.map(added, updates, before)

        count = (state.mini_step + 1).astype(jnp.float32)

        def run(total: Any, inner: Any, params: Any) -> tuple[Any, Any]:
            means = jax.tree.map(lambda x, g: (x / count).astype(g.dtype), total, updates)
            means = means if is_own else marked(means)  # the sum's rows were read above
            return tx.update(means, inner, params, **extra_args)

        given = total, state.inner_opt_state, params
        delivered, after = jax.eval_shape(run, *given)
        shapes = zip(jax.tree.leaves(delivered), jax.tree.leaves(updates))
        is_mean = is_own or not any(x.shape == row.shape for x, row in shapes)
        if not is_mean or named_shapes(after) != named_shapes(state.inner_opt_state):
            raise ValueError(
                "tx has no exchange that takes the mean of rows, or in front of it a state of one "
                "worker, as Adam's: give jaxsparse.multi_steps(optax.chain(jaxsparse.top_k(0.01), "
                "optax.adam(1e-3)), 4), or put Adam into jaxsparse.per_worker"
            )
        wait = lambda _, inner, params: (optax.tree.zeros_like(delivered), inner)
        is_last = state.mini_step >= every_k - 1  # a restored state may have had a larger k
        delivered, inner = jax.lax.cond(is_last, run, wait, *given)
        step = optax.MultiStepsState(
            mini_step=jnp.where(is_last, 0, state.mini_step + 1),
            gradient_step=jnp.where(
                is_last, optax.safe_increment(state.gradient_step), state.gradient_step
            ),
            inner_opt_state=inner,
            acc_grads=PerWorker.wrap(total) if is_own else jax.tree.map(PerWorker, total),
            skip_state=(),
        )
        return delivered, step

    return optax.GradientTransformationExtraArgs(init, marks.on_plain_arrays(update))
