"""Heavy hitters of a sketched vector, found without decoding all of it into memory."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key

from jaxsparse.hashing import combine
from jaxsparse.sketch.codec import check_size, check_table, decode_at, l2_norm, tile_estimates
from jaxsparse.sketch.streaming import mix_in_random, streaming_top_k
from jaxsparse.sketch.tiles import Seed, SketchSpec, resolve

# The slots' offsets are hashed under a word that no row has.
_SLOTS = 2**32 - 2


@functools.partial(jax.jit, static_argnames=("spec", "size", "k", "rule"))
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
    """Finds k distinct coordinates of large estimates; the same ones from the same table.

    "top_k" takes nearly the k largest magnitudes (Alg. 3's selection). Estimates pass through
    slots of which each keeps its largest, so a large coordinate can lose its place to a larger
    one in its slot: about 6 % of the k do, in exchange for the next largest, whatever their
    arrangement on average; and magnitudes within 2**-15 of each other rank as equal. Where
    16 k > size it is exact but for this. "heavymix" (Alg. 1) keeps of these k the heavy ones,
    |estimate| >= l2 / sqrt(k), and draws the others uniformly from all that are not heavy.

    Args:
        table: float32[rows, cols].
        spec: the one it was encoded with.
        size: d, of the vector that was encoded.
        k: 1 <= k <= size.
        rule: "top_k" or "heavymix".
        key: a JAX random key, the same on all workers; "heavymix" needs it.
        seed: the one the table was encoded with.

    Returns:
        indices: int32[k], distinct, each below size, in no particular order.
        estimates: float32[k], `decode_at` of them.

    Raises:
        ValueError: table does not match spec, size, k, rule or seed is out of range, or key is
            missing.

    Sketched-SGD, Alg. 1 (HEAVYMIX) and section 4.

    >>> from jaxsparse.sketch import encode
    >>> spec, x = SketchSpec(rows=3, cols=8), jnp.array([0.0, 7.0, 0.0, 0.0])
    >>> [v.tolist() for v in heavy_hitters(encode(x, spec), spec, 4, k=1)]
    [[1], [7.0]]
    """
    table = check_table(table, spec)
    check_size("size", size)
    if not 1 <= k <= size:
        raise ValueError(f"k={k} must be in 1 .. size={size}: choose it there")
    if rule not in ("top_k", "heavymix"):
        raise ValueError(f"rule={rule!r} is unknown: use 'top_k' or 'heavymix'")
    hash_seed = resolve(spec, seed)
    estimate = lambda indices: decode_at(table, spec, indices, seed=hash_seed)
    indices = streaming_top_k(
        tile_estimates(table, spec, hash_seed),
        size,
        spec.tile,
        k,
        seed=combine(hash_seed, _SLOTS),
        like=(table, hash_seed),
    )
    if rule == "heavymix":
        if key is None:
            raise ValueError("key=None, but 'heavymix' draws at random: pass all workers one key")
        threshold = l2_norm(table) / math.sqrt(k)
        is_heavy = lambda indices: jnp.abs(estimate(indices)) >= threshold
        indices = mix_in_random(indices, is_heavy(indices), size, is_heavy, key=key)
    return indices, estimate(indices)
