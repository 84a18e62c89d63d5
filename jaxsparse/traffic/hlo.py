"""A reader for compiled HLO text: computations, instructions, shapes.

It splits the text of `jax.stages.Compiled.as_text()`, or of a dump, and interprets no attribute.
Operands may have shapes or not, and names may begin with `%` or not, because XLA versions differ in
that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([^\s=]+) = (.*)$", re.DOTALL)
_TRIP_COUNT = re.compile(r'known_trip_count\\?"\s*:\s*\{\s*\\?"n\\?"\s*:\s*\\?"?(\d+)')
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LEAF = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](\{[^{}]*\})?")
_DTYPE_BITS = re.compile(r"(?:bf|[sufc])(\d+)(?:e\w+)?")
_CALLEES = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of an HLO type. `dtype` is XLA's name; an element has `bits` in memory."""

    dtype: str
    dims: tuple[int, ...]
    bits: int

    @property
    def nbytes(self) -> int:
        return -(-math.prod(self.dims) * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO, split but not interpreted.

    `type` is the result's, as printed. `arguments` is the text between the parentheses, split at
    its commas, and `attributes` the text behind them.
    """

    name: str
    type: str
    opcode: str
    arguments: tuple[str, ...]
    attributes: str

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, without `%`."""
        return tuple(a.split()[-1].lstrip("%") for a in self.arguments)

    @functools.cached_property
    def structure(self) -> str:
        """The attributes with empty strings, so that user text cannot look like syntax."""
        return _STRING.sub('""', self.attributes)

    @property
    def op_name(self) -> str:
        """The JAX name stack from the metadata, or an empty string."""
        match = re.search(r'\bop_name=("(?:[^"\\]|\\.)*")', self.attributes)
        return re.sub(r"\\(.)", r"\1", match[1][1:-1]) if match else ""

    def flag(self, name: str) -> bool:
        return re.search(rf"\b{name}=true\b", self.structure) is not None

    @functools.cached_property
    def callees(self) -> dict[str, tuple[str, ...]]:
        """Names of the called computations, by attribute."""
        found = _CALLEES.findall(self.structure)
        return {role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in found}


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, in the printed order."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """The arrays that `instruction` takes, with tuples flattened."""
        shapes: list[Shape] = []
        for name, argument in zip(instruction.operands, instruction.arguments):
            made_by = self.instructions.get(name)
            printed = made_by.type if made_by else " ".join(argument.split()[:-1])
            if not printed:
                raise ValueError(
                    f"operand {name!r} of {instruction.name!r} has no known type; pass the "
                    "complete text of Compiled.as_text()"
                )
            shapes += parse_type(printed)
        return tuple(shapes)

    def result_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """The arrays that `instruction` returns, with tuples flattened.

        The results of a start are what its done returns. They are unknown if the done is missing.
        """
        end = self._end(instruction)
        return parse_type(end.type) if end else ()

    def op_names(self, instruction: Instruction) -> tuple[str, ...]:
        """The JAX name stack of each operand of a collective.

        XLA combines collectives of one kind. Each result keeps its own name where it is taken out
        of the tuple. Without a result for each operand, all have the name of the instruction.
        """
        names = [instruction.op_name] * len(self.operand_shapes(instruction))
        end = self._end(instruction)
        if end and len(names) == len(parse_type(end.type)) > 1:
            for user in self._users.get(end.name, ()):
                if user.opcode == "get-tuple-element" and user.op_name:
                    index = int(re.findall(r"\bindex=(\d+)", user.structure)[0])
                    names[index] = user.op_name
        return tuple(names)

    def _end(self, instruction: Instruction) -> Instruction | None:
        """The instruction that returns what `instruction` computes: itself, or its done."""
        if not instruction.opcode.endswith("-start"):
            return instruction
        opcode = instruction.opcode.removesuffix("-start")
        users = self._users.get(instruction.name, ())
        return next((user for user in users if user.opcode == f"{opcode}-done"), None)

    @functools.cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module. `frames` has file and line of each stack frame, by its number."""

    computations: dict[str, Computation]
    entry: str
    replicas: int
    partitions: int
    frames: dict[str, str]

    def source(self, instruction: Instruction) -> str:
        """The innermost file and line that an instruction stems from, or an empty string.

        XLA versions differ in whether the metadata say it, or refer to a table before the
        computations.
        """
        if frame := re.search(r"\bstack_frame_id=(\d+)", instruction.structure):
            return self.frames.get(frame[1], "")
        file = re.search(r'\bsource_file="([^"]*)"', instruction.attributes)
        line = re.search(r"\bsource_line=(\d+)", instruction.structure)
        return ":".join(match[1] for match in (file, line) if match)


def parse_type(text: str) -> tuple[Shape, ...]:
    """Splits a printed HLO type into its arrays. Tokens and opaque values have no bytes."""
    return tuple(
        _shape(*leaf) for leaf in _LEAF.findall(text) if leaf[0] not in ("token", "opaque")
    )


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    extents = [d.strip().removeprefix("<=") for d in dims.split(",") if d.strip()]
    width = _DTYPE_BITS.fullmatch(dtype)
    if not all(d.isdigit() for d in extents) or not (width or dtype == "pred"):
        raise ValueError(
            f"cannot tell the size of {dtype}[{dims}]: its type or an extent is not known; "
            "give the program static shapes"
        )
    bits = int(width[1]) if width else 8
    # XLA packs a sub-byte type only if the layout says E(bits). Otherwise each element takes a
    # byte. Without a layout it is not known, and the packed size is the logical one.
    packed = re.search(r"E\((\d+)\)", layout)
    if packed:
        bits = int(packed[1])
    elif layout:
        bits = max(bits, 8)
    return Shape(dtype, tuple(map(int, extents)), bits)


def parse(text: str) -> Module:
    """Reads the text of one compiled HLO module."""
    headers = re.findall(r"^HloModule .*$", text, re.MULTILINE)
    if len(headers) != 1:
        raise ValueError(
            f"expected one HloModule in the text, found {len(headers)}; pass a jax.stages.Compiled "
            "such as jitted.lower(*args).compile() (Lowered.as_text() is StableHLO, not HLO)"
        )
    computations: dict[str, Computation] = {}
    entry = None
    name, lines = "", list[str]()
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not name:
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif name and re.match(r"\}\s*(,.*)?$", line):
            computations[name] = _computation(name, lines)
            name = ""
        elif name and (_INSTRUCTION.match(line) or not lines):
            lines.append(line)
        elif name:  # a literal or an attribute printed over several lines
            lines[-1] += "\n" + line
    if entry is None or entry not in computations:
        raise ValueError(
            "the HLO text has no complete ENTRY computation; it may have been cut short"
        )
    sizes = {
        key: int(found[1]) if (found := re.search(rf"\b{key}=(\d+)", headers[0])) else 1
        for key in ("replica_count", "num_partitions")
    }
    return Module(
        computations, entry, sizes["replica_count"], sizes["num_partitions"], _frames(text)
    )


def _frames(text: str) -> dict[str, str]:
    """File and line by the number of the stack frame, from the tables of a module's text."""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for line in text.splitlines():
        if _HEADER.match(line):
            break
        if line in ("FileNames", "FileLocations", "StackFrames"):
            table = tables[line] = {}
        elif row := re.match(r"(\d+) (.*)", line):
            table[row[1]] = row[2]
        else:
            table = {}  # another table

    def field(name: str, row: str) -> str:
        found = re.search(rf"\b{name}=(\d+)", row)
        return found[1] if found else ""

    frames = {}
    for number, frame in tables.get("StackFrames", {}).items():
        location = tables.get("FileLocations", {}).get(field("file_location_id", frame), "")
        name = tables.get("FileNames", {}).get(field("file_name_id", location), "").strip('"')
        frames[number] = f"{name}:{field('line', location)}" if name else ""
    return frames


def _computation(name: str, lines: list[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in lines:
        match = _INSTRUCTION.match(line)
        if not match:
            raise ValueError(f"cannot read this line of HLO computation {name!r}: {line.strip()!r}")
        instruction = _instruction(match[2], match[3])
        for operand in instruction.operands:
            _take_out(operand, instructions)
        instructions[instruction.name] = instruction
        root = instruction.name if match[1] else root
    if not instructions:
        raise ValueError(f"HLO computation {name!r} is empty")
    # XLA's rule: if no instruction has the mark, the last one is the root.
    return Computation(name, instructions, instructions[root or next(reversed(instructions))])


def _take_out(operand: str, instructions: dict[str, Instruction]) -> None:
    """Adds the `get-tuple-element` that dumps of jaxlib 0.12 shorten to `name#2`."""
    name, short, index = operand.rpartition("#")
    if not short or operand in instructions:
        return
    _take_out(name, instructions)
    if name in instructions:
        types = _split(instructions[name].type.removeprefix("(").removesuffix(")"))
        instructions[operand] = Instruction(
            operand, types[int(index)], "get-tuple-element", (name,), f", index={index}"
        )


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, max(end, 0))
    if not opcode:
        raise ValueError(f"cannot read HLO instruction {name!r}: {text[:120]!r}")
    close = _closing(text, opcode.end() - 1)
    return Instruction(
        name=name,
        type=text[:end],
        opcode=opcode[1],
        arguments=tuple(_split(text[opcode.end() : close])),
        attributes=text[close + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]!r}")


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets and strings, and drops `/*index=5*/` comments."""
    text = re.sub(r"/\*.*?\*/", "", text)
    parts, depth, start = [], 0, 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]', text):
        depth += {**dict.fromkeys("([{", 1), **dict.fromkeys(")]}", -1)}.get(match[0], 0)
        if match[0] == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [part for part in [*parts, text[start:].strip()] if part]


def trip_count(loop: Instruction) -> int | None:
    """The number of turns that XLA writes beside a `while` whose bounds are static, or None."""
    known = _TRIP_COUNT.search(loop.attributes)
    return int(known[1]) if known else None
