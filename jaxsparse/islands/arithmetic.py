"""The compiled parts of a round. They know nothing of stores, names and waiting.

What all islands must compute alike is one program, `outer_step`. All run it, also those whose
message does not count or that only replay. So they get the same bits, as far as their devices and
compilers agree. What stays with an island itself comes from other programs.

A round exchanges one fragment of the parameters, and programs take its number, `part`. An exchange
moves the others only if it passes rounds of theirs, and an island's own moves of them go on.
"""

import functools
import hashlib
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path
from jaxtyping import Array, Bool, Float, UInt32

from jaxsparse.arrays.layout import check_arrays, narrow
from jaxsparse.arrays.magnitude import all_finite, norms
from jaxsparse.comm.marks import is_marked, map_marked, own_leaves
from jaxsparse.feedback import Exchange
from jaxsparse.islands.records import DTYPES
from jaxsparse.outer.fragments import Streaming
from jaxsparse.outer.worker import (
    Pick,
    check_exchange,
    check_optimizer,
    check_outer,
    displacement,
    has_overflowed,
    part_of,
    picked,
    put_back,
    replaced,
    second_copies,
    taken,
    widened,
    with_rows,
)
from jaxsparse.processes.digest import Digested


class Shared(NamedTuple):
    """What all islands of a run have alike, bit for bit, as a round begins."""

    params: Any  #: the global parameters, in float32 or wider
    #: the states of exchange and optimizer, for each fragment. Arrays marked `PerWorker`, such as
    #: residuals, are this island's own.
    outer: tuple[tuple[Any, Any], ...]


class Begun(NamedTuple):
    """An island's half of an exchange."""

    words: UInt32[Array, " words"]  # its message
    posted: Any  # what stays with it
    # Its own parameters when it began, in float32 or wider, and in fragments that it has not sent
    # since then the global ones.
    origin: Any
    own: Any  # its own parameters when it began, or None if there is one fragment
    finite: Bool[Array, ""]  # whether these, and what they moved, were finite


