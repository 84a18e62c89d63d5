"""The state of error feedback between steps: its marks, and accumulators in bfloat16.

`load` turns a state into `Carried`, one worker's buckets in float32 pieces, and `save` turns that
back. `run_step` sees only `Carried`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import Array, BFloat16, Float, Int, UInt32

from jaxsparse.arrays import hashing, layout as layouts
from jaxsparse.comm import wire
from jaxsparse.comm.marks import PerWorker
from jaxsparse.comm.wire import Axes
from jaxsparse.feedback.options import Settings
from jaxsparse.feedback.plan import TreePlan
from jaxsparse.feedback.step import Bucket, Carried, Exchanged
from jaxsparse.reducers.base import Info

_SIGN = 0x80000000
_DROPPED = 0x0000FFFF  # the bits of a float32 that a bfloat16 does not have
_LARGEST = 0x7F7F0000  # the bits of the largest finite bfloat16


class ErrorFeedbackState(NamedTuple):
    """State of an exchange. Accumulators have their leaf's shape, and a name made of its path.

    So a state fits parameters on any mesh: accumulators are sharded over inner axes like their
    leaves, or further.

    States of two reducers may have the same structure, but their residuals mean different things:
    another scale or basis. So a state records its reducer, in dictionary keys, which every tree
    walker preserves, and not in objects that some take for arrays.
    """

    # Residuals of compressed leaves: float32 or bfloat16 [1, *shape], as a worker sees them. {} if
    # none is kept.
    residual: dict[str, PerWorker]
    # Momenta, or {} without momentum. Compressed leaves have one like `residual`, or the mean's,
    # replicated [*shape]. Uncompressed leaves have the mean's, float32, replicated [*shape].
    momentum: dict[str, Any]
    # The state of each bucket's reducer, by the bucket's number and reducer, as in "0_SparDL". On a
    # mesh with inner axes, arrays have one row for each device of a worker: [n, ...].
    reducers: dict[str, Any]
    skipped: Int[Array, ""]  # int32: number of steps skipped because a gradient was not finite
    # The counts of the last step that was not skipped, or with a delay of the last step. They are
    # summed over buckets and inner axes.
    info: Info
    # The last gradients of uncompressed leaves: float32 [1, *shape]. () without delay.
    pending: dict[str, PerWorker] | tuple[()]
    roundings: Any = ()  # uint32: number of roundings of residuals to bfloat16; () for float32
    placement: Any = ()  # where leaves are: `Placement.named`; () without inner axes

    @property
    def reducer_names(self) -> tuple[str, ...]:
        """The name of each bucket's reducer."""
        named = [name.split("_", 1) for name in self.reducers]
        return tuple(name for _, name in sorted(named, key=lambda one: int(one[0])))

    @property
    def is_delayed(self) -> bool:
        """Whether exchanges have a delay."""
        return isinstance(self.pending, dict)


def states_in(tree: Any) -> list[ErrorFeedbackState]:
    """The states of this library's transformations in an optimizer's state."""
    is_state = lambda node: isinstance(node, ErrorFeedbackState)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]


def check_made(state: Any, kind: type) -> None:
    """Raises ValueError unless a transformation whose states are of this kind made the state."""
    if not isinstance(state, kind):
        raise ValueError(
            f"the state was made for another transformation: it is a {type(state).__name__}, and "
            f"no {kind.__name__}. Pass the state that init(params) of this transformation made"
        )


_OF_LEAVES = ("residual", "momentum", "reducers", "pending", "placement")


def has_nothing(updates: Any, state: ErrorFeedbackState) -> bool:
    """Whether there is nothing to exchange: the tree has no leaves, as in a group of none."""
    return not jax.tree.leaves((updates, *(getattr(state, field) for field in _OF_LEAVES)))


def without_params(state: ErrorFeedbackState) -> ErrorFeedbackState:
    """The state as `optax.tree.map_params` needs it, which maps what is like parameters.

    Nothing here is: residuals have an axis of workers, and names in the place of a tree. So one
    leaf stands for each field.
    """
    return state._replace(**dict.fromkeys(_OF_LEAVES, jnp.int32(0)))


