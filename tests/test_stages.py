"""Settings that change from stage to stage, and settings chosen by measuring."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import COMPRESSED, DENSE, compiled_step
from supports import flat
from workers import mesh, some

import jaxsparse
from jaxsparse import Stages, partition, shard, traffic, warm_up
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.reducers.stages import Staged
from jaxsparse.systems import ChunkedTopK, OkTopk, OmniReduce, RandomK, TopK


def test_warm_up_falls_exponentially():
    stages = warm_up(0.001, steps=400)
    assert stages.boundaries == (100, 200, 300, 400)
    np.testing.assert_allclose(np.divide(stages.values[1:], stages.values[:-1]), 0.004**0.25)
    assert [stages.at(step) for step in (0, 399, 400, 10**6)] == [
        0.25,
        stages.values[3],
        0.001,
        0.001,
    ]


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"boundaries=\(10,\) divide training into 2 stages"):
        Stages((0.1,), (10,))
    with pytest.raises(ValueError, match=r"boundaries=\(10, 5\) must be increasing"):
        Stages((0.1, 0.2, 0.3), (10, 5))
    with pytest.raises(ValueError, match=r"boundaries=1\.5 must be an int"):
        Stages((0.1, 0.2), (1.5,))
    with pytest.raises(ValueError, match=r"last=0.5 and first=0.25 must satisfy"):
        warm_up(0.5, steps=10)
    with pytest.raises(ValueError, match="stages=4 must lie between 1 and steps=3"):
        warm_up(0.01, steps=3)
    with pytest.raises(ValueError, match=r"density=0.0 must lie in \(0, 1\]"):
        jaxsparse.top_k(Stages((0.1, 0.0), (10,)))
    different = Stages((RandomK(0.1), OkTopk(0.1)), (10,))
    with pytest.raises(ValueError, match="carry different states"):
        Staged(different).init(100)


def test_a_reducer_may_have_a_setting_in_stages():
    stages = Stages((0.2, 0.1), (2,))
    want = Staged(Stages((TopK(0.2), TopK(0.1)), (2,)))
    params = {"w": jnp.zeros((40, 30))}
    for tx in (
        jaxsparse.top_k(stages),
        jaxsparse.error_feedback(TopK(stages)),
        partition({"w": TopK(stages)}),
        partition({"w": Stages((TopK(0.2), TopK(0.1)), (2,))}),
    ):
        assert tx.init(params).systems == (want.system,)
        assert jax.tree.structure(tx.init(params)) == jax.tree.structure(
            jaxsparse.error_feedback(want).init(params)
        )
    with pytest.raises(ValueError, match=r"reducer=TopK.* must be a reducer of flat vectors"):
        RandomK(0.5, reducer=TopK(stages))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: jaxsparse.error_feedback("x"), "reducer='x' must be a reducer, such as"),
        (lambda: jaxsparse.error_feedback(TopK), "reducer=<class .* must be a reducer"),
        (lambda: jaxsparse.error_feedback(jaxsparse.top_k(0.1)), "must be a reducer"),
        (lambda: jaxsparse.error_feedback(Stages((None, TopK(0.1)), (5,))), "reducer=None must"),
        (
            lambda: jaxsparse.error_feedback(
                Stages((TopK(0.5), TopK(Stages((0.2, 0.1), (2,)))), (5,))
            ),
            "has stages within stages",
        ),
        (
            lambda: RandomK(Stages((0.2, 0.1), (2,))).init(100),
            r"Stages\(values=\(0.2, 0.1\).* changes during training: exchange by",
        ),
        (
            lambda: jaxsparse.random_k(
                Stages((0.2, 0.1), (2,)), reducer=Stages((TopK(0.1), TopK(0.2)), (5,))
            ),
            "density and reducer are both Stages",
        ),
    ],
)
def test_what_is_no_reducer_is_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_reducers_in_stages_are_taken_everywhere():
    stages = Stages((ChunkedTopK(8, 64), ChunkedTopK(4, 64)), (2,))
    inner = ChunkedTopK(Stages((8, 4), (2,)), 64)
    for reducer in (stages, inner):
        for make in (jaxsparse.error_feedback, jaxsparse.ef21_sgdm):
            make(reducer).init({"w": jnp.zeros((40, 30))})


MAKE = {
    "top_k": lambda stages: jaxsparse.top_k(stages),
    "gtopk": lambda stages: jaxsparse.gtopk(stages, momentum=0.9),
    "ok_topk": lambda stages: jaxsparse.ok_topk(stages),
    "spardl": lambda stages: jaxsparse.spardl(stages, teams=2, gather="bruck"),
    "sparcml": lambda stages: jaxsparse.sparcml(stages, 100, algorithm="all_gather"),
}


@pytest.mark.parametrize("name", some(MAKE, ("top_k",), slow=("spardl",)))
def test_the_stage_in_force_is_taken(name):
    values = (20, 5, 1) if name == "sparcml" else (0.2, 0.05, 0.01)
    tx = MAKE[name](Stages(values, (2, 3)))
    grads = {"kernel": jax.random.normal(jax.random.key(0), (40, 50))}
    state = jaxsparse.shard(tx.init(grads), 2)
    step = run_on_workers(
        lambda state, grads: tx.update(jaxsparse.local(grads), state), 2, batch_argnums=()
    )
    delivered = []
    for _ in range(5):
        _, state = step(state, grads)
        delivered.append(int(state.info.delivered))
    wanted = np.array([0.2, 0.2, 0.05, 0.01, 0.01]) * 2000
    assert np.all(delivered <= 2.05 * wanted)  # two workers, and thresholds that are reused
    assert np.all(delivered[:4] >= 0.4 * wanted[:4])


def test_one_stage_may_mask_momentum_and_another_not():
    reducers = (OmniReduce(density=0.25), OmniReduce(density=0.01))
    # Room for the blocks of 8 workers would be room for all blocks, so the first stage is dense.
    tx = partition({"e": Stages(reducers, (1,))}, momentum=0.5)
    grads = {"e": jnp.ones((16, 512))}
    step = run_on_workers(
        lambda state, grads: tx.update(jaxsparse.local(grads), state), 8, batch_argnums=()
    )
    updates, state = step(shard(tx.init(grads), 8), grads)
    np.testing.assert_array_equal(updates["e"], 1)
    updates, state = step(state, grads)
    left = flat(state.momentum)[0].reshape(16, 512)
    np.testing.assert_array_equal(left, np.where(updates["e"] != 0, 0, 1.5))
    assert np.any(updates["e"])


@pytest.mark.slow
def test_bytes_follow_the_stage():
    density = Stages((0.25, 0.01), (10,))
    sent = traffic.wire_bytes(compiled_step(jaxsparse.top_k(density), mesh(2)))
    (conditional,) = sent.conditionals
    k = [-(-COMPRESSED // 4), -(-COMPRESSED // 100)]
    assert [b.payload for b in conditional.branches] == [8 * n for n in k]
    assert sent.payload == 8 * k[0] + 4 * (DENSE + 1)


@pytest.mark.slow
def test_autotune_times_every_candidate():
    shapes = {"kernel": (64, 65), "bias": (65,)}
    params = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}
    make = lambda teams: jaxsparse.spardl(0.01, teams=teams, gather="bruck")
    best, seconds = jaxsparse.planner.autotune(make, [1, 2], params, mesh(4), repeats=2)
    assert set(seconds) == {1, 2}
    assert best == min(seconds, key=seconds.get)
    assert all(time > 0 for time in seconds.values())
    with pytest.raises(ValueError, match=r"candidates=\[\] is empty"):
        jaxsparse.planner.autotune(make, [], params, mesh(4))
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        jaxsparse.planner.autotune(make, [1], params, mesh(4), repeats=0)


def test_autotune_times_states_that_go_on_and_gradients_that_differ():
    seen = set()

    def update(gradients, count, params=None):
        mean = gradients["w"].mean(axis=0)  # a row for each worker
        apart = jnp.mean(jnp.square(gradients["w"] - mean[None]))
        jax.debug.callback(lambda count, apart: seen.add((int(count), float(apart))), count, apart)
        return {"w": mean}, count + 1

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)
    params = {"w": jax.ShapeDtypeStruct((100, 10), jnp.float32)}
    jaxsparse.planner.autotune(lambda _: tx, [0], params, mesh(2), repeats=3)
    jax.effects_barrier()
    counts, apart = zip(*seen)
    assert sorted(set(counts)) == list(range(23))
    assert 0.4 < min(apart) <= max(apart) < 0.6  # own parts of variance 1, less their mean
