"""Local steps and outer optimizers against NumPy, equalities, broken workers, and bytes."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import on_meshes
import optax
import pytest
import reference_chunks as chunks
import reference_local_steps as reference
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from workers import mesh, rows, some

import jaxsparse
from jaxsparse import LocalSteps, PerWorker, Stages, outer, reducers, reshard

# Three layers, and a leaf without a layer, which is in fragment 0 of streaming.
SHAPES = {"embedding": (5, 3), "layers": [(7, 2), (4,), (3, 3)]}
START = jax.tree.map(
    lambda shape: np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
)
SIZE = sum(x.size for x in jax.tree.leaves(START))
EMBEDDING, LAYERS = np.arange(15), [np.arange(15, 29), np.arange(29, 33), np.arange(33, 42)]


MEAN = jaxsparse.dense(), optax.sgd(1.0)  # exchange and optimizer


def diloco(rate=0.7, momentum=0.9):
    return jaxsparse.dense(), optax.sgd(rate, momentum or None, nesterov=True)


def flat(tree):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


def walk(state, move):
    """A step that subtracts the batch from the parameters, and counts."""
    params, count = state
    return (jax.tree.map(lambda x, m: x - m[0], params, move), count + 1), count


def moves(steps, workers, seed=0):
    """For each step a batch: the moves of all workers."""
    rng = np.random.default_rng(seed)
    one = lambda x: rng.normal(size=(steps, workers, *x.shape)).astype(np.float32)
    return jax.tree.map(one, START)


def at(tree, t):
    """The batch of a step."""
    return jax.tree.map(lambda x: jnp.asarray(x[t]), tree)


def run(train, tree, start=None, finish=True):
    """Global parameters and each worker's, after each step and `finish`; and the last state."""
    start = (START, jnp.int32(0)) if start is None else start
    state, globals_, locals_ = train.init(jax.tree.map(jnp.asarray, start)), [], []
    steps = len(jax.tree.leaves(tree)[0])
    for t in range(steps + finish):
        if t < steps:
            state, out = train(state, at(tree, t), t)
            workers = len(own_of(state))
            assert all(x.shape == (workers,) for x in jax.tree.leaves(out))
        else:
            state = train.finish(state, t)
        globals_.append(flat(state.params))
        locals_.append(own_of(state))
    return np.stack(globals_), np.stack(locals_), state


def own_of(state):
    """The parameters of each worker, [worker, d]."""
    own = [np.asarray(x.value) for x in jax.tree.leaves(state.worker[0], is_leaf=is_marked)]
    return np.concatenate([x.reshape(len(x), -1) for x in own], axis=1)


def is_marked(node):
    return isinstance(node, PerWorker)


def as_vectors(tree):
    """The batches as vectors, float64[step, worker, d]."""
    leaves = jax.tree.leaves(tree)
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in leaves], axis=2).astype(np.float64)


def where(workers, way):
    return mesh(workers) if way == "mesh" else workers


@pytest.mark.parametrize("way", some(["mesh", "simulated"], ["simulated"]))
def test_diloco_as_worked_by_hand(way):
    """theta = 1; workers end at .90 and .86, then at .80 and .72; alpha = .7, mu = .9."""
    train = LocalSteps(lambda state, ends: ((ends[0],), ends[0]), *diloco(), where(2, way), every=1)
    state = train.init((jnp.float32([1.0]),))
    for t, (ends, expected) in enumerate([([0.9, 0.86], 0.8404), ([0.8, 0.72], 0.665428)]):
        state, _ = train(state, jnp.float32(ends)[:, None], t)
        np.testing.assert_allclose(state.params, [expected], rtol=1e-6)
        np.testing.assert_array_equal(state.worker[0].value, [state.params] * 2)


@pytest.mark.parametrize(
    "place", some([(3, "mesh"), (1, "mesh"), (5, "simulated")], [(3, "mesh")]), ids=str
)
@pytest.mark.parametrize("name", some(["diloco", "mean", "bmuf"], ["diloco"]))
def test_outer_optimizers_are_those_of_numpy(place, name):
    workers, _ = place
    make = {
        "diloco": (optax.sgd(0.7, 0.9, nesterov=True), reference.nesterov(0.7, 0.9)),
        "mean": (optax.sgd(0.8), reference.heavy_ball(0.8, 0.0)),
        "bmuf": (optax.sgd(0.8, 0.5), reference.heavy_ball(0.8, 0.5)),
    }
    tx, twin = make[name]
    tree = moves(7, workers)
    found, own, state = run(LocalSteps(walk, jaxsparse.dense(), tx, where(*place), every=3), tree)
    expected, expected_own = reference.train(flat(START), as_vectors(tree), twin, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own, expected_own, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.worker[1].value, [7] * workers)
    assert int(state.skipped) == 0


