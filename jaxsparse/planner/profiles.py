"""Measurements, kept in files of one format, and the computing times of systems."""

import dataclasses
import functools
import json
import math
import os
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from jaxsparse.arrays.settings import static_float, static_int

_VERSION = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A measurement: its device and date, and its file.

    The file is JSON: the version, the kind, these texts, the units and the other fields of the
    class. Tables are rows of values. Reading a file makes the same checks as making the object.

    Attributes:
        device: the measured device, in words.
        jax: the version of JAX.
        date: the date of the measurement, ISO 8601.
        settings: other settings of the measurement, in words.
    """

    kind: ClassVar[str]
    units: ClassVar[dict[str, str]]
    how: ClassVar[str]  # the call or command that measures one

    device: str = "unknown"
    jax: str = "unknown"
    date: str = "unknown"
    settings: str = "unknown"

    def __str__(self) -> str:
        texts = [self.device, f"jax {self.jax}", self.date, self.settings]
        return ", ".join(text for text in texts if "unknown" not in text) or "unknown"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file that `load` reads."""
        content = {"jaxsparse_profile": _VERSION, "kind": self.kind, "units": self.units}
        content |= {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lines = (f' "{name}": {_written(value)}' for name, value in content.items())
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: the file has another content.
            OSError: the file can't be read.
        """
        try:
            content = json.loads(Path(path).read_text())
            for name, known in (("jaxsparse_profile", _VERSION), ("kind", cls.kind)):
                if content[name] != known:
                    raise ValueError(f"its {name} is {content[name]!r}, not {known!r}")
            return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{os.fspath(path)} is no profile of {cls.kind} that can be read "
                f"({type(error).__name__}: {error}): measure one by {cls.how}"
            ) from error


def _written(value: Any) -> str:
    """The value as JSON, with a line for each row of a table."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if not isinstance(value, tuple):
        return json.dumps(value)
    return "[" + ",".join(f"\n  {json.dumps(row)}" for row in value) + "\n ]"


class Floor(NamedTuple):
    """The least time of a pass over a vector: that of a donated x * 2."""

    elements: int  # float32 elements
    seconds: float


class SystemPoint(NamedTuple):
    """The computing time of one system in one exchange."""

    system: str  # key of `jaxsparse.systems.WITH_VARIANTS`, or "sparcml:ALGORITHM"
    elements: int  # float32 elements of the vector; a size of the floors
    workers: int
    density: float | None  # None: the system does the same at every density
    passes: float  # time in multiples of the floor of that size


@dataclasses.dataclass(frozen=True)
class SystemProfile(Measured):
    """Times of selecting, encoding, decoding and residuals, at some sizes, workers and densities.

    Between the points, times are interpolated on straight lines in logarithms. Beyond the largest
    size, times grow in proportion to the size; below the smallest, they are those of the smallest.
    Beyond the smallest and largest workers and densities, the last lines go on, but times neither
    fall nor grow faster than in proportion.

    Attributes:
        points: at least one point.
        floors: a floor for each size of the points.

    Raises:
        ValueError: there is no point, a point has no floor of its size, or a value is out of range.

    Example:
        >>> points = [SystemPoint("top_k", 1000, W, 0.01, 4.0 * W) for W in (2, 8)]
        >>> profile = SystemProfile(tuple(points), (Floor(1000, 1e-6),))
        >>> round(profile.seconds("top_k", 3000, workers=4, density=0.01), 9)
        4.8e-05
    """

    kind: ClassVar[str] = "systems"
    units: ClassVar[dict[str, str]] = {
        "floors": "elements, seconds",
        "points": "system, elements, workers, density, time in multiples of the floor",
    }
    how: ClassVar[str] = "python -m jaxsparse profile --out FILE"
    shipped_devices: ClassVar[tuple[str, ...]] = ("cpu", "h100")

    points: tuple[SystemPoint, ...]
    floors: tuple[Floor, ...]

    def __post_init__(self):
        floors = tuple(
            Floor(static_int("elements", size), _positive("seconds", seconds))
            for size, seconds in self.floors
        )
        points = tuple(
            SystemPoint(
                str(system),
                static_int("elements", size),
                static_int("workers", workers),
                None if density is None else _positive("density", density),
                _positive("passes", passes),
            )
            for system, size, workers, density, passes in self.points
        )
        sizes = {floor.elements for floor in floors}
        if not points or min(sizes | {point.workers for point in points}, default=0) < 1:
            raise ValueError(
                f"{len(points)} points and floors={floors}: give at least one point, and the floor "
                "of its size, with elements and workers of at least 1"
            )
        if missing := sorted({point.elements for point in points} - sizes):
            raise ValueError(f"floors={floors} lack sizes that points have: {missing}")
        object.__setattr__(self, "floors", tuple(sorted(floors)))
        object.__setattr__(self, "points", points)

    @property
    def systems(self) -> tuple[str, ...]:
        """The names of the measured systems."""
        return tuple(dict.fromkeys(point.system for point in self.points))

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.memory_bandwidth / 1e9:,.4g} GB/s of memory"

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second that the floor reads and writes, at the largest size."""
        largest = self.floors[-1]
        return 8 * largest.elements / largest.seconds

    def scaled(self, memory_bandwidth: float) -> "SystemProfile":
        """The same passes at another memory bandwidth, in bytes a second.

        Raises:
            ValueError: it is not positive and finite.
        """
        wanted = _positive("memory_bandwidth", memory_bandwidth)
        ratio = self.memory_bandwidth / wanted
        return dataclasses.replace(
            self,
            floors=tuple(Floor(floor.elements, floor.seconds * ratio) for floor in self.floors),
            device=f"extrapolated from {self.device}",
        )

    def updated(self, newer: "SystemProfile") -> "SystemProfile":
        """This profile with the newer one's times of the systems that the newer one measured.

        The newer times are taken in multiples of the newer floors. Times of "dense" and floors stay
        as they are, where this profile has them. So a system can be added without measuring all
        others again.

        Raises:
            ValueError: the newer profile is of another device.
        """
        if newer.device != self.device:
            raise ValueError(
                f"the profile is of {self.device!r}, and the newer one of {newer.device!r}: "
                "measure all systems on one device"
            )
        replaced = set(newer.systems) - {"dense"}
        keeps = "dense" not in self.systems
        known = {floor.elements for floor in self.floors}
        dated = f"{', '.join(sorted(replaced))} on {newer.date}"
        return dataclasses.replace(
            self,
            points=tuple(p for p in self.points if p.system not in replaced)
            + tuple(p for p in newer.points if keeps or p.system in replaced),
            floors=(*self.floors, *(f for f in newer.floors if f.elements not in known)),
            settings=f"{self.settings}; {dated}",
        )

    def seconds(self, system: str, size: int, workers: int, density: float) -> float:
        """The time that one worker computes in an exchange.

        Args:
            system: name of the system.
            size: number of elements of the vector.
            workers: number of workers.
            density: share of the elements that a step delivers.

        Raises:
            ValueError: the system was not measured, or a number is not positive.
        """
        of_system = [point for point in self.points if point.system == system]
        if not of_system:
            raise ValueError(
                f"system {system!r} is not in this profile, which has {', '.join(self.systems)}: "
                "measure it by jaxsparse.planner.profile_systems(systems=[...])"
            )
        for name, value in (("size", size), ("workers", workers), ("density", density)):
            _positive(name, value)
        floors = dict(self.floors)
        # The grid may have holes, so interpolate in one dimension after the other.
        grid: dict[float | None, dict[int, dict[int, float]]] = {}
        for _, elements, count, share, passes in of_system:
            sizes = grid.setdefault(share, {}).setdefault(count, {})
            sizes[elements] = passes * floors[elements]
        by_density = {
            1.0 if share is None else share: _between(
                {count: _at_size(sizes, size) for count, sizes in by_workers.items()}, workers
            )
            for share, by_workers in grid.items()
        }
        return _between(by_density, density)

    @classmethod
    @functools.cache
    def shipped(cls, device: str = "cpu") -> Self:
        """A profile that the library contains.

        Args:
            device: "cpu" (two cores of a CPU, with all systems but those of matrices) or "h100" (an
                NVIDIA H100, with 16 systems and variants).

        Raises:
            ValueError: the library has none of this device.
        """
        if device not in cls.shipped_devices:
            known = ", ".join(cls.shipped_devices)
            raise ValueError(
                f"profile={device!r} is not one of the library's, {known}: measure one by "
                f"{cls.how}, or SystemProfile.load a file"
            )
        return cls.load(Path(__file__).with_name(f"profile_{device}.json"))


def _positive(name: str, value: Any) -> float:
    number = static_float(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value} must be positive and finite")
    return number


def _at_size(seconds: dict[int, float], size: int) -> float:
    smallest, largest = min(seconds), max(seconds)
    beyond = max(1.0, size / largest)
    return beyond * _between(seconds, min(max(size, smallest), largest))


def _between(values: dict[Any, float], x: float) -> float:
    """The value at x, on lines through the logarithms. The outer lines have slopes 0 to 1."""
    at = sorted(values)
    if len(at) == 1:
        return values[at[0]]
    left = max(0, sum(a <= x for a in at[:-1]) - 1)
    a, b = at[left : left + 2]
    slope = math.log(values[b] / values[a]) / math.log(b / a)
    if not at[0] <= x <= at[-1]:
        slope = min(max(slope, 0.0), 1.0)
    start = b if x > b else a
    return values[start] * (x / start) ** slope
