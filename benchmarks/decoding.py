"""Times sparse against dense decoding of all workers' messages (DRAGONN, section 4.3).

Sparse decoding adds the entries of all W messages to one dense array. Dense decoding makes a dense
array of each message and adds these up. Runs are interleaved, so that a noisy machine slows all
alike, and the least time of each counts. The fit `first d + entry W m + pass W d` has the least
relative squares, and no negative coefficient. Over several densities it tells a cost of each entry
from a cost of each worker.
"""

import argparse
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

from jaxsparse import codecs
from jaxsparse.arrays.settings import entries
from jaxsparse.collectives.messages import MessageFormat


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


def copies(compiled: str, size: int) -> int:
    """Number of copies of a vector of `size` floats outside the entry computation: in a loop."""
    computations = re.split(r"\n(?=\S)", compiled)
    bodies = [text for text in computations if not text.startswith("ENTRY")]
    return sum(len(re.findall(rf"= f32\[{size}\]\S* copy\(", text)) for text in bodies)


def fit(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative coefficients of least relative squares: the best of all subsets of columns."""
    a = columns / seconds[:, None]
    best, error = np.zeros(a.shape[1]), np.inf
    for count in range(1, a.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(a.shape[1]), count)):
            found = np.linalg.lstsq(a[:, chosen], np.ones(len(a)), rcond=None)[0]
            squares = float(np.square(a[:, chosen] @ found - 1).sum())
            if np.all(found >= 0) and squares < error:
                best, error = np.zeros(a.shape[1]), squares
                best[chosen] = found
    return best


def measure(size: int, workers: Sequence[int], densities: Sequence[float], repeats: int) -> list:
    print(f"{'density':>8} {'W':>3} {'W m':>9} {'sparse ms':>10} {'dense ms':>9} {'ratio':>6}")
    results = []
    for density in densities:
        k = entries(density, size)
        parcel = MessageFormat(size, k, "sum", jnp.float32, codecs.COO)
        sparse = jax.jit(parcel.merge_all)
        dense = jax.jit(lambda messages, parcel=parcel: decode_dense(parcel, messages))
        for count in workers:
            messages = messages_of(count, k, size)
            hlo = sparse.lower(messages).compile().as_text() or ""
            np.testing.assert_allclose(sparse(messages), dense(messages), atol=1e-4)
            runs = timing.interleaved(
                {
                    "sparse": functools.partial(sparse, messages),
                    "dense": functools.partial(dense, messages),
                },
                repeats,
            )
            seconds = {name: min(times) for name, times in runs.items()}
            result = {"size": size, "density": density, "workers": count, "k": k, **seconds}
            results.append(result | {"copies_in_loop": copies(hlo, size)})
            print(
                f"{density:>8} {count:>3} {count * k:>9} {1e3 * seconds['sparse']:>10.2f} "
                f"{1e3 * seconds['dense']:>9.2f} {seconds['dense'] / seconds['sparse']:>6.2f}",
                flush=True,
            )
    return results


def report(results: list[dict[str, Any]]) -> dict[str, Any]:
    columns = np.array(
        [(r["size"], r["workers"] * r["k"], r["workers"] * r["size"]) for r in results],
        float,
    )
    fits = {}
    print(
        f"{'decoding':<8} {'first ns/d':>11} {'entry ns/(W m)':>15} {'pass ns/(W d)':>14} "
        f"{'off':>6}"
    )
    for name in ("sparse", "dense"):
        seconds = np.array([r[name] for r in results])
        found = fit(columns, seconds)
        off = float(np.exp(np.mean(np.abs(np.log(columns @ found / seconds)))))
        fits[name] = {"ns": (1e9 * found).tolist(), "off": off}
        print(
            f"{name:<8} {1e9 * found[0]:>11.3f} {1e9 * found[1]:>15.3f} {1e9 * found[2]:>14.4f} "
            f"{off:>6.2f}"
        )
    count = sum(r["copies_in_loop"] for r in results)
    print(f"copies of the dense array within sparse decoding's loops: {count}")
    return fits


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--size", type=timing.size_of, default=2**22, metavar="D", help="elements, d"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01], help="m / d")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each")
    parser.add_argument("--json", metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    where = timing.where()
    print(f"d = {args.size}, least of {args.repeats} runs")
    results = measure(args.size, args.workers, args.densities, args.repeats)
    fits = report(results)
    content = {**where, "arguments": vars(args), "results": results, "fits": fits}
    timing.save(content, args.json)


if __name__ == "__main__":
    main()