SPARSE = [
    {},
    {"value_bits": 8},
    {"value_bits": 32, "decay": 0.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", some(SPARSE, SPARSE[:1]), ids=str)
@pytest.mark.parametrize("workers", some([3, 8], [3]))
def test_sparse_loco_is_that_of_numpy(workers, settings):
    """e <- beta e + D; s = Q(top-k of chunks); e <- e - s; theta <- theta - alpha mean(s)."""
    k, chunk, decay = 2, 16, settings.get("decay", 0.95)
    settings = {"decay": decay, "is_dense": lambda *_: False, **settings}
    pair = jaxsparse.chunked_top_k(k, chunk, **settings), optax.sgd(0.5)
    tree = moves(6, workers, seed=2)
    found, _, state = run(LocalSteps(walk, *pair, workers, every=2), tree)
    residual = np.zeros((workers, SIZE))
    bits = settings.get("value_bits", 2)
    quantize = functools.partial(chunks.sign_magnitude, bits=bits)
    if bits == 32:
        quantize = lambda v: v.astype(np.float64)

    def exchange(_, displacements):
        nonlocal residual
        x = (decay * residual + displacements).astype(np.float32)
        mean, residual = chunks.exchange(x, k, chunk, quantize)
        return mean

    twin = lambda _, theta, mean: theta - 0.5 * mean
    expected, _ = reference.train(flat(START), as_vectors(tree), twin, 2, exchange)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    kept = [np.asarray(x.value) for x in state.outer[0][0].residual.values()]
    assert bool(kept) == (decay != 0)
    if kept:
        joined = np.concatenate([x.reshape(workers, -1) for x in kept], axis=1)
        np.testing.assert_allclose(joined, residual, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("case", some([(3, None), (3, (1, 0.5)), (1, None)], [(3, None)]), ids=str)
def test_displacements_by_weight_are_those_of_numpy(case):
    """A worker's weight is the sum of its steps' since its last exchange; the last has none."""
    workers, stream = case
    tree = moves(11, workers)
    weights = np.random.default_rng(1).integers(0, 9, (11, workers)).astype(np.float32)
    weights[:, -1] = 0 if workers > 1 else 3
    tree["tokens"] = weights
    streaming, settings = None, {}
    if stream is not None:
        streaming = outer.Streaming(3, *stream)
        settings = {"overlap": stream[0], "mixing": stream[1]}
        settings["fragments"] = [EMBEDDING, np.concatenate(LAYERS[::2]), LAYERS[1]]
    step = lambda state, batch: walk(state, {name: batch[name] for name in START})
    train = LocalSteps(
        step,
        *diloco(),
        workers,
        every=4,
        streaming=streaming,
        weight=lambda batch: batch["tokens"].astype(jnp.int32).sum(),
    )
    found, own, state = run(train, tree)
    expected, expected_own = reference.train(
        flat(START),
        as_vectors({name: tree[name] for name in START}),
        reference.nesterov(0.7, 0.9),
        4,
        weights=weights,
        **settings,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(own, expected_own, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(state.weight.value, np.zeros_like(state.weight.value))


def test_weights_of_a_broken_worker_are_forgotten_and_others_kept():
    train = LocalSteps(
        lambda state, batch: ((state[0] - batch["move"],), ()),
        *MEAN,
        2,
        every=2,
        weight=lambda batch: batch["tokens"].sum(),
    )
    state = train.init((jnp.zeros(1),))
    moved = np.float32([[1, 1], [np.nan, 1], [1, 1], [1, 1]])
    tokens = np.int32([[5, 1], [5, 2], [1, 3], [1, 4]])
    kept = []
    for t in range(4):
        state, _ = train(
            state, {"move": jnp.asarray(moved[t]), "tokens": jnp.asarray(tokens[t])}, t
        )
        kept.append(np.asarray(state.weight.value)[:, 0].tolist())
    assert kept == [[5, 1], [0, 3], [1, 6], [0, 0]]
    # Two moves of weight 2, and four of weight 10.
    np.testing.assert_allclose(state.params[0], [-(2 * 2 + 4 * 10) / 12], rtol=1e-6)


def test_a_step_that_is_dropped_beside_an_exchange_weighs_nothing():
    """Worker 0 breaks before the exchange, and makes a step of weight 6 beside it."""
    train = LocalSteps(
        lambda state, batch: ((state[0] - batch["move"],), ()),
        *MEAN,
        2,
        every=2,
        streaming=outer.Streaming(1, overlap=1, mixing=0.0),
        weight=lambda batch: batch["tokens"].sum(),
    )
    state = train.init((jnp.zeros(1),))
    moved = np.float32([[1, 1], [np.nan, 1], [50, 1], [1, 1]])
    tokens = np.int32([[1, 1], [1, 1], [6, 1], [1, 1]])
    for t in range(4):
        batch = {"move": jnp.asarray(moved[t]), "tokens": jnp.asarray(tokens[t])}
        state, _ = train(state, batch, t)
    assert np.asarray(state.weight.value)[:, 0].tolist() == [1, 4]
    state = train.finish(state)
    # One move of weight 1, and four of weight 4.
    np.testing.assert_allclose(state.params[0], [-(1 * 1 + 4 * 4) / 5], rtol=1e-6)


def draw(seed):
    """A random program, its twin in NumPy, and their settings."""
    rng = np.random.default_rng(seed)
    workers, every = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    count = int(rng.integers(1, min(every, 4) + 1))
    leaves = [tuple(rng.integers(1, 6, size=rng.integers(1, 3))) for _ in range(count + 2)]
    own = [*range(count), *rng.integers(0, count, size=2)]
    overlap = int(rng.integers(0, every)) if count > 1 else 0
    streaming = outer.Streaming(
        count,
        overlap,
        float(rng.choice([0, 0.25, 0.5])),
        lambda path: int(own[int(path[1:-1])]),
    )
    sizes = [int(np.prod(shape)) for shape in leaves]
    places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    parts = [np.concatenate([q for q, o in zip(places, own) if o == p]) for p in range(count)]
    momentum = float(rng.choice([0, 0.5, 0.9]))
    step = lambda state, move: (([x - m[0] for x, m in zip(state[0], move)],), ())
    train = LocalSteps(
        step,
        *diloco(0.7, momentum),
        workers,
        every=every,
        streaming=streaming if count > 1 else None,
    )
    twin = functools.partial(
        reference.train,
        every=every,
        fragments=parts,
        overlap=overlap,
        mixing=streaming.mixing if count > 1 else 0.0,
    )
    return train, twin, leaves, workers, momentum


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(10), [3]))
def test_random_programs_on_random_moves_are_those_of_numpy(seed, request):
    """`--fuzz N` runs N / 20 cases of each program, at least 50. A third have broken workers."""
    train, twin, leaves, workers, momentum = draw(seed)
    steps = 3 * train.every.values[0] + 2
    for case in range(max(50, request.config.getoption("--fuzz") // 20)):
        rng = np.random.default_rng([seed, case])
        start = [rng.normal(size=s).astype(np.float32) for s in leaves]
        size = 10.0 ** rng.integers(-3, 4)
        tree = [(rng.normal(size=(steps, workers, *s)) * size).astype(np.float32) for s in leaves]
        if case % 3 == 0:
            for _ in range(rng.integers(1, 3)):
                t, w = rng.integers(steps), rng.integers(workers)
                tree[rng.integers(len(tree))][t, w].flat[0] = rng.choice([np.nan, np.inf])
        found, own, state = run(train, tree, (start,))
        with np.errstate(invalid="ignore"):
            expected, expected_own = twin(
                flat(start), as_vectors(tree), reference.nesterov(0.7, momentum)
            )
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4 * size + 1e-5)
        close(found, expected, err_msg=f"case {case}")
        close(own, expected_own, err_msg=f"case {case}")
        assert int(state.skipped) == 0 or case % 3 == 0


def test_fragments_take_turns_as_in_maxtext():
    """H = 36 and P = 4: step 9 is fragment 1's, 18 is 2's, 27 is 3's, 36 is 0's."""
    train = LocalSteps(walk, *diloco(), 2, every=36, streaming=outer.Streaming(4))
    turns = {n: p for n in range(80) if (p := train.due(n)) is not None}
    assert turns == {9: 1, 18: 2, 27: 3, 36: 0, 45: 1, 54: 2, 63: 3, 72: 0}

    def dealt(streaming, paths):
        found = streaming.of(dict.fromkeys(paths, ()))
        return [next(p for p, own in enumerate(found) if path in own) for path in paths]

    paths = ["['layer_10']", "['layer_2']", "['layer_3']", "['head']"]
    assert dealt(outer.Streaming(3), paths) == [1, 1, 2, 0]  # layers are in numerical order
    assert dealt(outer.Streaming(2, split=lambda path: int("head" in path)), paths) == [0, 0, 0, 1]
    assert dealt(outer.Streaming(2), ["[0]", "[1]", "[2]"]) == [0, 1, 0]  # all have a layer
    paths = ["[0]['layer_10']", "[0]['layer_11']", "[0]['head']"]  # all share the tuple's index
    assert dealt(outer.Streaming(3), paths) == [1, 2, 0]
    paths = ["['layer_1']", "['layer_12']", "['layer_13']"]  # their digits begin alike
    assert dealt(outer.Streaming(2), paths) == [0, 1, 0]


def test_rows_of_stacks_are_dealt_out_as_layers_are():
    shapes = {"['head']": (4,), "['scan']['k']": (5, 2, 3), "['scan']['b']": (5,), "['last_7']": ()}
    found = outer.Streaming(3).of(shapes)  # the name says so
    strided = {"['scan']['k']": slice(0, 5, 2), "['scan']['b']": slice(0, 5, 2)}
    assert found[0] == {"['head']": None}
    assert found[1] == strided  # rows 0, 2, 4
    assert found[2] == {path: slice(1, 4, 2) for path in strided} | {"['last_7']": None}
    chosen = lambda path: int(path in ("['scan']['k'][0]", "['scan']['k'][1]", "['scan']['k'][4]"))
    found = outer.Streaming(2, split=chosen, stacked="scan").of(shapes)
    np.testing.assert_array_equal(found[1].pop("['scan']['k']"), [0, 1, 4])
    assert not found[1]
    assert found[0]["['scan']['k']"] == slice(2, 4, 1)
    for pattern in ("sc.?$", "last"):  # no leaf, and one that is no stack
        with pytest.raises(ValueError, match="matches no leaf of three or more dimensions"):
            outer.Streaming(2, stacked=pattern).of(shapes)
    assert outer.Streaming(2, stacked=None).of(shapes)[0] == dict.fromkeys([*shapes][:3])
    with pytest.raises(ValueError, match=r"no leaf is left for fragment 1.*stacked="):
        outer.Streaming(2).of({"['scan']": (5, 2)})


@pytest.mark.slow
@pytest.mark.parametrize("way", some(["simulated", "mesh"], ["simulated"]))
def test_layers_that_are_stacked_stream_as_in_numpy(way):
    """Also on a mesh whose inner axis cuts them: each device exchanges its part of rows."""
    where, overlap, mixing = 2, 0, 0.0
    start = {"head": np.ones((6, 4), np.float32), "layers": np.ones((5, 4, 6), np.float32)}
    draw = lambda x: np.random.default_rng(x.ndim).normal(size=(7, 2, *x.shape)).astype(np.float32)
    tree = jax.tree.map(draw, start)
    if way == "mesh":
        where = mesh((2, 2))
        overlap, mixing, cut = 1, 0.25, {"head": P(), "layers": P(None, None, "fsdp")}
        start = {n: jax.device_put(x, NamedSharding(where, cut[n])) for n, x in start.items()}
    streaming = outer.Streaming(3, overlap, mixing)
    train = LocalSteps(walk, *diloco(), where, every=4, streaming=streaming)
    found, own, state = run(train, tree, (start, jnp.int32(0)))
    rows = np.arange(24, 144).reshape(5, 24)
    expected, expected_own = reference.train(
        flat(start),
        as_vectors(tree),
        reference.nesterov(0.7, 0.9),
        4,
        fragments=[np.arange(24), rows[::2].ravel(), rows[1::2].ravel()],
        overlap=overlap,
        mixing=mixing,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(own, expected_own, rtol=1e-4, atol=1e-4)
    momenta = [x for x in jax.tree.leaves(state.outer[1]) if x.ndim == 3]
    assert [x.shape for x in momenta] == [(3, 4, 6)]
    if way == "mesh":
        assert momenta[0].sharding.spec == P(None, None, "fsdp")
        moved = jaxsparse.wire_bytes(train.outer[1], state, mesh=where)
        of_a_device = 4 * 3 * 4 * 6 // 2
        assert of_a_device <= moved.across("data").payload <= of_a_device + 16
        assert moved.within("data").received <= 64


@pytest.mark.slow  # tests/test_islands.py asks the same
def test_rules_of_an_exchange_are_for_the_whole_and_not_for_each_fragment():
    """The embedding is in fragment 0, and the layers are in fragment 1."""
    start = {
        "embedding": jnp.zeros((64, 32)),
        "layers": [jnp.zeros((64, 32))],
        "norm": jnp.zeros(4),
    }
    rules = {"embedding": reducers.TopK(1.0), "layers": reducers.Dense()}
    make = lambda exchange: LocalSteps(
        lambda state, move: ((jax.tree.map(lambda x: x - move[0], state[0]),), ()),
        exchange,
        optax.sgd(1.0),
        2,
        every=2,
        streaming=outer.Streaming(2, overlap=0),
    )
    for exchange in (jaxsparse.partition(rules), jaxsparse.top_k(1.0)):
        train = make(exchange)
        state, _ = train(train.init((start,)), jnp.ones(2))
        np.testing.assert_array_equal(flat(state.params["layers"]), -1)
    for exchange, match in (
        (jaxsparse.partition(rules | {"head": None}), r"no leaf is left for \['head'\]"),
        (jaxsparse.top_k(1.0), "no leaf would be compressed"),
    ):
        small = jax.tree.map(lambda x: x[:1], start)
        with pytest.raises(ValueError, match=match):
            make(exchange).init((small,))


@pytest.mark.slow
@pytest.mark.parametrize("fragments", some([1, 2, 4], [2]))
def test_rows_of_a_stack_are_compressed_as_the_whole(fragments):
    """Fragments of a stack have fewer than 1,024 elements, and the stack has more."""
    start = {"head": jnp.zeros((64, 32)), "layers": {"w": jnp.zeros((4, 24, 12))}}
    streaming = outer.Streaming(fragments, overlap=0)
    step = lambda state, move: ((jax.tree.map(lambda x: x - move[0], state[0]),), ())
    train = LocalSteps(step, jaxsparse.top_k(0.5), optax.sgd(1.0), 2, every=4, streaming=streaming)
    state = train.init((start,))
    residuals = [jax.tree.leaves(exchange.residual) for exchange, _ in state.outer]
    assert sum(x.size for x in jax.tree.leaves(residuals)) == 2 * (64 * 32 + 4 * 24 * 12)
    for t in range(4):
        state, _ = train(state, jnp.ones(2), t)
    assert int((state.params["layers"]["w"] == 0).sum()) > 0


def test_stages_exchange_at_their_bounds():
    """Post-local SGD: after each of 5 steps, then every third, and from 10 on every fourth."""
    train = LocalSteps(walk, *diloco(), 2, every=Stages((1, 3, 4), (5, 10)))
    assert [n for n in range(20) if train.due(n) is not None] == [1, 2, 3, 4, 5, 8, 10, 14, 18]


def test_other_state_of_a_broken_worker_loses_what_is_not_finite():
    """Its parameters go back, as in random programs. Here it has an array of floats besides."""

    def step(state, move):
        params, memory = state
        return (params - move, memory + move), ()

    moved = np.ones((3, 3, 4), np.float32)
    moved[1, 1, 0] = np.nan
    train = LocalSteps(step, *diloco(), mesh(3), every=3)
    state = train.init((jnp.zeros(4), jnp.zeros(4)))
    for t in range(3):
        state, _ = train(state, jnp.asarray(moved[t]).reshape(-1), t)
    assert int(state.skipped) == 1
    np.testing.assert_array_equal(state.params, np.zeros(4))
    np.testing.assert_array_equal(state.worker[0].value, [[-3] * 4, [0] * 4, [-3] * 4])
    np.testing.assert_array_equal(state.worker[1].value, [[3] * 4, [0, 3, 3, 3], [3] * 4])


def test_an_infinity_in_the_state_of_an_optimizer_stays():
    """As the bound of a clip that is off."""
    clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=jnp.inf)
    tx = optax.chain(clip, optax.sgd(1.0))
    train = LocalSteps(lambda s, b: ((s[0] - b[0],), ()), jaxsparse.dense(), tx, 2)
    state, _ = train(train.init((jnp.zeros(2),)), jnp.ones((2, 1)))
    np.testing.assert_array_equal(state.params, [-1, -1])
    assert int(state.skipped) == 0


@pytest.mark.parametrize(
    ("tx", "moves_", "workers"),
    [
        (optax.sgd(0.1), [1, 3e38, 1, 1], 2),  # the sum
        (diloco()[1], [1, 3e38, 1, 1], 1),  # the update
    ],
    ids=["sum", "update"],
)
@pytest.mark.parametrize("streaming", some([None, outer.Streaming(1, 1, 0.5)], [None]), ids=str)
def test_what_overflows_is_forgotten_and_training_goes_on(tx, moves_, workers, streaming):
    move = lambda s, b: ((s[0] - b[0],), ())
    every = 1 if streaming is None else 2
    train = LocalSteps(move, jaxsparse.dense(), tx, workers, every=every, streaming=streaming)
    state = train.init((jnp.zeros(2),))
    for t, size in enumerate(np.repeat(moves_, every)):
        before, memory = np.asarray(state.params), jax.device_get(state.outer[0][1])
        last = (t + 1) % every == 0  # an overlap would halve earlier moves when it mixes
        state, _ = train(state, jnp.full((workers, 2), size if last else 0.0), t)
        if t == 1 and streaming is None:
            np.testing.assert_array_equal(state.params, before)
            np.testing.assert_array_equal(state.worker[0].value, [before] * workers)
            jax.tree.map(np.testing.assert_array_equal, state.outer[0][1], memory)
    state = train.finish(state, t + 1)
    assert int(state.skipped) == 1
    assert np.isfinite(np.asarray(state.params)).all()
    assert np.all(np.asarray(state.params) < before)


ENDS = {
    "whole": (None, [5, 6]),
    "beside": (outer.Streaming(2, 2, 0.25), [7, 8]),  # 7: an exchange is on its way
    "mixed": (outer.Streaming(2, 0, 0.5), [8]),  # workers mix, so they are elsewhere after it
}


@pytest.mark.parametrize("name", some(ENDS, ["beside"]))
def test_a_run_that_has_ended_stays_as_it_is(name):
    """Outer momentum would move parameters again if nothing were left to exchange."""
    streaming, ends = ENDS[name]
    train = LocalSteps(walk, *diloco(), 2, every=4, streaming=streaming)
    for steps in ends:
        _, _, state = run(train, moves(steps, 2))
        first = jax.device_get(state)
        assert np.all(own_of(first) == flat(first.params))
        state = train.finish(state, steps)
        restored = jax.tree.map(jnp.array, first)  # whose number of steps is to be read
        state = train.finish(restored, steps)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), first)
        state, _ = train(state, at(moves(1, 2), 0), steps)  # a run may go on from it
        assert not np.allclose(own_of(state), flat(first.params), atol=0.1)


def test_only_the_number_of_steps_done_ends_a_run():
    step = lambda s, b: ((s[0] - 0.1 * (s[0] - b.mean(0)),), None)
    train = LocalSteps(step, *diloco(), 2, every=4)
    state = train.init((jnp.ones(3),))
    batch = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for t in range(8):
        state, _ = train(state, batch, t)
    before = jax.device_get(state)
    for steps in (0, 7, 9):
        with pytest.raises(ValueError, match=f"steps={steps}, but 8 steps are done: pass steps=8"):
            train.finish(state, steps)
    jax.tree.map(np.testing.assert_array_equal, train.finish(state, 8), before)
    for steps in (-1, 0, 7):  # a restored state knows its number, too
        with pytest.raises(ValueError, match=f"steps={steps}, but 8 steps are done"):
            LocalSteps(step, *diloco(), 2, every=4).finish(state, steps)
    for number in (jnp.int32(8), 8.0, True):
        with pytest.raises(ValueError, match=r"steps=.* must be a Python int.*: pass int\(steps\)"):
            train.finish(state, number)
        with pytest.raises(ValueError, match=r"t=.* must be a Python int.*: pass int\(t\)"):
            train(state, batch, number)


@pytest.mark.slow
def test_steps_are_counted_without_a_number():
    tree, make = moves(5, 2), lambda: LocalSteps(walk, *diloco(), 2, every=2)
    expected, _, _ = run(make(), tree)
    train = make()
    state = train.init((START, jnp.int32(0)))
    for t in range(3):
        state, _ = train(state, at(tree, t))
    with pytest.raises(ValueError, match="t=1, but 3 steps are done"):
        train(state, at(tree, 3), 1)
    saved, ends = jax.device_get(state), []
    for other in (make(), train):  # a run goes on; one that has gone on goes back to that state
        state = jax.tree.map(jnp.array, saved)
        state, _ = other(state, at(tree, 3))
        state, _ = other(state, at(tree, 4))
        ends.append(flat(other.finish(state).params))
    np.testing.assert_array_equal(ends, [expected[-1]] * 2)
    # A third step was done since the last exchange, and `finish` exchanges it.
    finished = make().finish(jax.tree.map(jnp.array, saved))
    assert int(finished.steps) == 3
    assert np.all(own_of(finished) == flat(finished.params))
    assert not np.allclose(flat(finished.params), flat(saved.params), atol=0.1)


PACES = {
    # Fragment 1 begins after 2 steps with an overlap of 4, and again after 5.
    "beside": ([(4, 6, 4), (3, 3, 2), (4, 8, 0)], 0.25),
    "shorter": ([(5, 6, 5), (6, 6, 0), (2, 6, 3)], 0.0),
    # Fragment 2 begins after 4 steps with an overlap of 5, and without one after 8.
    "at once": ([(5, 6, 5), (4, 3, 0)], 0.25),
    # After the last step the new number says that fragment 0 has just been exchanged.
    "ends": ([(7, 4, 0), (0, 7, 0)], 0.5),
    # An exchange arrived after the last step, or was made at once: the state knows, not the pace.
    "ends as it arrives": ([(6, 4, 2), (0, 4, 0)], 0.5),
    "ends at once": ([(5, 4, 0), (0, 4, 1)], 0.5),
}


@pytest.mark.parametrize("name", some(PACES, ["beside"]))
def test_another_pace_loses_no_step(name):
    """Runs of (steps, every, overlap): exchanges on their way arrive as they began."""
    paces, mixing = PACES[name]
    tree = moves(sum(steps for steps, *_ in paces), 2)
    make = lambda every, overlap: LocalSteps(
        walk, *diloco(), 2, every=every, streaming=outer.Streaming(3, overlap, mixing)
    )
    found, own, state = [], [], None
    for steps, *pace in paces:
        train = make(*pace)
        state = train.init((START, jnp.int32(0))) if state is None else state
        for _ in range(steps):
            state, _ = train(state, at(tree, len(found)), len(found))
            found.append(flat(state.params))
            own.append(own_of(state))
    state = train.finish(state)
    of_steps = lambda i: [pace[i] for pace in paces for _ in range(pace[0])] + [paces[-1][i]]
    expected, expected_own = reference.train(
        flat(START),
        as_vectors(tree),
        reference.nesterov(0.7, 0.9),
        of_steps(1),
        fragments=[EMBEDDING, np.concatenate(LAYERS[::2]), LAYERS[1]],
        overlap=of_steps(2),
        mixing=mixing,
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close([*found, flat(state.params)], expected)
    close([*own, own_of(state)], expected_own)


OVERLAPS = [outer.Streaming(1, 0), outer.Streaming(1, 2), None]


@pytest.mark.slow
@pytest.mark.parametrize("to", some(OVERLAPS, OVERLAPS[:1]), ids=str)
def test_an_exchange_on_its_way_arrives_as_it_would_have(to):
    """Saved after each step, and restored with another overlap. `mixing` is the default."""
    tree, make = moves(6, 2), functools.partial(LocalSteps, walk, *diloco(), 2, every=4)
    train = make(streaming=outer.Streaming(1, 2))
    _, _, state = run(train, tree, finish=False)
    expected = jax.device_get(train.finish(state))
    for steps in (4, 5, 6):  # the exchange begins after 4, and arrives after 6
        _, _, state = run(train, at(tree, np.s_[:steps]), finish=False)
        other = make(streaming=to if steps > 4 else outer.Streaming(1, 2))
        state = jax.tree.map(jnp.array, jax.device_get(state))
        for t in range(steps, 6):
            state, _ = other(state, at(tree, t))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.finish(state)), expected)


def test_a_state_is_not_counted_inside_a_program():
    train = LocalSteps(walk, *diloco(), 2, every=2)
    state = train.init((START, jnp.int32(0)))
    with pytest.raises(ValueError, match=r"t=None must be .*keep the call outside of jax\.jit"):
        jax.jit(lambda state, batch: train(state, batch)[1])(state, at(moves(1, 2), 0))


def counting(state, batch, key, scale):
    """A step of a trainer: a key and a scale go whole to each worker, and it counts itself."""
    noise = jax.random.normal(key, (3,))
    moved = state["w"] - scale * (batch.mean(0) + noise)
    metrics = {"mean": batch.mean(), "rows": batch.shape[0], "all": batch.sum(1), "norm": noise}
    return {"w": moved, "step": state["step"] + 1}, metrics


@pytest.mark.slow
@pytest.mark.parametrize("way", some(["simulated", "mesh", "grid"], ["grid"]))
def test_where_a_jitted_step_stood(way):
    """Metrics are what the trainer shows, other arguments reach the step, and a state counts."""
    workers, every = 2, 2
    where = {"mesh": mesh(2), "grid": mesh((2, 2))}.get(way, workers)
    make = lambda: LocalSteps(counting, *MEAN, where, every=every, params=lambda s: s["w"])
    batches = np.random.default_rng(0).normal(size=(5, 8, 3)).astype(np.float32)
    train = make()
    start, w = {"w": jnp.zeros(3), "step": jnp.int32(0)}, np.zeros((workers, 3))
    if way != "simulated":
        start = jax.device_put(start, jax.sharding.NamedSharding(where, jax.P()))
    state = start if way == "mesh" else train.init(start)  # as a trainer hands it over
    key = jax.random.key(1)
    for t, batch in enumerate(batches):
        if t == 3:  # another process goes on
            state, train = jax.tree.map(jnp.array, state), make()
        rest = (jax.random.fold_in(key, t), jnp.float32(0.5))
        lowered = train.lower(state, batch, None, *rest)
        assert lowered.out_info[0]["w"].value.shape == (workers, 3)
        with contextlib.nullcontext() if way == "simulated" else jax.set_mesh(where):
            state, shown = train(state, batch, None, *rest)
        noise = jax.random.normal(rest[0], (3,))
        w -= 0.5 * (batch.reshape(workers, -1, 3).mean(1) + np.asarray(noise)[None])
        w = w.mean(0, keepdims=True).repeat(2, 0) if (t + 1) % every == 0 else w
        np.testing.assert_allclose(shown["mean"].mean(), batch.mean(), rtol=1e-4, atol=1e-6)
        assert int(shown["rows"].sum()) == len(batch)
        rows = batch.sum(1).reshape(workers, -1)
        np.testing.assert_allclose(shown["all"], rows, rtol=1e-4, atol=1e-5)
        assert shown["norm"].shape == (workers, 3)
        if way == "grid":  # what all workers have alike is split over them, too
            own = (state.worker["step"].value, state.worker["w"].value, shown["norm"])
            assert {x.sharding.shard_shape(x.shape)[0] for x in own} == {1}
    np.testing.assert_allclose(state.worker["w"].value, w, rtol=1e-4, atol=1e-5)


def test_a_step_may_branch_on_flags_and_strings_behind_the_batch():
    def step(state, move, is_halved, options):
        size = 0.5 if is_halved else 1.0
        assert options["mode"] in ("train", "test")
        return (state[0] - options["rate"] * size * move[0],), ()

    train = LocalSteps(step, *MEAN, 2, every=2, streaming=outer.Streaming(1, overlap=1, mixing=0.0))
    state = train.init((jnp.zeros(2),))
    for t, is_halved in enumerate((True, False, np.bool_(False))):
        options = {"mode": "train", "rate": 1.0 + t}
        train.lower(state, jnp.ones(2), None, is_halved, options)
        state, _ = train(state, jnp.ones(2), t, is_halved, options)
    np.testing.assert_array_equal(state.params, [-2.5, -2.5])


DELAYED = [
    jaxsparse.dense(delay=1),
    jaxsparse.top_k(0.5, delay=1),
    jaxsparse.spardl(0.5, delay=1, is_dense=lambda path, shape: False),
]


def test_an_exchange_with_a_delay_is_refused():
    for tx, streaming in itertools.product(DELAYED, (None, outer.Streaming(2))):
        step = lambda s, b: ((s[0] + 1.0,), None)
        with pytest.raises(ValueError, match="exchange has delay=1"):
            LocalSteps(step, tx, optax.sgd(1.0), 2, every=4, streaming=streaming)


def seeing(*pair_and_workers, **settings):
    """A trainer that averages `seen`, and its first state."""
    step = lambda s, b: ({"params": s["params"] - b[0], "seen": s["seen"] + b[0]}, ())
    pick = {"params": lambda s: s["params"], "average": lambda s: s["seen"]}
    train = LocalSteps(step, *pair_and_workers, **pick, **settings)
    return train, train.init({"params": jnp.zeros(2), "seen": jnp.zeros(2)})


def test_statistics_are_averaged_by_choice():
    batches = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    batches[3, 1] = np.nan
    train, state = seeing(*diloco(), mesh(3), every=2)
    for t, batch in enumerate(batches):
        state, _ = train(state, batch, t)
        seen = np.asarray(state.worker["seen"].value)
        if t == 1:
            first = batches[:2].sum(0).mean(0)
            np.testing.assert_allclose(seen, [first] * 3, rtol=1e-5)
    second = first + batches[2:, [0, 2]].sum(0).mean(0)  # of the workers that are not broken
    np.testing.assert_allclose(seen, [second] * 3, rtol=1e-5)


def optimizing(tx):
    """A step of gradients of a least squares' loss."""

    def step(state, batch):
        params, opt_state = state
        loss_of = lambda p: jnp.mean((batch @ p["w"] - 1) ** 2) + jnp.sum((p["b"] - 1) ** 2)
        grads = jax.grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    return step


def test_second_copies_of_parameters_are_told_and_averaged():
    free = optax.contrib.schedule_free_sgd(0.1)
    batches = np.random.default_rng(0).normal(size=(3, 2, 5, 4)).astype(np.float32)
    start = {"w": jnp.arange(8.0).reshape(4, 2), "b": jnp.zeros(2)}
    make = lambda tx, **more: LocalSteps(optimizing(tx), *MEAN, 2, every=3, **more)
    whole = lambda tx, params=start: (params, tx.init(params))
    madgrad = optax.contrib.madgrad(0.1)
    ema = {"params": start, "mean": start, "seen": jnp.zeros((4, 2))}
    nothing = jax.tree.map(jnp.zeros_like, start)
    for train, state, found in (
        (make(free), whole(free), r"leaf\[1\].z\['b'\] starts .*so do 2 arrays"),
        (make(free), whole(free, nothing), r"leaf\[1\].z\['b'\] starts .*so do 2 arrays"),
        (make(madgrad), whole(madgrad), r"leaf\[1\].*x0\['w'\] starts .*so do 1 arrays"),
        (make(free, params=lambda s: s["params"]), ema, r"leaf\['mean'\]\['w'\] starts "),
    ):
        with pytest.warns(UserWarning, match=found):
            train.init(state)
    adam = optax.adam(0.1)
    make(adam).init(whole(adam))  # moments are no copies
    some = {"w": jnp.zeros((0, 2)), "b": jnp.arange(2.0)}
    make(adam, params=lambda s: s["p"]).init({"p": some, "mean": {"w": some["w"]}})

    train = make(free, average=lambda s: s[1].z)
    state = train.init(whole(free))
    alone = [whole(free)] * 2
    for batch in batches:
        state, _ = train(state, batch.reshape(10, 4))
        alone = [optimizing(free)(one, x)[0] for one, x in zip(alone, batch)]
    for name in start:
        expected = np.mean([one[1].z[name] for one in alone], 0)
        np.testing.assert_allclose(state.worker[1].z[name].value, [expected] * 2, rtol=1e-5)


def test_statistics_stay_if_all_workers_are_broken():
    step = lambda s, b: ({"params": s["params"] + jnp.nan, "seen": s["seen"] + b[0]}, ())
    pick = {"params": lambda s: s["params"], "average": lambda s: s["seen"]}
    train = LocalSteps(step, *diloco(), 3, **pick)
    state = train.init({"params": jnp.zeros(2), "seen": jnp.zeros(2)})
    state, _ = train(state, np.ones((3, 2), np.float32), 0)
    np.testing.assert_array_equal(state.worker["seen"].value, np.ones((3, 2)))
    np.testing.assert_array_equal(state.worker["params"].value, np.zeros((3, 2)))


def test_streaming_averages_statistics_of_workers_that_are_not_broken():
    train, state = seeing(*diloco(), 3, every=2, streaming=outer.Streaming(1, 1, 0.5))
    for t in range(6):
        batch = np.ones((3, 2), np.float32)
        if t == 2:
            batch[1] = np.nan
        state, _ = train(state, batch, t)
        seen = np.asarray(state.worker["seen"].value)
        assert np.isfinite(seen).all()
        assert np.all(seen > 0)


@pytest.mark.parametrize("streaming", some([None, outer.Streaming(2, overlap=1)], [None]), ids=str)
def test_what_gradients_overwrite_is_combined_by_its_maximum(streaming):
    """As the histories of largest magnitudes of fp8, which live among a TrainState's params."""
    scales = "_overwrite_with_gradient"

    def step(state, batch):
        params = state[0]
        history = jnp.roll(params[scales]["history"], 1).at[0].set(jnp.max(batch))
        moved = jax.tree.map(lambda w: w - batch.mean(), params["params"])
        return ({"params": moved, scales: {"history": history}},), ()

    start = {"params": {"a0": jnp.ones(3), "a1": jnp.ones(3)}, scales: {"history": jnp.zeros(4)}}
    batches = np.random.default_rng(0).uniform(1, 9, size=(6, 3, 2)).astype(np.float32)
    batches[5, 1] = np.nan
    train = LocalSteps(step, *MEAN, 3, every=2, streaming=streaming)
    state = train.init((start,))
    for t, batch in enumerate(batches):
        own = np.asarray(state.worker[0][scales]["history"].value)
        state, _ = train(state, batch.reshape(-1), t)
        after = np.asarray(state.worker[0][scales]["history"].value)
        moved = np.concatenate([batch.max(1)[:, None], own[:, :3]], axis=1)
        if t in (1, 3) and streaming is None:
            np.testing.assert_array_equal(state.params[scales]["history"], moved.max(0))
            np.testing.assert_array_equal(after, [moved.max(0)] * 3)
        elif t in (2, 4) and streaming is not None:  # beside the step, and then from its result
            np.testing.assert_array_equal(state.params[scales]["history"], own.max(0))
            np.testing.assert_array_equal(after, np.maximum(moved, own.max(0)))
        elif t < 5:
            np.testing.assert_array_equal(after, moved)
    assert np.isfinite(state.params[scales]["history"]).all()
    state = train.finish(state)
    history = np.asarray(state.params[scales]["history"])
    healthy = batches[5, [0, 2]].max()
    assert history[0] >= healthy
    np.testing.assert_array_equal(state.worker[0][scales]["history"].value, [history] * 3)
    again = train.finish(jax.tree.map(jnp.array, state))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_parameters_of_few_bits_lose_nothing_globally():
    """theta_g is float32. What is rounded off a worker's copy of it is not taken for a move."""
    fine = np.float32([1.001, -2.003])  # bfloat16 has 1.0 and -2.0
    train = LocalSteps(lambda s, b: ((s[0],), ()), *MEAN, 2)
    state = train.init((jnp.asarray(fine, jnp.bfloat16),))
    state = state._replace(params=jnp.asarray(fine))
    state, _ = train(state, jnp.zeros((2, 1)), 0)
    np.testing.assert_array_equal(state.params, fine)
    assert state.worker[0].value.dtype == jnp.bfloat16


@pytest.mark.parametrize("streaming", [None, outer.Streaming(1, 1)], ids=["whole", "mixed"])
@pytest.mark.parametrize(("dtype", "start"), rows([("float16", 6.4e4)], [("bfloat16", 3.3e38)]))
def test_global_values_beyond_the_range_of_workers_are_clipped(dtype, start, streaming):
    """A worker that rounds them to infinity would be broken in each outer step for ever."""
    step = lambda s, b: ((jnp.full_like(s[0], b[0, 0].astype(dtype)),), ())
    train = LocalSteps(step, *diloco(1.1, 0.0), 2, every=2, streaming=streaming)
    state, largest = train.init((jnp.full(2, start, dtype),)), float(jnp.finfo(dtype).max)
    for t in range(8):
        broken = jnp.nan if t == 3 else largest
        state, _ = train(state, jnp.float32([[largest], [broken]]), t)
    assert int(state.skipped) == 1
    params = np.asarray(state.params)
    assert np.all(np.isfinite(params) & (params > largest))
    assert not jnp.isfinite(state.params.astype(dtype)).any()
    np.testing.assert_array_equal(state.worker[0].value, jnp.full((2, 2), largest, dtype))


def test_statistics_near_the_largest_number_have_a_mean():
    train, state = seeing(*diloco(), 3)
    large = jax.tree.map(lambda x: x + 3e38, state.worker["seen"])
    state = state._replace(worker={**state.worker, "seen": large})
    state, _ = train(state, jnp.ones((3, 2)), 0)
    np.testing.assert_allclose(state.worker["seen"].value, jnp.full((3, 2), 3e38), rtol=1e-6)


def test_what_inner_and_outer_steps_send():
    """An inner step sends nothing.

    An outer step receives (W - 1) d k / chunk entries of 10 bits, a word of levels for 256 of them,
    and three flags.
    """
    w, size, k = 4, 2**14, 64
    step = lambda s, b: ((s[0] - b.mean(),), b.mean())
    train = LocalSteps(step, jaxsparse.chunked_top_k(k), optax.sgd(1.0), mesh(w), every=5)
    state, batch = train.init((jnp.zeros((size // 64, 64)),)), jnp.ones((w, 2))
    assert jaxsparse.wire_bytes(train, state, batch).received == 0
    sent = jaxsparse.wire_bytes(train.outer[0], state)
    entries = size * k // 4096
    message = 4 * (entries * 10 // 32 + entries // 256)
    gathered = [c for c in sent.collectives if c.op == "all-gather"]
    assert sum(c.received_bytes for c in gathered) == (w - 1) * message
    flags = [c for c in sent.collectives if c.op == "all-reduce"]
    assert all(c.payload_bytes <= 8 for c in flags), flags


def test_a_step_that_communicates_is_refused():
    step = lambda s, b: ((s[0] - b.mean(),), jax.lax.pmean(b.mean(), "data"))
    exchanging = lambda s, b: (
        (s[0] - jaxsparse.dense().update(b, jaxsparse.dense().init(b))[0].mean(),),
        (),
    )
    for body, place in ((step, mesh(2)), (step, 2), (exchanging, 2)):
        train = LocalSteps(body, *diloco(), place)
        for _ in range(2):  # also when it is tried again
            with pytest.raises(ValueError, match="the inner step communicates over 'data'"):
                train(train.init((jnp.zeros(2),)), jnp.ones((2, 1)), 0)


def test_what_is_no_exchange_alone_is_refused():
    """With the optimizer behind the exchange, too, the mean would be applied twice."""
    exchange, optimizer = diloco()
    both = optax.chain(exchange, optimizer)
    for given in ((optimizer, exchange), (both, optimizer), (optimizer, optimizer)):
        with pytest.raises(ValueError, match="is no exchange of this library alone"):
            LocalSteps(walk, *given, 2).init((jnp.zeros(2),))
    with pytest.raises(ValueError, match="optimizer holds an exchange"):
        LocalSteps(walk, exchange, both, 2).init((jnp.zeros(2),))


# Optimizers that go by a loss, or have other arrays after a step.
NOT_OUTER = {
    "plateau": (optax.contrib.reduce_on_plateau(), "no loss to give it .*'value'"),
    "line search": (optax.lbfgs(), "no loss to give it .*'value'"),
    "monitor": (
        optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)}),
        r"from {} to {.*\['norm'\].*leave it out",
    ),
}


@pytest.mark.parametrize("name", NOT_OUTER)
def test_an_optimizer_that_an_outer_step_can_not_run_is_refused(name):
    optimizer, match = NOT_OUTER[name]
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match="optimizer can't run in an outer step.*" + match),
    ):
        LocalSteps(walk, jaxsparse.dense(), optax.chain(optax.sgd(1.0), optimizer), 2).init(
            (jnp.zeros(2), 0)
        )


@pytest.mark.parametrize("holds", [jnp.zeros(2), {"w": jnp.zeros((3, 2))}])
def test_lookahead_outside_and_inside_is_told_its_line(holds):
    train = LocalSteps(walk, jaxsparse.dense(), optax.lookahead(optax.adam(1.0), 5, 0.5), 2)
    with pytest.raises(ValueError, match=r"fast.* give every=k and optax.sgd\(alpha\)"):
        train.init((holds, 0))
    both = optax.LookaheadParams.init_synced(holds)
    with pytest.raises(
        ValueError, match=r"params=lambda state: state\[0\].fast and average=lambda"
    ):
        LocalSteps(walk, *diloco(), 2).init((both, 0))
    pick = {"params": lambda state: state[0].fast, "average": lambda state: state[0].slow}
    found = LocalSteps(walk, *diloco(), 2, **pick).init((both, 0)).params
    jax.tree.map(np.testing.assert_array_equal, found, holds)


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (None, 0.9, r"has nothing at \[0\].trace, and this optimizer needs an array of shape"),
        (0.9, None, r"has an array of shape \(2,\) at \[0\].trace, .* needs nothing"),
    ],
)
def test_a_state_of_another_optimizer_is_told(before, after, match):
    make = lambda momentum: LocalSteps(walk, jaxsparse.dense(), optax.sgd(1.0, momentum), 2)
    state = make(before).init((jnp.zeros(2), jnp.int32(0)))
    move = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="made with another optimizer: .*" + match):
        make(after)(state, move)
    with pytest.raises(ValueError, match="made with another optimizer"):
        make(after).finish(state)
    make(before)(state, move)


