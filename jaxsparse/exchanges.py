"""The exchanges by name: each is `jaxsparse.exchange` of a reducer.

The settings of a function are those of its reducer, which says what they do (`jaxsparse.reducers`).
The options, such as `momentum=`, are those of `jaxsparse.exchange`.
"""

from typing import Literal, Unpack

from jax.typing import DTypeLike

from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.settings import static_bool
from jaxsparse.codecs.codec import COO, Codec
from jaxsparse.comm.links import Link
from jaxsparse.feedback.options import Options
from jaxsparse.feedback.transformations import Exchange, exchange
from jaxsparse.quantize.formats import Format, FormatName, Scale
from jaxsparse.quantize.qsgd import QSGD
from jaxsparse.reducers.base import Reducer
from jaxsparse.reducers.block_sparse import OmniReduce, SparseAllGather
from jaxsparse.reducers.chunked_top_k import ChunkedTopK
from jaxsparse.reducers.dense import Dense
from jaxsparse.reducers.dragonn import Dragonn, Extract
from jaxsparse.reducers.matrices import SCANNED, Matrix
from jaxsparse.reducers.powersgd import Iteration, PowerSGD
from jaxsparse.reducers.quantized import GatheredQuantized, Quantized
from jaxsparse.reducers.random_k import RandomK
from jaxsparse.reducers.s2_reducer import S2
from jaxsparse.reducers.sketched_sgd import SketchedSGD
from jaxsparse.reducers.sparcml import LINK, Algorithm, SparCML
from jaxsparse.reducers.spardl import SparDL
from jaxsparse.reducers.top_k import TopK
from jaxsparse.reducers.true_top_k import TrueTopK
from jaxsparse.select.top_k import Selection

_DGC_MOMENTUM = 0.9


def dense(**options: Unpack[Options]) -> Exchange:
    """The exact mean gradient by all-reduce. Changing one word switches to this baseline.

    Every leaf is uncompressed, unless `is_dense` or `bucket_size` is given. See `reducers.Dense`.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = dense(axis_name=None, momentum=0.5)
        >>> state = tx.init(jnp.zeros(2))
        >>> for _ in range(2):
        ...     updates, state = tx.update(jnp.ones(2), state)
        >>> updates.tolist()
        [1.5, 1.5]
    """
    if options.get("is_dense") is None and options.get("bucket_size") is None:
        options["is_dense"] = layouts.everything
    return exchange(Dense(), **options)


def top_k(
    density: float,
    *,
    codec: Codec = COO,
    selection: Selection = "fast",
    **options: Unpack[Options],
) -> Exchange:
    """Each worker's k largest entries, gathered and summed by all (TopkA). See `reducers.TopK`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = top_k(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """
    return exchange(TopK(density, codec=codec, selection=selection), **options)


def dgc(
    density: float = 0.001,
    *,
    codec: Codec = COO,
    selection: Selection = "sampled",
    **options: Unpack[Options],
) -> Exchange:
    """Deep Gradient Compression (Lin et al., ICLR 2018): a thousandth of the gradient is enough.

    It is `top_k` by the paper's selection: each worker estimates a threshold from a sample
    (`jaxsparse.select.Sampled(samples=...)` sets its size), and sends the entries that reach it.

    `momentum` is 0.9 if it is not given. It acts before the exchange (momentum correction, section
    3.2), and is masked where this worker sent (3.3). Chain an optimizer without momentum behind it,
    such as `optax.sgd(lr)`, or give `momentum=None`. The paper clips each of W workers' gradients
    before they are accumulated (3.2), at W**-0.5 times the threshold for their mean:

        clip = jaxsparse.per_worker(optax.clip_by_global_norm(threshold / W**0.5))
        tx = optax.chain(clip, jaxsparse.dgc(0.001), ...)

    The paper lowers the density from 25 % over the first four of about 80 epochs (3.3):

        last = jaxsparse.reducers.TopK(0.001, selection="sampled")
        tx = jaxsparse.exchange(jaxsparse.warm_up(last, steps=...), momentum=0.9)
    """
    options.setdefault("momentum", _DGC_MOMENTUM)
    return exchange(TopK(density, codec=codec, selection=selection), **options)


def true_top_k(k: int, **options: Unpack[Options]) -> Exchange:
    """The top k of the exact mean: the ceiling for sketches. See `reducers.TrueTopK`."""
    return exchange(TrueTopK(k), **options)


def random_k(
    density: float, *, seed: int = 0, reducer: Reducer | None = None, **options: Unpack[Options]
) -> Exchange:
    """The same random coordinates on all workers, without indices. See `reducers.RandomK`."""
    return exchange(RandomK(density, seed=seed, reducer=reducer), **options)


