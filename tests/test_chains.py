"""What goes where in a chain: what trains as the trainer's own does, and warnings of the rest."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from workers import mesh, some

import jaxsparse
from jaxsparse import data_parallel, shard

NORM, RATE = 0.5, 0.1
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


def trained(tx, where, clip=None, scale=1.0):
    """The parameters of three steps of a trainer that clips as it does."""

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda p: scale * loss_of(p, x))(params)
        if clip is not None:
            grads, _ = clip.update(grads, optax.EmptyState())
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    start = START if isinstance(where, int) else jax.device_put(START, NamedSharding(where, P()))
    run, state = data_parallel(step, where), shard((start, tx.init(start)), where)
    for _ in range(3):
        state, _ = run(state, INPUTS)
    return np.asarray(state[0]["w"])


def dense(tx):
    """The same without workers."""
    params, state = START, tx.init(START)
    for _ in range(3):
        updates, state = tx.update(jax.grad(loss_of)(params, INPUTS), state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


def grid():
    return jax.make_mesh((2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)


PLACES = {"simulated": lambda: 3, "mesh": lambda: mesh(3), "grid": grid}


@pytest.mark.parametrize("place", some(PLACES, ["simulated"], slow=["mesh"]))
def test_a_clip_behind_is_that_of_the_mean_and_one_in_the_step_may_be_kept_from_acting(place):
    where, exchange, sgd = PLACES[place](), jaxsparse.dense(), optax.sgd(RATE)
    expected = dense(optax.chain(CLIP, sgd))
    assert np.abs(expected - dense(sgd)).max() > 0.01  # it acts
    moved = trained(optax.chain(exchange, CLIP, sgd), where)
    np.testing.assert_allclose(moved, expected, rtol=1e-6, atol=1e-7)
    # The trainer's clip sees gradients that are small, and does nothing.
    scaled = optax.chain(optax.scale(2.0**20), exchange, CLIP, sgd)
    with pytest.warns(UserWarning, match="the step clips gradients in front of the exchange"):
        kept = trained(scaled, where, CLIP, 2.0**-20)
    np.testing.assert_array_equal(kept, moved)


WARNED = {
    "a chain": lambda: trained(optax.chain(CLIP, jaxsparse.dense(), optax.sgd(RATE)), 2),
    "by value": lambda: trained(optax.chain(optax.clip(0.1), jaxsparse.dense()), 2),
    "adaptive": lambda: trained(
        optax.chain(optax.adaptive_grad_clip(0.1), jaxsparse.dense(), optax.sgd(RATE)), 2
    ),
    "the step": lambda: trained(optax.chain(jaxsparse.dense(), optax.sgd(RATE)), 2, CLIP),
}
FINE = {
    "behind": lambda: trained(optax.chain(jaxsparse.dense(), CLIP, optax.sgd(RATE)), 2),
    "momentum": lambda: trained(
        optax.chain(CLIP, jaxsparse.dgc(0.1, is_dense=lambda path, shape: False)), 2
    ),
    "per_worker": lambda: trained(
        optax.chain(CLIP, jaxsparse.per_worker(optax.trace(0.9)), jaxsparse.dense()), 2
    ),
    "one worker": lambda: trained(optax.chain(CLIP, jaxsparse.dense()), 1),
}


@pytest.mark.parametrize("case", [*WARNED, *FINE])
def test_a_clip_of_each_workers_gradient_is_warned_of(case):
    warned = pytest.warns(UserWarning, match="the step clips gradients in front of the exchange")
    with warned if case in WARNED else contextlib.nullcontext():
        (WARNED | FINE)[case]()


def run_nnx(tx):
    """A step of an nnx trainer, whose state has lost the classes of Optax' states."""
    model = nnx.Linear(6, 4, use_bias=False, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))
        return nnx.state((model, optimizer))

    jax.eval_shape(data_parallel(step, 2), shard(state, 2), INPUTS)