@pytest.mark.parametrize("weight", [None, lambda move: move[0, 0]])
def test_a_state_that_was_restored_without_a_target_is_told(weight):
    """Orbax then makes dicts of all containers, and leaves out empty ones."""
    train = LocalSteps(walk, *diloco(), 2, weight=weight)
    state = jax.device_get(train.init((jnp.zeros(2), jnp.int32(0))))
    as_dict = {name: x for name, x in state._asdict().items() if jax.tree.leaves(x)}
    for given in (as_dict, tuple(state), list(state)):
        with pytest.raises(ValueError, match=r"fields of LocalState.*Restore\(train.init\(state"):
            train(given, jnp.ones((2, 2)))
    train(state, jnp.ones((2, 2)))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"every": 0}, "every=0 must be at least 1"),
        ({"every": 1.5}, "every=1.5 must be an int"),
        ({"every": Stages((1, 4), (9,)), "streaming": outer.Streaming(2)}, "changes during"),
        ({"every": 2, "streaming": outer.Streaming(3)}, "fragments=3 and overlap=1, but every=2"),
        ({"axis_name": "model"}, "axis_name='model' is not an axis"),
    ],
)
def test_wrong_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        LocalSteps(walk, *diloco(), mesh(2), **settings)


def test_wrong_calls():
    w = jnp.zeros(2)
    make = lambda body, **more: LocalSteps(body, *diloco(), 2, **more)
    fine = lambda s, b: ((s[0] - b.mean(),), ())
    with pytest.raises(ValueError, match="step=None must be a function of state and batch"):
        make(None)
    train = make(fine)
    state, _ = train(train.init((w,)), jnp.ones((2, 1)), 0)
    for t in (0, 2, -1):
        with pytest.raises(ValueError, match=f"t={t}, but 1 steps are done: pass t=1"):
            train(state, jnp.ones((2, 1)), t)
    for body, match in (
        (lambda s, b: (s[0] - b.mean(), s[0]), r"leaf\[0\] was float32\[2\] and becomes nothing"),
        (lambda s, b: s[0], "but returns .*Tracer: return"),
        (lambda s, b: ((s[0].astype(jnp.bfloat16),), ()), r"becomes bfloat16\[2\]"),
    ):
        train = make(body)
        with pytest.raises(ValueError, match=match):
            train(train.init((w,)), jnp.ones((2, 1)), 0)
    tree = {"a": w, "b": w}
    pick = lambda s: s
    parts = lambda n: outer.Streaming(n, split=lambda path: int("b" in path) % n)
    one, two = (
        make(lambda s, b: (s, ()), every=4, params=pick, streaming=parts(n)) for n in (1, 2)
    )
    with pytest.raises(ValueError, match="made for 1 fragments, but there are 2"):
        two(one.init(tree), jnp.ones((2, 1)), 0)


