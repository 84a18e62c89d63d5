"""More elements than an int32 counts, one element, none; one entry to all; one worker to 256."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from at_density import settings_at
from cases import CASES
from contract import each
from fuzzing import SUPPORTS, Data, Leaf, Program, check, compiled
from workers import few, some

import jaxsparse
from jaxsparse import shard
from jaxsparse.arrays import layout
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.systems import SYSTEMS

MOST = 2**31 - 1
# Settings of systems for which a row's settings for a density are not those of one entry or block,
# or are not exact.
BUDGETS = {
    "sketched_sgd": lambda share, d: {
        "k": max(1, round(share * d)),
        "cols": max(1, round(share * d)),
        "rows": 3,
        "oversampling": 2,
    },
    "chunked_top_k": lambda share, d: {"k": max(1, round(share * min(d, 4096)))},
    "sparcml": lambda share, d: {
        "k": max(1, round(share * min(d, 512))),
        "algorithm": "split_allgather",
    },
    "s2_reducer": lambda share, d: {"density": share, "block_size": 1, "sketch_ratio": 1.0},
    "qsgd": lambda share, d: {"rounding": "nearest"},
    "demo": lambda share, d: {"k": max(1, round(64 * share)), "chunk": 8, "decay": 1.0},
}
NAMES = sorted(SYSTEMS)
DATA = [
    Data(
        seed=i,
        support=support,
        filled=0.5,
        exponent=float(i % 3),
        spread=1.0,
        ties=i % 4 == 3,
        negative_zeros=i % 2 == 1,
        repeats=i % 3 == 1,
        fault=None,
    )
    for i, support in enumerate(SUPPORTS)
]


def budget(name, share, size):
    """Settings that deliver a share of the elements, and at least one."""
    if name in BUDGETS:
        return BUDGETS[name](share, size)
    return settings_at(name, share, size, block_size=1)


def transformation(name, size, axis_name="data", bucket_size=None):
    settings = budget(name, 1e-3, size)
    if "block_size" in settings:
        settings["block_size"] = 256
    common = {"axis_name": axis_name, "momentum": 0.9, "bucket_size": bucket_size}
    return getattr(jaxsparse, name)(**settings, **common)


TREES = {
    "one leaf": {"kernel": (2**16, 2**15 + 1), "bias": (7,)},
    "five leaves": {**{f"kernel{i}": (2**14, 2**15) for i in range(4)}, "last": (33, 32)},
}


def traced(tx, shapes, workers):
    """Traces `init` and `update`, which takes neither memory nor time."""
    tree = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if "kernel" in name else jnp.float32)
        for name, shape in shapes.items()
    }
    if workers is None:
        return jax.eval_shape(tx.update, tree, jax.eval_shape(tx.init, tree))
    state = jax.eval_shape(lambda params: shard(tx.init(params), workers), tree)

    def step(state, gradients):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state)

    spread = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), tree)
    return jax.eval_shape(run_on_workers(step, workers), state, spread)


@pytest.mark.parametrize("shapes", few(TREES, ("one leaf",)))
@pytest.mark.parametrize("workers", few((3, 1, None), (3,)))
@pytest.mark.parametrize("name", some(NAMES, ("random_k", "spardl")))
def test_more_elements_than_an_int32_counts(name, workers, shapes):
    """In one bucket they are refused, and the message names the remedy. With it they are not."""
    shapes = TREES[shapes]
    size = sum(math.prod(shape) for shape in shapes.values())
    assert size > MOST
    axis_name = None if workers is None else "data"
    tx = transformation(name, size, axis_name, bucket_size=MOST)
    updates, state = traced(tx, shapes, workers)
    assert {key: x.shape for key, x in updates.items()} == shapes
    has_whole_leaves = SYSTEMS[name].reducer(**CASES[name][""].small).whole_leaves
    assert len(optax.tree.get(state, "reducers")) == (
        1 if has_whole_leaves and len(shapes) == 2 else 2
    )
    if name == "dense" or has_whole_leaves:
        return  # no index counts elements
    with pytest.raises(ValueError, match=rf"{size - 7 * ('bias' in shapes)}.*bucket_size"):
        traced(transformation(name, size, axis_name), shapes, workers)


TINY = (
    Leaf((), "float32"),
    Leaf((0,), "bfloat16"),
    Leaf((1,), "float16"),
    Leaf((3, 0), "float32"),
    Leaf((1, 1), "bfloat16"),
    Leaf((11,), "float32"),
    Leaf((2, 4), "float16"),
    Leaf((3,), "bfloat16"),
)


def run(name, share, workers, leaves=TINY, **settings):
    size = sum(leaf.size for leaf in leaves)
    program = Program(name, budget(name, share, size) | settings, workers, leaves, momentum=0.5)
    outcome = compiled(program)
    for data in DATA:
        check(program, data, outcome)
    return program, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", each(NAMES, ["spardl"]))
def test_one_entry_of_a_tree_with_leaves_of_one_element_and_of_none(name):
    run(name, 1e-6, 3)


@pytest.mark.parametrize("share", few([2 / 25, 0.5, 24 / 25, 1.0], [0.5]))
@pytest.mark.parametrize("name", each(NAMES, []))
def test_some_entries_or_all(name, share):
    run(name, share, 3)


@pytest.mark.slow
@pytest.mark.parametrize("workers", few((256, 100, 13), (256,)))
@pytest.mark.parametrize("name", each(NAMES, ("top_k",)))
def test_hundreds_of_workers(name, workers):
    run(name, 0.4, workers, (Leaf((2, 3), "float32"),))


@pytest.mark.parametrize("dtype", few(("bfloat16", "float16"), ("bfloat16",)))
@pytest.mark.parametrize("name", each(NAMES, ()))
def test_parameters_in_16_bits(name, dtype):
    run(name, 0.1, 4, (Leaf((7, 9), dtype), Leaf((5,), dtype)))


def test_a_tree_of_empty_arrays_is_refused():
    for name in NAMES:
        with pytest.raises(ValueError, match="gradient tree has 1 leaves and no elements"):
            transformation(name, 1000).init({"kernel": jnp.zeros((0, 5))})


def test_more_than_there_is_is_refused():
    for name in NAMES:
        make = getattr(jaxsparse, name)
        if {"density", "reducer"} & set(inspect.signature(make).parameters):
            for share in (0.0, 1.5):
                with pytest.raises(ValueError, match=rf"density={share}"):
                    make(**budget(name, share, 10))


@pytest.mark.thorough
def test_elements_beyond_an_int32_are_found_in_their_buckets():
    """This really runs, in 8 GiB. A whole step of as many elements would take 40 GiB."""
    shape = (2**16, 2**15 + 1)
    planned = layout.plan({"kernel": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}, bucket_size=2**27)
    size = math.prod(shape)
    ends = np.cumsum(planned.bucket_sizes)
    assert ends[-1] == size > MOST
    places = np.array([0, ends[-2] - 1, ends[-2], MOST - 1, MOST, MOST + 1, size - 1])
    leaf = np.zeros(size, jnp.bfloat16)
    leaf[places] = 1 + np.arange(len(places))
    leaf = jnp.asarray(leaf.reshape(shape))

    chosen = len(ends) - 2, len(ends) - 1
    cut = jax.jit(
        lambda leaf: [layout.join(planned.flatten({"kernel": leaf})[0][i]) for i in chosen]
    )
    for number, bucket in zip(chosen, cut(leaf)):
        start = ends[number] - planned.bucket_sizes[number]
        inside = (places >= start) & (places < ends[number])
        found = np.flatnonzero(bucket)
        np.testing.assert_array_equal(found + start, places[inside])
        np.testing.assert_array_equal(np.asarray(bucket)[found], 1 + np.flatnonzero(inside))
