"""Number formats of the quantised all-reduce: bits and errors.

    python benchmarks/formats.py
    python benchmarks/formats.py --size 2^20

The first table rounds one vector. It has the bits a value with its scales, and the error as a share
of the vector's norm, for normal values, for normal values cubed and for Student's t with 2 degrees
of freedom. The second table has the errors of formats whose scales are means, in groups of 256 with
scales in float32, and the least errors that any levels of such a format have, found by trying all
thresholds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

from jaxsparse.quantize import QSGD, Format, Quantizer, dequantize, quantize
from jaxsparse.quantize.formats import FormatName

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
def error(x: jax.Array, spec: Quantizer) -> jax.Array:
    found = dequantize(quantize(x, spec, None), spec, x.size)
    return jnp.linalg.norm(found - x) / jnp.linalg.norm(x)


def least_errors(size: int) -> list[dict[str, Any]]:
    """Errors of formats whose scales are means, and the least of any levels of as many values."""
    rng, results = np.random.default_rng(0), []
    number: Any = np.arange(1.0, 257)
    others: Any = np.array([*range(255, 0, -1), 1.0])  # those beside the largest, at least one
    for of, draw in LEVELS_DATA.items():
        x = np.float32(draw(rng, (size // 2**12, 256))).astype(np.float64)
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


def main() -> None:
    parser = timing.parser_of(__doc__)
    parser.add_argument("--size", type=timing.size_of, default=2**24, metavar="D", help="2^24")
    size = parser.parse_args().size
    timing.where()
    rng = np.random.default_rng(0)
    data = [jnp.asarray(draw(rng, size), jnp.float32) for draw in DATA.values()]
    print(timing.head("", "bits", *DATA))
    for name, spec in FORMATS.items():
        errors = [f"{100 * float(error(x, spec)):.3g} %" for x in data]
        print(timing.row(name, format(32 * spec.words(size) / size, ".3g"), *errors))
    print("\n" + timing.head("", "of", "error", "least"))
    for r in least_errors(size):
        shares = [f"{100 * r[name]:.2f} %" for name in ("error", "least")]
        print(timing.row(r["format"], r["data"], *shares))


if __name__ == "__main__":
    main()
