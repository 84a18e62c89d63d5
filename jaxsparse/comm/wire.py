"""The only file that names JAX's collectives.

It hides the differences between the three ways to run (`jax.shard_map` with and without
`check_vma`, `jax.vmap(axis_name=...)`), between backends and between JAX releases, so that each
algorithm is written once. `axis_name=None` means a single worker: each function then returns its
result for one worker and sends nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxsparse.comm import compat

T = TypeVar("T")


def axis_size(axis_name: str | None) -> int:
    """The number of workers W along `axis_name`, a Python int at trace time.

    Raises:
        ValueError: `axis_name` is not one string, or is not bound where this is traced.
    """
    if axis_name is None:
        return 1
    if not isinstance(axis_name, str) or not axis_name:
        raise ValueError(
            f"axis_name={axis_name!r} is not supported: give one axis name as a string, that of "
            "the workers. Other axes of the mesh need no naming"
        )
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        bound = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
        other = f", or axis_name={bound[0]!r} if that is the workers' axis" if bound else ""
        raise ValueError(
            f"axis_name={axis_name!r} is not bound here (mesh axes in scope: {bound}). Call this "
            "inside jax.shard_map or jax.vmap over that axis, or pass "
            f"axis_name=None for a single worker{other}"
        ) from None


def is_bound(axis_name: str | None) -> bool:
    """Whether this is one worker's code: its axis is bound, or there is none.

    Raises:
        ValueError: `axis_name` is not one string, or this is the code of another axis' devices.
    """
    try:
        axis_size(axis_name)
    except ValueError:
        is_name = isinstance(axis_name, str) and axis_name != ""
        if not is_name or jax.sharding.get_abstract_mesh().manual_axes:
            raise
        return False
    return True


def axis_index(axis_name: str | None) -> Int[Array, ""]:
    """This worker's rank along `axis_name`, int32."""
    if axis_name is None:
        return jnp.int32(0)
    return jax.lax.axis_index(axis_name)


def _in_shard_map(axis_name: str) -> bool:
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes


def tracks_replication(axis_name: str | None) -> bool:
    """Whether values have a replication type, as under shard_map with `check_vma=True`."""
    if axis_name is None or not _in_shard_map(axis_name):
        return False
    return axis_name in compat.varying_axes(jax.lax.axis_index(axis_name))


def is_varying(x: Array, axis_name: str) -> bool:
    """Whether `x` is typed as different per worker. Only meaningful if `tracks_replication`."""
    return axis_name in compat.varying_axes(x)


def varying(tree: T, axis_name: str | None) -> T:
    """Types each array of `tree` as different per worker. Moves no data."""
    if not tracks_replication(axis_name):
        return tree
    assert axis_name is not None
    return jax.tree.map(
        lambda x: x if is_varying(x, axis_name) else compat.cast_to_varying(x, axis_name), tree
    )


def varying_as(tree: T, x: Array, axis_name: str | None) -> T:
    """Types `tree` as different along the axes along which `x` is, except `axis_name`.

    It moves no data. It is for constants to which loops and branches add sums over `axis_name`.
    """
    for axis in compat.varying_axes(x) - {axis_name}:
        tree = varying(tree, axis)
    return tree


def replicated(x: Array, axis_name: str | None) -> Array:
    """Types `x` as equal on all workers, for values that are equal by construction.

    It moves no data, and nothing checks the claim. A value that differs makes replicas drift apart.
    """
    if axis_name is None:
        return x
    if not _in_shard_map(axis_name):
        # Under vmap a replicated value is an unbatched one, and only a collective makes those.
        return jax.lax.all_gather(x, axis_name)[0]
    if tracks_replication(axis_name) and is_varying(x, axis_name):
        return compat.claim_replicated(x, axis_name)
    return x


def psum(x: Array, axis_name: str | tuple[str, ...] | None) -> Array:
    """Sum over the workers of one or several axes, replicated, in one message.

    The backend chooses the precision for sums of 16-bit floats. XLA's CPU backend widens them to 32
    bits on the wire.
    """
    if axis_name is None or axis_name == ():
        return x
    return jax.lax.psum(x, axis_name)


