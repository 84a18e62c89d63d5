"""Reducers that see matrices: each leaf whole, in its own shape, or as a stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import stepped
from workers import some

from jaxsparse import exchange, partition, shard
from jaxsparse.comm import wire
from jaxsparse.reducers import Staged, TopK
from jaxsparse.reducers.base import Kept, Leaf, Reducer, Sums
from jaxsparse.reducers.matrices import Matrix, MatrixReducer

SHAPES = {
    "bias": (7,),
    "conv": (3, 3, 4, 5),
    "dense": (6, 5),
    "layers": (4, 3, 8),
}
MATRICES = {"conv": (1, 9, 20), "dense": (1, 6, 5), "layers": (4, 3, 8)}
WORKERS = 3


@dataclasses.dataclass(frozen=True)
class FirstRows(MatrixReducer):
    """Delivers the first row of each matrix of a stack, and keeps the others."""

    def reduce(self, x, state, axis_name):
        sent = self.joined([m.at[:, 1:].set(0) for m in self.cut(x)])
        return Sums(wire.psum(sent, axis_name)), Kept(x - sent, None, state)


def gradients():
    rng = np.random.default_rng(0)
    draw = lambda shape: WORKERS * rng.integers(-9, 10, (WORKERS, *shape)).astype(np.float32)
    return {name: draw(shape) for name, shape in SHAPES.items()}


def delivered(tx, steps=1):
    """The updates of a step with gradients and of later ones without, and the last state."""
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    run, state, found = stepped(tx, WORKERS), shard(tx.init(params), WORKERS), []
    for i in range(steps):
        updates, state = run(jax.tree.map(lambda g, i=i: g * (i == 0), gradients()), state)
        found.append(jax.device_get(updates))
    return found, state


def reducer_sizes(tx):
    """Number of elements of each bucket, as a reducer's `init` is told."""
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reducer, "abstract_state", lambda self, size: sizes.append(size) or ())
        tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    return sizes


def first_rows(name):
    mean = gradients()[name].mean(0)
    matrices = mean.reshape(MATRICES[name]).copy()
    matrices[:, 1:] = 0
    return matrices.reshape(SHAPES[name])


@pytest.mark.parametrize("bucket_size", some([None, 100, 1], [100]))
def test_each_leaf_is_seen_in_its_own_shape(bucket_size):
    rule = lambda path, shape: len(shape) < 2
    tx = exchange(FirstRows(stacked="layers"), is_dense=rule, bucket_size=bucket_size)
    (updates,), _ = delivered(tx)
    for name in MATRICES:
        np.testing.assert_array_equal(updates[name], first_rows(name))
    np.testing.assert_array_equal(updates["bias"], gradients()["bias"].mean(0))
    # Leaves are whole in their buckets: 180 and 30 and 96 elements.
    sizes = {None: [306], 100: [180, 30, 96], 1: [180, 30, 96]}[bucket_size]
    assert reducer_sizes(tx) == sizes


def test_a_bucket_is_filled_with_whole_leaves():
    tx = exchange(FirstRows(), is_dense=lambda *_: False, bucket_size=215)
    assert reducer_sizes(tx) == [187, 126]


def test_a_matrix_without_a_stack_has_one_first_row():
    tx = exchange(FirstRows(stacked=None), is_dense=lambda path, _: "layers" not in path)
    (updates,), _ = delivered(tx)
    expected = np.zeros((12, 8), np.float32)
    expected[0] = gradients()["layers"].mean(0)[0, 0]
    np.testing.assert_array_equal(updates["layers"], expected.reshape(4, 3, 8))


@pytest.mark.slow
def test_beside_others_in_a_partition_and_in_stages():
    stages = Staged((FirstRows(stacked=None), FirstRows()), (1,))
    tx = partition({"conv": TopK(1.0), "layers": stages})
    (first, second), _ = delivered(tx, steps=2)
    np.testing.assert_array_equal(first["conv"], gradients()["conv"].mean(0))
    mean = gradients()["layers"].mean(0)
    as_one, as_stack = np.zeros_like(mean), first_rows("layers")
    as_one[0, 0] = mean[0, 0]
    np.testing.assert_array_equal(first["layers"], as_one)
    as_stack[0, 0] = 0  # was delivered before
    np.testing.assert_array_equal(second["layers"], as_stack)


def test_how_leaves_are_seen():
    reducer = FirstRows(stacked=r"layers|blocks")
    for path, shape, matrix in (
        ("['w']", (3, 4), (1, 3, 4)),
        ("['w']", (2, 3, 4), (1, 6, 4)),
        ("['layers']['w']", (2, 3, 4), (2, 3, 4)),
        ("['blocks']['b']", (2, 3), (1, 2, 3)),
        ("['conv']", (3, 3, 16, 32), (1, 144, 32)),
        ("['heads']", (48, 6, 8), (1, 48, 48)),
        ("['layers']['heads']", (5, 6, 8, 48), (5, 48, 48)),
        ("['b']", (3,), (1, 1, 3)),
        ("['s']", (), (1, 1, 1)),
    ):
        assert reducer.matrix(Leaf(path, shape)) == Matrix(*matrix)
    stacks = {
        "['layers']['w']": True,
        ".params['ScanBlock_0']['Dense_0']['kernel']": True,
        "['Transformer']['stacked']": True,
        ".blocks.attention.kernel.value": True,
        "['layers'][0]['w']": False,
        "['layers']['0']['w']": False,
        "['layers_0']['w']": False,
        ".blocks[11].w": False,
        "['discarded']": False,
    }
    for path, is_stack in stacks.items():  # by the names that say so
        assert FirstRows().matrix(Leaf(path, (5, 3, 4)))[0] == (5 if is_stack else 1), path
    neighbours = [Leaf("['layers']['a']", (2, 3, 4)), *[Leaf("", (3, 4))] * 3, Leaf("", (4, 3))]
    assert reducer.with_leaves(tuple(neighbours)).matrices == ((5, 3, 4), (1, 4, 3))
    # Without leaves, as when a planner times it.
    for size, shapes in ((6, [(1, 2, 2), (1, 1, 2)]), (9, [(1, 3, 3)]), (1, [(1, 1, 1)])):
        assert [part.shape for part in reducer.cut(jnp.arange(float(size)))] == shapes
