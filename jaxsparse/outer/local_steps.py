"""Local steps: each worker trains alone for H steps, then workers exchange their displacements.

There are two compiled programs, never one with a condition: an inner step without any communication
over the axis of the workers, and an outer step that exchanges displacements, global parameters less
a worker's own. So the HLO of each program shows the bytes that it sends, and an inner step costs as
much as a trainer's step without this library.

A displacement takes the place of a gradient. So any transformation of this library exchanges it,
with its residual as the worker's memory, and any Optax optimizer applies the mean.

With `Streaming` the outer step has one program for each fragment. With an overlap, that program is
an inner step as well, and nothing in this step reads what the exchange delivers: a backend with
asynchronous collectives runs both side by side. (An exchange in a program of its own would not
overlap on GPUs, which run one program after the other.) So an exchange ends with its program, and
a longer `overlap` only delays the use of its result.
"""

import functools
import numbers
import warnings
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxsparse import traffic
from jaxsparse.arrays.settings import Stages, check_function, static_int
from jaxsparse.comm.marks import is_per_worker
from jaxsparse.comm.static_leaves import floats_of_modules, held, released, with_flags_held
from jaxsparse.comm.workers import Workers
from jaxsparse.feedback import Exchange
from jaxsparse.outer.abstract import shapes_of
from jaxsparse.outer.fragments import Streaming
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.outer.worker import (
    BROKEN,
    LocalState,
    Pick,
    Step,
    Worker,
    check_exchange,
    check_memory,
    check_outer,
    second_copies,
)
from jaxsparse.processes.agreement import agree, compare_texts
from jaxsparse.processes.group import group_of
from jaxsparse.training.batches import AS_OTHER_SHAPE, as_long, check_closed_over
from jaxsparse.training.check import check
from jaxsparse.training.sharding import shard


def params_of(state: Any) -> Any:
    """The parameters of a training state: its `params`, or the first item of a tuple.

    Of Equinox modules in them, their floating-point arrays.
    """
    if hasattr(state, "params"):
        return floats_of_modules(state.params)
    if type(state) is tuple and state:
        return floats_of_modules(state[0])
    raise ValueError(
        f"params=None finds no parameters in a state of type {type(state).__name__}: give a "
        "function that picks them, as params=lambda state: state['params']"
    )


