"""The options of an exchange: their names and types, and what values they take."""

import dataclasses
import difflib
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from jaxsparse.arrays.layout import IsDense, small_or_vector
from jaxsparse.arrays.settings import static_float, static_int
from jaxsparse.reducers.base import Reducer


class StepOptions(TypedDict, total=False):
    """The options of every exchange, see `jaxsparse.exchange`."""

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


class Options(StepOptions, total=False):
    """The options of an exchange of a whole tree by one reducer, see `jaxsparse.exchange`."""

    is_dense: IsDense | None


# Words of the field for settings that have other names here, the likeliest first.
_BUDGETS = ("density", "compression", "k", "rank")
_CALLED = {
    **dict.fromkeys((*_BUDGETS, "ratio", "sparsity"), _BUDGETS),
    **dict.fromkeys(("error_feedback", "residual"), ("decay",)),
    **dict.fromkeys(("mask", "exclude"), ("is_dense",)),
    "beta": ("momentum",),
    "bits": ("quantizer",),
}


def check_names(given: Any, kind: Any, reducer: Reducer | None = None) -> None:
    """Raises TypeError if an option has a name that there is not.

    Args:
        given: options by name.
        kind: `Options` or `StepOptions`.
        reducer: the reducer, whose settings may be meant.
    """
    fields = [] if reducer is None else [field.name for field in dataclasses.fields(reducer)]
    for name in given.keys() - kind.__optional_keys__:
        if isinstance(given[name], dict):
            raise TypeError(
                f"{name}={given[name]!r} is no option: optax.inject_hyperparams does not see "
                "options. Give it a function of what changes, as in optax.inject_hyperparams("
                "lambda momentum: jaxsparse.top_k(0.01, momentum=momentum))(0.9)"
            )
        names = [*fields, *kind.__annotations__]
        alike = (
            *(x for x in _CALLED.get(name, ()) if x in names),
            *(x for x in names if len(x) > 3 and x in name),
            *difflib.get_close_matches(name, names, 1),
        )
        meant = f" (do you mean {alike[0]!r}?)" if alike else ""
        of = "jaxsparse.partition" if reducer is None else f"an exchange by {reducer.system}"
        raise TypeError(f"{of} has no option {name!r}{meant}: it takes {', '.join(names)}")


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
            "leaves that this exchange takes"
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
