"""The table of exchanges: what docs show of each, and tests check. A new reducer has a row here.

Vectors of tests have some 600 elements.
"""

import math
from collections.abc import Callable, Mapping, Set
from typing import Any, Literal, NamedTuple

import jaxsparse
from jaxsparse import codecs, contrib, exchanges
from jaxsparse.arrays.settings import entries
from jaxsparse.reducers import Reducer, TopK


class Case(NamedTuple):
    small: dict[str, Any]  # a budget of about 3 %
    full: dict[str, Any]  # a budget for everything


def _of(small, full, **both):
    return Case(small | both, full | both)


def _share(**both):
    return _of({"density": 0.03}, {"density": 1.0}, **both)


def _rounds(**both):
    return Case(both, both)


# Settings that deliver about a share of a vector's elements, given the share, the vector's size and
# the number of uncompressed elements beside it.
AtDensity = Callable[[float, int, int], dict[str, Any]]


def one_in(density: float, group_size: int) -> tuple[int, int]:
    """The k and group size for about this density. The group grows if k would be below 1."""
    if density * group_size < 1:
        group_size = math.floor(1 / density + 0.5)
    return max(1, round(density * group_size)), group_size


def _groups(name: str, usual: int) -> AtDensity:
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


def _nothing(*_: Any) -> dict[str, Any]:
    """It is the same at every density."""
    return {}


class Row(NamedTuple):
    """A row of the table. What is left out suits a reducer with a `density`."""

    transformation: Callable[..., Any]
    summary: str  # in Markdown
    received: str  # bytes that a worker receives in a step: d elements, k = density d, W workers
    # The law of its steps. "sums": that of `jaxsparse.exchange`, as the reducer's conservation
    # says. "differences": the update is the mean of the workers' momenta, less that of residuals.
    law: Literal["sums", "differences"] = "sums"
    cases: Mapping[str, Case] = {"": _share()}  # by variant; "" is the usual one
    # Variants that round or send less than everything, with the full budget.
    sends_less: Set[str] = frozenset()
    at_density: AtDensity = lambda density, *_: {"density": density}

    @property
    def name(self) -> str:
        return self.transformation.__name__

    @property
    def path(self) -> str:
        """Where users find it."""
        is_contrib = self.transformation.__module__.startswith(contrib.__name__)
        return f"{(contrib if is_contrib else jaxsparse).__name__}.{self.name}"

    def reducer(self, *args: Any, **settings: Any) -> Reducer:
        """The reducer of the whole tree with these settings."""
        if self.law == "differences":
            return settings["reducer"]
        return self.transformation(*args, **settings).reducer


