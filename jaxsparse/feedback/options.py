"""The options that all transformations share: declared, documented and checked here alone."""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from jaxsparse.layout import IsDense
from jaxsparse.settings import static_float, static_int

P = ParamSpec("P")
T = TypeVar("T")


class Options(TypedDict, total=False):
    """The options of all transformations. `OPTIONS` has their defaults and descriptions."""

    axis_name: str | None
    delay: Literal[0, 1] | None
    decay: float | None
    accumulator_dtype: DTypeLike | None
    momentum: float | Array | None
    nesterov: bool | None
    bucket_size: int | None
    mesh: Mesh | None
    specs: Any


class LeafOptions(Options, total=False):
    """The same options, and the rule for dense leaves, which a policy replaces."""

    is_dense: IsDense | None


# The default and the description of each option. The defaults are None and strings rather than 0,
# functions or dtypes, because optax.inject_hyperparams turns numbers into arrays and calls
# callables.
OPTIONS: dict[str, tuple[Any, str]] = {
    "axis_name": ("data", "the mesh axis of the workers. None: a single worker."),
    "delay": (
        None,
        "0 or None: exchange this step's gradients. 1: exchange the residual of earlier gradients, "
        "so that the exchange can overlap the backward pass.",
    ),
    "decay": (
        None,
        "factor of the residual in each step, in [0, 1]. None: 1, so that nothing is ever dropped.",
    ),
    "accumulator_dtype": (
        None,
        "dtype of the residual and momentum of compressed leaves between steps. None: float32. "
        '"bfloat16" halves their memory and rounds them at random.',
    ),
    "momentum": (
        None,
        "factor of momentum correction, in [0, 1): a float or a (traced) scalar array. Momentum is "
        "masked where the reducer says so. The optimizer behind needs no momentum of its own. "
        "None: no momentum and no buffer for it.",
    ),
    "nesterov": (
        None,
        "True: Nesterov's momentum. With u = momentum u + g, a step adds g + momentum u instead of "
        "u. None or False: it adds u.",
    ),
    "is_dense": (
        None,
        "function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape: whether "
        "the leaf travels uncompressed. None: vectors, scalars and leaves below 1024 elements do.",
    ),
    "bucket_size": (
        None,
        "largest number of elements of a bucket. None: one bucket. Several buckets are exchanged "
        "one after the other, which takes less memory. They share the budget in proportion to "
        "their sizes.",
    ),
    "mesh": (
        None,
        "mesh of the parameters, for where they do not show it, as under `jax.jit`. `init` then "
        "returns a state that is already spread over the workers. None: the mesh that parameters "
        "show, or that of `jaxsparse.data_parallel`.",
    ),
    "specs": (
        None,
        "partitions of the parameters over the other axes of the mesh, for where parameters do not "
        "show them: a tree of `PartitionSpec` or `NamedSharding`, or a prefix of it.",
    ),
}
_ENTRY = re.compile(r"^    \*\*options: .*\n(?:     .*\n)*", re.MULTILINE)


def exchange_options(
    *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function with `**options`: its signature and docstring then name each option.

    `help`, completion in notebooks and `optax.inject_hyperparams` read the signature. Type checkers
    read the `Unpack[LeafOptions]` of the function itself.

    Args:
        without: options that the function does not take.
        **defaults: defaults of this function, in place of those in `OPTIONS`.
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
    """The docstring with one entry for each option in place of the `**options` entry."""
    docstring = inspect.cleandoc(docstring) + "\n"  # Python 3.13 takes indentation off, too
    entries = [
        textwrap.fill(
            f"{name}: {OPTIONS[name][1]}",
            96,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
        for name in names
    ]
    documented, found = _ENTRY.subn(lambda _: "\n".join(entries) + "\n", docstring)
    assert found == 1, docstring
    return documented


def check_momentum(momentum: Any) -> None:
    """Raises ValueError unless it is None or a scalar in [0, 1). A traced one has no value yet."""
    if momentum is None:
        return
    if jnp.ndim(momentum) != 0:
        raise ValueError(
            f"momentum has shape {jnp.shape(momentum)}: pass a scalar in [0, 1), the same for all "
            "leaves (optax.multi_transform treats leaves differently)"
        )
    if not isinstance(momentum, jax.core.Tracer) and not 0 <= float(momentum) < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1); use None for no momentum")


def is_nesterov(nesterov: Any, momentum: Any) -> bool:
    """Whether momentum is Nesterov's. Raises ValueError unless it is a bool or None (for False)."""
    if nesterov is None:
        return False
    if not isinstance(nesterov, bool):
        raise ValueError(
            f"nesterov={nesterov!r} must be True, False or None: it is static (list it in "
            "static_args under optax.inject_hyperparams)"
        )
    if nesterov and momentum is None:
        raise ValueError("nesterov=True needs a momentum: give momentum=0.9, for example")
    return nesterov


def decay_factor(decay: Any) -> float:
    """The factor of residuals. Raises ValueError unless it lies in [0, 1] or is None (for 1)."""
    factor = 1.0 if decay is None else static_float("decay", decay)
    if not 0 <= factor <= 1:
        raise ValueError(
            f"decay={decay} must lie in [0, 1]: 1 keeps what was not sent, 0.95 forgets two thirds "
            "of it in 20 steps, and 0 drops it at once"
        )
    return factor


def is_delayed(delay: Any) -> bool:
    """Whether the exchange is delayed. Raises ValueError unless `delay` is 0, 1 or None (for 0)."""
    if delay is None:
        return False
    steps = static_int("delay", delay)
    if steps not in (0, 1):
        raise ValueError(
            f"delay={steps} must be 0, to exchange this step's gradients, or 1, to exchange those "
            "of the steps before"
        )
    return steps == 1
