"""Messages, decisions and snapshots, as bytes and back. Nothing that is read is believed.

    b"jaxisland1" | uint32 length of the header | header, JSON | body | SHA-256 of all before

Numbers are little-endian. A header says what it is, and has exactly the fields of its class, each
of its type. A body is words of a message, or the arrays of a snapshot. Nothing is unpickled.
"""

import dataclasses
import functools
import hashlib
import json
import math
import types
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np

from jaxsparse.islands.store import NAME

_MAGIC = b"jaxisland1"
_HASH = 32
# A header of 65,536 members or arrays is shorter.
_LONGEST_HEADER = 2**24
WEIGHTS = 1e-20, 1e20  # sums and shares of these are normal numbers of float32
_INTEGERS = 2**53  # JSON's readers agree on integers below

R = TypeVar("R", bound="Record")


class BrokenError(ValueError):
    """An object that cannot be what its key says. The message says why."""


class ForeignError(BrokenError):
    """An object that was read whole, and is another run's."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The header of an object.

    Attributes:
        round: the round that the object belongs to.
        settings: digest of the parameters' shapes and of the outer step. Members of a run share it.
    """

    kind: ClassVar[str]

    round: int
    settings: str

    def to_bytes(self, body: bytes = b"") -> bytes:
        """The object: this header, a body, and a checksum of both."""
        fields = {"kind": self.kind, **dataclasses.asdict(self)}
        header = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
        data = _MAGIC + len(header).to_bytes(4, "little") + header + body
        return data + hashlib.sha256(data).digest()

    @classmethod
    def from_bytes(
        cls: type[R], data: bytes, round: int, settings: str | None = None
    ) -> tuple[R, bytes]:
        """Header and body of an object.

        Args:
            data: what was read.
            round: the round in which it was found.
            settings: this run's. None: any.

        Raises:
            BrokenError: it is not such an object, of this round and this run.
        """
        start = len(_MAGIC) + 4
        if len(data) < start + _HASH or not data.startswith(_MAGIC):
            raise BrokenError(f"it is no object of this version ({len(data)} bytes)")
        if hashlib.sha256(memoryview(data)[:-_HASH]).digest() != data[-_HASH:]:
            raise BrokenError("its checksum is wrong")
        length = int.from_bytes(data[start - 4 : start], "little")
        if length > min(_LONGEST_HEADER, len(data) - start - _HASH):
            raise BrokenError(f"its header claims {length} bytes")
        try:
            fields = json.loads(data[start : start + length].decode())
        except (ValueError, RecursionError) as error:
            raise BrokenError(f"its header is no JSON: {error}") from None
        record = made(cls, fields, "its header", {"kind": cls.kind})
        if settings is not None and record.settings != settings:
            raise ForeignError(
                f"its settings are {record.settings}, and this run's are {settings}: another "
                "model, outer optimizer, exchange or list of members, or another version of JAX or "
                "jaxsparse"
            )
        if record.round != round:
            raise BrokenError(f"it says that it is of round {record.round}")
        record.check()
        return record, data[start + length : -_HASH]

    def check(self) -> None:
        """Raises BrokenError if fields contradict each other."""


@dataclasses.dataclass(frozen=True)
class Message(Record):
    """An island's displacement in a round. The body is its words.

    Attributes:
        name: the island.
        life: the word of the island's process. One that came back has another, and a greater one.
        weight: its weight in the mean, above 0.
        digest: digest of the global parameters that it started the round from.
        late: whether it has only what the island owes from a round that was over before.
        loss: mean loss of the island's steps since its message before, or None.
    """

    kind = "message"

    name: str
    life: str
    weight: float
    digest: str
    late: bool
    loss: float | None

    def check(self) -> None:
        _check_names(self.name, self.life)
        _check_weight(self.weight)
        _check_finite(self.loss or 0.0)


@dataclasses.dataclass(frozen=True)
class Member:
    """A message that counts. Attributes: those of the message, and the checksum of its object."""

    name: str
    life: str
    weight: float
    late: bool
    loss: float | None
    checksum: str


