"""Exchanges by name, with settings that deliver about a share of a vector's elements.

A name that ends in "_packed" has 4-byte entries. Tests, benchmarks and the docs use them.
"""

from typing import Any

from table import EXCHANGES

from jaxsparse import codecs
from jaxsparse.arrays.settings import check_density
from jaxsparse.reducers.base import Reducer

PACKED = ("spardl", "ok_topk", "top_k")
NAMES = tuple(
    name
    for system in EXCHANGES
    for name in (system, *([f"{system}_packed"] if system in PACKED else []))
)


def settings_at(
    name: str, density: float, size: int, *, block_size: int = 256, dense_size: int = 0
) -> dict[str, Any]:
    """The settings of a system, of `NAMES`, for a vector beside so many dense elements.

    Raises:
        ValueError: there is no such system, or it can't meet the density.
    """
    if name not in NAMES:
        raise ValueError(f"system {name!r} is unknown: use one of {', '.join(NAMES)}")
    check_density(density)
    system = name.removesuffix("_packed")
    found = EXCHANGES[system].at_density(density, size, dense_size)
    if name != system:
        found["codec"] = codecs.Packed()
    if system in ("omni_reduce", "s2_reducer", "sparse_all_gather") and block_size != 256:
        found["block_size"] = block_size
    return found


def transformation_at(name: str, *args: Any, **options: Any) -> Any:
    """The transformation with these settings."""
    return EXCHANGES[name.removesuffix("_packed")].transformation(
        **settings_at(name, *args, **options)
    )


def budget_at(name: str, *args: Any, **options: Any) -> Reducer:
    """The reducer, or the budget that makes it, with these settings."""
    return EXCHANGES[name.removesuffix("_packed")].reducer(**settings_at(name, *args, **options))


def reducer_at(name: str, density: float, size: int, **options: Any) -> Reducer:
    """The reducer of one vector of `size` elements."""
    return budget_at(name, density, size, **options).split((size,))[0]
