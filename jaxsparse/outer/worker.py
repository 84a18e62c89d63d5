"""The part of one worker in local steps: a step, an exchange, and going on from its result.

All of it runs on one worker, inside `run_on_workers`. `local_steps` decides when.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array, Bool, Int

from jaxsparse.arrays.layout import check_arrays, named_shapes, narrow
from jaxsparse.arrays.magnitude import all_finite
from jaxsparse.comm import wire
from jaxsparse.comm.marks import PerWorker, key_name, map_marked, own_leaves
from jaxsparse.comm.meshes import kind_of
from jaxsparse.comm.static_leaves import held, released
from jaxsparse.feedback.options import check_transformation
from jaxsparse.feedback.store import states_in
from jaxsparse.feedback.transformations import Exchange
from jaxsparse.outer.fragments import Rows, Streaming
from jaxsparse.training.check import lacks_arguments
from jaxsparse.training.means import check_counts

# Flax's collection of scales and histories of fp8, whose gradients are their next values. The mean
# of workers' largest magnitudes would be too small for one of them.
_MAXIMA = "_overwrite_with_gradient"

# How an exchange ended, as a state has it.
COUNTED, BROKEN, OVERFLOWED = map(np.int32, range(3))

Pick = Callable[[Any], Any]
Step = Callable[..., tuple[Any, Any]]


class LocalState(NamedTuple):
    """The training state of all workers. Orbax saves it, and `jaxsparse.reshard` carries it over.

    Attributes:
        worker: each worker's own training state, marked `PerWorker`.
        params: the global parameters, equal on all workers, in float32 or wider. Evaluate these.
            The next exchange deletes them: keep `jax.tree.map(jnp.copy, state.params)`.
        outer: the states of exchange and optimizer, for each fragment.
        outcome: int32[fragments], the outcome of each fragment's last exchange: COUNTED; BROKEN if
            a worker's parameters or averaged statistics were not finite; OVERFLOWED if a sum, the
            new global parameters or the new outer state were not.
        skipped: int32, number of exchanges that did not count.
        steps: int32, number of steps done.
        arrives: int32[fragments], the number of steps after which the result of each fragment's
            last exchange arrives. It is on its way while that is more than `steps`, and equal to
            `steps` right after an exchange that nothing ran beside.
        weight: float32[fragments] of each worker, marked `PerWorker`: what its steps since a
            fragment's last exchange weigh. () if all workers count alike.
    """

    worker: Any
    params: Any
    outer: tuple[Any, ...]
    outcome: Int[Array, " fragments"]
    skipped: Int[Array, ""]
    steps: Int[Array, ""]
    arrives: Int[Array, " fragments"]
    weight: Any = ()


class Worker(NamedTuple):
    """One worker's part. The attributes are the arguments of `jaxsparse.LocalSteps`.

    `exchange_by` is its `exchange`.
    """

    train: Step
    exchange_by: Exchange
    optimizer: optax.GradientTransformation
    axis_name: str
    params: Pick
    average: Pick | None
    streaming: Streaming
    weight: Pick | None = None

    def start(self, state: Any) -> LocalState:
        """The state of a worker that has this training state. For errors see `LocalSteps`."""
        check_unpacked(state, LocalState, "train.init(state)")
        if own_leaves(state):
            raise ValueError(
                "the state holds arrays of single workers, as the state of a jaxsparse "
                "transformation does: a step exchanges nothing here, so give that as exchange"
            )
        check_arrays("leaf", state)
        places = picked("params", self.params, state)
        if set(places) & set(picked("average", self.average, state)):
            raise ValueError(
                "average picks parameters, which are exchanged anyway: pick statistics"
            )
        if isinstance(params := self.params(state), optax.LookaheadParams):
            raise ValueError(
                "params picks optax.LookaheadParams, of which the slow ones have no gradient: give "
                "params=lambda state: state[0].fast and average=lambda state: state[0].slow"
            )
        params = jax.tree.map(widened, params)
        parts = range(self.streaming.fragments)
        outer = tuple(self.outer(params).init(self.part(params, p)) for p in parts)
        check_optimizer(self.optimizer, outer[0][1], self.part(params, 0))
        return LocalState(
            worker=PerWorker.wrap(state),
            params=params,
            outer=outer,
            outcome=jnp.zeros((len(parts),), jnp.int32),
            skipped=jnp.int32(0),
            steps=jnp.int32(0),
            arrives=jnp.zeros((len(parts),), jnp.int32),
            weight=() if self.weight is None else PerWorker.wrap(jnp.zeros((len(parts),))),
        )

    def step(
        self, worker: Any, batch: Any, steps: Array, weight: Any, *rest: Any
    ) -> tuple[Any, Any, Array, Any]:
        """A step alone: the worker after it, what it shows, steps done, and its weight."""
        after, out = stepped(self.train, PerWorker.unwrap(worker), batch, *rest)
        weight = self._weighed(weight, batch, jnp.bool_(False))
        return PerWorker.wrap(after), PerWorker.wrap(out), steps + 1, weight

    def exchange(self, state: LocalState, fragment: int) -> LocalState:
        """Exchanges a fragment, and lets workers go on from the result."""
        worker = PerWorker.unwrap(state.worker)
        broken = self._broken(worker)
        state = self._exchanged(state, worker, broken, fragment, 0)
        worker = put_back(self.params, worker, state.params, broken)
        if fragment == 0:
            worker = self._averaged(worker, broken)
        worker = self._mixed(worker, state, fragment, self.streaming.mixes(at_once=True))
        return state._replace(worker=PerWorker.wrap(worker))

    def step_beside(
        self, state: LocalState, batch: Any, *rest: Any, fragment: int
    ) -> tuple[LocalState, Any]:
        """A step, and beside it the exchange of a fragment as it was before the step."""
        worker = PerWorker.unwrap(state.worker)
        broken = self._broken(worker)
        after, out = stepped(self.train, worker, batch, *rest)
        after = put_back(self.params, after, state.params, broken)
        if fragment == 0:
            after = self._averaged(after, self._broken(after))
        state = self._exchanged(state, worker, broken, fragment, self.streaming.overlap)
        state = state._replace(
            worker=PerWorker.wrap(after),
            steps=state.steps + 1,
            weight=self._weighed(state.weight, batch, broken),
        )
        return state, PerWorker.wrap(out)

    def mix(self, state: LocalState, fragments: Sequence[int], mixing: float) -> LocalState:
        """Lets workers go on from exchanges that have arrived, with this weight of their own.

        If an exchange did not count, because a worker was broken, the others keep what they still
        have to send.
        """
        worker = PerWorker.unwrap(state.worker)
        for fragment in fragments:
            worker = self._mixed(worker, state, fragment, mixing)
            # Less than the steps done: workers have moved since it began, see `LocalSteps.finish`.
            state = state._replace(arrives=state.arrives.at[fragment].min(state.steps - 1))
        return state._replace(worker=PerWorker.wrap(worker))

    def left(self, state: LocalState) -> Bool[Array, " fragments"]:
        """Whether any worker is elsewhere than at the global parameters, for each fragment."""
        whole = jax.tree.leaves(state.params)
        own = jax.tree.leaves(self.params(PerWorker.unwrap(state.worker)))
        away = [narrow(g, w.dtype) != w for g, w in zip(whole, own)]
        parts = [self._fragment(state.params, p) for p in range(self.streaming.fragments)]
        parts[0] |= dict.fromkeys(self._maxima(state.params))
        moved = lambda part: [jnp.any(taken(away[i], rows)) for i, rows in part.items()]
        found = jnp.stack([jnp.any(jnp.stack(moved(part))) for part in parts])
        return wire.pmax(found.astype(jnp.float32), self.axis_name) > 0

    def _exchanged(
        self, state: LocalState, worker: Any, broken: Bool[Array, ""], fragment: int, overlap: int
    ) -> LocalState:
        """The state after the exchange of a fragment's displacements, if that counts."""
        params = self.part(state.params, fragment)
        own = self.part(self.params(worker), fragment)
        moved = displacement(params, own)
        weight = PerWorker.unwrap(state.weight)
        if self.weight is not None:
            moved = weighted(moved, weight[fragment], self.axis_name)
        before = state.outer[fragment]
        updates, after = self.outer(state.params).update(moved, before, params)
        updated = optax.apply_updates(params, updates)
        flag = jnp.where(broken, jnp.float32(1), jnp.float32(0))
        any_broken = wire.pmax(flag, self.axis_name) > 0
        overflows = has_overflowed((params, before), (updated, after))
        ok = ~any_broken & ~overflows
        kept = lambda new, old: jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
        outer = list(state.outer)
        outer[fragment] = kept(after, before)
        outcome = jnp.where(any_broken, BROKEN, jnp.where(overflows, OVERFLOWED, COUNTED))
        part = self._fragment(state.params, fragment)
        merged = with_rows(state.params, part, jax.tree.leaves(kept(updated, params)))
        if fragment == 0:
            merged = self._with_maxima(merged, worker, ok)
        if self.weight is not None:
            # Workers keep what they still have to send, and others go back with all their moves.
            rest = jnp.where(outcome == BROKEN, weight, weight.at[fragment].set(0))
            weight = jnp.where(broken, jnp.zeros_like(weight), rest)
        return state._replace(
            params=merged,
            outer=tuple(outer),
            outcome=state.outcome.at[fragment].set(outcome),
            skipped=state.skipped + jnp.where(ok, 0, 1),
            arrives=state.arrives.at[fragment].set(state.steps + overlap),
            weight=PerWorker.wrap(weight),
        )

    def _weighed(self, weight: Any, batch: Any, is_dropped: Bool[Array, ""]) -> Any:
        """The weights after a step on this batch, which weighs nothing if its moves are dropped."""
        if self.weight is None:
            return ()
        own = self.weight(released(batch))
        found = f"is {str(own)[:40]} of type {type(own).__name__}"
        if is_number := isinstance(own, int | float | np.generic | np.ndarray | jax.Array):
            shape, dtype = jnp.shape(own), jnp.result_type(own)
            is_number = shape == () and jnp.issubdtype(dtype, jnp.number)
            is_number &= not jnp.issubdtype(dtype, jnp.complexfloating)
            found = f"has shape {shape} and dtype {dtype}"
        if not is_number:
            raise ValueError(
                f"weight {found}, but it is one number for a worker: give its number of tokens, "
                'as weight=lambda batch: batch["mask"].sum() counts them'
            )
        check_counts("weight", dtype)
        own = jnp.where(is_dropped, 0, jnp.asarray(own).astype(jnp.float32))
        return jax.tree.map(lambda before: before + own, weight)

    def _mixed(self, worker: Any, state: LocalState, fragment: int, mixing: float) -> Any:
        """The worker after a fragment's last exchange: mixed with it, unchanged, or set back."""
        places = picked("params", self.params, worker)
        leaves, whole = jax.tree.leaves(worker), jax.tree.leaves(state.params)
        own, outcome = self._fragment(state.params, fragment), state.outcome[fragment]

        def mixed(w: Array, g: Array) -> Array:
            # A worker that has the global values must keep them: weighted sums could round.
            wide = widened(w) + (1 - mixing) * (g - widened(w)) if mixing else g
            back = jnp.where(outcome == OVERFLOWED, narrow(g, w.dtype), w)
            return jnp.where(outcome == COUNTED, narrow(wide, w.dtype), back)

        values = [mixed(taken(leaves[places[i]], r), taken(whole[i], r)) for i, r in own.items()]
        worker = with_rows(worker, {places[i]: rows for i, rows in own.items()}, values)
        maxima, values = self._maxima(state.params) if fragment == 0 else [], []
        for i in maxima:
            w, g = leaves[places[i]], narrow(whole[i], leaves[places[i]].dtype)
            # A worker may have seen more beside the exchange.
            counted = jnp.where(outcome == OVERFLOWED, g, jnp.maximum(w, g))
            values.append(jnp.where(outcome == BROKEN, w, counted))
        return replaced(worker, [places[i] for i in maxima], values)

    def _broken(self, worker: Any) -> Bool[Array, ""]:
        """Whether this worker's parameters or averaged statistics are not finite."""
        leaves = jax.tree.leaves(worker)
        places = picked("params", self.params, worker)
        places += picked("average", self.average, worker)
        return ~all_finite([leaves[i] for i in places])

    def _averaged(self, worker: Any, broken: Bool[Array, ""]) -> Any:
        """The worker with the mean statistics of those that are not broken."""
        places = picked("average", self.average, worker)
        leaves = jax.tree.leaves(worker)
        if not places:
            return worker
        summed = lambda x: wire.psum(jnp.where(broken, jnp.zeros_like(x), x), self.axis_name)
        healthy = summed(jnp.float32(1))

        def mean(x: Array) -> Array:
            wide = widened(x)
            # Divided before, because the sum of large numbers could overflow.
            found = summed(wide / jnp.maximum(healthy, 1).astype(wide.dtype))
            return jnp.where(healthy > 0, narrow(found, x.dtype), x)

        return replaced(worker, places, [mean(leaves[i]) for i in places])

    def _maxima(self, params: Any) -> list[int]:
        """The places of the maxima among the parameters."""
        paths = [path for path, _ in tree_flatten_with_path(params)[0]]
        return [i for i, path in enumerate(paths) if _MAXIMA in keystr(path)]

    def _with_maxima(self, params: Any, worker: Any, ok: Bool[Array, ""]) -> Any:
        """The global parameters with the maxima of all workers, if an exchange counts."""
        whole, own = jax.tree.leaves(params), jax.tree.leaves(self.params(worker))
        places = self._maxima(params)
        highest = lambda i: wire.pmax(widened(own[i]), self.axis_name)
        return replaced(params, places, [jnp.where(ok, highest(i), whole[i]) for i in places])

    def outer(self, params: Any) -> optax.GradientTransformationExtraArgs:
        """Exchange and optimizer, one behind the other, for parts of these parameters."""
        return optax.chain(self.exchange_by.of_parts(params), self.optimizer)

    def _fragment(self, params: Any, fragment: int) -> dict[int, Rows]:
        """The places of a fragment's leaves among those of the parameters, and its rows of each."""
        return self.streaming.places(params, without=_MAXIMA)[fragment]

    def part(self, params: Any, fragment: int) -> Any:
        """The parameters of this fragment alone, see `part_of`."""
        return part_of(params, self._fragment(params, fragment))


