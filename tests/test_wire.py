"""Every collective, against NumPy, in each way to run and for odd numbers of workers too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorders import record
from workers import MESH_SIZES, WAYS, on_workers, some

from jaxsparse import traffic
from jaxsparse.comm import wire

AXIS = "data"


def rows(workers, *shape, dtype=np.float32):
    return np.random.default_rng(0).integers(-9, 9, (workers, *shape)).astype(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", some(MESH_SIZES, (1, 3)))
def test_collectives_match_numpy(workers, way):
    x, table = rows(workers, 4), rows(workers, workers, 3)
    pairs = [(i, (i + 1) % workers) for i in range(workers)][: max(1, workers - 1)]

    def f(x, table):
        return (
            wire.psum(x, AXIS),
            wire.pmax(x, AXIS),
            wire.all_gather(x, AXIS),
            wire.permute(x, AXIS, pairs),
            wire.all_to_all(table, AXIS),
            wire.axis_index(AXIS),
            jnp.int32(wire.axis_size(AXIS)),
        )

    psum, pmax, gathered, moved, turned, index, size = on_workers(f, workers, way)(x, table)
    permuted = np.zeros_like(x)
    for source, destination in pairs:
        permuted[destination] = x[source]
    np.testing.assert_array_equal(psum, np.broadcast_to(x.sum(0), x.shape))
    np.testing.assert_array_equal(pmax, np.broadcast_to(x.max(0), x.shape))
    np.testing.assert_array_equal(gathered, np.broadcast_to(x, (workers, *x.shape)))
    np.testing.assert_array_equal(moved, permuted)
    np.testing.assert_array_equal(turned, table.swapaxes(0, 1))
    np.testing.assert_array_equal(index, np.arange(workers))
    np.testing.assert_array_equal(size, np.full(workers, workers))


@pytest.mark.parametrize("way", WAYS)
def test_partial_permutations_deliver_zeros_elsewhere(way):
    x, each = rows(5, 3) + 20, ([], [(0, 2)], [(4, 0), (1, 4)], [(2, 2)])
    permute = lambda x: [wire.permute(x, AXIS, pairs) for pairs in each]
    for pairs, moved in zip(each, on_workers(permute, 5, way)(x)):
        expected = np.zeros_like(x)
        for source, destination in pairs:
            expected[destination] = x[source]
        np.testing.assert_array_equal(moved, expected)


def test_one_worker_without_an_axis_sends_nothing():
    x, table = rows(1, 4)[0], rows(1, 1, 4)[0]
    with record() as messages:
        np.testing.assert_array_equal(wire.psum(x, None), x)
        np.testing.assert_array_equal(wire.pmax(x, None), x)
        np.testing.assert_array_equal(wire.all_gather(x, None), x[None])
        np.testing.assert_array_equal(wire.all_to_all(table, None), table)
        np.testing.assert_array_equal(wire.permute(x, None, [(0, 0)]), x)
        np.testing.assert_array_equal(wire.permute(x, None, []), 0 * x)
        assert wire.axis_size(None) == 1
        assert wire.axis_index(None) == 0
    assert messages == []


@pytest.mark.parametrize("dtype", some([jnp.bfloat16, jnp.float16], [jnp.bfloat16]))
@pytest.mark.parametrize("way", WAYS)
def test_half_precision_travels_unchanged(dtype, way):
    x = jnp.array([[1.5, -0.0, jnp.inf], [3e-5, jnp.nan, -2.0]], dtype)
    gathered = on_workers(lambda x: wire.all_gather(x, AXIS), 2, way)(x)
    assert gathered.dtype == dtype
    bits = np.asarray(x).view(np.uint16)
    np.testing.assert_array_equal(np.asarray(gathered).view(np.uint16), np.stack([bits, bits]))


@pytest.mark.parametrize("op", [wire.all_gather, wire.all_to_all])
def test_half_precision_costs_two_bytes_a_word(op):
    compiled = on_workers(lambda x: op(x, AXIS), 8).lower(jnp.ones((8, 8, 16), jnp.bfloat16))
    assert traffic.wire_bytes(compiled.compile()).payload == 8 * 16 * 2


@pytest.mark.parametrize("way", WAYS)
def test_replicated_makes_a_replicated_output_of_a_value_that_is_one(way):
    x = rows(5, 3)

    def f(x):
        # A ring all-gather. Results are equal everywhere by construction, but JAX can't know that.
        total, moving = x, x
        for _ in range(4):
            moving = wire.permute(moving, AXIS, [(i, (i + 1) % 5) for i in range(5)])
            total = total + moving
        return wire.replicated(total, AXIS)

    if way == "vmap":
        out = jax.vmap(f, axis_name=AXIS, out_axes=None)(x)
    else:
        from workers import mesh

        P = jax.sharding.PartitionSpec
        checked = way == "shard_map"
        out = jax.jit(
            jax.shard_map(
                lambda x: f(x[0]), mesh=mesh(5), in_specs=P(AXIS), out_specs=P(), check_vma=checked
            )
        )(x)
    np.testing.assert_array_equal(out, x.sum(0))


def test_replication_is_tracked_only_where_jax_checks_it():
    seen = {}
    for way in WAYS:

        def f(x, way=way):
            seen[way] = wire.tracks_replication(AXIS)
            return x

        on_workers(f, 2, way)(jnp.ones((2, 1)))
    assert seen == {"shard_map": True, "shard_map_unchecked": False, "vmap": False}


def test_what_vmap_holds_once_for_all_workers_is_exchanged_like_any_other():
    rows = jnp.arange(6.0).reshape(3, 2)
    swap = lambda _: wire.all_to_all(rows, "data")
    received = jax.vmap(swap, axis_name="data")(jnp.zeros(3))
    expected = np.repeat(np.asarray(rows)[:, None], 3, axis=1)  # row j, from each worker
    np.testing.assert_array_equal(received, expected)