@dataclasses.dataclass(frozen=True)
class Decision(Record):
    """Whose messages count in a round, in the order in which they are added up.

    Attributes:
        members: one or more, each of another name.
        digest: the digest of the global parameters that most of them started from.
        by: the island that decided.
        waited: seconds from this island's own message to its decision.
        words: number of words of a message.
    """

    kind = "decision"

    members: tuple[Member, ...]
    digest: str
    by: str
    waited: float
    words: int

    @property
    def lives(self) -> dict[str, str]:
        """The life of each member, by name, in order."""
        return {member.name: member.life for member in self.members}

    def check(self) -> None:
        for member in self.members:
            _check_names(member.name, member.life)
            _check_weight(member.weight)
            _check_finite(member.loss or 0.0)
        _check_names(self.by)
        _check_finite(self.waited)
        names = [member.name for member in self.members]
        if not names or len(set(names)) != len(names):
            raise BrokenError("its members are none, or one of them twice")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a snapshot: its path in the tree, its shape and its dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Snapshot(Record):
    """Global parameters and outer state, as a round begins. The body is their arrays in turn."""

    kind = "snapshot"

    leaves: tuple[Leaf, ...]


def to_snapshot(round: int, settings: str, leaves: Iterable[tuple[str, np.ndarray]]) -> bytes:
    """A snapshot of arrays with their paths."""
    heads, bodies = [], []
    for path, x in leaves:
        heads.append(Leaf(path, x.shape, x.dtype.name))
        bodies.append(np.ascontiguousarray(x).tobytes())
    return Snapshot(round, settings, tuple(heads)).to_bytes(b"".join(bodies))


def from_snapshot(
    data: bytes, round: int, settings: str, like: Iterable[tuple[str, tuple[int, ...], Any]]
) -> list[np.ndarray]:
    """The arrays of a snapshot.

    Args:
        data: the object.
        round: see `Record.from_bytes`.
        settings: see `Record.from_bytes`.
        like: path, shape and dtype of each array that it must have.

    Raises:
        BrokenError: it is no snapshot of such arrays.
    """
    snapshot, body = Snapshot.from_bytes(data, round, settings)
    wanted = tuple(Leaf(path, tuple(shape), jnp.dtype(dtype).name) for path, shape, dtype in like)
    if snapshot.leaves != wanted:
        raise ForeignError("its arrays are not those of this run")
    sizes = [math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in wanted]
    if sum(sizes) != len(body):
        raise BrokenError(f"its arrays take {sum(sizes)} bytes, and it has {len(body)}")
    arrays, start = [], 0
    for leaf, size in zip(wanted, sizes):
        part = np.frombuffer(body, np.uint8, size, start)
        arrays.append(part.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape))
        start += size
    return arrays


def checksum(data: bytes) -> str:
    """The SHA-256 of an object, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def words_of(body: bytes, words: int) -> np.ndarray:
    """The words of a message, uint32[words].

    Raises:
        BrokenError: it has another number of words, or says that its values are not finite.
    """
    if len(body) != 4 * words:
        raise BrokenError(f"it has {len(body)} bytes of words, and this run's messages {4 * words}")
    found = np.frombuffer(body, "<u4")
    # The first word is a flag, see `feedback.by_message`.
    if found[0]:
        raise BrokenError("it says that its values are not finite")
    return found


def made(cls: type, fields: Any, what: str, more: dict[str, Any] | None = None) -> Any:
    """A dataclass from JSON, each field checked.

    Raises:
        BrokenError: a field is missing, unknown or of another type.
    """
    more = more or {}
    hints = _hints(cls)
    names = list(hints)
    if not isinstance(fields, dict) or sorted(fields) != sorted([*names, *more]):
        raise BrokenError(f"{what} must have the fields {', '.join([*more, *names])}")
    for name, value in more.items():
        if fields[name] != value:
            raise BrokenError(f"{what} says {name} {str(fields[name])[:40]!r}, not {value!r}")
    return cls(**{name: _typed(hints[name], fields[name], f"{name} of {what}") for name in names})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of fields by name. To find them takes longer than all else of a small record."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _typed(kind: Any, value: Any, what: str) -> Any:
    # Plain values come first: islands read some million in a round of hundreds.
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    if kind is int and is_int and 0 <= value < _INTEGERS:
        return value
    if kind is float and (isinstance(value, float) or (is_int and abs(value) < _INTEGERS)):
        return float(value)
    if get_origin(kind) is types.UnionType:  # with None
        return None if value is None else _typed(get_args(kind)[0], value, what)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise BrokenError(f"{what} is no list")
        return tuple(_typed(get_args(kind)[0], each, what) for each in value)
    if dataclasses.is_dataclass(kind):
        return made(kind, value, what)  # type: ignore[arg-type]
    raise BrokenError(f"{what} is {str(value)[:40]!r}, which is no {kind.__name__}")


def _check_weight(weight: float) -> None:
    if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
        raise BrokenError(f"a weight is {weight}")


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise BrokenError(f"a number for those who watch is {value}")


def _check_names(*names: str) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise BrokenError(f"{name[:80]!r} is no name of an island")
