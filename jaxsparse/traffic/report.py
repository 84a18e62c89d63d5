"""The result types of `wire_bytes`: the bytes that one run of a program moves between devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxsparse.arrays.printing import aligned

_WIDTH = 60  # characters of a cell that says where a collective comes from
# Bytes that one of W devices receives per byte of operand.
RECEIVED: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda W: 2 * (W - 1) / W,  # as a ring: reduce-scatter, then all-gather
    "reduce-scatter": lambda W: (W - 1) / W,
    "all-gather": lambda W: W - 1,
    "all-to-all": lambda W: (W - 1) / W,
    "ragged-all-to-all": lambda W: 1,  # of the output buffer; data decide how full it gets
    "collective-permute": lambda W: 1,
    "collective-broadcast": lambda W: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    op: str  #: the HLO opcode without `-start`, for example `all-reduce`
    name: str  #: the instruction's name in the HLO
    #: its operands as XLA prints them, for example `("f32[128]", "s32[]")`
    shapes: tuple[str, ...]
    #: number of devices in its largest group. For a permutation, number of devices that send or
    #: receive.
    group_size: int
    #: bytes of the operands that one device hands over in one execution. The maximum over devices;
    #: 0 in a group of one.
    payload_bytes: int
    received_bytes: float  #: bytes that arrive at one device in one execution, see `wire_bytes`
    #: executions in one run of the program, from the trip counts of the loops around it
    count: int = 1
    #: JAX's name stack, for example `jit(step)/shard_map/psum`. It may be empty. XLA may give a
    #: collective that moves an argument that argument's name, for example `w['kernel']`.
    op_name: str = ""
    #: the mesh axes along which members of one group differ, in the mesh's order. Empty for groups
    #: of one, and if the mesh was not given.
    axes: tuple[str, ...] = ()
    #: file and line of the Python code that it stems from, as far as XLA kept them
    source: str = ""

    def __str__(self) -> str:
        """One line for messages: what it is, over what, how large, and from where."""
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        where = ", ".join(filter(None, (self.op_name or self.name, self.source)))
        received = _number(self.received_bytes)
        return f"{self.op}{over}: {_few(self.shapes)}, {received} bytes received, from {where}"


def size_and_bytes(
    op: str, groups: Sequence[Sequence[int]], operands: Sequence[int]
) -> tuple[int, int, float]:
    """The group size, payload and received bytes of a collective, from its operands' bytes.

    The groups of a permutation are its pairs of a source and another worker as target.
    """
    if op == "collective-permute":
        size = max(len({worker for pair in groups for worker in pair}), 1)
    else:
        size = max(map(len, groups))
    # A ragged exchange takes its data, the buffer that receives, and vectors of offsets and sizes.
    sent, landing = operands[:2] if op == "ragged-all-to-all" else [sum(operands)] * 2
    return (size, sent, landing * RECEIVED[op](size)) if size > 1 else (1, 0, 0)


def axes_crossed(extents: Mapping[str, int], groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The axes along which two members of a group differ. They are numbered in row-major order."""
    if not groups or not extents:
        return ()
    members = np.concatenate([np.asarray(group) for group in groups])
    firsts = np.repeat([group[0] for group in groups], [len(group) for group in groups])
    one, other = (np.unravel_index(each, tuple(extents.values())) for each in (members, firsts))
    differ = (np.asarray(one) != np.asarray(other)).any(axis=1)
    return tuple(itertools.compress(extents, differ))


@dataclasses.dataclass(frozen=True)
class Conditional:
    """A `lax.cond` or `lax.switch` with at least one branch that communicates."""

    name: str  #: the instruction's name in the HLO
    count: int  #: number of executions in one run of the program
    #: the bytes of each branch if all `count` executions take it, in the order of `lax.switch`. For
    #: a `lax.cond`, `branches[0]` is the false and `branches[1]` the true one.
    branches: tuple[WireBytes, ...]
    op_name: str = ""  #: JAX's name stack. It may be empty.

    @functools.cached_property
    def dearest(self) -> int:
        """Index of the branch that receives most; then by payload, then by rounds."""
        costs = [(b.received, b.payload, b.rounds) for b in self.branches]
        return costs.index(max(costs))


