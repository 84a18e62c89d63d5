"""Reducers that change from stage to stage, and settings chosen by measuring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import COMPRESSED, DENSE, compiled_step
from supports import flat
from workers import mesh, some

import jaxsparse
from jaxsparse import Stages, contrib, partition, shard, traffic, warm_up
from jaxsparse.contrib import GTopK, OkTopk
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.reducers import ChunkedTopK, OmniReduce, RandomK, SparCML, SparDL, Staged, TopK


def test_warm_up_falls_exponentially():
    staged = warm_up(TopK(0.001, selection="sampled"), steps=400)
    assert staged.boundaries == (100, 200, 300, 400)
    densities = [reducer.density for reducer in staged.reducers]
    np.testing.assert_allclose(np.divide(densities[1:], densities[:-1]), 0.004**0.25)
    assert (densities[0], densities[-1]) == (0.25, 0.001)
    assert {reducer.selection for reducer in staged.reducers} == {"sampled"}


def test_values_by_steps():
    stages = Stages((3, 4, 5), (10, 20))
    assert [stages.at(step) for step in (0, 9, 10, 19, 20, 10**6)] == [3, 3, 4, 4, 5, 5]


TWO = (TopK(0.2), TopK(0.1))


def test_lists_are_taken_for_tuples():
    """Leaves are grouped by equal reducers, so a reducer must be hashable."""
    assert hash(Staged([*TWO], [np.int64(2)])) == hash(Staged(TWO, (2,)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Stages((1,), (10,)), r"boundaries=\(10,\) divide training into 2 stages"),
        (lambda: Stages((1, 2, 3), (10, 5)), r"boundaries=\(10, 5\) must be increasing"),
        (lambda: Stages((1, 2), (1.5,)), r"boundaries=1\.5 must be an int"),
        (lambda: Staged(TWO, ()), "divide training into 1 stages, but there are 2"),
        (lambda: Staged(TWO, (0,)), r"boundaries=\(0,\) must be increasing steps, from 1 on"),
        (lambda: Staged((TopK(0.2), 0.1), (2,)), "reducers: 0.1 must be a reducer"),
        (lambda: Staged((TopK(0.2), Staged(TWO, (2,))), (2,)), "has stages of its own: list"),
        (lambda: Staged((RandomK(0.1), OkTopk(0.1)), (10,)).init(100), "carry different states"),
        (lambda: warm_up(TopK(0.5), steps=10), "first=0.25 must lie between .* 0.5, and 1"),
        (lambda: warm_up(TopK(0.01), steps=3), "stages=4 must lie between 1 and steps=3"),
        (lambda: warm_up(ChunkedTopK(8), steps=9), r"reducer=ChunkedTopK\(.* has no density that"),
        (lambda: warm_up(0.01, steps=9), "reducer=0.01 has no density that could fall"),
        (lambda: jaxsparse.exchange("x"), "reducer='x' must be a reducer, such as"),
        (lambda: jaxsparse.exchange(TopK), "reducer=<class .* must be a reducer"),
        (lambda: jaxsparse.exchange(jaxsparse.top_k(0.1)), "must be a reducer"),
        (lambda: jaxsparse.top_k(warm_up(TopK(0.1), steps=9)), r"density=Staged.* must be a num"),
    ],
)
def test_what_is_wrong_is_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_reducers_in_stages_are_taken_everywhere():
    staged = Staged((ChunkedTopK(8, 64), ChunkedTopK(4, 64)), (2,))
    for tx in (
        jaxsparse.exchange(staged),
        contrib.ef21_sgdm(staged),
        partition({"w": staged}),
    ):
        tx.init({"w": jnp.zeros((40, 30))})


MAKE = {
    "top_k": TopK,
    "gtopk": GTopK,
    "ok_topk": OkTopk,
    "spardl": functools.partial(SparDL, teams=2, gather="bruck"),
    "sparcml": lambda share: SparCML(round(100 * share), 100, algorithm="all_gather"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MAKE, ("top_k",)))
def test_the_stage_in_force_is_taken(name):
    reducers = tuple(MAKE[name](density) for density in (0.2, 0.05, 0.01))
    momentum = 0.9 if name == "gtopk" else None
    tx = jaxsparse.exchange(Staged(reducers, (2, 3)), momentum=momentum)
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
    tx = partition({"e": Staged(reducers, (1,))}, momentum=0.5)
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
    tx = jaxsparse.exchange(Staged((TopK(0.25), TopK(0.01)), (10,)))
    sent = traffic.wire_bytes(compiled_step(tx, mesh(2)))
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
