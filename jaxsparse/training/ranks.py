"""What of a program depends on the worker's number, and whether its workers stay together."""

import functools
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxsparse.comm import compat, shard_maps
from jaxsparse.comm.flow import Reading
from jaxsparse.feedback.axes import ELEMENTWISE, OTHERS

# What a value is made of, as bits: what is equal on all workers, as weights are; a worker's rows,
# or what is drawn from keys of its own; its number; and that this was compared, as for a mask.
# Constants have none.
_EQUAL, _OWN, _RANKED, _COMPARED = 1, 2, 4, 8
# How many operands stand in front of indices, or of sizes of groups.
_OPERANDS = {"dynamic_slice": 1, "gather": 1, "dynamic_update_slice": 2, "ragged_dot_general": 2}
_WHOLE = re.compile(shard_maps.WHOLE + r"_(\d+)")
DRAWN = ("random_", "threefry")
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
# Collectives that give each worker a part of an array.
_DIVIDING = compat.MOVING - {"ppermute"}
# The scopes of rules of custom derivatives.
RULE = re.compile(shard_maps.SCOPE + r"_(forward|backward|tangent)_(\d+)")


def is_judged(scopes: str) -> bool:
    """Whether code is to be judged: a backward pass takes again what was, but for rules in it."""
    is_rule = any(kind != "tangent" for kind, _ in RULE.findall(scopes))
    return is_rule or "transpose(jvp(" not in scopes


def is_tangent(scopes: str) -> bool:
    """Whether code is that of a rule of `jax.custom_jvp`, in a backward pass."""
    return bool(RULE.search(scopes)) and not is_judged(scopes)


class Ranks(Reading[int]):
    """Finds what picks by the worker's number, and what workers would not all take part in.

    A body whose specs do not name the axis has all workers' rows under `jax.jit`, on each device.
    There the worker's number picks some of them. Here it would pick of one worker's. Factors may be
    made of the number, and weights be picked by it, if they are the same for all rows.

    Attributes:
        picked: operations in such bodies that mask rows, or what is made of them, by the number,
            index, sort or split them by it, or run a branch, a loop or a kernel by it. By their id,
            the numbers of their bodies.
        weighed: operations that combine these with factors or weights that depend on the number. By
            their id, the numbers of their bodies, and for each such operand whether it is a factor.
        alone: the names and places of branches and loops that communicate, and whose condition is a
            worker's own.
        is_used: whether the number is used at all, but for keys of random numbers.
    """

    nothing = 0

    def __init__(self, axis_name: str) -> None:
        super().__init__()
        self.picked, self.is_used = dict[int, int](), False
        self.alone = list[tuple[str, str]]()
        self.weighed = dict[int, tuple[int, dict[int, bool]]]()
        self._axis_name = axis_name

    @classmethod
    def in_program(cls, program: Jaxpr, is_own: Sequence[bool], axis_name: str) -> "Ranks":
        found = cls(axis_name)
        found.program(program, [_OWN if yes else _EQUAL for yes in is_own])
        return found

    def join(self, values: Iterable[int]) -> int:
        return functools.reduce(operator.or_, values, 0)

    def decided(self, equation: Any, by: int, inputs: list[int]) -> None:
        programs = [*compat.inner_programs(equation.params)]
        is_own = by & (_OWN | _RANKED)
        if is_own and any(shard_maps.communicates(inner, self._axis_name) for inner in programs):
            inside = (e for inner in programs for e, _ in compat.scoped(inner))
            every = filter(None, (equation, self.around, *inside))
            where = next((e for e in every if compat.frames_of(e)[0]), equation)
            self.alone.append((equation.primitive.name, compat.place_of(where)))
        if _is_picked(by):
            self._picks(equation, inputs)

    def _body(self) -> int | None:
        """The number of the body that an operation is in, if its specs do not name the axis."""
        found = _WHOLE.findall(self.scopes)
        return int(found[-1]) if found and shard_maps.CUT not in self.scopes else None

    def _picks(self, equation: Any, of: Sequence[int]) -> None:
        number, kinds = self._body(), _OWN | (_EQUAL if is_tangent(self.scopes) else 0)
        # One worker alone may print.
        if number is not None and equation.outvars and self.join(of) & kinds:
            self.picked[id(equation)] = number

    def operation(self, equation: Any, inputs: list[int]) -> list[int]:
        name, params = equation.primitive.name, equation.params
        if name == "shard_map":
            return self.program(params["jaxpr"], inputs)
        made_of = [x.aval for x in equation.outvars]
        is_over = self._axis_name in compat.axes_of(params)
        made, indices = self.join(inputs), split(equation, inputs)[1]
        is_key = name.startswith(DRAWN) or any(
            jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in made_of
        )
        programs = [*compat.inner_programs(params)]
        if is_over and name in compat.OPCODES:
            if name in compat.MOVING or params.get("axis_index_groups") is not None:
                made |= 0 if made & _OWN else _RANKED
                self._picks(equation, inputs if name in _DIVIDING else ())
            else:
                made = _EQUAL
        elif name == "axis_index" and is_over:
            made = _RANKED
        elif name in compat.KERNELS | OTHERS:
            of_kernel = [e for inner in programs for e, _ in compat.scoped(inner)]
            is_over |= any(self._axis_name in compat.axes_of(e.params) for e in of_kernel)
            made |= _RANKED if is_over else 0
            self._picks(equation, inputs if is_over or any(map(_is_picked, inputs)) else ())
        elif programs:  # that of a linear solve, and of what is not known
            for inner in programs:
                made |= self.join(self.program(inner, [made] * len(inner.invars)))
        picked = [i for i, x in enumerate(inputs) if _is_picked(x)]
        is_mask = any(inputs[i] & (_COMPARED | _EQUAL) == _COMPARED for i in picked)
        is_one_by_one = name in ELEMENTWISE | {"dot_general"} or compat.is_elementwise(equation)
        by = {"select_n": inputs[:1], "sort": inputs}.get(name, indices)
        if picked and not is_key:
            if is_mask or any(map(_is_picked, by)):
                self._picks(equation, inputs)
            elif is_one_by_one and made & _OWN and (number := self._body()) is not None:
                self.weighed[id(equation)] = number, {i: not inputs[i] & _EQUAL for i in picked}
        if name in _COMPARISONS and _is_picked(made):
            made |= _COMPARED
        # A whole number may become a key's, as step * W + rank. Behind a clamp it picks a branch.
        is_number = name != "clamp" and all(
            x.shape == () and jnp.issubdtype(x.dtype, jnp.integer) for x in made_of
        )
        self.is_used |= bool(self.join(inputs) & _RANKED) and not is_key and not is_number
        if is_key and made & _RANKED:
            made = _OWN
        return [made] * len(equation.outvars)


def _is_picked(bits: int) -> bool:
    """Whether a value is made of the worker's number, and of nothing else of its own."""
    return bool(bits & _RANKED) and not bits & _OWN


def split(equation: Any, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """What is known of an operation's operands, apart from indices, and of these."""
    name = equation.primitive.name
    if name.startswith("scatter"):
        return [inputs[0], inputs[2]], inputs[1:2]
    first = _OPERANDS.get(name, len(inputs))
    return inputs[:first], inputs[first:]


def uses_number(program: Jaxpr, axis_name: str) -> bool:
    """Whether a body uses the worker's number, but for keys of random numbers."""
    ranks = Ranks(axis_name)
    made = ranks.program(program, [_EQUAL] * len(program.invars))
    return ranks.is_used or bool(ranks.join(made) & _RANKED)


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
