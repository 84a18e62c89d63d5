"""Settings declared once: as fields of a dataclass, from which a function derives.

A transformation is a dataclass of settings, with the options that all share among its bases.
`as_function` makes the function that users call: with the fields as its arguments, which type
checkers and `help` see, and with the fields' descriptions in its docstring.
"""

import abc
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from jaxsparse.arrays.layout import IsDense, small_or_vector
from jaxsparse.arrays.settings import static_float, static_int

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(abc.ABC):
    """The options of every exchange.

    The defaults are None and strings rather than 0, functions or dtypes, because
    optax.inject_hyperparams turns numbers into arrays and calls callables.

    Args:
        axis_name: the mesh axis of the workers. None: a single worker.
        decay: factor of the residual in each step, in [0, 1]. None: 1, so that nothing is ever
            dropped. 0: what is not sent is dropped. Without a delay the state then has no
            residual.
        accumulator_dtype: dtype of the residual and momentum of compressed leaves between steps.
            None: float32. "bfloat16" halves their memory and rounds them at random.
        bucket_size: largest number of elements of a bucket. None: one bucket. Several buckets are
            exchanged one after the other, which takes less memory. They share the budget in
            proportion to their sizes.
        mesh: mesh of the workers, where neither arrays and their types nor `jax.set_mesh` tell it.
        workers: number of workers to simulate on one device, without a mesh.
        specs: partitions of the parameters over the other axes of the mesh, for where parameters do
            not show them: a tree of `PartitionSpec`, `NamedSharding`, or of arrays or shapes that
            have a sharding, or a prefix of it; an abstract `flax.nnx` model; or a training state
            with `params`. Real arrays would be kept alive: give shapes.
    """

    axis_name: str | None = "data"
    decay: float | None = None
    accumulator_dtype: DTypeLike | None = None
    bucket_size: int | None = None
    mesh: Mesh | None = None
    workers: int | None = None
    specs: Any = None

    @abc.abstractmethod
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The transformation with these settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """The options of exchanges that take the place of a gradient's mean.

    Args:
        delay: 0 or None: exchange this step's gradients. 1: exchange the residual of earlier
            gradients, so that the exchange can overlap the backward pass.
        momentum: factor of momentum correction, in [0, 1): a float or a (traced) scalar array.
            It acts before the exchange, and is masked where this worker sent, unless the system
            says where. The optimizer behind needs no momentum of its own. None: no momentum and no
            buffer for it. With Adam, leave it None, and chain
            `jaxsparse.per_worker(optax.scale_by_adam())` before the exchange: Adam behind it has
            moments of what arrives, and trains worse.
        nesterov: True: Nesterov's momentum. With u = momentum u + g, a step adds g + momentum u
            instead of u. None or False: it adds u.
        when_skipped: "nan": the update of a skipped step is NaN, on all workers alike, for trainers
            whose own dynamic loss scale or watch looks for updates that are not finite. The state
            is that of any skipped step. None or "zero": it is zero, so that nothing behind breaks.
    """

    delay: Literal[0, 1] | None = None
    momentum: float | Array | None = None
    nesterov: bool | None = None
    when_skipped: Literal["zero", "nan"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafOptions(StepOptions):
    """The options of exchanges of whole gradients, whose uncompressed leaves no policy picks.

    Args:
        is_dense: function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape:
            whether the leaf travels uncompressed. None: vectors, scalars and leaves below 1024
            elements do.
    """

    is_dense: IsDense | None = None


def as_function(
    settings: Callable[P, Options], name: str
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """The function that makes transformations from settings.

    Args:
        settings: a dataclass. Its docstring, or that of its first base with one, is the function's.
            The descriptions of arguments are those of the classes that declare them.
        name: name of the function.
    """
    assert isinstance(settings, type)
    signature = inspect.signature(settings)
    hints = get_type_hints(settings)  # without the checks in `Annotated`
    fields = dataclasses.fields(settings)
    names = {field.name for field in fields if field.metadata.get("is_setting", True)}
    # The options come last.
    parameters = sorted(
        (
            p.replace(annotation=hints[p.name])
            for p in signature.parameters.values()
            if p.name in names
        ),
        key=lambda p: (p.kind, p.name in OPTIONS, _place(p.name)),
    )
    signature = signature.replace(
        parameters=parameters, return_annotation=optax.GradientTransformationExtraArgs
    )

    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        for given in kwargs:
            if given not in signature.parameters:
                names = [*signature.parameters]
                raise TypeError(
                    f"{name}() has no option {given!r}{_meant(given, settings, names)}: it takes "
                    f"{', '.join(names)}"
                )
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        return settings(*args, **kwargs).transformation()

    # Its module stays this one, so that doctest runs examples once, those of the settings.
    make.__name__ = make.__qualname__ = name
    make.__doc__ = _documented(settings, list(signature.parameters))
    make.__signature__ = signature  # type: ignore[attr-defined]
    make.settings = settings  # type: ignore[attr-defined]
    return make


# Words of the field for settings that have other names here, the likeliest first.
_BUDGETS = ("density", "compression", "k", "rank")
_CALLED = {
    **dict.fromkeys((*_BUDGETS, "ratio", "sparsity"), _BUDGETS),
    **dict.fromkeys(("error_feedback", "residual"), ("decay",)),
    **dict.fromkeys(("mask", "exclude"), ("is_dense",)),
    "beta": ("momentum",),
    "bits": ("format",),
}


def _meant(given: str, settings: type, names: list[str]) -> str:
    """Which option an unknown name may mean, in words; nothing if none is like it."""
    alike = (
        *(name for name in _CALLED.get(given, ()) if name in names),
        *(name for name in names if len(name) > 3 and name in given),
        *difflib.get_close_matches(given, names, 1),
    )
    if not alike:
        return ""
    first = " ".join(_descriptions(settings)[alike[0]].split()).partition(". ")[0].rstrip(".")
    return f" (do you mean {alike[0]!r}, {first}?)"


def _place(name: str) -> int:
    return list(OPTIONS).index(name) if name in OPTIONS else 0


def part(settings: Any, kind: type[T]) -> T:
    """The fields of `settings` that are those of its base `kind`, as one of these."""
    return kind(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(kind) if f.init})  # type: ignore[arg-type]


_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Yields):\n", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): ((?:.|\n     )*)", re.MULTILINE)


