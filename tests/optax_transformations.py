"""Optax's transformations, all that its two namespaces make, ready to run on one small tree."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

PARAMS = {"a": jnp.full((4, 6), 0.5), "b": jnp.arange(1.0, 4.0)}
# Combine and adapt given transformations without a state of their own, or make nothing but a state.
_LEFT_OUT = {"with_extra_args_support", "measure_with_ema"}


def matrices(tree):
    return jax.tree.map(lambda x: x.ndim == 2, tree)


def _kinds(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", tree)


def _norm(updates, **_):
    return optax.tree.norm(updates)


def _of_muon(tree):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)


def _each_second(step, **_):
    return step % 2 == 0


_ARGUMENTS = {
    "adv_optimizer": optax.sgd(0.05),
    "base_optimizer": optax.adam(0.1),
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "f": lambda updates, _: updates,
    "fast_optimizer": optax.adam(0.1),
    "freeze_mask": matrices(PARAMS),
    "gamma": 0.5,
    "inner": optax.adam(0.1),
    "l2_norm_clip": 1.0,
    "learning_rate": 0.1,
    "mask": matrices,
    "max_backtracking_steps": 3,
    "max_consecutive_errors": 3,
    "max_delta": 0.1,
    "max_linesearch_steps": 2,
    "max_norm": 0.1,
    "measure": _norm,
    "measure_name": "norm",
    "noise_multiplier": 0.1,
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "param_labels": _kinds,
    "seed": 0,
    "should_transform_fn": _each_second,
    "slow_step_size": 0.5,
    "step_size": 0.5,
    "step_size_fn": lambda count: 0.5**count,
    "sync_period": 2,
    "threshold": 0.1,
    "transforms": {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1, momentum=0.9)},
}
_MADE = {
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(1)),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.adam(0.1), optax.scale(2.0)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(
        learning_rate=optax.schedules.WrappedSchedule(optax.linear_schedule(0.1, 0.0, 10))
    ),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),  # scale_by_zoom_linesearch is here, too
    "named_chain": lambda: optax.named_chain(("x", optax.clip(1.0)), ("y", optax.adam(0.1))),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, seed=0),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(weight_dimension_numbers=_of_muon), matrices
    ),
}
_MORE = {
    "adam with bfloat16": lambda: optax.scale_by_adam(mu_dtype=jnp.bfloat16),
    "adamw with a schedule and a mask": lambda: optax.inject_hyperparams(
        optax.adamw, static_args=("mask",)
    )(learning_rate=lambda count: 0.5**count, mask=matrices),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4),
    "frozen": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.1), "vector": optax.set_to_zero()}, _kinds
    ),
    "galore": lambda: optax.contrib.scale_by_galore(rank=2),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
}


def _made_by(name, function):
    if name in _MADE:
        return _MADE[name]
    required = [
        key
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
    ]
    return lambda: function(**{key: _ARGUMENTS[key] for key in required})


def transformations():
    """Name -> function that makes the transformation."""
    return {
        name: _made_by(name, function)
        for module in (optax, optax.contrib)
        for name, function in sorted(vars(module).items())
        if inspect.isfunction(function)
        and not name.startswith("_")
        and name not in _LEFT_OUT
        and "GradientTransformation" in str(inspect.signature(function).return_annotation)
    } | _MORE


def params_of(name):
    """The parameters that a transformation takes."""
    return optax.LookaheadParams(PARAMS, PARAMS) if name == "lookahead" else PARAMS


def gradients(steps, workers):
    """Gradients of each step with a leading axis of workers."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=(workers, *x.shape)).astype(np.float32)
    return [jax.tree.map(draw, PARAMS) for _ in range(steps)]


def _objective(tree):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))


def call(name, tx, grads, state):
    """Calls the transformation's update, with the arguments that it takes."""
    params, extra = params_of(name), {"value": _objective(grads)}
    if "linesearch" in name:
        extra = {"value": _objective(params), "grad": grads, "value_fn": _objective}
    elif name == "sam":
        extra = {}
    elif name == "sophia":
        extra |= {"obj_fn": _objective}
    elif name.startswith("momo"):
        extra |= {"loss": extra["value"]}
    elif name in ("differentially_private_aggregate", "dpsgd"):
        grads = jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x]), grads)  # of three examples
    return tx.update(grads, state, params, **extra)
