"""A reader for compiled HLO text: computations, instructions, shapes, groups of workers.

It splits the text of `jax.stages.Compiled.as_text()`, or of a dump. Operands may have shapes or
not, and names may begin with `%` or not, because XLA versions differ in that.

A worker is a number: its place in the order of the program's devices. JAX makes one replica, and a
partition for each device of a mesh, in the order of `mesh.devices.flat`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

_COMPUTATION = re.compile(
    r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*\n((?:.*\n)*?)\}\s*(?:,.*)?$", re.MULTILINE
)
_ROOT = re.compile(r"^\s+ROOT\s+%?([^\s=]+) = ", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([^\s=]+) = ", re.MULTILINE)
_TRIP_COUNT = re.compile(r'known_trip_count\\?"\s*:\s*\{\s*\\?"n\\?"\s*:\s*\\?"?(\d+)')
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LEAF = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](\{[^{}]*\})?")
_DTYPE_BITS = re.compile(r"(?:bf|[sufc])(\d+)(?:e\w+)?")
_CALLEES = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)
# Groups of workers: {{0,1},{2,3}}, and {} for one group of all.
_EXPLICIT = re.compile(r"\{\s*((?:\{[\d,\s]*\}[,\s]*)*)\}")
# [groups,size]<=[extents]T(permutation): numbers in the order of a transposed array.
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# There are two spellings: mesh['a'=4,'b'=2] {'a'} and @mesh<a=4,b=2> {a}. device_ids orders the
# workers of the mesh. 'a':(1)2 means a factor 2 of the axis, after a factor 1.
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^{}]*)\}"
)
_MESH_AXIS = re.compile(r"'?([^',=\s]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?")
_DEVICE_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{\s*\d+\s*,\s*\d+\s*\},?)*)\s*\}")
# With a channel, their groups are of replicas, each of which stands for all of its partitions.
_OF_REPLICAS = ("all-reduce", "all-gather", "reduce-scatter")


class Shape(NamedTuple):
    """One array of an HLO type, as XLA prints it without its layout, and its bytes in memory."""

    printed: str
    nbytes: int


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
        """Names of the instructions that make the operands."""
        return tuple(_maker(argument)[0] for argument in self.arguments)

    @functools.cached_property
    def structure(self) -> str:
        """The attributes with empty strings, so that user text cannot look like syntax."""
        return _STRING.sub('""', self.attributes)

    @property
    def op_name(self) -> str:
        """The JAX name stack from the metadata, or an empty string."""
        match = re.search(r'\bop_name=("(?:[^"\\]|\\.)*")', self.attributes)
        return re.sub(r"\\(.)", r"\1", match[1][1:-1]) if match else ""

    @property
    def trip_count(self) -> int | None:
        """The number of turns that XLA writes beside a `while` whose bounds are static, or None."""
        known = _TRIP_COUNT.search(self.attributes)
        return int(known[1]) if known else None

    @property
    def callees(self) -> dict[str, tuple[str, ...]]:
        """Names of the called computations, by attribute."""
        found = _CALLEES.findall(self.structure)
        return {role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in found}


class Computation(NamedTuple):
    """Instructions by name, in the printed order, and the one whose value it returns."""

    instructions: dict[str, Instruction]
    root: Instruction

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """The arrays that `instruction` takes, with tuples flattened."""
        return tuple(
            shape
            for argument in instruction.arguments
            for shape in parse_type(self._type(instruction, argument))
        )

    def _type(self, instruction: Instruction, argument: str) -> str:
        """The type of an argument, as printed."""
        name, *elements = _maker(argument)
        if name not in self.instructions:
            if printed := " ".join(argument.split()[:-1]):
                return printed
            raise ValueError(
                f"operand {name!r} of {instruction.name!r} has no known type; pass the "
                "complete text of Compiled.as_text()"
            )
        printed = self.instructions[name].type
        for element in elements:
            printed = _parts(printed, 0)[0][int(element)]
        return printed

    def op_names(self, instruction: Instruction) -> tuple[str, ...]:
        """The JAX name stack of each operand of a collective.

        XLA combines collectives of one kind. Each result keeps its own name where it is taken out
        of the tuple. Without a result for each operand, all have the name of the instruction.
        """
        names = [instruction.op_name] * len(self.operand_shapes(instruction))
        end: Instruction | None = instruction
        if instruction.opcode.endswith("-start"):
            done = instruction.opcode.removesuffix("start") + "done"
            end = next(self._users(instruction, done), None)
        if end and len(names) == len(parse_type(end.type)) > 1:
            for user in self._users(end, "get-tuple-element"):
                index = int(re.findall(r"\bindex=(\d+)", user.structure)[0])
                names[index] = user.op_name or names[index]
        return tuple(names)

    def trip_count(self, loop: Instruction, module: Module) -> int | None:
        """The number of turns of a `while` of this computation, or None if it is not known.

        XLA writes it, but for TPUs. There the bounds of a counter are read: a constant at first,
        more by a constant in each turn, below a constant.
        """
        if loop.trip_count is not None:
            return loop.trip_count
        test, body = (module.computations[loop.callees[x][0]] for x in ("condition", "body"))
        is_below = test.root.opcode == "compare" and "direction=LT" in test.root.structure
        if not is_below or len(test.root.operands) != 2:
            return None
        index = test._element(test.root.operands[0])
        start, made = self.instructions.get(loop.operands[0]), body.root
        if index is None or made.opcode != "tuple" or start is None or start.opcode != "tuple":
            return None
        step = body.instructions.get(made.operands[index])
        if step is None or step.opcode != "add" or body._element(step.operands[0]) != index:
            return None
        first, end = self._constant(start.operands[index]), test._constant(test.root.operands[1])
        more = body._constant(step.operands[1])
        if more is None or more < 1 or first is None or end is None:
            return None
        return max(-(-(end - first) // more), 0)

    def _made(self, name: str) -> Instruction | None:
        """What makes a value, behind copies."""
        found = self.instructions.get(name)
        while found is not None and found.opcode in ("copy", "bitcast"):
            found = self.instructions.get(found.operands[0])
        return found

    def _element(self, name: str) -> int | None:
        """Which element of the computation's parameter a value is, or None."""
        found = self._made(name)
        if found is None or found.opcode != "get-tuple-element":
            return None
        of = self.instructions.get(found.operands[0])
        is_parameter = of is not None and of.opcode == "parameter"
        return int(re.findall(r"\bindex=(\d+)", found.structure)[0]) if is_parameter else None

    def _constant(self, name: str) -> int | None:
        """The value of an integer that is written in the program, or None."""
        found = self._made(name)
        if found is None or found.opcode != "constant":
            return None
        return int(found.arguments[0]) if re.fullmatch(r"-?\d+", found.arguments[0]) else None

    def origin(self, instruction: Instruction) -> str:
        """The JAX name stack of an instruction, or of the nearest one that makes its operand."""
        found: Instruction | None = instruction
        while found is not None and not found.op_name:
            found = self.instructions.get(found.operands[0]) if found.operands else None
        return found.op_name if found is not None else ""

    def _users(self, of: Instruction, opcode: str) -> Iterator[Instruction]:
        every = (each for each in self.instructions.values() if each.opcode == opcode)
        return (each for each in every if of.name in each.operands)


