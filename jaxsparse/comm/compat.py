"""Names that move between JAX releases, and one that is private. No other file may use them."""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.extend.source_info_util import (
    current,
    current_name_stack,
    register_exclusion,
    summarize,
)
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, NamedSharding

register_exclusion(__file__)  # its frames are not the place of an operation


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` is typed as varying. Empty without `check_vma`."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(aval.vma)  # other releases have this name


def cast_to_varying(x: jax.Array, axis_name: str) -> jax.Array:
    """Types a replicated value as varying over `axis_name`. Valid only under `check_vma`."""
    return jax.lax.pcast(x, axis_name, to="varying")


def with_varying(aval: Any, axis_name: str, is_varying: bool) -> Any:
    """An abstract value, typed as varying over an axis or not."""
    axis = {axis_name}
    of = lambda axes: axes | axis if is_varying else axes - axis
    if hasattr(aval, "update_manual_axis_type"):
        types = aval.manual_axis_type
        return aval.update_manual_axis_type(types.update(varying=of(types.varying)))
    return aval.update(vma=of(aval.vma))


def on_mesh(x: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    """The shape, dtype and types of a value, on another mesh of the same axes."""
    aval = jax.typeof(x)
    sharding = NamedSharding(mesh, aval.sharding.spec)
    kinds = {"sharding": sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(x.shape, x.dtype, **kinds)


# JAX casts replicated to varying but never back. A value that is equal on all workers by
# construction, as after an all-gather, needs that cast to be a replicated output.
_claim_replicated = Primitive("claim_replicated")
_claim_replicated.def_impl(lambda x, *, axis_name: x)
_claim_replicated.def_abstract_eval(lambda aval, *, axis_name: with_varying(aval, axis_name, False))
mlir.register_lowering(_claim_replicated, lambda ctx, x, *, axis_name: [x])
batching.primitive_batchers[_claim_replicated] = lambda args, dims, *, axis_name: (
    _claim_replicated.bind(args[0], axis_name=axis_name),
    dims[0],
)


def claim_replicated(x: jax.Array, axis_name: str) -> jax.Array:
    """Types `x` as equal on all workers of `axis_name`. Nothing checks that it is."""
    return _claim_replicated.bind(x, axis_name=axis_name)


# XLA's opcode for each primitive that communicates. Names come from traced programs.
OPCODES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
    "reduce_scatter": "reduce-scatter",
}
# Of these, what gives each worker something else.
MOVING = {"ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter"}
# Primitives that name a mesh axis and move nothing along it. The first cast to varying.
CASTS = {"pvary", "pcast"}
SILENT = {*CASTS, "axis_index", "claim_replicated", "enter_worker", "leave_worker"}
# Primitives that run each program inside them exactly once.
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "shard_map",
    "composite",
    "compute_on",
    "compute_on2",
    "eval_jaxpr",
    "remat_opt",
    "xla_metadata_call",
}
# Primitives whose program is a device's own, in another language.
KERNELS = {"pallas_call"}


def shared_store() -> Any:
    """The key-value store that the processes of `jax.distributed` share, or None without one.

    JAX has no public name for it. Libraries for checkpoints, such as Orbax, use it by this one. A
    release that moves it makes processes run without comparing their programs, and an island of
    several processes is refused.
    """
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError):
        return None


def inner_programs(parameters: dict[str, Any]) -> Iterator[Jaxpr]:
    """All jaxprs among the parameters of an equation."""
    for value in parameters.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def axes_of(parameters: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes that a collective's parameters name. Numbered axes are local."""
    named: list[str] = []
    for key in ("axes", "axis_name", "axis_names"):
        value = parameters.get(key, ())
        named += [
            a for a in (value if isinstance(value, tuple) else (value,)) if isinstance(a, str)
        ]
    return tuple(named)


def numbered_axes_of(parameters: dict[str, Any]) -> tuple[int, ...]:
    """The axes that a reduction, or a sum under `jax.vmap(axis_name=)`, takes from an array."""
    return tuple(a for a in parameters.get("axes", ()) if not isinstance(a, str))


def manual_axes_of(parameters: dict[str, Any]) -> frozenset[str]:
    """The axes that a `jax.shard_map` makes manual, from its parameters in a program."""
    return frozenset(parameters["newly_manual_axes"])


def shard_map_functions() -> tuple[Any, Any, Any] | None:
    """JAX's modules of `jax.shard_map` and `jax.vmap`, and the primitive of the first.

    None if a release has what `shard_maps` replaces otherwise.
    """
    try:
        from jax._src import shard_map as module
        from jax._src.interpreters import batching as mapping
    except ImportError:
        return None
    needed = ("_shmap_checks", "broadcast_prefix", "shard_map_p")
    has_all = all(hasattr(module, name) for name in needed)
    if not has_all or not hasattr(mapping, "spmd_names_insert_pvary"):
        return None
    return module, mapping, module.shard_map_p


def scan_module() -> Any | None:
    """JAX's module of `jax.lax.scan`, if it moves what does not change in front of a loop."""
    try:
        from jax._src.lax.control_flow import loops as module
    except ImportError:
        return None
    return module if hasattr(module, "_scan_known_hoisting") else None


def keep_scopes(hoisting: Callable[..., Any], program: ClosedJaxpr, *args: Any) -> Any:
    """What JAX moves in front of a loop, with the scopes that the loop is in, which JAX drops."""
    around = current_name_stack()

    def changed(program: ClosedJaxpr, change: Callable[[Any], Any]) -> ClosedJaxpr:
        equations = [
            e.replace(
                source_info=e.source_info.replace(name_stack=change(e.source_info.name_stack))
            )
            for e in program.eqns
        ]
        return program.replace(jaxpr=program.jaxpr.replace(eqns=equations))

    left, *others = hoisting(changed(program, lambda own: around + own), *args)
    return changed(left, lambda own: own[len(around) :]), *others


def is_reference(x: Any) -> bool:
    """Whether a variable is a reference, as `jax.new_ref` makes, which operations write to."""
    return type(getattr(x, "aval", None)).__name__ == "AbstractRef"


def name_stack(equation: Any) -> str:
    """The scopes of an equation, as compiled programs show them."""
    return str(getattr(equation.source_info, "name_stack", ""))


def unconstrained(equation: Any) -> Any:
    """A sharding constraint's equation, as one that leaves its operand as it is."""
    return equation.replace(primitive=jax.lax.copy_p, params={})


def scoped(program: Jaxpr, scopes: str = "") -> Iterator[tuple[Any, str]]:
    """All equations of a program and of those inside it, with the scopes that they are in."""
    for equation in program.eqns:
        inside = f"{scopes}/{name_stack(equation)}"
        yield equation, inside
        for inner in inner_programs(equation.params):
            yield from scoped(inner, inside)


def without_context(equation: Any) -> Any:
    """An equation that was traced with a mesh in context, as with that which is in context now."""
    mesh = getattr(equation.ctx, "cur_abstract_mesh", None)
    if mesh is None or mesh.empty:
        return equation
    return equation.replace(ctx=type(equation.ctx)())


def has_mesh(variable: Any) -> bool:
    """Whether the type of a variable has a mesh."""
    sharding = getattr(variable.aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def renamed_axes(parameters: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    """The parameters of a collective that name an axis, with another name for it."""
    other = lambda name: after if name == before else name
    found = dict[str, Any]()
    for key in ("axes", "axis_name", "axis_names"):
        value = parameters.get(key)
        if value == before:
            found[key] = after
        elif isinstance(value, tuple) and before in value:
            found[key] = tuple(map(other, value))
    return found


def renamed_effects(program: Any, before: str, after: str) -> Any:
    """The effects of a program or an equation, with another name for an axis."""
    return type(program.effects)(
        type(e)(after) if getattr(e, "name", None) == before else e for e in program.effects
    )


def lacks_rule(equation: Any) -> bool:
    """Whether `jax.vmap` has no rule for an operation, or one that fails."""
    primitive = equation.primitive
    if primitive.name in ("ragged_all_to_all", "ragged_dot_general"):
        return True
    return primitive not in batching.fancy_primitive_batchers and primitive.name not in CALLS


def carried_by(scan: Any) -> tuple[int, int]:
    """The number of constants of a scan, and of arrays that it carries."""
    if "ft_in" in scan.params:  # other releases have numbers
        constants, carried, _ = map(len, scan.params["ft_in"].unpack())
        return constants, carried
    return scan.params["num_consts"], scan.params["num_carry"]


def place_of(equation: Any) -> str:
    """Where an equation was traced, as "file:line (function)". JAX does not know all places."""
    return summarize(equation.source_info) or "unknown place"


def frames_of(equation: Any) -> tuple[str, ...]:
    """The places of the calls in which an equation was traced, the innermost first."""
    return tuple(summarize(equation.source_info, num_frames=100).split("\n")[::-1])


_OPTAX = os.path.dirname(optax.__file__)


def is_called_by_optax(equation: Any) -> bool:
    """Whether an equation was traced in Optax, or in a transformation that a chain of it calls."""
    return any(frame.startswith(_OPTAX) for frame in frames_of(equation))


def place_and_call(equation: Any) -> str:
    """The place of an equation. In Optax, that of the transformation, and where it was called."""
    frames = frames_of(equation)
    at = next((i for i, frame in enumerate(frames) if not frame.startswith(_OPTAX)), 0)
    inside = [frame for frame in frames[:at] if ".update_fn" in frame] or frames[:at]
    return f"{inside[0]}, called at {frames[at]}" if inside else frames[0] or "unknown place"


def place() -> str:
    """Where the user's code is that is traced now, as "file:line (function)"."""
    return summarize(current()) or _own_place(traceback.extract_stack())


def place_of_error(error: BaseException, unknown: str = "unknown place") -> str:
    """Where the user's code is that raised an error inside JAX, as "file:line (function)"."""
    return _own_place(traceback.extract_tb(error.__traceback__), unknown)


def _own_place(frames: traceback.StackSummary, unknown: str = "unknown place") -> str:
    """The last frame that is neither JAX's nor ours. An inner jit keeps no other place."""
    hidden = (os.path.dirname(jax.__file__), os.path.dirname(os.path.dirname(__file__)))
    own = [frame for frame in frames if not frame.filename.startswith(hidden)]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else unknown


def inputs_of(equation: Any) -> Sequence[Any]:
    """The variables and literals that an equation of a program, or of a trace, reads."""
    if hasattr(equation, "in_tracers"):
        return [x.val for x in equation.in_tracers]
    return equation.invars


def variable(x: Any) -> Any:
    """The variable of a traced value. None: it is an array, or of another kind."""
    found = getattr(x, "val", None) if hasattr(x, "parent") else None
    return None if isinstance(found, Literal) else found


def under(x: Any, axis: int) -> tuple[Any, int]:
    """The traced value that `jax.vmap` and derivatives have wrapped, and where an axis is in it."""
    while not hasattr(x, "parent"):
        if hasattr(x, "batch_dim") and hasattr(x, "val"):
            is_before = isinstance(x.batch_dim, int) and x.batch_dim <= axis
            x, axis = x.val, axis + is_before
        elif isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
            x = x.primal
        else:
            break
    return x, axis


def made_by(values: Sequence[Any], is_first: Callable[[Any], bool]) -> list[Any]:
    """The equations that made traced values, in their order.

    Tracing knows them while it runs. A release of JAX whose values do not tell has none.

    Args:
        values: arrays, traced or not.
        is_first: whether to look at nothing in front of an equation.
    """
    found, seen = list[Any](), set[int]()
    waiting = [(getattr(x, "parent", None), False) for x in values]
    while waiting:
        equation, is_done = waiting.pop()
        if is_done:
            found.append(equation)
        elif equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            waiting.append((equation, True))
            if not is_first(equation):
                waiting += [(getattr(x, "parent", None), False) for x in equation.in_tracers]
    return found


def set_rule_of_vmap(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Sets how `jax.vmap` maps an operation, by a rule that is given its `spmd_axis_name`, too."""

    def of(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
        if dims[0] is None:  # JAX asks of what is not mapped, too
            return primitive.bind(*args, **params), None
        return rule(args, dims, spmd_axes=getattr(axis, "spmd_name", None) or (), **params)

    batching.fancy_primitive_batchers[primitive] = of


def is_elementwise(equation: Any) -> bool:
    """Whether JAX maps an operation by its rule for elementwise ones."""
    rule = batching.fancy_primitive_batchers.get(equation.primitive)
    name = getattr(getattr(rule, "func", None), "__name__", "")
    if equation.primitive.name == "bitcast_convert_type":  # it may join or split entries
        return bool(equation.invars[0].aval.shape == equation.outvars[0].aval.shape)
    return name in ("broadcast_batcher", "vectorized_batcher")
