"""How reducers pick the largest entries, by name."""

from collections.abc import Callable
from typing import Literal, get_args

from jaxtyping import Array, Float

from jaxsparse import select
from jaxsparse.stream import SparseStream

# "exact" sorts (on CPU about 80 passes over the vector), "fast" keeps nearly the same in about 10.
Selection = Literal["fast", "exact"]


def check_selection(selection: Selection) -> None:
    """Raises ValueError for an unknown name."""
    if selection not in get_args(Selection):
        raise ValueError(f"selection={selection!r} is unknown: use one of {get_args(Selection)}")


def selector(selection: Selection) -> Callable[[Float[Array, " m"], int], SparseStream]:
    """The function of a vector and k."""
    return select.fast_top_k if selection == "fast" else select.top_k
