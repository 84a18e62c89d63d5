"""What of a program depends on the worker's number, and whether its workers stay together."""

import functools
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxsparse.comm import compat, meshes, shard_maps
from jaxsparse.comm.flow import Reading
from jaxsparse.comm.programs import communicates
from jaxsparse.feedback.axes import MOVES, ONE_BY_ONE, OTHERS

# What a value is made of, as bits: a worker's rows, or what is drawn from keys of its own; its
# number; and keys of its number. Constants and what is equal on all workers, as weights are, have
# none.
_OWN, _RANKED, _KEYED = 1, 2, 4
_WHOLE = re.compile(shard_maps.WHOLE + r"_(\d+)")
DRAWN = ("random_bits", "random_fold_in", "random_seed", "random_split", "random_wrap", "threefry")
# The scopes of rules of custom derivatives.
RULE = re.compile(shard_maps.SCOPE + r"_(forward|backward|tangent)_(\d+)")


def is_judged(scopes: str) -> bool:
    """Whether code is to be judged: a backward pass takes again what was, but for rules in it."""
    return bool(RULE.search(scopes)) or "transpose(jvp(" not in scopes


class Ranks(Reading[int]):
    """Finds what uses the worker's number, and what workers would not all take part in.

    A body whose specs do not name the axis has all workers' rows under `jax.jit`, on each device.
    Here it has one worker's. Whatever its number picks, masks or weighs there is another thing
    here, so that it may make keys of random numbers, and no more. Whole numbers and flags that are
    made of it alone do not count, until they meet rows, or pick or become a factor.

    Attributes:
        used: operations that use it, and the calls around them, by their id and the number of the
            body that each is in, None outside of those whose specs do not name the axis. JAX keeps
            programs of inner functions, so that one may be in several.
        alone: the names and places of branches and loops that communicate, and whose condition is a
            worker's own.
    """

    nothing = 0

    def __init__(self, axis_name: str) -> None:
        super().__init__()
        self.used = dict[tuple[int, int | None], tuple[Any, Any]]()
        self.alone = list[tuple[str, str]]()
        self.places = dict[int, str]()  # of bodies, by their numbers
        self._axis_name = axis_name

    @classmethod
    def in_program(cls, program: Jaxpr, is_own: Sequence[bool], axis_name: str) -> "Ranks":
        found = cls(axis_name)
        found.program(program, [_OWN if yes else 0 for yes in is_own])
        return found

    def join(self, values: Iterable[int]) -> int:
        return functools.reduce(operator.or_, values, 0)

    def decided(self, equation: Any, by: int, inputs: list[int]) -> None:
        programs = [*compat.inner_programs(equation.params)]
        if by and any(communicates(inner, self._axis_name) for inner in programs):
            inside = (e for inner in programs for e, _ in compat.scoped(inner))
            every = filter(None, (equation, self.around, *inside))
            where = next((e for e in every if compat.frames_of(e)[0]), equation)
            self.alone.append((equation.primitive.name, compat.place_of(where)))
        if by & (_RANKED | _KEYED) and equation.outvars:  # one worker alone may print
            self._uses(equation)

    def _body(self) -> int | None:
        """The number of the body that an operation is in, if its specs do not name the axis."""
        found = _WHOLE.findall(self.scopes)
        return int(found[-1]) if found and shard_maps.CUT not in self.scopes else None

    def _uses(self, equation: Any) -> None:
        self.used[id(equation), self._body()] = equation, self.around or equation

    def operation(self, equation: Any, inputs: list[int]) -> list[int]:
        name, params = equation.primitive.name, equation.params
        if name == "shard_map":
            return self.program(params["jaxpr"], inputs)
        if name == shard_maps.MARK:
            call, (made,) = params["call"], inputs
            self.places[call.number] = call.place
            if params["verb"] == "makes" and call.is_named:
                return [_OWN if made else 0]
            if params["verb"] == "makes" and made & _RANKED and not made & _OWN:
                self.used[id(equation), call.number] = equation, equation
            return inputs
        if name in ONE_BY_ONE:
            return inputs
        made, types = self.join(inputs), [x.aval for x in equation.outvars]
        every = lambda value: [value] * len(types)
        is_over = self._axis_name in compat.axes_of(params)
        programs = [*compat.inner_programs(params)]
        is_of = lambda x, kind: hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, kind)
        if any(is_of(x, jax.dtypes.prng_key) for x in types):
            return every(made & _OWN | (_KEYED if made & ~_OWN else 0))
        if name == "random_unwrap":
            return every(made)
        if name.startswith(DRAWN):
            return every(_OWN if made else 0)
        is_number = not any(is_of(x, jnp.inexact) for x in types)
        if made & _KEYED and not (name in (*MOVES, "reshape") and made == _KEYED and is_number):
            made = made & _OWN | _RANKED  # a key's bits as numbers
        if name == "axis_index" and is_over:
            return every(_RANKED)
        if is_over and name in compat.OPCODES:
            has_groups = params.get("axis_index_groups") is not None
            is_sum = compat.OPCODES[name] == "all-reduce" and not has_groups
            stack = self.scopes + compat.name_stack(equation)
            # Others' rows are in the order of numbers. Under `jax.jit` there are none of others
            # in a body whose specs do not name the axis.
            is_whole = self._body() is not None and is_judged(stack)
            if made & _OWN and meshes.SCOPE not in stack and (is_whole or not is_sum):
                self._uses(equation)
            if is_sum or (name not in compat.MOVING and not has_groups):
                return every(0)
            return every(_OWN if made & _OWN else _RANKED)
        if name in compat.KERNELS | OTHERS:
            of_kernel = [e for inner in programs for e, _ in compat.scoped(inner)]
            is_over |= any(self._axis_name in compat.axes_of(e.params) for e in of_kernel)
            made |= (_RANKED if is_over else 0) | (_OWN if name == "io_callback" else 0)
        elif programs:  # that of a linear solve, and of what is not known
            for inner in programs:
                made |= self.join(self.program(inner, [made] * len(inner.invars)))
        is_kept = any(map(compat.is_reference, equation.invars))
        if made & _RANKED and (is_kept or types):  # what makes nothing, prints
            if made & _OWN or is_kept or not is_number:
                self._uses(equation)
            if self._body() is None and not (is_number and made == _RANKED):
                made = _OWN  # outside of such a body, the worker's own
        return every(made)


