"""Are SparCML's all-reduces as fast as its paper says, by density and workers (its figure 3)?

    python benchmarks/sparcml_order.py
    python benchmarks/sparcml_order.py --latency 1.5e-6 --bandwidth 1e10  # near the paper's Aries
    python benchmarks/sparcml_order.py --measured benchmarks/cluster/sparcml.json

Times are those of the alpha-beta model, without sums and selections: rounds times latency, plus
received words over bandwidth. "published" has the paper's rounds, and the words that its algorithms
send if each worker's k indices are drawn uniformly, as in its experiments. There messages are as
long as their contents. "library" has the words of this library's messages. Rooms that follow what
sums needed are those for sums of random supports, and others are for the most entries. Measured
times, if given, are those of cluster/run.py.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import timing

from jaxsparse import Link
from jaxsparse.reducers import SparCML

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from published_traffic import (
    Traffic,
    dense_traffic,
    dsar_split_allgather_traffic,
    sparcml_traffic,
)

Bits = Literal[2, 4, 8]  # what `SparCML` takes
# Those of the paper, which has no all-gather of all entries.
PUBLISHED = ("recursive_double", "split_allgather", "dsar_split_allgather", "ring", "dense")
EDGE = 1.02  # times whose ratio is below this have no order
DAINT = 0.00781  # density of figure 3, left: 4 of 512


def published(k: int, size: int, workers: int) -> dict[str, Traffic]:
    """Rounds and expected words of the paper's algorithms (section 5.3), for uniform indices.

    An entry is two words. Partial sums become dense where that is shorter (section 5.1). The sums
    that SSAR_Split_allgather gathers do not, since it never switches (5.3). For numbers of workers
    that are no power of two the paper has no formula. Here the logarithm is rounded up.
    """
    log, others = (workers - 1).bit_length(), workers - 1

    def union(of: float) -> float:
        """Expected number of elements that `of` workers have together."""
        return -size * math.expm1(of * math.log1p(-k / size)) if k < size else size

    def words(entries: float, room: float) -> float:
        return min(2 * entries, room)

    part = size / workers
    split = others * words(k / workers, part)
    doubled = sum(words(union(2.0**stage), size) for stage in range(log))
    lap = sum(words(union(step + 1) / workers, part) for step in range(others))
    total = union(workers) / workers
    return {
        "recursive_double": Traffic(log, doubled),
        "split_allgather": Traffic(others + log, split + others * 2 * total),
        "dsar_split_allgather": Traffic(others + log, split + others * part),
        "ring": Traffic(2 * others, lap + others * words(total, part)),
        "dense": dense_traffic(size, workers),
    }


def library(k: int, size: int, workers: int) -> dict[str, Traffic]:
    """Rounds and words that this library pays for k entries a worker."""
    reducer = SparCML(1, round(size / k))
    traffic = sparcml_traffic(reducer, size, workers)
    return {**traffic, "dense": dense_traffic(size, workers)}


def in_bits(k: int, size: int, workers: int, bits: Bits) -> Traffic:
    """Rounds and words of DSAR_Split_allgather whose dense half has so many bits a sum."""
    reducer = SparCML(1, round(size / k), bits=bits)
    room = reducer.capacity(size, workers)
    return dsar_split_allgather_traffic(
        reducer.entries(size), size, workers, capacity=room, quantizer=reducer.quantizer
    )


MODELS = {"published": published, "library": library}


def slower(link: Link, traffic: dict[str, Traffic], one: str, other: str) -> bool:
    """Whether `one` takes longer than `other`, by more than `EDGE`."""
    return traffic[one].seconds(link) > EDGE * traffic[other].seconds(link)


def claims(link: Link, args: argparse.Namespace) -> None:
    """Prints whether both models agree with the paper on figure 3 (section 8.1), on this link."""
    few, some, many = 2, 8, 1024

    def of(density: float, workers: int, which: str) -> Callable[[str], float]:
        k = max(1, round(density * args.size))
        traffic = MODELS[which](k, args.size, workers)
        return lambda name: traffic[name].seconds(link)

    sparse, full = 1e-4, 1e-1

    def gap(density: float, workers: int, which: str) -> float:
        at = of(density, workers, which)
        return at("recursive_double") / at("split_allgather")

    def small(which: str) -> bool:
        k = max(1, args.size // 10**6)
        at = of(k / args.size, some, which)
        return at("recursive_double") <= min(map(at, PUBLISHED))

    double, split, dsar = "recursive_double", "split_allgather", "dsar_split_allgather"
    ring = lambda at: min(at("dense"), at("ring"))
    statements: list[tuple[str, Callable[[str], bool]]] = [
        (f"SSAR_Recursive_double is the fastest for little data (1 of 10^6, W = {some})", small),
        (
            f"its advantage shrinks, or its lag grows, from W = {few} to {many} at {DAINT:.2%}",
            lambda which: gap(DAINT, many, which) > gap(DAINT, few, which),
        ),
        (
            f"SSAR_Split_allgather is before DSAR_Split_allgather at {sparse:.2%}, W = {some}",
            lambda which: (at := of(sparse, some, which))(split) < at(dsar),
        ),
        (
            f"... and no longer at {full:.2%}, W = {many}",
            lambda which: EDGE * (at := of(full, many, which))(split) >= at(dsar),
        ),
        (
            "SSAR_Recursive_double / SSAR_Split_allgather grows more with W than with density",
            lambda which: (
                gap(DAINT, many, which) / gap(DAINT, few, which)
                > gap(full, some, which) / gap(sparse, some, which)
            ),
        ),
        (
            f"a ring is the fastest on a fast network of few workers (W = {few}, {DAINT:.2%})",
            lambda which: ring(at := of(DAINT, few, which)) <= min(map(at, PUBLISHED)),
        ),
        (
            f"no ring is the fastest on many workers (W = {many}, {DAINT:.2%})",
            lambda which: ring(at := of(DAINT, many, which)) > min(at(double), at(split)),
        ),
        (
            f"DSAR_Split_allgather beats the dense ring, by at most 2 (bandwidth; {full:.2%}, "
            f"W = {some})",
            lambda which: 1 < (at := of(full, some, which))("dense") / at(dsar) <= 2,
        ),
    ]
    print("\nwhat the paper says of figure 3, on this link        published  library")
    for text, holds in statements:
        marks = "        ".join("yes" if holds(which) else "NO " for which in MODELS)
        print(f"  {marks}  {text}")


def compare(link: Link, args: argparse.Namespace) -> None:
    """Prints measured times beside the model's, and whether their orders agree."""
    groups: dict[tuple[float, int, int], dict[str, float]] = {}
    every: dict[tuple[int, int], float] = {}  # what dense takes at all densities
    for row in json.loads(args.measured.read_text())["rows"]:
        name, density, *where = (row[key] for key in ("system", "density", "hosts", "params"))
        if name == "dense":
            every[where[0], where[1]] = row["seconds"]
        elif name.startswith("sparcml:"):
            group = groups.setdefault((density, *where), {})
            group[name.removeprefix("sparcml:")] = row["seconds"]
    for key, group in groups.items():
        group["dense"] = every[key[1:]]
    print("\n" + timing.head("measured", "density", "W", "ms", "model", "ratio"))
    agree, pairs = 0, 0
    for (density, workers, size), seconds in sorted(groups.items()):
        k = max(1, round(density * size))
        traffic = library(k, size, workers)
        for bits in get_args(Bits):  # of the dense sum, as benchmarks/cluster names them
            traffic[f"dsar_split_allgather:{bits}"] = in_bits(k, size, workers, bits)
        for name, measured in sorted(seconds.items(), key=lambda item: item[1]):
            model = traffic[name].seconds(link)
            ms = (f"{1e3 * x:.3g}" for x in (measured, model))
            print(timing.row(name, f"{density:.3%}", workers, *ms, f"{measured / model:.2f}"))
        for one, other in itertools.combinations(seconds, 2):
            if slower(link, traffic, one, other) or slower(link, traffic, other, one):
                pairs += 1
                agree += slower(link, traffic, one, other) == (seconds[one] > seconds[other])
    print(f"order of pairs as in the model: {agree} of {pairs}")


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=timing.size_of, default=2**24, help="elements, as a number or 2^24")
    add("--latency", type=float, default=50e-6, metavar="SECONDS")
    add("--bandwidth", type=float, default=1.25e8, metavar="BYTES", help="a second")
    add("--measured", type=Path, metavar="JSON", help="times to compare the model with")
    args = parser.parse_args()
    link = Link(args.latency, args.bandwidth)
    print(f"{args.size:,} elements, {link}")
    claims(link, args)
    if args.measured:
        compare(link, args)


if __name__ == "__main__":
    main()
