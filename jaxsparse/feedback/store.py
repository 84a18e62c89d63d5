"""The state of error feedback between steps: its marks, axes and narrow accumulators.

This file alone knows them. `exchange` sees float32 arrays of one worker.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, DTypeLike, Float, Int, UInt32

from jaxsparse import hashing
from jaxsparse.collectives import wire
from jaxsparse.feedback.exchange import Bucket, Carried, Exchanged
from jaxsparse.feedback.plan import Axes, Plan
from jaxsparse.reducers.base import Info
from jaxsparse.training.marks import PerShard, PerWorker

_SIGN = 0x80000000
_DROPPED = 0x0000FFFF  # the bits of a float32 that a bfloat16 does not have
_LARGEST = 0x7F7F0000  # the bits of the largest finite bfloat16


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`, for buckets of d_1, d_2, ... and n dense elements.

    With a `dense_axis`, d_i is the size of this device's shard of a bucket. All arrays that differ
    between shards (a mean's momentum, reducers' states) are then `PerWorker`, too.
    """

    # float32 or bfloat16 [1, d_i], as a worker sees it
    residual: tuple[PerWorker, ...]
    # Like `residual`; or the momentum of the mean, replicated [d_i]; () without momentum.
    momentum: tuple[Any, ...]
    dense_momentum: Any  # float32[n], the mean's momentum, replicated; () if n = 0 or no momentum
    reducers: tuple[Any, ...]  # one reducer's state a bucket
    skipped: Int[Array, ""]  # int32: number of steps skipped because a gradient was not finite
    info: Info  # of the last step that was not skipped, summed over buckets and shards
    pending: Any = ()  # PerWorker float32[1, n], the last dense gradient; () if n = 0 or no delay
    roundings: Any = ()  # uint32: number of roundings of residuals to bfloat16; () for float32


