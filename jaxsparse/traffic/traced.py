"""Bytes that an exchange moves between any number of workers, read without devices."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from jaxsparse.arrays.settings import static_count
from jaxsparse.comm import compat, wire
from jaxsparse.comm.marks import map_marked
from jaxsparse.traffic.report import (
    Collective,
    Conditional,
    WireBytes,
    axes_crossed,
    merged,
    repeated,
    size_and_bytes,
)

# JAX keeps traces by mesh, and no program that runs may get one of these, which lack computations.
_NO_DEVICE = AbstractDevice(device_kind="none", num_cores=None, platform="none")
_DTYPES = {"bool": "pred", "float": "f", "int": "s", "uint": "u", "bfloat": "bf", "complex": "c"}


def traced_bytes(
    exchange: optax.GradientTransformation | Callable[..., Any],
    shapes: int | Any,
    workers: int | Mapping[str, int],
    *,
    axis_name: str = "data",
) -> WireBytes:
    """Counts the bytes that an exchange among any number of workers will move, without compiling.

    It traces the exchange for `workers` workers, which takes neither devices nor memory, and counts
    the collectives of the traced program as `wire_bytes` does. The compiled program can differ: XLA
    may combine collectives of one kind, which makes fewer rounds of the same bytes, may remove
    needless ones, and widens 16-bit floats in sums on CPU.

    Args:
        exchange: a reducer, a gradient transformation (one `update` is traced), or a function of
            one worker's arrays, in one tree.
        shapes: for a reducer, the number of elements of its vector, d. For a transformation, the
            parameters; for a function, its argument: a tree of arrays or `jax.ShapeDtypeStruct`s.
        workers: number of workers along `axis_name`, W >= 1; or, for a mesh with several axes, the
            number along each, as in `{"hosts": 16, "local": 8}`. An axis of one worker moves
            nothing.
        axis_name: the axis that a reducer exchanges over. The axes that a transformation or
            function names must be this one, or axes of the mesh.

    Raises:
        ValueError: the axis is not that of the transformation, a loop that communicates has no
            static length, or a primitive that names the axis is unknown.

    >>> from jaxsparse.reducers import TopK
    >>> moved = traced_bytes(TopK(density=0.01), 1_000_000, workers=1024)
    >>> moved.payload, moved.received
    (80000, 81840000)
    """
    given = workers if isinstance(workers, Mapping) else {axis_name: workers}
    extents = {axis: static_count("workers", extent) for axis, extent in given.items()}
    run: Callable[[Any, Any], Any]
    init: Callable[[Any], Any]
    if isinstance(exchange, optax.GradientTransformation):
        tx = exchange
        run, init = lambda x, state: tx.update(x, state, x), tx.init
    elif hasattr(exchange, "pmean"):
        reducer: Any = exchange
        size = static_count("shapes", shapes)
        shapes = jax.ShapeDtypeStruct((size,), jnp.float32)
        run = lambda x, state: reducer.pmean(x, state, axis_name)
        init = lambda x: reducer.init(size)
    elif callable(exchange):
        function = exchange
        run, init = lambda x, _: function(x), lambda x: ()
    else:
        raise TypeError(
            f"exchange={exchange!r} must be a reducer, a gradient transformation or a function: "
            "pass jaxsparse.top_k(0.01), or a whole step, compiled, to jaxsparse.traffic.wire_bytes"
        )
    # The caller may be in a trace or under a mesh, of which a new thread knows nothing.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        program = thread.submit(_traced, run, init, shapes, extents).result()
    return _traffic(program, extents)


def _traced(
    exchange: Callable[[Any, Any], Any],
    init: Callable[[Any], Any],
    shapes: Any,
    extents: Mapping[str, int],
) -> Jaxpr:
    """The program of `exchange(x, init(x))` on each worker, for x of these shapes."""
    mesh = AbstractMesh(
        tuple(extents.values()),
        tuple(extents),
        axis_types=(AxisType.Auto,) * len(extents),
        abstract_device=_NO_DEVICE,
    )

    def varying(tree: Any) -> Any:
        for axis in mesh.axis_names:
            tree = wire.varying(tree, axis)
        return tree

    def body(x: Any) -> Any:
        state = map_marked(lambda leaf, marked: varying(leaf) if marked else leaf, init(x))
        outputs = jax.tree.leaves(exchange(varying(x), state))
        return [varying(jnp.asarray(output))[None] for output in outputs]

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(mesh.axis_names)
    )
    return jax.make_jaxpr(mapped)(jax.eval_shape(lambda tree: tree, shapes)).jaxpr


def _traffic(program: Jaxpr, extents: dict[str, int]) -> WireBytes:
    """The bytes that one run of `program` moves. `extents` are the workers along each mesh axis."""
    parts = []
    for equation in program.eqns:
        name, parameters = equation.primitive.name, equation.params
        axes = set(compat.axes_of(parameters))
        if name in compat.OPCODES and axes <= extents.keys():
            parts.append(WireBytes((_collective(equation, extents),)))
            continue
        if axes and name not in compat.SILENT and name not in compat.CALLS:
            raise ValueError(
                f"{name} ({_where(equation)}) names a mesh axis, and what it moves is not known: "
                "read the compiled program with jaxsparse.traffic.wire_bytes instead"
            )
        inside = [_traffic(each, extents) for each in compat.inner_programs(parameters)]
        inner = merged(inside)
        if not inner.parts:
            continue
        if name == "cond":
            inner = WireBytes((Conditional(name, 1, tuple(inside), _where(equation)),))
        elif name == "scan":
            inner = repeated(inner, parameters["length"])
        elif name not in compat.CALLS:
            raise ValueError(
                f"{name} ({_where(equation)}) runs {inner.collectives[0].name} a number of times "
                "that is not known from the traced program: bound the loop statically (lax.scan, "
                "or lax.fori_loop with Python integers), or count the bytes of its body by itself"
            )
        parts.append(inner)
    return merged(parts, tuple(extents))


def _collective(equation: Any, extents: dict[str, int]) -> Collective:
    parameters, name = equation.params, equation.primitive.name
    op, operands = compat.OPCODES[name], [variable.aval for variable in equation.invars]
    along = {axis: extents[axis] for axis in compat.axes_of(parameters)}
    groups = parameters.get("axis_index_groups")
    if op == "collective-permute":
        groups = [pair for pair in parameters["perm"] if pair[0] != pair[1]]
    if groups is None:  # of all workers, too many to be listed
        groups = [range(math.prod(along.values()))]
        crossed = tuple(axis for axis, extent in along.items() if extent > 1)
    else:
        crossed = axes_crossed(along, groups)
    nbytes = [each.size * each.dtype.itemsize for each in operands]
    size, payload, received = size_and_bytes(op, groups, nbytes)
    return Collective(
        op=op,
        name=name,
        shapes=tuple(map(_printed, operands)),
        group_size=size,
        payload_bytes=payload,
        received_bytes=received,
        op_name=_where(equation),
        axes=tuple(axis for axis in extents if axis in crossed),
    )


def _printed(aval: Any) -> str:
    """A shape as XLA prints it."""
    name = aval.dtype.name
    letters = name.rstrip("0123456789")
    dtype = name.replace(letters, _DTYPES.get(letters, letters))
    return f"{dtype}[{','.join(map(str, aval.shape))}]"


def _where(equation: Any) -> str:
    return "/".join(filter(None, (compat.name_stack(equation), equation.primitive.name)))
