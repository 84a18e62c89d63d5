"""Bytes that a compiled program moves between workers, collective by collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxsparse.traffic import hlo
from jaxsparse.traffic.groups import Places, groups_of, row_major
from jaxsparse.traffic.report import (
    RECEIVED,
    Collective,
    Conditional,
    WireBytes,
    check_axis,
    merged,
    scaled,
)

# Opcodes that run their called computation exactly once.
_CALLS = ("call", "fusion", "async")


def wire_bytes(
    program: Any, *args: Any, mesh: Mesh | AbstractMesh | None = None, **kwargs: Any
) -> WireBytes:
    """Counts the bytes that a compiled program moves between workers.

    *Payload* is the size of the operands that one device hands to a collective. *Received* is the
    number of bytes that arrive at one device if the collective runs the bandwidth-optimal way, for
    n operand bytes in a group of W devices:

    ==================== =================================================================
    all-reduce           2 (W-1)/W n, as a ring
    reduce-scatter       (W-1)/W n
    all-gather           (W-1) n
    all-to-all           (W-1)/W n
    ragged-all-to-all    the output buffer, an upper bound: run time decides the true sizes
    collective-permute   n; pairs whose source is their target move nothing
    collective-broadcast n
    ==================== =================================================================

    Both are the maximum over devices, for each collective by itself. If two partial permutations
    use different devices, the totals bound the busiest device from above. A `while` loop multiplies
    by its trip count. The dearest branch of a conditional counts; `WireBytes.conditionals` has all
    branches.

    The numbers are those of the compiled program, and can differ from those of the source: XLA may
    combine, split, hoist or drop collectives, and widens some types. On CPU a bf16 collective
    travels as f32 and an int4 one as int8, and is reported so. Communication inside custom calls is
    invisible. Under `jax.vmap` there is no communication.

    With `mesh`, the bytes are also split by mesh axis, for any program that runs on the mesh. If
    `moved` is the result, `moved.across("hosts")` has the bytes that cross the axis, and
    `moved.within("hosts")` the rest.

    Args:
        program: a `jax.stages.Compiled`, a `jax.stages.Lowered`, a function that `jax.jit`,
            `nnx.jit` or `equinox.filter_jit` made, or the text of the compiled HLO.
        *args: arguments (or `jax.ShapeDtypeStruct` with shardings) for lowering, if `program` is a
            function.
        mesh: the mesh that the program runs on. The order of its devices must be that of the
            program if `program` is text, or if neither inputs nor outputs have a `NamedSharding`.
        **kwargs: as `args`. Lower a function first if it takes a keyword argument `mesh` itself.

    Raises:
        ValueError: XLA does not write the trip count of a loop that communicates, a collective has
            an unknown form, or the program does not run on the devices of `mesh`. Custom calls
            apart, nothing is silently left out.

    >>> text = '''
    ... HloModule tiny, num_partitions=4
    ... ENTRY %main (x: f32[10]) -> f32[40] {
    ...   %x = f32[10]{0} parameter(0)
    ...   ROOT %g = f32[40]{0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
    ... }
    ... '''
    >>> moved = wire_bytes(text, mesh=AbstractMesh((2, 2), ("hosts", "fsdp")))
    >>> moved.payload, moved.received, moved.rounds
    (40, 120, 1)
    >>> print(moved)
    collective  axes         count  W  payload B  received B  operands  from
    all-gather  hosts, fsdp      1  4         40         120  f32[10]   g
    total       hosts, fsdp      1            40         120
    total       all              1            40         120
    """
    reader = _Reader(*_read(program, args, kwargs), mesh)
    return reader.traffic(reader.module.entry)


def crossing(
    program: Any,
    *args: Any,
    axis_name: str,
    mesh: Mesh | AbstractMesh,
    outside: str | None = None,
    **kwargs: Any,
) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program that cross a mesh axis, wherever they stand.

    It is for messages that name them: `str(collective)` is one line. It lists each collective once,
    in every branch and in loops of any length, where `wire_bytes` would need the number of trips.
    Each `count` is 1.

    Args:
        program: see `wire_bytes`.
        *args: see `wire_bytes`.
        axis_name: an axis of the mesh. A collective crosses it if two members of one of its groups
            differ along it.
        mesh: see `wire_bytes`.
        outside: a `jax.named_scope`. Collectives with this text in their `op_name` are left out,
            and so are such operands of a collective that XLA combined from several.
        **kwargs: see `wire_bytes`.

    >>> text = '''
    ... HloModule tiny, num_partitions=4
    ... ENTRY %main (x: f32[10]) -> f32[40] {
    ...   %x = f32[10]{0} parameter(0)
    ...   %s = f32[10]{0} add(%x, %x)
    ...   ROOT %g = f32[20]{0} all-gather(%s), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0},
    ...     metadata={op_name="jit(step)/norm"}
    ... }
    ... '''
    >>> mesh = AbstractMesh((2, 2), ("hosts", "fsdp"))
    >>> for each in crossing(text, axis_name="hosts", mesh=mesh, outside="jaxsparse_exchange"):
    ...     print(each)
    all-gather over hosts: f32[10] -> f32[20], 40 bytes received, from jit(step)/norm
    """
    reader = _Reader(*_read(program, args, kwargs), mesh)
    check_axis(reader.axis_names, axis_name)
    found = reader.every(reader.module.entry, set(), outside)
    return tuple(each for each in found if axis_name in each.axes)