class Arithmetic:
    """Programs for an exchange and an optimizer. For the settings see `Islands`."""

    def __init__(
        self,
        exchange: Exchange,
        optimizer: optax.GradientTransformation,
        params: Pick,
        weighted: bool = False,
        fragments: int = 1,
        norm_bound: float | None = None,
    ) -> None:
        check_exchange(exchange, optimizer)
        if (name := exchange.settings.axis_name) is not None:
            raise ValueError(
                f"exchange has axis_name={name!r}, which is for workers of one program, and each "
                "island is a program: make it with axis_name=None, as in "
                "jaxsparse.top_k(0.01, axis_name=None)"
            )
        self.is_weighted, self._norm_bound = weighted, norm_bound
        self._places = Streaming(fragments, overlap=0).places
        self._exchange = exchange
        self._optimizer = optax.with_extra_args_support(optimizer)
        self.pick = params
        self._make = lambda params: tuple(
            (exchange.of_parts(params).init(part), optimizer.init(part))
            for part in (part_of(params, places) for places in self._places(params))
        )
        # The step may donate its own state.
        self.copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self._widen = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.copy(widened(x)), tree))
        self.has_moved = jax.jit(lambda worker, new: has_moved(new, params(worker)))
        # A training state at the global parameters, without numbers that are not finite.
        self.put_back = jax.jit(lambda worker, new: put_back(params, worker, new, jnp.bool_(True)))
        jit = functools.partial(jax.jit, static_argnames="part")
        self.begin = jit(self._begin)
        self.outer_step = jit(self._outer_step)
        self.owed = jit(functools.partial(self._own, counts=False))
        self.sent = jit(functools.partial(self._own, counts=True))
        self.go_on = jax.jit(self._go_on)
        self.digest = jax.jit(_digest)

    def start(self, state: Any) -> Shared:
        """The shared part of the first island, from its training state, which it checks."""
        if own_leaves(state):
            raise ValueError(
                "the state holds arrays of single workers, as the state of a jaxsparse "
                "transformation does. An island's own step may exchange between its devices only "
                "without a residual, such as by jaxsparse.dense: leave compression to exchange"
            )
        check_arrays("leaf", state)
        if found := second_copies(self.pick, None, state):  # raises where `pick` is wrong
            warnings.warn(
                f"{found[0]} starts as a copy of the parameters (so do {len(found)} arrays of the "
                "state), and islands exchange parameters alone: copies stray from each other, and "
                "an optimizer that goes by them pulls parameters back (docs/local.md). Take one "
                "without, or leave a mean of parameters out and make it of state.params",
                stacklevel=2,
            )
        params = self._widen(self.pick(state))
        outer = self._init_state(params)
        for path, leaf in tree_flatten_with_path(outer)[0]:
            if leaf.dtype.name not in DTYPES:
                raise ValueError(
                    f"the state of exchange and optimizer holds {leaf.dtype.name} at "
                    f"{keystr(path)}, which snapshots can't hold. Random keys, as those of "
                    "optax.add_noise, may stand in the state of step"
                )
        check_optimizer(self._optimizer, outer[0][1], part_of(params, self._places(params)[0]))
        return Shared(params, outer)

    def keeps_all(self, shared: Shared, part: int) -> bool:
        """Whether all leaves of a fragment have a residual: uncompressed ones have none."""
        count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
        whole = part_of(shared.params, self._places(shared.params)[part])
        return count(shared.outer[part][0].residual) >= count(whole)

    def check_optimizer_of(self, saved: Shared) -> None:
        """Raises ValueError if a saved state is that of another optimizer."""
        for (_, own), places in zip(saved.outer, self._places(saved.params)):
            check_outer(self._optimizer, own, part_of(saved.params, places))

    def describe(self, shared: Shared, own: Any) -> tuple[tuple[int, ...], str]:
        """The words of each fragment's message, and a digest of what islands must have in common.

        That is `outer_step`, what it works on, and the names of arrays. Of `shared` and of
        the island's own parameters shapes and dtypes count alone. Raises ValueError if
        `exchange` is none, or not of one message.
        """
        shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))  # no weak types
        shared, own = jax.tree.map(shape, (shared, own))
        part_begun = lambda part: jax.eval_shape(
            functools.partial(self._begin, part=part), own, shared.params, shared.outer, 0
        )
        try:
            begun = [part_begun(part) for part in range(len(shared.outer))]
        except ValueError as error:
            error.add_note(
                "islands are programs of their own, so exchange must send one message; what "
                "applies the mean is optimizer"
            )
            raise
        found = [f"{path} {x.shape} {x.dtype}" for path, x in shared_leaves(shared)]
        words = tuple(each.words.size for each in begun)
        for part, (count, half) in enumerate(zip(words, begun)):
            step = functools.partial(self._outer_step, part=part)
            program = jax.make_jaxpr(step)(*self._received(2, count), half, shared)
            found.append(Digested(program, None, ()).digest)
        return words, hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()

    def prepare(self, members: int, part: int, begun: Begun, before: Shared) -> None:
        """Compiles `outer_step` for so many messages, and does not run it."""
        received = self._received(members, begun.words.size)
        self.outer_step.lower(*received, begun, before, part=part).compile()

    def _received(self, members: int, words: int) -> tuple[Any, Any]:
        """The shapes of messages that count, and of their weights."""
        weights = jax.ShapeDtypeStruct((members,), jnp.float32) if self.is_weighted else None
        return jax.ShapeDtypeStruct((members, words), jnp.uint32), weights

    def without_debts(self, shared: Shared) -> Shared:
        """Without anything of this island's own, as it starts."""
        return with_own(shared, self._init_state(shared.params))

    def without_moves(self, begun: Begun) -> Begun:
        """Without what was moved before, in all fragments."""
        return begun if begun.own is None else begun._replace(origin=self._widen(begun.own))

    def _init_state(self, params: Any) -> Any:
        """The outer states as they start, cut over devices as the parameters are.

        Zeros depend on no parameter, so that XLA alone would put all of them on one device.
        """
        leaves = jax.tree.leaves(params)
        cuts = {x.shape: x.sharding for x in leaves if _is_on_mesh(x)}
        for i, rows in (item for places in self._places(params) for item in places.items()):
            if rows is not None and _is_on_mesh(x := leaves[i]):  # rows may not divide the axis
                shape = jax.eval_shape(functools.partial(taken, rows=rows), x).shape
                rest = PartitionSpec(None, *x.sharding.spec[1:])
                cuts.setdefault(shape, NamedSharding(x.sharding.mesh, rest))
        whole = _whole(params)

        def place(x: jax.ShapeDtypeStruct, is_own: bool) -> NamedSharding | None:
            if whole is None:
                return None
            like = cuts.get(x.shape[is_own:], whole)  # behind the axis of workers, see `PerWorker`
            return NamedSharding(like.mesh, PartitionSpec(*[None] * is_own, *like.spec))

        there = map_marked(place, jax.eval_shape(self._make, params))
        return jax.jit(self._make, out_shardings=there)(params)

    def _begin(self, own: Any, origin: Any, outer: Any, rank: Any, part: int = 0) -> Begun:
        """A message of how far an island's own parameters are from an origin, in a fragment.

        By its `rank` islands draw differently.
        """
        places = self._places(own)
        finite = all_finite(jax.tree.leaves(own))
        moved = displacement(*(part_of(tree, places[part]) for tree in (origin, own)))
        moved = jax.tree.map(lambda x: jnp.where(finite, x, 0), moved)
        words, posted = self._exchange.of_parts(own).post(moved, outer[part][0], rank=rank)
        # What it has not moved must look so in its own precision.
        origin = jax.tree.map(lambda g, w: widened(narrow(g, w.dtype)), origin, own)
        here = jax.tree.map(lambda w: jnp.copy(widened(w)), own)
        origin = with_rows(origin, places[part], jax.tree.leaves(part_of(here, places[part])))
        own = None if len(places) == 1 else jax.tree.map(jnp.copy, own)
        # All leave out a message that says it is not finite, as after a move beyond float32. An
        # island that sent it would wait for a decision without end if no other one makes it.
        return Begun(words, posted, origin, own, finite & (words[0] == 0))

    def _outer_step(
        self,
        messages: UInt32[Array, "members words"],
        weights: Float[Array, " members"] | None,
        begun: Begun,
        before: Shared,
        part: int = 0,
    ) -> tuple[Shared, Bool[Array, ""], Bool[Array, " members"]]:
        """What follows for all, whether it counts, and which messages are within the bound.

        If a sum overflows, all stay as before.
        """
        places, (sent, moments) = self._places(before.params)[part], before.outer[part]
        params = part_of(before.params, places)
        exchange = self._exchange.of_parts(before.params)
        within = jnp.ones(len(messages), jnp.bool_)
        if self._norm_bound is not None:
            of_one = lambda one: exchange.receive(one[None], begun.posted, params, sent)[0]
            found = jax.lax.map(lambda one: _norm(of_one(one)), messages)
            # Of two the smaller one, so that the larger one can be too large.
            median = jnp.sort(found)[(len(messages) - 1) // 2]
            within = (found <= self._norm_bound * median) | (median == 0)
            weights = jnp.where(within, jnp.float32(1) if weights is None else weights, 0)
        mean, sent = exchange.receive(messages, begun.posted, params, sent, weights=weights)
        updates, moments = self._optimizer.update(mean, moments, params)
        after = Shared(optax.apply_updates(params, updates), ((sent, moments),))
        started = Shared(params, before.outer[part : part + 1])
        ok = ~has_overflowed(started, after)
        params, outer = jax.tree.map(functools.partial(jnp.where, ok), after, started)
        merged = with_rows(before.params, places, jax.tree.leaves(params))
        return Shared(merged, _with(before.outer, part, outer[0])), ok, within

    def _own(self, begun: Begun, before: Shared, counts: bool, part: int = 0) -> Any:
        """The outer states, of which an island's own part is right, without others' messages.

        If its own does not count, it keeps all.
        """
        params, (sent, moments) = before.params, before.outer[part]
        words, like = begun.words[None], part_of(params, self._places(params)[part])
        exchange = self._exchange.of_parts(params)
        _, sent = exchange.receive(words, begun.posted, like, sent, counts=counts)
        return _with(before.outer, part, (sent, moments))

    def _go_on(self, worker: Any, begun: Begun, params: Any) -> tuple[Any, Bool[Array, ""]]:
        """A training state that goes on from new global parameters, and whether it was finite.

        Moves that the island made since it began are kept. If they are not finite, it starts anew.
        """
        places = picked("params", self.pick, worker)
        leaves = jax.tree.leaves(worker)

        def moved_on(i: int, g: Array, origin: Array) -> Array:
            own = widened(leaves[i])
            # Where it has not moved, it gets exactly the global parameters. Where these have not,
            # it stays exactly where it is.
            rests = widened(narrow(g, leaves[i].dtype)) == origin
            moved = jnp.where(rests, own, g + (own - origin))
            return narrow(jnp.where(own == origin, g, moved), leaves[i].dtype)

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


def has_residual(shared: Shared, parts: Iterable[int] | None = None) -> bool:
    """Whether an island keeps what was not sent of any fragment, or of any of `parts`.

    `dense` and `decay=0` leave nothing of it.
    """
    parts = range(len(shared.outer)) if parts is None else parts
    return any(shared.outer[part][0].residual for part in parts)


def has_moved(params: Any, own: Any) -> Bool[Array, ""]:
    """Whether an island's own parameters are others than the global ones."""
    moved = jax.tree.leaves(displacement(params, own))
    return jnp.stack([jnp.bool_(False), *(jnp.any(x != 0) for x in moved)]).any()


def _norm(tree: Any) -> Float[Array, ""]:
    parts = [norms(x.astype(jnp.float32), axis=None) for x in jax.tree.leaves(tree)]
    return norms(jnp.stack(parts), axis=None)


def _with(outer: tuple[Any, ...], part: int, one: Any) -> tuple[Any, ...]:
    """The outer states with another one of a fragment."""
    return (*outer[:part], one, *outer[part + 1 :])


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
