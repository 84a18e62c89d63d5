"""Bytes that a compiled program moves between workers, collective by collective."""

from __future__ import annotations

import math
import re
from typing import Any

import jax

from jaxsparse.traffic import hlo
from jaxsparse.traffic.report import (
    RECEIVED,
    Collective,
    Conditional,
    WireBytes,
    merged,
    scaled,
)
from jaxsparse.traffic.trip_counts import trip_count

# Opcodes that run their called computation exactly once.
_CALLS = ("call", "fusion", "async")

# Forms of a collective's groups.
_EXPLICIT = re.compile(r"\{\s*((?:\{[\d,\s]*\}[,\s]*)*)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[[\d,]+\](?:T\([\d,]+\))?")
# There are two spellings: mesh['a'=4,'b'=2] {'a'} and @mesh<a=4,b=2> {a}. device_ids only reorders
# the members. 'a':(1)2 means a factor 2 of the axis.
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\((?:[^()]|\([^()]*\))*\))?\s*\{([^{}]*)\}"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{\s*\d+\s*,\s*\d+\s*\},?)*)\s*\}")
_GROUP_AXIS = re.compile(r"'?([^',:]+)'?(?::\(\d+\)(\d+))?")


def wire_bytes(program: Any, *args: Any, **kwargs: Any) -> WireBytes:
    """Counts the bytes that a compiled program moves between workers.

    It reports two numbers and never mixes them. *Payload* is the size of the operands that one
    worker hands to a collective. *Received* is the number of bytes that arrive at one worker if the
    collective runs the bandwidth-optimal way, for n operand bytes in a group of W workers:

    ==================== =================================================================
    all-reduce           2 (W-1)/W n, as a ring
    reduce-scatter       (W-1)/W n
    all-gather           (W-1) n
    all-to-all           (W-1)/W n
    ragged-all-to-all    the output buffer, an upper bound: run time decides the true sizes
    collective-permute   n; pairs whose source is their target move nothing
    collective-broadcast n
    ==================== =================================================================

    Both are the maximum over workers, for each collective by itself. If two partial permutations
    use different workers, the totals bound the busiest worker from above. A group of one worker
    costs 0. A `while` loop multiplies by its trip count. An asynchronous start and its done count
    once. The dearest branch of a conditional counts; `WireBytes.conditionals` has the others.

    The numbers are those of the compiled program, and can differ from those of the source: XLA may
    combine, split, hoist or drop collectives, and widens some types. On CPU a bf16 collective
    travels as f32 and an int4 one as int8, and is reported so. The layout says whether sub-byte
    types are packed. Communication inside custom calls is invisible. Under `jax.vmap` there is no
    communication.

    Args:
      program: a `jax.stages.Compiled`, a `jax.stages.Lowered`, a jitted function, or the text of
        the compiled HLO.
      *args: arguments (or `jax.ShapeDtypeStruct`) for lowering, if `program` is a function.
      **kwargs: as `args`.

    Returns:
      The collectives, the conditionals and their totals, in bytes for one run.

    Raises:
      ValueError: a loop that communicates has a trip count that depends on data, or a collective
        has an unknown form. Nothing is silently left out.
      TypeError: `program` is none of the above.

    >>> text = '''
    ... HloModule tiny, num_partitions=4
    ... ENTRY %main (x: f32[10]) -> f32[40] {
    ...   %x = f32[10]{0} parameter(0)
    ...   ROOT %g = f32[40]{0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
    ... }
    ... '''
    >>> moved = wire_bytes(text)
    >>> moved.payload, moved.received, moved.rounds
    (40, 120, 1)
    >>> print(moved)
    collective  count  W  payload B  received B  operands  from
    all-gather      1  4         40         120  f32[10]   g
    total           1            40         120
    """
    module = hlo.parse(_text(program, args, kwargs))
    return _traffic(module, module.entry, {})


