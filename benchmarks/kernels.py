"""Times kernels against the cheapest pass over the same vector, on any backend.

    python benchmarks/kernels.py select --sizes 2^24
    python benchmarks/kernels.py sketch
    python benchmarks/kernels.py decode

The floor is a jitted `x * 2` into its own buffer (donated). Runs of all operations are interleaved,
so that a noisy machine slows all alike. Compare ratios, not times. Energy is the sum of squares of
the kept entries, over that of the same number of largest entries.

`decode` times sparse against dense decoding of all workers' messages (DRAGONN, section 4.3): the
one adds the entries of all W messages to one dense array, the other makes a dense array of each and
adds these up. There the least time of each counts, and the fit `first d + entry W m + pass W d` has
the least relative squares, and no negative coefficient. Over several densities it tells a cost of
each entry from a cost of each worker.
"""

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
from scipy.optimize import nnls

from jaxsparse import codecs, select, sketch
from jaxsparse.arrays.hashing import bounded, combine, keyed
from jaxsparse.arrays.settings import entries
from jaxsparse.collectives.messages import MessageFormat
from jaxsparse.reducers.dragonn import extractor

Runs = dict[str, Callable[[], Any]]
Energies = dict[str, float]
_DENSITY = 0.01  # k / size of select and sketch


