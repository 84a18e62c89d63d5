"""`jax.shard_map` in the function of one worker: the workers' axis leaves it while it is traced.

Trainers write a `jax.shard_map` for the whole mesh, whose specs cut the batch over the workers. One
worker's function sees its own rows, which are whole along that axis. So the axis has to leave the
specs before JAX looks at shapes, and before it differentiates: a program that was transposed with
the axis has sums over workers in it. JAX offers no place for that, so six of its functions are
replaced while any thread traces a worker's function. They look at a `ContextVar` and change nothing
for others. If a release of JAX moves them, `can_leave_out` is false, and a `shard_map` that names
the axis is refused (`jaxsparse.training.one_worker`).
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.extend.source_info_util import register_exclusion
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, PartitionSpec

from jaxsparse.comm import compat
from jaxsparse.comm.programs import communicates, has_gradient, written

Typed = Literal["none", "named", "all"]


class Cut(NamedTuple):
    """What a spec cuts.

    Attributes:
        dim: the dimension that it cuts over the axis of workers. None: it does not name that axis.
        before: axes that cut the same dimension, and stand in front of that one.
        behind: the same behind it.
        others: dimensions that other axes alone cut.
    """

    dim: int | None = None
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    others: frozenset[int] = frozenset()


_CALLS = itertools.count()  # their numbers
register_exclusion(__file__)  # its frames are not the place of a shard_map


@dataclasses.dataclass
class Tracing:
    """How shard_maps are traced in one worker's function.

    Attributes:
        axis_name: the axis of the workers.
        workers: their number.
        typed: in which bodies values are typed as varying over the axis, where types are checked.
        is_simulated: whether workers are simulated, so that a mesh is each worker's own.
        mesh: the mesh in context before the workers' axis was made manual, if it was.
        named: what the `in_specs` that JAX read last cut over the axis, see `_cut`. None: they were
            used.
        has_named: whether there was a `shard_map` with checked types that names the axis.
        places: where shard_maps that name the axis are.
        made: the same for the `out_specs`.
    """

    axis_name: str
    workers: int
    typed: Typed
    is_simulated: bool
    mesh: Any
    named: list[Cut] | None = None
    has_named: bool = False
    places: list[str] = dataclasses.field(default_factory=list)
    made: list[Cut] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class MappedCall:
    """A call of a `jax.shard_map` by a user, as it was traced.

    JAX differentiates a `shard_map` in parts, and moves parts of one in a loop in front of it. So
    what a body does is read here, and not from the equations that are left.

    Attributes:
        place: where it is.
        is_named: whether its specs name the axis of workers.
        is_left: whether it leaves that axis to JAX, so that a body can't name it under `jax.jit`.
        is_checked: whether JAX checks types in it.
        body: the program of its body. None: it was not traced.
        takes: what its specs cut over the axis of workers, of arguments. Behind these stand values
            over which the body closes, which no spec cuts.
        makes: the same of results.
        shapes: of what it takes.
        number: no other call's.
    """

    place: str
    is_named: bool
    is_checked: bool
    is_left: bool = False
    takes: list[Cut] = dataclasses.field(default_factory=list)
    makes: list[Cut] = dataclasses.field(default_factory=list)
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    body: ClosedJaxpr | None = None
    number: int = dataclasses.field(default_factory=lambda: next(_CALLS))


_TRACING: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar(
    "jaxsparse_shard_maps", default=None
)
# Whether values get no casts over a mapped axis, see `no_casts`.
_HAS_NO_CASTS: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxsparse_no_casts", default=False
)
OURS = "the jax.shard_map at "  # errors of ours begin so
# The scope of operations in rules of custom derivatives, and behind it which rule and call.
SCOPE = "jaxsparse_rule"
# The scopes of operations in a body whose specs name the workers' axis, and in another one, and
# behind them the number of the call.
CUT, WHOLE = "jaxsparse_cut", "jaxsparse_whole"
_CUSTOM = jax.custom_vjp, jax.custom_jvp
_LOCK = threading.Lock()
_threads = 0  # that trace now
_originals: tuple[Any, ...] = ()


def can_leave_out() -> bool:
    """Whether this release of JAX has the functions that have to be replaced."""
    return compat.shard_map_functions() is not None


@contextlib.contextmanager
def leave_out(
    axis_name: str,
    workers: int,
    typed: Typed = "none",
    is_simulated: bool = False,
    mesh: Any = None,
) -> Iterator[Tracing]:
    """A context in which shard_maps are those of one worker, see `Tracing`."""
    tracing = Tracing(axis_name, workers, typed, is_simulated, mesh)
    token = _TRACING.set(tracing)
    try:
        with no_casts():
            yield tracing
    except Exception as error:
        if _is_of_types(error) and not isinstance(error.__cause__, ValueError | TypeError):
            where = compat.place_of_error(error, *tracing.places[-1:])
            raise ValueError(
                f"the code at {where} does not run in a jax.shard_map with checked types, where "
                f"one worker's values vary over the workers' axis {axis_name!r}: give it "
                "check_vma=False, or leave out a jax.lax.pcast over that axis"
            ) from error
        if tracing.places:
            error.add_note(
                f"The jax.shard_map at {tracing.places[-1]} names the workers' axis {axis_name!r}. "
                "In one worker's function values are whole along it: parameters are not cut over "
                "it, and a batch has this worker's rows alone"
            )
        raise
    finally:
        _TRACING.reset(token)


@contextlib.contextmanager
def of_library() -> Iterator[None]:
    """A context in which shard_maps are none of a user's, and stay as they are."""
    token = _TRACING.set(None)
    try:
        yield
    finally:
        _TRACING.reset(token)


