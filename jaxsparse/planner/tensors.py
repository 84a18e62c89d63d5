"""Chooses the tensors to compress: DRAGONN's eq. (1) (Wang et al., ICML 2022, section 4.2)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.arrays import layout
from jaxsparse.arrays.settings import check_density, entries, static_count
from jaxsparse.arrays.stream import to_dense
from jaxsparse.codecs.codec import COO
from jaxsparse.collectives.messages import MessageFormat
from jaxsparse.comm.links import Link
from jaxsparse.planner.measuring import interleaved
from jaxsparse.reducers.dragonn import extractor


def time_codec(
    sizes: Sequence[int], workers: int, density: float, *, repeats: int = 10
) -> dict[int, float]:
    """T_comp of eq. (1) on this process's first device, by number of elements.

    These are medians of compiled programs: one selects by `dragonn`'s extraction, makes the message
    and the new residual, and one decodes the messages of all workers into one vector.
    """
    check_density(density)
    extract = extractor("slot_max")

    def timed(size: int) -> float:
        k = entries(density, static_count("sizes", size))
        message = MessageFormat(size, k, "sum", jnp.float32, COO)

        @jax.jit
        def encode(x: jax.Array) -> Any:
            sent = to_dense(extract(x, k, jnp.uint32(0)), size)
            return message.pack(sent), x - sent

        x = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
        messages, decode = jnp.stack([encode(x)[0]] * workers), jax.jit(message.merge_all)
        runs = {"encode": lambda: encode(x), "decode": lambda: decode(messages)}
        return sum(map(statistics.median, interleaved(runs, repeats).values()))

    return {size: timed(size) for size in sizes}


class TensorSelection(NamedTuple):
    """The result of `select_tensors`: seconds that compressing saves, by a leaf's key path."""

    saving: Mapping[str, float]

    def is_dense(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the leaf travels uncompressed. Pass this method as `is_dense`."""
        if path not in self.saving:
            raise ValueError(
                f"leaf{path} of shape {shape} was not selected among: call select_tensors with the "
                "tree that is trained"
            )
        return not self.saving[path] > 0


def select_tensors(
    params: Any,
    *,
    workers: int,
    link: Link,
    density: float,
    seconds: Mapping[int, float],
    is_dense: layout.IsDense = layout.small_or_vector,
) -> TensorSelection:
    """Decides which leaves are worth compressing, from a model of times.

    A tensor of d elements is compressed if T_comp(d) < T_full(d) - T_spr(d), with

        T_full = 2 (W - 1) (alpha + 4 d / (W B))    ring all-reduce
        T_spr = (W - 1) (alpha + gamma 4 d / B)     ring all-gather of compressed messages

    gamma is the bytes of a message over those of the tensor, 2 * density. (The paper prints 1 / W
    where the saving has 2 / W.) The model looks at each tensor by itself. Here all dense leaves
    travel in one message, so small ones cost next to nothing, and travel dense by default.

    Args:
        params: tree of arrays or of `jax.ShapeDtypeStruct`s like the gradients.
        workers: number of workers, W.
        link: each worker's link, with latency alpha and bandwidth B.
        density: entries of a message as a share of the elements, in (0, 1].
        seconds: T_comp by number of elements, as from `time_codec`, with straight lines between.
            Beyond the largest, times grow in proportion.
        is_dense: the leaves that travel dense in any case.

    >>> params = {"bias": jnp.zeros(100), "kernel": jnp.zeros((1000, 1000))}
    >>> link = Link(latency=50e-6, bandwidth=1.25e9)
    >>> found = select_tensors(
    ...     params, workers=8, link=link, density=0.001, seconds={10**6: 2e-3}
    ... )
    >>> {name: round(1e3 * saved, 3) for name, saved in found.saving.items()}
    {"['bias']": -inf, "['kernel']": 3.905}
    """
    others = static_count("workers", workers) - 1
    check_density(density)
    if min(seconds, default=0) < 1 or not all(0 <= x < math.inf for x in seconds.values()):
        raise ValueError(
            f"seconds={seconds!r} must have times by number of elements: see time_codec"
        )
    sizes, saving = sorted(seconds), {}
    times = [seconds[size] for size in sizes]
    for path, shape in layout.named_leaves(params):
        saving[path] = -math.inf
        if (d := math.prod(shape)) and not is_dense(path, shape):
            message = MessageFormat(d, entries(density, d), "sum", jnp.float32, COO)
            full = link.seconds(2 * others, 2 * others / workers * 4 * d)
            sparse = link.seconds(others, others * 4 * message.words)
            beyond = max(1.0, d / sizes[-1])
            saving[path] = full - sparse - beyond * float(np.interp(d, sizes, times))
    return TensorSelection(saving)
