"""The axes of workers: one that is compressed over, and perhaps a fast one that is not.

On a mesh of hosts and their devices each bucket is cut into L shards, one for each device of the
fast axis. Shards are summed over the fast axis by a reduce-scatter, exchanged by a reducer over the
slow one, and put together by an all-gather. Parameters that are sharded over the fast axis
themselves need neither of the two.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.collectives import wire
from jaxsparse.feedback.options import Options
from jaxsparse.per_worker import PerShard, PerWorker
from jaxsparse.reducers.base import Budget, Info, Reducer, count, info, saturating_sum


@dataclasses.dataclass(frozen=True)
class Levels:
    """Which axes there are; L is 1 without a `dense_axis`.

    Attributes:
        axis_name: the axis that reducers exchange over; None for a single worker.
        dense_axis: the fast axis, over which shards are summed exactly; None if there is none.
        sharded: whether gradients are this device's shards, already averaged over `dense_axis`.
    """

    axis_name: str | None
    dense_axis: str | None = None
    sharded: bool = False

    def __post_init__(self):
        if self.dense_axis is not None and (
            not isinstance(self.dense_axis, str) or self.dense_axis == self.axis_name
        ):
            raise ValueError(
                f"dense_axis={self.dense_axis!r} must be the name of one other axis than "
                f"axis_name={self.axis_name!r}, or None: axis_name is the slow axis, dense_axis "
                'the fast one, as in axis_name="hosts", dense_axis="local"'
            )
        if not isinstance(self.sharded, bool):
            raise ValueError(f"sharded={self.sharded!r} must be True or False")
        if self.sharded and self.dense_axis is None:
            raise ValueError(
                "sharded=True without a dense_axis: name the axis that the parameters are sharded "
                'over, such as dense_axis="local"'
            )

    @classmethod
    def of(cls, options: Options) -> "Levels":
        """Those that the options name."""
        return cls(
            options.get("axis_name", "data"),
            options.get("dense_axis"),
            options.get("sharded", False),
        )

    def mark(self, tree: Any) -> Any:
        """One worker's arrays, marked as different between workers."""
        wrapped = PerWorker.wrap(tree)
        if self.dense_axis is None:
            return wrapped
        return jax.tree.map(lambda x: PerShard(x.value, self.shards), wrapped, is_leaf=_marked)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes."""
        return tuple(axis for axis in (self.axis_name, self.dense_axis) if axis is not None)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Axes over which uncompressed leaves are yet to be summed."""
        return tuple(a for a in self.axes if not (self.sharded and a == self.dense_axis))

    @property
    def shards(self) -> int:
        """L.

        Raises:
            ValueError: the axis is not bound here.
        """
        return wire.axis_size(self.dense_axis)

    @property
    def summands(self) -> int:
        """Workers over whose uncompressed leaves the mean is yet to be taken."""
        size = wire.axis_size(self.axis_name)
        return size if self.sharded else size * self.shards

    def check_bound(self) -> None:
        """Raises ValueError unless both axes are bound where this is traced."""
        wire.axis_size(self.axis_name)
        wire.axis_size(self.dense_axis)

    def check_init(self) -> None:
        """Raises ValueError unless L is known where this is traced."""
        try:
            wire.axis_size(self.dense_axis)
        except ValueError:
            raise ValueError(
                f"init needs the size of dense_axis={self.dense_axis!r}, for the state of one "
                "shard. Run it on the mesh: state = jaxsparse.data_parallel(tx.init, mesh, "
                f"axis_name={self.axes!r}, batch_argnums=())(params)"
            ) from None

    def split(
        self, budget: Budget, sizes: tuple[int, ...], dense_size: int
    ) -> tuple[tuple[Reducer, ...], tuple[int, ...]]:
        """One reducer for a shard of each bucket, and the elements of these shards.

        Settings that are totals for the tree are divided over shards as they are over buckets.

        Raises:
            ValueError: the budget does not fit, or shards could wait for each other for ever.
        """
        parts = self.shards
        shards = tuple(self._shard_size(size, budget.alignment) for size in sizes)
        each = tuple(size for size in shards for _ in range(parts))
        reducers = tuple(budget.split(each, dense_size * parts)[::parts])
        if self.dense_axis is not None and any(reducer.adapts_messages for reducer in reducers):
            raise ValueError(
                f"gather='bruck' of {budget} adapts its messages to what each shard along "
                f"dense_axis={self.dense_axis!r} delivers, and devices whose messages differ would "
                "wait for each other for ever: use gather='recursive' (for a power of two of "
                "teams), or teams=1"
            )
        return reducers, shards

    def _shard_size(self, size: int, block: int) -> int:
        if self.dense_axis is None or self.sharded:
            return size
        return -(-size // (self.shards * block)) * block

    def scatter(self, x: Float[Array, " d"], size: int) -> Float[Array, " size"]:
        """This device's shard of the mean of `x` over the fast axis."""
        if self.dense_axis is None or self.sharded:
            return x
        return wire.reduce_scatter(self._rows(x, size), self.dense_axis) / self.shards

    def gather(self, shard: Float[Array, " size"], size: int) -> Float[Array, " d"]:
        """All `size` elements of the bucket that `shard` is this device's part of."""
        if self.dense_axis is None or self.sharded:
            return shard
        return wire.all_gather(shard, self.dense_axis).reshape(-1)[:size]

    def own(self, x: Float[Array, " d"], size: int) -> Float[Array, " size"]:
        """This device's shard of `x`."""
        if self.dense_axis is None or self.sharded:
            return x
        rank = wire.axis_index(self.dense_axis)
        return jax.lax.dynamic_index_in_dim(self._rows(x, size), rank, keepdims=False)

    def _rows(self, x: Array, size: int) -> Array:
        return jnp.pad(x, (0, self.shards * size - x.size)).reshape(self.shards, size)

    def none_of(self, *broken: Bool[Array, ""]) -> tuple[Bool[Array, ""], ...]:
        """For each flag, whether it is set nowhere: the same on all workers."""
        flags = jnp.stack([jnp.where(flag, jnp.float32(1), jnp.float32(0)) for flag in broken])
        total = wire.psum(self.varying(flags), self.axes)
        return tuple(total[i] == 0 for i in range(len(broken)))

    def total(
        self, infos: Sequence[Info], sizes: Sequence[int], shards: Sequence[int], dense: int
    ) -> Info:
        """The sums over buckets and shards, and uncompressed elements; padding does not count.

        Args:
            infos: of this device's shards.
            sizes: elements of each bucket, whole.
            shards: elements of this device's shard of each.
            dense: elements that are delivered uncompressed.
        """
        both = [info(0)]
        for one, size, shard in zip(infos, sizes, shards):
            delivered = jnp.minimum(one.delivered, self._held(size, shard))
            both.append(one._replace(delivered=delivered))
        counts = jnp.stack([jnp.stack(one) for one in both])
        delivered, overflow = saturating_sum(counts, self.dense_axis)
        return Info(saturating_sum(jnp.stack([delivered, count(dense)])), overflow)

    def _held(self, size: int, shard: int) -> Int[Array, ""]:
        """How many elements of this device's shard are the bucket's, and not padding."""
        if self.dense_axis is None or self.sharded:
            return count(shard)
        full, rest = divmod(size, max(shard, 1))
        rank = wire.axis_index(self.dense_axis)
        partly = jnp.where(rank == full, count(rest), jnp.int32(0))
        return jnp.where(rank < full, count(shard), partly)

    def varying(self, tree: Any) -> Any:
        """`tree` typed as different on all devices."""
        for axis in self.axes:
            tree = wire.varying(tree, axis)
        return tree

    def wrap(self, tree: Any) -> Any:
        """Marks one worker's arrays, for a state."""
        return self.mark(self.varying(tree))

    def store(self, tree: Any) -> Any:
        """Marks what is equal along `axis_name` but differs between shards, for a state.

        Without a fast axis, nothing. `PerWorker` arrays stay as they are.
        """
        if self.dense_axis is None:
            return tree
        return jax.tree.map(lambda x: x if _marked(x) else self.wrap(x), tree, is_leaf=_marked)

    def load(self, make: Callable[[], Any], stored: Any) -> Any:
        """The inverse of `store`, given what makes such a tree."""
        if self.dense_axis is None:
            return stored

        def one(before: Any, now: Any) -> Any:
            if _marked(before):
                return now
            # Each device holds a copy, equal on all hosts: this types it so, and moves nothing.
            return wire.replicated(PerWorker.unwrap(now), self.axis_name)

        return jax.tree.map(one, jax.eval_shape(make), stored, is_leaf=_marked)


def _marked(node: Any) -> bool:
    return isinstance(node, PerWorker)
