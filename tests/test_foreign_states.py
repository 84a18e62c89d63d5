"""A state that was made for another system, or for other settings, is refused by name."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from workers import some

import jaxsparse
from jaxsparse import systems
from jaxsparse.feedback import ErrorFeedbackState
from jaxsparse.systems import SYSTEMS, Request

PARAMS = {"w": jnp.ones((40, 30)), "b": jnp.ones((30,))}
# These are one reducer each, so that a residual means the same to both.
SAME = [{"top_k", "ms_topk"}, {"quantized", "sign_sgd"}]


def transformation(name):
    settings = dict(SYSTEMS[name].settings(Request(0.05, 1200, 1)))
    if name != "dense":
        settings["is_dense"] = lambda path, shape: len(shape) < 2
    return getattr(jaxsparse, name)(**settings, axis_name=None)


def refusal(tx, state):
    """The error of an update with this state. None: it runs."""
    try:
        jax.eval_shape(tx.update, PARAMS, state, PARAMS)
    except ValueError as error:
        return str(error)
    return None


def origins(state):
    """The system of the only bucket, in an error's words. None: it is no state of feedback."""
    if not isinstance(state, ErrorFeedbackState):
        return None
    return ", ".join(state.origin.systems) or "no buckets"


@pytest.mark.parametrize("turned", some([False, True], [False]))
def test_the_state_of_any_other_system_is_refused(turned):
    made = {name: transformation(name) for name in SYSTEMS}
    states = {name: tx.init(PARAMS) for name, tx in made.items()}
    for name, tx in made.items():
        assert refusal(tx, states[name]) is None, name
    for pair in itertools.combinations(SYSTEMS, 2):
        here, there = pair[::-1] if turned else pair
        error = refusal(made[here], states[there])
        if {here, there} in SAME:
            assert error is None, (here, there, error)
            continue
        assert error is not None, f"{here} takes the state of {there}"
        kinds = [origins(states[name]) for name in (here, there)]
        if None in kinds:
            assert error.startswith("the state was made for another transformation"), error
        elif kinds[0] == kinds[1]:  # one reducer with other settings
            assert error.startswith(("the state was made for other settings", "the state's ")), (
                error
            )
        else:
            assert all(kind in error for kind in kinds), (here, there, error)


RANK_1 = {"min_compression_rate": 1}
OTHER_SETTINGS = {
    "rank": (
        jaxsparse.powersgd(2, **RANK_1, axis_name=None),
        jaxsparse.powersgd(1, **RANK_1, axis_name=None),
        r"PowerSGD's own state of bucket 0 is .*float32\[30\].* needs .*float32\[60\]",
    ),
    "number of buckets": (
        jaxsparse.ok_topk(0.1, axis_name=None),
        jaxsparse.ok_topk(0.1, bucket_size=600, axis_name=None),
        "its buckets are exchanged by OkTopk, OkTopk, and those of this transformation by OkTopk:",
    ),
    "warm-up": (
        jaxsparse.top_k(0.1, axis_name=None),
        jaxsparse.top_k(jaxsparse.warm_up(0.1, steps=4), axis_name=None),
        "TopK's own state of bucket 0 is .*step uint32.* needs nothing",
    ),
    "delay": (
        jaxsparse.top_k(0.1, delay=1, axis_name=None, is_dense=lambda path, shape: False),
        jaxsparse.top_k(0.1, axis_name=None, is_dense=lambda path, shape: False),
        "with delay=0, but this transformation has delay=1",
    ),
    "policy": (
        jaxsparse.partition({"w": systems.SparDL(0.1)}, axis_name=None),
        jaxsparse.partition({"w": systems.TopK(0.1)}, axis_name=None),
        "exchanged by TopK, and those of this transformation by SparDL",
    ),
    "Optax's own": (
        jaxsparse.spardl(0.1, axis_name=None),
        optax.adam(0.1),
        "it is a tuple, and no ErrorFeedbackState",
    ),
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_the_state_of_other_settings_is_refused(name):
    here, there, message = OTHER_SETTINGS[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(here.update, PARAMS, there.init(PARAMS), PARAMS)


def test_a_state_serves_another_density():
    here, there = (jaxsparse.spardl(density, axis_name=None) for density in (0.1, 0.2))
    assert refusal(here, there.init(PARAMS)) is None