class Store(NamedTuple):
    """Packs one worker's arrays into a state, and unpacks them."""

    axes: Axes
    has_momentum: bool
    is_delayed: bool
    dtype: Any  # of residuals and momenta

    @property
    def is_narrow(self) -> bool:
        """Whether residuals and momenta are rounded."""
        return self.dtype != jnp.float32

    def init(self, plan: Plan) -> ErrorFeedbackState:
        """The state before the first step: zeros."""

        def zeros(size: int) -> Array:
            return jnp.zeros((size,), self.dtype)

        buckets = [
            Bucket(zeros(size), zeros(size) if self.has_momentum else None, reducer.init(size))
            for reducer, size in zip(plan.reducers, plan.shards)
        ]
        dense = jnp.zeros((plan.dense_size,), jnp.float32)
        carried = Carried(
            buckets, dense if self.has_momentum else None, dense if self.is_delayed else None
        )
        nothing = Info(jnp.int32(0), jnp.int32(0))
        rounds = jnp.uint32(0) if self.is_narrow else ()
        return self._packed(carried, plan, jnp.int32(0), nothing, rounds)

    def load(self, state: ErrorFeedbackState, plan: Plan) -> Carried:
        """This worker's arrays.

        Raises:
            ValueError: the state was made for other gradients or settings, or holds several
                workers' arrays.
        """
        _check(state, plan, self)
        marked = [
            () if zeros else momentum for zeros, momentum in zip(plan.needs_zeros, state.momentum)
        ]
        residuals, momenta, pending = _own((state.residual, marked, state.pending))
        shared = [
            momentum if zeros else () for zeros, momentum in zip(plan.needs_zeros, state.momentum)
        ]
        reducers, dense_momentum = state.reducers, state.dense_momentum
        if self.axes.dense_axis is not None:
            made = [functools.partial(r.init, size) for r, size in zip(plan.reducers, plan.shards)]
            reducers = tuple(map(self._of_shard, made, reducers))
            shared = [self._of_shard(_nothing, momentum) for momentum in shared]
        if self.axes.sharded:
            dense_momentum = self._of_shard(_nothing, dense_momentum)

        def float32(*stored: Any) -> Array | None:
            arrays = [x.astype(jnp.float32) for x in stored if not isinstance(x, tuple)]
            return arrays[0] if arrays else None

        each = zip(momenta, shared) if self.has_momentum else [((), ())] * len(residuals)
        buckets = [
            Bucket(x.astype(jnp.float32), float32(*both), reducer)
            for x, both, reducer in zip(residuals, each, reducers)
        ]
        return Carried(buckets, float32(dense_momentum), float32(pending))

    def save(self, done: Exchanged, before: ErrorFeedbackState, plan: Plan) -> ErrorFeedbackState:
        """The state after a step. A skipped step changes the count of skips only."""
        carried, rounds = done.carried, ()
        if self.is_narrow:
            carried = self._rounded(carried, before.roundings, plan)
            is_new = jnp.bool_(self.is_delayed) | done.ok
            rounds = before.roundings + jnp.where(is_new, jnp.uint32(1), jnp.uint32(0))
        skipped = before.skipped + jnp.where(done.ok, jnp.int32(0), jnp.int32(1))
        info = done.info
        if not self.is_delayed:
            info = Info(*(jnp.where(done.ok, new, old) for new, old in zip(info, before.info)))
        return self._packed(carried, plan, skipped, info, rounds)

    def _packed(
        self, carried: Carried, plan: Plan, skipped: Array, info: Info, rounds: Any
    ) -> ErrorFeedbackState:
        buckets, dense_momentum, pending = carried
        # The state has no empty arrays, because Orbax cannot save them.
        has_dense = plan.dense_size > 0
        own_momenta = [() if zeros else b.momentum for zeros, b in zip(plan.needs_zeros, buckets)]
        residuals, own, pending = self._marked(
            (
                [b.residual for b in buckets],
                own_momenta if self.has_momentum else [],
                pending if self.is_delayed and has_dense else (),
            )
        )
        shared = [b.momentum if zeros else () for zeros, b in zip(plan.needs_zeros, buckets)]
        reducers: Any = [b.reducer for b in buckets]
        if self.axes.dense_axis is not None:
            shared, reducers = self._marked((shared, reducers))
        dense: Any = dense_momentum if self.has_momentum and has_dense else ()
        if self.axes.sharded:
            dense = self._marked(dense)
        return ErrorFeedbackState(
            residual=tuple(residuals),
            momentum=tuple(m if isinstance(s, tuple) else s for m, s in zip(own, shared)),
            dense_momentum=dense,
            reducers=tuple(reducers),
            skipped=skipped,
            info=info,
            pending=pending,
            roundings=rounds,
        )

    def _marked(self, tree: Any) -> Any:
        """Marks one worker's arrays as different between workers, if they are not yet."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_marked)
        unmarked = [i for i, leaf in enumerate(leaves) if not _is_marked(leaf)]
        arrays = self.axes.varying([leaves[i] for i in unmarked])
        shards = None if self.axes.dense_axis is None else self.axes.shards()
        for i, x in zip(unmarked, arrays):
            leaves[i] = PerWorker(x[None]) if shards is None else PerShard(x[None], shards)
        return jax.tree.unflatten(treedef, leaves)

    def _of_shard(self, make: Any, stored: Any) -> Any:
        """This device's copies of a tree; arrays that are equal on all hosts are typed as equal.

        It moves no data. `make` makes a tree like it, which marks what differs between workers.
        """

        def one(before: Any, now: Any) -> Any:
            if _is_marked(before):
                return now
            return wire.replicated(_own(now), self.axes.axis_name)

        if isinstance(stored, tuple) and not stored:
            return stored
        return jax.tree.map(one, jax.eval_shape(make), stored, is_leaf=_is_marked)

    def _rounded(self, carried: Carried, round_: Array, plan: Plan) -> Carried:
        buckets = []
        for i, (b, zeros) in enumerate(zip(carried.buckets, plan.needs_zeros)):
            residual = rounded(b.residual, key_of(round_, 2 * i, self.axes.all))
            momentum = b.momentum
            if momentum is not None:
                # All copies of a mean's momentum must be rounded alike.
                axes = () if zeros else self.axes.all
                momentum = rounded(momentum, key_of(round_, 2 * i + 1, axes))
            buckets.append(Bucket(residual, momentum, b.reducer))
        return carried._replace(buckets=buckets)


def _nothing() -> Array:
    return jnp.float32(0)


def _is_marked(node: Any) -> bool:
    return isinstance(node, PerWorker)


def _own(tree: Any) -> Any:
    """This worker's arrays out of a tree of marked ones."""

    def one(node: PerWorker) -> Any:
        if jnp.shape(node.value)[:1] != (1,):
            PerWorker.unwrap(node)  # tells what is wrong
        return node.value[0]

    return jax.tree.map(one, tree, is_leaf=_is_marked)


