"""The trip counts of compiled loops."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import TypeAlias

from jaxsparse.traffic.hlo import Computation, Instruction, Module

# An integer, a tuple of values, or None if it depends on data.
Value: TypeAlias = "int | tuple[Value, ...] | None"

_KNOWN = re.compile(r'known_trip_count\\?"\s*:\s*\{\s*\\?"n\\?"\s*:\s*\\?"?(\d+)')
_INTEGER = re.compile(r"(?:(pred)|([su])(\d+))\[\](?:\{[^{}]*\})?$")
_SAME = ("copy", "bitcast", "convert", "reshape", "opt-barrier")
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "minimum": min,
    "maximum": max,
}
_CALLS = ("fusion", "call")
_KNOWN_OPCODES = {*_SAME, *_BINARY, *_CALLS, "compare", "not", "tuple", "get-tuple-element"}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """The number of times the body of a `while` instruction runs.

    XLA writes the number beside most loops. For the others, this function runs the loop's integer
    counters from their initial constants until the condition fails. That is exact for any condition
    that depends on counters alone.

    Args:
      module: the module.
      computation: the computation that holds the loop.
      loop: an instruction with the opcode `while`.

    Returns:
      The count, or None if it depends on data (or exceeds a million and XLA did not write it).
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    (condition,), (body,) = loop.callees["condition"], loop.callees["body"]
    state = _value(module, computation, loop.operands[0], (), {})
    for trips in range(1_000_000):
        again = _call(module, condition, (state,))
        if again is None:
            return None
        if not again:
            return trips
        before, state = state, _call(module, body, (state,))
        if state == before:
            return None  # by its counters alone, the loop never ends
    return None


def _call(module: Module, name: str, arguments: tuple[Value, ...]) -> Value:
    computation = module.computations[name]
    return _value(module, computation, computation.root.name, arguments, {})


def _value(
    module: Module,
    computation: Computation,
    name: str,
    arguments: tuple[Value, ...],
    memo: dict[str, Value],
) -> Value:
    """The value of an instruction if constants and `arguments` determine it, else None."""
    if name not in memo:
        instruction = computation.instructions.get(name)
        if instruction is None:
            return None
        integer = _INTEGER.match(instruction.type)
        # Only counters and tuples of them matter.
        if integer or instruction.type.startswith("("):
            memo[name] = _evaluate(module, computation, instruction, arguments, memo)
        else:
            memo[name] = None
        value = memo[name]
        if integer and isinstance(value, int) and not _fits(value, integer):
            memo[name] = None  # it wrapped around: do not guess
    return memo[name]


def _fits(value: int, integer: re.Match[str]) -> bool:
    if integer[1]:
        return value in (0, 1)
    bits, signed = int(integer[3]), integer[2] == "s"
    return -(2 ** (bits - 1)) <= value < 2 ** (bits - 1) if signed else 0 <= value < 2**bits


def _evaluate(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    arguments: tuple[Value, ...],
    memo: dict[str, Value],
) -> Value:
    opcode = instruction.opcode
    if opcode == "parameter":
        index = int(instruction.arguments[0])
        return arguments[index] if index < len(arguments) else None
    if opcode == "constant":
        literal = instruction.arguments[0]
        if literal in ("true", "false"):
            return int(literal == "true")
        return int(literal) if re.fullmatch(r"-?\d+", literal) else None
    if opcode not in _KNOWN_OPCODES:
        return None
    values = tuple(
        _value(module, computation, operand, arguments, memo) for operand in instruction.operands
    )
    if opcode in _CALLS:
        (callee,) = instruction.callees.get("calls") or instruction.callees["to_apply"]
        return _call(module, callee, values)
    if opcode == "tuple":
        return values
    first = values[0]
    if opcode == "get-tuple-element":
        index = int(re.findall(r"\bindex=(\d+)", instruction.structure)[0])
        return first[index] if isinstance(first, tuple) else None
    if opcode in _SAME:
        return first
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) < len(values):
        return None
    if opcode == "not":
        return 1 - numbers[0] if instruction.type.startswith("pred") else None
    if opcode == "compare":
        direction = re.findall(r"\bdirection=(\w+)", instruction.structure)[0]
        return int(_COMPARE[direction](*numbers))
    return int(_BINARY[opcode](*numbers))
