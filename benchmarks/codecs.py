"""Times the count sketch against the cheapest pass over the same vector, on any backend.

The floor is a jitted `x * 2` into its own buffer (donated). Into a fresh one it mostly times page
faults on a CPU. Runs of all operations are interleaved, so that a noisy machine slows all alike.
Compare ratios, not times.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import timing

from jaxsparse import sketch
from jaxsparse.arrays.hashing import bounded, combine, keyed


@functools.partial(jax.jit, static_argnames="spec")
def scatter_encode(x: jax.Array, spec: sketch.SketchSpec) -> jax.Array:
    """The textbook's sketch, in which every element has an independent random column."""
    index = jnp.arange(x.size, dtype=jnp.uint32)
    rows = []
    for row in range(spec.rows):
        bucket = bounded(keyed(index, combine(spec.seed, row, 0)), spec.cols)
        negative = keyed(index, combine(spec.seed, row, 1)) >> jnp.uint32(31)
        signed = jnp.where(negative == 1, -x, x)
        rows.append(jnp.zeros(spec.cols).at[bucket].add(signed))
    return jnp.stack(rows)


@functools.partial(jax.jit, static_argnames=("spec", "size", "k"))
def exact_heavy_hitters(
    table: jax.Array, spec: sketch.SketchSpec, size: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """The k largest of all estimates."""
    estimates = sketch.decode(table, spec, size)
    indices = jax.lax.top_k(jnp.abs(estimates), k)[1]
    return indices, estimates[indices]


def measure(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    spec = sketch.SketchSpec(args.rows, args.cols or max(1, size // 64))
    k = max(1, int(args.density * size))
    x = jax.random.normal(jax.random.key(0), (size,))
    if args.data == "cubed":
        x = x**3
    table = sketch.encode(x, spec)
    double = lambda x: x * 2
    in_place = jax.jit(double, donate_argnums=0)
    fresh = jax.jit(double)
    buffer = [jnp.zeros_like(x)]

    def donated():
        buffer[0] = in_place(buffer[0])
        return buffer[0]

    choose = lambda: sketch.heavy_hitters(table, spec, size, k)
    runs: dict[str, Callable[[], Any]] = {
        "x * 2 donated": donated,
        "x * 2 fresh": lambda: fresh(x),
        "encode": lambda: sketch.encode(x, spec),
        "merge": lambda: sketch.merge(table, table),
        "decode": lambda: sketch.decode(table, spec, size),
        "heavy_hitters": choose,
    }
    energy = {}
    if size <= args.slow_limit:
        runs["encode by scatter"] = lambda: scatter_encode(x, spec)
        exact = lambda: exact_heavy_hitters(table, spec, size, k)
        runs["decode + top_k"] = exact
        found, best = (jnp.sum(jnp.square(f()[1])) for f in (choose, exact))
        energy["heavy_hitters"] = float(found / best)

    seconds = timing.interleaved(runs, args.repeats)
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    return [
        {
            "size": size,
            "rows": spec.rows,
            "cols": spec.cols,
            "k": k,
            "operation": name,
            "median_ms": 1e3 * middle[name],
            "min_ms": 1e3 * min(seconds[name]),
            "over_donated": middle[name] / middle["x * 2 donated"],
            "min_over_min_donated": min(seconds[name]) / min(seconds["x * 2 donated"]),
            "over_fresh": middle[name] / middle["x * 2 fresh"],
            "energy_share": energy.get(name),
        }
        for name in runs
    ]


HEADER = (
    f"{'size':>9} {'cols':>8} {'k':>8}  {'operation':<18}"
    f"{'median ms':>10} {'min ms':>9} {'/donated':>9} {'min/min':>8} {'/fresh':>7} {'energy':>7}"
)


def line(r: dict[str, Any]) -> str:
    energy = "" if r["energy_share"] is None else f"{r['energy_share']:.4f}"
    return (
        f"{r['size']:>9} {r['cols']:>8} {r['k']:>8}  {r['operation']:<18}"
        f"{r['median_ms']:>10.3f} {r['min_ms']:>9.3f} {r['over_donated']:>9.2f} "
        f"{r['min_over_min_donated']:>8.2f} {r['over_fresh']:>7.2f} {energy:>7}"
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
    parser.add_argument("--rows", type=int, default=5, help="rows of the sketch")
    parser.add_argument("--cols", type=int, help="columns, if not a 64th of the size")
    parser.add_argument("--density", type=float, default=0.01, help="k / size of heavy_hitters")
    parser.add_argument(
        "--data",
        choices=["normal", "cubed"],
        default="normal",
        help="distribution of the elements; cubed normals are heavy-tailed",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each operation")
    parser.add_argument(
        "--slow-limit",
        type=timing.size_of,
        default=2**24,
        metavar="D",
        help="largest size at which to run the scatter sketch and the exact top_k",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    where = timing.where()
    print(f"{args.rows} rows, {args.data} data, median and minimum of {args.repeats} runs")
    print(HEADER)
    results = []
    for size in args.sizes:
        for result in measure(size, args):
            results.append(result)
            print(line(result), flush=True)
    timing.save({**where, "arguments": vars(args), "results": results}, args.json)


if __name__ == "__main__":
    main()