def test_parameters_are_picked_by_their_type():
    """And where one array stands in two places."""
    state = {"model": {"w": jnp.ones(2), "number": jnp.int32(3)}, "rate": jnp.ones(())}
    state["seen"] = state["model"]["w"]
    is_float = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    pick = lambda s: jax.tree.map(lambda x: x if is_float(x) else None, s["model"])
    step = lambda s, b: (s | {"model": s["model"] | {"w": s["model"]["w"] - b[0]}}, ())
    train = LocalSteps(step, *MEAN, 2, params=pick)
    state, _ = train(train.init(state), jnp.float32([[1, 2], [3, 4]]))
    np.testing.assert_allclose(state.params["w"], [-1, -2])
    assert state.params["number"] is None
    np.testing.assert_array_equal(state.worker["seen"].value, np.ones((2, 2)))


def shaped(tree):
    of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(of, tree)


@pytest.mark.slow
@pytest.mark.parametrize("way", some(["mesh", "simulated"], ["mesh"]))
def test_arrays_in_host_memory_are_refused_and_come_to_the_devices(way):
    train = LocalSteps(walk, *MEAN, where(2, way))
    here = mesh(2) if way == "mesh" else mesh(1)
    put = lambda x: jax.device_put(x, NamedSharding(here, P(), memory_kind="pinned_host"))
    start = jax.tree.map(jnp.asarray, START) | {"embedding": put(START["embedding"])}, jnp.int32(0)
    with pytest.raises(ValueError, match=r"leaf\[0\]\['embedding'\] lies in .* 'pinned_host'"):
        train.init(start)
    state = train.init(jax.device_put(start, jax.memory.Space.Device))  # as the error says
    move = jax.tree.map(
        lambda x: jnp.stack([x, 3 * x]) / 4, start[0] | {"embedding": jnp.ones((5, 3))}
    )
    state, _ = train(state, move)
    np.testing.assert_allclose(state.params["embedding"], START["embedding"] - 0.5, rtol=1e-6)


