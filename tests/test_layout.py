"""The layout: a tree comes back as it was, whatever its leaves, and budgets add up."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from workers import mesh, some

import jaxsparse
from jaxsparse.arrays import layout
from jaxsparse.outer.parallel import run_on_workers

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def tree_of(shapes):
    rng = np.random.default_rng(0)
    return {
        str(i): np.asarray(rng.integers(-99, 99, shape)).astype(DTYPES[i % 3])
        for i, shape in enumerate(shapes)
    }


@settings(max_examples=25, deadline=None, derandomize=True)  # each compiles anew
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=7),
    limit=st.one_of(st.none(), st.integers(1, 40)),
    dense=st.sets(st.integers(0, 6)),
)
def test_round_trip(shapes, limit, dense):
    tree = tree_of(shapes)
    if not sum(leaf.size for leaf in tree.values()):
        return
    plan = layout.layout_of(
        tree, is_dense=lambda path, shape: int(path[2:-2]) in dense, bucket_size=limit
    )

    @jax.jit  # one program instead of one for each operation
    def there_and_back(tree):
        pieces, vector = plan.flatten(tree)
        buckets = [layout.join(parts) for parts in pieces]
        return buckets, vector, plan.unflatten(pieces, vector)

    buckets, vector, back = there_and_back(tree)
    names = sorted(tree)  # the order of jax.tree.leaves for a dict
    picked = [tree[n].astype(jnp.float32).ravel() for n in names if int(n) not in dense]
    left = [tree[n].astype(jnp.float32).ravel() for n in names if int(n) in dense]
    none = [np.zeros(0, np.float32)]
    np.testing.assert_array_equal(np.concatenate(buckets or none), np.concatenate(picked or none))
    np.testing.assert_array_equal(vector, np.concatenate(left or none))

    assert tuple(b.size for b in buckets) == plan.bucket_sizes
    assert vector.size == plan.dense_size
    assert all(b.dtype == jnp.float32 for b in [*buckets, vector])
    if plan.bucket_sizes:
        assert max(plan.bucket_sizes) - min(plan.bucket_sizes) <= 1
        assert len(plan.bucket_sizes) == (
            1 if limit is None else -(-sum(plan.bucket_sizes) // limit)
        )
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert jax.tree.map(jnp.result_type, back) == jax.tree.map(jnp.result_type, tree)


def test_default_rule_leaves_vectors_and_small_leaves_dense():
    tree = {
        "scalar": jnp.zeros(()),
        "norm": jnp.zeros(4096),
        "tiny": jnp.zeros((31, 33)),
        "kernel": jnp.zeros((32, 32)),
        "conv": jnp.zeros((3, 3, 16, 16)),
        "empty": jnp.zeros((0, 5)),
    }
    plan = layout.layout_of(tree)
    assert plan.bucket_sizes == (32 * 32 + 9 * 256,)
    assert plan.dense_size == 1 + 4096 + 31 * 33


def test_plan_needs_only_shapes():
    tree = {"w": jnp.ones((40, 40)), "b": jnp.ones(3, jnp.bfloat16)}
    assert layout.layout_of(jax.eval_shape(lambda: tree)) == layout.layout_of(tree)


def test_bucket_size_may_be_numpys():
    sizes = layout.layout_of({"w": jnp.ones((40, 40))}, bucket_size=np.int64(800)).bucket_sizes
    assert sizes == (800, 800)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("summands", some([1, 2, 3, 5, 7, 64, 100], [1, 3, 100]))
def test_sums_of_narrowed_values_never_overflow(dtype, summands):
    big = layout.narrow(jnp.array([-3e38, 1.0, 3.4e38]), dtype, summands)
    total = functools.reduce(jnp.add, [big] * summands)
    assert total.dtype == dtype
    assert total[1] == summands
    assert np.all(np.isfinite(np.asarray(total, np.float32)))
    assert total[2] >= float(jnp.finfo(dtype).max) / 2.01  # no more is clipped than must be


def test_a_leaf_of_more_than_2_to_the_31_elements_can_be_planned():
    tree = {"embedding": jax.ShapeDtypeStruct((2**16, 2**16), jnp.bfloat16)}
    assert layout.layout_of(tree, bucket_size=2**30).bucket_sizes == (2**30,) * 4


@given(
    total=st.integers(0, 10**12),
    weights=st.lists(st.integers(1, 10**10), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_split_evenly_is_proportional(total, weights):
    shares = layout.split_evenly(total, weights)
    assert sum(shares) == total
    assert all(abs(s * sum(weights) - total * w) < sum(weights) for s, w in zip(shares, weights))


@pytest.mark.parametrize(
    ("tree", "settings", "message"),
    [
        ({}, {}, "no elements"),
        ({"a": jnp.zeros((0, 3))}, {}, "no elements"),
        ({"n": jnp.zeros((40, 40), jnp.int32)}, {}, r"leaf\['n'\] has dtype int32"),
        ({"c": jnp.zeros((40, 40), jnp.complex64)}, {}, r"leaf\['c'\] has dtype complex64"),
        ({"w": jnp.zeros((40, 40))}, {"bucket_size": 0}, "bucket_size=0 must be at least 1"),
        ({"w": jnp.zeros((40, 40))}, {"bucket_size": 9.0}, "bucket_size=9.0 must be an int"),
        ({"w": jnp.zeros((40, 40))}, {"bucket_size": False}, "bucket_size=False must be an int"),
    ],
)
def test_errors(tree, settings, message):
    with pytest.raises(ValueError, match=message):
        layout.layout_of(tree, **settings)


@pytest.mark.parametrize("way", ["vmap", "shard_map"])
def test_many_pieces_are_cut_where_few_are(way):
    shapes = [(i % 3, 2) for i in range(35)]
    x = np.arange(2.0 * 2 * sum(rows for rows, _ in shapes), dtype=np.float32).reshape(2, -1)
    both = lambda mean, own: layout.cut((mean, own[0]), shapes)
    if way == "vmap":
        run = jax.vmap(both, in_axes=(None, 0), out_axes=(None, 0))
    else:  # types tell which pieces differ
        run = jax.shard_map(
            both, mesh=mesh(2), in_specs=(P(), P("data")), out_specs=(P(), P("data"))
        )
    means, own = jax.jit(run)(x[0], x[:, None] if way == "vmap" else x)
    stops = np.cumsum([2 * rows for rows, _ in shapes])[:-1]
    for found, rows in ((means, x[:1]), (own, x)):
        for piece, wanted, shape in zip(found, np.split(rows, stops, axis=1), shapes, strict=True):
            all_rows = (len(rows), *shape)
            np.testing.assert_array_equal(piece.reshape(all_rows), wanted.reshape(all_rows))


@pytest.mark.slow
def test_many_leaves_share_kernels():
    """Each further kernel takes 10 ms and more to compile, and each leaf is written twice."""
    leaves = 140
    tx = jaxsparse.top_k(1.0, momentum=0.5, is_dense=lambda path, shape: path == "['dense']")
    params = {f"w{i:03}": jnp.zeros((2, 3)) for i in range(leaves)} | {"dense": jnp.zeros(3)}

    def step(state, batch):
        gradients = jax.tree.map(lambda p: p + batch[0], params)
        return tx.update(gradients, state)

    run = run_on_workers(step, mesh(2))
    state = jaxsparse.shard(tx.init(params), mesh(2))
    compiled = run.lower(state, jnp.float32([1, 2])).compile()
    updates, state = compiled(state, jnp.float32([1, 2]))
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda p: np.full(p.shape, 1.5), params))
    assert not any(x.any() for x in jax.tree.leaves(state.residual))
    bodies = re.findall(r"^%fused_computation\S* .*?\{\n(.*?)^\}", compiled.as_text(), re.M | re.S)
    plain = lambda text: re.sub(r", metadata=\{.*?\}|[.\d]+(?= = )|%[\w.-]+", "", text)
    assert len(bodies) > 2 * leaves
    assert len(set(map(plain, bodies))) < leaves