def accumulator(dtype: DTypeLike | None) -> Any:
    """The dtype to keep accumulators in.

    Raises:
        ValueError: it is neither float32 (or None) nor bfloat16.
    """
    try:
        known = jnp.dtype("float32" if dtype is None else dtype)
    except TypeError:
        known = None
    if known not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"accumulator_dtype={dtype!r} must be 'float32' (or None) or 'bfloat16'; residuals can "
            "grow beyond float16"
        )
    return known


def rounded(x: Float[Array, " d"], key: UInt32[Array, ""]) -> BFloat16[Array, " d"]:
    """Float32 `x` as bfloat16, up or down at random so that the result is `x` on average.

    Rounding to nearest would drop small gradients that are added to a large residual, at each step
    and always in the same direction. Values that bfloat16 holds exactly do not change. Values
    beyond its range are clipped.

    Args:
        x: float32, finite.
        key: a well mixed key (from `hashing.combine`), fresh for each call.
    """
    sign, dropped, largest = map(jnp.uint32, (_SIGN, _DROPPED, _LARGEST))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = hashing.keyed(jax.lax.iota(jnp.uint32, x.size), key) & dropped
    magnitude = jnp.minimum(((bits & ~sign) + noise) & ~dropped, largest)
    value = jax.lax.bitcast_convert_type((bits & sign) | magnitude, jnp.float32)
    return value.astype(jnp.bfloat16)


def key_of(round_: UInt32[Array, ""], number: int, axes: Sequence[str]) -> UInt32[Array, ""]:
    """A key for the `number`-th buffer of a round, different for each worker along `axes`."""
    return hashing.combine(round_, number, *(wire.axis_index(axis) for axis in axes))


def _check(state: ErrorFeedbackState, plan: Plan, store: Store) -> None:
    """Raises ValueError if the state was made for other gradients or settings."""
    dense_size, dtype = plan.dense_size, store.dtype
    parts = None if store.axes.dense_axis is None else plan.parts
    sizes = tuple(node.value.shape[-1] for node in state.residual)
    if sizes != plan.shards:
        raise ValueError(
            f"the state holds residuals of sizes {sizes}, but the gradients fill buckets of sizes "
            f"{plan.shards}: pass the state that init(params) made for the same tree and settings"
        )
    made_for = {getattr(node, "shards", None) for node in state.residual} - {parts}
    if made_for:
        raise ValueError(
            f"the state is of {made_for.pop()} shards along the fast axis, where there are {parts} "
            "(None: on one level): pass the state that init(params) made on this mesh"
        )
    nodes = (*state.residual, *state.momentum)
    kept = {str((node.value if _is_marked(node) else node).dtype) for node in nodes}
    if kept - {str(dtype)}:
        raise ValueError(
            f"the state holds residuals or momenta in {sorted(kept)}, but accumulator_dtype is "
            f"{dtype}: pass the state that init(params) made for the same settings"
        )
    momenta = len(state.momentum), _size(state.dense_momentum)
    if momenta != ((len(sizes), dense_size or None) if store.has_momentum else (0, None)):
        raise ValueError(
            f"the state holds momentum for {momenta[0]} buckets and {momenta[1]} dense elements, "
            f"but the gradients fill {len(sizes)} and {dense_size}, and momentum is "
            f"{'on' if store.has_momentum else 'off'}: pass the state that init(params) made for "
            "the same tree and settings"
        )
    if _size(state.pending) != (dense_size or None if store.is_delayed else None):
        raise ValueError(
            f"the state holds {_size(state.pending)} delayed dense elements, but the gradients "
            f"have {dense_size} with delay={int(store.is_delayed)}: pass the state that "
            "init(params) made for the same tree and settings"
        )


def _size(node: Any) -> int | None:
    """Elements of a buffer, or None if there is none."""
    leaves = jax.tree.leaves(node)
    return leaves[0].size if leaves else None
