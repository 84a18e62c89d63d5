"""Count sketch: encode, merge, decode, l2 norm, heavy hitters (v0, being optimised)."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxsparse.hashing import bounded, combine, mix

TILE = 2**14


@dataclasses.dataclass(frozen=True)
class SketchSpec:
    """Shape and seed."""

    rows: int
    cols: int
    seed: int = 0

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1")
        if self.cols < 1:
            raise ValueError(f"cols={self.cols} must be at least 1")

    @property
    def tile(self):
        return min(self.cols, TILE)


def _seed(spec, seed):
    return (
        jnp.uint32(spec.seed & 0xFFFFFFFF) if seed is None else jnp.asarray(seed).astype(jnp.uint32)
    )


def _shift(spec, seed, row, tile):
    return bounded(combine(seed, row, tile), spec.cols).astype(jnp.int32)


def _sign_bits(seed, row, index):
    h = mix(index.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ combine(seed, row // 32, 1))
    return (h << jnp.uint32(31 - row % 32)) & jnp.uint32(0x80000000)


def _flip(x, bits):
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ bits, jnp.float32)


def _zeros(shape, dtype, *like):
    return sum(jnp.zeros_like(v, shape=shape, dtype=dtype) for v in like)


@functools.partial(jax.jit, static_argnames="spec")
def encode(x, spec, *, seed=None):
    """Sketch of x."""
    if x.ndim != 1 or x.size < 1:
        raise ValueError(f"x has shape {x.shape}; ravel it")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x has dtype {x.dtype}; cast it to float32")
    seed = _seed(spec, seed)
    T = spec.tile
    n, tail = divmod(x.size, T)

    def add(b, table, length):
        start = b * T
        v = lax.dynamic_slice(x, (start,), (length,)).astype(jnp.float32)
        i = start + lax.iota(jnp.int32, length)
        rows = []
        for r, acc in enumerate(table):
            s = (_shift(spec, seed, r, b),)
            w = lax.dynamic_slice(acc, s, (length,)) + _flip(v, _sign_bits(seed, r, i))
            rows.append(lax.dynamic_update_slice(acc, w, s))
        return tuple(rows)

    table = tuple(_zeros((spec.cols + T,), jnp.float32, x, seed) for _ in range(spec.rows))
    if n:
        table = lax.fori_loop(0, n, lambda b, t: add(b, t, T), table)
    if tail:
        table = add(jnp.int32(n), table, tail)
    return jnp.stack([a[: spec.cols].at[:T].add(a[spec.cols :]) for a in table])


@jax.jit
def merge(*tables):
    """Sum of sketches."""
    return sum(tables[1:], tables[0])


def _median(rows):
    rows = list(rows)
    n = len(rows)
    for end in range(n - 1, 0, -1):
        for i in range(end):
            a, b = rows[i], rows[i + 1]
            rows[i], rows[i + 1] = jnp.minimum(a, b), jnp.maximum(a, b)
    return rows[n // 2] if n % 2 else 0.5 * rows[n // 2 - 1] + 0.5 * rows[n // 2]


@functools.partial(jax.jit, static_argnames=("spec", "size"))
def decode(table, spec, size, *, seed=None):
    """Estimates of all."""
    return decode_at(table, spec, lax.iota(jnp.int32, size), seed=seed)


@functools.partial(jax.jit, static_argnames="spec")
def decode_at(table, spec, indices, *, seed=None):
    """Estimates at indices."""
    seed = _seed(spec, seed)
    b, t = indices // spec.tile, indices % spec.tile
    rows = []
    for r in range(spec.rows):
        p = _shift(spec, seed, r, b) + t
        p = jnp.where(p >= spec.cols, p - spec.cols, p)
        rows.append(_flip(table[r][p], _sign_bits(seed, r, indices)))
    return _median(rows)


@jax.jit
def l2_norm(table):
    """l2 estimate."""
    scale = jnp.max(jnp.abs(table))
    safe = jnp.where(scale > 0, scale, jnp.float32(1))
    return scale * _median(list(jnp.sqrt(jnp.sum((table / safe) ** 2, axis=1))))


@functools.partial(jax.jit, static_argnames=("spec", "size", "k", "rule"))
def heavy_hitters(table, spec, size, k, *, rule="top_k", key=None, seed=None):
    """K heavy hitters."""
    est = decode(table, spec, size, seed=seed)
    _, i = lax.top_k(jnp.abs(est), k)
    if rule == "heavymix":
        heavy = jnp.abs(est) >= l2_norm(table) / math.sqrt(k)
        rank = jnp.where(heavy, 2 + jnp.abs(est), jax.random.uniform(key, (size,)))
        _, i = lax.top_k(rank, k)
    return i, est[i]
