"""How a loss uses the workers' axis: what is judged without knowing where rows are."""

from typing import Any

from jax.extend.core import Jaxpr

from jaxsparse.comm import compat, meshes, shard_maps
from jaxsparse.comm.programs import communicates
from jaxsparse.training import ranks

# How a body uses the axis of workers: "sums" are the same in any order of them, "rank" tells them
# apart, and "inner" goes over some of several axes that cut rows.
NONE, SUMS, RANK, INNER = "none", "sums", "rank", "inner"
SUMMED = {"psum", "psum_invariant", "pmax", "pmin", "enter_worker", "leave_worker", *compat.CASTS}


def use_of(call: Any, axis_name: str) -> str:
    """How a body uses the axis of workers."""
    before = {axis for cut in call.takes for axis in cut.before}
    axes, names = {axis_name, *before}, set[str]()
    cuts = {(x.before, x.behind) for x in (*call.takes, *call.makes) if x.dim is not None}
    if before and len(cuts) > 1:  # each device has other rows of one than of another
        return INNER
    for equation, _ in compat.scoped(call.body.jaxpr):
        named = axes.intersection(compat.axes_of(equation.params))
        if named and before and named != axes:
            return INNER
        is_grouped = equation.params.get("axis_index_groups") is not None
        names |= {"groups" if is_grouped else equation.primitive.name} if named else set()
    if "axis_index" in names and not ranks.uses_number(call.body.jaxpr, axis_name):
        names = names - {"axis_index"} | {"psum"}
    if names - SUMMED:
        return RANK
    return SUMS if names else NONE


def check_rules_of_vmap(program: Jaxpr, axis_name: str) -> None:
    """Raises ValueError if a rule for `jax.vmap` has a `shard_map` that uses the workers' axis."""
    for equation, _ in compat.scoped(program):
        if equation.primitive.name == "custom_vmap_call" and any(
            call.is_named or use_of(call, axis_name) == RANK
            for inside in compat.inner_programs(equation.params)
            for call in shard_maps.calls_in(inside)
        ):
            raise ValueError(
                f"the rule of the function at {compat.place_of(equation)} for jax.vmap "
                "(jax.custom_batching) would be given all workers' rows, and a jax.shard_map in it "
                f"uses the workers' axis {axis_name!r}: put the rule into the body, or leave it out"
            )


def has_derivatives(program: Jaxpr) -> bool:
    """Whether the program of a loss, without its gradient, has derivatives inside."""
    return any("jvp(" in x or "transpose(" in x for _, x in compat.scoped(program))


def check_inner(program: Jaxpr, axis_name: str, is_loss: bool) -> None:
    """Raises ValueError if a loss takes a gradient inside, through what uses the workers' axis.

    A cotangent is one worker's there. Under `jax.jit` it is that of all workers, or a part of it,
    by what the body makes. Where the program is no loss without its gradient (`is_loss`), that is
    told where such a cotangent is differentiated once more, and in forward rules of custom
    derivatives, which are not differentiated.
    """
    for mark, scopes in compat.scoped(program):
        if mark.primitive.name != shard_maps.MARK:
            continue
        derived = mark.params["derived"]
        is_rule = "forward" in (kind for kind, _ in ranks.RULE.findall(scopes))
        is_inside = shard_maps.RETURNS in derived and (is_loss or is_rule)
        is_inside |= shard_maps.RETURNS + shard_maps.FOLLOWS in derived
        if is_inside and use_of(call := mark.params["call"], axis_name) != NONE:
            raise ValueError(
                f"the loss takes a gradient inside, through the jax.shard_map at {call.place}, "
                f"which uses the workers' axis {axis_name!r}, so that cotangents of other workers "
                "count there: put that gradient into the body, or leave the axis out of it"
            )


def check_unnamed_gradients(program: Jaxpr, axis_name: str) -> None:
    """Raises ValueError if a body whose specs do not name the axis differentiates a sum over it.

    The sum may be of weights, which all workers share. Its cotangents are one worker's own.
    """
    for call in {call for call in shard_maps.calls_in(program) if not call.is_named}:
        assert call.body is not None
        for equation, scopes in compat.scoped(call.body.jaxpr):
            is_over = axis_name in compat.axes_of(equation.params)
            if not is_over or equation.primitive.name not in compat.OPCODES:
                continue
            if "transpose(" not in scopes:  # a body has no gradient but its own, as it was written
                continue
            raise ValueError(
                f"the jax.shard_map at {call.place} takes a gradient inside, through a sum over "
                f"the workers' axis {axis_name!r}, which its specs do not name. Under jax.jit each "
                "device has all workers' rows there, and here one worker's: name the axis in "
                "in_specs and out_specs, or leave it out of that sum"
            )


