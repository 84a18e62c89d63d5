"""What goes where in a chain: what trains as the trainer's own does, and warnings of the rest."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from workers import mesh, some

import jaxsparse
from jaxsparse import check

NORM, RATE, WORKERS = 0.5, 0.1, 3
START = {"w": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)}
INPUTS = np.random.default_rng(1).normal(size=(24, 6)).astype(np.float32)
CLIP = optax.clip_by_global_norm(NORM)
pytestmark = pytest.mark.usefixtures("as_jax_promotes")


@pytest.fixture(scope="module")
def as_jax_promotes():
    """Optax' Adam, schedules and MultiSteps mix dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def loss_of(params, x):
    return jnp.mean(jnp.sum((x @ params["w"]) ** 2, axis=1))


def trained(tx, steps=3, parts=1):
    """The parameters after steps that accumulate rows of gradients over parts of the batch."""
    where = mesh(WORKERS)
    params = jax.device_put(START, NamedSharding(where, P()))
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        grads = [jaxsparse.grad(loss_of, mesh=where)(params, x)["w"] for x in jnp.split(x, parts)]
        updates, state = tx.update({"w": sum(grads) / parts}, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state, INPUTS)
    return np.asarray(params["w"])


@functools.cache
def dense(tx, steps=3, parts=1):
    """The same by a trainer without workers, which accumulates by MultiSteps."""
    tx = optax.MultiSteps(tx, parts)
    params, state = START, tx.init(START)
    update = jax.jit(
        lambda x, state, params: tx.update(jax.grad(loss_of)(params, x), state, params)
    )
    for part in steps * np.split(INPUTS, parts):
        updates, state = update(part, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


def test_a_clip_behind_is_that_of_the_mean_and_one_in_front_each_workers():
    exchange, sgd = jaxsparse.dense(), optax.sgd(RATE)
    expected = dense(optax.chain(CLIP, sgd))
    assert np.abs(expected - dense(sgd)).max() > 0.01  # it acts
    moved = trained(optax.chain(exchange, CLIP, sgd))
    np.testing.assert_allclose(moved, expected, rtol=1e-6, atol=1e-7)
    in_front = optax.chain(jaxsparse.per_worker(CLIP), exchange, sgd)
    clip = jax.jit(lambda x: CLIP.update(jax.grad(loss_of)(START, x), optax.EmptyState())[0]["w"])
    own = [clip(part) for part in np.split(INPUTS, WORKERS)]
    np.testing.assert_allclose(
        trained(in_front, steps=1), START["w"] - RATE * np.mean(own, 0), rtol=1e-5, atol=1e-6
    )


def test_momentum_in_the_exchange_with_each_workers_clip_and_decay():
    """DGC's row of docs/chain.md, which has no dense trainer's clip."""
    tx = optax.chain(
        jaxsparse.per_worker(CLIP), DECAY, jaxsparse.dense(momentum=0.9), optax.sgd(RATE)
    )
    clip = jax.jit(lambda w, x: CLIP.update(jax.grad(loss_of)({"w": w}, x), optax.EmptyState())[0])
    w, momentum = START["w"], 0
    for _ in range(3):
        own = [clip(w, part)["w"] for part in np.split(INPUTS, WORKERS)]
        momentum = 0.9 * momentum + np.mean(own, 0) + 0.1 * w
        w = w - RATE * momentum
    np.testing.assert_allclose(trained(tx), w, rtol=1e-5, atol=1e-6)


MOMENTUM, DECAY = jaxsparse.dense(momentum=0.9), optax.add_decayed_weights(0.1)
TRACE, SGD = optax.sgd(RATE, momentum=0.9), optax.sgd(RATE)
TWICE, WEAK = "momentum acts twice: in the exchange", "weight decay behind an exchange with"
LONG = "a clip behind the exchange clips its momentum"
# What is written behind an exchange with momentum, and the warning of it, if there is one.
BEHIND = {
    "sgd": (optax.chain(MOMENTUM, TRACE), TWICE),
    "a chain in a chain": (
        optax.chain(MOMENTUM, optax.chain(optax.scale(2.0), TRACE)),
        TWICE,
    ),
    "adam": (optax.chain(MOMENTUM, optax.adam(RATE)), TWICE),
    "a clip": (optax.chain(MOMENTUM, CLIP, SGD), LONG),
    "a clip by value": (optax.chain(MOMENTUM, optax.clip(0.1), SGD), LONG),
    "decay": (optax.chain(MOMENTUM, DECAY, SGD), WEAK),
    "momentum in the exchange": (optax.chain(MOMENTUM, SGD), None),
    "behind": (optax.chain(jaxsparse.dense(), CLIP, DECAY, TRACE), None),
    "each worker's own": (
        optax.chain(jaxsparse.per_worker(optax.trace(0.9)), MOMENTUM),
        None,
    ),
    # Whoever wrote it: what is computed counts.
    "own momentum": (
        optax.chain(
            MOMENTUM,
            optax.GradientTransformation(
                lambda p: p, lambda u, m, p=None: 2 * [jax.tree.map(lambda u, m: u + m / 2, u, m)]
            ),
        ),
        TWICE,
    ),
    "own clip": (
        optax.chain(
            MOMENTUM,
            optax.stateless(
                lambda u, p: optax.tree.scale(jnp.minimum(1, NORM / optax.tree.norm(u)), u)
            ),
        ),
        LONG,
    ),
    "own decay": (
        optax.chain(
            MOMENTUM, optax.stateless(lambda u, p: jax.tree.map(lambda u, p: u - p / 9, u, p))
        ),
        WEAK,
    ),
    "in a branch": (optax.chain(MOMENTUM, optax.apply_if_finite(optax.adam(RATE), 2)), TWICE),
    "a rate in the state": (optax.chain(MOMENTUM, optax.inject_hyperparams(optax.sgd)(RATE)), None),
    "decay that is off": (optax.chain(MOMENTUM, optax.novograd(RATE)), TWICE),
    "second moments": (optax.chain(MOMENTUM, optax.rmsprop(RATE)), None),
    "sums": (optax.chain(MOMENTUM, optax.adagrad(RATE)), None),
    "several steps": (optax.chain(MOMENTUM, optax.MultiSteps(SGD, 2)), None),
    "means": (optax.chain(MOMENTUM, optax.contrib.schedule_free(SGD, RATE)), None),
    "trust ratio": (optax.chain(MOMENTUM, optax.scale_by_trust_ratio(), SGD), None),
    "noise": (optax.chain(MOMENTUM, optax.add_noise(0.1, 0.5, jax.random.key(0)), SGD), None),
}


@pytest.mark.parametrize("case", BEHIND)
def test_what_a_momentum_in_the_exchange_changes_is_warned_of(case):
    tx, message = BEHIND[case]
    with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext() as told:
        check(tx, START)
    assert message is None or told[0].filename == __file__


NORMS = optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)})
# What Optax gives more than updates and parameters, or has more of after a step.
BY_LOSS = {
    "plateau": optax.chain(optax.sgd(RATE), optax.contrib.reduce_on_plateau()),
    "polyak": optax.polyak_sgd(),
    "line search": optax.lbfgs(),
    "monitor": optax.chain(NORMS, optax.sgd(RATE)),
}