def init_state(plan: TreePlan, settings: Settings) -> ErrorFeedbackState:
    """The state before the first step: zeros."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _described(plan, settings))
    return _marked(
        ErrorFeedbackState(
            residual=zeros["residual"],
            momentum=zeros["momentum"],
            reducers={b.name: b.reducer.init(b.size) for b in plan.buckets},
            skipped=jnp.int32(0),
            info=Info(jnp.int32(0), jnp.int32(0)),
            pending=zeros["pending"] if settings.is_delayed else (),
            roundings=jnp.uint32(0) if settings.rounds_accumulators else (),
        ),
        settings.axis_name,
    )


def _described(plan: TreePlan, settings: Settings) -> dict[str, dict[str, Any]]:
    """Shapes and dtypes of accumulators by field and name, marked where they are a worker's own."""
    layout, packed, dtype = plan.layout, plan.compressed, settings.accumulator_dtype
    # Leaves whose momentum is that of the mean.
    of_mean = {leaf for bucket in plan.buckets if bucket.needs_zeros for leaf in bucket.leaves}
    loose = {leaf for leaf, _, _ in layout.dense}
    mean = lambda leaf, dtype: jax.ShapeDtypeStruct(layout.shapes[leaf], dtype)
    own = lambda leaf, dtype: PerWorker(jax.ShapeDtypeStruct((1, *layout.shapes[leaf]), dtype))
    momentum: dict[int, Any] = {}
    if settings.momentum is not None:
        momentum = {i: (mean if i in of_mean else own)(i, dtype) for i in packed}
        momentum |= {i: mean(i, jnp.float32) for i in loose}
    fields = {
        "residual": {i: own(i, dtype) for i in packed if settings.keeps_residual},
        "momentum": momentum,
        "pending": {i: own(i, jnp.float32) for i in loose if settings.is_delayed},
    }
    return {
        field: {layout.names[i]: leaves[i] for i in sorted(leaves)}
        for field, leaves in fields.items()
    }


def load(state: ErrorFeedbackState, plan: TreePlan, settings: Settings) -> Carried:
    """One worker's vectors.

    Raises:
        ValueError: the state was made for other gradients or settings, or holds several workers'
            arrays.
    """
    layout, has_momentum = plan.layout, settings.momentum is not None
    _check_origin(state, plan, settings.is_delayed)
    _check(state, _described(plan, settings))

    def leaves(stored: Mapping[str, Any]) -> dict[int, Array]:
        return {
            i: _array(stored[name])[0] if _is_marked(stored[name]) else stored[name]
            for i, name in enumerate(layout.names)
            if name in stored
        }

    residuals, momenta = leaves(state.residual), leaves(state.momentum)
    pending = leaves(state.pending or {})
    reducers = [state.reducers[bucket.name] for bucket in plan.buckets]
    if not settings.keeps_residual:
        residuals = {i: jnp.zeros(layout.shapes[i], jnp.float32) for i in plan.compressed}
    own = layout.buckets_of(residuals)
    kept: Any = layout.buckets_of(momenta) if has_momentum else [None] * len(own)
    return Carried(
        list(map(Bucket, own, kept, reducers)),
        layout.dense_of(momenta) if has_momentum else None,
        layout.dense_of(pending) if settings.is_delayed else None,
    )


def save(
    done: Exchanged, before: ErrorFeedbackState, plan: TreePlan, settings: Settings, axes: Axes
) -> ErrorFeedbackState:
    """The state after a step."""
    carried, rounds = done.carried, ()
    if settings.rounds_accumulators:
        carried = _rounded(carried, before.roundings, plan, axes)
        rounds = before.roundings + jnp.uint32(1)
    info = done.info
    if not settings.is_delayed:
        info = Info(*(jnp.where(done.ok, new, old) for new, old in zip(info, before.info)))
    buckets, layout = carried.buckets, plan.layout
    residuals, kept = [b.residual for b in buckets], [b.momentum or () for b in buckets]
    momentum: dict[int, Array] = {}
    pending: dict[int, Array] = {}
    residual = layout.leaves_in(residuals) if settings.keeps_residual else {}
    if carried.dense_momentum is not None:
        momentum = layout.leaves_in(kept) | layout.leaves_in_dense(carried.dense_momentum)
    if carried.pending is not None:
        pending = layout.leaves_in_dense(carried.pending)
    found = {"residual": residual, "momentum": momentum, "pending": pending}
    accumulators: dict[str, Any] = {}
    for field, described in _described(plan, settings).items():
        named = {layout.names[i]: x for i, x in sorted(found[field].items())}
        accumulators[field] = {
            name: PerWorker(x[None]) if _is_marked(described[name]) else x
            for name, x in named.items()
        }
    return _marked(
        ErrorFeedbackState(
            residual=accumulators["residual"],
            momentum=accumulators["momentum"],
            reducers={p.name: b.reducer_state for p, b in zip(plan.buckets, buckets)},
            skipped=before.skipped + jnp.where(done.ok, jnp.int32(0), jnp.int32(1)),
            info=info,
            pending=accumulators["pending"] if settings.is_delayed else (),
            roundings=rounds,
            placement=before.placement,
        ),
        settings.axis_name,
    )