def psum_scatter(x: Array, axis_name: str | None) -> Array:
    """The sum over workers of their row of `x`, (W, ...): worker w gets that of rows w.

    Precision is that of `psum`.
    """
    return x[0] if axis_name is None else jax.lax.psum_scatter(x, axis_name)


def pmax(x: Array, axis_name: str | None) -> Array:
    """Maximum over workers, replicated."""
    if axis_name is None:
        return x
    return jax.lax.pmax(x, axis_name)


def most_of_devices(x: Array, axis_name: str | None) -> Array:
    """Maximum over a worker's devices, of a value that is equal on all workers.

    It is for what chooses a branch that has collectives: all devices must take the same one, or
    they may wait for each other for ever.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    inner = tuple(axis for axis in manual if axis != axis_name)
    for axis in inner:
        x = varying(x, axis)
    return jax.lax.pmax(x, inner) if inner else x


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of an exchange.

    Attributes:
        axis_name: the axis of the workers, over which reducers exchange; None for a single worker.
        inner: the axes of a worker's own devices. Each device exchanges its own shards.
    """

    axis_name: str | None
    inner: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All axes."""
        return (*(() if self.axis_name is None else (self.axis_name,)), *self.inner)

    def none_of(self, *broken: Bool[Array, ""]) -> tuple[Bool[Array, ""], ...]:
        """For each flag, whether it is set on no device. The result is the same on all devices."""
        flags = jnp.stack([jnp.where(flag, jnp.float32(1), jnp.float32(0)) for flag in broken])
        total = psum(varying(flags, self.axis_name), self.all)
        return tuple(total[i] == 0 for i in range(len(broken)))

    def check(self, updates: Any) -> None:
        """Raises ValueError if the axis is not bound, or gradients have been summed already."""
        axis = self.axis_name
        axis_size(axis)
        if axis is None or not tracks_replication(axis):
            return
        for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
            if leaf.size and not is_varying(leaf, axis):
                raise ValueError(
                    f"gradient{jax.tree_util.keystr(path)} is equal on all workers of axis "
                    f"{axis!r}: JAX has already summed it, uncompressed, because it was taken "
                    "with respect to replicated parameters. Differentiate with respect to "
                    f"jaxsparse.local(params, {axis!r}) instead, and do not average gradients "
                    "yourself. (If it is a constant, make it local with jaxsparse.local, too. If "
                    "this shard_map checks types but stands in one with check_vma=False, or if "
                    "optax.MultiSteps around this has averaged it, give check_vma=False here, too)"
                )


def _as_bits(x: Array) -> Array:
    # XLA's CPU collectives widen 16-bit floats to 32 bits, but not integers.
    is_half = x.dtype in (jnp.bfloat16, jnp.float16)
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_half else x


def _from_bits(x: Array, dtype: jnp.dtype) -> Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def all_gather(x: Array, axis_name: str | None) -> Array:
    """Every worker's `x`, stacked in order of rank: shape (W, *x.shape), replicated.

    Two workers swap. Between two slices XLA:TPU makes a sum of a gather, with zeros for the other's
    part: twice the bytes. (So it does between more. In rows of 128 it would not, and then a step of
    int8 takes 11.0 d in place of 9.2 inside a slice.)
    """
    if axis_name is None:
        return x[None]
    if axis_size(axis_name) == 2 and _in_shard_map(axis_name):
        other, is_first = permute(x, axis_name, [(0, 1), (1, 0)]), axis_index(axis_name) == 0
        gathered = jnp.stack([jnp.where(is_first, x, other), jnp.where(is_first, other, x)])
    else:
        gathered = _from_bits(jax.lax.all_gather(_as_bits(x), axis_name), x.dtype)
    if tracks_replication(axis_name):
        return compat.claim_replicated(gathered, axis_name)
    return gathered


def permute(x: Array, axis_name: str | None, pairs: Sequence[tuple[int, int]]) -> Array:
    """Sends `x` along (source, destination) pairs. Workers without a source receive zeros."""
    destinations = [destination for _, destination in pairs]
    if axis_name is None:
        return x if 0 in destinations else jnp.zeros_like(x)
    if not pairs:
        return jnp.zeros_like(x)
    bits = _as_bits(x)
    if _in_shard_map(axis_name):
        return _from_bits(jax.lax.ppermute(bits, axis_name, list(pairs)), x.dtype)
    # vmap implements only complete permutations: complete it, then clear the added messages.
    workers = range(axis_size(axis_name))
    idle_sources = sorted(set(workers) - {source for source, _ in pairs})
    idle_destinations = sorted(set(workers) - set(destinations))
    complete = [*pairs, *zip(idle_sources, idle_destinations)]
    moved = _from_bits(jax.lax.ppermute(bits, axis_name, complete), x.dtype)
    received: Bool[Array, ""] = jnp.isin(axis_index(axis_name), jnp.array(destinations))
    return jnp.where(received, moved, jnp.zeros_like(moved))


def all_to_all(x: Array, axis_name: str | None) -> Array:
    """Sends row j of `x` to worker j. Row i of the result is from worker i. Shape (W, ...)."""
    if axis_name is None:
        return x
    if not _in_shard_map(axis_name):
        # JAX fails on an array that vmap holds once for all workers, as in a scan's first round.
        x = jnp.where(axis_index(axis_name) >= 0, x, jnp.zeros_like(x))
    moved = jax.lax.all_to_all(_as_bits(x), axis_name, split_axis=0, concat_axis=0, tiled=True)
    return _from_bits(moved, x.dtype)


@dataclasses.dataclass(frozen=True)
class Group:
    """Divides the workers of an axis into groups of `size`, which all communicate alike.

    Groups communicate by permutations, because `axis_index_groups` do not exist under `jax.vmap`.
    Members of a group are `stride` ranks apart. With T teams of n consecutive workers,
    Group(axis, n, 1) is the teams, and Group(axis, T, n) the workers of equal rank in all teams.
    """

    axis_name: str | None
    size: int
    stride: int = 1

    @classmethod
    def whole(cls, axis_name: str | None) -> "Group":
        """All workers of the axis in one group."""
        return cls(axis_name, axis_size(axis_name))

    @classmethod
    def teams(cls, axis_name: str | None, teams: int) -> "tuple[Group, Group]":
        """Teams of consecutive workers, and groups of the workers of equal rank in all teams.

        Raises:
            ValueError: the workers can't be divided into so many teams.
        """
        workers = axis_size(axis_name)
        if teams < 1 or workers % teams:
            divisors = [t for t in range(1, workers + 1) if workers % t == 0]
            raise ValueError(
                f"teams={teams} does not divide the {workers} workers of axis {axis_name!r}: "
                f"use one of {divisors}"
            )
        team = workers // teams
        return cls(axis_name, team), cls(axis_name, teams, team)

    @property
    def rank(self) -> Int[Array, ""]:
        """This worker's rank in its group."""
        return axis_index(self.axis_name) // self.stride % self.size

    def shift(self, x: Array, distance: int) -> Array:
        """Sends `x` to the member `distance` further round the group, and returns what arrives."""
        return self._move(x, lambda place: (place + distance) % self.size)

    def exchange(self, x: Array, distance: int) -> Array:
        """Swaps `x` with the member rank XOR `distance`. Size and distance are powers of two."""
        return self._move(x, lambda place: place ^ distance)

    def _move(self, x: Array, target: Callable[[int], int]) -> Array:
        pairs = []
        for worker in range(axis_size(self.axis_name)):
            place = worker // self.stride % self.size
            pairs.append((worker, worker + (target(place) - place) * self.stride))
        return permute(x, self.axis_name, pairs)


def bruck_all_gather(x: Array, group: Group) -> Array:
    """Every member's `x`, stacked in order of rank (Bruck et al., 1997; SparDL, section II).

    It takes ceil(log2 n) rounds, and a worker receives (n - 1) times the words of `x`.

    Args:
        x: any array, of the same shape on all workers.
        group: the group to gather from, of n members.

    Returns:
        Array of shape `(n, *x.shape)`, equal on all members. The order of rows is the same on all
        members, so that sums over rows round alike.
    """
    n = group.size
    blocks = x[None]  # from members rank, rank + 1, ...
    while (held := blocks.shape[0]) < n:
        arriving = group.shift(blocks[: n - held], -held)
        blocks = jnp.concatenate([blocks, arriving])
    return blocks[(jnp.arange(n) - group.rank) % n]
