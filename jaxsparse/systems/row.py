"""A row of the table of systems."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import optax

from jaxsparse.reducers.base import Budget

Settings = Mapping[str, Any]


class Case(NamedTuple):
    """Settings for the tests, whose vectors have some 600 elements."""

    small: Settings  # a budget of about 3 %
    full: Settings  # a budget for everything


class System(NamedTuple):
    """One row of the table.

    Settings are the transformation's arguments by name, without the options that all share.
    """

    transformation: Callable[..., optax.GradientTransformationExtraArgs]
    summary: str  # for the docs' table, in Markdown
    received: str  # bytes that a worker receives in a step: d elements, k = density d, W workers
    cases: Mapping[str, Case]  # "" is the usual one, others are variants
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