@pytest.mark.parametrize("name", BY_LOSS)
def test_what_goes_by_a_loss_or_measures_stands_behind(name):
    check(optax.chain(jaxsparse.dense(), BY_LOSS[name]), START)


def test_what_check_can_not_give_or_measures_rows_is_told():
    own = optax.GradientTransformationExtraArgs(lambda p: (), lambda u, s, p, *, epoch, **_: (u, s))
    with pytest.raises(ValueError, match=r"arguments that check does not know .*'epoch'"):
        check(optax.chain(jaxsparse.dense(), own), START)
    with pytest.raises(ValueError, match="In front of the exchange, the reduce_sum"):
        check(optax.chain(NORMS, jaxsparse.dense()), START)


LEAVES = {"w": jnp.ones((5, 4)), "b": jnp.ones(4), "scalar": jnp.ones(())}
MATRICES = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
VECTORS = lambda tree: jax.tree.map(lambda x: x.ndim == 1, tree)
SIZES = lambda tree: jax.tree.map(lambda x: "few" if x.size < 16 else "many", tree)
HALF = {"few": optax.scale(0.5), "many": optax.identity()}
# Whether a mask in front sees rows, and which shapes it takes for others.
MASKS = {
    "decay": (optax.add_decayed_weights(0.1, mask=MATRICES), r"\[\(4,\)\]"),
    "none": (optax.masked(optax.scale(2.0), VECTORS), r"\[\(4,\)\]"),
    "behind a factor": (
        optax.chain(optax.scale(2.0), optax.masked(optax.scale(2.0), MATRICES)),
        r"\[\(4,\)\]",
    ),
    "labels": (optax.multi_transform(HALF, SIZES), r"\[\(\), \(4,\)\]"),
    "a tree": (optax.add_decayed_weights(0.1, mask=MATRICES(LEAVES)), None),
    "labels, a tree": (optax.multi_transform(HALF, SIZES(LEAVES)), None),
    "a path": (
        optax.masked(
            optax.scale(2.0), lambda t: jax.tree_util.tree_map_with_path(lambda k, x: len(k) > 1, t)
        ),
        None,
    ),
    "per_worker": (jaxsparse.per_worker(optax.masked(optax.scale(2.0), VECTORS)), None),
    "numbers of rows": (optax.stateless_with_tree_map(lambda x, p: x * x.shape[0]), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_front_that_see_rows_are_told(name):
    front, shapes = MASKS[name]
    tells = pytest.warns(UserWarning, match=rf"to parameters of shapes {shapes} goes by the number")
    with tells if shapes else contextlib.nullcontext():
        check(optax.chain(front, jaxsparse.dense(), optax.sgd(RATE)), LEAVES)


def test_masks_behind_see_means():
    masked = optax.masked(optax.scale(2.0), VECTORS)
    check(optax.chain(jaxsparse.dense(), masked, optax.adamw(RATE, mask=MATRICES)), LEAVES)


# What is the same for all rows: a clip, a weight decay and a schedule that act, and accumulation.
SCHEDULE = optax.linear_schedule(0.05, 0.01, 4)
BEHIND_ALL = {
    "sgd": optax.chain(CLIP, DECAY, optax.sgd(SCHEDULE, momentum=0.9)),
    "nesterov": optax.chain(CLIP, DECAY, optax.sgd(SCHEDULE, momentum=0.9, nesterov=True)),
    "adamw": optax.chain(CLIP, optax.adamw(SCHEDULE, weight_decay=0.1)),
    "muon": optax.chain(CLIP, optax.contrib.muon(SCHEDULE, weight_decay=0.1)),
}
WHOLE = {
    "dense": jaxsparse.dense(),
    "top_k": jaxsparse.top_k(1.0, is_dense=lambda *_: False),
}
# A trainer's optimizer, and the chain that trains as it does if everything is sent.
ROWS = {
    f"{name}, {sent}": (tx, optax.chain(exchange, tx))
    for name, tx in BEHIND_ALL.items()
    for sent, exchange in WHOLE.items()
}
# Without a clip, momentum may also be each worker's own, with the decay in front of it.
for nesterov in (False, True):
    plain = optax.chain(DECAY, optax.sgd(SCHEDULE, momentum=0.9, nesterov=nesterov))
    ours = jaxsparse.dense(momentum=0.9, nesterov=nesterov)
    ROWS[f"in the exchange, {nesterov}"] = plain, optax.chain(DECAY, ours, optax.sgd(SCHEDULE))
    if not nesterov:
        own = optax.chain(jaxsparse.per_worker(optax.trace(0.9)), WHOLE["top_k"])
        ROWS["per_worker"] = plain, optax.chain(DECAY, own, optax.sgd(SCHEDULE))


@pytest.mark.parametrize("row", some(ROWS, ("adamw, top_k", "per_worker", "in the exchange, True")))
def test_with_everything_sent_each_row_of_the_page_is_the_trainers_own(row):
    """The rows of docs/chain.md."""
    theirs, ours = ROWS[row]
    expected = dense(theirs, steps=4, parts=2)
    np.testing.assert_allclose(trained(ours, steps=4, parts=2), expected, rtol=1e-6, atol=1e-6)
    assert np.abs(START["w"] - expected).max() > 0.01


def test_a_sparse_system_that_sends_everything_has_no_momentum():
    masking = jaxsparse.top_k(1.0, momentum=0.9, is_dense=lambda *_: False)
    np.testing.assert_allclose(trained(optax.chain(masking, SGD)), dense(SGD), rtol=1e-6, atol=1e-7)


TWO = {"live": START["w"], "frozen": START["w"]}
FREEZE = {"live": "train", "frozen": "freeze"}


def parts(train, freeze):
    return optax.multi_transform({"train": train, "freeze": freeze}, FREEZE)


def dropped_share(tx):
    """Of what a step delivers to two equal leaves, of which one moves."""
    loss = lambda p, x: loss_of({"w": p["live"]}, x) + 1e4 * loss_of({"w": p["frozen"]}, x)

    @jax.jit
    def run(x):
        updates, state = tx.update(jaxsparse.grad(loss, workers=2)(TWO, x), tx.init(TWO), TWO)
        return jaxsparse.diagnose(state, updates).dropped_share

    return float(run(INPUTS))


def test_frozen_leaves_behind_an_exchange_are_warned_of_and_counted():
    exchange = jaxsparse.top_k(0.25, is_dense=lambda *_: False, workers=2)
    zero = optax.set_to_zero()
    with pytest.warns(UserWarning, match=r"drops 1 of 2 .*\(24 of 48 .* large: take gradients of"):
        check(optax.chain(exchange, parts(SGD, zero)), TWO)
    # The norm of a clip reads all leaves, so that the chain does not show what is dropped.
    assert dropped_share(optax.chain(exchange, CLIP, parts(SGD, zero))) == 1
    assert dropped_share(optax.chain(exchange, optax.adam(RATE))) == 0


def test_an_exchange_in_front_of_lookahead_is_told_its_place():
    """`init` sees both parameters of lookahead, and gradients are those of the fast ones."""
    send = jaxsparse.quantized("int4", is_dense=lambda *_: False, workers=2)
    both = optax.LookaheadParams.init_synced(START)
    gradient = lambda: jaxsparse.grad(loss_of, workers=2)(START, INPUTS)
    behind = optax.chain(send, optax.lookahead(optax.sgd(0.5), 5, 0.5))
    with pytest.raises(
        ValueError, match=r"params has 2 leaves.* in optax\.lookahead\(optax\.chain\("
    ):
        jax.eval_shape(lambda: behind.update(gradient(), behind.init(both), both))
    around = optax.lookahead(optax.chain(send, optax.sgd(0.5)), 5, 0.5)
    updates, _ = jax.jit(lambda: around.update(gradient(), around.init(both), both))()
    assert np.abs(updates.fast["w"]).max() > 0
