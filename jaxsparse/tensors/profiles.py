"""What encoding and decoding cost on a device, as a function of a tensor's size."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxsparse.reducers.density import check_density
from jaxsparse.settings import static_float, static_int

_VERSION = 2
_UNITS = {
    "elements": "float32 elements of a tensor",
    "encode": "seconds",
    "decode": "seconds, whatever the number of entries",
    "decode_per_entry": "seconds for each entry of all workers' messages",
}


class Point(NamedTuple):
    """What tensors of one size cost."""

    elements: int  # float32 elements, d
    encode: float  # seconds
    decode: float  # seconds, whatever the number of entries
    decode_per_entry: float  # seconds for each of the W m entries of all workers' messages


@dataclasses.dataclass(frozen=True)
class Profile:
    """Times at some sizes, and between them by straight lines.

    Beyond the largest size times grow in proportion to the elements; below the smallest they stay
    as they are there. A single line, `fixed + per_element d`, fits worse where tensors outgrow
    caches or what the allocator keeps: on a CPU, sizes 2^12 to 2^24, it was off by a factor of 1.7
    (encoding) and 2.3 (decoding), in the geometric mean, at every other size, which was left out of
    the fit; lines between the measured sizes were off by 1.2 and 1.4.

    Attributes:
        points: in increasing order of size, at least one.
        device: that was measured, in words.
        jax: the version of JAX.
        date: of the measurement, ISO 8601.
        settings: what else was measured, in words.
        density: entries of a message as a share of the elements, in (0, 1]; None where unknown.
        codec: of the messages, its `repr`; None where unknown.

    Raises:
        ValueError: there is no point, one is not a `Point`, sizes do not increase, a time is
            negative or not finite, or the density or codec is neither None nor as above.

    Example:
        >>> profile = Profile((Point(1000, 1e-5, 1e-5, 1e-9), Point(3000, 5e-5, 3e-5, 1e-9)))
        >>> round(profile.encode_seconds(2000), 9)
        3e-05
        >>> round(profile.decode_seconds(6000, entries=1000), 9)
        6.1e-05
    """

    points: tuple[Point, ...]
    device: str = "unknown"
    jax: str = "unknown"
    date: str = "unknown"
    settings: str = "unknown"
    density: float | None = None
    codec: str | None = None

    def __post_init__(self):
        points = tuple(map(_checked, _fields("points", self.points)))
        sizes = [point.elements for point in points]
        if not points or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(
                f"points have elements={sizes}: give at least one size, all at least 1 and in "
                "increasing order"
            )
        object.__setattr__(self, "points", points)
        if self.density is not None:
            check_density(self.density)
            object.__setattr__(self, "density", float(self.density))
        if self.codec is not None and not isinstance(self.codec, str):
            raise ValueError(f"codec={self.codec!r} must be a text: pass repr(codec), or None")

    def encode_seconds(self, elements: int) -> float:
        """Seconds to encode a tensor of `elements`."""
        return self._between("encode", elements)

    def decode_seconds(self, elements: int, entries: int) -> float:
        """Seconds to decode messages of `entries`, together, into a tensor of `elements`.

        The DRAGONN paper's sparse decoding (section 4.3): a d + b W m, with no term W d.
        """
        # Of an entry the time does not grow beyond the largest size.
        largest = self.points[-1].elements
        per_entry = self._between("decode_per_entry", min(elements, largest))
        return self._between("decode", elements) + per_entry * entries

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file that `load` reads."""
        content = {
            "jaxsparse_profile": _VERSION,
            "device": self.device,
            "jax": self.jax,
            "date": self.date,
            "settings": self.settings,
            "density": self.density,
            "codec": self.codec,
            "units": _UNITS,
            "points": [point._asdict() for point in self.points],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Reads a file that `save` wrote.

        Raises:
            ValueError: it is no such file.
            OSError: it can't be read.
        """
        try:
            content = json.loads(Path(path).read_text())
            version = content["jaxsparse_profile"]
            if version != _VERSION:
                raise ValueError(f"it has version {version!r}, this library reads {_VERSION}")
            texts = {name: str(content[name]) for name in ("device", "jax", "date", "settings")}
            points = tuple(Point(**point) for point in content["points"])
            return cls(points, **texts, density=content["density"], codec=content["codec"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{os.fspath(path)} is no profile that can be read ({type(error).__name__}: "
                f"{error}): measure one by jaxsparse.tensors.profile() and save() it"
            ) from error

    def _between(self, name: str, elements: int) -> float:
        sizes = [point.elements for point in self.points]
        times = [getattr(point, name) for point in self.points]
        beyond = max(1.0, elements / sizes[-1])
        return beyond * float(np.interp(elements, sizes, times))


def _fields(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(
            f"{name}={value!r} is no sequence: give Profile((Point({', '.join(Point._fields)}), "
            "...))"
        ) from None


def _checked(point: Any) -> Point:
    values = _fields("point", point)
    if len(values) != len(Point._fields):
        raise ValueError(
            f"point={point!r} must have {len(Point._fields)} values: give "
            f"Point({', '.join(Point._fields)})"
        )
    elements, *times = values
    seconds = [static_float(name, time) for name, time in zip(Point._fields[1:], times)]
    for name, time in zip(Point._fields[1:], seconds):
        if not 0 <= time < math.inf:
            raise ValueError(f"{name}={time} at elements={elements} must be finite and at least 0")
    return Point(static_int("elements", elements), *seconds)
