"""What a step's outputs are: means, sums, or each worker's own."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import mesh, some

from jaxsparse import PerWorker, data_parallel

MEAN_AND_SUM = (None, {"loss": "mean", "tokens": "sum", "norms": "own", "high": "max"})


class Metrics(NamedTuple):
    loss: jax.Array
    tokens: jax.Array
    norms: dict
    high: dict
    step: jax.Array


def step(state, x):
    kept = PerWorker(state.value + x.sum())
    norms = {"a": jnp.abs(x).max(), "b": jnp.stack([x.min(), x.max()])}
    high = {"float": x.max(), "int": (x > 0).sum()}
    return kept, Metrics(x.mean(), (x > 2).sum(), norms, high, jnp.int32(7))


def grid(workers):
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(
        (workers, 2), ("data", "tp"), axis_types=auto, devices=jax.devices()[: 2 * workers]
    )


PLACES = [(way, w) for way in ("simulated", "mesh", "grid") for w in (1, 2, 3, 5)][:-1]


@pytest.mark.parametrize("place", some(PLACES, [("simulated", 3), ("grid", 3)]), ids=str)
def test_each_output_is_what_it_is_said_to_be(place):
    way, workers = place
    where = {"simulated": workers, "mesh": mesh(workers)}.get(way) or grid(workers)
    x = np.random.default_rng(0).normal(size=(workers, 4)).astype(np.float32) * 3
    state = PerWorker(jnp.zeros((workers, 1)))
    kept, found = data_parallel(step, where, outputs=MEAN_AND_SUM)(state, x.reshape(-1))
    np.testing.assert_allclose(kept.value[:, 0], x.sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.loss, x.mean(), rtol=1e-5, atol=1e-6)
    assert int(found.tokens) == (x > 2).sum()
    assert found.tokens.dtype == jnp.int32
    np.testing.assert_array_equal(found.norms["a"], np.abs(x).max(1))
    np.testing.assert_array_equal(found.norms["b"], np.stack([x.min(1), x.max(1)], 1))
    np.testing.assert_array_equal(found.high["float"], x.max())
    assert int(found.high["int"]) == (x > 0).sum(1).max()
    assert int(found.step) == 7


def test_one_kind_for_all_and_means_in_few_bits():
    halves = jnp.full(4, 6e4, jnp.float16)  # their sum is beyond float16
    run = data_parallel(lambda x: {"a": x.max()}, 2, batch_argnums=0, outputs="mean")
    found = run(halves)["a"]
    assert found.dtype == jnp.float16
    assert found == halves[0]


def test_a_function_of_paths_says_kinds():
    kinds = dict(MEAN_AND_SUM[1])
    by_path = lambda path: next((k for name, k in kinds.items() if f".{name}" in path), None)
    state, x = PerWorker(jnp.zeros((2, 1))), jnp.arange(4.0)
    found = data_parallel(step, 2, outputs=(None, by_path))(state, x)
    expected = data_parallel(step, 2, outputs=MEAN_AND_SUM)(state, x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("kind", "nothing"),
    [
        ("sum", None),
        (lambda path: "sum", {}),
        ({"norms": "sum"}, {"norms": [None, {}]}),
    ],
)
def test_a_part_without_arrays_may_have_a_kind(kind, nothing):
    """Trainers call one step for metrics that are shown, and for none."""
    run = data_parallel(lambda x: (x.sum(), nothing), 2, batch_argnums=0, outputs=("sum", kind))
    total, shown = run(jnp.arange(4.0))
    assert total == 6
    assert shown == nothing


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        ((None, lambda path: "total"), "outputs[1].loss='total' is unknown: give 'mean'"),
        ((None, {"loss": "average"}), "outputs[1]['loss']='average' is unknown: give 'mean'"),
        ((None, {"los": "mean"}), "outputs[1]['los']='mean' names no output of the step"),
        ({"loss": "mean"}, "outputs['loss']='mean' names no output of the step, which has [0]"),
        ((None, {"norms": {"c": "own"}}), "outputs[1]['norms']['c']='own' names no output"),
        ((None, {"tokens": "mean"}), "output[1].tokens has dtype int32, which has no mean"),
        (("own", None), "is per-worker state, but outputs says 'own'"),
        ((None, {"loss": "mean"}), "output[1].tokens differs between workers"),
    ],
)
def test_what_outputs_are_not_is_refused(outputs, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        data_parallel(step, 2, outputs=outputs)(PerWorker(jnp.zeros((2, 1))), jnp.arange(4.0))


def test_an_output_of_a_flat_list_is_named_by_its_number():
    """Flat lists of a trainer's variables have no names that say what they are."""
    from flax import linen as nn

    norm = nn.BatchNorm(use_running_average=False)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    variables = norm.init(jax.random.key(0), x)

    def listed(x):
        return [[0.0], jax.tree.leaves(norm.apply(variables, x, mutable=["batch_stats"])[1])]

    for where in (2, mesh(2)):
        with pytest.raises(ValueError, match=r"output\[1\]\[0\] differs between workers"):
            data_parallel(listed, where, batch_argnums=0)(x)
