"""Different reducers for different leaves, in one transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import compiled_step
from training import scanned
from workers import mesh, on_workers

from jaxsparse import exchange, traffic
from jaxsparse.arrays import layout
from jaxsparse.feedback import partition
from jaxsparse.reducers import Dense, SketchedSGD, SparDL, TopK, TrueTopK

SHAPES = {"embed": (50, 8), "kernel": (30, 20), "out": (20, 11), "bias": (20,)}
RULES = {"embed": TopK(0.1), "kernel|out": SparDL(0.05)}


def gradients(workers, steps=3):
    rng = np.random.default_rng(workers)
    return {
        name: jnp.asarray(rng.integers(-50, 50, (steps, workers, *shape)) * workers, jnp.float32)
        for name, shape in SHAPES.items()
    }


def train(tx, workers, steps=3):
    """Each worker's updates of some steps, and its last state."""
    stacked = jax.tree.map(lambda x: x.swapaxes(0, 1), gradients(workers, steps))
    return on_workers(lambda grads: scanned(tx, grads), workers, "vmap")(stacked)


@pytest.mark.slow
def test_each_group_is_exchanged_as_if_alone():
    rules = {"embed": TopK(0.1), "kernel|out": TrueTopK(40)}  # which compile quickly
    updates, state = train(partition(rules, momentum=0.5), 2)
    for rule, reducer in rules.items():
        names = rule.split("|")
        alone = exchange(
            reducer,
            momentum=0.5,
            is_dense=lambda path, shape, names=names: not any(n in path for n in names),
        )
        expected, _ = train(alone, 2)
        for name in [*names, "bias"]:
            np.testing.assert_array_equal(updates[name], expected[name], err_msg=name)
    assert {k: v.value.shape[2:] for k, v in state.residual.items()} == {
        k: v for k, v in SHAPES.items() if k != "bias"
    }


def test_the_first_rule_that_matches_counts_and_the_default_takes_the_rest():
    mapping = partition({"embed": None, "e": TopK(1.0)}, Dense())
    by_name = {"['embed']": None, "['kernel']": TopK(1.0)}
    function = partition(lambda path, shape: by_name.get(path, Dense()))
    for tx in (mapping, function):
        state = tx.init({k: jnp.zeros(v) for k, v in SHAPES.items()})
        assert set(state.residual) == set(SHAPES) - {"embed"}  # which goes dense
        assert set(state.reducer_names) == {"TopK", "Dense"}


def test_a_rule_for_an_empty_leaf_is_no_error():
    rules = {"a": TopK(0.1), "e": TopK(0.2)}
    state = partition(rules).init({"a": jnp.ones((40, 40)), "e": jnp.ones((0, 4))})
    assert {k: v.value.shape for k, v in state.residual.items()} == {"a": (1, 40, 40)}


@pytest.mark.slow
def test_a_budget_for_one_group_counts_the_dense_leaves_and_for_several_does_not():
    budget = SketchedSGD(5.0, rows=3)
    shapes = {"embed": (300, 16), "kernel": (64, 50), "bias": (300,)}
    alone = traffic.wire_bytes(compiled_step(partition({"e": budget}), mesh(2), shapes)).payload
    wanted = 4 * (300 * 16 + 64 * 50 + 300) / 5
    assert wanted - 4 * 9 < alone <= wanted
    both = partition({"embed": budget, "kernel": TrueTopK(1)})
    payload = traffic.wire_bytes(compiled_step(both, mesh(2), shapes)).payload
    wanted = 4 * (300 * 16 / 5 + 64 * 50 + 300 + 1)
    assert wanted - 4 * 9 < payload <= wanted


@pytest.mark.slow
def test_no_more_memory_than_one_group():
    """Gradients are flattened once, not once for each group."""
    shapes = {"embed": (2**16, 64), "kernel": (2**16, 64)}

    def peak(tx):
        return compiled_step(tx, mesh(2), shapes, donate=0).memory_analysis().temp_size_in_bytes

    reducer = TopK(0.01)
    apart = partition({"embed": TopK(0.01, selection="exact"), "kernel": reducer})
    assert peak(apart) <= 1.01 * peak(exchange(TopK(0.01, selection="exact")))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"embedding": TopK(0.1)}, "no leaf is left for .'embedding'.*embed"),
        ({"embed": None, "bed": None}, "no leaf is left for .'bed'"),
        ("embed", "policy='embed' must be a function"),
        ([("embed", None)], "policy=.* must be a function"),
        ({b"embed": None}, "policy=.* must be a function"),
        ({"embed": 0.01}, "policy, for leaf.*: 0.01 must be a reducer"),
        ({"embed": TopK}, "policy, for leaf.*: <class"),
        (lambda path, shape: "dense", "policy, for leaf.*: 'dense' must be a reducer"),
        ({"['embed'": None}, "is no regular expression"),
    ],
)
def test_bad_policies_are_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        partition(policy).init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})


def test_unhashable_reducers_are_refused():
    class Mine(Dense):
        __hash__ = None

    with pytest.raises(ValueError, match=r"not hashable.*frozen"):
        partition({"embed": Mine()}).init({"embed": jnp.zeros((3, 3))})


@pytest.mark.parametrize("limit", [1, 64, 100, 10**6])
def test_buckets_of_blocks_hold_whole_blocks(limit):
    tree = {"a": jnp.zeros((5, 50)), "b": jnp.zeros((4, 48)), "c": jnp.zeros(7)}
    plan = layout.plan_groups(
        tree,
        [2, 2, 1],
        bucket_size=limit,
        alignment={2: 50},
    )
    sizes = [size for size, group in zip(plan.bucket_sizes, plan.groups) if group == 2]
    assert sum(sizes) == 442
    assert all(size % 50 == 0 for size in sizes[:-1])  # the last one has the rest
    assert max(sizes) <= max(limit, 50)
    assert len(sizes) == -(-9 // max(1, limit // 50))
    others = [size for size, group in zip(plan.bucket_sizes, plan.groups) if group == 1]
    assert sum(others) == 7
    assert max(others) <= limit
    vectors, dense = plan.flatten(tree)
    jax.tree.map(np.testing.assert_array_equal, plan.unflatten(vectors, dense), tree)
