"""One worker's program, made ready to run on all workers.

The program was traced for one worker (`one_worker`). Its constraints lose the workers' axis, and
`jax.vmap` maps it over rows. Each operation that `vmap` does not serve, every `jax.shard_map` among
them, runs manually: each device runs it on its worker's values, as it was traced. So a kernel needs
no rule for `vmap`, and a collective over the workers' axis inside is one of the mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.comm import compat, shard_maps
from jaxsparse.comm.meshes import AnyMesh, inner_axes
from jaxsparse.comm.shard_maps import names, without
from jaxsparse.training.one_worker import ROWS, SHARDINGS, uses

# vmap has a rule for a convolution, by which its weight gradients gather across workers. XLA may
# move rows that were looked up across them, too. But where the workers' axis alone is manual, its
# partitioner ends the process on lookups, in many ways to cut a table, tokens and rows.
_GATHERS = {"conv_general_dilated"}


def rewritten(
    program: ClosedJaxpr,
    axis_name: str,
    mesh: AnyMesh | None,
    workers: int,
    is_mapped: bool,
    has_auto: bool = True,
) -> ClosedJaxpr:
    """The program of one worker without the axis in its constraints, see the module.

    Args:
        program: what `trace` returned.
        axis_name: the axis of the workers.
        mesh: the mesh of the workers. None: they are simulated.
        workers: number of workers.
        is_mapped: whether it runs under `jax.vmap(..., axis_name=ROWS)`. If not, it runs where the
            axis is manual.
        has_auto: whether an axis is left to JAX there. If not, nothing can be constrained.
    """
    return _Rewriting(axis_name, mesh, workers, is_mapped, has_auto).closed(program)


class _Rewriting:
    """Programs without the axis. One that is called many times stays one, and compiles once."""

    def __init__(
        self, axis_name: str, mesh: AnyMesh | None, workers: int, is_mapped: bool, has_auto: bool
    ) -> None:
        self._axis_name, self._mesh, self._workers = axis_name, mesh, workers
        self._is_mapped, self._has_auto = is_mapped, has_auto
        self._known: dict[int, tuple[Any, Any]] = {}  # with the original, whose id is the key

    def closed(self, program: ClosedJaxpr) -> ClosedJaxpr:
        found = self._known.get(id(program))
        if found is None:
            found = program, program.replace(jaxpr=self.open(program.jaxpr))
            self._known[id(program)] = found
        return found[1]

    def open(self, program: Jaxpr) -> Jaxpr:
        found = self._known.get(id(program))
        if found is None:
            equations = [self._equation(e) for e in program.eqns]
            found = program, program.replace(eqns=equations, effects=self._effects(program))
            self._known[id(program)] = found
        return found[1]

    def _untyped(self, program: Jaxpr) -> Jaxpr:
        """The program of a loop or a call, without the mesh in the types of its values.

        Values over which a function closes have one, and where all axes are manual is another.
        """
        if self._has_auto or not any(map(compat.has_mesh, program.invars)):
            return program
        known = self._known.get(-id(program))
        if known is None:
            avals: list[Any] = [x.aval for x in program.invars]
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
            axes = [(self._axis_name, self._workers)]
            run = jaxpr_as_fun(ClosedJaxpr(program, ()))
            known = program, jax.make_jaxpr(run, axis_env=axes)(*types).jaxpr
            self._known[-id(program)] = known
        return known[1]

    def _effects(self, program: Any) -> Any:
        if not self._is_mapped:
            return program.effects
        return compat.renamed_effects(program, self._axis_name, ROWS)

    def _equation(self, equation: Any) -> Any:
        name, is_on_mesh = equation.primitive.name, self._mesh is not None
        if name in ("sharding_constraint", "reshard") and not self._has_auto:
            return compat.unconstrained(equation)
        changed = _shardings_of(equation, self._axis_name) if is_on_mesh else {}
        if not self._has_auto:  # what is made of values on the mesh has the mesh, too
            equation = compat.without_context(equation)
            is_sharding = lambda value: isinstance(value, NamedSharding)
            changed |= {key: None for key, value in equation.params.items() if is_sharding(value)}
        if self._is_mapped:
            is_badly_mapped = is_on_mesh and name in ("shard_map", *_GATHERS)
            if name in compat.KERNELS:  # vmap maps one as a whole, if it has no axis of the mesh
                programs = compat.inner_programs(equation.params)
                is_badly_mapped = any(uses(inner, self._axis_name) for inner in programs)
                if not is_badly_mapped:
                    return equation
            if is_badly_mapped or compat.lacks_rule(equation):
                return self._manual(equation)
            changed |= compat.renamed_axes(equation.params, self._axis_name, ROWS)
        changed |= {
            name: self._inside(value)
            for name, value in equation.params.items()
            if name not in changed
        }
        return equation.replace(params=changed, effects=self._effects(equation))

    def _inside(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            closed = self.closed(value)
            if closed.consts or (jaxpr := self._untyped(closed.jaxpr)) is closed.jaxpr:
                return closed
            return self._known.setdefault(-id(closed), (closed, closed.replace(jaxpr=jaxpr)))[1]
        if isinstance(value, Jaxpr):
            program = self.open(value)
            return program if program.constvars else self._untyped(program)
        if hasattr(value, "_make"):  # the programs of a linear solve are a NamedTuple
            return value._make(map(self._inside, value))
        if type(value) in (tuple, list):
            return type(value)(map(self._inside, value))
        return value

    def _manual(self, equation: Any) -> Any:
        """The equation as one that each device runs on its worker's values, as it was traced.

        Simulated workers run it one after the other.
        """
        axis, mesh, place = self._axis_name, self._mesh, compat.place_of(equation)
        body, whole, of_in, of_out, own, manual = self._parts(equation)
        is_checked = equation.params.get("check_vma", False)
        # What a body with checked types keeps for the backward pass may be one array, which is cut
        # over all workers, and has no row for each.
        is_cut = [names(spec, axis) for spec in of_out]

        @custom_vmap
        def run(rank: Any, *xs: Any) -> Any:
            return whole(*xs)

        @run.def_vmap
        def rule(_: int, is_row: Any, rank: Any, *xs: Any) -> Any:
            rows = is_row[1:]
            if mesh is None:
                call = lambda own: whole(*(o if yes else x for o, yes, x in zip(own, rows, xs)))
                each = [x if yes else jnp.zeros(self._workers) for x, yes in zip(xs, rows)]
                return jax.lax.map(call, each), [True] * len(of_out)
            if any(yes and names(spec, axis) for spec, yes in zip(of_in, rows)):
                raise ValueError(
                    f"the jax.shard_map at {place} keeps a value for its backward pass that "
                    f"can't depend on a worker's own condition: give it check_vma=False, or use "
                    "jnp.where in the place of jax.lax.cond around it"
                )
            if is_checked:
                # Weights get a row for each worker, so that an outer derivative sums over these.
                own_row = lambda x: jnp.broadcast_to(x, (self._workers, *x.shape))
                is_weight = [_is_float(x) and not names(s, axis) for s, x in zip(of_in, xs)]
                xs = tuple(
                    x if yes or not w else own_row(x) for x, yes, w in zip(xs, rows, is_weight)
                )
                rows = [yes or w for yes, w in zip(rows, is_weight)]
            # A body with checked types sees values as they were typed when it was traced.
            drop = lambda x: shard_maps.leave(x[0], axis) if is_checked else x[0]

            def add(y: Any) -> Any:
                y = jnp.asarray(y)[None]
                if not is_checked:
                    return y
                return shard_maps.enter(y, axis) if isinstance(y, jax.core.Tracer) else y

            def each_device(*xs: Any) -> Any:
                made = body(*(drop(x) if yes else x for x, yes in zip(xs, rows)))
                return [y if cut else add(y) for y, cut in zip(made, is_cut)]

            row = lambda spec, yes: PartitionSpec(axis, *spec) if yes else spec
            made = jax.shard_map(
                each_device,
                mesh=own,
                in_specs=tuple(map(row, of_in, rows)),
                out_specs=[row(spec, not cut) for spec, cut in zip(of_out, is_cut)],
                axis_names=manual,
                check_vma=is_checked,
            )(*xs)
            return made, [not cut for cut in is_cut]

        # vmap uses the rule only if an argument differs between workers. The rank always does.
        is_own = any(uses(inner, axis) for inner in compat.inner_programs(equation.params))
        rank = lambda: jax.lax.axis_index(ROWS) if is_own else jnp.int32(0)
        shapes = [
            jax.ShapeDtypeStruct(
                v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)
            )
            for v in equation.invars
        ]
        traced = jax.make_jaxpr(
            jax.jit(lambda *xs: run(rank(), *xs)), axis_env=[(ROWS, self._workers)]
        )(*shapes)
        (call,) = traced.eqns
        return equation.replace(primitive=call.primitive, params=call.params, effects=call.effects)

    def _parts(self, equation: Any) -> tuple[Any, ...]:
        """What `_manual` runs.

        Returns:
            The function of one device, and that of a worker, of lists of arrays. The partitions of
            arguments and results, the mesh, and the axes to make manual.
        """
        primitive, params = equation.primitive, equation.params
        if primitive.name == "shard_map":
            body = jaxpr_as_fun(ClosedJaxpr(params["jaxpr"], ()))
            whole = lambda *xs: list(primitive.bind(*xs, **primitive.get_bind_params(params)))
            manual = compat.manual_axes_of(params) | {self._axis_name}
            return body, whole, params["in_specs"], params["out_specs"], params["mesh"], manual

        def bound(*xs: Any) -> list[Any]:
            made = primitive.bind(*xs, **params)
            return made if primitive.multiple_results else [made]

        of_in, of_out = ([PartitionSpec()] * len(v) for v in (equation.invars, equation.outvars))
        inside: Callable[..., Any] = bound
        has_inner = self._mesh is None or bool(inner_axes(self._mesh, self._axis_name))
        if primitive.name == "custom_partitioning" and not has_inner:
            if not jax.sharding.get_abstract_mesh().empty:
                raise ValueError(
                    f"JAX can't run the custom_partitioning at {compat.place_of(equation)} on one "
                    f"worker where jax.set_mesh has a mesh without other axes than "
                    f"{self._axis_name!r}: leave out jax.set_mesh"
                )
            inside = jaxpr_as_fun(params["call"])  # there is no axis to partition it over
        return inside, bound, of_in, of_out, self._mesh, {self._axis_name}


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _shardings_of(equation: Any, axis_name: str) -> dict[str, Any]:
    """The parameters of an operation whose shardings name the axis, without it."""
    found = {}
    for name in SHARDINGS.get(equation.primitive.name, ()):
        value = equation.params[name]
        changed = jax.tree.map(
            lambda x: _without(x, axis_name), value, is_leaf=lambda x: not isinstance(x, tuple)
        )
        if changed != value:
            found[name] = changed
    return found


def _without(sharding: Any, axis_name: str) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, without(sharding.spec, axis_name))
