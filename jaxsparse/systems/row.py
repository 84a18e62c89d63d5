"""What the table of systems says of each: a row, and what is asked of it."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import optax

from jaxsparse import network
from jaxsparse.reducers.base import Budget, Reducer


class Request(NamedTuple):
    """What is to be exchanged."""

    density: float  # elements that a step delivers, as a share of all
    size: int  # elements
    workers: int
    link: network.Link | None = None  # that sparcml's choice of an algorithm reckons with
    touched: float | None = None  # share of the blocks that are not zero on a worker; None: all
    block_size: int = 256  # of the systems that send blocks
    dense_size: int = 0  # elements that travel dense beside these


Settings = Mapping[str, Any]


class Case(NamedTuple):
    """Settings for the tests, of vectors of some 600 elements."""

    small: Settings  # a budget of about 3 %
    full: Settings  # a budget for everything


def at_density(request: Request) -> Settings:
    """The settings of a system whose only budget is a density."""
    return {"density": request.density}


class System(NamedTuple):
    """One row of the table.

    Settings are always those of the transformation, by name, without the options that all share.
    """

    transformation: Callable[..., optax.GradientTransformationExtraArgs]
    reducer: Callable[..., Budget]  # of the same settings
    summary: str  # for README's table, in Markdown
    received: str  # bytes that a worker receives in a step: d elements, k = density d, W workers
    cases: Mapping[str, Case]  # "" is the usual one, others are variants
    settings: Callable[[Request], Settings] = at_density  # that deliver so much; or a ValueError
    variants: Mapping[str, Settings] = {}  # further rows for the planner: what is added, by suffix
    follows_density: bool = True  # or it sends the same whatever the density
    is_of_blocks: bool = False  # sends, exactly, the blocks that are not zero, where most are
    caveat: str = ""  # why a planner should not choose it by time alone

    @property
    def name(self) -> str:
        """Of the transformation."""
        return self.transformation.__name__

    def with_variants(self) -> Iterator[tuple[str, "System"]]:
        """This row and one for each variant, by name."""
        yield self.name, self
        for suffix, added in self.variants.items():
            settings = lambda request, added=added: {**self.settings(request), **added}
            yield f"{self.name}_{suffix}", self._replace(settings=settings, variants={})


class Choice(NamedTuple):
    """A system with its settings."""

    system: System
    settings: Settings

    @property
    def budget(self) -> Budget:
        """What exchanges."""
        return self.system.reducer(**self.settings)

    def reducer(self, size: int) -> Reducer:
        """For one vector of `size` elements, all of the budget's, with no dense leaves beside it.

        Raises:
            ValueError: the budget can't be met.
        """
        return self.budget.split((size,))[0]

    @property
    def transformation(self) -> str:
        """The transformation as a Python expression, for a whole tree."""
        given = dict(self.settings)
        positional = []
        for name, parameter in inspect.signature(self.system.transformation).parameters.items():
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or name not in given:
                break
            positional.append(given.pop(name))
        return _call(f"jaxsparse.{self.system.name}", *positional, **given)

    @property
    def expression(self) -> str:
        """The budget as a Python expression, for `jaxsparse.partition`."""
        return written(self.budget)


# Where the public names are, by the package that a class is in.
_PUBLIC = {"network": "jaxsparse.planner"}


def written(value: Any) -> str:
    """A setting as a Python expression; of a dataclass's fields those that differ from defaults.

    >>> from jaxsparse import codecs
    >>> written((0.25, codecs.Packed()))
    '(0.25, jaxsparse.codecs.Packed())'
    """
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(map(written, value))})"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }
    kind = type(value)
    package = kind.__module__.split(".")[1]
    return _call(f"{_PUBLIC.get(package, f'jaxsparse.{package}')}.{kind.__name__}", **given)


def _call(function: str, *args: Any, **settings: Any) -> str:
    parts = [*map(written, args), *(f"{name}={written(x)}" for name, x in settings.items())]
    return f"{function}({', '.join(parts)})"


def block_settings(request: Request, room: str) -> Settings:
    """The settings of a system of blocks; `room` names that for the blocks there is room for."""
    settings: dict[str, Any] = {"density": request.density}
    if request.touched is not None:
        # What any worker touches needs room if workers share it.
        shared = request.workers * request.touched if room == "union_density" else request.touched
        settings = {"density": None, room: min(1.0, shared)}
    if request.block_size != 256:
        settings["block_size"] = request.block_size
    return settings


def one_in(density: float, group_size: int) -> tuple[int, int]:
    """K and a group's size for about a share of the elements, the group larger if k were below 1.

    >>> one_in(0.01, 512), one_in(0.001, 512)
    ((5, 512), (1, 1000))
    """
    if density * group_size < 1:
        group_size = math.floor(1 / density + 0.5)
    return max(1, round(density * group_size)), group_size