def _read(
    program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, jax.stages.Compiled | None]:
    """The HLO text of a program, and the program, if it was not given as text."""
    is_function = hasattr(program, "lower") and not isinstance(program, str)
    if (args or kwargs) and not is_function:
        raise ValueError(
            f"arguments are for a jitted function only, but program is a {type(program).__name__}, "
            "which is already lowered; drop them"
        )
    if isinstance(program, str):
        return program, None
    if is_function:
        program = program.lower(*args, **kwargs)
    program = getattr(program, "lowered", program)  # of nnx.jit and equinox.filter_jit
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
    return text, program


def _places(
    module: hlo.Module, program: jax.stages.Compiled | None, mesh: Mesh | AbstractMesh | None
) -> Places | None:
    """The places of a program's workers in the mesh."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh={mesh!r} must be a jax.sharding.Mesh or AbstractMesh")
    workers = module.replicas * module.partitions
    if workers != mesh.size:
        raise ValueError(
            f"the program runs on {workers} devices, but mesh has {mesh.size}: compile it with "
            "arguments that are placed on the mesh, or pass the mesh that it runs on"
        )
    places = row_major(dict(mesh.shape))
    if program is None or isinstance(mesh, AbstractMesh):
        return places
    number = {device: i for i, device in enumerate(mesh.devices.flat)}
    # All arrays of a program have their devices in one order, which is that of its workers.
    for sharding in jax.tree.leaves((program.input_shardings, program.output_shardings)):
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            order = list(sharding.mesh.devices.flat)
            break
    else:
        return places
    if strange := [device for device in order if device not in number]:
        raise ValueError(
            f"the program runs on {strange[0]}, which is not in mesh: pass the mesh that it runs on"
        )
    numbers = [number[device] for device in order]
    return Places(places.axis_names, places.coordinates[:, numbers])


class _Reader:
    """Reads the traffic of one module."""

    def __init__(
        self, text: str, program: jax.stages.Compiled | None, mesh: Mesh | AbstractMesh | None
    ):
        self.module = hlo.parse(text)
        self.places = _places(self.module, program, mesh)
        self.axis_names = self.places.axis_names if self.places else ()
        self.memo: dict[str, WireBytes] = {}

    def computation(self, name: str) -> hlo.Computation:
        if name not in self.module.computations:
            raise ValueError(f"the HLO text calls {name!r} but does not contain it; pass all of it")
        return self.module.computations[name]

    def traffic(self, name: str) -> WireBytes:
        """The bytes that one execution of the computation `name` moves."""
        if name not in self.memo:
            computation = self.computation(name)
            parts = [self.moved(computation, each) for each in computation.instructions.values()]
            self.memo[name] = merged(parts, self.axis_names)
        return self.memo[name]

    def moved(self, computation: hlo.Computation, instruction: hlo.Instruction) -> WireBytes:
        """The bytes that one execution of an instruction moves."""
        opcode = _communicates(instruction)
        if opcode in RECEIVED:
            return WireBytes((self.collective(computation, instruction),), self.axis_names)
        if opcode == "while":
            return self.loop(instruction)
        if opcode == "conditional":
            return self.conditional(instruction)
        parts = []
        for callee in _callees(instruction) if opcode else ():
            inner = self.traffic(callee)
            if inner.collectives and opcode not in _CALLS:
                raise ValueError(
                    f"{opcode} {instruction.name!r} calls {callee!r}, which communicates, and "
                    "how often it does is not known; move the collective out of it"
                )
            parts.append(inner)
        return merged(parts, self.axis_names)

    def loop(self, loop: hlo.Instruction) -> WireBytes:
        (condition,), (body,) = loop.callees["condition"], loop.callees["body"]
        test, step = self.traffic(condition), self.traffic(body)
        if not test.collectives and not step.collectives:
            return WireBytes()
        trips = hlo.trip_count(loop)
        if trips is None:
            inside = ", ".join(repr(c.op_name or c.name) for c in merged([test, step]).collectives)
            raise ValueError(
                f"while {loop.name!r} ({loop.op_name or 'no op_name'}) runs {inside} a number of "
                "times that is not known from the compiled program; bound the loop statically "
                "(lax.scan, or lax.fori_loop with Python integers), or count the bytes of its body "
                "by itself"
            )
        # The condition runs once more than the body, when it fails.
        return merged([scaled(test, trips + 1), scaled(step, trips)], self.axis_names)

    def conditional(self, instruction: hlo.Instruction) -> WireBytes:
        callees = instruction.callees
        if "branch_computations" in callees:
            names = callees["branch_computations"]
        else:  # a predicate: HLO names the true branch first, lax.switch has it second
            names = (*callees["false_computation"], *callees["true_computation"])
        branches = tuple(map(self.traffic, names))
        if not any(branch.parts for branch in branches):
            return WireBytes()
        whole = Conditional(instruction.name, 1, branches, instruction.op_name)
        return WireBytes((whole,), self.axis_names)

    def every(self, name: str, seen: set[str], outside: str | None) -> Iterator[Collective]:
        """The collectives with an operand outside the scope that a computation can reach."""
        if name in seen:
            return
        seen.add(name)
        computation = self.computation(name)
        for instruction in computation.instructions.values():
            opcode = _communicates(instruction)
            if opcode in RECEIVED:
                names = computation.op_names(instruction)
                wanted = [i for i, name in enumerate(names) if not outside or outside not in name]
                if wanted:
                    yield self.collective(computation, instruction, wanted)
            else:
                for callee in _callees(instruction) if opcode else ():
                    yield from self.every(callee, seen, outside)

    def collective(
        self,
        computation: hlo.Computation,
        instruction: hlo.Instruction,
        wanted: Sequence[int] | None = None,
    ) -> Collective:
        """Describes a collective, or the part of it with the `wanted` operands, by position."""
        op = _communicates(instruction)
        groups = groups_of(instruction, self.module)
        if op == "collective-permute":
            size = max(len({worker for pair in groups for worker in pair}), 1)
        else:
            size = max(map(len, groups))
        shapes = computation.operand_shapes(instruction)
        results = computation.result_shapes(instruction)
        op_name = instruction.op_name
        if wanted is not None and len(wanted) < len(shapes):
            names = computation.op_names(instruction)
            op_name = "; ".join(dict.fromkeys(names[i] for i in wanted))
            shapes, results = (tuple(all_[i] for i in wanted) for all_ in (shapes, results))
        if op == "ragged-all-to-all":
            # The operands are input, output and four vectors of offsets and sizes. Only the input
            # is data to send. The output is the buffer that receives.
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
            op_name=op_name,
            axes=self.places.crossed(groups) if self.places else (),
            results=tuple(map(str, results)),
            source=self.module.source(instruction),
        )


def _communicates(instruction: hlo.Instruction) -> str:
    """The opcode without `-start`; an empty string for the rest of an asynchronous operation."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode.endswith(("-done", "-update")):
        return ""
    if opcode in ("send", "recv") and not instruction.flag("is_host_transfer"):
        raise ValueError(
            f"{opcode} {instruction.name!r}: point-to-point transfers are not understood; "
            "compile without splitting collective-permute into send and recv"
        )
    return opcode


def _callees(instruction: hlo.Instruction) -> Iterator[str]:
    return (callee for group in instruction.callees.values() for callee in group)
