"""Settings of each system for tests, whose vectors have some 600 elements."""

from typing import Any, NamedTuple

from jaxsparse import codecs
from jaxsparse.reducers import TopK


class Case(NamedTuple):
    small: dict[str, Any]  # a budget of about 3 %
    full: dict[str, Any]  # a budget for everything


def _of(small, full, **both):
    return Case(small | both, full | both)


def _share(**both):
    return _of({"density": 0.03}, {"density": 1.0}, **both)


def _rounds(**both):
    return Case(both, both)


# By system and variant; "" is the usual one.
CASES = {
    "dense": {"": Case({}, {})},
    "true_top_k": {"": Case({"k": 19}, {"k": 601})},
    "sketched_sgd": {
        "": Case({"k": 11, "cols": 53}, {"k": 601, "cols": 601}),
        "even_rows": Case({"k": 11, "cols": 53, "rows": 4, "seed": 3}, {"k": 601, "cols": 601}),
        "heavymix": _of({"k": 31, "cols": 53}, {"k": 601, "cols": 601}, selection="heavymix"),
    },
    "spardl": {"": _share(), "packed": _share(codec=codecs.Packed())},
    "sparcml": {
        "": _of({"k": 2}, {"k": 64}, group_size=64),
        "split": _of({"k": 2}, {"k": 64}, group_size=64, algorithm="split_allgather"),
        "nearest": _of(
            {"k": 2, "bits": 4}, {"k": 64, "bits": 4}, group_size=64, rounding="nearest"
        ),
    },
    "ok_topk": {"": _share()},
    "gtopk": {"": _share()},
    "top_k": {"": _share(), "packed": _share(codec=codecs.Packed())},
    "chunked_top_k": {"": _of({"k": 2}, {"k": 64, "value_bits": 32}, chunk_size=64)},
    "dgc": {"": _share()},
    "dragonn": {"": _share(), "hash": _share(extract="hash")},
    "ms_topk": {"": _share()},
    "random_k": {
        "": _share(),
        "top_k": Case(
            {"density": 0.3, "reducer": TopK(0.1)}, {"density": 1.0, "reducer": TopK(1.0)}
        ),
    },
    "s2_reducer": {
        "": _of(
            {"density": 0.1, "rows": 3, "union_density": 0.15, "sketch_ratio": 0.4},
            {"density": None, "union_density": 1.0, "sketch_ratio": 1.0},
            block_size=8,
        )
    },
    "omni_reduce": {
        "": _of({"density": 0.1}, {"density": 1.0}, block_size=8),
        "little_room": _of({"union_density": 0.1}, {"union_density": 1.0}, block_size=8),
    },
    "sparse_all_gather": {
        "": _of({"density": 0.1, "capacity_density": 0.05}, {"density": 1.0}, block_size=8)
    },
    "qsgd": {
        "": Case({}, {}),
        "nearest": _of({"bits": 4}, {"bits": 8}, group_size=64, rounding="nearest"),
    },
    "quantized": {
        "": _rounds(format="int8", group_size=64),
        "gathered": _rounds(format="int8", group_size=64, gather=True),
        "ternary": _rounds(format="ternary", group_size=64),
    },
    "sign_sgd": {"": _rounds(group_size=64)},
    "powersgd": {
        "": Case({"rank": 1}, {"rank": 601}),
        "full": _of({"rank": 1}, {"rank": 601}, iteration="full"),
    },
    "demo": {"": _of({"k": 2}, {"k": 64, "value_bits": 32}, chunk=8)},
    "ef21_sgdm": {
        "": Case({"reducer": TopK(0.03)}, {"reducer": TopK(1.0)}),
        "packed": Case(
            {"reducer": TopK(0.03, codec=codecs.Packed())},
            {"reducer": TopK(1.0, codec=codecs.Packed())},
        ),
    },
}