@pytest.mark.slow
def test_init_of_shapes_is_that_of_arrays():
    """With their shardings, where a worker has axes of its own."""
    where = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    cut = {"w": P(None, "fsdp"), "b": P()}
    cut = {name: NamedSharding(where, spec) for name, spec in cut.items()}
    params = {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}
    params, adam = jax.device_put(params, cut), optax.adam(0.1)
    exchange = functools.partial(jaxsparse.powersgd, 2, is_dense=lambda _, shape: len(shape) < 2)
    make = lambda where, **more: LocalSteps(
        optimizing(adam),
        exchange(**more),
        optax.sgd(1.0, 0.9),
        where,
        every=4,
        weight=lambda x: x.sum(),
        streaming=outer.Streaming(2, split=lambda path: int("b" in path)),
    )
    train, state = make(where, mesh=where, specs=params), (params, adam.init(params))
    found, expected = train.init(shaped(state)), train.init(state)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    placed = lambda x: (x.shape, x.dtype, x.sharding.shard_shape(x.shape), x.sharding.mesh)
    assert jax.tree.map(placed, found) == jax.tree.map(placed, expected)
    assert placed(found.outer[0][1][0].trace["w"])[2] == (64, 4)
    for wrong, init, match in (
        (make(where), lambda train: train.init(shaped(state)), "give the transformation specs="),
        (train, lambda train: jax.eval_shape(train.init, state), "init is traced, as in jax.eval"),
    ):
        with pytest.raises(ValueError, match=match):
            init(wrong)
    train = make(2, workers=2)
    found = train.init(jax.eval_shape(lambda: state))
    shape = lambda x: (x.shape, x.dtype)
    alone = jax.tree.map(np.asarray, state)
    assert jax.tree.map(shape, found) == jax.tree.map(shape, train.init(alone))