@functools.cache  # most systems share the options' classes
def _described(kind: type) -> dict[str, str]:
    """The descriptions of a class's own fields, as its docstring has them."""
    parts = _SECTION.split(inspect.cleandoc(kind.__dict__.get("__doc__") or "") + "\n")
    found = dict(zip(parts[1::2], parts[2::2]))
    entries = _ENTRY.findall(found.get("Args", found.get("Attributes", "")))
    return {name: text.rstrip() for name, text in entries}


def _descriptions(settings: type) -> dict[str, str]:
    """The descriptions of all fields."""
    described: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        described |= _described(kind)
    return described


def _documented(settings: type, names: list[str]) -> str:
    """The docstring of a function of these settings."""
    described = _descriptions(settings)
    if missing := [name for name in names if name not in described]:
        raise ValueError(
            f"settings {', '.join(missing)} of {settings.__name__} are not described: add a line "
            "for each under Args: in the docstring of the class that declares it"
        )
    arguments = "Args:\n" + "".join(f"    {name}: {described[name]}\n" for name in names) + "\n"
    kinds = [settings, *(k for k in settings.__mro__[1:] if not issubclass(k, Options))]
    texts = [(k.__name__, vars(k).get("__doc__") or "") for k in kinds]
    # A dataclass without a docstring has its signature for one.
    main = next(text for name, text in texts if not text.startswith(f"{name}("))
    first, *parts = _SECTION.split(inspect.cleandoc(main) + "\n")
    rest = [
        f"{title}:\n{body}"
        for title, body in zip(parts[::2], parts[1::2])
        if title not in ("Args", "Attributes")
    ]
    return first.rstrip() + "\n\n" + (arguments + "".join(rest)).rstrip() + "\n"


# The default and the description of each option.
OPTIONS: dict[str, tuple[Any, str]] = {
    field.name: (field.default, _described(kind)[field.name])
    for kind in (Options, StepOptions, LeafOptions)
    for field in dataclasses.fields(kind)
    if field.name in kind.__annotations__
}


def check_transformation(name: str, tx: Any, such: str) -> None:
    """Raises ValueError unless it is a transformation of Optax. `such`: one, in words."""
    if not all(callable(getattr(tx, method, None)) for method in ("init", "update")):
        raise ValueError(
            f"{name}={tx!r} is no Optax transformation: give one that is made, such as {such}"
        )


def leaves_rule(is_dense: Any) -> IsDense:
    """Which leaves travel uncompressed. Raises ValueError unless it is a function or None."""
    if is_dense is not None and not callable(is_dense):
        raise ValueError(
            f"is_dense={is_dense!r} must be a function of a leaf's key path and shape, as in "
            "lambda path, shape: 'bias' in path, or None"
        )
    return small_or_vector if is_dense is None else is_dense


def check_momentum(momentum: Any) -> None:
    """Raises ValueError unless it is None or a scalar in [0, 1). A traced one has no value yet."""
    if momentum is None:
        return
    if callable(momentum):
        raise ValueError(
            f"momentum={momentum!r} must be a number in [0, 1) or None. A schedule changes it "
            "under optax.inject_hyperparams, around this function"
        )
    if jnp.ndim(momentum) != 0:
        raise ValueError(
            f"momentum has shape {jnp.shape(momentum)}: pass a scalar in [0, 1), the same for all "
            "leaves (optax.multi_transform treats leaves differently)"
        )
    if not isinstance(momentum, jax.core.Tracer) and not 0 <= float(momentum) < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1); use None for no momentum")


def is_nesterov(nesterov: Any, momentum: Any) -> bool:
    """Whether momentum is Nesterov's. Raises ValueError unless it is a bool or None (for False)."""
    if _static_bool("nesterov", nesterov) and momentum is None:
        raise ValueError("nesterov=True needs a momentum: give momentum=0.9, for example")
    return bool(nesterov)


def skipped_update(when_skipped: Any, delay: Any) -> float:
    """The value of updates of skipped steps. Raises ValueError if the choice is unknown."""
    if when_skipped not in (None, "zero", "nan"):
        raise ValueError(
            f"when_skipped={when_skipped!r} must be 'zero', 'nan' or None: it is static (list it "
            "in static_args under optax.inject_hyperparams)"
        )
    if when_skipped == "nan" and is_delayed(delay):
        raise ValueError(
            "when_skipped='nan' would lose updates with delay=1, whose skipped steps deliver the "
            "exchange of earlier gradients: leave one of them out"
        )
    return float("nan") if when_skipped == "nan" else 0.0


def _static_bool(name: str, value: Any) -> bool:
    """The bool. None: False. Raises ValueError unless it is one of these."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(
            f"{name}={value!r} must be True, False or None: it is static (list it in static_args "
            "under optax.inject_hyperparams)"
        )
    return bool(value)


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