class LocalSteps:
    """Trains with local steps, and exchanges displacements after every H of them.

        optimizer = optax.sgd(0.7, 0.6, nesterov=True)
        train = jaxsparse.LocalSteps(step, jaxsparse.quantized("int4"), optimizer, mesh, every=30)
        state = train.init((params, tx.init(params)))
        for t, batch in enumerate(batches):
            state, loss = train(state, batch, t)
        params = state.params

    `step(state, batch)` is an ordinary training step of one worker on its own share of the batch.
    It returns the next state and anything to be shown, and does not communicate: no exchange, no
    mean over workers. An outer step then takes the displacement D_w = theta - theta_w on each
    worker, where theta are the global parameters and theta_w its own. `exchange` takes D_w for a
    gradient, and `optimizer` the mean D. The update is added to theta, and all workers go on from
    there. Inner optimizer states, which differ between workers, are neither reset nor averaged. See
    `average` for those that hold a second copy of the parameters.

    docs/local.md has the pairs of exchange and optimizer that are published (DiLoCo, SparseLoCo,
    local SGD, BMUF), what they cost, and which to begin with.

    **Not finite.** If a parameter or a statistic of `average` is not finite on any worker, the
    outer step counts for nothing: global parameters and outer state stay. That worker goes back to
    the global parameters, and all other numbers of its state (moments, statistics) that are not
    finite become 0. The other workers keep their progress, which the next outer step exchanges. If
    parameters are finite, but their sum or the update is not, all workers go back to the global
    parameters. `state.skipped` counts these outer steps.

    **Randomness.** All workers start with the same state, keys included. Fold the worker's number
    in where a key is used: `jax.random.fold_in(key, jax.lax.axis_index(axis_name))`.

    **Going on.** A saved state is all that training needs: it knows how many steps it has done, and
    which exchanges are on their way, so `every` and `overlap` may be others from then on. To go on
    with another number of workers, save right after an outer step: `jaxsparse.reshard` averages the
    progress of workers since then, and would spread numbers that are not finite.

    **The end.** Steps after the last outer step are not in `state.params`. `finish` exchanges
    them, too.

    **Few bits.** Keep float32 in the state, and cast in the loss. A worker whose own parameters are
    bfloat16 loses moves below half a unit in the last place, with and without exchanges.

    **Scales of fp8.** Parameters in Flax's collection `_overwrite_with_gradient`, the histories of
    largest magnitudes and what is scaled by them, have no displacements. An outer step (of fragment
    0, with streaming) gives all workers the maximum over workers, uncompressed.

    **Programs.** `inner` is a compiled function of `state.worker`, a batch, `state.steps`,
    `state.weight`, and what else `step` takes. `outer`, `streamed` and `mixed` are lists of one
    compiled function for each fragment p (0 without streaming). `outer[p]` takes a state and
    exchanges the fragment. `streamed[p]` takes a state, a batch and what else `step` takes, and
    makes a step beside the exchange. `mixed[p]` takes a state, and lets workers go on from an
    exchange that has arrived. `jaxsparse.wire_bytes(train.outer[0], state)` counts the bytes that
    an outer step sends.

    Args:
        step: `step(state, batch)`, see above. A state is any tree of arrays: (params, opt_state), a
            linen `TrainState`, the state of `nnx.split`. Equinox modules may be in it, and in
            batches, as they are. A step may take more arguments behind the batch, such as a key.
        exchange: the transformation that exchanges displacements.
        optimizer: the Optax optimizer that applies their mean. Schedules count outer steps.
        mesh: the mesh, or the number of workers to simulate on one device. Other axes than
            `axis_name` are left to JAX, as in `jaxsparse.value_and_grad`, so a worker may be
            many devices.
        axis_name: the axis of the workers.
        every: number of steps from one outer step to the next, H, or `jaxsparse.Stages` of it by
            steps: `Stages((1, 30), (1000,))` is post-local SGD (Lin et al., ICLR 2020). A stage
            begins with an outer step.
        params: function that picks the parameters from a state. None: `state.params`, or the first
            item of a plain tuple, and of Equinox modules in them the floating-point arrays: the
            others stay each worker's, and `eqx.combine(state.params, model)` adds them. For an nnx
            state: `lambda s: nnx.filter_state(s, nnx.Param)`.
        average: function that picks statistics from a state, such as those of BatchNorm, or second
            copies of parameters, such as schedule-free's z or a mean over steps. Each outer step
            (of fragment 0, with streaming) averages them over workers. They travel uncompressed.
            None: each worker keeps its own, and `init` warns of copies that it sees.
        weight: function of a worker's share of a batch that gives what it counts, such as its
            number of tokens: a real scalar, at least 0. A displacement then counts what its steps
            weigh together, so that the mean is over all tokens. One of weight 0 does not count.
            Residuals hold weighted displacements. None: all workers count alike.
        streaming: how to exchange fragments in turn; None: all at once.

    **Several processes** compare `every`, fragments and the number of steps done at the first call,
    and the number again before each exchange.

    Raises:
        ValueError: settings out of range. From `init`: `params` or `average` pick something else
            than floating-point arrays, a fragment has no leaf, the state holds an exchange, or
            something that is no array, or an array in another memory ("pinned_host"), `exchange`
            leaves out a parameter (`jaxsparse.check`) or has a delay, or `optimizer` needs a loss
            or changes the arrays of its state. From a call: the workers don't divide a batch; `t`
            is not the number of steps done; the state was made with another optimizer; or `step`
            returns another kind of state, or communicates over `axis_name`.
            (On a mesh with other axes, where XLA itself may communicate, that is a warning.)

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxsparse
        >>> def step(params, batch):
        ...     distance = lambda p: jnp.sum((p - batch[0]) ** 2)
        ...     loss, slope = jax.value_and_grad(distance)(params[0])
        ...     return (params[0] - 0.1 * slope,), loss
        >>> train = LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), 2, every=2)
        >>> state, losses = train.init((jnp.zeros(3),)), []
        >>> for t in range(4):
        ...     state, loss = train(state, jnp.float32([[1, 2, 3], [3, 2, 1]]), t)
        >>> loss.shape, [round(float(x), 4) for x in state.params]
        ((2,), [1.1808, 1.1808, 1.1808])
    """

    def __init__(
        self,
        step: Step,
        exchange: Exchange,
        optimizer: optax.GradientTransformation,
        mesh: Mesh | int,
        *,
        axis_name: str = "data",
        every: int | Stages[int] = 1,
        params: Pick | None = None,
        average: Pick | None = None,
        weight: Pick | None = None,
        streaming: Streaming | None = None,
    ) -> None:
        self._workers = Workers.on(mesh, axis_name)
        self.every = every if isinstance(every, Stages) else Stages((every,), ())
        for steps in self.every.values:
            if static_int("every", steps) < 1:
                raise ValueError(f"every={every} must be at least 1: 1 exchanges after each step")
        check_function("step", step, "state", "batch")
        for name, function, argument in (
            ("params", params, "state"), ("average", average, "state"), ("weight", weight, "batch")
        ):  # fmt: skip
            if function is not None:
                check_function(name, function, argument)
        check_exchange(exchange, optimizer)
        if not isinstance(streaming, Streaming | None):
            raise ValueError(
                f"streaming={streaming!r} must be None or as jaxsparse.outer.Streaming(fragments)"
            )
        self.streaming = streaming or Streaming(1, overlap=0)
        if streaming is not None:
            _check_streaming(streaming, every)
        worker = Worker(
            step,
            exchange,
            optimizer,
            axis_name,
            params or params_of,
            average,
            self.streaming,
            weight,
        )
        self._worker, self._mesh, self._axis_name = worker, mesh, axis_name
        self._is_checked = self._has_met = False
        self._group = group_of(mesh) if isinstance(mesh, Mesh) else None
        # How many steps the last state had done, and when its exchanges arrive. Reading that from
        # its arrays would wait.
        self._last: tuple[Any, int, list[int]] = (None, 0, [])

        run = functools.partial(run_on_workers, mesh=mesh, axis_name=axis_name, donate_argnums=0)
        # A worker's part works on arrays alone, and only the step itself sees modules.
        make = lambda f, **options: run(_of_held(f), **options)
        parts = range(self.streaming.fragments)
        alone = functools.partial(make, batch_argnums=())
        of_all = lambda f, run: [run(functools.partial(f, fragment=p)) for p in parts]
        closes_over = lambda program, batches: check_closed_over(
            program, batches, self._workers.count, AS_OTHER_SHAPE
        )
        self.inner = make(worker.step, check=closes_over)
        self.outer = of_all(worker.exchange, alone)
        self.streamed = of_all(worker.step_beside, make)
        mix = lambda fragments, mixing: alone(
            functools.partial(worker.mix, fragments=fragments, mixing=mixing)
        )
        self.mixed = [mix([p], self.streaming.mixes(at_once=False)) for p in parts]
        self._settled = mix(parts, 0.0)
        self._left = alone(worker.left, donate_argnums=())

    def init(self, state: Any) -> LocalState:
        """All workers' state from one worker's, spread over the mesh as by `jaxsparse.shard`.

        Of `jax.ShapeDtypeStruct`s it makes shapes with shardings, to compile ahead of time. If they
        have shardings over other axes of the mesh, the exchange needs `mesh` and `specs`.
        """
        state = held(state)
        leaves = jax.tree.leaves(state)
        check_memory(state)
        inner = self._workers.inner
        if inner and any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise ValueError(
                "init is traced, as in jax.eval_shape(train.init, state), so it can't see how "
                f"arrays are cut over the axes {inner}: give train.init(state) the shapes "
                "themselves, jax.ShapeDtypeStructs with a sharding"
            )
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        made = functools.partial(shapes_of, mesh=self._mesh) if is_abstract else Worker.start
        start = made(self._worker, state)
        for p in range(self.streaming.fragments):
            part = jax.eval_shape(functools.partial(self._worker.part, fragment=p), start.params)
            check(self._worker.outer(start.params), part, axis_name=self._axis_name)
        whole = start if is_abstract else shard(start, self._mesh, self._axis_name)
        own = held(_unmarked(whole.worker))
        found = second_copies(self._worker.params, self._worker.average, own)
        if found:
            warnings.warn(
                f"{found[0]} starts as a copy of the parameters (so do {len(found)} arrays of the "
                "state), and each worker keeps its own: copies stray from each other, and an "
                "optimizer that goes by them pulls parameters back. Average them, as by "
                "average=lambda state: state[1].z, at the cost of a dense exchange. A copy that "
                "stays as it is, such as Prodigy's params0, needs nothing",
                stacklevel=2,
            )
        return whole

    def __call__(
        self, state: Any, batch: Any, t: int | None = None, *rest: Any
    ) -> tuple[LocalState, Any]:
        """One step, and the outer step if it is due.

        Args:
            state: state of all workers, from `init` or the call before. It is donated. One worker's
                state, as a trainer makes it, goes through `init` first.
            batch: batch of all workers together. All arrays are split along their first axis.
            t: number of steps that the state has done, a Python int, which is then compared with
                the state's own. None: it is not.
            rest: further arguments of `step`, which each worker gets whole. An array with as many
                rows as the batch is refused: it belongs to the batch. Flags and strings of Python
                stay what they are, so `step` may branch on them. Numbers become arrays.

        Returns:
            The next state, and the second result of `step`, whose arrays have a row for each
            worker. On several hosts, a mean over these communicates.
        """
        if not isinstance(state, LocalState):
            state = self.init(state)
        t, arrives = self._done("t", t, state)
        rest = with_flags_held(rest)
        if not self._has_met:
            self._meet("goes on", t)
        if rest and (alike := as_long(*held((batch, rest)), self._workers.count)):
            raise ValueError(
                f"rest{alike} has as many rows as the batch, and each worker would get all of "
                "them: put it into the batch. If each worker is to see it whole, "
                f"{AS_OTHER_SHAPE}"
            )
        if not self._is_checked:
            self._check(state, batch, rest)
        overlap = self.streaming.overlap
        fragment = self.due(t) if overlap else None
        if fragment is None:
            worker, out, steps, weight = self.inner(*self._arguments(state, batch, rest))
            state = state._replace(worker=worker, steps=steps, weight=weight)
        else:
            self._meet("exchanges", t)
            if arrives[fragment] > t:  # it began with a longer overlap
                state = self.mixed[fragment](state)
            state, out = self.streamed[fragment](state, batch, *rest)
            arrives[fragment] = t + overlap
        for p in [p for p, at in enumerate(arrives) if at == t + 1]:
            state, arrives[p] = self.mixed[p](state), t
        if not overlap and (fragment := self.due(t + 1)) is not None:
            self._meet("exchanges", t + 1)
            if arrives[fragment] > t + 1:  # it began with an overlap
                state = self.mixed[fragment](state)
            state = self.outer[fragment](state)
            arrives[fragment] = t + 1
        self._last = state.steps, t + 1, arrives
        return state, _unmarked(out)

    def lower(self, state: Any, batch: Any, t: int | None = None, *rest: Any) -> jax.stages.Lowered:
        """The inner step, lowered for these arguments or their shapes, as `jax.jit` does it."""
        del t
        if not isinstance(state, LocalState):
            state = self.init(state)
        return self.inner.lower(*self._arguments(state, batch, with_flags_held(rest)))

    def finish(self, state: LocalState, steps: int | None = None) -> LocalState:
        """Ends a run: exchanges what workers did since the last outer steps.

        Exchanges that are still on their way arrive. Then an outer step follows for each fragment
        in which a worker has moved since its last one, so that finishing again changes nothing. If
        a worker is broken, a second one exchanges the moves of the others. In the end all workers
        have the global parameters. A run may go on after it, but outer momentum and schedules have
        then felt outer steps between the regular ones.

        Args:
            state: state of all workers. It is donated if anything is left to exchange.
            steps: number of steps that the state has done, a Python int, which is then compared
                with the state's own. None: it is not.

        Raises:
            ValueError: `steps` is not this number, or the state has other fragments.
        """
        steps, arrives = self._done("steps", steps, state)
        self._check_fragments(state)
        self._meet("finishes", steps)
        for p in [p for p, at in enumerate(arrives) if at > steps]:
            state = self.mixed[p](state)
        for p, exchange in enumerate(self.outer):
            # Workers that mix are elsewhere right after an exchange, too.
            is_due = arrives[p] != steps
            for _ in range(2):
                left, outcome = jax.device_get((self._left(state), state.outcome))
                if left[p] and (is_due or outcome[p] == BROKEN):
                    state = exchange(state)
                is_due = False
        # They may have mixed by other settings, too.
        if jax.device_get(self._left(state)).any():
            state = self._settled(state)
        self._last = None, 0, []
        return state

    def due(self, steps: int) -> int | None:
        """The fragment that is exchanged after `steps` steps (0 without streaming), or None."""
        if steps < 1:
            return None
        last = steps - 1  # the stage is that of the step just done
        every = self.every.at(last)
        began = max((b for b in self.every.boundaries if b <= last), default=0)
        if steps in self.every.boundaries:
            return 0
        place, count = (steps - began) % every, self.streaming.fragments
        return next((p for p in range(count) if p * every // count == place), None)

    def _done(self, name: str, given: Any, state: LocalState) -> tuple[int, list[int]]:
        """How many steps a state has done, and after how many each fragment's exchange arrives.

        ValueError: `given` is no int, or another number than that of the steps.
        """
        if not isinstance(state, LocalState):
            raise ValueError(
                f"state is a {type(state).__name__}: give the LocalState that init, or the call "
                "before, returned"
            )
        is_number = isinstance(given, numbers.Integral | None) and type(given) is not bool
        if isinstance(state.steps, jax.core.Tracer) or not is_number:
            raise ValueError(
                f"{name}={given!r} must be a Python int, because it says which program runs next: "
                f"pass int({name}), and keep the call outside of jax.jit. (Further arguments of "
                "the step stand behind it, as in train(state, batch, None, key).)"
            )
        last, steps, arrives = self._last
        # Steps and exchanges take all arrays of a part, so one of each tells.
        some = [jax.tree.leaves(part)[0] for part in (state.worker, state.params, state.steps)]
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in some):
            raise ValueError(
                "the state is deleted, because an earlier call took it: go on with the state that "
                "call returned, and copy what you keep, as jax.tree.map(jnp.copy, state)"
            )
        if state.steps is not last:
            steps, arrives = int(_read(state.steps)), _read(state.arrives).tolist()
        if given is not None and given != steps:
            raise ValueError(
                f"{name}={given}, but {steps} steps are done: pass {name}={steps}, the number of "
                "steps of the whole run, over all epochs, or leave it out"
            )
        return steps, [*arrives]

    def _meet(self, what: str, steps: int) -> None:
        """Compares with other processes when they exchange. Exchanges are paired by their order.

        RuntimeError: they differ.
        """
        if self._group is None:
            return
        said, stream = f"{what} after {steps} steps", self.streaming
        if self._has_met:
            agree(self._group, said)
            return
        every = self.every if self.every.boundaries else self.every.values[0]
        pace = f"fragments={stream.fragments}, overlap={stream.overlap}"
        compare_texts(self._group, "LocalSteps", (f"every={every}", pace, said))
        self._has_met = True

    def _arguments(self, state: LocalState, batch: Any, rest: Any) -> tuple[Any, ...]:
        """The arguments of `inner`."""
        return state.worker, batch, state.steps, state.weight, *rest

    def _check_fragments(self, state: LocalState) -> None:
        """Raises ValueError if the state was made with other fragments, weights or optimizer."""
        fragments = self.streaming.fragments
        if len(state.outer) != fragments:
            raise ValueError(
                f"the state was made for {len(state.outer)} fragments, but there are {fragments}: "
                "go on with as many, or start from init with its global parameters"
            )
        if (self._worker.weight is None) != (not jax.tree.leaves(state.weight)):
            raise ValueError(
                "the state was made with a weight, and this LocalSteps has none, or the reverse: "
                "give the same, or start from init with its global parameters"
            )
        params, outer = held((state.params, state.outer))
        for p, (_, own) in enumerate(outer):
            check_outer(self._worker.optimizer, own, self._worker.part(params, p))

    def _check(self, state: LocalState, batch: Any, rest: Any) -> None:
        """Raises ValueError if the state or arguments are others, or the step communicates."""
        self._check_fragments(state)
        found, axis = self._crossing(state, batch, rest), self._axis_name
        if found:
            text = (
                f"the inner step communicates over {axis!r} at each step: {'; '.join(found[:4])}. "
                "Return metrics as each worker's own, and leave exchanges to LocalSteps"
            )
            if not self._workers.inner:
                raise ValueError(text)
            warnings.warn(text, stacklevel=3)
        self._is_checked = True

    def _crossing(self, state: LocalState, batch: Any, rest: Any) -> list[str]:
        """The collectives of the inner step that communicate between workers, in words."""
        if isinstance(self._mesh, Mesh):
            # JAX keeps the program: the call does not compile again.
            program = self.lower(state, batch, None, *rest).compile()
            found = traffic.crossing(program, axis_name=self._axis_name, mesh=self._mesh)
            return list(map(str, found))
        workers = self._workers.count
        given = held((state.worker, batch, rest))

        def of_one(worker: Any, batch: Any, rest: Any) -> tuple[Any, ...]:
            own = jax.tree.map(lambda node: node.value[0], worker, is_leaf=is_per_worker)
            return own, jax.tree.map(lambda x: x[: len(x) // workers], batch), *rest

        run = lambda args: held(self._worker.train(*released(args)))
        try:
            args = jax.eval_shape(of_one, *given)
            moved = traffic.traced_bytes(run, args, workers, axis_name=self._axis_name)
        except Exception:  # of a batch that can't be cut, see the call; or types of replication,
            return []  # which are stricter than simulated workers are
        return list(map(str, moved.collectives))


def _of_held(f: Any) -> Any:
    """`f`, given trees whose Equinox modules are held (`comm.static_leaves`)."""
    return functools.wraps(f)(lambda *args: f(*held(args)))


def _read(x: Any) -> np.ndarray:
    """A replicated array. NumPy reads it, because a context mesh may have other devices."""
    return np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)


def _unmarked(tree: Any) -> Any:
    """The tree with all workers' arrays in the place of marks."""
    taken = lambda node: node.value if is_per_worker(node) else node
    return jax.tree.map(taken, tree, is_leaf=is_per_worker)


def _check_streaming(streaming: Streaming, every: int | Stages[int]) -> None:
    if isinstance(every, Stages):
        raise ValueError(
            f"every={every} changes during training, and streaming takes one number of steps: "
            "give one, or leave streaming out"
        )
    if streaming.fragments > every or streaming.overlap >= every:
        raise ValueError(
            f"fragments={streaming.fragments} and overlap={streaming.overlap}, but every={every}: "
            "in `every` steps each fragment is exchanged once, at a step of its own, and must "
            "arrive before its next turn"
        )
