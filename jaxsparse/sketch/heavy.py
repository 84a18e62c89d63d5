"""Heavy hitters of a sketched vector, found without decoding all of it into memory.

Estimates are neither stored nor sorted: `streaming_top_k` folds decoded tiles into slots.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key, UInt32

from jaxsparse.arrays.hashing import combine, permuted
from jaxsparse.arrays.platforms import zeros
from jaxsparse.arrays.settings import check_k, check_seed, check_size
from jaxsparse.select.compaction import compact_ranked
from jaxsparse.select.fast import Values, streaming_top_k
from jaxsparse.sketch.codec import check_table, decode_at, l2_norm
from jaxsparse.sketch.tiles import Seed, SketchSpec, estimates_at, tile_estimates

# Number under which the slots' offsets are hashed. No row of a sketch has it.
_SLOTS = 2**32 - 2


def heavy_hitters(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    size: int,
    k: int,
    *,
    rule: Literal["top_k", "heavymix"] = "top_k",
    key: Key[Array, ""] | None = None,
    seed: Seed = None,
) -> tuple[Int[Array, " k"], Float[Array, " k"]]:
    """Finds k distinct coordinates with large estimates, in no order, and `decode_at` of them.

    "top_k" takes nearly the k largest magnitudes (Alg. 3's selection): see `fast_top_k`, which
    passes values through slots likewise. Where 16 k > size the result is exact. "heavymix" (Alg. 1)
    keeps the heavy ones among these k, those with |estimate| >= l2 / sqrt(k), and draws the others
    uniformly from all that are not heavy. It needs a random key, the same on all workers.
    Sketched-SGD, Alg. 1 (HEAVYMIX) and section 4.

    >>> from jaxsparse.sketch import encode
    >>> spec, x = SketchSpec(rows=3, cols=8), jnp.array([0.0, 7.0, 0.0, 0.0])
    >>> [v.tolist() for v in heavy_hitters(encode(x, spec), spec, 4, k=1)]
    [[1], [7.0]]
    """
    table = check_table(table, spec)
    check_size("size", size)
    if rule not in ("top_k", "heavymix"):
        raise ValueError(f"rule={rule!r} is unknown: use 'top_k' or 'heavymix'")
    if rule == "heavymix" and key is None:
        raise ValueError("key=None, but 'heavymix' draws at random: pass all workers one key")
    k, seed = check_k(k, size, f"size={size}"), check_seed(spec.seed if seed is None else seed)
    return _heavy_hitters(table, spec, size, k, rule, key, seed)


@functools.partial(jax.jit, static_argnames=("spec", "size", "k", "rule"))
def _heavy_hitters(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    size: int,
    k: int,
    rule: str,
    key: Key[Array, ""] | None,
    hash_seed: UInt32[Array, ""],
) -> tuple[Int[Array, " k"], Float[Array, " k"]]:
    estimate = functools.partial(decode_at, table, spec, seed=hash_seed)
    indices = streaming_top_k(
        Values(
            tile_estimates(table, spec, hash_seed),
            functools.partial(estimates_at, table, spec, hash_seed),
        ),
        size,
        spec.tile,
        k,
        seed=combine(hash_seed, _SLOTS),
        like=(table, hash_seed),
    )
    if rule == "heavymix":
        assert key is not None
        threshold = l2_norm(table) / math.sqrt(k)
        is_heavy = lambda indices: jnp.abs(estimate(indices)) >= threshold
        indices = mix_in_random(indices, is_heavy(indices), size, is_heavy, key=key)
    return indices, estimate(indices)


def mix_in_random(
    indices: Int[Array, " k"],
    heavy: Bool[Array, " k"],
    size: int,
    is_heavy: Callable[[Int[Array, " m"]], Bool[Array, " m"]],
    *,
    key: Key[Array, ""],
) -> Int[Array, " k"]:
    """Keeps the heavy ones of k distinct indices and replaces the others by random non-heavy ones.

    New indices are drawn from the first 2 k of a pseudorandom permutation of all indices. Only if
    `indices` lacks more than k heavy ones can these 2 k hold too few that are not heavy. Then heavy
    ones take the places left.
    """
    k = indices.shape[0]
    drawn = permuted(jnp.arange(min(2 * k, size), dtype=jnp.int32), size, key)
    kept = zeros((size,), jnp.bool_, (indices, heavy)).at[indices].set(heavy)
    new, drawn_heavy = ~kept[drawn], is_heavy(drawn)
    # In this order: the heavy ones to keep, new ones that are not heavy, new ones that are.
    unwanted = jnp.int32(3)
    drawn_rank = jnp.where(drawn_heavy, jnp.int32(2), jnp.int32(1))
    ranks = jnp.concatenate(
        [jnp.where(heavy, jnp.int32(0), unwanted), jnp.where(new, drawn_rank, unwanted)]
    )
    kept = compact_ranked(ranks, jnp.equal, 3, k)
    return jnp.concatenate([indices, drawn])[kept]
