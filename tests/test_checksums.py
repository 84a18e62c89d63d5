"""Checksums of a state: they see every changed element, however arrays lie and are restored."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from workers import mesh

from jaxsparse import PerWorker, reshard, shard
from jaxsparse.training.checksums import attach, verify

DTYPES = ("bool", "int4", "int8", "uint16", "int32", "int64", "float8_e4m3fn", "bfloat16")
DTYPES += ("float32", "float64", "complex64", "complex128")


def sums(tree):
    return np.asarray(attach(tree).checksums).tolist()


def test_every_element_and_no_placement_counts():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        tree = {name: jnp.asarray(rng.integers(0, 2, (4, 5, 7)), name) for name in DTYPES}
        tree["scalar"], tree["none"] = jnp.float32(3), jnp.zeros((0, 3))
        host = jax.tree.map(np.asarray, tree)
        expected = sums(tree)
        assert sums(host) == expected
        marked = {name: PerWorker(x) if x.ndim == 3 else x for name, x in host.items()}
        split = attach(shard(marked, mesh(4)))
        assert np.asarray(split.checksums).tolist() == expected
        assert split.checksums.sharding.is_fully_replicated
        assert len(split.checksums.sharding.device_set) == 4
        for i, name in enumerate(sorted(DTYPES)):
            one, two = host[name].copy(), host[name].copy()
            one[2, 3, 2] = not one[2, 3, 2]
            two[[0, 3]] = two[[3, 0]]  # rows change places
            for other in (one, two):
                changed = sums(host | {name: other})
                names = [n for n, a, b in zip(sorted(host), changed, expected) if a != b]
                assert names == [name], i
        imaginary = host["complex64"].copy()
        imaginary[0, 0, 0] += 2j
        assert sums({"x": imaginary}) != sums({"x": host["complex64"]})


def test_blocks_of_large_arrays_in_host_memory_add_up(monkeypatch):
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float64)
    expected = sums([x])
    monkeypatch.setattr("jaxsparse.training.checksums._BLOCK", 8)
    assert sums([x]) == expected
    with jax.enable_x64(True):
        assert sums([jnp.asarray(x)]) == expected


def test_on_explicit_axes():
    explicit = mesh(4, jax.sharding.AxisType.Explicit)
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    cut = jax.device_put(x, jax.NamedSharding(explicit, jax.P("data")))
    assert verify(attach({"x": cut}))["x"] is cut
    assert sums([cut]) == sums([x])


@pytest.mark.parametrize("workers", [4, 3])
def test_flipped_bits_of_a_checkpoint_are_named(tmp_path, workers):
    rng = np.random.default_rng(0)
    state = {
        "b": jnp.int32(1),
        "residual": PerWorker(rng.normal(size=(4, 600))),
        "w": jnp.ones(600),
    }
    state = shard(jax.tree.map(jnp.float32, state), mesh(4))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(attach(state)))
        manager.wait_until_finished()

        def restored():
            if workers == 3:  # arrays in host memory, to be carried over
                like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), attach(state))
            else:
                like = jax.tree.map(ocp.utils.to_shape_dtype_struct, attach(state))
            return manager.restore(1, args=ocp.args.StandardRestore(like))

        found = verify(restored())
        jax.tree.map(np.testing.assert_array_equal, found, state)
        assert reshard(found, mesh(workers))["residual"].value.shape == (workers, 600)
        folder = (tmp_path / "1").glob("**/d/*")
        file = max(folder, key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)
        with pytest.raises(
            ValueError, match=r"1 of 3 arrays is not as saved, such as leaf\['resid"
        ):
            verify(restored())


def test_a_tree_restored_by_name_is_verified_too():
    state = (jnp.ones(2), {"z": jnp.zeros(3), "a": jnp.ones(1)})
    saved = attach(state)
    by_name = {"checksums": saved.checksums, "state": {"0": state[0], "1": state[1]}}
    assert verify(by_name) is by_name["state"]
    with pytest.raises(ValueError, match="the state has 1 arrays and 3 checksums"):
        verify(saved._replace(state=jnp.ones(2)))