def chunked_top_k(
    k: int = 64,
    chunk_size: int = 4096,
    *,
    value_bits: Literal[2, 4, 8, 16, 32] = 2,
    **options: Unpack[Options],
) -> Exchange:
    """SparseLoCo's exchange: k of every 4096 elements, in 7 to 10 bits each.

    See `reducers.ChunkedTopK`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = chunked_top_k(2, 1024, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> jnp.flatnonzero(updates["kernel"]).tolist()
        [1022, 1023, 2046, 2047]
    """
    return exchange(ChunkedTopK(k, chunk_size, value_bits=value_bits), **options)


def sketched_sgd(
    compression: float | None = None,
    *,
    k: int | None = None,
    rows: int | None = None,
    cols: int | None = None,
    oversampling: int | None = None,
    selection: Literal["top_k", "heavymix"] = "top_k",
    table_dtype: DTypeLike = "float32",
    seed: int = 0,
    **options: Unpack[Options],
) -> Exchange:
    """Sketched-SGD (Ivkin et al., NeurIPS 2019): a count sketch, then exact values of candidates.

    See `reducers.SketchedSGD`.
    """
    reducer = SketchedSGD(
        compression,
        k=k,
        rows=rows,
        cols=cols,
        oversampling=oversampling,
        selection=selection,
        table_dtype=table_dtype,
        seed=seed,
    )
    return exchange(reducer, **options)


def s2_reducer(
    density: float | None = 0.03125,
    *,
    block_size: int = 256,
    rows: int = 1,
    sketch_ratio: float = 0.5,
    sizing: Literal["union", "local"] = "union",
    union_density: float | None = None,
    seed: int = 0,
    **options: Unpack[Options],
) -> Exchange:
    """S2 Reducer (2021): a sketch of the blocks that are not zero; unbiased, noisy.

    See `reducers.S2`.
    """
    reducer = S2(
        density,
        block_size=block_size,
        rows=rows,
        sketch_ratio=sketch_ratio,
        sizing=sizing,
        union_density=union_density,
        seed=seed,
    )
    return exchange(reducer, **options)


def omni_reduce(
    density: float | None = None,
    *,
    block_size: int = 256,
    union_density: float | None = None,
    **options: Unpack[Options],
) -> Exchange:
    """OmniReduce (Fei et al., SIGCOMM 2021): a sum of blocks that some worker has.

    See `reducers.OmniReduce`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = omni_reduce(block_size=32, union_density=0.1, axis_name=None)
        >>> grads = {"embedding": jnp.zeros((64, 32)).at[jnp.array([3, 50])].set(1.0)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> bool((updates["embedding"] == grads["embedding"]).all()), int(state.info.delivered)
        (True, 64)
    """
    reducer = OmniReduce(density, block_size=block_size, union_density=union_density)
    return exchange(reducer, **options)


def sparse_all_gather(
    density: float | None = None,
    *,
    block_size: int = 256,
    capacity_density: float | None = None,
    **options: Unpack[Options],
) -> Exchange:
    """Each worker's non-zero blocks, gathered, as Parallax and Horovod do with sparse gradients.

    See `reducers.SparseAllGather`.
    """
    reducer = SparseAllGather(density, block_size=block_size, capacity_density=capacity_density)
    return exchange(reducer, **options)


def sparcml(
    k: int = 4,
    group_size: int = 512,
    *,
    algorithm: Algorithm = "auto",
    bits: Literal[2, 4, 8] | None = None,
    bits_group_size: int = 1024,
    scale: Literal["max", "l2"] = "max",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    link: Link = LINK,
    codec: Codec = COO,
    seed: int = 0,
    **options: Unpack[Options],
) -> Exchange:
    """SparCML (Renggli et al., SC 2019): k of every 512 elements, exactly summed.

    The all-reduce is the one that suits the network. See `reducers.SparCML`.
    """
    reducer = SparCML(
        k,
        group_size,
        algorithm=algorithm,
        bits=bits,
        bits_group_size=bits_group_size,
        scale=scale,
        rounding=rounding,
        link=link,
        codec=codec,
        seed=seed,
    )
    return exchange(reducer, **options)


def spardl(
    density: float,
    *,
    teams: int = 1,
    gather: Literal["recursive", "bruck"] = "recursive",
    residuals: Literal["global", "partial", "local"] = "global",
    codec: Codec = COO,
    selection: Selection = "fast",
    **options: Unpack[Options],
) -> Exchange:
    """SparDL (Zhao et al., ICDE 2024): reduce-scatter and all-gather that never exceed k entries.

    See `reducers.SparDL`.
    """
    reducer = SparDL(
        density, teams=teams, gather=gather, residuals=residuals, codec=codec, selection=selection
    )
    return exchange(reducer, **options)


def dragonn(
    density: float = 0.001,
    *,
    extract: Extract = "slot_max",
    passing: float = 1.0,
    samples: int | None = None,
    codec: Codec = COO,
    seed: int = 0,
    **options: Unpack[Options],
) -> Exchange:
    """DRAGONN (Wang et al., ICML 2022): large entries, in slots that are hashed.

    See `reducers.Dragonn`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = dragonn(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> bool(1 <= (updates["kernel"] != 0).sum() <= 3)
        True
    """
    reducer = Dragonn(
        density, extract=extract, passing=passing, samples=samples, codec=codec, seed=seed
    )
    return exchange(reducer, **options)