def stepped(step: Step, worker: Any, *args: Any) -> tuple[Any, Any]:
    """The result of a step of one worker. Equinox modules are held (`comm.static_leaves`).

    ValueError: it is no pair, or its state is not like the one before.
    """
    result = held(step(*released((worker, *args))))
    what = "step must return (state, out), with a state like the one that it is given"
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{what}, but returns {type(result).__name__}: return (state, None)")
    before, after = _kinds(worker), _kinds(result[0])
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            raise ValueError(
                f"{what}: leaf{name} was {_described(before.get(name))} and becomes "
                f"{_described(after.get(name))}"
            )
    return result


def check_exchange(exchange: Any, optimizer: Any) -> None:
    """Raises ValueError unless they are an exchange, without a delay, and an optimizer of Optax."""
    if not isinstance(exchange, Exchange):
        raise ValueError(
            f"exchange={exchange!r} is no exchange of this library alone: give an exchange and an "
            'optimizer that applies its means, such as jaxsparse.quantized("int4") and '
            "optax.sgd(1.0)"
        )
    check_transformation("optimizer", optimizer, "optax.sgd(1.0)")
    # Workers go on from the global parameters. With a delay these would lack the moves just
    # exchanged, so that workers would lose them for H steps, and the last ones for ever.
    if exchange.settings.is_delayed:
        raise ValueError(
            "exchange has delay=1, but workers would go on without the displacements that it holds "
            "back: leave delay out. To overlap exchanges with steps, give LocalSteps "
            "streaming=jaxsparse.outer.Streaming(fragments, overlap=1)"
        )