def _marked(state: ErrorFeedbackState, axis_name: str | None) -> ErrorFeedbackState:
    """The state with marked arrays typed as different between workers."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(state, is_leaf=_is_marked)
    own = iter(wire.varying([_array(x) for x in leaves if _is_marked(x)], axis_name))
    return treedef.unflatten(PerWorker(next(own)) if _is_marked(x) else x for x in leaves)


def _rounded(carried: Carried, round_: Array, plan: TreePlan, axes: Axes) -> Carried:
    buckets = []
    for i, (bucket, its_plan) in enumerate(zip(carried.buckets, plan.buckets)):
        shapes = [piece.shape for piece in bucket.residual]
        rounded = lambda x, key, to=shapes: layouts.cut(rounded_at_random(layouts.join(x), key), to)
        residual = rounded(bucket.residual, key_of(round_, 2 * i, axes.all))
        momentum = bucket.momentum
        if momentum is not None:
            # All copies of a mean's momentum must be rounded alike.
            over = axes.inner if its_plan.needs_zeros else axes.all
            momentum = rounded(momentum, key_of(round_, 2 * i + 1, over))
        buckets.append(Bucket(residual, momentum, bucket.reducer_state))
    return carried._replace(buckets=buckets)


def _is_marked(node: Any) -> bool:
    return isinstance(node, PerWorker)


def _array(node: Any) -> Any:
    """The array of a node, which may have a mark."""
    return node.jaxsparse_per_worker if isinstance(node, PerWorker) else node


@dataclasses.dataclass(frozen=True)
class Kind:
    """The role of an array in a state.

    Attributes:
        is_own: whether it is a worker's own, and marked so.
        leaf: name of the leaf that it accumulates for, and whose shape it has. None: of no leaf.
        is_reducers: whether it belongs to a reducer's state.
    """

    is_own: bool
    leaf: str | None = None
    is_reducers: bool = False


def kinds(state: ErrorFeedbackState) -> ErrorFeedbackState:
    """The state with the `Kind` of each array in the array's place."""

    def accumulators(field: Any) -> Any:
        return field and {
            name: PerWorker(Kind(True, name)) if _is_marked(node) else Kind(False, name)
            for name, node in field.items()
        }

    def of_reducer(node: Any) -> Any:
        own = Kind(True, is_reducers=True)
        return PerWorker(own) if _is_marked(node) else Kind(False, is_reducers=True)

    scalars = jax.tree.map(lambda _: Kind(False), state)
    return scalars._replace(
        residual=accumulators(state.residual),
        momentum=accumulators(state.momentum),
        pending=accumulators(state.pending),
        reducers=jax.tree.map(of_reducer, state.reducers, is_leaf=_is_marked),
    )


def rounded_at_random(x: Float[Array, " d"], key: UInt32[Array, ""]) -> BFloat16[Array, " d"]:
    """`x` as bfloat16, rounded up or down at random so that the result is `x` on average.

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


def _check_origin(state: ErrorFeedbackState, plan: TreePlan, is_delayed: bool) -> None:
    """Raises ValueError if the state was made for other reducers, or with another delay."""
    fix = "pass the state that init(params) made for the same transformation and settings"
    if state.reducer_names != plan.reducer_names:
        both = state.reducer_names, plan.reducer_names
        there, here = (", ".join(names) or "no buckets" for names in both)
        raise ValueError(
            f"the state was made for other settings: its buckets are exchanged by {there}, and "
            f"those of this transformation by {here}: {fix}"
        )
    if state.is_delayed != is_delayed:
        raise ValueError(
            "the state was made for other settings: with "
            f"delay={int(state.is_delayed)}, but this transformation has "
            f"delay={int(is_delayed)}: {fix}"
        )
    for i, bucket in enumerate(plan.buckets):
        there, wanted = _in_words(state.reducers[bucket.name]), _in_words(bucket.state)
        if there != wanted:
            raise ValueError(
                f"the state was made for other settings: {bucket.reducer.name}'s own state of "
                f"bucket {i} is {there}, and {bucket.reducer} needs {wanted}: {fix}"
            )


def _in_words(state: Any) -> str:
    """Shapes and dtypes of a reducer's state as one worker sees it, in words."""
    found = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_marked)[0]
    return ", ".join(f"{keystr(path)} {_seen(x)}".strip() for path, x in found) or "nothing"


def _check(state: ErrorFeedbackState, described: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError if the state was made for other gradients or settings."""
    for field, leaves in described.items():
        stored = getattr(state, field) or {}
        for name in sorted({*stored, *leaves}):
            there = _seen(stored.get(name))
            wanted = _seen(leaves.get(name))
            if there != wanted:
                node = stored.get(name)
                if isinstance(node, PerWorker) and jnp.shape(node.value)[:1] != (1,):
                    PerWorker.unwrap(node)  # tells what is wrong
                fix = "pass the state that init(params) made for the same tree and settings"
                if name not in leaves and any(name.endswith(f".{own}") for own in leaves):
                    fix = (
                        "init saw parameters of which these gradients are a part. Put the exchange "
                        "where init sees that part alone, as in "
                        "optax.lookahead(optax.chain(exchange, optimizer), ...)"
                    )
                raise ValueError(
                    f"the state's {field} of {name!r} is {there}, but these gradients and settings "
                    f"need {wanted}: {fix}"
                )


def _seen(node: Any) -> str:
    """Shape and dtype of a node, in words."""
    if node is None:
        return "nothing"
    x, is_own = _array(node), _is_marked(node)
    shape = jnp.shape(x)
    sizes = (
        ["W" if is_own and shape[:1] == (1,) else str(shape[0]), *map(str, shape[1:])]
        if shape
        else []
    )
    return f"{'per-worker ' if is_own else ''}{jnp.dtype(x.dtype).name}[{', '.join(sizes)}]"
