"""Times selections against the cheapest pass over the same vector, on any backend.

The floor is a jitted `x * 2` into its own buffer (donated). Into a fresh one it mostly times page
faults on a CPU. Runs of all operations are interleaved, so that a noisy machine slows all alike.
Compare ratios, not times. Energy is the sum of squares of the kept entries, over that of the same
number of largest entries.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import timing

from jaxsparse import select
from jaxsparse.arrays.stream import SparseStream, from_dense
from jaxsparse.systems.dragonn import extractor


def energy(stream: SparseStream) -> float:
    return float(jnp.sum(jnp.square(stream.values)))


def measure(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    k = max(1, int(args.density * size))
    group_size = min(args.group_size, size)
    group_k = min(args.group_k, group_size)
    x = jax.random.normal(jax.random.key(0), (size,))
    if args.data == "cubed":
        x = x**3
    magnitudes = jnp.sort(jnp.abs(x), descending=True)
    threshold = magnitudes[k - 1]
    mask = jnp.abs(x) >= threshold

    in_place = jax.jit(lambda x: x * 2, donate_argnums=0)
    buffer = [jnp.zeros_like(x)]

    def donated():
        buffer[0] = in_place(buffer[0])
        return buffer[0]

    # Name: (entries, run).
    by_group = group_k * (size // group_size) + min(group_k, size % group_size)
    # What passes a threshold, extracted by counting. Beside it, DRAGONN with its own threshold.
    counted = jax.jit(lambda x, t: from_dense(x, select.compact(jnp.abs(x) >= t, k)))
    dragonn, seed = jax.jit(extractor("hash"), static_argnums=1), jnp.uint32(0)
    cases: dict[str, tuple[int, Callable[[], Any]]] = {
        "x * 2 donated": (size, donated),
        "fast_top_k": (k, lambda: select.fast_top_k(x, k)),
        "threshold_top_k": (k, lambda: select.threshold_top_k(x, k)),
        "sampled_top_k": (k, lambda: select.sampled_top_k(x, k)),
        "bisection_top_k": (k, lambda: select.bisection_top_k(x, k)),
        "group_top_k": (by_group, lambda: select.group_top_k(x, group_k, group_size)),
        "compact(|x| >= t)": (k, lambda: counted(x, threshold)),
        "hash_extract": (k, lambda: select.hash_extract(x, threshold, k)),
        "with its threshold": (k, lambda: dragonn(x, k, seed)),
        "slot_max": (k, lambda: select.slot_max(x, k)),
        "compact": (k, lambda: select.compact(mask, k)),
    }
    if size <= args.slow_limit:
        # With so many entries 16 k > size, where fast_top_k is exact.
        many = size // 16 + 1
        cases |= {
            "top_k": (k, lambda: select.top_k(x, k)),
            "top_k as group": (by_group, lambda: select.top_k(x, by_group)),
            "fast_top_k exact": (many, lambda: select.fast_top_k(x, many)),
        }

    seconds = timing.interleaved({name: run for name, (_, run) in cases.items()}, args.repeats)
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    results = []
    for name, (entries, run) in cases.items():
        share = None
        if name not in ("x * 2 donated", "compact"):
            share = energy(run()) / float(jnp.sum(jnp.square(magnitudes[:entries])))
        results.append(
            {
                "size": size,
                "k": entries,
                "operation": name,
                "median_ms": 1e3 * middle[name],
                "min_ms": 1e3 * min(seconds[name]),
                "over_donated": middle[name] / middle["x * 2 donated"],
                "min_over_min_donated": min(seconds[name]) / min(seconds["x * 2 donated"]),
                "energy_share": share,
            }
        )
    return results


HEADER = (
    f"{'size':>9} {'k':>9}  {'operation':<18}"
    f"{'median ms':>10} {'min ms':>9} {'/donated':>9} {'min/min':>8} {'energy':>7}"
)


def line(r: dict[str, Any]) -> str:
    share = "" if r["energy_share"] is None else f"{r['energy_share']:.4f}"
    return (
        f"{r['size']:>9} {r['k']:>9}  {r['operation']:<18}"
        f"{r['median_ms']:>10.3f} {r['min_ms']:>9.3f} {r['over_donated']:>9.2f} "
        f"{r['min_over_min_donated']:>8.2f} {share:>7}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=timing.size_of,
        nargs="+",
        default=[2**e for e in range(16, 27, 2)],
        metavar="D",
        help="elements of the vector, as 1048576 or 2^20",
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / size")
    parser.add_argument("--group-size", type=int, default=512, help="of group_top_k")
    parser.add_argument("--group-k", type=int, default=4, help="entries kept of a group")
    parser.add_argument(
        "--data",
        choices=["normal", "cubed"],
        default="cubed",
        help="distribution of the elements; cubed normals are heavy-tailed",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each operation")
    parser.add_argument(
        "--slow-limit",
        type=timing.size_of,
        default=2**24,
        metavar="D",
        help="largest size at which to run the exact selections",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    where = timing.where()
    print(f"{args.data} data, median and minimum of {args.repeats} runs")
    print(HEADER)
    results = []
    for size in args.sizes:
        for result in measure(size, args):
            results.append(result)
            print(line(result), flush=True)
    timing.save({**where, "arguments": vars(args), "results": results}, args.json)


if __name__ == "__main__":
    main()
