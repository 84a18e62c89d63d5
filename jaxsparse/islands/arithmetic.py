"""The compiled parts of a round. They know nothing of stores, names and waiting.

What all islands must compute alike is one program, `outer_step`. All run it, also those whose
message does not count or that only replay. So they get the same bits, as far as their devices and
compilers agree. What stays with an island itself comes from other programs.
"""

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path
from jaxtyping import Array, Bool, Float, UInt32

from jaxsparse.arrays.layout import check_arrays, narrow
from jaxsparse.arrays.magnitude import all_finite
from jaxsparse.comm.marks import is_marked, map_marked
from jaxsparse.feedback import by_message
from jaxsparse.islands.records import DTYPES
from jaxsparse.outer.worker import (
    Select,
    check_optimizer,
    displacement,
    picked,
    put_back,
    replaced,
    skips,
    widened,
)
from jaxsparse.processes.digest import Digested


class Shared(NamedTuple):
    """What all islands of a run have alike, bit for bit, as a round begins."""

    params: Any  #: the global parameters, in float32 or wider
    #: the states of exchange and optimizer. Arrays marked `PerWorker`, such as residuals, are this
    #: island's own.
    outer: tuple[Any, Any]


class Begun(NamedTuple):
    """An island's half of an exchange."""

    words: UInt32[Array, " words"]  # its message
    posted: Any  # what stays with it
    origin: Any  # its own parameters when it began, in float32 or wider
    finite: Bool[Array, ""]  # whether these, and what they moved, were finite


