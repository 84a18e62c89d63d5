"""Bytes that a compiled program moves between devices, collective by collective."""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxsparse.traffic import hlo, slices
from jaxsparse.traffic.report import (
    RECEIVED,
    Collective,
    Conditional,
    WireBytes,
    axes_crossed,
    check_axis,
    merged,
    repeated,
    size_and_bytes,
)

# Opcodes that run their called computation exactly once.
_CALLS = ("call", "fusion", "async")


def wire_bytes(
    program: Any, *args: Any, mesh: Mesh | AbstractMesh | None = None, **kwargs: Any
) -> WireBytes:
    """Counts the bytes that a compiled program moves between devices.

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

    Both are the maximum over devices, for each collective by itself. A `while` loop multiplies by
    its trip count. The dearest branch of a conditional counts; `WireBytes.conditionals` has all.

    The numbers are those of the compiled program, and can differ from those of the source: XLA may
    combine, split, hoist or drop collectives, and widens some types. On CPU a bf16 collective
    travels as f32 and an int4 one as int8, and is reported so. Communication inside custom calls is
    invisible. Under `jax.vmap` there is no communication.

    XLA:TPU compiles a program for one slice, which sends to others by the runtime's collectives.
    These count as the others do, with the padding that they have there.

    Args:
        program: a `jax.stages.Compiled`, a `jax.stages.Lowered`, a function that `jax.jit`,
            `nnx.jit` or `equinox.filter_jit` made, or the text of the compiled HLO.
        *args: arguments (or `jax.ShapeDtypeStruct` with shardings) for lowering, if `program` is a
            function.
        mesh: the mesh that the program runs on, for `moved.across("hosts")`, the bytes that cross
            an axis, and `within`. The order of its devices must be that of the program if `program`
            is text, or if neither inputs nor outputs have a `NamedSharding`.
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
    program: Any, axis_name: str, mesh: Mesh | AbstractMesh, outside: str | None = None
) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program that cross a mesh axis, wherever they stand.

    It lists each one once, in every branch and in loops of any length, where `wire_bytes` would
    need the number of trips. `str(collective)` is one line for messages.

    Args:
        program: a `jax.stages.Compiled`, or the text of the compiled HLO.
        axis_name: an axis of the mesh. A collective crosses it if two members of one of its groups
            differ along it.
        mesh: see `wire_bytes`.
        outside: a `jax.named_scope`. Collectives with this text in their `op_name` are left out,
            and so are such operands of a collective that XLA combined from several.
    """
    reader = _Reader(*_read(program, (), {}), mesh, outside, counts=False)
    check_axis(reader.axis_names, axis_name)
    found = reader.traffic(reader.module.entry).every()
    return tuple(dict.fromkeys(each for each in found if axis_name in each.axes))


def _read(
    program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, jax.stages.Compiled | None]:
    """The HLO text of a program, and the program, if it was not given as text."""
    is_text = isinstance(program, str)
    if hasattr(program, "lower") and not is_text:
        program = program.lower(*args, **kwargs)
    elif args or kwargs:
        raise ValueError(
            f"only a jitted function takes arguments, no {type(program).__name__}: give "
            "jax.jit(step), and its arguments"
        )
    if is_text:
        return program, None
    # nnx.jit and equinox.filter_jit wrap both stages.
    program = getattr(program, "lowered", program)
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    program = getattr(program, "compiled", program)
    if not isinstance(program, jax.stages.Compiled):
        raise TypeError(
            f"program must be a jax.stages.Compiled, a jitted function or HLO text, not "
            f"{type(program).__name__}; wrap a plain function in jax.jit"
        )
    text = program.as_text()
    if text is None:
        raise ValueError("this backend does not give the HLO text of compiled programs")
    return text, program


