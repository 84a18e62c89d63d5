"""How many workers take part in one collective: the formats of HLO's replica groups."""

from __future__ import annotations

import math
import re

from jaxsparse.traffic.hlo import Instruction, Module

_EXPLICIT = re.compile(r"\{\s*((?:\{[\d,\s]*\}[,\s]*)*)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[[\d,]+\](?:T\([\d,]+\))?")
# Two spellings of the same thing: mesh['a'=4,'b'=2] {'a'} and @mesh<a=4,b=2> {a}; device_ids only
# reorders the members, and an axis written 'a':(1)2 is a factor 2 of the axis.
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\((?:[^()]|\([^()]*\))*\))?\s*\{([^{}]*)\}"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{\s*\d+\s*,\s*\d+\s*\},?)*)\s*\}")
_GROUP_AXIS = re.compile(r"'?([^',:]+)'?(?::\(\d+\)(\d+))?")


def group_size(instruction: Instruction, module: Module) -> int:
    """Members of the largest group of a collective.

    Args:
      instruction: any collective that has `replica_groups`.
      module: the module around it, for the groups that stand for everyone.

    Returns:
      The number of workers, at least 1.

    Raises:
      ValueError: the groups are absent or printed in a format that is not known.
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
    # Without use_global_device_ids the ids of a reducing collective with a channel name replicas,
    # and each of those stands for all of its partitions.
    by_replica = (
        instruction.opcode.removesuffix("-start") in ("all-reduce", "all-gather", "reduce-scatter")
        and "channel_id=" in instruction.structure
        and not instruction.flag("use_global_device_ids")
        and ids <= module.replicas
    )
    return max(size, 1) * (module.partitions if by_replica else 1)


def moved_pairs(instruction: Instruction) -> list[tuple[int, int]]:
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


def _unknown(instruction: Instruction, problem: str) -> str:
    return (
        f"{instruction.opcode} {instruction.name!r}: cannot read its replica_groups, {problem}; "
        "known forms are {{0,1},{2,3}}, {}, [2,4]<=[8] and mesh['data'=8] {'data'}; report the HLO "
        "line to have a new one added"
    )