class Module(NamedTuple):
    """A compiled module. `frames` has file and line of each stack frame, by its number."""

    computations: dict[str, Computation]
    entry: str
    workers: int
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

    def groups(self, instruction: Instruction) -> list[list[int]]:
        """The workers of each group of a collective.

        Of a collective-permute, they are the pairs of a source and a target whose data leave the
        worker. Raises ValueError if the groups are absent or have an unknown form.
        """
        op = instruction.opcode.removesuffix("-start")
        if op == "collective-permute":
            return _moved_pairs(instruction)
        listed = [group for group in _groups(instruction) if group]
        of_replicas = (
            op in _OF_REPLICAS
            and "channel_id=" in instruction.structure
            and "use_global_device_ids=true" not in instruction.structure
        )
        if not listed or (of_replicas and listed == [[0]]):
            return [list(range(self.workers))]
        return listed


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
    if packed := re.search(r"E\((\d+)\)", layout):
        bits = int(packed[1])
    elif layout:
        bits = max(bits, 8)
    nbytes = -(-math.prod(map(int, extents)) * bits // 8)
    return Shape(f"{dtype}[{','.join(extents)}]", nbytes)


def parse(text: str) -> Module:
    """Reads the text of one compiled HLO module."""
    headers = re.findall(r"^HloModule .*$", text, re.MULTILINE)
    if len(headers) != 1:
        raise ValueError(
            f"expected one HloModule in the text, found {len(headers)}; pass a jax.stages.Compiled "
            "such as jitted.lower(*args).compile() (Lowered.as_text() is StableHLO, not HLO)"
        )
    sizes = dict(re.findall(r"\b(replica_count|num_partitions)=(\d+)", headers[0]))
    if len(sizes) == 2 and "1" not in sizes.values():
        raise ValueError(f"{headers[0]!r}: replicas of several partitions are not understood")
    computations: dict[str, Computation] = {}
    entry = ""
    for is_entry, name, body in _COMPUTATION.findall(text):
        # A literal or an attribute may be printed over several lines.
        before, *pieces = _INSTRUCTION.split(body)
        if before.strip():
            raise ValueError(f"cannot read this of HLO computation {name!r}: {before.strip()!r}")
        found = [_instruction(*piece) for piece in zip(pieces[::2], pieces[1::2])]
        by_name = {each.name: each for each in found}
        root = _ROOT.search(body)
        computations[name] = Computation(by_name, by_name[root[1]] if root else found[-1])
        entry = name if is_entry else entry
    if not entry:
        raise ValueError(
            "the HLO text has no complete ENTRY computation; it may have been cut short"
        )
    return Module(computations, entry, math.prod(map(int, sizes.values())), _frames(text))


def _frames(text: str) -> dict[str, str]:
    """File and line by the number of the stack frame, from the tables before the computations."""

    def rows(table: str, pattern: str) -> list[Any]:
        found = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return re.findall(rf"^(\d+) {pattern}", found[1], re.MULTILINE) if found else []

    files = dict(rows("FileNames", '"(.*)"$'))
    located = rows("FileLocations", r"\{file_name_id=(\d+) .*?\bline=(\d+)")
    lines = {number: f"{files[file]}:{line}" for number, file, line in located if file in files}
    frames = rows("StackFrames", r"\{file_location_id=(\d+)")
    return {number: lines[location] for number, location in frames if location in lines}


def _instruction(name: str, text: str) -> Instruction:
    end = _parts(text, 0)[1] if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, max(end, 0))
    if not opcode:
        raise ValueError(f"cannot read HLO instruction {name!r}: {text[:120]!r}")
    arguments, close = _parts(text, opcode.end() - 1)
    return Instruction(name, text[:end], opcode[1], tuple(arguments), text[close:].rstrip())


