"""Bytes that an exchange moves between any number of workers, read without devices."""

from __future__ import annotations

import concurrent.futures
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from jaxsparse.arrays.settings import static_int
from jaxsparse.comm import compat, wire
from jaxsparse.comm.marks import map_marked
from jaxsparse.traffic.groups import row_major
from jaxsparse.traffic.report import (
    RECEIVED,
    Collective,
    Conditional,
    WireBytes,
    merged,
    scaled,
)

# With more workers along an axis, permutations are not traced.
_MOST_LISTED = 2**13
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

    It traces the exchange for `workers` workers, which takes neither devices nor memory, and reads
    the collectives from the traced program. It counts as `wire_bytes` does.

    The numbers are those of the program as written. The compiled program can differ: XLA may
    combine collectives of one kind, which makes fewer rounds of the same bytes, may remove needless
    ones, and widens 16-bit floats in sums on CPU.

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
        ValueError: an exchange with permutations has more than 8,192 workers along an axis, the
            axis is not that of the transformation, a loop that communicates has no static length,
            or a primitive that names the axis is unknown.

    >>> from jaxsparse.systems import TopK
    >>> moved = traced_bytes(TopK(density=0.01), 1_000_000, workers=1024)
    >>> moved.payload, moved.received
    (80000, 81840000)
    """
    extents = _extents(workers, axis_name)
    run: Callable[[Any, Any], Any]
    init: Callable[[Any], Any]
    if isinstance(exchange, optax.GradientTransformation):
        tx = exchange
        run, init = lambda x, state: tx.update(x, state, x), tx.init
    elif callable(exchange) and hasattr(exchange, "init"):
        size, reducer = static_int("shapes", shapes), exchange
        if size < 1:
            raise ValueError(f"shapes={size} must be at least 1: pass the elements of the vector")
        shapes = jax.ShapeDtypeStruct((size,), jnp.float32)
        run, init = functools.partial(reducer, axis_name=axis_name), lambda x: reducer.init(size)
    elif callable(exchange):
        function = exchange
        run, init = lambda x, _: function(x), lambda x: ()
    else:
        raise TypeError(
            f"exchange={exchange!r} must be a reducer, a gradient transformation or a function: "
            "pass jaxsparse.top_k(0.01), or a whole step, compiled, to jaxsparse.traffic.wire_bytes"
        )
    # The caller may be in a trace, of which a new thread knows nothing.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        trace = lambda extents: thread.submit(_traced, run, init, shapes, extents).result()
        if max(extents.values()) > _MOST_LISTED:
            few = {axis: _few(extent) for axis, extent in extents.items()}
            if _lists_workers(trace(few)):
                raise ValueError(
                    f"workers={workers}: its permutations list all workers, so their bytes are "
                    f"counted for at most {_MOST_LISTED:,}"
                )
        program = trace(extents)
    return _traffic(program, extents, {})


def _extents(workers: int | Mapping[str, int], axis_name: str) -> dict[str, int]:
    given = workers if isinstance(workers, Mapping) else {axis_name: workers}
    extents = {axis: static_int("workers", extent) for axis, extent in given.items()}
    if not extents or not 0 < min(extents.values()) <= max(extents.values()) < 2**31:
        raise ValueError(f"workers={workers} must be at least 1, and below 2**31")
    return extents


def _few(workers: int) -> int:
    """A smaller number of workers, with the small factors of a large one."""
    return workers if workers <= _MOST_LISTED else max(2, math.gcd(workers, math.factorial(7)))


def _lists_workers(program: Jaxpr) -> bool:
    """Whether a program has a permutation, whose pairs take memory and time for each worker."""
    return any(
        compat.OPCODES.get(equation.primitive.name) == "collective-permute"
        or any(map(_lists_workers, compat.inner_programs(equation.params)))
        for equation in program.eqns
    )


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


def _traffic(program: Jaxpr, extents: dict[str, int], memo: dict[int, WireBytes]) -> WireBytes:
    """The bytes that one run of `program` moves. `extents` are the workers along each mesh axis."""
    if id(program) in memo:
        return memo[id(program)]
    parts = []
    for equation in program.eqns:
        name, parameters = equation.primitive.name, equation.params
        if _is_unknown(name, parameters, extents):
            raise ValueError(
                f"{name} ({_where(equation)}) names a mesh axis, and what it moves is not known: "
                "read the compiled program with jaxsparse.traffic.wire_bytes instead"
            )
        if name in compat.OPCODES:
            parts.append(_collective(equation, extents))
            continue
        inside = [_traffic(each, extents, memo) for each in compat.inner_programs(parameters)]
        if name == "cond":
            branches = tuple(inside)
            if any(branch.collectives for branch in branches):
                parts.append(WireBytes((Conditional(name, 1, branches, _where(equation)),)))
        elif inside:
            inner = merged(inside)
            if name == "scan":
                inner = scaled(inner, parameters["length"])
            elif inner.collectives and name not in compat.CALLS:
                raise ValueError(
                    f"{name} ({_where(equation)}) runs {inner.collectives[0].name} a number of "
                    "times that is not known from the traced program: bound the loop statically "
                    "(lax.scan, or lax.fori_loop with Python integers), or count the bytes of its "
                    "body by itself"
                )
            parts.append(inner)
    memo[id(program)] = merged(parts, tuple(extents))
    return memo[id(program)]


def _is_unknown(name: str, parameters: dict[str, Any], extents: dict[str, int]) -> bool:
    """Whether a primitive moves an unknown number of bytes."""
    axes = set(compat.axes_of(parameters))
    if name in compat.OPCODES:
        return not axes <= extents.keys()
    return bool(axes) and name not in compat.SILENT and name not in compat.CALLS


def _collective(equation: Any, extents: dict[str, int]) -> WireBytes:
    parameters, name = equation.params, equation.primitive.name
    op = compat.OPCODES[name]
    along = {axis: extents[axis] for axis in compat.axes_of(parameters)}
    groups = parameters.get("axis_index_groups")
    if op == "collective-permute":
        groups = [(source, target) for source, target in parameters["perm"] if source != target]
        size = max(len({worker for pair in groups for worker in pair}), 1)
    else:
        size = max(map(len, groups)) if groups else math.prod(along.values())
    if groups is None:  # all workers
        crossed = tuple(axis for axis, extent in along.items() if extent > 1)
    else:
        crossed = row_major(along).crossed(groups)
    operands = [variable.aval for variable in equation.invars]
    if op == "ragged-all-to-all":  # input, output, offsets and sizes
        sent, landing = _nbytes(operands[0]), _nbytes(operands[1])
    else:
        sent = landing = sum(map(_nbytes, operands))
    return WireBytes(
        (
            Collective(
                op=op,
                name=name,
                shapes=tuple(map(_printed, operands)),
                group_size=size,
                payload_bytes=sent if size > 1 else 0,
                received_bytes=landing * RECEIVED[op](size) if size > 1 else 0,
                op_name=_where(equation),
                axes=tuple(axis for axis in extents if axis in crossed),
                results=tuple(_printed(variable.aval) for variable in equation.outvars),
            ),
        )
    )


def _nbytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _printed(aval: Any) -> str:
    """A shape as XLA prints it."""
    name = aval.dtype.name
    letters = name.rstrip("0123456789")
    known = _DTYPES.get(letters)
    dtype = name if known is None else known + name[len(letters) :]
    return f"{dtype}[{','.join(map(str, aval.shape))}]"


def _where(equation: Any) -> str:
    return "/".join(filter(None, (compat.name_stack(equation), equation.primitive.name)))