def _positions(
    workers: int, program: jax.stages.Compiled | None, mesh: Mesh | AbstractMesh, is_cut: bool
) -> list[int]:
    """The number of each worker's device in the mesh; of a slice's program, in the first slice.

    Args:
        workers: those of a program.
        program: to know the order of its devices.
        mesh: the mesh.
        is_cut: whether the program sends to other slices. If not, it may still be that of one among
            several, where its arrays lie on more devices.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh={mesh!r} must be a jax.sharding.Mesh or AbstractMesh")
    each = [] if program is None else [program.input_shardings, program.output_shardings]
    shardings = [x for x in jax.tree.leaves(each) if isinstance(x, NamedSharding)]
    is_cut |= any(len(x.device_set) == mesh.size for x in shardings)
    if mesh.size % workers or not (is_cut or mesh.size == workers):
        raise ValueError(
            f"the program runs on {workers} devices, but mesh has {mesh.size}: compile it with "
            "arguments that are placed on the mesh, or pass the mesh that it runs on"
        )
    # All arrays of a program have their devices in one order, which is that of its workers.
    own = [x.mesh for x in shardings if isinstance(x.mesh, Mesh)]
    if not isinstance(mesh, Mesh) or not own:
        return list(range(workers))
    number = {device: i for i, device in enumerate(mesh.devices.flat)}
    order = list(own[0].devices.flat)
    if strange := [device for device in order if device not in number]:
        raise ValueError(
            f"the program runs on {strange[0]}, which is not in mesh: pass the mesh that it runs on"
        )
    if mesh.size > workers:
        order = [device for device in order if device.slice_index == order[0].slice_index]
    return [number[device] for device in order]


class _Reader:
    """Reads the traffic of one module.

    Without `counts`, all that calls a computation runs it once. Operands with the text `outside` in
    their names are left out.
    """

    def __init__(
        self,
        text: str,
        program: jax.stages.Compiled | None,
        mesh: Mesh | AbstractMesh | None,
        outside: str | None = None,
        *,
        counts: bool = True,
    ):
        self.module = hlo.parse(text)
        self.outside, self.counts = outside, counts
        self.positions: list[int] = []
        self.devices: dict[int, int] = {}  # positions by the numbers of devices, over slices
        self.extents: dict[str, int] = {}
        if mesh is not None:
            every = (x for c in self.module.computations.values() for x in c.instructions.values())
            is_cut = any(map(slices.is_over_slices, every))
            self.positions = _positions(self.module.workers, program, mesh, is_cut)
            self.extents = dict(mesh.shape)
            workers = self.module.workers
            self.devices = {slices.device_of(*divmod(i, workers)): i for i in range(mesh.size)}
            if isinstance(mesh, Mesh):  # which may have them in another order
                self.devices |= {device.id: i for i, device in enumerate(mesh.devices.flat)}
        self.axis_names = tuple(self.extents)
        self.memo: dict[str, WireBytes] = {}

    def traffic(self, name: str) -> WireBytes:
        """The bytes that one execution of the computation `name` moves."""
        if name not in self.module.computations:
            raise ValueError(f"the HLO text calls {name!r} but does not contain it; pass all of it")
        if name not in self.memo:
            computation = self.module.computations[name]
            parts = [self.moved(computation, each) for each in computation.instructions.values()]
            self.memo[name] = merged(parts, self.axis_names)
        return self.memo[name]

    def moved(self, computation: hlo.Computation, instruction: hlo.Instruction) -> WireBytes:
        """The bytes that one execution of an instruction moves."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode.endswith(("-done", "-update")):  # the rest of an asynchronous operation
            return WireBytes()
        if slices.is_over_slices(instruction):
            is_sent = opcode == "send"  # and what is received is the rest of it
            return self.collective(opcode, computation, instruction) if is_sent else WireBytes()
        if opcode in ("send", "recv") and "is_host_transfer=true" not in instruction.structure:
            raise ValueError(
                f"{opcode} {instruction.name!r}: point-to-point transfers are not understood; "
                "compile without splitting collective-permute into send and recv"
            )
        if opcode in RECEIVED:
            return self.collective(opcode, computation, instruction)
        inside = {role: [*map(self.traffic, names)] for role, names in instruction.callees.items()}
        every = merged(itertools.chain(*inside.values()), self.axis_names)
        if not every.parts:
            return every
        if opcode == "conditional":
            # Of a predicate, HLO names the true branch first. lax.switch has it second.
            ordered = ("branch_computations", "false_computation", "true_computation")
            branches = tuple(branch for role in ordered for branch in inside.get(role, ()))
            whole = Conditional(instruction.name, 1, branches, instruction.op_name)
            return WireBytes((whole,), self.axis_names)
        if not self.counts or opcode in _CALLS:
            return every
        trips = computation.trip_count(instruction, self.module) if opcode == "while" else None
        if trips is not None:
            # The condition runs once more than the body, when it fails.
            return merged([repeated(every, trips), *inside["condition"]], self.axis_names)
        names = ", ".join(repr(c.op_name or c.name) for c in every.collectives)
        raise ValueError(
            f"{opcode} {instruction.name!r} ({instruction.op_name or 'no op_name'}) runs {names} "
            "a number of times that is not known from the compiled program; bound the loop "
            "statically (lax.scan, or lax.fori_loop with Python integers), or count the bytes of "
            "its body by itself"
        )

    def collective(
        self, op: str, computation: hlo.Computation, instruction: hlo.Instruction
    ) -> WireBytes:
        """Describes a collective, without operands that are left out."""
        shapes, name = computation.operand_shapes(instruction), instruction.name
        if is_over_slices := op == "send":
            op, name, groups = slices.collective_of(instruction)
            shapes, op_name = shapes[:1], computation.origin(instruction)  # and a token
        else:
            groups, op_name = self.module.groups(instruction), instruction.op_name
        if self.outside is not None:
            names = [op_name] if is_over_slices else computation.op_names(instruction)
            wanted = [(name, x) for name, x in zip(names, shapes) if self.outside not in name]
            if not wanted:
                return WireBytes()
            if len(wanted) < len(shapes):
                op_name = "; ".join(dict.fromkeys(name for name, _ in wanted))
                shapes = tuple(shape for _, shape in wanted)
        if self.extents and is_over_slices:
            groups = [[self.devices[device] for device in group] for group in groups]
        elif self.extents:
            groups = [[self.positions[worker] for worker in group] for group in groups]
        size, payload, received = size_and_bytes(op, groups, [shape.nbytes for shape in shapes])
        found = Collective(
            op=op,
            name=name,
            shapes=tuple(shape.printed for shape in shapes),
            group_size=size,
            payload_bytes=payload,
            received_bytes=received,
            op_name=op_name,
            axes=axes_crossed(self.extents, groups),
            source=self.module.source(instruction),
        )
        return WireBytes((found,), self.axis_names)
