"""Number formats of the quantised all-reduce: error, bits, time; and a ring against an all-to-all.

    python benchmarks/formats.py
    python benchmarks/formats.py --size 2^22 --workers 4 8 --formats int4 ternary sign

The first table rounds one vector. It has the error as a share of the vector's norm, for normal
values, for normal values cubed and for Student's t with 2 degrees of freedom, and the bits a value
with its scales. Its times are medians of runs that take turns, as multiples of the time of `x * 2`
in place: of quantising, of adding decoded values to a sum in place, and of a whole exchange as one
of 8 workers computes it, with feedback and without a network. The second table has the errors of
formats whose scales are means, in groups of 256 with scales in float32, and the least errors that
any levels of such a format have, found by trying all thresholds. The third table sums vectors of W
workers in NumPy, and has the error as a share of the sum's norm. In a ring each hop rounds a
partial sum, as INTELLECT-1's does. In an all-to-all each part is rounded once, and each sum once.
"""

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
from alone import dry_run

from jaxsparse import systems
from jaxsparse.quantize import (
    QSGD,
    Format,
    FormatName,
    QuantizedVector,
    Quantizer,
    dequantize,
    quantize,
)
from jaxsparse.reducers.base import Reducer
from jaxsparse.systems import Dense

FORMATS: dict[str, Quantizer] = {
    "bfloat16": Format("bfloat16"),
    "float16": Format("float16"),
    "float8_e4m3fn": Format("float8_e4m3fn"),
    "float8_e5m2": Format("float8_e5m2"),
    "int8": Format("int8"),
    "int8, e8m0": Format("int8", scale="e8m0"),
    "int4": Format("int4"),
    "int4, e8m0": Format("int4", scale="e8m0"),
    "int4, groups of 32": Format("int4", 32),
    "e3m0": Format("e3m0"),
    "QSGD(4), to nearest": QSGD(4, 256),
    "int2": Format("int2"),
    "ternary": Format("ternary"),
    "ternary, e8m0": Format("ternary", scale="e8m0"),
    "sign": Format("sign"),
    "sign, e8m0": Format("sign", scale="e8m0"),
}
DATA = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "cubed": lambda rng, shape: rng.standard_normal(shape) ** 3,
    "t2": lambda rng, shape: rng.standard_t(2, shape),
}
LEVELS_DATA: dict[str, Any] = {
    "normal": DATA["normal"],
    "Laplace": lambda rng, shape: rng.laplace(size=shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape),
}


@functools.partial(jax.jit, static_argnames="spec")
def encode(x: jax.Array, spec: Quantizer) -> QuantizedVector:
    return quantize(x, spec, None)


@functools.partial(jax.jit, static_argnames="spec", donate_argnums=0)
def add_decoded(total: jax.Array, values: QuantizedVector, spec: Quantizer) -> jax.Array:
    """Adds decoded values to a sum."""
    return total + dequantize(values, spec, total.size)


@functools.partial(jax.jit, static_argnames="reducer", donate_argnums=(0, 1))
def exchange(residual: jax.Array, x: jax.Array, state: Any, reducer: Reducer) -> Any:
    """The computations of one worker. The mean becomes the next gradient."""
    with dry_run(8):
        x = residual + x
        reduced = reducer(x, state, axis_name="data")
    return reduced.kept.whole(x).residual, reduced.mean, reduced.kept.state


@functools.partial(jax.jit, static_argnames="spec")
def error(x: jax.Array, spec: Quantizer) -> jax.Array:
    found = dequantize(quantize(x, spec, None), spec, x.size)
    return jnp.linalg.norm(found - x) / jnp.linalg.norm(x)


@functools.partial(jax.jit, static_argnames="spec")
def decoded(rows: jax.Array, spec: Quantizer) -> jax.Array:
    """Each row as its receiver decodes it."""
    one = lambda x: dequantize(quantize(x, spec, None), spec, x.size)
    return jax.vmap(one)(rows)


def ring(x: np.ndarray, spec: Quantizer) -> np.ndarray:
    """Chunk c starts at worker c. Each worker on its way decodes it, and adds its own part."""
    workers = len(x)
    chunks, c = x.reshape(workers, workers, -1), np.arange(workers)
    rule = lambda rows: np.asarray(decoded(jnp.float32(rows), spec), np.float64)
    partial = chunks[c, c]
    for hop in range(1, workers):
        partial = rule(partial) + chunks[(c + hop) % workers, c]
    return rule(partial).reshape(-1)


def all_to_all(x: np.ndarray, spec: Quantizer) -> np.ndarray:
    """Owners add their own part to those that arrive, and all decode the rounded sum."""
    workers = len(x)
    chunks, c = x.reshape(workers, workers, -1), np.arange(workers)
    rule = lambda rows: np.asarray(decoded(jnp.float32(rows), spec), np.float64)
    parts = np.stack([rule(part) for part in chunks])
    parts[c, c] = chunks[c, c]
    return rule(parts.sum(axis=0)).reshape(-1)