def _text(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    is_function = hasattr(program, "lower") and not isinstance(program, str)
    if (args or kwargs) and not is_function:
        raise ValueError(
            f"arguments are for a jitted function only, but program is a {type(program).__name__}, "
            "which is already lowered; drop them"
        )
    if isinstance(program, str):
        return program
    if is_function:
        program = program.lower(*args, **kwargs)
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    if not isinstance(program, jax.stages.Compiled):
        raise TypeError(
            f"program must be a jax.stages.Compiled, a jitted function or HLO text, not "
            f"{type(program).__name__}; wrap a plain function in jax.jit"
        )
    text = program.as_text()
    if text is None:
        raise ValueError("this backend does not give the HLO text of compiled programs")
    return text


def _traffic(module: hlo.Module, name: str, memo: dict[str, WireBytes]) -> WireBytes:
    """The bytes that one execution of the computation `name` moves."""
    if name in memo:
        return memo[name]
    if name not in module.computations:
        raise ValueError(f"the HLO text calls {name!r} but does not contain it; pass all of it")
    computation = module.computations[name]
    parts = []
    for instruction in computation.instructions.values():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode.endswith(("-done", "-update")):
            continue  # its start counts
        if opcode in RECEIVED:
            parts.append(WireBytes((_collective(module, computation, instruction),)))
        elif opcode == "while":
            parts.append(_loop(module, computation, instruction, memo))
        elif opcode == "conditional":
            parts.append(_conditional(module, instruction, memo))
        elif opcode in ("send", "recv") and not instruction.flag("is_host_transfer"):
            raise ValueError(
                f"{opcode} {instruction.name!r}: point-to-point transfers are not understood; "
                "compile without splitting collective-permute into send and recv"
            )
        else:
            for callee in (c for group in instruction.callees.values() for c in group):
                inner = _traffic(module, callee, memo)
                if inner.collectives and opcode not in _CALLS:
                    raise ValueError(
                        f"{opcode} {instruction.name!r} calls {callee!r}, which communicates, and "
                        "how often it does is not known; move the collective out of it"
                    )
                parts.append(inner)
    memo[name] = merged(parts)
    return memo[name]


def _collective(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> Collective:
    op = instruction.opcode.removesuffix("-start")
    shapes = computation.operand_shapes(instruction)
    if op == "collective-permute":
        members = {worker for pair in _moved_pairs(instruction) for worker in pair}
        size = max(len(members), 1)
    else:
        size = _group_size(instruction, module)
    if op == "ragged-all-to-all":
        # The operands are input, output and four vectors of offsets and sizes. Only the input is
        # data to send. The output is the buffer that receives.
        sent, landing = shapes[0].nbytes, shapes[1].nbytes
    else:
        sent = landing = sum(shape.nbytes for shape in shapes)
    return Collective(
        op=op,
        name=instruction.name,
        shapes=tuple(map(str, shapes)),
        group_size=size,
        payload_bytes=sent if size > 1 else 0,
        received_bytes=landing * RECEIVED[op](size) if size > 1 else 0,
        op_name=instruction.op_name,
    )


def _loop(
    module: hlo.Module,
    computation: hlo.Computation,
    loop: hlo.Instruction,
    memo: dict[str, WireBytes],
) -> WireBytes:
    (condition,), (body,) = loop.callees["condition"], loop.callees["body"]
    test, step = _traffic(module, condition, memo), _traffic(module, body, memo)
    if not test.collectives and not step.collectives:
        return WireBytes()
    trips = trip_count(module, computation, loop)
    if trips is None:
        inside = ", ".join(repr(c.op_name or c.name) for c in merged([test, step]).collectives)
        raise ValueError(
            f"while {loop.name!r} ({loop.op_name or 'no op_name'}) runs {inside} a number of times "
            "that depends on data; bound the loop statically (lax.scan, or lax.fori_loop with "
            "Python integers), or count the bytes of its body by itself"
        )
    # The condition runs once more than the body, when it fails.
    return merged([scaled(test, trips + 1), scaled(step, trips)])


def _conditional(
    module: hlo.Module, instruction: hlo.Instruction, memo: dict[str, WireBytes]
) -> WireBytes:
    callees = instruction.callees
    if "branch_computations" in callees:
        names = callees["branch_computations"]
    else:  # a predicate: HLO names the true branch first, lax.switch has it second
        names = (*callees["false_computation"], *callees["true_computation"])
    branches = tuple(_traffic(module, name, memo) for name in names)
    if not any(branch.collectives for branch in branches):
        return WireBytes()
    conditional = Conditional(instruction.name, 1, branches, instruction.op_name)
    return WireBytes(branches[conditional.dearest].collectives, (conditional,))


def _group_size(instruction: hlo.Instruction, module: hlo.Module) -> int:
    """The number of members of a collective's largest group.

    Raises:
      ValueError: its `replica_groups` are absent or have an unknown format.
    """
    _, found, text = instruction.structure.partition("replica_groups=")
    workers = module.replicas * module.partitions
    if iota := _IOTA.match(text):
        ids, size = int(iota[1]) * int(iota[2]), int(iota[2])
    elif mesh := _MESH.match(text):
        axes = {axis.strip(): int(extent) for axis, extent in _MESH_AXIS.findall(mesh[1])}
        members = [(a.strip(), part) for a, part in _GROUP_AXIS.findall(mesh[2]) if a.strip()]
        if unknown := [axis for axis, part in members if not part and axis not in axes]:
            raise ValueError(_unknown(instruction, f"axes {unknown} are not in the mesh"))
        size = math.prod(int(part or axes.get(axis, 1)) for axis, part in members)
        ids = math.prod(axes.values())
    elif explicit := _EXPLICIT.match(text):
        groups = [re.findall(r"\d+", group) for group in re.findall(r"\{([^{}]*)\}", explicit[1])]
        if not groups:
            return workers
        size = max(len(group) for group in groups)
        ids = 1 + max((int(i) for group in groups for i in group), default=0)
    else:
        problem = f"found {text[:60]!r}" if found else "found none"
        raise ValueError(_unknown(instruction, problem))
    # Without use_global_device_ids, the ids of a reducing collective with a channel are replicas,
    # and each replica stands for all its partitions.
    by_replica = (
        instruction.opcode.removesuffix("-start") in ("all-reduce", "all-gather", "reduce-scatter")
        and "channel_id=" in instruction.structure
        and not instruction.flag("use_global_device_ids")
        and ids <= module.replicas
    )
    return max(size, 1) * (module.partitions if by_replica else 1)


def _moved_pairs(instruction: hlo.Instruction) -> list[tuple[int, int]]:
    """Pairs (source, target) of a collective-permute whose data leaves the worker.

    Raises:
      ValueError: the instruction has no `source_target_pairs`, or moves slices of its operands.
    """
    match = _PAIRS.search(instruction.structure)
    if not match or "slice_sizes=" in instruction.structure:
        raise ValueError(
            f"collective-permute {instruction.name!r}: only whole operands and the form "
            "source_target_pairs={{0,1},...} are understood; report the HLO line to have it added"
        )
    pairs = [(int(s), int(t)) for s, t in re.findall(r"(\d+)\s*,\s*(\d+)", match[1])]
    return [(source, target) for source, target in pairs if source != target]


def _unknown(instruction: hlo.Instruction, problem: str) -> str:
    return (
        f"{instruction.opcode} {instruction.name!r}: cannot read its replica_groups, {problem}; "
        "known forms are {{0,1},{2,3}}, {}, [2,4]<=[8] and mesh['data'=8] {'data'}; report the HLO "
        "line to have a new one added"
    )
