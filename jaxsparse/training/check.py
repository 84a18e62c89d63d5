"""A check that rows of gradients end in an exchange, and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jaxsparse.comm import meshes
from jaxsparse.feedback import front
from jaxsparse.training.chains import warn_of_chains

# So many workers are traced. Few sizes of arrays are equal to it by chance.
_WORKERS = 3


def check(tx: optax.GradientTransformation, params: Any, *, axis_name: str = "data") -> None:
    """Checks that an Optax chain takes gradients with a row for each worker, and returns means.

    `jaxsparse.value_and_grad` gives each worker's gradients a row. `jaxsparse.per_worker` keeps the
    rows apart, and an exchange makes means of them. A transformation of Optax in front of the
    exchange, or a wrapper around it, does not know rows. It may sum over them, as
    `optax.clip_by_global_norm` does, or keep them in its state, as `optax.trace` does. The first is
    refused without this check, where `value_and_grad` and `update` are in one `jax.jit`.

    It traces `tx.init` and `tx.update` once, for a few workers, and computes nothing. It also warns
    of what trains otherwise than it reads: clips, weight decay and momentum behind an exchange with
    momentum, and updates that are exchanged and dropped.

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
    struct = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    own = jax.tree.map(struct, params)
    # Gradients are those of the parameters that `optax.lookahead` moves at each step.
    moved = own.fast if isinstance(own, optax.LookaheadParams) else own
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((_WORKERS, *x.shape), x.dtype), moved)
    how = meshes.Running(None, axis_name, workers=_WORKERS)
    inside = optax.with_extra_args_support(tx).update
    update = lambda rows, *given: inside(front.marked(rows), *given)
    with meshes.running(how), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        state = jax.eval_shape(tx.init, own)
        try:
            program, (updates, after) = jax.make_jaxpr(update, return_shape=True)(rows, state, own)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"the chain does not take gradients with a row for each worker "
                f"({str(error).splitlines()[0]}). If a wrapper around the exchange combines them, "
                "as optax.contrib.mechanize does, hides some, as optax.masked does (whose mask, if "
                "it is a function, sees rows), or branches, as optax.apply_if_finite and "
                "optax.conditionally_transform do, put it behind the exchange, which skips steps "
                "that are not finite by itself. Accumulate gradients by a scan over microbatches "
                "in place of optax.MultiSteps"
            ) from error
    gradients = len(jax.tree.leaves(rows))
    warn_of_chains(program.jaxpr, gradients, len(jax.tree.leaves(own)))
    problems = [*map(front.refusal, front.mixed_in(program.jaxpr))]
    shapes = lambda tree: {keystr(path): x.shape for path, x in tree_leaves_with_path(tree)}
    wanted = shapes(own)
    for name, shape in shapes(updates).items():
        if shape != wanted.get(name):
            problems.append(
                f"The update{name} has shape {shape}, and its parameter {wanted.get(name)}: no "
                "exchange takes it. Chain one in front, as in optax.chain(jaxsparse.dense(), "
                "optimizer)"
            )
    before = shapes(state)
    for name, shape in shapes(after).items():
        if shape != before.get(name):
            problems.append(
                f"The state{name} has shape {before.get(name)} at first and {shape} after a step: "
                "put its transformation behind the exchange, or in jaxsparse.per_worker"
            )
    if problems:
        raise ValueError("the chain mixes the rows of workers. " + ". ".join(problems))