class Arithmetic:
    """Programs for an exchange and an optimizer. For the settings see `Islands`."""

    def __init__(
        self,
        exchange: optax.GradientTransformationExtraArgs,
        optimizer: optax.GradientTransformation,
        params: Select,
        weighted: bool = False,
    ) -> None:
        self.is_weighted = weighted
        self._exchange = exchange
        self._optimizer = optax.with_extra_args_support(optimizer)
        self.pick = params
        self._make = lambda params: (exchange.init(params), optimizer.init(params))
        # The step may donate its own state.
        self.copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self._widen = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.copy(widened(x)), tree))
        # A training state at the global parameters, without numbers that are not finite.
        self.put_back = jax.jit(lambda worker, new: put_back(params, worker, new, jnp.bool_(True)))
        self.begin = jax.jit(self._begin)
        self.outer_step = jax.jit(self._outer_step)
        self.owed = jax.jit(functools.partial(self._own, counts=False))
        self.sent = jax.jit(functools.partial(self._own, counts=True))
        self.go_on = jax.jit(self._go_on)
        self.digest = jax.jit(_digest)

    def start(self, state: Any) -> Shared:
        """The shared part of the first island, from its training state, which it checks."""
        if any(is_marked(path) for path, _ in tree_flatten_with_path(state)[0]):
            raise ValueError(
                "the state holds arrays of single workers, as the state of a jaxsparse "
                "transformation does. An island's own step may exchange between its devices only "
                "without a residual, such as by jaxsparse.dense: leave compression to exchange"
            )
        check_arrays("leaf", state)
        picked("params", self.pick, state)  # raises
        params = self._widen(self.pick(state))
        outer = self._init_state(params)
        check_optimizer(outer[1])
        for path, leaf in tree_flatten_with_path(outer)[0]:
            if leaf.dtype.name not in DTYPES:
                raise ValueError(
                    f"the state of exchange and optimizer holds {leaf.dtype.name} at "
                    f"{keystr(path)}, which snapshots can't hold. Random keys, as those of "
                    "optax.add_noise, may stand in the state of step"
                )
        return Shared(params, outer)

    def describe(self, shared: Shared, own: Any) -> tuple[int, str]:
        """The number of words of a message, and a digest of what islands must have in common.

        That is `outer_step`, what it works on, and the names of arrays. Of `shared` and of
        the island's own parameters shapes and dtypes count alone. Raises ValueError if
        `exchange` is none, or not of one message.
        """
        shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))  # no weak types
        shared, own = jax.tree.map(shape, (shared, own))
        try:
            words = by_message.message_words(self._exchange, shared.params, shared.outer[0])
        except ValueError as error:
            error.add_note(
                "islands are programs of their own, so exchange must send one message, and be "
                "made with axis_name=None; what applies the mean is optimizer"
            )
            raise
        begun = jax.eval_shape(self._begin, own, shared, 0)
        program = jax.make_jaxpr(self._outer_step)(*self._received(2, words), begun, shared)
        names = [f"{path} {x.shape} {x.dtype}" for path, x in shared_leaves(shared)]
        text = "\n".join([Digested(program, None, ()).digest, *names])
        return words, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def prepare(self, members: int, begun: Begun, before: Shared) -> None:
        """Compiles `outer_step` for so many messages, and does not run it."""
        received = self._received(members, begun.words.size)
        self.outer_step.lower(*received, begun, before).compile()

    def _received(self, members: int, words: int) -> tuple[Any, Any]:
        """The shapes of messages that count, and of their weights."""
        weights = jax.ShapeDtypeStruct((members,), jnp.float32) if self.is_weighted else None
        return jax.ShapeDtypeStruct((members, words), jnp.uint32), weights

    def without_debts(self, shared: Shared) -> Shared:
        """Without anything of this island's own, as it starts."""
        return with_own(shared, self._init_state(shared.params))

    def _init_state(self, params: Any) -> Any:
        """The outer states as they start, cut over devices as the parameters are.

        Zeros depend on no parameter, so that XLA alone would put all of them on one device.
        """
        cuts = {x.shape: x.sharding for x in jax.tree.leaves(params) if _is_on_mesh(x)}
        whole = _whole(params)

        def place(x: jax.ShapeDtypeStruct, is_own: bool) -> NamedSharding | None:
            if whole is None:
                return None
            like = cuts.get(x.shape[is_own:], whole)  # behind the axis of workers, see `PerWorker`
            return NamedSharding(like.mesh, PartitionSpec(*[None] * is_own, *like.spec))

        there = map_marked(place, jax.eval_shape(self._make, params))
        return jax.jit(self._make, out_shardings=there)(params)

    def _begin(self, own: Any, shared: Shared, rank: Any) -> Begun:
        """A message of an island's own parameters. By its `rank` islands draw differently."""
        finite = all_finite(jax.tree.leaves(own))
        moved = jax.tree.map(lambda x: jnp.where(finite, x, 0), displacement(shared.params, own))
        words, posted = by_message.post(self._exchange, moved, shared.outer[0], rank=rank)
        origin = jax.tree.map(lambda w: jnp.copy(widened(w)), own)
        # All leave out a message that says it is not finite, as after a move beyond float32. An
        # island that sent it would wait for a decision without end if no other one makes it.
        return Begun(words, posted, origin, finite & (words[0] == 0))

    def _outer_step(
        self,
        messages: UInt32[Array, "members words"],
        weights: Float[Array, " members"] | None,
        begun: Begun,
        before: Shared,
    ) -> tuple[Shared, Bool[Array, ""]]:
        """What follows for all, and whether it counts: if a sum overflows, all stay as before."""
        params, (sent, moments) = before
        mean, sent = by_message.receive(
            self._exchange, messages, begun.posted, params, sent, weights=weights
        )
        updates, moments = self._optimizer.update(mean, moments, params)
        after = Shared(optax.apply_updates(params, updates), (sent, moments))
        equal = map_marked(lambda x, own: 0 if own else x, after)
        ok = all_finite(jax.tree.leaves(equal)) & (skips(after.outer) == skips(before.outer))
        return jax.tree.map(functools.partial(jnp.where, ok), after, before), ok

    def _own(self, begun: Begun, before: Shared, counts: bool) -> tuple[Any, Any]:
        """The outer states, of which an island's own part is right, without others' messages.

        If its own does not count, it keeps all.
        """
        params, (sent, moments) = before
        words = begun.words[None]
        _, sent = by_message.receive(
            self._exchange, words, begun.posted, params, sent, counts=counts
        )
        return sent, moments

    def _go_on(self, worker: Any, begun: Begun, params: Any) -> tuple[Any, Bool[Array, ""]]:
        """A training state that goes on from new global parameters, and whether it was finite.

        Moves that the island made since it began are kept. If they are not finite, it starts anew.
        """
        places = picked("params", self.pick, worker)
        leaves = jax.tree.leaves(worker)

        def moved_on(i: int, g: Array, origin: Array) -> Array:
            own = widened(leaves[i])
            # Where it has not moved, it gets exactly the global parameters.
            return narrow(jnp.where(own == origin, g, g + (own - origin)), leaves[i].dtype)

        globals_, origins = jax.tree.leaves(params), jax.tree.leaves(begun.origin)
        values = [moved_on(i, g, origin) for i, g, origin in zip(places, globals_, origins)]
        finite = all_finite(values)
        return put_back(self.pick, replaced(worker, places, values), params, ~finite), finite