def uses_number(program: Jaxpr, axis_name: str) -> bool:
    """Whether a body uses the worker's number, but for keys of random numbers."""
    ranks = Ranks(axis_name)
    made = ranks.program(program, [_OWN] * len(program.invars))
    return bool(ranks.used) or bool(ranks.join(made) & _RANKED)


def check_unnamed(program: Jaxpr, is_own: Sequence[bool], axis_name: str) -> None:
    """Raises ValueError if a body whose specs do not name the axis tells workers apart.

    By a worker's number, or by a sum over workers of what is of a batch.
    """
    found = Ranks.in_program(program, is_own, axis_name)
    for (_, number), (equation, around) in found.used.items():
        if number is not None:
            name, place = equation.primitive.name, compat.place_and_call(around)
            what = "a result" if name == shard_maps.MARK else f"the {name} at {place}"
            uses, may = (
                "uses the worker's number",
                "the number (and what ppermute, psum_scatter or all_to_all makes over that axis) "
                "may make keys of random numbers alone",
            )
            if compat.OPCODES.get(name) == "all-reduce":
                uses, may = "sums what is of a batch", "a sum over that axis may hold weights alone"
            raise ValueError(
                f"{what} {uses} in the jax.shard_map at "
                f"{found.places.get(number, 'unknown place')}, whose specs do not name the "
                f"workers' axis {axis_name!r}. Under jax.jit each device has all workers' rows "
                "there, and here one worker's: name the axis in in_specs and out_specs. Without, "
                f"{may}"
            )


def check_branches(program: Jaxpr, is_own: Sequence[bool], axis_name: str) -> None:
    """Raises ValueError if some workers alone may run a branch or a loop that communicates.

    Where a device runs one of the branches, they would wait for the others. Where `jax.vmap` runs
    all, those that JAX differentiates are given cotangents of workers that took another one.
    """
    for name, place in Ranks.in_program(program, is_own, axis_name).alone:
        raise ValueError(
            f"the {name} at {place} communicates over the workers' axis {axis_name!r}, and its "
            "condition is a worker's own: workers that take other branches would wait for ever, or "
            "have gradients of others' branches. Call what communicates (jaxsparse.gather) in "
            "front, use jnp.where, or a condition that is equal on all workers, as jax.lax.pmax "
            "gives"
        )
