"""What values of a traced program are made of, followed from operation to operation.

Loops, branches and inner functions are followed here, so that a reader says only what one operation
makes of what it is given.
"""

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, Literal

from jaxsparse.comm import compat

T = TypeVar("T")


class Reading(abc.ABC, Generic[T]):
    """Follows what is known of values through a program.

    Attributes:
        nothing: what is known of all else.
        scopes: those of the equations around the one that is read, "" outside of any.
        depth: how many scans are around the one that is read.
        around: the outermost call of an inner function that is read. JAX keeps traces of these, so
            that places inside may be those of another call.
    """

    nothing: T

    def __init__(self) -> None:
        self.scopes, self.depth = "", 0
        self._kept = dict[Any, T]()  # by references, what was written
        self.around: Any = None

    @abc.abstractmethod
    def operation(self, equation: Any, inputs: list[T]) -> list[T]:
        """What an operation without a known inner program makes."""

    @abc.abstractmethod
    def join(self, values: Iterable[T]) -> T:
        """What is known of a value that is one of these, or made of them element by element."""

    def sliced(self, value: T, equation: Any) -> T:
        """What is known, in a scan, of a slice along the first axis."""
        return value

    def stacked(self, value: T) -> T:
        """What is known of such values, stacked along a new first axis."""
        return value

    def carried(self, value: T, equation: Any) -> T:
        """What is known, in the next turn of a scan and behind it, of a value that it carries."""
        return value

    def decided(self, equation: Any, by: T, inputs: list[T]) -> None:
        """Told what is known of what picks a branch, or ends a loop, and of their operands."""

    def read(self, equations: Iterable[Any], known: dict[Any, T]) -> dict[Any, T]:
        """What is known of variables, with those that equations make."""
        for equation in equations:
            inputs = [self.of(known, x) for x in compat.inputs_of(equation)]
            known.update(zip(equation.outvars, self.equation(equation, inputs)))
            written = [x for x in compat.inputs_of(equation) if compat.is_reference(x)]
            for x in written:  # it keeps this for the next turn of a loop, and behind a call, too
                inner = self._inner_references(equation)
                kept = [self._kept[y] for y in inner if y in self._kept]
                known[x] = self._kept[x] = self.join((*kept, self.of(known, x), *inputs))
        return known

    def _inner_references(self, equation: Any) -> Iterator[Any]:
        for program in compat.inner_programs(equation.params):
            yield from filter(compat.is_reference, program.invars)

    def of(self, known: dict[Any, T], x: Any) -> T:
        return self.nothing if isinstance(x, Literal) else known.get(x, self.nothing)

    def program(self, program: Jaxpr, given: Sequence[T]) -> list[T]:
        """What is known of a program's outputs."""
        before = [(x, self._kept[x]) for x in program.invars if x in self._kept]
        known = dict(zip(program.invars, given))
        known.update((x, self.join((self.of(known, x), kept))) for x, kept in before)
        known = self.read(program.eqns, known)
        return [self.of(known, x) for x in program.outvars]

    def equation(self, equation: Any, inputs: list[T]) -> list[T]:
        """What is known of an equation's outputs."""
        name, programs = equation.primitive.name, [*compat.inner_programs(equation.params)]
        with self._inside(equation, name):
            if name == "scan":
                constants, carried = compat.carried_by(equation)
                rest = constants + carried
                self.depth += 1
                given = [*inputs[:rest], *(self.sliced(x, equation) for x in inputs[rest:])]
                made = self._repeated(programs[0], given, constants, carried, equation)
                made = [*made[:carried], *map(self.stacked, made[carried:])]
                self.depth -= 1
                return made
            if name == "while":
                outside = equation.params["cond_nconsts"]
                given, constants = inputs[outside:], equation.params["body_nconsts"]
                body = equation.params["body_jaxpr"].jaxpr
                made = self._repeated(body, given, constants, len(given) - constants, equation)
                test = equation.params["cond_jaxpr"].jaxpr
                (again,) = self.program(test, [*inputs[:outside], *made])
                self.decided(equation, again, given)
                return [self.join((again, x)) for x in made]
            if name == "cond":
                self.decided(equation, inputs[0], inputs[1:])
                branches = [self.program(branch, inputs[1:]) for branch in programs]
                return [self.join((inputs[0], *each)) for each in zip(*branches)]
            is_call = len(programs) == 1 and len(programs[0].invars) == len(inputs)
            if is_call and name in compat.CALLS and name != "shard_map":
                return self.program(programs[0], inputs)
            return self.operation(equation, inputs)

    @contextlib.contextmanager
    def _inside(self, equation: Any, name: str) -> Iterator[None]:
        before = self.scopes, self.around
        self.scopes += "/" + compat.name_stack(equation)
        if self.around is None and name in ("jit", "pjit"):
            self.around = equation
        try:
            yield
        finally:
            self.scopes, self.around = before

    def _repeated(
        self, body: Jaxpr, given: list[T], first: int, carried: int, equation: Any
    ) -> list[T]:
        """What a loop makes. What it carries goes through it until nothing new is known."""
        written = dict(self._kept)
        while True:
            made = self.program(body, given)
            before, references = given[first : first + carried], written
            kept = [self.carried(x, equation) for x in made[:carried]]
            after = [self.join(pair) for pair in zip(before, kept)]
            written = dict(self._kept)
            if after == before and written == references:
                return [*after, *made[carried:]]
            given = [*given[:first], *after, *given[first + carried :]]