def selections(x: jax.Array) -> tuple[Runs, Energies]:
    """Selections of k elements."""
    size, k = x.size, max(1, int(_DENSITY * x.size))
    group_size, group_k = min(512, size), 4
    magnitudes = jnp.sort(jnp.abs(x), descending=True)
    threshold = magnitudes[k - 1]
    mask = jnp.abs(x) >= threshold
    by_group = group_k * (size // group_size) + min(group_k, size % group_size)
    dragonn, seed = jax.jit(extractor("hash"), static_argnums=1), jnp.uint32(0)
    found: dict[str, tuple[int, Callable[[], Any]]] = {  # entries, and how they are found
        "fast_top_k": (k, lambda: select.fast_top_k(x, k)),
        "threshold_top_k": (k, lambda: select.threshold_top_k(x, k)),
        "sampled_top_k": (k, lambda: select.sampled_top_k(x, k)),
        "bisection_top_k": (k, lambda: select.bisection_top_k(x, k)),
        "group_top_k": (by_group, lambda: select.group_top_k(x, group_k, group_size)),
        "hash_extract": (k, lambda: select.hash_extract(x, threshold, k)),
        "with its threshold": (k, lambda: dragonn(x, k, seed)),
        "slot_max": (k, lambda: select.slot_max(x, k)),
        "top_k": (k, lambda: select.top_k(x, k)),
        "top_k as group": (by_group, lambda: select.top_k(x, by_group)),
    }
    energy = {
        name: float(jnp.sum(run().values ** 2) / jnp.sum(magnitudes[:count] ** 2))
        for name, (count, run) in found.items()
    }
    runs = {name: run for name, (_, run) in found.items()}
    return {**runs, "compact": lambda: select.compact(mask, k)}, energy


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
def exact_heavy_hitters(table: jax.Array, spec: sketch.SketchSpec, size: int, k: int) -> jax.Array:
    """The k largest of all estimates."""
    estimates = sketch.decode(table, spec, size)
    return estimates[jax.lax.top_k(jnp.abs(estimates), k)[1]]


def sketches(x: jax.Array) -> tuple[Runs, Energies]:
    """A count sketch of five rows and a 64th of the columns."""
    size, k = x.size, max(1, int(_DENSITY * x.size))
    spec = sketch.SketchSpec(5, max(1, size // 64))
    table = sketch.encode(x, spec)
    choose = lambda: sketch.heavy_hitters(table, spec, size, k)
    exact = lambda: exact_heavy_hitters(table, spec, size, k)
    runs: Runs = {
        "encode": lambda: sketch.encode(x, spec),
        "encode by scatter": lambda: scatter_encode(x, spec),
        "decode": lambda: sketch.decode(table, spec, size),
        "heavy_hitters": choose,
        "decode + top_k": exact,
    }
    best = jnp.sum(exact() ** 2)
    return runs, {"heavy_hitters": float(jnp.sum(choose()[1] ** 2) / best)}


KINDS = {"select": selections, "sketch": sketches}


def measure(kind: str, size: int, repeats: int) -> None:
    """Prints the rows of one size."""
    x = jax.random.normal(jax.random.key(0), (size,))
    if kind == "select":
        x = x**3  # with heavy tails
    runs, energy = KINDS[kind](x)
    seconds = timing.interleaved({"x * 2 donated": timing.doubled(x), **runs}, repeats)
    floor = seconds["x * 2 donated"]
    for name, times in seconds.items():
        share = f"{energy[name]:.4f}" if name in energy else ""
        ratios = statistics.median(times) / statistics.median(floor), min(times) / min(floor)
        ms = f"{1e3 * statistics.median(times):.3f}"
        print(timing.row(size, name, ms, *(f"{x:.2f}" for x in ratios), share), flush=True)


# --- decoding


def decode_dense(parcel: MessageFormat, messages: jax.Array) -> jax.Array:
    def add(total, message):
        # Without the barrier XLA adds the entries to `total`, and so decodes sparsely by itself.
        decoded = jax.lax.optimization_barrier(parcel.vector(message))
        return total + decoded, None

    return jax.lax.scan(add, jnp.zeros(parcel.size, parcel.dtype), messages)[0]


def messages_of(workers: int, k: int, size: int) -> jax.Array:
    """COO messages of random entries in random order."""
    rng = np.random.default_rng(0)
    indices = rng.integers(size, size=(workers, k)).astype(np.uint32)
    values = rng.normal(size=(workers, k)).astype(np.float32).view(np.uint32)
    return jnp.asarray(np.concatenate([indices, values], axis=1))


def decoding(size: int, repeats: int) -> None:
    """Times of both decodings, and a fit of each."""
    print(timing.head("density", "W", "W m", "sparse ms", "dense ms"))
    results = list[dict[str, Any]]()
    for density, count in itertools.product((0.001, 0.01), (2, 4, 8, 16, 32, 64)):
        k = entries(density, size)
        parcel = MessageFormat(size, k, "sum", jnp.float32, codecs.COO)
        sparse, dense = jax.jit(parcel.merge_all), jax.jit(functools.partial(decode_dense, parcel))
        messages = messages_of(count, k, size)
        np.testing.assert_allclose(sparse(messages), dense(messages), atol=1e-4)
        some = {"sparse": lambda: sparse(messages), "dense": lambda: dense(messages)}  # noqa: B023
        seconds = {name: min(x) for name, x in timing.interleaved(some, repeats).items()}
        results.append({"columns": (size, count * k, count * size), **seconds})
        ms = (f"{1e3 * x:.2f}" for x in seconds.values())
        print(timing.row(density, count, count * k, *ms), flush=True)
    columns = np.array([r["columns"] for r in results], float)
    for name in ("sparse", "dense"):
        times = np.array([r[name] for r in results])
        # Of least relative squares, and none negative.
        found, _ = nnls(columns / times[:, None], np.ones(len(times)))
        off = float(np.exp(np.mean(np.abs(np.log(columns @ found / times)))))
        first, entry, each = 1e9 * found
        print(
            f"{name}: {first:.3f} ns an element, {entry:.3f} an entry, {each:.4f} an element and "
            f"worker; off by a factor of {off:.2f}"
        )


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("kind", choices=[*KINDS, "decode"])
    add("--sizes", type=timing.size_of, nargs="+", metavar="D", help="elements, as 2^20")
    add("--repeats", type=int, default=9, help="timed runs of each operation (default: 9)")
    args = parser.parse_args()
    timing.where()
    if args.kind == "decode":
        (size,) = args.sizes or [2**22]
        decoding(size, args.repeats)
        return
    print(timing.head("size", "operation", "median ms", "of the floor", "min / min", "energy"))
    for size in args.sizes or [2**e for e in range(16, 25, 2)]:
        measure(args.kind, size, args.repeats)


if __name__ == "__main__":
    main()