def test_a_state_that_was_taken_is_told():
    train = LocalSteps(lambda s, b: ((s[0] - b[0],), ()), *MEAN, 2)
    state, batch = train.init((jnp.zeros(2),)), jnp.ones((2, 2))
    kept = jax.tree.map(jnp.copy, state.params)
    train(state, batch)
    for call in (lambda: train(state, batch), lambda: train.finish(state)):
        with pytest.raises(ValueError, match="the state is deleted, because an earlier call took"):
            call()
    np.testing.assert_array_equal(kept, [0, 0])


def test_the_end_of_a_run_that_never_began():
    train = LocalSteps(lambda s, b: ((s[0] - b.mean(),), ()), *diloco(), 2)
    with pytest.raises(ValueError, match="state is a tuple: give the LocalState that init"):
        train.finish((jnp.zeros(2),))


def test_wrong_weights():
    fine = lambda s, b: ((s[0] - b.mean(),), ())
    make = lambda weight: LocalSteps(fine, *diloco(), 2, weight=weight)
    start = (jnp.zeros(2),)
    train = make(lambda b: b)
    with pytest.raises(ValueError, match=r"weight has shape \(1, 1\) and dtype float32"):
        train(train.init(start), jnp.ones((2, 1)), 0)
    for own, match in ((None, "None of type NoneType"), ([1.0], "of type list"), ("3", "type str")):
        train = make(lambda b, own=own: own)
        with pytest.raises(ValueError, match=f"weight is .*{match}, but it is one number"):
            train(train.init(start), jnp.ones((2, 1)), 0)
    for wrong in (lambda: None, 3):
        with pytest.raises(ValueError, match=r"weight=.* must be a function of batch: write"):
            make(wrong)
    train = make(lambda b: b.sum().astype(jnp.float16))
    with pytest.raises(ValueError, match="weight has dtype float16, which skips whole numbers"):
        train(train.init(start), jnp.ones((2, 1)), 0)
    for one, other in ((None, jnp.sum), (jnp.sum, None)):
        with pytest.raises(ValueError, match="made with a weight, and this LocalSteps has none"):
            make(one)(make(other).init(start), jnp.ones((2, 1)), 0)


