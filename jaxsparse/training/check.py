"""Checks that rows of gradients end in an exchange alone, and that their mean is the batch's."""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.tree_util import keystr, tree_leaves_with_path

from jaxsparse.arrays.layout import named_shapes
from jaxsparse.comm.workers import Running, running
from jaxsparse.feedback import front
from jaxsparse.feedback.options import check_transformation
from jaxsparse.training import gradients
from jaxsparse.training.chains import warn_of_chains, warn_of_masks

# So many workers are traced. Few sizes of arrays are equal to it by chance.
_WORKERS = 3
# And so many to see whether that changes what is done. Rows of a mask by size are larger then.
_MORE_WORKERS = 64


def check(tx: optax.GradientTransformation, params: Any, *, axis_name: str = "data") -> None:
    """Checks that an Optax chain takes gradients with a row for each worker, and returns means.

    `jaxsparse.value_and_grad` gives each worker's gradients a row. `jaxsparse.per_worker` keeps the
    rows apart, and an exchange makes means of them. A transformation of Optax in front of the
    exchange, or a wrapper around it, does not know rows. It may sum over them, as
    `optax.clip_by_global_norm` does, or keep them in its state, as `optax.trace` does. The first is
    refused without this check, where `value_and_grad` and `update` are in one `jax.jit`.

    It traces `tx.init` and `tx.update` for a few workers, and computes nothing. It also warns of
    what trains otherwise than it reads: clips, weight decay and momentum behind an exchange with
    momentum, updates that are exchanged and dropped, and masks in front of an exchange that are
    functions and tell vectors by their number of axes, which rows have one more of.

    Args:
        tx: the whole chain.
        params: parameters, or their shapes and dtypes.
        axis_name: the axis of the workers.

    Raises:
        ValueError: names each update that still has rows, each array of the state whose shape
            changes, each operation in front of the exchange that is not elementwise, or moves
            elements along the axis of rows, and branches around it.

    Example:
        >>> import jaxsparse
        >>> tx = optax.chain(optax.clip_by_global_norm(1.0), jaxsparse.dense(), optax.sgd(0.1))
        >>> check(tx, {"w": jnp.zeros((2, 5))})
        Traceback (most recent call last):
        ...
        ValueError: the chain mixes the rows of workers. In front of the exchange, the ...
    """
    check_transformation("tx", tx, "optax.chain(jaxsparse.dense(), optax.sgd(0.1))")
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    program, state, updates, after = _traced(tx, own, axis_name)
    count = len(jax.tree.leaves(_differentiated(own)))
    warn_of_chains(program.jaxpr, count, len(jax.tree.leaves(own)))
    problems = [*map(front.refusal, front.mixed_in(program.jaxpr))]
    wanted = named_shapes(own)
    for name, shape in named_shapes(updates).items():
        if shape != wanted.get(name):
            problems.append(
                f"The update{name} has shape {shape}, and its parameter {wanted.get(name)}: no "
                "exchange takes it. Chain one in front, as in optax.chain(jaxsparse.dense(), "
                "optimizer)"
            )
    before = named_shapes(state)
    for name, shape in named_shapes(after).items():
        if shape != before.get(name, shape):  # optax.monitor has arrays from its first step on
            problems.append(
                f"The state{name} has shape {before.get(name)} at first and {shape} after a step: "
                "put its transformation behind the exchange, or in jaxsparse.per_worker"
            )
    if problems:
        raise ValueError("the chain mixes the rows of workers. " + ". ".join(problems))
    _warn_of_masks(tx, own, axis_name, program)


