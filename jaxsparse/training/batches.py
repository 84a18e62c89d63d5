"""Which arguments of a call are batches, and whether workers can share them."""

from collections.abc import Mapping, Sequence
from numbers import Integral, Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.tree_util import keystr, tree_flatten_with_path

from jaxsparse.comm import compat
from jaxsparse.comm.marks import module_in, own_leaves
from jaxsparse.comm.static_leaves import FLAGS, Static


def numbers_of_batches(
    given: int | Sequence[int] | None,
    argnums: int | Sequence[int],
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    workers: int,
) -> set[int]:
    """The numbers, from 0, of the batches among the arguments of a loss, which are checked.

    Args:
        given: `batch_argnums` of the user.
        argnums: numbers of the arguments to differentiate.
        args: positional arguments.
        named: arguments by name.
        workers: number of workers.
    """
    numbers = 1 if given is None else given
    split, whole = _numbers("batch_argnums", numbers), _numbers("argnums", argnums)
    for name, value, each in (("argnums", argnums, whole), ("batch_argnums", numbers, split)):
        if any(not -len(args) <= i < len(args) for i in each):
            raise ValueError(
                f"{name}={value} names an argument that is missing: the call has {len(args)} "
                "positional arguments. A loss that closes over its batch, or gets it by name, has "
                "to take it as one of these, or each worker computes all of it"
            )
    split, whole = ({i % len(args) for i in each} for each in (split, whole))
    if both := sorted(split & whole):
        raise ValueError(
            f"argument {both[0]} is differentiated (argnums={argnums}) and split over the workers: "
            "give batch_argnums= the numbers of the batches"
        )
    for at, arg in (*enumerate(args), *named.items()):
        if (module := module_in(arg)) is not None:  # an empty nnx.List is false
            raise ValueError(
                f"argument {at} has a flax.nnx {type(module).__name__}: differentiate its state, "
                "as in graph, params = nnx.split(model), and nnx.merge(graph, params) in the loss"
            )
    batches = {i: args[i] for i in sorted(split)}
    for (number, *path), _ in own_leaves(batches):
        raise ValueError(
            f"argument {number.key}{keystr(tuple(path))} is the state of an exchange, in a batch: "
            "give batch_argnums= the numbers of the batches"
        )
    check_batches(batches, workers)
    if split and not jax.tree.leaves(batches):
        raise ValueError(
            f"argument {', '.join(map(str, batches))} has no arrays, so nothing is split, and each "
            "worker would compute all of what it gets in another way: pass the batch there. If "
            "each worker draws its own, give batch_argnums=()"
        )
    others = {i: arg for i, arg in enumerate(args) if i not in split | whole and given is None}
    alike = {i: found for i, arg in others.items() if (found := as_long(batches, arg, workers))}
    if alike:
        raise ValueError(
            f"argument {' and argument '.join(f'{i}{found}' for i, found in alike.items())} has as "
            "many rows as the batch, and each worker would get all of them: give "
            f"batch_argnums={tuple(sorted({*split, *alike}))} if it belongs to the batch, and "
            "batch_argnums=1 if each worker is to see it whole"
        )
    for name, arg in named.items():
        if found := as_long(batches, arg, workers):
            raise ValueError(
                f"argument {name}{found} has as many rows as the batch, and each worker would get "
                "all of them, because arguments by name are never split: pass it by position. Give "
                f"batch_argnums={(*split, len(args))} if it belongs to the batch, and "
                f"batch_argnums={numbers} if each worker is to see it whole"
            )
    return split