def test_wrong_states():
    start = (START, jnp.int32(0))
    with pytest.raises(ValueError, match="give that as exchange"):
        LocalSteps(walk, *diloco(), 2).init((jnp.zeros(2), PerWorker(jnp.zeros((1, 2)))))
    with pytest.raises(ValueError, match="average picks parameters"):
        LocalSteps(walk, *diloco(), 2, average=lambda s: s[0]).init((jnp.zeros(2), 0))
    with pytest.raises(ValueError, match=r"leaf\[0\].* is .*, which is no array"):
        LocalSteps(walk, *diloco(), 2).init(({"name": "w"}, 0))
    for state in ([jnp.zeros(2)], {"w": jnp.zeros(2)}):
        with pytest.raises(ValueError, match="params=None finds no parameters"):
            LocalSteps(walk, *diloco(), 2).init(state)
    make = functools.partial(LocalSteps, walk, *diloco(), 2, every=4)
    for settings, match in (
        ({"params": lambda s: s[1]}, "params picks leaf, which is int32"),
        ({"params": lambda s: ()}, "params picks nothing"),
        ({"average": lambda s: s[1]}, "average picks leaf, which is int32"),
        ({"params": lambda s: jnp.zeros(3)}, "which is no leaf of the state"),
        ({"params": lambda s: s[1].astype(jnp.float32)}, "which is no leaf of the state"),
        ({"params": lambda s: s[0] if s[1] > 0 else s}, "must pick arrays of the state as they"),
        ({"streaming": outer.Streaming(4, split=lambda path: 0)}, "no leaf is left for fragment 1"),
        ({"streaming": outer.Streaming(2, split=lambda path: 2)}, "split gives 2 for leaf"),
    ):
        with pytest.raises(ValueError, match=match):
            make(**settings).init(start)
    for wrong, match in (
        (lambda: outer.Streaming(0), "fragments=0 must be at least 1"),
        (lambda: outer.Streaming(2, -1), "overlap=-1 must not be negative"),
        (lambda: outer.Streaming(2, 1, 1.0), r"mixing=1.0 must lie in \[0, 1\)"),
        (lambda: outer.Streaming(2, split="odd"), "split='odd' must be a function of a leaf's"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()


@pytest.mark.slow
def test_nothing_in_a_step_waits_for_the_exchange_beside_it():
    """If a program returns only what workers go on with, XLA leaves the exchange out."""
    train = LocalSteps(walk, *diloco(), mesh(3), every=5, streaming=outer.Streaming(3))
    state = train.init(jax.tree.map(jnp.asarray, (START, jnp.int32(0))))
    batch = at(moves(1, 3), 0)

    def own(state, batch):
        after, out = train.streamed[1](state, batch)
        return after.worker, out

    assert jaxsparse.wire_bytes(jax.jit(own), state, batch).received == 0
    assert jaxsparse.wire_bytes(train.streamed[1], state, batch).received > 0
    # The fragment has 23 of the 42 parameters. There is a flag more.
    assert jaxsparse.wire_bytes(train.streamed[1], state, batch).payload == 4 * (23 + 1)


@pytest.mark.parametrize("streaming", some([None, outer.Streaming(3)], []), ids=str)
def test_another_number_of_workers_goes_on_from_the_mean(streaming):
    """Global parameters and outer momentum stay. The moves of workers since then are averaged."""
    make = lambda w: LocalSteps(walk, *diloco(), w, every=4, streaming=streaming)
    _, own, state = run(make(4), moves(6, 4), finish=False)
    carried = reshard(jax.device_get(state), 6)
    assert carried.worker[1].value.shape == (6,)
    kept = lambda s: (s.params, s.outer, s.outcome)
    jax.tree.map(np.testing.assert_array_equal, kept(jax.device_get(carried)), kept(state))
    after = np.concatenate(
        [x.value.reshape(6, -1) for x in jax.tree.leaves(carried.worker[0], is_leaf=is_marked)], 1
    )
    np.testing.assert_allclose(after.mean(0), own[-1].mean(0), rtol=1e-5, atol=1e-6)
    train = make(6)
    for t in range(6, 9):
        carried, _ = train(carried, at(moves(9, 6), t), t)
    assert np.isfinite(flat(carried.params)).all()


FEATURES = np.random.default_rng(5).normal(size=(12, 8)).astype(np.float32)


def nnx_with_statistics():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(8, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    )
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)))

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - 1)))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    pick = lambda kind: lambda state: nnx.filter_state(state, kind)
    return state, step, {"params": pick(nnx.Param), "average": pick(nnx.BatchStat)}


