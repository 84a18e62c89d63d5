"""Messages, decisions and snapshots, as bytes and back. Nothing that is read is believed.

    b"jaxisland2" | uint32 length of the header | header, JSON | body | SHA-256 of all before

Numbers are little-endian. A header says what it is, and has exactly the fields of its class, each
of its type and in its range. A body is words of a message, or the arrays of a snapshot, in the
format of safetensors. Nothing is unpickled.
"""

import hashlib
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from jaxsparse.islands.store import NAME

_MAGIC = b"jaxisland2"
_HASH = 32
WEIGHTS = 1e-20, 1e20  # sums and shares of these are normal numbers of float32

# What safetensors calls the types of arrays that a snapshot may have.
DTYPES = {"bool": "BOOL", "bfloat16": "BF16"}
for _bits in (8, 16, 32, 64):
    DTYPES |= {f"int{_bits}": f"I{_bits}", f"uint{_bits}": f"U{_bits}"}
    DTYPES |= {f"float{_bits}": f"F{_bits}"} if _bits > 8 else {}

Count = Annotated[int, Meta(ge=0, lt=2**53)]  # JSON's readers agree on integers below
Name = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]
Weight = Annotated[float, Meta(ge=WEIGHTS[0], le=WEIGHTS[1])]

R = TypeVar("R", bound="Record")


class BrokenError(ValueError):
    """An object that cannot be what its key says. The message says why."""


class ForeignError(BrokenError):
    """An object that was read whole, and is another run's."""


class Record(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower
):
    """The header of an object of a round.

    `settings` is a digest of the parameters' shapes and of the outer step. Members of a run share
    it.
    """

    round: Count
    settings: str

    def to_bytes(self, body: bytes = b"") -> bytes:
        """The object: this header, a body, and a checksum of both."""
        header = msgspec.json.encode(self)
        head = _MAGIC + len(header).to_bytes(4, "little") + header
        checked = hashlib.sha256(head)
        checked.update(body)
        return b"".join((head, body, checked.digest()))  # bodies are large: one copy

    @classmethod
    def from_bytes(
        cls: type[R], data: bytes, round: int, settings: str | None = None
    ) -> tuple[R, memoryview]:
        """Header and body of an object that was read, of this round and these settings, or any."""
        start, whole = len(_MAGIC) + 4, memoryview(data)
        if len(data) < start + _HASH or not data.startswith(_MAGIC):
            raise BrokenError(f"it is no object of this version ({len(data)} bytes)")
        if hashlib.sha256(whole[:-_HASH]).digest() != data[-_HASH:]:
            raise BrokenError("its checksum is wrong")
        length = int.from_bytes(data[start - 4 : start], "little")
        if length > len(data) - start - _HASH:
            raise BrokenError(f"its header claims {length} bytes")
        try:
            record = msgspec.json.decode(whole[start : start + length], type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenError(f"its header is wrong: {str(error)[:200]!r}") from None
        if settings is not None and record.settings != settings:
            raise ForeignError(
                f"its settings are {record.settings[:64]!r}, and this run's are {settings!r}: "
                "another model, exchange or optimizer, or another version of JAX or jaxsparse"
            )
        if record.round != round:
            raise BrokenError(f"it says that it is of round {record.round}")
        return record, whole[start + length : -_HASH]


class Message(Record, frozen=True):
    """An island's displacement in a round. The body is its words.

    A process that came back has another `life`, and a greater one. The digest is of the global
    parameters that it started the round from. A `late` one has only what the island owes from a
    round that was over before. The loss is the mean of the island's steps since its message before.
    """

    name: Name
    life: Name
    weight: Weight
    digest: str
    late: bool
    loss: float | None


class CountedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that counts. Attributes: those of the message, and the checksum of its object."""

    name: Name
    life: Name
    weight: Weight
    late: bool
    loss: float | None
    checksum: str


class Decision(Record, frozen=True):
    """Whose messages count in a round, in the order in which they are added up.

    The digest is that of the global parameters that most of them started from. `waited` has the
    seconds from its own message to the decision of `by`.
    """

    members: Annotated[tuple[CountedMessage, ...], Meta(min_length=1)]
    digest: str
    by: Name
    waited: float
    words: Count

    def __post_init__(self) -> None:
        if len(self.lives) != len(self.members):
            raise BrokenError("its members have one of them twice")

    @property
    def lives(self) -> dict[str, str]:
        """The life of each member, by name, in order."""
        return {member.name: member.life for member in self.members}


class Snapshot(Record, frozen=True):
    """Global parameters and outer state, as a round begins. The body is their arrays by path."""


def checksum(data: bytes) -> str:
    """The SHA-256 of an object, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def words_of(body: memoryview, words: int) -> np.ndarray:
    """The words of a message. BrokenError: they are not so many, or say that they aren't finite."""
    if len(body) != 4 * words:
        raise BrokenError(f"it has {len(body)} bytes of words, and this run's messages {4 * words}")
    found = np.frombuffer(body, "<u4")
    # The first word is a flag, see `feedback.messages`.
    if found[0]:
        raise BrokenError("it says that its values are not finite")
    return found