def with_fixed(
    argnums: Any, batch_argnums: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, in which flags, strings and numbers are `Static`, and all that has no array.

    Code may branch on them, as under `jax.value_and_grad`. What is differentiated or split is left.
    """
    numbers = 1 if batch_argnums is None else batch_argnums
    others = _numbers("argnums", argnums) | _numbers("batch_argnums", numbers)
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    is_array = lambda x: isinstance(x, arrays) and not isinstance(x, FLAGS)
    static = lambda x: Static(x, type(x))
    # Of other objects beside arrays, such as functions, `check_arrays` tells.
    leaf = lambda x: static(x) if isinstance(x, (*FLAGS, Number)) and not is_array(x) else x
    fixed = lambda x: jax.tree.map(leaf, x) if any(map(is_array, jax.tree.leaves(x))) else static(x)
    is_kept = lambda i: i in others or i - len(args) in others
    by_position = tuple(x if is_kept(i) else fixed(x) for i, x in enumerate(args))
    return by_position, {name: fixed(x) for name, x in named.items()}


def check_argnums(argnums: Any) -> None:
    """Raises ValueError unless these are numbers of arguments to differentiate."""
    if not _numbers("argnums", argnums):
        raise ValueError(
            f"argnums={argnums!r} differentiates nothing: give the numbers of arguments, as "
            "argnums=0 or argnums=(0, 2)"
        )


def _numbers(name: str, given: Any) -> set[int]:
    """Numbers of arguments, or one of them, as a set."""
    found = [given] if isinstance(given, Integral) else given
    if not isinstance(found, Sequence) or not all(isinstance(i, Integral) for i in found):
        raise ValueError(f"{name}={given!r} must be the number of an argument, or a tuple of them")
    return set(map(int, found))


def check_batches(batches: Mapping[int, Any], workers: int) -> None:
    """Raises ValueError unless the workers can share batches, which have arguments' numbers."""
    leaves = [
        (f"argument {i}{keystr(path)}", jnp.shape(x))
        for i, batch in batches.items()
        for path, x in tree_flatten_with_path(batch)[0]
    ]
    for name, shape in leaves:
        if not shape:
            raise ValueError(
                f"{name} is a scalar in a batch, which can't be split: pass the batch there "
                "(jaxsparse.value_and_grad takes another number as batch_argnums=), and a scalar "
                "as an argument of its own, which all workers get whole"
            )
        if shape[0] % workers:
            raise ValueError(
                f"{name} is a batch of shape {shape}, whose first axis {workers} workers "
                "cannot share equally: change the batch size, or pass what each worker is to see "
                "whole as another argument"
            )
    for i, batch in batches.items():
        _check_alike(i, batch, workers)
    if leaves and not any(shape[0] for _, shape in leaves):
        name, shape = leaves[0]
        raise ValueError(
            f"{name} is a batch of shape {shape}, which has no rows: skip this step, or drop the "
            "last batch of an epoch if it is empty"
        )


def _check_alike(i: int, batch: Any, workers: int) -> None:
    """Raises ValueError if arrays of one batch have unlike numbers of rows. Keys may."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
    leaves = [(keystr(path), x) for path, x in tree_flatten_with_path(batch)[0] if not is_key(x)]
    for name, x in leaves[1:]:
        first, rows = leaves[0][0], jnp.shape(leaves[0][1])[0]
        if jnp.shape(x)[0] != rows:
            raise ValueError(
                f"argument {i}{first} has {rows} rows, and argument {i}{name} {jnp.shape(x)[0]}: "
                "each worker would get its share of both. If one has no rows of the batch, as "
                "weights of classes, pass it as an argument of its own, which all workers get "
                "whole. If both have, give them as many: x.reshape("
                f"{workers}, -1, *x.shape[1:]) has one for each worker"
            )


AS_OTHER_SHAPE = "give it another shape, as x[None]"


def check_closed_over(program: Jaxpr, batches: Any, workers: int, to_keep: str) -> None:
    """Raises ValueError if a function closes over a row for each worker, as `batches` have.

    It would be broadcast against a worker's single row in silence. Of more rows JAX tells that
    shapes differ. `to_keep` says what to write if it is right.
    """
    if workers == 1 or workers not in {jnp.shape(x)[0] for x in jax.tree.leaves(batches)}:
        return
    inside = (x for e, _ in compat.scoped(program) for x in compat.inner_programs(e.params))
    held = (x for each in (program, *inside) for x in each.constvars)
    for shape in (getattr(x.aval, "shape", ()) for x in held):
        if shape[:1] == (workers,):
            raise ValueError(
                f"the function of one worker closes over an array of shape {shape}, which has as "
                "many rows as the batch, and each worker would get all of them: pass it as a part "
                f"of the batch. If each worker is to see it whole, {to_keep}"
            )


def as_long(batches: Any, tree: Any, workers: int) -> str | None:
    """Path and shape of an array that seems to belong to a batch, because it has as many rows.

    Given whole, it may be broadcast against a worker's rows in silence. Trees of frozen parameters
    and statistics have a few such arrays by chance. So all of a tree's arrays must have these rows,
    scalars apart. If each worker has a single row, which fits all others, one array is enough.
    """
    counts = {n for x in jax.tree.leaves(batches) for n in jnp.shape(x)[:1]} - {1}
    others = [(path, jnp.shape(x)) for path, x in tree_flatten_with_path(tree)[0] if jnp.ndim(x)]
    alike = [(path, shape) for path, shape in others if shape[0] in counts]
    if len(alike) < len(others):
        alike = [(path, shape) for path, shape in alike if shape[0] == workers]
    return f"{keystr(alike[0][0])} of shape {alike[0][1]}" if alike else None
