"""What a step's outputs are: means, sums or maxima over workers, or each worker's own."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr, tree_flatten_with_path

from jaxsparse.comm import wire

Kind = Literal["mean", "sum", "max", "own"]


class Kinds:
    """The kind of each output of a step.

    Args:
        given: see `outputs` of `jaxsparse.data_parallel`.

    Raises:
        ValueError: it holds something else than a kind.
    """

    def __init__(self, given: Any) -> None:
        leaves = tree_flatten_with_path(given)[0]
        for path, kind in leaves:
            if not callable(kind):
                _check(keystr(path), kind)
        self._given = {_keys(path): (path, kind) for path, kind in leaves}

    def of(self, outputs: Any) -> list[Kind | None]:
        """The kind of each output in a tree; None where it must be equal on all workers.

        Raises:
            ValueError: an entry names no part of the tree.
        """
        found, unused = list[Kind | None](), dict(self._given)
        # A part without arrays, such as the metrics of a step that shows none, may have a kind.
        for path, part in tree_flatten_with_path(outputs, is_leaf=_is_empty)[0]:
            keys = _keys(path)
            ends = [keys[:n] for n in range(len(keys) + 1) if keys[:n] in self._given]
            if not _is_empty(part):
                found.append(_kind(self._given[ends[-1]][1], path) if ends else None)
            for end in ends:
                unused.pop(end, None)
        if unused:
            path, kind = next(iter(unused.values()))
            names = ", ".join(keystr(path) for path, _ in tree_flatten_with_path(outputs)[0])
            raise ValueError(
                f"outputs{keystr(path)}={kind!r} names no output of the step, which has "
                f"{names[:500] or 'none'}: give a tree like that of the outputs, in which those "
                "that are equal on all workers are left out or None"
            )
        return found


def _is_empty(node: Any) -> bool:
    """Whether a part of a tree has no arrays and no parts, such as None and {}."""
    structure: Any = jax.tree.structure(node)
    return structure.num_nodes == 1 and structure.num_leaves == 0


def _kind(given: Kind | Callable[[str], Kind | None], path: KeyPath) -> Kind | None:
    """The kind of an output at this path, by what is given for it or for what it is in."""
    if not callable(given):
        return given
    kind = given(keystr(path))
    if kind is not None:
        _check(keystr(path), kind)
    return kind


def _check(path: str, kind: Any) -> None:
    """Raises ValueError if this is no kind."""
    if kind not in get_args(Kind):
        raise ValueError(
            f"outputs{path}={kind!r} is unknown: give 'mean', 'sum', 'max' or 'own' for an output, "
            "and leave out those that are equal on all workers"
        )


def _keys(path: KeyPath) -> tuple[str, ...]:
    """A path's keys in words: a dictionary may name the fields of a class."""
    named = lambda key: getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
    return tuple(str(named(key)) for key in path)


def over_workers(name: str, x: Any, kind: Kind, axis_name: str) -> jax.Array:
    """The mean, the sum or the maximum of an output over workers.

    Raises:
        ValueError: its dtype has none.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact if kind == "mean" else jnp.number):
        raise ValueError(
            f"{name} has dtype {x.dtype}, which has no {kind}: give 'own' for each worker's, or "
            "return numbers" + (" of floats" if kind == "mean" else "")
        )
    if kind == "sum":
        return wire.psum(x, axis_name)
    if kind == "max":
        return wire.pmax(x, axis_name)
    # A sum of float16 could overflow where its mean does not.
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return (wire.psum(wide, axis_name) / wire.axis_size(axis_name)).astype(x.dtype)