def powersgd(
    rank: int,
    *,
    iteration: Iteration = "alternating",
    min_compression_rate: float = 2.0,
    stacked: str | None = SCANNED,
    matrices: tuple[Matrix, ...] | None = None,
    seed: int = 0,
    **options: Unpack[Options],
) -> Exchange:
    """PowerSGD (Vogels et al., NeurIPS 2019): factors of low rank of each matrix, by all-reduce.

    See `reducers.PowerSGD`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = powersgd(1, iteration="full", axis_name=None)
        >>> grads = {"kernel": jnp.outer(jnp.arange(64.0), jnp.ones(32)), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> bool(jnp.allclose(updates["kernel"], grads["kernel"], atol=1e-4))
        True
    """
    reducer = PowerSGD(
        rank,
        iteration=iteration,
        min_compression_rate=min_compression_rate,
        stacked=stacked,
        matrices=matrices,
        seed=seed,
    )
    return exchange(reducer, **options)


def quantized(
    format: FormatName = "int8",
    *,
    group_size: int = 256,
    scale: Scale = "bfloat16",
    gather: bool = False,
    **options: Unpack[Options],
) -> Exchange:
    """Dense all-reduce in 1 to 16 bits a value, with error feedback.

    Values travel to the owner of their range, which sums them in float32, and the sums travel back.
    These are two roundings for any number of workers. All workers apply the decoded sums, their
    owner included, so replicas stay equal. Both roundings are fed back: a worker's residual keeps
    the error of its own values, and that of the sums that it owns. `decay=0` drops both, as
    Streaming DiLoCo does.

    `quantized("bfloat16")` is a dense sum that travels as 16 bits on every backend, without a sum
    in 16 bits anywhere. A worker receives 2 (W - 1)/W d (bits / 32 + scale bits / (32 group_size))
    words a step: 0.13 times a dense all-reduce's with "int4" and these defaults, 0.05 times with
    "ternary" and 0.03 times with "sign". ("int2" has two scales a group.) The last group of a
    range, or of a message, is filled with zeros if that adds at most a 64th. `is_dense` leaves,
    vectors by default, travel uncompressed.

    If the devices of a host are *inner* axes of the mesh, JAX sums over these exactly, without
    compression, and only the sums are quantised. No momentum is masked, because everything is sent
    at each step.

    Args:
        format: number format: "int8", "int4", "int2" (a sign and one of two magnitudes), "ternary"
            (one magnitude or 0, in 1.6 bits), "sign", "e3m0" (a power of two in 4 bits),
            "float8_e4m3fn", "float8_e5m2", "bfloat16" or "float16". See `quantize.Format`. "int2"
            and "sign" have no zero, so they move elements without gradients, such as the rows of
            tokens that never come.
        group_size: number of consecutive values that share a scale, as a rule 32 to 1024.
        scale: format of the scales: "bfloat16", "e8m0" (powers of two, 8 bits) or "float32".
        gather: whether each worker sends its whole vector to all, quantised once, so that it
            receives W - 1 messages of d values. For two workers these are the same bytes and half
            of the roundings. A single worker rounds, too. It is for few workers, and for messages
            without collectives (`jaxsparse.feedback.by_message`).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = quantized("int4", axis_name=None)  # one worker sends nothing, nothing is rounded
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """
    kind = GatheredQuantized if static_bool("gather", gather) else Quantized
    return exchange(kind(Format(format, group_size, scale), "nearest"), **options)


def qsgd(
    bits: Literal[2, 4, 8] = 4,
    *,
    group_size: int = 1024,
    scale: Literal["max", "l2"] = "max",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    seed: int = 0,
    **options: Unpack[Options],
) -> Exchange:
    """QSGD (Alistarh et al., NeurIPS 2017): all values at each step, in 2, 4 or 8 bits.

    A worker receives 2 (W - 1)/W (bits / 32 + 1 / group_size) d words a step: with 4 bits, an
    eighth of a dense all-reduce's. They travel as in `quantized`, which has other formats, shorter
    scales and error feedback by default. (The paper has an all-gather, (W - 1) times the packed
    vector.) No momentum is masked, because everything is sent at each step.

    Args:
        bits: number of bits of a value on the wire.
        group_size: number of consecutive values that share a scale.
        scale: norm of a group that scales it: "max", or the paper's "l2", which has larger errors.
            See `quantize.QSGD`.
        rounding: way of rounding. "stochastic" is unbiased and drops its error, as in the paper.
            "nearest" keeps its error in the residual, and refuses scale="l2" with too few bits for
            the group size: the residual could grow without bound.
        seed: seed of stochastic rounding.
    """
    return exchange(Quantized(QSGD(bits, group_size, scale), rounding, seed=seed), **options)