_OF_TYPES = "Unsupported pcast", "varying manual axes", "manual axis types"


def _is_of_types(error: Exception) -> bool:
    """Whether checked types refuse a program."""
    return any(x in str(error) for x in _OF_TYPES)


@contextlib.contextmanager
def no_casts() -> Iterator[None]:
    """A context in which `vmap` casts nothing over an axis that another `vmap` has mapped.

    In a body with checked types, JAX casts arguments to vary over such axes. Where no value varies
    over workers by type, a cast would make some, and its transpose is a sum over workers.
    """
    token = _HAS_NO_CASTS.set(True)
    _replace(1)
    try:
        yield
    finally:
        _replace(-1)
        _HAS_NO_CASTS.reset(token)


def _replace(more: int) -> None:
    """Counts the threads that trace. The first one replaces JAX's functions, the last restores."""
    global _threads, _originals
    found = compat.shard_map_functions()
    if found is None:
        return
    module, batching, primitive = found
    loops = compat.scan_module()
    with _LOCK:
        _threads += more
        if _threads == 1 and more == 1:
            cast = batching.spmd_names_insert_pvary
            checks, prefix = module._shmap_checks, module.broadcast_prefix
            calls = [kind.__call__ for kind in _CUSTOM]
            hoisting: Any = getattr(loops, "_scan_known_hoisting", None)
            _originals = checks, prefix, cast, calls, hoisting
            if loops is not None:
                loops._scan_known_hoisting = functools.partial(compat.keep_scopes, hoisting)
            for kind, call in zip(_CUSTOM, calls):
                setattr(kind, "__call__", _calling(call))  # noqa: B010 - types refuse to assign
            batching.spmd_names_insert_pvary = lambda *args: (
                args if _HAS_NO_CASTS.get() else cast(*args)
            )
            module._shmap_checks = lambda *args, **kwargs: _checked(checks, *args, **kwargs)
            module.broadcast_prefix = lambda *args, **kwargs: _spread(prefix, *args, **kwargs)
            bind = primitive.bind
            primitive.bind = lambda *args, **params: _bound(bind, *args, **params)
        elif _threads == 0:
            (
                module._shmap_checks,
                module.broadcast_prefix,
                batching.spmd_names_insert_pvary,
                calls,
                hoisting,
            ) = _originals
            if loops is not None:
                loops._scan_known_hoisting = hoisting
            for kind, call in zip(_CUSTOM, calls):
                setattr(kind, "__call__", call)  # noqa: B010
            del primitive.bind  # that of its class is left


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(call)(lambda *args, **kwargs: _called(call, *args, **kwargs))