def check_memory(state: Any) -> None:
    """Raises ValueError if an array of a training state lies in another memory than a device's."""
    for path, x in tree_flatten_with_path(state)[0]:
        if (kind := kind_of(x)) is not None:
            raise ValueError(
                f"leaf{keystr(path)} lies in the memory {kind!r}, but exchanges compute with all "
                "of a worker's state, which JAX does on the devices' own: begin with "
                "jax.device_put(state, jax.memory.Space.Device)"
            )


def check_unpacked(state: Any, kind: type, target: str) -> None:
    """Raises ValueError if a training state is a saved one of `kind`, restored as dict or tuple.

    `target` is the call that makes a target to restore into, in words.
    """
    fields: tuple[str, ...] = vars(kind)["_fields"]
    is_dict = isinstance(state, Mapping) and {*fields} - {"weight"} <= {*state}  # Orbax drops ()
    is_tuple = type(state) in (tuple, list) and len(state) == len(fields)
    if is_dict or (is_tuple and own_leaves(state)):
        raise ValueError(
            f"state is a {type(state).__name__} with the fields of {kind.__name__}, as Orbax "
            "restores a checkpoint without a target: restore it with one, as by orbax.checkpoint."
            f"args.StandardRestore({target}), where state is a first training state"
        )


def check_optimizer(optimizer: optax.GradientTransformation, state: Any, params: Any) -> None:
    """Raises ValueError unless an outer step can run an optimizer, which starts with this state."""
    if states_in(state):
        raise ValueError(
            "optimizer holds an exchange, which would exchange the mean once more: give the "
            "exchange as exchange, and a plain Optax optimizer, such as optax.sgd(1.0)"
        )
    tx = optax.with_extra_args_support(optimizer)
    step = lambda params, state: tx.update(params, state, params)[1]
    params, before = _at_first(optimizer, params)
    try:
        after = jax.eval_shape(step, params, before)
    except AttributeError as error:
        raise ValueError(
            f"optimizer does not take the parameters as they are ({error}): give one that does, "
            "such as optax.sgd(1.0). In the place of optax.lookahead(optimizer, k, alpha) give "
            "every=k and optax.sgd(alpha), and let step use its optimizer"
        ) from error
    except TypeError as error:
        if not lacks_arguments(error):
            raise
        raise ValueError(
            f"optimizer can't run in an outer step, which has no loss to give it ({error}): give "
            "one that goes by updates alone, such as optax.sgd(1.0), and let the optimizer of step "
            "go by the loss"
        ) from error
    if (old := named_shapes(before)) != (new := named_shapes(after)):
        raise ValueError(
            "optimizer can't run in an outer step, because its update changes the arrays of its "
            f"state from {old} to {new}, as optax.monitor does: leave it out, and measure the "
            "global parameters beside the step"
        )


