"""A comparison of the programs that several processes are about to run as one.

Each process traces and compiles its own program. If one process has another learning rate, seed or
system, collectives match by chance, or wait for each other for ever. So processes compare a digest
before the first call of a step with arguments of given shapes. It is of JAX's version, the mesh,
the arguments' shapes, the program, and the values of constants and of replicated arguments. Values
of large arrays are sampled: `check_replicas` reads all of them.

The digest must not differ by chance. An equation's digest has its operation, its parameters and the
digests of what it reads. It has no names, no numbers of variables, no addresses, and of objects
that are not listed here it has the types alone. A program's digest is of its results, and of its
collectives in their order. What a program prints does not count.

The first process of the group compares for all, so that the others write and read few notes.
"""

import enum
import hashlib
import json
import re
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.source_info_util import summarize
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from jaxsparse import _compat
from jaxsparse.training.group import Group
from jaxsparse.training.marks import is_marked

# About so many entries of a larger array count. Messages show so many values and characters.
_SAMPLE, _VALUES, _WIDTH = 2**16, 4, 300
# Parameters of equations that don't change what a program computes.
_IDLE = {"name", "inline"}


def compare(group: Group, step: Any, mesh: Mesh, batches: Sequence[int], args: Any) -> None:
    """Compares a step and its arguments, before its first call, with those of other processes.

    Args:
        group: the processes. All must get here, for the same steps in the same order.
        step: the compiled step.
        mesh: the mesh on which it runs.
        batches: the numbers of the arguments that are split. Negative ones count from the end.
        args: all positional arguments.

    Raises:
        RuntimeError: processes differ, or one does not come within the limit of the group.
    """
    reader = _Reader()
    program = step.trace(*args).jaxpr
    digest = reader.call(program, mesh, args, {i % len(args) for i in batches})
    name, topic = getattr(step, "__name__", "a step"), group.topic()
    (first, *others), me = group.members, jax.process_index()
    group.put(f"{topic}/{me}", digest)
    if me == first:
        notes = group.get([f"{topic}/{p}" for p in others])
        missing = [p for p, note in zip(others, notes) if note is None]
        differing = [p for p, note in zip(others, notes) if note not in (None, digest.encode())]
        if differing:
            text = "\n".join([name, *reader.lines()])
            group.put(f"{topic}/lines", zlib.compress(text.encode()))
        group.put(f"{topic}/verdict", json.dumps([missing, differing]))
    elif group.get([f"{topic}/{first}"]) == [None]:
        missing, differing = [first], []
    else:
        # It decides within the limit from when it came, which may be later than the limit from now.
        key = [f"{topic}/verdict"]
        note = group.get(key)[0] or group.get(key)[0]
        missing, differing = json.loads(note) if note else ([first], [])
    if differing:
        if me == differing[0]:
            (note,) = group.get([f"{topic}/lines"])
            theirs = zlib.decompress(note or b"").decode().split("\n")
            group.put(
                f"{topic}/difference", _difference(first, theirs, me, [name, *reader.lines()])
            )
        (note,) = group.get([f"{topic}/difference"])
        raise RuntimeError((note or b"").decode())
    if missing:
        raise RuntimeError(
            f"process {', '.join(map(str, missing))} did not come to the first call of {name!r} "
            f"with these shapes within {group.limit:g} s, but process {me} did. All processes must "
            "call the same steps in the same order, with equal shapes. If one loads data or "
            "evaluates alone for longer, give jaxsparse.fail_at_once(limit=...) more seconds"
        )


def _difference(first: int, theirs: list[str], me: int, mine: list[str]) -> str:
    """What differs first, in words. Each line but the first begins with its digest."""

    def only(lines: list[str], others: list[str]) -> str:
        known = {line.partition(" ")[0] for line in others[1:]}
        lines = [line for line in lines[1:] if line.partition(" ")[0] not in known]
        return lines[0].partition(" ")[2] if lines else "nothing else"

    return (
        f"process {me} calls {mine[0]!r} and process {first} calls {theirs[0]!r}, which differ. "
        f"Process {me} has: {only(mine, theirs)}. Process {first} has: {only(theirs, mine)}. Start "
        "all processes with the same code, settings and seeds, and from the same checkpoint. "
        "Values that are to differ belong in a batch or in a PerWorker array. (data_parallel(..., "
        "compare=False) runs them as they are.)"
    )


class _Reader:
    """Reads a call into a digest, and keeps what each digest in it stands for."""

    def __init__(self) -> None:
        self._parts: dict[str, str | JaxprEqn] = {}  # by digest, in the order of the program
        self._programs: dict[int, tuple[str, bool, Any]] = {}  # by id, with the program itself

    def lines(self) -> Iterator[str]:
        """Digest and description of each part."""
        for digest, part in self._parts.items():
            text = part if isinstance(part, str) else _written(part)
            yield f"{digest} {' '.join(text.split())[:_WIDTH]}"

    def call(self, program: ClosedJaxpr, mesh: Mesh, args: Any, batches: Container[int]) -> str:
        devices = [device.id for device in mesh.devices.flat]
        heads = [
            f"jax {jax.__version__} and jaxlib {jaxlib.__version__}",
            f"a mesh {dict(mesh.shape)} of devices {devices}",
        ]
        types, values = [], []
        avals = iter(program.in_avals)
        for i, arg in enumerate(args):
            for path, leaf in tree_flatten_with_path(arg)[0]:
                name = f"argument {i}{keystr(path)}"
                types.append(f"{name} of type {_type(next(avals))}")
                is_whole = not isinstance(leaf, jax.Array) or leaf.is_fully_replicated
                if is_whole and i not in batches and not is_marked(path):
                    values.append(f"{name} = {_value(leaf)}")
        digests = [self._part(text) for text in (*heads, *types)]
        digests.append(self._program(program.jaxpr, program.consts)[0])
        return _digest(*digests, *map(self._part, values))

    def _part(self, text: str) -> str:
        digest = _digest(text)
        self._parts.setdefault(digest, text)
        return digest

    def _program(self, program: Jaxpr, consts: Any = ()) -> tuple[str, bool]:
        """The digest of a program, and whether it communicates."""
        if id(program) in self._programs:
            return self._programs[id(program)][:2]
        values = {v: f"input {i} {_type(v.aval)}" for i, v in enumerate(program.invars)}
        values |= {v: f"free {i} {_type(v.aval)}" for i, v in enumerate(program.constvars)}
        for v, x in zip(program.constvars, consts):
            values[v] = self._part(f"a constant {_type(v.aval)} {_value(x)}")
        read = lambda v: _literal(v) if isinstance(v, Literal) else values[v]
        moves = []
        for equation in program.eqns:
            name, settings = equation.primitive.name, self._plain(_settings(equation))
            digest = _digest(name, settings, *map(read, equation.invars))
            values |= {v: f"{digest} {i}" for i, v in enumerate(equation.outvars)}
            if equation.outvars:
                self._parts.setdefault(digest, equation)
            inner = map(self._program, _compat.inner_programs(equation.params))
            is_own = bool(_compat.axes_of(equation.params)) and name not in _compat.SILENT
            if is_own or any(moving for _, moving in inner):
                moves.append(digest)
        found = _digest(*map(read, program.outvars), *moves), bool(moves)
        self._programs[id(program)] = (*found, program)
        return found

    def _plain(self, x: Any) -> str:
        """A parameter in words that are the same in all processes."""
        match x:
            case ClosedJaxpr():
                return self._program(x.jaxpr, x.consts)[0]
            case Jaxpr():
                return self._program(x)[0]
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
