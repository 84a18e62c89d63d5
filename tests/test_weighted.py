"""Means over workers that count unequally: a loss over all tokens, whoever has them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from workers import WAYS, on_workers, some

import jaxsparse
from jaxsparse import weighted
from jaxsparse.outer.parallel import run_on_workers

RNG = np.random.default_rng(0)
INPUTS, TARGETS = (RNG.normal(size=(24, n)).astype(np.float32) for n in (5, 3))
START = {"kernel": RNG.normal(size=(5, 3)).astype(np.float32)}
MASK = (np.arange(24) % 5 >= np.arange(24) // 5).astype(np.float32)  # fewer and fewer tokens


def mean_of(params, inputs, targets, mask):
    each = jnp.sum((inputs @ params["kernel"] - targets) ** 2, axis=1)
    return jnp.sum(each * mask) / jnp.maximum(jnp.sum(mask), 1)


def trained(workers, scale, mask=MASK, where="loss"):
    """Losses and the kernel of three steps."""
    tx = optax.chain(jaxsparse.dense(), optax.sgd(0.1))

    def step(params, inputs, targets, mask):
        def loss_of(params):
            loss = mean_of(params, inputs, targets, mask)
            return scale(loss, mask) if where == "loss" else loss

        loss, grads = jax.value_and_grad(loss_of)(params)
        if where == "gradients":
            loss, grads = scale((loss, grads), mask)
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), jax.lax.pmean(loss, "data")

    run = run_on_workers(step, workers, batch_argnums=(1, 2, 3))
    params, losses = START, []
    for _ in range(3):
        params, loss = run(params, INPUTS, TARGETS, mask)
        losses.append(float(loss))
    return losses, np.asarray(params["kernel"])


by_tokens = lambda tree, mask: weighted(tree, mask.sum())
as_it_is = lambda tree, mask: tree
CASES = [(workers, where) for workers in (2, 3, 4, 6, 8) for where in ("loss", "gradients")]


@pytest.mark.parametrize("case", some(CASES, [(3, "loss")]), ids=str)
def test_scaled_by_tokens_training_is_that_of_one_worker(case):
    workers, where = case
    for first in (MASK[:8], np.zeros(8, np.float32)):  # the first worker may have no token
        mask = np.concatenate([first, MASK[8:]])
        losses, kernel = trained(1, as_it_is, mask)
        found = trained(workers, by_tokens, mask, where)
        np.testing.assert_allclose(found[0], losses, rtol=1e-6)
        np.testing.assert_allclose(found[1], kernel, rtol=1e-5, atol=1e-6)
        wrong = trained(workers, as_it_is, mask)[0]
        assert abs(wrong[0] / losses[0] - 1) > 0.01


@pytest.mark.parametrize("way", some(WAYS, ["vmap"]))
def test_shares_of_any_number(way):
    scale = on_workers(lambda x, w: weighted({"x": x}, w), 3, way)
    ones = jnp.ones((3, 2))
    for weights, shares in (
        ([1, 2, 3], [0.5, 1, 1.5]),
        ([0, 0, 3], [0, 0, 3]),
        ([0, 0, 0], [0, 0, 0]),
        ([2**30, 2**30, 0], [1.5, 1.5, 0]),
    ):
        found = scale(ones, jnp.int32(weights))["x"]
        np.testing.assert_allclose(found, np.float32(shares)[:, None] * ones, rtol=1e-6)
    found = scale(ones.astype(jnp.bfloat16), jnp.float32([0.5, 1.5, 1]))["x"]
    assert found.dtype == jnp.bfloat16
    # A mean over no tokens may be NaN; what can't be a weight shows.
    nothing = scale(jnp.float32([[np.nan] * 2, [1] * 2, [1] * 2]), jnp.int32([0, 3, 3]))["x"]
    np.testing.assert_array_equal(nothing, np.float32([[0] * 2, [1.5] * 2, [1.5] * 2]))
    assert np.isnan(scale(ones, jnp.float32([-1, 3, 3]))["x"]).any()
    assert np.isnan(scale(ones, jnp.float32([np.nan, 3, 3]))["x"]).any()


def test_what_is_no_weight_is_named():
    for weight, match in (
        (jnp.ones(3), r"weight has shape \(3,\) and dtype float32, but it is one number"),
        (True, "weight has shape .* and dtype bool"),
    ):
        with pytest.raises(ValueError, match=match):
            weighted(jnp.ones(2), weight, axis_name=None)
    with pytest.raises(ValueError, match=r"leaf\['n'\] has dtype int32, which has no mean"):
        weighted({"n": jnp.arange(2)}, 1, axis_name=None)
    with pytest.raises(ValueError, match="is not bound here"):
        weighted(jnp.ones(2), 1)
    assert float(weighted(jnp.float32(3), 5, axis_name=None)) == 3
