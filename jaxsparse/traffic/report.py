"""The result types of `wire_bytes`: the bytes that one run of a program moves between workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jaxsparse.printing import aligned

# Bytes that one of W workers receives per byte of operand.
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
    """One collective instruction of the compiled program.

    Attributes:
      op: the HLO opcode without `-start`, for example `all-reduce`.
      name: the instruction's name in the HLO.
      shapes: its operands as XLA prints them, for example `("f32[128]", "s32[]")`.
      group_size: number of workers in its largest group. For a permutation, number of workers that
        send or receive.
      payload_bytes: bytes of the operands that one worker hands over in one execution. The maximum
        over workers; 0 in a group of one.
      received_bytes: bytes that arrive at one worker in one execution, by the formulas of
        `wire_bytes`. The maximum over workers.
      count: executions in one run of the program, from the trip counts of the loops around it.
      op_name: JAX's name stack, for example `jit(step)/shard_map/psum`. It may be empty.
    """

    op: str
    name: str
    shapes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    received_bytes: float
    count: int = 1
    op_name: str = ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """XLA's element type of each operand."""
        return tuple(shape.partition("[")[0] for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Conditional:
    """A `lax.cond` or `lax.switch` with at least one branch that communicates.

    Attributes:
      name: the instruction's name in the HLO.
      count: number of executions in one run of the program.
      branches: the bytes of each branch if all `count` executions take it, in the order of
        `lax.switch`. For a `lax.cond`, `branches[0]` is the false and `branches[1]` the true one.
      op_name: JAX's name stack. It may be empty.
    """

    name: str
    count: int
    branches: tuple[WireBytes, ...]
    op_name: str = ""

    @property
    def dearest(self) -> int:
        """Index of the branch that receives most; then by payload, then by rounds."""
        costs = [(b.received, b.payload, b.rounds) for b in self.branches]
        return costs.index(max(costs))


@dataclasses.dataclass(frozen=True)
class WireBytes:
    """The bytes that one run of a program moves, for one worker.

    If the program branches, `collectives` and the totals contain the dearest branch of every
    conditional (an upper bound that one branch reaches). `conditionals` contains all branches.

    Attributes:
      collectives: every collective that runs, in the compiled order.
      conditionals: the outermost conditionals that communicate. Inner ones are in the branches of
        outer ones.
    """

    collectives: tuple[Collective, ...] = ()
    conditionals: tuple[Conditional, ...] = ()

    @property
    def payload(self) -> int:
        """Operand bytes that one worker hands to collectives in one run."""
        return sum(c.count * c.payload_bytes for c in self.collectives)

    @property
    def received(self) -> float:
        """Bytes that one worker receives in one run.

        It may not be a whole number, because the formulas divide evenly among W workers.
        """
        return sum(c.count * c.received_bytes for c in self.collectives)

    @property
    def rounds(self) -> int:
        """The number of collectives executed in one run, without groups of one worker."""
        return sum(c.count for c in self.collectives if c.group_size > 1)

    @property
    def usual(self) -> WireBytes:
        """The same bytes with the cheapest branch of every conditional in place of the dearest.

        Reducers branch if they do more in some steps, so most steps take the cheapest branch.
        Received bytes decide which is cheapest and dearest.
        """
        collectives = list(self.collectives)
        for conditional in self.conditionals:
            for each in conditional.branches[conditional.dearest].collectives:
                collectives.remove(each)
            cheapest = min(conditional.branches, key=lambda b: (b.received, b.rounds))
            collectives += cheapest.usual.collectives
        return WireBytes(tuple(collectives))

    def __str__(self) -> str:
        head = ("collective", "count", "W", "payload B", "received B", "operands", "from")
        rows: list[tuple[str, ...]] = [head]
        for c in self.collectives:
            operands = ", ".join(c.shapes[:3]) + (", ..." if len(c.shapes) > 3 else "")
            numbers = (c.count, c.group_size, c.count * c.payload_bytes)
            received = _number(c.count * c.received_bytes)
            rows.append((c.op, *map(str, numbers), received, operands, c.op_name or c.name))
        totals = (str(self.rounds), "", str(self.payload), _number(self.received))
        rows.append(("total", *totals, "", ""))
        lines = aligned(rows, right=range(1, 5))
        return "\n".join([*lines, *self._conditional_lines("")])

    def _conditional_lines(self, indent: str) -> Iterable[str]:
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


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def merged(parts: Iterable[WireBytes]) -> WireBytes:
    """The bytes of programs that run one after the other."""
    parts = list(parts)
    return WireBytes(
        tuple(c for part in parts for c in part.collectives),
        tuple(c for part in parts for c in part.conditionals),
    )


def scaled(moved: WireBytes, times: int) -> WireBytes:
    """The bytes of a program that runs `times` times."""
    return WireBytes(
        tuple(dataclasses.replace(c, count=c.count * times) for c in moved.collectives),
        tuple(
            dataclasses.replace(
                c, count=c.count * times, branches=tuple(scaled(b, times) for b in c.branches)
            )
            for c in moved.conditionals
        ),
    )