def check_loss(
    fun: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    tolerance: float = 1e-3,
    **options: Any,
) -> None:
    """Checks that the mean of workers' gradients is the gradient of the whole batch.

    So it is of a loss that is a mean over rows. It is not of a sum, of a mean over tokens of which
    workers have unlike numbers, of statistics of the batch (BatchNorm), or of noise that each
    worker draws. For a test of your own: one device simulates the workers, if no mesh is given.

    Args:
        fun: function of a scalar loss, as for `jaxsparse.value_and_grad`.
        params: what is differentiated.
        args: what else `fun` takes, first the batch.
        has_aux: whether `fun` returns a pair of the loss and auxiliary output.
        tolerance: how far gradients may differ, over the largest element of each leaf.
        options: of `jaxsparse.value_and_grad`. Without `mesh`, `workers` is 8 if not given.

    Raises:
        ValueError: names a leaf, how far it is off, and what that means. Or the loss names the
            workers' axis, and has no gradient of the whole batch.

    Example:
        >>> check_loss(lambda w, x: ((x @ w) ** 2).sum(), jnp.ones(3), jnp.ones((16, 3)))
        Traceback (most recent call last):
        ...
        ValueError: the mean gradient of 8 workers is 0.125 times that of the whole batch ...
    """
    given = options
    if "mesh" not in options:  # one device simulates the workers, wherever arrays lie
        given = {"workers": 8} | options
        params, args = jax.tree.map(_on_host, (params, args))
    own = gradients.grad(fun, has_aux=has_aux, **given)
    rows = own(params, *args)
    try:
        whole = jax.grad(fun, has_aux=has_aux)(params, *args)
    except NameError as error:
        raise ValueError(
            f"the loss names an axis ({error}), as dropout and BatchNorm of several workers do, "
            "and has no gradient of the whole batch: check it without that part"
        ) from error
    rows, whole = (rows[0], whole[0]) if has_aux else (rows, whole)
    workers = jax.tree.leaves(rows)[0].shape[0]
    for (path, row), right in zip(tree_leaves_with_path(rows), jax.tree.leaves(whole)):
        mean, right = np.asarray(row, np.float64).mean(0), np.asarray(right, np.float64)
        if np.max(np.abs(mean - right), initial=0) <= tolerance * np.max(np.abs(right), initial=0):
            continue
        most, name = np.abs(right).max(), keystr(path) or "params"
        factor = np.vdot(mean, right) / max(np.vdot(right, right), np.finfo(float).tiny)
        if np.allclose(mean, factor * right, atol=tolerance * most):
            raise ValueError(
                f"the mean gradient of {workers} workers is {factor:.4g} times that of the whole "
                f"batch at {name}: the loss is a sum over rows, or is divided by the rows of all "
                "workers. Divide it by the rows that it sees"
            )
        raise ValueError(
            f"the mean gradient of {workers} workers differs from that of the whole batch at "
            f"{name}, by up to {np.abs(mean - right).max():.3g} where that has up to {most:.3g}: "
            "the loss is no mean over rows. With unlike numbers of tokens take jaxsparse.mean_of. "
            "Statistics of the batch, and noise, are each worker's own"
        )


def _on_host(x: Any) -> Any:
    is_array = isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return jax.device_get(x) if is_array else x


def _warn_of_masks(
    tx: optax.GradientTransformation, own: Any, axis_name: str, program: ClosedJaxpr
) -> None:
    """Warns of masks in front of the exchange that see rows, as they are functions.

    They show where the numbers of axes and of elements are others, and nothing else is: where
    vectors are scalars, and there are more workers.
    """
    thin = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((), x.dtype) if len(x.shape) == 1 else x, own
    )
    try:
        with warnings.catch_warnings(action="ignore"):
            other = _traced(tx, thin, axis_name, _MORE_WORKERS)[0]
    except Exception:  # it was made for these shapes alone, and nothing is known
        return
    warn_of_masks(program.jaxpr, other.jaxpr)


def _differentiated(own: Any) -> Any:
    """The parameters that have gradients: those that `optax.lookahead` moves at each step."""
    return own.fast if isinstance(own, optax.LookaheadParams) else own


def _traced(
    tx: optax.GradientTransformation, own: Any, axis_name: str, workers: int = _WORKERS
) -> tuple[ClosedJaxpr, Any, Any, Any]:
    """The program of an update, the state before it, and what it returns, as shapes.

    A chain gets Optax's arguments of a loss and its mean gradient if it asks for them.
    """
    moved = _differentiated(own)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), moved)
    how = Running(None, axis_name, checked=workers)
    inside = optax.with_extra_args_support(tx).update

    def update(rows: Any, state: Any, own: Any) -> Any:
        return inside(front.marked(rows), state, own)

    def update_by_loss(rows: Any, state: Any, own: Any) -> Any:
        zero, means = jnp.zeros(()), jax.tree.map(jnp.zeros_like, _differentiated(own))
        given = {"value": zero, "grad": means, "value_fn": lambda params: zero}
        return inside(front.marked(rows), state, own, **given)

    with running(how), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        state = jax.eval_shape(tx.init, own)
        trace = lambda update: jax.make_jaxpr(update, return_shape=True)(rows, state, own)
        try:
            try:
                program, result = trace(update)
            except TypeError as error:
                if not lacks_arguments(error):
                    raise
                program, result = trace(update_by_loss)
        except (TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ValueError) and not _is_of_optax(error):
                raise
            text = str(error).splitlines()[0]
            if lacks_arguments(error):
                raise ValueError(
                    f"the chain takes arguments that check does not know ({text}): it gives value, "
                    "grad and value_fn. Give the others in a transformation around it, as in "
                    "optax.GradientTransformation(tx.init, functools.partial(tx.update, ...))"
                ) from error
            raise ValueError(
                f"the chain does not take gradients with a row for each worker ({text}). If a "
                "wrapper around the exchange combines them, as optax.contrib.mechanize does, hides "
                "some, as optax.masked does (whose mask, if it is a function, sees rows), or "
                "branches, as optax.apply_if_finite and optax.conditionally_transform do, put it "
                "behind the exchange, which skips steps that are not finite by itself. In place of "
                "optax.MultiSteps take jaxsparse.multi_steps"
            ) from error
    return program, state, *result


def _is_of_optax(error: Exception) -> bool:
    """Whether code of Optax raised it, and not an exchange of this library."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).startswith("optax.")


def lacks_arguments(error: Exception) -> bool:
    """Whether a transformation was called without an argument by name that it must have."""
    return isinstance(error, TypeError) and "required keyword-only argument" in str(error)