def _called(original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function with a derivative of its own, whose operations have scopes of their own.

    So that a derivative that communicates is known, see `SCOPE`. Results and their cotangents have
    equal tags, so that rows of the latter are where the results have them.
    """
    rules = ("jvp",) if isinstance(f, jax.custom_jvp) else ("fwd", "bwd")
    if _TRACING.get() is None or any(getattr(f, rule) is None for rule in rules):
        return original(f, *args, **kwargs)
    # No trace has a number of another one: JAX keeps programs of inner functions.
    number, own = next(_CALLS), object.__new__(type(f))
    vars(own).update(vars(f))

    def tagged(tree: Any, verb: str) -> Any:
        numbers = itertools.count()
        is_array = lambda x: isinstance(x, jax.Array) and x.dtype != jax.dtypes.float0
        tag = lambda x, i: _tag.bind(x, number=(number, i), verb=verb) if is_array(x) else x
        return jax.tree.map(lambda x: tag(x, next(numbers)), tree)

    def first_tagged(rule: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(rule)
        def run(*args: Any) -> Any:
            with jax.named_scope(f"{SCOPE}_{kind}_{number}"):
                made = rule(*args)
                is_pair = isinstance(made, tuple | list) and len(made) == 2  # or JAX tells
                return (tagged(made[0], "makes"), made[1]) if is_pair else made

        return run

    if isinstance(own, jax.custom_jvp):
        own.jvp = first_tagged(f.jvp, "tangent")
        return original(own, *args, **kwargs)

    @functools.wraps(f.bwd)
    def backward(*args: Any) -> Any:
        with jax.named_scope(f"{SCOPE}_backward_{number}"):
            return f.bwd(*args[:-1], tagged(args[-1], "takes"))

    own.fwd, own.bwd = first_tagged(f.fwd, "forward"), backward
    return original(own, *args, **kwargs)


def _checked(
    original: Callable[..., Any],
    mesh: Any,
    axis_names: Any,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
) -> Any:
    """JAX's checks of a mesh. It takes the context's in the place of a given one of these axes.

    A trainer holds its mesh. Where the workers' axis is manual, the one in context has other types.
    JAX keeps what is returned for the next call, so that it is the given one, or that in context
    where the axis is not manual.
    """
    context, tracing = jax.sharding.get_abstract_mesh(), _TRACING.get()
    if tracing is None or tracing.axis_name not in context.manual_axes:
        return original(mesh, axis_names, in_specs, out_specs, *args)
    is_same = mesh is not None and dict(mesh.shape) == dict(context.shape)
    own = lambda specs: jax.tree.map(
        lambda spec: without(spec, tracing.axis_name),
        specs,
        is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
    )
    mesh_of = context if is_same else mesh
    found, *others = original(mesh_of, axis_names, own(in_specs), own(out_specs), *args)
    kept = tracing.mesh if mesh is None else mesh
    return (found if kept is None else kept, *others)


def _spread(original: Callable[..., Any], prefix: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
    """Specs for each leaf, without the workers' axis."""
    specs = original(prefix, tree, *args, **kwargs)
    tracing = _TRACING.get()
    if tracing is None:
        return specs
    if kwargs:  # of arguments: those of results take no keyword, and static ones have no spec
        tracing.named = [_cut(spec, tracing.axis_name) for spec in specs if spec is not None]
    else:
        tracing.made = [_cut(spec, tracing.axis_name) for spec in specs]
    return [without(spec, tracing.axis_name) for spec in specs]


def _bound(
    original: Callable[..., Any],
    *args: Any,
    subfuns: tuple[Callable[..., Any], ...],
    mesh: Any,
    check_vma: bool,
    newly_manual_axes: frozenset[str],
    **params: Any,
) -> Any:
    """A shard_map's equation, manual over the workers' axis, too.

    Where types are checked, the worker's values have to differ by type from other workers', or JAX
    would sum cotangents over workers.
    """
    tracing, is_called = _TRACING.get(), False
    place = compat.place() if tracing is not None else ""
    call = MappedCall(place, False, check_vma)
    if tracing is not None and not tracing.is_simulated:
        _check_mesh(mesh, tracing, place)
    if tracing is not None and tracing.axis_name in mesh.axis_names:
        axis, context = tracing.axis_name, jax.sharding.get_abstract_mesh()
        named, tracing.named = tracing.named, None
        is_called = named is not None  # by a user, and not by JAX's own rules
        call.takes = named or []
        call.shapes = [*map(jnp.shape, args)]
        call.is_named = any(cut.dim is not None for cut in call.takes)
        if call.is_named:
            tracing.places.append(place)
            tracing.has_named |= check_vma
        body = subfuns[0]
        if is_called:
            given = enumerate(zip(args, call.takes))
            args = tuple(_marked(x, cut, call, i, "takes") for i, (x, cut) in given)
            body = functools.partial(_run, body, tracing, call)
        if tracing.is_simulated:
            _check_size(mesh, axis, place)
            newly_manual_axes -= {axis}  # of size 1: inside, the axis is that of the workers
        elif axis in context.manual_axes:
            mesh, newly_manual_axes = context, newly_manual_axes - set(context.manual_axes)
        else:
            call.is_left = axis not in newly_manual_axes
            newly_manual_axes |= {axis}
            is_typed = tracing.typed == "all" or (tracing.typed == "named" and call.is_named)
            if is_called and check_vma and is_typed:
                body = functools.partial(_typed, body, axis, call)
        subfuns = (body,)
    try:
        found: Any = original(
            *args,
            subfuns=subfuns,
            mesh=mesh,
            check_vma=check_vma,
            newly_manual_axes=newly_manual_axes,
            **params,
        )
        cuts = enumerate(call.makes)
        mark = lambda x, i, cut: _marked(x, cut, call, i, "makes")
        return found.map(lambda x: mark(x, *next(cuts))) if is_called else found
    except (AssertionError, ValueError) as error:
        text = str(error)
        if tracing is None or not tracing.is_simulated or text.startswith(OURS):
            raise
        if not check_vma or (text and f"'{tracing.axis_name}'" not in text):
            raise
        raise ValueError(
            f"the jax.shard_map at {place} uses the axis {tracing.axis_name!r} of simulated "
            "workers inside, which its types do not know: give it check_vma=False"
        ) from error


def _check_mesh(mesh: Any, tracing: Tracing, place: str) -> None:
    axis, count = tracing.axis_name, mesh.shape.get(tracing.axis_name)
    if count != tracing.workers:
        has = "no such axis" if count is None else f"{count} devices along it"
        raise ValueError(
            f"there are {tracing.workers} workers along {axis!r}, and the mesh of the "
            f"jax.shard_map at {place}, {dict(mesh.shape)}, has {has}: give it the mesh of the "
            "workers. Its other axes may be named as the kernel needs"
        )


def _check_size(mesh: Any, axis_name: str, place: str) -> None:
    if (size := mesh.shape[axis_name]) > 1:
        raise ValueError(
            f"workers are simulated on the axis {axis_name!r}, and the jax.shard_map at "
            f"{place} has a mesh whose axis {axis_name!r} has {size} devices: give "
            'workers another name, as in axis_name="workers", here and in the exchange'
        )


def _run(
    body: Callable[..., Any],
    tracing: Tracing,
    call: MappedCall,
    *args: Any,
) -> Any:
    try:
        call.body = _traced(body, args)
    except (TypeError, ValueError) as error:
        is_constraint = "Auto axes of the mesh" in str(error) or "manual axes" in str(error)
        if call.is_left and is_constraint and f"'{tracing.axis_name}'" in str(error):
            raise ValueError(
                f"{OURS}{call.place} has a sharding constraint or a collective inside over the "
                f"workers' axis {tracing.axis_name!r}, which it leaves to JAX, and one worker's "
                "values are whole along it: leave that axis out there"
            ) from error
        if not call.is_named or _is_of_types(error):
            raise
        raise ValueError(
            f"the body of the jax.shard_map at {call.place}, whose specs name the workers' axis "
            f"{tracing.axis_name!r}, does not run on one worker's values, which are whole along it "
            f"({str(error).splitlines()[0]}). Each worker has all of its weights: leave the axis "
            "out of their specs, and out of what gathers or scatters them inside"
        ) from error
    if call.is_left and any(
        _is_own_use(*each, tracing.axis_name) for each in compat.scoped(call.body.jaxpr)
    ):
        raise ValueError(_READ.format(place=call.place, axis=tracing.axis_name))
    if call.is_checked or call.is_left or tracing.is_simulated:
        _check_types(body, tracing, call, args)
    with jax.named_scope(f"{CUT if call.is_named else WHOLE}_{call.number}"):
        return _made(body, tracing, call, *args)


def _check_types(
    body: Callable[..., Any], tracing: Tracing, call: MappedCall, args: Sequence[Any]
) -> None:
    """Raises ValueError if a body does something else by the types that it has under `jax.jit`.

    There arguments that a spec cuts vary over the workers, and others do not. JAX sums gradients of
    what does not, as of weights, although nobody wrote a sum. And a body may read its types.
    """
    assert call.body is not None
    axis, takes, here = tracing.axis_name, [*call.takes], jax.sharding.get_abstract_mesh()
    kind = AxisType.Auto if call.is_left else AxisType.Manual
    mesh = here.update_axis_types({axis: kind})

    def typed(*args: Any) -> Any:
        if call.is_checked:
            types = lambda x, cut: (untyped if cut.dim is None else enter)(x, axis)
            args = tuple(map(types, args, takes))
        return body(*args)

    try:
        with jax.sharding.use_abstract_mesh(mesh):
            given = [x if mesh == here else compat.on_mesh(x, mesh) for x in args]
            of_jax = _traced(typed, given)
    except (TypeError, ValueError) as error:
        if not call.is_checked or not has_gradient(call.body.jaxpr):
            return
        raise ValueError(_SUMS.format(place=call.place, axis=axis)) from error
    is_sent = call.is_checked and communicates(of_jax.jaxpr, axis)
    if is_sent and has_gradient(of_jax.jaxpr):
        raise ValueError(_SUMS.format(place=call.place, axis=axis))
    if written(of_jax, _IDENTITIES) != written(call.body, _IDENTITIES):
        raise ValueError(_READ.format(place=call.place, axis=axis))


def _is_own_use(equation: Any, scopes: str, axis_name: str) -> bool:
    """Whether an operation names the axis, and not in another `shard_map` inside."""
    is_cast = equation.primitive.name in compat.CASTS
    is_inside = CUT in scopes or WHOLE in scopes
    return axis_name in compat.axes_of(equation.params) and not is_cast and not is_inside


_READ = (
    OURS
    + "{place} goes by the types of its values, jax.typeof(x), or by the axes of its mesh, and "
    "these have the workers' axis {axis!r} elsewhere under jax.jit than here: name the axes"
)
_SUMS = (
    OURS
    + "{place} takes a gradient inside, and communicates over the workers' axis {axis!r} there, "
    "or by its checked types JAX would: it sums gradients of what does not vary over workers, as "
    "of weights. Here it would not: give it check_vma=False, and sum behind the gradient"
)


def _made(body: Callable[..., Any], tracing: Tracing, call: MappedCall, *args: Any) -> Any:
    assert call.body is not None
    consts, found = call.body.consts, body(*args)
    if any(isinstance(x, jax.core.Tracer) for x in consts):
        # They are no arguments of JAX's equation, and marked inside of it.
        call.takes = [*call.takes[: len(args)], *[Cut()] * len(consts)]
        call.shapes = [*call.shapes[: len(args)], *map(jnp.shape, consts)]
        closes = lambda x, i: _marked(x, Cut(), call, i, "closes over")
        closed = [closes(x, len(args) + i) for i, x in enumerate(consts)]
        made = iter(jaxpr_as_fun(ClosedJaxpr(call.body.jaxpr, closed))(*args))
        results, specs = found.unpack_aux()
        found = results.map(lambda _: next(made)).with_aux(specs)
    call.makes = tracing.made
    if any(cut.dim is not None for cut in call.makes) and not call.is_named:
        raise ValueError(
            f"the jax.shard_map at {call.place} names the workers' axis {tracing.axis_name!r} in "
            "its out_specs alone. What a device makes may be a W-th of one worker's rows, or all "
            "of them: leave the axis out of out_specs, and make all of a worker's rows"
        )
    return found


def _traced(body: Callable[..., Any], args: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda *args: list(body(*args).unpack_aux()[0]))(*args)


def _marked(x: Any, cut: Cut, call: MappedCall, number: int, verb: str) -> Any:
    """Marks an argument or a result."""
    params = {"call": call, "number": number, "verb": verb, "shape": jnp.shape(x), "derived": ""}
    return _mark.bind(x, dim=cut.dim, is_mapped=False, **params)


def _typed(body: Callable[..., Any], axis_name: str, call: MappedCall, *args: Any) -> Any:
    args = tuple(enter(x, axis_name) for x in args)
    # Values that it closes over have no such type, and JAX would sum their cotangents over workers.
    traced = _traced(body, args)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    closed = [x for x in traced.consts if isinstance(x, jax.core.Tracer) and is_float(x)]
    if closed:
        raise ValueError(
            f"the jax.shard_map at {call.place} uses the axis {axis_name!r} inside, and closes "
            f"over values of shapes {[x.shape for x in closed]}: pass them as arguments, with "
            "in_specs of their own, or give it check_vma=False"
        )
    results, specs = body(*args).unpack_aux()
    return results.map(lambda x: leave(x, axis_name)).with_aux(specs)


def calls_in(program: Jaxpr) -> list[MappedCall]:
    """The calls whose marks a program has."""
    return [e.params["call"] for e, _ in compat.scoped(program) if e.primitive.name == MARK]


def names(spec: Any, axis_name: str) -> bool:
    """Whether a partition names the axis."""
    return _cut(spec, axis_name).dim is not None


def _cut(spec: Any, axis_name: str) -> Cut:
    dims = [
        (part if isinstance(part, tuple) else (part,)) if part not in (None, ()) else ()
        for part in (spec.partitions if isinstance(spec, PartitionSpec) else ())
    ]
    others = frozenset(i for i, axes in enumerate(dims) if axes and axis_name not in axes)
    for i, axes in enumerate(dims):
        if axis_name in axes:
            at = axes.index(axis_name)
            return Cut(i, axes[:at], axes[at + 1 :], others)
    return Cut(others=others)


def without(spec: Any, axis_name: str) -> Any:
    """A partition without the axis. What is no partition stays."""
    if not names(spec, axis_name):
        return spec
    left = (
        tuple(name for name in part if name != axis_name) if isinstance(part, tuple) else part
        for part in spec.partitions
    )
    parts = (None if part in ((), axis_name) else part for part in left)
    kinds = {kind: found for kind in ("unreduced", "reduced") if (found := getattr(spec, kind, ()))}
    return PartitionSpec(*parts, **kinds)


def identity(name: str, type_of: Callable[..., Any]) -> Primitive:
    """An operation of this name that changes nothing, but the type as `type_of` says."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(type_of)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(args[0], **params),
        dims[0],
    )
    return primitive


# Marks arguments and results of a shard_map: its call, their number there, what it does with them,
# the dimension that a spec cuts over the axis of workers, the shape, without what a `vmap` adds,
# whether one did, and how often it was differentiated.
_mark = identity(MARK := "names_workers", lambda aval, **_: aval)
# A tangent follows what a body takes, and a cotangent is returned for a tangent. One that is
# returned for a value itself is that of a linear function, as of tangents.
FOLLOWS, RETURNS = "f", "r"


def _derived(x: Any, kind: str, *, verb: str, derived: str, **params: Any) -> Any:
    derived += kind if verb != "makes" else ""
    return _mark.bind(x, verb=verb, derived=derived, **params)


ad.deflinear2(
    _mark,
    lambda ct, _, **params: [ct if params["verb"] == "makes" else _derived(ct, RETURNS, **params)],
)
ad.defjvp(_mark, lambda tangent, _, **params: _derived(tangent, FOLLOWS, **params))


def _batched_mark(
    args: Any, dims: Any, *, dim: int | None, is_mapped: bool, spmd_axes: Any, **params: Any
) -> Any:
    tracing = _TRACING.get()
    if tracing is not None and tracing.axis_name in spmd_axes:
        raise ValueError(
            f"the jax.shard_map at {params['call'].place} is in a jax.vmap with the workers' axis "
            f"{tracing.axis_name!r} as spmd_axis_name, and one worker's values are whole along "
            "it: leave that out of spmd_axis_name"
        )
    dim = dim if dim is None or dim < dims[0] else dim + 1
    return _mark.bind(args[0], dim=dim, is_mapped=True, **params), dims[0]


compat.set_rule_of_vmap(_mark, _batched_mark)

# Tags results of a custom derivative's forward rule, and what its backward rule is given for them.
_tag = identity(TAG := "tagged_result", lambda aval, **_: aval)
ad.defjvp(_tag, lambda tangent, _, **__: tangent)
MARKS = (MARK, TAG)

# Values of one worker, typed as varying over workers inside a body. Cotangents go back as they are:
# JAX's own cast to varying would sum them over workers.
ENTERING = "enter_worker", "leave_worker"
# What types alone have.
_IDENTITIES = {*MARKS, *ENTERING, *compat.CASTS, "claim_replicated", "reshard"}
_enter, _leave = (
    identity(name, lambda aval, *, axis_name, yes=yes: compat.with_varying(aval, axis_name, yes))
    for name, yes in zip(ENTERING, (True, False))
)
ad.deflinear2(_enter, lambda ct, _, *, axis_name: [leave(ct, axis_name)])
ad.deflinear2(_leave, lambda ct, _, *, axis_name: [enter(ct, axis_name)])


def enter(x: Any, axis_name: str) -> Any:
    """Types a worker's value as varying over workers."""
    if axis_name in compat.varying_axes(x):
        return x
    return _enter.bind(x, axis_name=axis_name)


def leave(x: Any, axis_name: str) -> Any:
    """Types a value as no longer varying. One that is equal on all workers is used by all."""
    if axis_name not in compat.varying_axes(x):
        x = compat.cast_to_varying(x, axis_name)
    return untyped(x, axis_name)


def untyped(x: Any, axis_name: str) -> Any:
    """A value without the type of one that varies over workers."""
    return _leave.bind(x, axis_name=axis_name) if axis_name in compat.varying_axes(x) else x
