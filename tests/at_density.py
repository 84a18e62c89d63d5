"""Settings with which each system delivers about a share of a vector's elements.

`dense`, `qsgd` (4 bits), `quantized` (8 bits) and `sign_sgd` deliver everything at any density. A
name that ends in "_packed" has 4-byte entries. Tests, benchmarks and the page of systems use them.
"""

import math
from collections.abc import Callable
from typing import Any

from table import SYSTEMS

from jaxsparse import codecs
from jaxsparse.arrays.settings import check_density, entries
from jaxsparse.reducers import TopK
from jaxsparse.reducers.base import Reducer

PACKED = ("spardl", "ok_topk", "top_k")
NAMES = tuple(
    name
    for system in SYSTEMS
    for name in (system, *([f"{system}_packed"] if system in PACKED else []))
)
FIXED = ("dense", "qsgd", "quantized", "sign_sgd")  # the same at every density


def one_in(density: float, group_size: int) -> tuple[int, int]:
    """The k and group size for about this density. The group grows if k would be below 1."""
    if density * group_size < 1:
        group_size = math.floor(1 / density + 0.5)
    return max(1, round(density * group_size)), group_size


def _groups(name: str, usual: int) -> Callable[[float, int, int], dict[str, Any]]:
    def settings(density: float, size: int, dense_size: int) -> dict[str, Any]:
        del size, dense_size
        k, group_size = one_in(density, usual)
        return {"k": k} if group_size == usual else {"k": k, name: group_size}

    return settings


def _sketched(density: float, size: int, dense_size: int) -> dict[str, Any]:
    """Candidates take half of the words: two or four for each delivered coordinate.

    One row where that makes no more compression than one row is good for, and otherwise three.
    """
    rows = 1 if 40 * density >= 1 else 3
    words = 2 * (rows + 1) * density * size
    if words >= size:
        raise ValueError(f"density={density:g} takes no fewer words than the vector")
    return {"compression": (size + dense_size) / (words + dense_size), "rows": rows}


def _demo(density: float, size: int, dense_size: int) -> dict[str, Any]:
    """The k of tiles of 64 x 64, or 1 of larger tiles, of at most 256 x 256."""
    if density * 64**2 >= 1:
        return {"k": round(density * 64**2)}
    return {"k": 1, "chunk": min(256, round(density**-0.5))}


_OWN: dict[str, Callable[[float, int, int], dict[str, Any]]] = {
    **{name: lambda *_: {} for name in FIXED},
    "qsgd": lambda *_: {"bits": 4},
    "chunked_top_k": _groups("chunk_size", 4096),
    "sparcml": _groups("group_size", 512),
    "sketched_sgd": _sketched,
    "demo": _demo,
    "true_top_k": lambda density, size, _: {"k": entries(density, size)},
    "ef21_sgdm": lambda density, *_: {"reducer": TopK(density)},
    # The rank that sends this share of a square matrix.
    "powersgd": lambda density, size, _: {"rank": max(1, round(density * math.sqrt(size)))},
}


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
    found = {"density": density}
    if system in _OWN:
        found = _OWN[system](density, size, dense_size)
    if name != system:
        found["codec"] = codecs.Packed()
    if system in ("omni_reduce", "s2_reducer", "sparse_all_gather") and block_size != 256:
        found["block_size"] = block_size
    return found


def transformation_at(name: str, *args: Any, **options: Any) -> Any:
    """The transformation with these settings."""
    return SYSTEMS[name.removesuffix("_packed")].transformation(
        **settings_at(name, *args, **options)
    )


def budget_at(name: str, *args: Any, **options: Any) -> Reducer:
    """The reducer, or the budget that makes it, with these settings."""
    return SYSTEMS[name.removesuffix("_packed")].reducer(**settings_at(name, *args, **options))


def reducer_at(name: str, density: float, size: int, **options: Any) -> Reducer:
    """The reducer of one vector of `size` elements."""
    return budget_at(name, density, size, **options).split((size,))[0]