@pytest.mark.slow
def test_a_run_of_a_framework_breaks_ends_is_restored_and_resharded():
    start, step, picks = nnx_with_statistics()
    make = lambda workers: LocalSteps(step, *diloco(0.3), workers, every=4, **picks)
    with jax.numpy_dtype_promotion("standard"):
        train = make(3)
        state, broken = train.init(start), FEATURES.copy()
        broken[5] = np.nan  # a row of worker 1
        for t in range(6):
            state, loss = train(state, broken if t == 4 else FEATURES, t)
            first = loss if t == 0 else first
        saved = jax.device_get(state)
        state = jax.device_get(train.finish(state, 6))
        train.init(start)  # as in a new process, with a restored state
        again = train.finish(jaxsparse.shard(saved, 3), 6)
        again = jax.device_get(again)
        np.testing.assert_array_equal(flat(again.params), flat(state.params))
        jax.tree.map(np.testing.assert_array_equal, again.outer, state.outer)
        assert int(state.skipped) == 1
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in floats)
        assert np.any(flat(state.params) != flat(saved.params))
        fewer = make(2)
        state = reshard(state, 2)
        for t in range(6, 17):
            state, loss = fewer(state, FEATURES, t)
        state = fewer.finish(state, 17)
    assert np.isfinite(flat(state.params)).all()
    assert np.mean(loss) < np.mean(first)


INNER = {
    "sgd": optax.sgd(0.01, momentum=0.9),
    "muon": optax.contrib.muon(0.01, consistent_rms=0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(INNER, ["sgd"]))
def test_a_worker_is_a_site_with_axes_of_its_own(name):
    """With FSDP and tensor parallelism inside, numbers are those of simulated workers."""
    shapes = {"up": (16, 24), "down": (24, 16)}
    rng = np.random.default_rng(0)
    params = {n: rng.normal(size=s).astype(np.float32) / 5 for n, s in shapes.items()}
    inner = INNER[name]

    def step(state, x):
        params, opt_state = state
        loss = lambda p: jnp.mean(jnp.square(jnp.tanh(x @ p["up"]) @ p["down"] - x))
        value, grads = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # Optax' counters need it
            updates, opt_state = inner.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def trained(where, params, x, **settings):
        pair = jaxsparse.dense(axis_name="hosts"), diloco()[1]
        train = LocalSteps(step, *pair, where, axis_name="hosts", every=3, **settings)
        state, losses = train.init((params, inner.init(params))), []
        for t in range(6):
            state, loss = train(state, x, t)
            losses.append(np.asarray(loss))
        return train, state, losses

    where = on_meshes.mesh((2, 2, 2))
    specs = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}
    rows = rng.normal(size=(128, 16)).astype(np.float32)
    held = {n: jax.device_put(p, NamedSharding(where, specs[n])) for n, p in params.items()}
    x = jax.device_put(rows, NamedSharding(where, P(("hosts", "fsdp"))))
    train, state, losses = trained(where, held, x)
    np.testing.assert_allclose(losses, trained(2, params, rows)[2], rtol=1e-4)
    assert state.params["up"].sharding.spec == P("fsdp", "tp")
    assert train.finish(state, 6) is state  # nothing is left to exchange
    moved = jaxsparse.wire_bytes(train, state, x, mesh=where)
    assert moved.across("hosts").received == 0
    assert moved.within("hosts").received > 0
    # A device exchanges its quarter in an all-reduce between two hosts, and a few flags.
    moved = jaxsparse.wire_bytes(train.outer[0], state, mesh=where)
    quarter = 4 * 2 * 16 * 24 // 4
    assert quarter < moved.across("hosts").received <= quarter + 16