@dataclasses.dataclass(frozen=True)
class WireBytes:
    """The bytes that one run of a program moves, for one device.

    If the program branches, `collectives` and the totals contain the dearest branch of every
    conditional (an upper bound that one branch reaches). `conditionals` contains all branches.

    If the mesh is known, `by_axes`, `across` and `within` split the bytes by mesh axis. A
    collective belongs to the set of axes along which members of one of its groups differ, and all
    of its bytes count there. An all-reduce over hosts and devices together thus counts wholly
    across hosts: the algorithm decides how much of it a link between two hosts carries, and for one
    device that is at most all.

    Attributes:
        parts: every collective and every outermost conditional that communicates, in the compiled
            order. Inner conditionals are in the branches of outer ones.
        axis_names: the axes of the mesh. Empty if the mesh is not known.
    """

    parts: tuple[Collective | Conditional, ...] = ()
    axis_names: tuple[str, ...] = ()

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective that runs if conditionals take their dearest branches."""
        return tuple(self._listed(lambda conditional: [conditional.branches[conditional.dearest]]))

    @property
    def conditionals(self) -> tuple[Conditional, ...]:
        """The outermost conditionals that communicate."""
        return tuple(part for part in self.parts if isinstance(part, Conditional))

    @property
    def payload(self) -> int:
        """Operand bytes that one device hands to collectives in one run."""
        return sum(c.count * c.payload_bytes for c in self.collectives)

    @property
    def received(self) -> float:
        """Bytes that one device receives in one run; maybe no whole number, as of 2 (W-1)/W n."""
        return sum(c.count * c.received_bytes for c in self.collectives)

    @property
    def rounds(self) -> int:
        """The number of collectives executed in one run, without groups of one device."""
        return sum(c.count for c in self.collectives if c.group_size > 1)

    @property
    def usual(self) -> WireBytes:
        """The same bytes with the cheapest branch of every conditional in place of the dearest.

        Most reducers branch if they do more in some steps, so most steps take the cheapest branch,
        in received bytes. SparDL's "bruck" is another case: its branches are messages of different
        sizes, of which its h chooses. The cheapest is the least that it may send, and a step sends
        more.
        """
        cost = lambda branch: (branch.received, branch.rounds)
        return WireBytes(
            tuple(self._listed(lambda conditional: [min(conditional.branches, key=cost)])),
            self.axis_names,
        )

    def across(self, axis_name: str) -> WireBytes:
        """The bytes of the collectives that cross a mesh axis, such as those between hosts.

        In a conditional, the branch that is dearest across this axis counts.
        """
        check_axis(self.axis_names, axis_name)
        return self._only(lambda axes: axis_name in axes)

    def within(self, axis_name: str) -> WireBytes:
        """The bytes of the collectives that do not cross a mesh axis, such as those in a host.

        Without conditionals, `across` and `within` add up to the whole. With them, each counts the
        branch that is dearest for itself.
        """
        check_axis(self.axis_names, axis_name)
        return self._only(lambda axes: axis_name not in axes)

    @property
    def by_axes(self) -> dict[tuple[str, ...], WireBytes]:
        """The bytes by the set of axes that a collective crosses; each collective is in one set."""
        check_axis(self.axis_names)
        found = {c.axes for c in self.every() if c.axes}
        order = sorted(found, key=lambda axes: [self.axis_names.index(axis) for axis in axes])
        return {axes: self._only(axes.__eq__) for axes in order}

    def every(self) -> Iterator[Collective]:
        """The collectives of all branches."""
        return self._listed(lambda conditional: conditional.branches)

    def _listed(
        self, branches: Callable[[Conditional], Iterable[WireBytes]]
    ) -> Iterator[Collective]:
        """The collectives, with those of some branches of each conditional."""
        for part in self.parts:
            if isinstance(part, Conditional):
                for branch in branches(part):
                    yield from branch._listed(branches)
            else:
                yield part

    def _only(self, wanted: Callable[[tuple[str, ...]], bool], times: int = 1) -> WireBytes:
        """What the collectives with wanted axes move in `times` runs."""
        parts: list[Collective | Conditional] = []
        for part in self.parts:
            part = dataclasses.replace(part, count=times * part.count)
            if isinstance(part, Conditional):
                branches = tuple(branch._only(wanted, times) for branch in part.branches)
                if any(branch.parts for branch in branches):
                    parts.append(dataclasses.replace(part, branches=branches))
            elif wanted(part.axes):
                parts.append(part)
        return WireBytes(tuple(parts), self.axis_names)

    def __str__(self) -> str:
        header = ["collective", "axes", "count", "W", "payload B", "received B", "operands", "from"]
        rows = [header, *map(_row, self.collectives)]
        if has_axes := len(self.axis_names) > 1:
            rows += [_total_row(", ".join(axes), moved) for axes, moved in self.by_axes.items()]
        rows.append(_total_row("all", self))
        if not has_axes:
            rows = [[op, *others] for op, _, *others in rows]
        numbers = range(2, 6) if has_axes else range(1, 5)
        table = [*aligned(rows, right=numbers), *self._conditional_lines("")]
        if not self.rounds:
            table.append("Nothing travels: no collective here has two members.")
        return "\n".join(table)

    def _conditional_lines(self, indent: str) -> Iterator[str]:
        for conditional in self.conditionals:
            where = conditional.op_name or conditional.name
            yield f"{indent}conditional {where}, executed {conditional.count} times:"
            for i, branch in enumerate(conditional.branches):
                counted = "  <- counted above" if i == conditional.dearest else ""
                yield (
                    f"{indent}  branch {i}: payload {branch.payload} B, received "
                    f"{_number(branch.received)} B, {branch.rounds} rounds{counted}"
                )
                yield from branch._conditional_lines(indent + "    ")


def check_axis(axis_names: tuple[str, ...], axis_name: str | None = None) -> None:
    """Raises a ValueError if there is no mesh, or if it has no axis `axis_name`."""
    if not axis_names:
        raise ValueError(
            "the mesh of these bytes is not known, so they have no axes: pass "
            "wire_bytes(..., mesh=mesh)"
        )
    if axis_name is not None and axis_name not in axis_names:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh: pass one of {axis_names}"
        )


def _row(c: Collective) -> list[str]:
    payload, received = c.count * c.payload_bytes, _number(c.count * c.received_bytes)
    numbers = [str(c.count), str(c.group_size), str(payload), received]
    where = c.op_name or c.name
    if len(where) > _WIDTH:  # its end says most
        where = f"...{where[-_WIDTH:]}"
    return [c.op, ", ".join(c.axes), *numbers, _few(c.shapes), where]


def _total_row(axes: str, moved: WireBytes) -> list[str]:
    numbers = [str(moved.rounds), "", str(moved.payload), _number(moved.received)]
    return ["total", axes, *numbers, "", ""]


def _few(shapes: tuple[str, ...]) -> str:
    return ", ".join(shapes[:3]) + (", ..." if len(shapes) > 3 else "")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def merged(parts: Iterable[WireBytes], axis_names: tuple[str, ...] = ()) -> WireBytes:
    """The bytes of programs that run one after the other, on a mesh with these axes."""
    return WireBytes(tuple(each for moved in parts for each in moved.parts), axis_names)


def repeated(moved: WireBytes, times: int) -> WireBytes:
    """The bytes of a program that runs `times` times."""
    return moved._only(lambda axes: True, times)