def check_traced_before(program: Jaxpr, axis_name: str) -> None:
    """Raises ValueError if a `shard_map` over workers was traced in front of one worker's function.

    As by `jax.make_jaxpr`, `jax.linearize` or `jax.closure_convert`. Its specs have the axis still.
    """
    for equation, scopes in compat.scoped(program):
        if equation.primitive.name != "shard_map" or meshes.SCOPE in scopes:
            continue
        inside = [*compat.scoped(equation.params["jaxpr"])]
        ours = shard_maps.CUT, shard_maps.WHOLE, meshes.SCOPE
        is_known = any(scope in stack for _, stack in inside for scope in ours)
        is_over = any(
            axis_name in compat.axes_of(each.params)
            for each, _ in inside
            if each.primitive.name not in shard_maps.ENTERING  # which derivatives hold alone
        )
        specs = (*equation.params["in_specs"], *equation.params["out_specs"])
        is_cut = any(shard_maps.names(spec, axis_name) for spec in specs)
        if inside and not is_known and (is_cut or is_over):
            every = (equation, *(each for each, _ in inside))
            where = next((each for each in every if compat.frames_of(each)[0]), equation)
            raise ValueError(
                f"the jax.shard_map at {compat.place_of(where)} uses the workers' axis "
                f"{axis_name!r}, and was traced before one worker's function, as by jax.make_jaxpr,"
                " jax.linearize or jax.closure_convert outside of the loss: trace it in the loss"
            )


def check_explicit(program: Jaxpr, axis_name: str) -> None:
    """Raises ValueError if checked types can't follow what a `shard_map` on Explicit axes sends."""
    for call in shard_maps.calls_in(program):
        if call.is_checked and use_of(call, axis_name) in (RANK, INNER):
            raise ValueError(
                f"the jax.shard_map at {call.place} tells workers of the axis {axis_name!r} apart, "
                "and its checked types do not allow that on Explicit axes: give it check_vma=False"
            )


def check_sums(program: Jaxpr, axis_name: str) -> None:
    """Raises ValueError if of a custom derivative and its function one alone communicates.

    Under `jax.jit` such a derivative sums gradients over the batch's axes by hand, or is given the
    cotangent of a result that is equal on all workers. Here each worker's gradients and cotangents
    are its own.
    """
    forward, backward = dict[str, Any](), dict[str, Any]()  # what communicates, by call
    derived = set[str]()
    # Of a rule of tangents, the derivative is what was transposed once more than the rest of it.
    tangents, least = dict[str, dict[int, Any]](), dict[str, int]()
    for equation, scopes in compat.scoped(program):
        name = equation.primitive.name
        over = lambda program: program and communicates(program.jaxpr, axis_name)
        fix = ""
        if name == "linear_call" and over(equation.params["callee"]):
            fix = "use jax.custom_vjp"
        if name == "custom_linear_solve":
            solves = equation.params["jaxprs"]
            is_alike = bool(over(solves.solve)) == bool(over(solves.transpose_solve))
            fix = "" if is_alike else "let solve and transpose_solve both do so, or none of them"
        if fix:
            raise ValueError(
                f"the {name} at {compat.place_of(equation)} communicates over the workers' "
                f"axis {axis_name!r}, and whether its derivative does so by hand can't be told: "
                f"{fix}"
            )
        is_over = axis_name in compat.axes_of(equation.params)
        transposed = scopes.count("transpose(")
        for kind, call in ranks.RULE.findall(scopes):
            found = {"forward": forward, "backward": backward}.get(kind)
            if kind == "backward":
                derived.add(call)
            if kind == "tangent":
                least[call] = min(transposed, least.get(call, transposed))
            if is_over and name in compat.OPCODES:
                if found is None:
                    tangents.setdefault(call, {}).setdefault(transposed, equation)
                else:
                    found.setdefault(call, equation)
    for call, by_depth in tangents.items():
        if (first := min(by_depth)) > least[call]:
            backward[call] = by_depth[first]
    for call, equation in forward.items():
        if call in derived - backward.keys():
            raise ValueError(
                f"what is called at {compat.place_of(equation)} communicates over the workers' "
                f"axis {axis_name!r} by {equation.primitive.name}, and its custom derivative does "
                "not: the cotangent that it is given is one worker's own here, and not that of all "
                "workers. Leave out the custom derivative, so that JAX makes it"
            )
    for call, equation in backward.items():
        if call not in forward:
            raise ValueError(
                f"the custom derivative of what is called at {compat.place_of(equation)} "
                f"communicates over the workers' axis {axis_name!r} by {equation.primitive.name}, "
                "and its function does not: each worker's gradient is its own here, so leave that "
                "out of the derivative"
            )
