"""A digest of a traced step and its arguments, to be compared between processes.

It is of the versions of JAX, the mesh, the arguments' shapes, the program, and the values of
constants and of arguments that are equal on all workers. Of large arrays it has a sample.

It must not differ by chance. An equation's digest has its operation, its parameters and the digests
of what it reads. It has no names, no numbers of variables, no addresses, and of objects that are
not listed here it has the types alone. A program's digest is of its results, and of its collectives
in their order. So equations may stand in another order, and what a program prints does not count.
"""

import enum
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.source_info_util import summarize
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from jaxsparse.comm import compat, shard_maps
from jaxsparse.comm.marks import is_marked

VERSIONS = f"jax {jax.__version__} and jaxlib {jaxlib.__version__}"
# About so many entries of a larger array count. Texts show so many values and characters.
_SAMPLE, _VALUES, _WIDTH = 2**16, 4, 300
# Parameters of equations that don't change what a program computes.
_IDLE = {"name", "inline"}
# Parameters of a call that have an entry for each input.
_OF_INPUTS = ("in_shardings", "in_layouts", "in_specs", "donated_invars")
_PROGRAMS = (Jaxpr, ClosedJaxpr)


class Parts:
    """What processes compare, in parts, each with a digest. `advice` ends an error."""

    advice = ""

    def __init__(self, texts: Iterable[str]) -> None:
        self._parts: dict[str, str | JaxprEqn] = {}  # by digest, in their order
        self.digest = _digest(*map(self._part, texts))

    def lines(self) -> Iterator[str]:
        """Digest and description of each part."""
        for digest, part in self._parts.items():
            text = part if isinstance(part, str) else _written(part)
            yield f"{digest} {' '.join(text.split())[:_WIDTH]}"

    def _part(self, text: str) -> str:
        digest = _digest(text)
        self._parts.setdefault(digest, text)
        return digest


class Digested(Parts):
    """A call of a step.

    Values of the arguments that each process holds whole count. The mesh is None if any may run it.
    """

    def __init__(self, program: ClosedJaxpr, mesh: Mesh | None, args: Any) -> None:
        self._known: dict[Any, tuple[list[str], str]] = {}  # by id of a program, and its inputs
        self._program = program  # keeps its ids from being used again
        types, values = [], []
        avals = iter(program.in_avals)
        for i, arg in enumerate(args):
            for path, leaf in tree_flatten_with_path(arg)[0]:
                name = f"argument {i}{keystr(path)}"
                types.append(f"{name} of type {_type(next(avals))}")
                is_whole = not isinstance(leaf, jax.Array) or leaf.is_fully_replicated
                if is_whole and not is_marked(path):
                    values.append(f"{name} = {_value(leaf)}")
        heads = [VERSIONS, *types]
        if mesh is not None:
            devices = [device.id for device in mesh.devices.flat]
            heads.insert(1, f"a mesh {dict(mesh.shape)} of devices {devices}")
        super().__init__(heads)
        self.digest = _digest(self.digest, self._plain(program), *map(self._part, values))

    def _constant(self, v: Any, x: Any) -> str:
        return self._part(f"a constant {_type(v.aval)} {_value(x)}")

    def _read(self, program: Jaxpr, inputs: Sequence[str]) -> tuple[list[str], str]:
        """From inputs' digests, those of a program's results, and one of its collectives or ""."""
        key = (id(program), *inputs)
        if key in self._known:
            return self._known[key]
        values = dict(zip((*program.constvars, *program.invars), inputs))
        read = lambda v: _literal(v) if isinstance(v, Literal) else values[v]
        moves = []
        for equation in program.eqns:
            results, moved = self._equation(equation, [*map(read, equation.invars)])
            values |= zip(equation.outvars, results)
            if moved:
                moves.append(moved)
        self._known[key] = [*map(read, program.outvars)], _digest(*moves) if moves else ""
        return self._known[key]

    def _equation(self, equation: JaxprEqn, inputs: list[str]) -> tuple[list[str], str]:
        """As `_read`, for an equation."""
        name, settings = equation.primitive.name, _settings(equation)
        if name in shard_maps.MARKS:  # they are counted, and compute nothing
            return inputs, ""
        programs = [*compat.inner_programs(settings)]
        if name in compat.CALLS and [len(x.invars) for x in programs] == [len(inputs)]:
            # The order of its inputs is that in which the step first uses them, so it may differ.
            for each in _OF_INPUTS:
                entries = settings.get(each)
                if isinstance(entries, tuple) and len(entries) == len(inputs):
                    del settings[each]
                    inputs = [_digest(x, self._plain(y)) for x, y in zip(inputs, entries)]
            ((key, inner),) = ((k, x) for k, x in settings.items() if isinstance(x, _PROGRAMS))
            text = self._plain({k: x for k, x in settings.items() if k != key})
            consts = [*map(self._constant, programs[0].constvars, getattr(inner, "consts", ()))]
            results, moved = self._read(programs[0], consts + inputs)
            digest = _digest(name, text, *results)
            results = [_digest(name, text, x) for x in results]
            moved = moved and _digest(name, text, moved)
        else:
            digest = _digest(name, self._plain(settings), *inputs)
            results = [f"{digest} {i}" for i in range(len(equation.outvars))]
            is_own = bool(compat.axes_of(equation.params)) and name not in compat.SILENT
            moved = digest if is_own or any(self._alone(x)[1] for x in programs) else ""
        if results:
            self._parts.setdefault(digest, equation)
        return results, moved

    def _alone(self, program: Jaxpr, consts: Sequence[str] = ()) -> tuple[list[str], str]:
        """As `_read`, for any inputs."""
        free = program.constvars if not consts else ()
        inputs = [f"{i} {_type(v.aval)}" for i, v in enumerate((*free, *program.invars))]
        return self._read(program, [*consts, *inputs])

    def _plain(self, x: Any) -> str:
        """A parameter in words that are the same in all processes."""
        match x:
            case ClosedJaxpr():
                consts = [*map(self._constant, x.jaxpr.constvars, x.consts)]
                return str(self._alone(x.jaxpr, consts))
            case Jaxpr():
                return str(self._alone(x))
            case None | bool() | int() | float() | complex() | bytes():
                return repr(x)
            case str():
                return re.sub("0x[0-9a-f]+", "0x", x)
            case enum.Enum():
                return x.name
            case np.dtype():
                return str(x)
            case np.generic() | np.ndarray() | jax.Array():
                return _value(x)
            case NamedSharding():
                return self._plain((x.mesh, x.spec))
            case Mesh() | AbstractMesh():
                return self._plain(dict(x.shape))
            case Mapping():
                return str(sorted((str(key), self._plain(value)) for key, value in x.items()))
            case set() | frozenset():
                return str(sorted(map(self._plain, x)))
            case tuple() | list() | PartitionSpec():
                return str([*map(self._plain, x)])
        return type(x).__name__


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _type(aval: Any) -> str:
    dtype = getattr(aval, "dtype", None)
    return type(aval).__name__ if dtype is None else f"{dtype}{list(aval.shape)}"


