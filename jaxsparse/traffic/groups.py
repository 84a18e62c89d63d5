"""The groups of workers that talk in a collective, and the mesh axes that they cross.

XLA prints the groups of a collective in four forms. The ids in them are replicas, partitions, or
both flattened into one number, by rules that differ between opcodes. Here all become lists of
workers. A worker is `replica * partitions + partition`, its place in the order of the program's
devices. JAX makes one replica and a partition for each device of a mesh, in the order of
`mesh.devices.flat`. XLA's names of axes may differ from those of the mesh, so only workers count.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from jaxsparse.traffic import hlo

# {{0,1},{2,3}}, and {} for one group of all.
_EXPLICIT = re.compile(r"\{\s*((?:\{[\d,\s]*\}[,\s]*)*)\}")
# [groups,size]<=[extents]T(permutation): numbers in the order of a transposed array.
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# There are two spellings: mesh['a'=4,'b'=2] {'a'} and @mesh<a=4,b=2> {a}. device_ids orders the
# workers of the mesh. 'a':(1)2 means a factor 2 of the axis, after a factor 1.
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^{}]*)\}"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
_DEVICE_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{\s*\d+\s*,\s*\d+\s*\},?)*)\s*\}")

# Without use_global_device_ids, a group of replicas stands for all of their partitions.
_WHOLE_REPLICAS = ("all-reduce", "all-gather", "reduce-scatter")


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """The places of a program's workers in a mesh: their coordinates along each axis."""

    axis_names: tuple[str, ...]
    coordinates: np.ndarray

    def crossed(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The axes along which two members of one group differ, in the mesh's order."""
        if not groups:
            return ()
        members = np.concatenate([np.asarray(group) for group in groups])
        firsts = np.repeat([group[0] for group in groups], [len(group) for group in groups])
        differ = (self.coordinates[:, members] != self.coordinates[:, firsts]).any(axis=1)
        return tuple(itertools.compress(self.axis_names, differ))


def row_major(extents: dict[str, int]) -> Places:
    """The places of workers that are numbered in row-major order, from each axis's extent."""
    shape = tuple(extents.values())
    return Places(tuple(extents), np.indices(shape).reshape(len(shape), -1))


def groups_of(instruction: hlo.Instruction, module: hlo.Module) -> list[list[int]]:
    """The workers of each group of a collective.

    Of a collective-permute, they are the pairs of a source and a target whose data leave the
    worker. Raises ValueError if the groups are absent or have an unknown form.
    """
    op = instruction.opcode.removesuffix("-start")
    has_channel = "channel_id=" in instruction.structure
    if op == "collective-permute":
        listed = _moved_pairs(instruction)
    else:
        listed = [group for group in _listed(instruction) if group]
        if not listed:
            listed = [list(range(_everyone(instruction, module, op, has_channel)))]
    largest = max((worker for group in listed for worker in group), default=0)
    replicas, partitions = module.replicas, module.partitions
    if instruction.flag("use_global_device_ids"):
        return listed
    # Ids that are too large for replicas or partitions can only be flattened ones.
    if has_channel and op not in _WHOLE_REPLICAS:
        if largest >= partitions:
            return listed
        return [[r * partitions + p for p in group] for r in range(replicas) for group in listed]
    if largest >= replicas:
        return listed
    if has_channel:
        return [[r * partitions + p for r in group for p in range(partitions)] for group in listed]
    return [[r * partitions + p for r in group] for p in range(partitions) for group in listed]


def _everyone(instruction: hlo.Instruction, module: hlo.Module, op: str, has_channel: bool) -> int:
    """The number of ids in a group of all. With one replica, these are all partitions."""
    if instruction.flag("use_global_device_ids") or module.replicas == 1:
        return module.replicas * module.partitions
    return module.partitions if has_channel and op not in _WHOLE_REPLICAS else module.replicas


def _listed(instruction: hlo.Instruction) -> list[list[int]]:
    """The groups as the instruction lists them."""
    _, found, text = instruction.structure.partition("replica_groups=")
    if iota := _IOTA.match(text):
        count, size = int(iota[1]), int(iota[2])
        ids = _transposed(instruction, iota[3], iota[4])
        if count * size != ids.size:
            raise ValueError(_unknown(instruction, f"{iota[0]!r} does not add up"))
        return ids.reshape(count, size).tolist()
    if mesh := _MESH.match(text):
        return _along_axes(instruction, mesh)
    if explicit := _EXPLICIT.match(text):
        groups = re.findall(r"\{([^{}]*)\}", explicit[1])
        return [[int(worker) for worker in re.findall(r"\d+", group)] for group in groups]
    raise ValueError(_unknown(instruction, f"found {text[:60]!r}" if found else "found none"))


def _along_axes(instruction: hlo.Instruction, text: re.Match[str]) -> list[list[int]]:
    """Groups of workers that differ along the axes of a mesh, or along factors of them."""
    extents = {axis.strip(): int(extent) for axis, extent in _MESH_AXIS.findall(text[1])}
    shape = tuple(extents.values())
    if text[2] is None:
        workers = np.arange(math.prod(shape))
    elif ids := _DEVICE_IDS.fullmatch(text[2].strip()):
        workers = _transposed(instruction, ids[1], ids[2]).reshape(-1)
    else:
        workers = np.array(_integers(text[2]))
    if workers.size != math.prod(shape):
        raise ValueError(_unknown(instruction, f"{text[0]!r} does not add up"))
    # Each worker's coordinates, without the parts in which the members of a group differ.
    shared = np.indices(shape).reshape(len(shape), -1)
    names = list(extents)
    for axis, before, part in _GROUP_AXIS.findall(text[3]):
        if not axis.strip():
            continue
        if axis.strip() not in extents:
            raise ValueError(_unknown(instruction, f"axis {axis.strip()!r} is not in the mesh"))
        extent = extents[axis.strip()]
        size = int(part or extent)
        behind, rest = divmod(extent, int(before or 1) * size)
        if rest:
            raise ValueError(_unknown(instruction, f"{part} is no factor of axis {axis.strip()!r}"))
        index = names.index(axis.strip())
        shared[index] -= shared[index] // behind % size * behind
    groups: dict[tuple[int, ...], list[int]] = {}
    for worker, key in zip(workers.tolist(), map(tuple, shared.T.tolist())):
        groups.setdefault(key, []).append(worker)
    return list(groups.values())


def _transposed(instruction: hlo.Instruction, extents: str, axes: str | None) -> np.ndarray:
    """Counting numbers as an array of these extents, with its axes permuted."""
    shape, order = _integers(extents), _integers(axes or "")
    order = order or list(range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        raise ValueError(_unknown(instruction, f"({axes}) does not order the axes [{extents}]"))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


def _moved_pairs(instruction: hlo.Instruction) -> list[list[int]]:
    """Pairs [source, target] of a collective-permute whose data leaves the worker."""
    match = _PAIRS.search(instruction.structure)
    if not match or "slice_sizes=" in instruction.structure:
        raise ValueError(
            f"collective-permute {instruction.name!r}: only whole operands and the form "
            "source_target_pairs={{0,1},...} are understood; report the HLO line to have it added"
        )
    pairs = [[int(s), int(t)] for s, t in re.findall(r"(\d+)\s*,\s*(\d+)", match[1])]
    return [pair for pair in pairs if pair[0] != pair[1]]


def _unknown(instruction: hlo.Instruction, problem: str) -> str:
    return (
        f"{instruction.opcode} {instruction.name!r}: cannot read its replica_groups, {problem}; "
        "known forms are {{0,1},{2,3}}, {}, [2,4]<=[8] and mesh['data'=8] {'data'}; report the HLO "
        "line to have a new one added"
    )