def place_as(x: Any, like: Any) -> Any:
    """`x` on the devices of `like`. Where `like` is bound to none, `x` isn't either.

    Bound to other devices than before, it would have programs compiled again. Scalars, and
    residuals that are still zeros, go to wherever the parameters are.
    """
    like = like if isinstance(like, jax.Array) else jnp.asarray(like)
    if isinstance(x, jax.Array) and x.sharding == like.sharding:
        return x
    if not like.committed:
        return jnp.asarray(x)
    if isinstance(x, np.ndarray) and not like.is_fully_addressable:
        # All processes have all of it. `device_put` would compare them.
        return jax.make_array_from_callback(x.shape, like.sharding, lambda index: x[index])
    return jax.device_put(x, like.sharding)


def structs(tree: Any) -> Any:
    """Shapes, dtypes and shardings. What is bound to no device is whole on the others' mesh."""
    whole = _whole(tree)

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        x = jnp.asarray(x)
        there = x.sharding if whole is None or _is_on_mesh(x) else whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    return jax.tree.map(struct, tree)


def _whole(tree: Any) -> NamedSharding | None:
    """A copy on each device of the mesh that arrays are on, or None if there is none."""
    meshes = (x.sharding.mesh for x in jax.tree.leaves(tree) if _is_on_mesh(x))
    mesh = next(meshes, None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def _is_on_mesh(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def shared_leaves(shared: Shared) -> list[tuple[str, Array]]:
    """What all islands have alike, and a snapshot has, with the paths."""
    leaves = tree_flatten_with_path(shared)[0]
    return [(keystr(path), leaf) for path, leaf in leaves if not is_marked(path)]


def with_own(shared: Shared, outer: Any) -> Shared:
    """`shared`, with an island's own arrays, such as residuals, of other outer states."""
    pick = lambda path, x, own: own if is_marked(path) else x
    return shared._replace(outer=tree_map_with_path(pick, shared.outer, outer))


def has_residual(shared: Shared) -> bool:
    """Whether an island keeps what was not sent. `dense` and `decay=0` leave nothing of it."""
    return bool(shared.outer[0].residual)


def _digest(shared: Shared) -> UInt32[Array, " 2"]:
    """Two sums over all bits that islands share. Integer sums don't depend on their order."""
    sums = jnp.zeros(2, jnp.uint32)
    for i, (_, leaf) in enumerate(shared_leaves(shared)):
        x = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        # Of values of 64 bits it makes two.
        words = jnp.dtype(f"uint{8 * min(4, x.dtype.itemsize)}")
        bits = jax.lax.bitcast_convert_type(x, words).reshape(-1).astype(jnp.uint32)
        place = jnp.arange(bits.size, dtype=jnp.uint32) + jnp.uint32(1_000_003 * (i + 1) % 2**32)
        mixed = (bits ^ (bits >> jnp.uint32(15))) * (place * jnp.uint32(0x9E3779B1) | jnp.uint32(1))
        more = (mixed ^ (mixed >> jnp.uint32(13))) * jnp.uint32(0x85EBCA77)
        sums += jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in (mixed, more)])
    return sums