def _value(x: Any) -> str:
    """The first values of an array, and a digest of a sample."""
    if isinstance(x, jax.Array):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = x.addressable_data(0)
    flat = np.asarray(x).reshape(-1)
    if flat.size <= _VALUES:
        return str(flat.tolist())
    sample = np.ascontiguousarray(flat[:: max(1, flat.size // _SAMPLE)])
    digest = hashlib.blake2b(sample.tobytes(), digest_size=8).hexdigest()
    return f"{flat[:_VALUES].tolist()}, ... (digest {digest})"


def array_text(name: str, x: Any) -> str:
    """A part of a comparison: an array that this process holds whole, or a number."""
    return f"{name} = {_type(jax.typeof(x))} {_value(x)}"


def value_texts(name: str, x: Any) -> Iterator[str]:
    """Parts of a comparison: an array's values, if each process has all that any has."""
    if getattr(x, "is_fully_addressable", True):
        yield array_text(name, x)
        return
    held: dict[int, set[str]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        held.setdefault(device.process_index, set()).add(_index(index, x.shape))
    if len({frozenset(each) for each in held.values()}) == 1:
        pieces = {_index(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        yield from (array_text(f"{name}[{index}]", pieces[index]) for index in sorted(pieces))


def _index(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = [part.indices(n)[:2] for part, n in zip(index, shape)]
    return ", ".join(f"{start}:{end}" for start, end in bounds)


def _literal(v: Literal) -> str:
    return f"{_type(v.aval)} {_value(v.val)}"


def _settings(equation: JaxprEqn) -> dict[str, Any]:
    return {key: value for key, value in equation.params.items() if key not in _IDLE}


def _written(equation: JaxprEqn) -> str:
    """An equation in words, with its place in the source."""
    inputs = (_literal(v) if isinstance(v, Literal) else _type(v.aval) for v in equation.invars)
    shown = (str, int, float, tuple, PartitionSpec, np.dtype, enum.Enum)
    settings = (f", {k}={v}" for k, v in _settings(equation).items() if isinstance(v, shown))
    name = f"{equation.primitive.name}({', '.join(inputs)}"
    return f"{name}{''.join(settings)}) at {summarize(equation.source_info)}"