EXCHANGES = {
    "omni_reduce": Row(
        exchanges.omni_reduce,
        "[OmniReduce](https://dl.acm.org/doi/10.1145/3452296.3472904): a psum of the "
        "union's blocks",
        "8 (elements there is room for) (W-1)/W, and d/(4 block_size)",
        cases={
            "": _of({"density": 0.1}, {"density": 1.0}, block_size=8),
            "little_room": _of({"union_density": 0.1}, {"union_density": 1.0}, block_size=8),
        },
    ),
    "sparse_all_gather": Row(
        exchanges.sparse_all_gather,
        "blocks, gathered, as Parallax and Horovod do with sparse gradients",
        "4 k (W-1) (1 + 1/block_size)",
        cases={"": _of({"density": 0.1, "capacity_density": 0.05}, {"density": 1.0}, block_size=8)},
    ),
    "chunked_top_k": Row(
        exchanges.chunked_top_k,
        "[SparseLoCo](https://arxiv.org/abs/2508.15706)'s exchange: k of every 4096 "
        "elements, 7 to 10 bits an entry",
        "1.34 k (W-1)",
        cases={"": _of({"k": 2}, {"k": 64, "value_bits": 32}, chunk_size=64)},
        at_density=_groups("chunk_size", 4096),
    ),
    "demo": Row(
        contrib.demo,
        "[DeMo](https://arxiv.org/abs/2411.19870): momenta of the workers' own, whose "
        "largest cosine coefficients are sent, 25 bits each",
        "3.07 k (W-1)",
        cases={"": _of({"k": 2}, {"k": 64, "value_bits": 32}, chunk=8)},
        sends_less={""},
        at_density=_demo,
    ),
    "dense": Row(
        exchanges.dense,
        "exact mean by all-reduce",
        "8 d (W-1)/W",
        cases={"": Case({}, {})},
        at_density=_nothing,
    ),
    "dragonn": Row(
        exchanges.dragonn,
        "DRAGONN (ICML 2022): entries hashed into k slots",
        "8 k (W-1)",
        cases={"": _share(), "hash": _share(extract="hash")},
        sends_less={"", "hash"},
    ),
    "ef21_sgdm": Row(
        contrib.ef21_sgdm,
        "[EF21-SGDM](https://arxiv.org/abs/2305.15155): differences of momenta and "
        "their estimates, by any other reducer",
        "the reducer's",
        law="differences",
        cases={
            "": Case({"reducer": TopK(0.03)}, {"reducer": TopK(1.0)}),
            "packed": Case(
                {"reducer": TopK(0.03, codec=codecs.Packed())},
                {"reducer": TopK(1.0, codec=codecs.Packed())},
            ),
        },
        at_density=lambda density, *_: {"reducer": TopK(density)},
    ),
    "gtopk": Row(
        contrib.gtopk,
        "[gTop-k](https://arxiv.org/abs/1901.04359): k entries left of each sum of two workers'",
        "8 k log2 W; 8 k (floor(log2 W) + 2) if W is no power of two",
    ),
    "ok_topk": Row(
        contrib.ok_topk,
        "[Ok-Topk](https://arxiv.org/abs/2201.07598): thresholds that are reused, balanced regions",
        "24 C (W-1), C = 2 k/W",
        sends_less={""},
    ),
    "powersgd": Row(
        exchanges.powersgd,
        "[PowerSGD](https://arxiv.org/abs/1905.13727): factors of low rank of each matrix",
        "4 r (n+m) (W-1)/W for each n x m matrix",
        cases={
            "": Case({"rank": 1}, {"rank": 601}),
            "full": _of({"rank": 1}, {"rank": 601}, iteration="full"),
        },
        at_density=lambda density, size, _: {"rank": max(1, round(density * math.sqrt(size)))},
    ),
    "quantized": Row(
        exchanges.quantized,
        "all values in a format of 1 to 16 bits, fed back",
        "d (W-1)/W (bits/4 + 4/group_size)",
        cases={
            "": _rounds(format="int8", group_size=64),
            "gathered": _rounds(format="int8", group_size=64, gather=True),
            "ternary": _rounds(format="ternary", group_size=64),
        },
        sends_less={"", "gathered", "ternary"},
        at_density=_nothing,
    ),
    "qsgd": Row(
        exchanges.qsgd,
        "[QSGD](https://arxiv.org/abs/1610.02132): all values in 2, 4 or 8 bits",
        "d (W-1)/W (bits/4 + 8/group_size)",
        cases={
            "": Case({}, {}),
            "nearest": _of({"bits": 4}, {"bits": 8}, group_size=64, rounding="nearest"),
        },
        sends_less={"", "nearest"},
        at_density=lambda *_: {"bits": 4},
    ),
    "sign_sgd": Row(
        contrib.sign_sgd,
        "[EF-signSGD](https://arxiv.org/abs/1901.09847): one bit a value",
        "d (W-1)/W (1/4 + 8/group_size)",
        cases={"": _rounds(group_size=64)},
        sends_less={""},
        at_density=_nothing,
    ),
    "random_k": Row(
        exchanges.random_k,
        "the same random coordinates on all workers, no indices",
        "8 k (W-1)/W",
        cases={
            "": _share(),
            "top_k": Case(
                {"density": 0.3, "reducer": TopK(0.1)}, {"density": 1.0, "reducer": TopK(1.0)}
            ),
        },
    ),
    "s2_reducer": Row(
        exchanges.s2_reducer,
        "S2 Reducer (2021): a sketch of the blocks that are not zero; unbiased, noisy",
        "8 rows cols (W-1)/W, and d/(4 block_size)",
        cases={
            "": _of(
                {"density": 0.1, "rows": 3, "union_density": 0.15, "sketch_ratio": 0.4},
                {"density": None, "union_density": 1.0, "sketch_ratio": 1.0},
                block_size=8,
            )
        },
    ),
    "sketched_sgd": Row(
        exchanges.sketched_sgd,
        "[Sketched-SGD](https://arxiv.org/abs/1903.04488): count sketch, then the exact"
        " values of its candidates",
        "8 (rows cols + P k) (W-1)/W",
        cases={
            "": Case({"k": 11, "cols": 53}, {"k": 601, "cols": 601}),
            "even_rows": Case({"k": 11, "cols": 53, "rows": 4, "seed": 3}, {"k": 601, "cols": 601}),
            "heavymix": _of({"k": 31, "cols": 53}, {"k": 601, "cols": 601}, selection="heavymix"),
        },
        at_density=_sketched,
    ),
    "sparcml": Row(
        exchanges.sparcml,
        "[SparCML](https://arxiv.org/abs/1802.08021): k of every 512 elements, exactly "
        "summed by the all-reduce that suits the network",
        "by algorithm",
        cases={
            "": _of({"k": 2}, {"k": 64}, group_size=64),
            "split": _of({"k": 2}, {"k": 64}, group_size=64, algorithm="split_allgather"),
            "nearest": _of(
                {"k": 2, "bits": 4}, {"k": 64, "bits": 4}, group_size=64, rounding="nearest"
            ),
        },
        sends_less={"nearest"},
        at_density=_groups("group_size", 512),
    ),
    "spardl": Row(
        exchanges.spardl,
        "[SparDL](https://arxiv.org/abs/2304.00737): reduce-scatter and all-gather that"
        " never exceed k entries",
        "16 k (W-1)/W",
        cases={"": _share(), "packed": _share(codec=codecs.Packed())},
        sends_less={"packed"},
    ),
    "top_k": Row(
        exchanges.top_k,
        "local top-k, all-gathered (TopkA)",
        "8 k (W-1)",
        cases={"": _share(), "packed": _share(codec=codecs.Packed())},
    ),
    "dgc": Row(
        exchanges.dgc,
        "[DGC](https://arxiv.org/abs/1712.01887): TopkA by a sampled threshold, momentum corrected",
        "8 k (W-1)",
    ),
    "ms_topk": Row(
        contrib.ms_topk,
        "MSTopk (MLSys 2021): TopkA by bisection",
        "8 k (W-1)",
    ),
    "true_top_k": Row(
        exchanges.true_top_k,
        "top k of the exact mean, error feedback: the ceiling for sketches",
        "8 d (W-1)/W",
        cases={"": Case({"k": 19}, {"k": 601})},
        at_density=lambda density, size, _: {"k": entries(density, size)},
    ),
}