def _parts(text: str, start: int) -> tuple[list[str], int]:
    """What stands between the commas of a parenthesis that opens at `start`, and where it ends.

    It drops comments such as `/*index=5*/`.
    """
    parts, depth, begin = [], 0, start + 1
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]').finditer(text, start):
        depth += {**dict.fromkeys("([{", 1), **dict.fromkeys(")]}", -1)}.get(match[0], 0)
        if depth == 0 or (depth == 1 and match[0] == ","):
            parts.append(re.sub(r"/\*.*?\*/", "", text[begin : match.start()]).strip())
            begin = match.end()
        if depth == 0:
            return [part for part in parts if part], begin
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]!r}")


def _maker(argument: str) -> list[str]:
    """The instruction that makes an argument, and its element: newer XLA prints `name#2`."""
    return argument.split()[-1].lstrip("%").split("#")


def _groups(instruction: Instruction) -> list[list[int]]:
    """The groups as the instruction lists them."""
    text = instruction.structure.partition("replica_groups=")[2]
    try:
        if iota := _IOTA.match(text):
            return _transposed(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])).tolist()
        if mesh := _MESH.match(text):
            return _along_axes(*mesh.groups())
        if explicit := _EXPLICIT.match(text):
            return [_integers(group) for group in re.findall(r"\{([^{}]*)\}", explicit[1])]
    except (KeyError, ValueError):  # numbers or axes that do not fit together
        pass
    raise ValueError(
        f"{instruction.opcode} {instruction.name!r}: cannot read its replica_groups, found "
        f"{text[:60] or 'none'}; known forms are {{{{0,1}},{{2,3}}}}, {{}}, [2,4]<=[8] and "
        "mesh['data'=8] {'data'}; report the HLO line to have a new one added"
    )


def _along_axes(axes: str, order: str | None, grouped: str) -> list[list[int]]:
    """Groups of workers that differ along the axes of a mesh, or along factors of them."""
    extents = {axis: int(extent) for axis, extent in _MESH_AXIS.findall(axes)}
    shape = tuple(extents.values())
    # Each worker's coordinates, without the parts in which the members of a group differ.
    shared = dict(zip(extents, np.indices(shape).reshape(len(shape), -1)))
    for axis, before, part in _GROUP_AXIS.findall(grouped):
        size = int(part or extents[axis])
        behind, rest = divmod(extents[axis], int(before or 1) * size)
        if rest:
            raise ValueError(f"{part} is no factor of axis {axis!r}")
        shared[axis] -= shared[axis] // behind % size * behind
    groups = np.ravel_multi_index(tuple(shared.values()), shape)
    if ids := _DEVICE_IDS.fullmatch((order or "").strip()):
        workers = _transposed(ids[1], ids[2])
    else:
        workers = np.array(_integers(order)) if order else np.arange(groups.size)
    workers = workers.reshape(groups.size)
    return [workers[groups == group].tolist() for group in np.unique(groups)]


def _transposed(extents: str, axes: str | None) -> np.ndarray:
    """Counting numbers as an array of these extents, with its axes permuted."""
    shape = _integers(extents)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_integers(axes) if axes else None)


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


def _moved_pairs(instruction: Instruction) -> list[list[int]]:
    """Pairs [source, target] of a collective-permute whose data leaves the worker."""
    match = _PAIRS.search(instruction.structure)
    if not match or "slice_sizes=" in instruction.structure:
        raise ValueError(
            f"collective-permute {instruction.name!r}: only whole operands and the form "
            "source_target_pairs={{0,1},...} are understood; report the HLO line to have it added"
        )
    pairs = [[int(s), int(t)] for s, t in re.findall(r"(\d+)\s*,\s*(\d+)", match[1])]
    return [pair for pair in pairs if pair[0] != pair[1]]
