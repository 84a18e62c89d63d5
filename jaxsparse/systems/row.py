"""A row of the table of systems, and a request for settings."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import optax

from jaxsparse.reducers.base import Budget, Reducer


class Request(NamedTuple):
    """A vector to exchange, its network, and the share of it to deliver."""

    density: float  # share of the elements that a step delivers
    size: int  # number of elements
    workers: int
    touched: float | None = None  # share of the blocks that are not zero on a worker; None: all
    block_size: int = 256  # for the systems that send blocks
    dense_size: int = 0  # number of further elements, which travel dense


Settings = Mapping[str, Any]


class Case(NamedTuple):
    """Settings for the tests, whose vectors have some 600 elements."""

    small: Settings  # a budget of about 3 %
    full: Settings  # a budget for everything


def at_density(request: Request) -> Settings:
    """The settings of a system that takes only a density."""
    return {"density": request.density}


class System(NamedTuple):
    """One row of the table.

    Settings are the transformation's arguments by name, without the options that all share.
    """

    transformation: Callable[..., optax.GradientTransformationExtraArgs]
    summary: str  # for the docs' table, in Markdown
    received: str  # bytes that a worker receives in a step: d elements, k = density d, W workers
    cases: Mapping[str, Case]  # "" is the usual one, others are variants
    settings: Callable[[Request], Settings] = at_density  # to meet a request, or a ValueError
    variants: Mapping[str, Settings] = {}  # more rows for the planner: suffix -> added settings
    follows_density: bool = True  # False: it sends the same at every density
    is_of_blocks: bool = False  # can send exactly the blocks that are not zero
    caveat: str = ""  # why a planner should not choose it by time alone
    # The conservation law of its steps. "sums": the law of `error_feedback`, as the reducer's
    # conservation says. "differences": the update is the mean of the workers' momenta, less the
    # mean of their residuals.
    law: Literal["sums", "differences"] = "sums"

    @property
    def name(self) -> str:
        """The name of the transformation."""
        return self.transformation.__name__

    def reducer(self, *args: Any, **settings: Any) -> Budget:
        """The reducer of these settings, or the budget that makes it."""
        return self.transformation.settings(*args, **settings).budget  # type: ignore[attr-defined]

    def with_variants(self) -> Iterator[tuple[str, "System"]]:
        """This row and one for each variant, with their names."""
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
        """The reducer, or the budget that makes one for each bucket."""
        return self.system.reducer(**self.settings)

    def reducer(self, size: int) -> Reducer:
        """The reducer for one vector of `size` elements, without dense leaves beside it.

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


def written(value: Any) -> str:
    """A setting as a Python expression. A dataclass shows the fields that are not defaults.

    >>> from jaxsparse import codecs
    >>> written(12.0), written(codecs.Packed())
    ('12', 'jaxsparse.codecs.Packed()')
    """
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }
    package, name = type(value).__module__.split(".")[1], type(value).__name__
    return _call(f"jaxsparse.{package}.{name}", **given)


def _call(function: str, *args: Any, **settings: Any) -> str:
    parts = [*map(written, args), *(f"{name}={written(x)}" for name, x in settings.items())]
    return f"{function}({', '.join(parts)})"


def block_settings(request: Request, room: str) -> Settings:
    """The settings of a system of blocks; `room` is the name of its setting for room."""
    settings: dict[str, Any] = {"density": request.density}
    if request.touched is not None:
        # Workers that share the room may all touch different blocks.
        shared = request.workers * request.touched if room == "union_density" else request.touched
        settings = {"density": None, room: min(1.0, shared)}
    if request.block_size != 256:
        settings["block_size"] = request.block_size
    return settings


def one_in(density: float, group_size: int) -> tuple[int, int]:
    """The k and group size for about this density. The group grows if k would be below 1.

    >>> one_in(0.01, 512), one_in(0.001, 512)
    ((5, 512), (1, 1000))
    """
    if density * group_size < 1:
        group_size = math.floor(1 / density + 0.5)
    return max(1, round(density * group_size)), group_size