def _at_first(optimizer: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """The shapes of parameters, on no mesh, and of an optimizer's first state."""
    struct = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    params = jax.tree.map(struct, params)
    return params, jax.eval_shape(optimizer.init, params)


def check_outer(optimizer: optax.GradientTransformation, state: Any, params: Any) -> None:
    """Raises ValueError if a saved state of an outer optimizer is that of another one."""
    there, needed = named_shapes(state), named_shapes(_at_first(optimizer, params)[1])
    for name in [*there, *needed]:
        if there.get(name) != needed.get(name):
            words = lambda shape: "nothing" if shape is None else f"an array of shape {shape}"
            raise ValueError(
                f"the state was made with another optimizer: its optimizer's state has "
                f"{words(there.get(name))} at {name}, and this optimizer needs "
                f"{words(needed.get(name))}: give the same, or start anew with its global "
                "parameters"
            )


def displacement(params: Any, own: Any) -> Any:
    """Global parameters less a worker's own.

    They are in the worker's precision, because rounding the global ones to it is not a move.
    """
    return jax.tree.map(lambda g, w: widened(narrow(g, w.dtype)) - widened(w), params, own)


def weighted(moved: Any, weight: Array, axis_name: str) -> Any:
    """A worker's displacement, scaled so that the mean over workers is that by weights.

    It is 0 where the weight is 0, and everywhere if all weights are 0. It is NaN where a weight is
    negative or NaN, or if their sum is infinite, so that the exchange skips the step.
    """
    own = weight.astype(jnp.result_type(float))
    mean = wire.psum(wire.varying(own, axis_name), axis_name) / wire.axis_size(axis_name)
    share = jnp.where(own > 0, own / jnp.where(mean > 0, mean, 1), 0)
    share = jnp.where((own >= 0) & jnp.isfinite(mean), share, jnp.nan)
    # A displacement that does not count may be infinite.
    return jax.tree.map(lambda x: jnp.where(share == 0, 0, x * share.astype(x.dtype)), moved)


def put_back(select: Pick, worker: Any, params: Any, broken: Bool[Array, ""]) -> Any:
    """A broken worker with the global parameters, and without numbers that are not finite."""
    places = picked("params", select, worker)
    to = dict(zip(places, jax.tree.leaves(params)))

    def leaf(i: int, x: Array) -> Array:
        if i in to:
            return jnp.where(broken, narrow(to[i], x.dtype), x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(broken & ~jnp.isfinite(x), jnp.zeros_like(x), x)

    leaves, treedef = jax.tree.flatten(worker)
    return jax.tree.unflatten(treedef, [leaf(i, jnp.asarray(x)) for i, x in enumerate(leaves)])


def _kinds(tree: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each leaf, by path."""
    leaves = tree_flatten_with_path(tree)[0]
    return {keystr(path): (jnp.shape(x), jnp.result_type(x)) for path, x in leaves}


def _described(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def skips(outer: Any) -> Array:
    """How many steps the exchanges of an outer optimizer have skipped."""
    return sum((one.skipped for one in states_in(outer)), jnp.int32(0))


def has_overflowed(before: Any, after: Any) -> Bool[Array, ""]:
    """Whether global parameters or the outer state were finite before an outer step, and aren't.

    They are the same on all workers, and so is this. An infinity that was there before, such as the
    bound of a clip that is off, may stay.
    """
    equal = lambda tree: jax.tree.leaves(map_marked(lambda x, is_own: 0 if is_own else x, tree))
    broke = [
        jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new))
        for old, new in zip(equal(before), equal(after))
        if jnp.issubdtype(jnp.result_type(new), jnp.inexact)
    ]
    return jnp.any(jnp.array(broke)) | (skips(after) != skips(before))


def widened(x: Any) -> Array:
    """A floating-point array in float32, or in its own dtype if that is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def taken(x: Array, rows: Rows) -> Array:
    """Some rows of a leaf."""
    return x if rows is None else x[rows]


def part_of(tree: Any, places: Mapping[int, Rows]) -> Any:
    """A tree with the rows at some places alone; None stands for other leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    part = [taken(x, places[i]) if i in places else None for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, part)


def replaced(tree: Any, places: list[int], values: list[Array]) -> Any:
    """The tree with other leaves at some places."""
    return with_rows(tree, dict.fromkeys(places), values)


def with_rows(tree: Any, places: Mapping[int, Rows], values: list[Array]) -> Any:
    """The tree with other rows of leaves at some places."""
    leaves, treedef = jax.tree.flatten(tree)
    for (i, rows), value in zip(places.items(), values):
        leaves[i] = value if rows is None else leaves[i].at[rows].set(value)
    return jax.tree.unflatten(treedef, leaves)


def picked(name: str, select: Pick | None, state: Any) -> list[int]:
    """The places of the leaves that `select` picks, among those of a state.

    ValueError: it picks nothing, or something else than floating-point arrays of the state.
    """
    if select is None:
        return []
    leaves, treedef = jax.tree.flatten(state)
    found: list[tuple[Any, int | None]] = []

    def look(leaves: list[Array]) -> None:
        # Each is an object of its own, and an array as functions that pick by type expect it.
        places = {id(x): i for i, x in enumerate(leaves)}
        of_tree = tree_flatten_with_path(select(jax.tree.unflatten(treedef, leaves)))[0]
        found.extend((path, places.get(id(x))) for path, x in of_tree)

    try:
        jax.eval_shape(look, leaves)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} must pick arrays of the state as they are, without changing them: {error}"
        ) from error
    for path, i in found:
        if i is None or not jnp.issubdtype(jnp.result_type(leaves[i]), jnp.floating):
            what = "no leaf of the state" if i is None else jnp.result_type(leaves[i])
            raise ValueError(
                f"{name} picks leaf{keystr(path)}, which is {what}: pick floating-point arrays of "
                "the state as they are"
            )
    if not found:
        raise ValueError(f"{name} picks nothing of the state: pick at least one array")
    return [i for _, i in found if i is not None]


def second_copies(params: Pick, average: Pick | None, state: Any) -> list[str]:
    """The names of arrays that start as copies of the parameters, and are not averaged.

    Schedule-free's z is known by its name. An abstract state has no values by which to know others.
    """
    skipped = {*picked("params", params, state), *picked("average", average, state)}
    likes = dict(tree_flatten_with_path(params(state))[0])
    found = []
    for i, (path, x) in enumerate(tree_flatten_with_path(state)[0]):
        at = next((n for n in range(1, len(path) + 1) if path[n:] in likes), None)
        if at is None or i in skipped or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            continue
        like = likes[path[at:]]
        if jnp.shape(x) != jnp.shape(like) or 0 in jnp.shape(x):
            continue
        # A copy lies as its original does, and arrays of unlike types can't be compared.
        is_known = not isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
        is_known &= getattr(x, "sharding", None) == getattr(like, "sharding", None)
        if key_name(path[at - 1]) == "z" or (is_known and bool(_is_copy(x, like))):
            found.append(f"leaf{keystr(path)}")
    return found


@jax.jit
def _is_copy(x: Array, like: Array) -> Bool[Array, ""]:
    """Whether an array is a copy. Zeros of moments are none of the zeros of a bias."""
    return jnp.all(x == narrow(like, x.dtype)) & (jnp.max(x) != jnp.min(x))
