"""Settings of each system for tests, whose vectors have some 600 elements."""

from typing import Any, NamedTuple

from jaxsparse import codecs
from jaxsparse.systems import TopK


class Case(NamedTuple):
    small: dict[str, Any]  # a budget of about 3 %
    full: dict[str, Any]  # a budget for everything


_GATHERED = {"format": "int8", "group_size": 64, "gather": True}
_TERNARY = {"format": "ternary", "group_size": 64}

# By system and variant; "" is the usual one.
CASES = {
    "dense": {"": Case({}, {})},
    "true_top_k": {"": Case({"k": 19}, {"k": 601})},
    "sketched_sgd": {
        "": Case({"k": 11, "cols": 53}, {"k": 601, "cols": 601}),
        "even_rows": Case({"k": 11, "cols": 53, "rows": 4, "seed": 3}, {"k": 601, "cols": 601}),
        "heavymix": Case(
            {"k": 31, "cols": 53, "selection": "heavymix"},
            {"k": 601, "cols": 601, "selection": "heavymix"},
        ),
    },
    "spardl": {
        "": Case({"density": 0.03}, {"density": 1.0}),
        "packed": Case(
            {"density": 0.03, "codec": codecs.Packed()}, {"density": 1.0, "codec": codecs.Packed()}
        ),
    },
    "sparcml": {
        "": Case({"k": 2, "group_size": 64}, {"k": 64, "group_size": 64}),
        "split": Case(
            {
                "k": 2,
                "group_size": 64,
                "algorithm": "split_allgather",
            },
            {"k": 64, "group_size": 64, "algorithm": "split_allgather"},
        ),
        "nearest": Case(
            {"k": 2, "group_size": 64, "bits": 4, "rounding": "nearest"},
            {"k": 64, "group_size": 64, "bits": 4, "rounding": "nearest"},
        ),
    },
    "ok_topk": {"": Case({"density": 0.03}, {"density": 1.0})},
    "gtopk": {"": Case({"density": 0.03}, {"density": 1.0})},
    "top_k": {
        "": Case({"density": 0.03}, {"density": 1.0}),
        "packed": Case(
            {"density": 0.03, "codec": codecs.Packed()}, {"density": 1.0, "codec": codecs.Packed()}
        ),
    },
    "chunked_top_k": {
        "": Case({"k": 2, "chunk_size": 64}, {"k": 64, "chunk_size": 64, "value_bits": 32}),
    },
    "dgc": {"": Case({"density": 0.03}, {"density": 1.0})},
    "dragonn": {
        "": Case({"density": 0.03}, {"density": 1.0}),
        "hash": Case({"density": 0.03, "extract": "hash"}, {"density": 1.0, "extract": "hash"}),
    },
    "ms_topk": {"": Case({"density": 0.03}, {"density": 1.0})},
    "random_k": {
        "": Case({"density": 0.03}, {"density": 1.0}),
        "top_k": Case(
            {"density": 0.3, "reducer": TopK(0.1)}, {"density": 1.0, "reducer": TopK(1.0)}
        ),
    },
    "s2_reducer": {
        "": Case(
            {
                "density": 0.1,
                "block_size": 8,
                "rows": 3,
                "union_density": 0.15,
                "sketch_ratio": 0.4,
            },
            {"density": None, "block_size": 8, "union_density": 1.0, "sketch_ratio": 1.0},
        )
    },
    "omni_reduce": {
        "": Case({"density": 0.1, "block_size": 8}, {"density": 1.0, "block_size": 8}),
        "little_room": Case(
            {"block_size": 8, "union_density": 0.1}, {"block_size": 8, "union_density": 1.0}
        ),
    },
    "sparse_all_gather": {
        "": Case(
            {"density": 0.1, "block_size": 8, "capacity_density": 0.05},
            {"density": 1.0, "block_size": 8},
        )
    },
    "qsgd": {
        "": Case({}, {}),
        "nearest": Case(
            {"bits": 4, "group_size": 64, "rounding": "nearest"},
            {"bits": 8, "group_size": 64, "rounding": "nearest"},
        ),
    },
    "quantized": {
        "": Case({"format": "int8", "group_size": 64}, {"format": "int8", "group_size": 64}),
        "gathered": Case(_GATHERED, _GATHERED),
        "ternary": Case(_TERNARY, _TERNARY),
    },
    "sign_sgd": {"": Case({"group_size": 64}, {"group_size": 64})},
    "powersgd": {
        "": Case({"rank": 1}, {"rank": 601}),
        "full": Case({"rank": 1, "iteration": "full"}, {"rank": 601, "iteration": "full"}),
    },
    "demo": {
        "": Case({"k": 2, "chunk": 8}, {"k": 64, "chunk": 8, "value_bits": 32}),
    },
    "ef21_sgdm": {
        "": Case({"reducer": TopK(0.03)}, {"reducer": TopK(1.0)}),
        "packed": Case(
            {"reducer": TopK(0.03, codec=codecs.Packed())},
            {"reducer": TopK(1.0, codec=codecs.Packed())},
        ),
    },
}