def formats(args: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = {name: FORMATS[name] for name in args.formats}
    rng = np.random.default_rng(0)
    data = {name: jnp.asarray(draw(rng, args.size), jnp.float32) for name, draw in DATA.items()}
    x = data["normal"]
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    buffers = {name: jnp.zeros_like(x) for name in ("x * 2", *chosen)}

    def donated() -> jax.Array:
        buffers["x * 2"] = double(buffers["x * 2"])
        return buffers["x * 2"]

    def decode(name: str, values: QuantizedVector) -> jax.Array:
        buffers[name] = add_decoded(buffers[name], values, FORMATS[name])
        return buffers[name]

    def exchanged(name: str, reducer: Reducer) -> Any:
        carried[name] = exchange(*carried[name], reducer)
        return carried[name]

    runs: dict[str, Any] = {"x * 2": donated}
    dense = Dense()
    carried = {"dense": (jnp.zeros_like(x), x * 1, dense.init(x.size))}
    runs["dense exchange"] = functools.partial(exchanged, "dense", dense)
    for name, spec in chosen.items():
        runs[f"{name} encode"] = functools.partial(encode, x, spec)
        runs[f"{name} decode"] = functools.partial(decode, name, encode(x, spec))
        reducer = systems.Quantized(spec, "nearest")
        carried[name] = (jnp.zeros_like(x), x * 1, reducer.init(x.size))
        runs[f"{name} exchange"] = functools.partial(exchanged, name, reducer)
    seconds = timing.interleaved(runs, args.repeats)
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    return [
        {
            "format": name,
            "bits": 32 * spec.words(args.size) / args.size,
            **{f"error_{of}": float(error(x, spec)) for of, x in data.items()},
            "encode": middle[f"{name} encode"] / middle["x * 2"],
            "decode": middle[f"{name} decode"] / middle["x * 2"],
            "exchange": middle[f"{name} exchange"] / middle["x * 2"],
        }
        for name, spec in chosen.items()
    ] + [{"format": "dense", "exchange": middle["dense exchange"] / middle["x * 2"]}]


def least_errors(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Errors of formats whose scales are means, and the least of any levels of as many values."""
    rng, results = np.random.default_rng(0), []
    number: Any = np.arange(1.0, 257)
    others: Any = np.array([*range(255, 0, -1), 1.0])  # those beside the largest, at least one
    for of, draw in LEVELS_DATA.items():
        x = np.float32(draw(rng, (args.size // 2**12, 256))).astype(np.float64)
        magnitudes = -np.sort(-np.abs(x))
        above = np.cumsum(magnitudes, axis=1)
        below = above[:, -1:] - above
        one = above**2 / number  # what one level for the largest magnitudes explains
        two = one + below**2 / others
        kinds: list[tuple[FormatName, Any]]
        kinds = [("sign", one[:, -1:]), ("ternary", one), ("int2", two)]
        for name, explained in kinds:
            energy = np.sum(magnitudes**2)
            least = np.sqrt(1 - np.sum(explained.max(axis=1)) / energy)
            spec = Format(name, scale="float32")
            found = float(error(jnp.asarray(x.reshape(-1), jnp.float32), spec))
            results.append({"format": name, "data": of, "error": found, "least": float(least)})
    return results


def sums(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for workers in args.workers:
        x = np.random.default_rng(1).standard_normal((workers, 2**16 // workers * workers))
        exact = x.sum(axis=0)
        found: dict[str, Any] = {"workers": workers}
        for spec in (Format("int8"), Format("int4")):
            for way in (ring, all_to_all):
                off = np.linalg.norm(way(x, spec) - exact) / np.linalg.norm(exact)
                found[f"{spec.name} {way.__name__}"] = off
        results.append(found)
    return results


def parse_args() -> argparse.Namespace:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=timing.size_of, default=2**24, metavar="D", help="elements: 2^24")
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="NAME")
    add("--workers", type=int, nargs="*", default=[4, 8, 16, 32, 64], metavar="W")
    add("--repeats", type=int, default=9, help="timed runs of each operation")
    add("--json", metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    where = timing.where()
    found = formats(args)
    print("| | bits | normal | cubed | t, 2 | encode | decode | exchange |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| dense | 32 | | | | | | {found[-1]['exchange']:.1f} |")
    for r in found[:-1]:
        errors = [f"{100 * r[f'error_{name}']:.3g} %" for name in DATA]
        times = [f"{r[name]:.1f}" for name in ("encode", "decode", "exchange")]
        print("|", " | ".join([r["format"], format(r["bits"], ".3g"), *errors, *times]), "|")
    near = least_errors(args)
    print("\n| | of | error | least |\n|---|---|---|---|")
    for r in near:
        shares = [f"{100 * r[name]:.2f} %" for name in ("error", "least")]
        print("|", " | ".join([r["format"], r["data"], *shares]), "|")
    summed = sums(args)
    for i, s in enumerate(summed):
        names = [name for name in s if name != "workers"]
        if not i:
            print(f"\n| W | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        print(f"| {s['workers']} | {' | '.join(f'{100 * s[name]:.3g} %' for name in names)} |")
    results = {"formats": found, "least": near, "sums": summed}
    timing.save({**where, "arguments": vars(args), **results}, args.json)


if __name__ == "__main__":
    main()