def run_two(first, second):
    """A step of two chains, as of a GAN."""
    txs = [first, second]

    def step(state, x):
        new = []
        for tx, (params, opt_state) in zip(txs, state):
            updates, opt_state = tx.update(jax.grad(loss_of)(params, x), opt_state, params)
            new.append((optax.apply_updates(params, updates), opt_state))
        return new

    state = shard([(START, tx.init(START)) for tx in txs], 2)
    jax.eval_shape(data_parallel(step, 2), state, INPUTS)


def run_jitted(tx):
    """A step that accumulates in a loop, and updates in a function of its own."""
    update = jax.jit(tx.update)

    def step(state, x):
        params, opt_state = state
        add = lambda total, part: (total + jax.grad(loss_of)(params, part)["w"] / 2, None)
        total, _ = jax.lax.scan(add, jnp.zeros((6, 4)), x.reshape(2, -1, 6))
        updates, opt_state = update({"w": total}, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    jax.eval_shape(data_parallel(step, 2), shard((START, tx.init(START)), 2), INPUTS)


def run_averaged(tx):
    """A step with a moving average of parameters."""

    def step(state, x):
        params, opt_state, average = state
        updates, opt_state = tx.update(jax.grad(loss_of)(params, x), opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, optax.tree.update_moment(params, average, 0.9, 1)

    jax.eval_shape(data_parallel(step, 2), shard((START, tx.init(START), START), 2), INPUTS)


MOMENTUM, DECAY = jaxsparse.dense(momentum=0.9), optax.add_decayed_weights(0.1)
TRACE, SGD = optax.sgd(RATE, momentum=0.9), optax.sgd(RATE)
TWICE, WEAK = "momentum acts twice: in the exchange", "weight decay behind an exchange with"
LONG = "a clip behind the exchange clips its momentum"
# What is written behind an exchange with momentum, and the warning of it, if there is one.
BEHIND = {
    "sgd": (lambda: trained(optax.chain(MOMENTUM, TRACE), 2), TWICE),
    "nnx": (lambda: run_nnx(optax.chain(MOMENTUM, TRACE)), TWICE),
    "a chain in a chain": (
        lambda: run_jitted(optax.chain(MOMENTUM, optax.chain(optax.scale(2.0), TRACE))),
        TWICE,
    ),
    "adam": (lambda: trained(optax.chain(MOMENTUM, optax.adam(RATE)), 2), TWICE),
    "a clip": (lambda: trained(optax.chain(MOMENTUM, CLIP, SGD), 2), LONG),
    "a clip by value": (lambda: run_nnx(optax.chain(MOMENTUM, optax.clip(0.1), SGD)), LONG),
    "decay": (lambda: trained(optax.chain(MOMENTUM, DECAY, SGD), 2), WEAK),
    "momentum in the exchange": (lambda: trained(optax.chain(MOMENTUM, SGD), 2), None),
    "behind": (lambda: trained(optax.chain(jaxsparse.dense(), CLIP, DECAY, TRACE), 2), None),
    "each worker's own": (
        lambda: trained(optax.chain(jaxsparse.per_worker(optax.trace(0.9)), MOMENTUM), 2),
        None,
    ),
    "an average of parameters": (lambda: run_averaged(optax.chain(MOMENTUM, SGD)), None),
    "two chains": (
        lambda: run_two(
            optax.chain(MOMENTUM, SGD), optax.chain(jaxsparse.dense(), CLIP, DECAY, TRACE)
        ),
        None,
    ),
}


@pytest.mark.parametrize("case", BEHIND)
def test_what_a_momentum_in_the_exchange_changes_is_warned_of(case):
    run, message = BEHIND[case]
    with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext():
        run()


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


@pytest.mark.parametrize("row", ROWS)
def test_with_everything_sent_each_row_of_the_page_is_the_trainers_own(row):
    """The rows of docs/chain.md. The trainer accumulates by MultiSteps, and we in the step."""
    theirs, ours = ROWS[row]
    theirs = optax.MultiSteps(theirs, 2)
    params, state = START, theirs.init(START)
    update = jax.jit(
        lambda x, state, params: theirs.update(jax.grad(loss_of)(params, x), state, params)
    )
    for part in 4 * [INPUTS[:12], INPUTS[12:]]:
        updates, state = update(part, state, params)
        params = optax.apply_updates(params, updates)

    def step(state, x):
        params, opt_state = state
        grads = [jax.grad(loss_of)(params, part)["w"] for part in jnp.split(x, 2)]
        updates, opt_state = ours.update({"w": sum(grads) / 2}, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    run, state = data_parallel(step, 3), shard((START, ours.init(START)), 3)
    for _ in range(4):
        state = run(state, INPUTS)
    np.testing.assert_allclose(state[0]["w"], params["w"], rtol=0, atol=1e-6)
    assert np.abs(START["w"] - params["w"]).max() > 0.01


def test_a_sparse_system_that_sends_everything_has_no_momentum():
    masking = jaxsparse.top_k(1.0, momentum=0.9, is_dense=lambda *_: False)
    moved = trained(optax.chain(masking, SGD), 2)
    np.testing.assert_allclose(moved, dense(SGD), rtol=1e-6, atol=1e-7)


TWO = {"live": START["w"], "frozen": START["w"]}
FREEZE = {"live": "train", "frozen": "freeze"}


def with_frozen(tx, shows=False):
    """Traces a step of two equal leaves, of which one moves. The report of one with `shows`."""

    def step(state, x):
        params, opt_state = state
        loss = lambda p: loss_of({"w": p["live"]}, x) + 1e4 * loss_of({"w": p["frozen"]}, x)
        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, jaxsparse.diagnose(opt_state, updates) if shows else None

    run, state = data_parallel(step, 2), shard((TWO, tx.init(TWO)), 2)
    return run(state, INPUTS)[2] if shows else jax.eval_shape(run, state, INPUTS)


def parts(train, freeze):
    return optax.multi_transform({"train": train, "freeze": freeze}, FREEZE)


def test_frozen_leaves_behind_an_exchange_are_warned_of_and_counted():
    exchange, zero = jaxsparse.top_k(0.25, is_dense=lambda *_: False), optax.set_to_zero()
    with pytest.warns(UserWarning, match=r"drops 1 of 2 arrays .*\(24 of 48 elements\)"):
        with_frozen(optax.chain(exchange, parts(SGD, zero)))
    with_frozen(parts(optax.chain(exchange, SGD), zero))
    with_frozen(optax.chain(parts(optax.identity(), zero), exchange, SGD))
    # The norm of a clip reads all leaves, so that the step does not show what is dropped.
    report = with_frozen(optax.chain(exchange, CLIP, parts(SGD, zero)), shows=True)
    assert float(report.dropped_share) == 1
    report = with_frozen(optax.chain(exchange, optax.adam(RATE)), shows=True)
    assert float(report.dropped_share) == 0


def tokens_of(loss, take=jax.value_and_grad):
    """A step with the mean over tokens that `loss` makes of each token's loss and of the mask."""
    mask = np.tril(np.ones((24, 6), np.float32))
    exchange = jaxsparse.dense(is_dense=lambda *_: False)

    def step(state, x, mask):
        params, state = state
        each = lambda p: jnp.square(x @ p["w"] @ jnp.ones((4, 6)))
        found = take(lambda p: loss(each(p), mask))(params)
        grads = found[1] if take is jax.value_and_grad else found
        return exchange.update(grads, state)

    run = data_parallel(step, 2, batch_argnums=(1, 2))
    jax.eval_shape(run, shard((START, exchange.init(START)), 2), INPUTS, mask)


def accumulated(each, mask):
    def add(sums, part):
        return (sums[0] + jnp.sum(part[0] * part[1]), sums[1] + jnp.sum(part[1])), None

    (total, count), _ = jax.lax.scan(add, (0.0, 0.0), (each, mask))
    return total / count


OWN_COUNTS = {
    "sums": lambda each, mask: jnp.sum(each * mask) / jnp.sum(mask),
    "at least one": lambda each, mask: jnp.sum(each * mask) / jnp.maximum(jnp.sum(mask), 1),
    "the inverse": lambda each, mask: jnp.sum(each * mask) * (1 / jnp.sum(mask)),
    "where": lambda each, mask: jnp.mean(each, where=mask > 0),
    "integers": lambda each, mask: jnp.sum(each * mask) / jnp.sum(mask > 0),
    "a loop": accumulated,
    "jitted": lambda each, mask: jax.jit(lambda x: jnp.sum(x * mask) / jnp.sum(mask))(each),
    "average": lambda each, mask: jnp.average(each, weights=mask),
}
FINE_COUNTS = {
    "weighted": lambda each, mask: jaxsparse.weighted(
        jnp.sum(each * mask) / jnp.sum(mask), jnp.sum(mask)
    ),
    "of all": lambda each, mask: jnp.sum(each * mask) / jax.lax.pmean(jnp.sum(mask), "data"),
    "of each row": lambda each, mask: jnp.mean(jnp.sum(each * mask, 1) / jnp.sum(mask, 1)),
    "of the shape": lambda each, mask: jnp.sum(each * mask) / mask.size,
    "an input": lambda each, mask: jnp.mean(each * (jnp.sum(mask) / jnp.max(mask))),
    "of the gradient": lambda each, mask: jnp.sum(each) / jnp.sum(jax.lax.stop_gradient(each)),
}


@pytest.mark.parametrize("case", [*OWN_COUNTS, *FINE_COUNTS])
def test_a_mean_over_each_workers_own_tokens_is_warned_of(case):
    warned = pytest.warns(UserWarning, match="the step divides by a number that it counts")
    with warned if case in OWN_COUNTS else contextlib.nullcontext():
        tokens_of((OWN_COUNTS | FINE_COUNTS)[case])


def test_a_mean_over_own_tokens_is_seen_without_the_loss():
    with pytest.warns(UserWarning, match="the step divides by a number that it counts"):
        tokens_of(OWN_COUNTS["sums"], jax.grad)


def skipping_spikes(tx):
    """`tx`, but for steps whose loss is above the last one's: MaxText has such a wrapper."""

    def init(params):
        return {"inner": tx.init(params), "last": jnp.float32(np.inf)}

    def update(updates, state, params=None, *, loss):
        def do():
            return tx.update(updates, state["inner"], params)

        def skip():
            return jax.tree.map(jnp.zeros_like, updates), state["inner"]

        updates, inner = jax.lax.cond(loss <= state["last"], do, skip)
        return updates, {"inner": inner, "last": loss}

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("where", [2, mesh(2)], ids=["simulated", "mesh"])
def test_who_decides_by_a_loss_needs_its_mean(where):
    tx = skipping_spikes(optax.chain(jaxsparse.dense(), optax.sgd(RATE)))

    def step(state, x, mean):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params, loss=mean(loss))
        return optax.apply_updates(params, updates), opt_state

    make = lambda mean: data_parallel(lambda s, x: step(s, x, mean), where)
    state = shard((START, tx.init(START)), where)
    with pytest.raises(ValueError, match="differs between workers"):
        make(lambda loss: loss)(state, INPUTS)
    run = make(lambda loss: jax.lax.pmean(loss, "data"))
    losses = []
    for scale in (1, 10, 1):  # the second one is a spike
        before = np.asarray(state[0]["w"])
        state = run(state, scale * INPUTS)
        losses.append(float(state[1]["last"]))
        assert np.array_equal(before, state[0]["w"]) == (scale == 10)
    assert losses[1] > losses[0] > losses[2]


def test_an_exchange_in_front_of_lookahead_is_told_its_place():
    """`init` sees both parameters of lookahead, and gradients are those of the fast ones."""
    send, params = jaxsparse.quantized("int4", is_dense=lambda *_: False), START
    both = optax.LookaheadParams.init_synced(params)
    update = lambda tx: lambda s, x: tx.update(jax.grad(loss_of)(params, x), s, both)
    run = lambda tx: data_parallel(update(tx), 2)(shard(tx.init(both), 2), INPUTS)
    behind = optax.chain(send, optax.lookahead(optax.sgd(0.5), 5, 0.5))
    with pytest.raises(ValueError, match=r"'fast\.w' .* as in optax\.lookahead\(optax\.chain\("):
        run(behind)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = run(optax.lookahead(optax.chain(send, optax.sgd(0.5)), 5, 0.5))
    assert np.any(updates.fast["w"] != 0)
