"""The options that all transformations share: declared, and documented, here alone."""

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

from jaxtyping import Array, DTypeLike

from jaxsparse.layout import IsDense

P = ParamSpec("P")
T = TypeVar("T")


class Options(TypedDict, total=False):
    """How any transformation exchanges. `OPTIONS` has the defaults and what each means."""

    axis_name: str | None
    dense_axis: str | None
    sharded: bool
    delay: Literal[0, 1] | None
    accumulator_dtype: DTypeLike | None
    momentum: float | Array | None
    bucket_size: int | None


class LeafOptions(Options, total=False):
    """The same, and which leaves are compressed, where no policy says so."""

    is_dense: IsDense | None


# Name: default and description. The defaults are None and strings rather than 0, functions or
# dtypes, because optax.inject_hyperparams makes arrays of numbers and calls whatever is callable.
OPTIONS: dict[str, tuple[Any, str]] = {
    "axis_name": (
        "data",
        "the axis over which workers are mapped, of a mesh with two levels the slow one; None for "
        "a single worker.",
    ),
    "dense_axis": (
        None,
        "the fast axis of a mesh with two levels, over which nothing is compressed.",
    ),
    "sharded": (False, "whether gradients are shards, averaged over `dense_axis` already."),
    "delay": (
        None,
        "0 or None: exchange this step's gradients. 1: apply the exchange of what was there before "
        "them, so that it can overlap the backward pass.",
    ),
    "accumulator_dtype": (
        None,
        "of the residual and momentum of compressed leaves between steps: float32 (None), or "
        '"bfloat16", which halves their memory and rounds them at random.',
    ),
    "momentum": (
        None,
        "momentum correction, masked where the reducer says so: a factor in [0, 1), as a float or "
        "a (traced) scalar array; None saves the buffer. The optimizer behind then needs none.",
    ),
    "is_dense": (
        None,
        "given a leaf's key path (as `jax.tree_util.keystr` prints it) and shape, whether it "
        "travels uncompressed. By default vectors, scalars and anything below 1024 elements do.",
    ),
    "bucket_size": (
        None,
        "upper limit for the elements of a bucket. More buckets are exchanged one after the other, "
        "with less memory in flight; a budget is split in proportion to their sizes.",
    ),
}
_MARK = "    **options: "


def exchange_options(
    *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets a function with `**options` show them by name, in its signature and its docstring.

    `help`, completion in notebooks and `optax.inject_hyperparams` read the signature; type checkers
    read the `Unpack[LeafOptions]` that the function itself declares.

    Args:
        without: options that the function does not take.
        **defaults: of this function, in place of those in `OPTIONS`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = [name for name in OPTIONS if name not in without]

        @functools.wraps(function)
        def with_defaults(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in signature.parameters:
                    raise TypeError(
                        f"{function.__name__}() has no option {name!r}: it takes "
                        f"{', '.join(signature.parameters)}"
                    )
            return function(*args, **{**defaults, **kwargs})

        own = inspect.signature(function)
        shared = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, OPTIONS[name][0]),
                annotation=LeafOptions.__annotations__[name],
            )
            for name in names
        ]
        parameters = [
            parameter
            for parameter in own.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        signature = own.replace(parameters=[*parameters, *shared])
        with_defaults.__signature__ = signature  # type: ignore[attr-defined]
        if function.__doc__:
            with_defaults.__doc__ = _documented(function.__doc__, names)
        return with_defaults

    return decorate


def _documented(docstring: str, names: list[str]) -> str:
    """A docstring whose `**options` entry is replaced by one for each of the options."""
    docstring = inspect.cleandoc(docstring) + "\n"  # Python 3.13 takes indentation off, too
    start = docstring.index(_MARK)
    end = docstring.index("\n", start)
    entries = [
        textwrap.fill(
            f"{name}: {OPTIONS[name][1]}",
            96,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
        for name in names
    ]
    return docstring[:start] + "\n".join(entries) + docstring[end:]
