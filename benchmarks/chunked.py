"""Times chunked top-k, and its messages of few bits, against the cheapest pass over the vector.

    python benchmarks/chunked.py --sizes 2^24

The floor and the interleaving are those of codecs.py. Compare ratios, not times. "decode" makes the
entries of one message, and "decode, dense" makes the dense vector. Then it prints the relative
squared error of the values in 2, 4 and 8 bits, for several distributions.
"""

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

from jaxsparse import codecs, select
from jaxsparse.arrays.stream import to_dense
from jaxsparse.quantize import entry_values
from jaxsparse.select.groups import count_entries


def measure(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The ratios at one size."""
    x = jax.random.normal(jax.random.key(0), (size,))
    codec = codecs.EliasFano(args.bits)
    count = count_entries(size, args.k, args.chunk_size)
    choose = jax.jit(functools.partial(select.group_top_k, k=args.k, group_size=args.chunk_size))
    stream = choose(x)
    in_place = jax.jit(lambda x: x * 2, donate_argnums=0)
    buffer = [jnp.zeros_like(x)]

    def donated() -> jax.Array:
        buffer[0] = in_place(buffer[0])
        return buffer[0]

    runs: dict[str, Any] = {"x * 2 donated": donated, "select": lambda: choose(x)}
    encode = jax.jit(functools.partial(codec.encode, size=size))
    rounded = jax.jit(functools.partial(codec.rounded, size=size))
    decode = jax.jit(functools.partial(codec.decode, capacity=count, size=size, dtype=jnp.float32))
    dense = jax.jit(lambda words: to_dense(decode(words), size))
    words = encode(stream)
    runs |= {
        "encode": functools.partial(encode, stream),
        "rounded": functools.partial(rounded, stream),
        "decode": functools.partial(decode, words),
        "decode, dense": functools.partial(dense, words),
        "dense": functools.partial(jax.jit(lambda s: to_dense(s, size)), stream),
    }
    seconds = timing.interleaved(runs, args.repeats)
    floor = seconds["x * 2 donated"]
    return [
        {
            "size": size,
            "operation": name,
            "median_ms": 1e3 * statistics.median(times),
            "over_donated": statistics.median(times) / statistics.median(floor),
            "min_over_min_donated": min(times) / min(floor),
        }
        for name, times in seconds.items()
    ]


def errors(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Relative squared errors of the values of the largest entries of each chunk."""
    rng = np.random.default_rng(0)
    size = 2**20
    leaves = np.repeat(10.0 ** rng.uniform(-4, 0, size // 2**16), 2**16)
    data = {
        "normal": rng.normal(size=size),
        "Laplace": rng.laplace(size=size),
        "Student t(3)": rng.standard_t(3, size),
        "normal, 16 leaves of unlike scales": rng.normal(size=size) * leaves,
    }
    found = []
    for name, x in data.items():
        stream = select.group_top_k(jnp.asarray(x, jnp.float32), args.k, args.chunk_size)
        values = np.asarray(stream.values, np.float64)
        scales = leaves[np.asarray(stream.indices)] if "leaves" in name else 1.0
        for bits in (2, 4, 8):
            way = entry_values(bits)
            words = way.encode(stream.values, values.size)
            lost = (np.asarray(way.decode(words, values.size)) - values) / scales
            error = np.sum(lost**2) / np.sum((values / scales) ** 2)
            found.append({"data": name, "bits": bits, "error": float(error)})
    return found


def parse_args() -> argparse.Namespace:
    """The settings of a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=timing.size_of, nargs="+", default=[2**20, 2**24])
    parser.add_argument("--k", type=int, default=64, help="entries of a chunk")
    parser.add_argument("--chunk-size", type=int, default=4096, help="elements of a chunk")
    parser.add_argument("--bits", type=int, default=2, help="bits of a value")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each operation")
    parser.add_argument("--json", metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    where = timing.where()
    print(f"{'size':>9}  {'operation':<26}{'median ms':>10} {'/donated':>9} {'min/min':>8}")
    results = []
    for size in args.sizes:
        for r in measure(size, args):
            results.append(r)
            print(
                f"{r['size']:>9}  {r['operation']:<26}{r['median_ms']:>10.2f} "
                f"{r['over_donated']:>9.2f} {r['min_over_min_donated']:>8.2f}",
                flush=True,
            )
    found = errors(args)
    for r in found:
        print(f"{r['data']:<36}{r['bits']} bits{100 * r['error']:>10.3f} %")
    timing.save({**where, "arguments": vars(args), "results": results, "errors": found}, args.json)


if __name__ == "__main__":
    main()
