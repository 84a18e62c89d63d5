"""The table of systems."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec

import optax

from jaxsparse.feedback.options import Options, as_function
from jaxsparse.reducers.base import Reducer

P = ParamSpec("P")

# The conservation law of a system's steps. "sums": the law of `error_feedback`, as the reducer's
# conservation says. "differences": the update is the mean of the workers' momenta, less the mean of
# their residuals.
Law = Literal["sums", "differences"]


class System(NamedTuple):
    """A row of the table."""

    transformation: Callable[..., optax.GradientTransformationExtraArgs]
    summary: str  # for the docs' table, in Markdown
    received: str  # bytes that a worker receives in a step: d elements, k = density d, W workers
    law: Law

    @property
    def name(self) -> str:
        """The name of the transformation."""
        return self.transformation.__name__

    def reducer(self, *args: Any, **settings: Any) -> Reducer:
        """The reducer of the whole tree with these settings."""
        return self.transformation.settings(*args, **settings).tree_reducer  # type: ignore[attr-defined]


SYSTEMS: dict[str, System] = {}


def system(
    settings: Callable[P, Options],
    name: str,
    *,
    summary: str,
    received: str,
    law: Law = "sums",
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """The transformation of a system, which has a row in the table. See `System`."""
    made = as_function(settings, name)
    SYSTEMS[name] = System(made, summary, received, law)
    return made
