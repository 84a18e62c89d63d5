"""Steps without the workers' axis in their sharding constraints.

Code for `jax.jit` shards activations over all axes that share a batch, `PartitionSpec(("hosts",
"fsdp"))`. A step is one worker's and sees its part, so that "hosts" says nothing there, and JAX
refuses it. The step is traced, the axis is taken out of its program, and the program is run.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.comm import compat

# Parameters of operations that say how values are sharded: of constraints, and of inner jax.jit.
_OF_JIT = ("in_shardings", "out_shardings")
_SHARDINGS: dict[str, tuple[str, ...]] = {
    "sharding_constraint": ("sharding",),
    "jit": _OF_JIT,
    "pjit": _OF_JIT,
}


def constrains(program: Jaxpr, axis_name: str) -> bool:
    """Whether a constraint anywhere in the program names the axis."""
    return any(
        _shardings_of(equation, axis_name) != {}
        or any(constrains(inner, axis_name) for inner in compat.inner_programs(equation.params))
        for equation in program.eqns
    )


def without_axis(step: Callable[..., Any], axis_name: str, is_manual: bool) -> Callable[..., Any]:
    """`step` without the axis in its constraints.

    Args:
        step: the step of one worker.
        axis_name: the axis of the workers.
        is_manual: whether no axis is left to JAX, so that nothing can be constrained.
    """

    def run(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        program = rewritten(program, axis_name, is_manual)
        outputs = jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def rewritten(program: ClosedJaxpr, axis_name: str, is_manual: bool) -> ClosedJaxpr:
    """The program of one worker without the axis in its constraints, see `without_axis`."""
    return _Rewriting(axis_name, is_manual).closed(program)


class _Rewriting:
    """Programs without the axis. One that is called many times stays one, and compiles once."""

    def __init__(self, axis_name: str, is_manual: bool) -> None:
        self._axis_name, self._is_manual = axis_name, is_manual
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
            found = program, program.replace(eqns=[self._equation(e) for e in program.eqns])
            self._known[id(program)] = found
        return found[1]

    def _equation(self, equation: Any) -> Any:
        changed = _shardings_of(equation, self._axis_name)
        if self._is_manual and "sharding" in changed:
            return compat.unconstrained(equation)
        changed |= {
            name: self._inside(value)
            for name, value in equation.params.items()
            if name not in changed
        }
        return equation.replace(params=changed)

    def _inside(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, Jaxpr):
            return self.open(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._inside, value))
        return value


def _shardings_of(equation: Any, axis_name: str) -> dict[str, Any]:
    """The parameters of an operation whose shardings name the axis, without it."""
    found = {}
    for name in _SHARDINGS.get(equation.primitive.name, ()):
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

    def part(names: Any) -> Any:
        if isinstance(names, tuple):
            return tuple(name for name in names if name != axis_name) or None
        return None if names == axis_name else names

    return NamedSharding(sharding.mesh, PartitionSpec(*map(part, sharding.spec)))
