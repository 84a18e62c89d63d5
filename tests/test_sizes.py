"""More elements than an int32 counts, one element, none; one entry to all; one worker to 256."""

import inspect
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from at_density import settings_at
from contract import each
from fuzzing import SUPPORTS, Data, Leaf, Program, check, compiled
from table import EXCHANGES
from training import stepped
from workers import some

from jaxsparse import shard

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
NAMES = sorted(EXCHANGES)
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


def transformation(name, size, bucket_size=None):
    settings = budget(name, 1e-3, size)
    if "block_size" in settings:
        settings["block_size"] = 256
    return EXCHANGES[name].transformation(**settings, momentum=0.9, bucket_size=bucket_size)


HUGE = {
    "kernel": jax.ShapeDtypeStruct((2**16, 2**15 + 1), jnp.bfloat16),
    "bias": jax.ShapeDtypeStruct((7,), jnp.float32),
}


def traced(tx, tree, workers=3):
    """Traces `init` and `update`, which takes neither memory nor time."""
    state = jax.eval_shape(lambda params: shard(tx.init(params), workers), tree)
    spread = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), tree)
    return jax.eval_shape(stepped(tx, workers), spread, state)


@pytest.mark.parametrize("name", some(NAMES, ("spardl",)))
def test_more_elements_than_an_int32_counts(name):
    """In one bucket they are refused, and the message names the remedy. With it they are not."""
    size = math.prod(HUGE["kernel"].shape)
    assert size > MOST
    updates, state = traced(transformation(name, size, bucket_size=MOST), HUGE)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, HUGE)
    has_whole_leaves = EXCHANGES[name].reducer(**EXCHANGES[name].cases[""].small).whole_leaves
    assert len(optax.tree.get(state, "reducers")) == (1 if has_whole_leaves else 2)
    if name == "dense" or has_whole_leaves:
        return  # no index counts elements
    with pytest.raises(ValueError, match=rf"{size}.*bucket_size"):
        traced(transformation(name, size, bucket_size=size), HUGE)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", each(NAMES, ("top_k",)))
def test_hundreds_of_workers(name):
    run(name, 0.4, 256, (Leaf((2, 3), "float32"),))


def test_a_tree_of_empty_arrays_is_refused():
    for name in NAMES:
        with pytest.raises(ValueError, match="gradient tree has 1 leaves and no elements"):
            transformation(name, 1000).init({"kernel": jnp.zeros((0, 5))})


def test_more_than_there_is_is_refused():
    for name in NAMES:
        make = EXCHANGES[name].transformation
        if {"density", "reducer"} & set(inspect.signature(make).parameters):
            for share in (0.0, 1.5):
                with pytest.raises(ValueError, match=rf"density={share}"):
                    make(**budget(name, share, 10))
