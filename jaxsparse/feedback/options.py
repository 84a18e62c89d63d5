"""The options of an exchange: their names and types, what values they take, and what they mean."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from jaxsparse.arrays.layout import IsDense, small_or_vector
from jaxsparse.arrays.settings import check_function, static_float, static_int
from jaxsparse.reducers.base import Reducer

# A function of a leaf's key path, as `jax.tree_util.keystr` prints it, and of its shape. It gives
# the leaf's reducer, or None for uncompressed. Or these by regular expressions on key paths.
Policy = Callable[[str, tuple[int, ...]], Reducer | None] | Mapping[str, Reducer | None]


class Options(TypedDict, total=False):
    """The options of an exchange, see `jaxsparse.exchange`."""

    is_dense: IsDense | None
    axis_name: str | None
    decay: float | None
    accumulator_dtype: DTypeLike | None
    bucket_size: int | None
    mesh: Mesh | None
    workers: int | None
    specs: Any
    delay: Literal[0, 1] | None
    momentum: float | Array | None
    nesterov: bool | None
    when_skipped: Literal["zero", "nan"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """What an exchange was made with: reducers, and options, with None replaced by its meaning.

    Attributes:
        reducer: the reducer of all compressed leaves. None: `policy` tells each leaf's.
        policy: see `jaxsparse.partition`.
        default: the reducer of leaves that no expression of the policy matches.
    """

    reducer: Reducer | None
    policy: Policy | None = None
    default: Reducer | None = None
    _: dataclasses.KW_ONLY
    is_dense: IsDense | None = None
    axis_name: str | None = "data"
    decay: Any = None
    accumulator_dtype: Any = None
    bucket_size: int | None = None
    mesh: Mesh | None = None
    workers: int | None = None
    specs: Any = None
    delay: Literal[0, 1] | None = None
    momentum: float | Array | None = None
    nesterov: bool | None = None
    when_skipped: Literal["zero", "nan"] | None = None

    def __post_init__(self) -> None:
        """Checks options, whatever is asked first.

        Raises:
            ValueError: one is out of range.
        """
        check_momentum(self.momentum)
        leaves_rule(self.is_dense)
        skipped_update(self.when_skipped, self.delay)
        meant: dict[str, Any] = {
            "nesterov": is_nesterov(self.nesterov, self.momentum),
            "delay": int(is_delayed(self.delay)),
            "decay": decay_factor(self.decay),
            "accumulator_dtype": accumulator(self.accumulator_dtype),
        }
        for name, value in meant.items():
            object.__setattr__(self, name, value)
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise ValueError(
                f"mesh={self.mesh!r} must be a jax.sharding.Mesh or None (optax.inject_hyperparams "
                "calls meshes, as it calls schedules: name mesh and specs in its static_args)"
            )

    @property
    def is_delayed(self) -> bool:
        """Whether a step exchanges the residual of earlier gradients."""
        return self.delay == 1

    @property
    def rounds_accumulators(self) -> bool:
        """Whether residuals and momenta are rounded between steps."""
        return self.accumulator_dtype != jnp.float32

    @property
    def keeps_residual(self) -> bool:
        """Whether a state has residuals. With decay=0 the next step reads none.

        A delayed exchange is of the residual.
        """
        return self.is_delayed or self.decay != 0


# Words of the field for settings that have other names here, the likeliest first.
_BUDGETS = ("density", "compression", "k", "rank")
_CALLED = {
    **dict.fromkeys((*_BUDGETS, "ratio", "sparsity"), _BUDGETS),
    **dict.fromkeys(("error_feedback", "residual"), ("decay",)),
    **dict.fromkeys(("mask", "exclude"), ("is_dense",)),
    "beta": ("momentum",),
    "bits": ("quantizer",),
}


def check_names(given: Any, reducer: Reducer | None = None) -> None:
    """Raises TypeError if an option has a name that there is not.

    Args:
        given: options by name.
        reducer: the reducer, whose settings may be meant. None: of `jaxsparse.partition`, whose
            policy tells what goes uncompressed.
    """
    options = [name for name in Options.__annotations__ if reducer or name != "is_dense"]
    fields = [] if reducer is None else [field.name for field in dataclasses.fields(reducer)]
    for name in given.keys() - {*options}:
        if isinstance(given[name], dict):
            raise TypeError(
                f"{name}={given[name]!r} is no option: optax.inject_hyperparams does not see "
                "options. Give it a function of what changes, as in optax.inject_hyperparams("
                "lambda momentum: jaxsparse.top_k(0.01, momentum=momentum))(0.9)"
            )
        names = [*fields, *options]
        alike = (
            *(x for x in _CALLED.get(name, ()) if x in names),
            *difflib.get_close_matches(name, names, 1),
            *(x for x in names if len(x) > 3 and x in name),
        )
        meant = f" (do you mean {alike[0]!r}?)" if alike else ""
        of = "jaxsparse.partition" if reducer is None else f"an exchange by {reducer.name}"
        raise TypeError(f"{of} has no option {name!r}{meant}: it takes {', '.join(names)}")


def check_transformation(name: str, tx: Any, such: str) -> None:
    """Raises ValueError unless it is a transformation of Optax. `such`: one, in words."""
    if not all(callable(getattr(tx, method, None)) for method in ("init", "update")):
        raise ValueError(
            f"{name}={tx!r:.80} is no Optax transformation: give one that is made, such as {such}"
        )


def leaves_rule(is_dense: Any) -> IsDense:
    """Which leaves travel uncompressed. Raises ValueError unless it is a function or None."""
    if is_dense is not None and not callable(is_dense):
        raise ValueError(
            f"is_dense={is_dense!r} must be a function of a leaf's key path and shape, as in "
            "lambda path, shape: 'bias' in path, or None"
        )
    if is_dense is not None:
        check_function("is_dense", is_dense, "path", "shape")
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
    try:
        dtype, shape = jnp.result_type(momentum), jnp.shape(momentum)
    except TypeError:
        dtype, shape = None, ()
    if dtype is None or not any(jnp.issubdtype(dtype, t) for t in (jnp.floating, jnp.integer)):
        raise ValueError(f"momentum={momentum!r} is no real number: give one in [0, 1), or None")
    if shape:
        raise ValueError(
            f"momentum has shape {shape}: pass a scalar in [0, 1), the same for all leaves that "
            "this exchange takes"
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


def accumulator(dtype: DTypeLike | None) -> Any:
    """The dtype in which accumulators are kept.

    Raises:
        ValueError: it is neither float32 (or None) nor bfloat16.
    """
    try:
        known = jnp.dtype("float32" if dtype is None else dtype)
    except TypeError:
        known = None
    if known not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"accumulator_dtype={dtype!r} must be 'float32' (or None) or 'bfloat16'; residuals can "
            "grow beyond float16"
        )
    return known
