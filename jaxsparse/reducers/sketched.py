"""Sketched-SGD (Ivkin et al., NeurIPS 2019)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, UInt32

from jaxsparse import select, sketch
from jaxsparse.collectives import wire
from jaxsparse.layout import narrow, split_evenly
from jaxsparse.reducers.base import Laws, Reduced, bucket_seeds
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.true_top_k import deliver
from jaxsparse.settings import static_int
from jaxsparse.stream import SparseStream


@dataclasses.dataclass(frozen=True)
class SketchedReducer:
    """Heavy coordinates of the mean, found in a summed count sketch and then fetched exactly.

    Per exchange of d elements: psum of the rows x cols table, then psum of the exact values at
    oversampling * k candidates. No indices travel, since all workers decode the same table, and
    the words do not depend on the number of workers. A bucket for which this would be no less
    than d words is summed dense instead.

    Attributes:
        k: coordinates delivered, over all buckets.
        cols: columns of the sketch, over all buckets.
        rows: independent rows of the sketch; an estimate is the median over them.
        oversampling: candidates fetched exactly per coordinate delivered, the paper's P. Alg. 1
            knows none: with selection="heavymix" it must be 1.
        selection: "top_k" for Alg. 3, "heavymix" for Alg. 1.
        seed: of the hashes; each exchange derives fresh ones, the same on all workers.
        table_dtype: of the table on the wire. In a narrower one than float32, each of W workers
            clips its table to the largest power of two that the sum can hold W times.
    """

    k: int
    cols: int
    rows: int = 5
    oversampling: int = 4
    selection: Literal["top_k", "heavymix"] = "top_k"
    seed: int = 0
    table_dtype: DTypeLike = jnp.float32
    laws: ClassVar[Laws] = Laws(conserves=True, dense_at_full_budget=True)

    def __post_init__(self):
        for name in ("k", "cols", "rows", "oversampling", "seed"):
            object.__setattr__(self, name, static_int(name, getattr(self, name)))
        if self.selection not in ("top_k", "heavymix"):
            raise ValueError(
                f"selection={self.selection!r} is unknown: use 'top_k' (Alg. 3) or 'heavymix' "
                "(Alg. 1)"
            )
        if self.oversampling < 1 or (self.selection == "heavymix" and self.oversampling != 1):
            raise ValueError(
                f"oversampling={self.oversampling} must be at least 1, and 1 with "
                "selection='heavymix', which fetches the k coordinates that it delivers"
            )
        if jnp.dtype(self.table_dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"table_dtype={self.table_dtype} is unknown: use float32, bfloat16 or float16"
            )
        sketch.SketchSpec(self.rows, self.cols, self.seed)  # raises where these are wrong

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["SketchedReducer", ...]:
        """The k and cols are split in proportion to the buckets' sizes, at least 1 each."""
        if not sizes:
            return ()
        select.check_k(self.k, sum(sizes))
        return tuple(
            dataclasses.replace(self, k=max(1, k), cols=max(1, cols), seed=seed)
            for k, cols, seed in zip(
                split_evenly(self.k, sizes),
                split_evenly(self.cols, sizes),
                bucket_seeds(self.seed, len(sizes)),
            )
        )

    def candidates(self, size: int) -> int:
        """Coordinates whose exact values are fetched from a bucket of `size` elements."""
        return min(size, self.oversampling * self.k)

    def words(self, size: int) -> int:
        """Words psummed for a bucket of `size` elements: table and candidates, or all densely."""
        return min(size, self.rows * self.cols + self.candidates(size))

    def init(self, size: int) -> UInt32[Array, ""]:
        """The number of exchanges so far, from which hashes and keys are derived."""
        select.check_k(self.k, size)
        return jnp.uint32(0)

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        if self.words(x.size) == x.size:
            return DenseReducer()(x, state, axis_name=axis_name)
        spec = sketch.SketchSpec(self.rows, self.cols, self.seed)
        key = jax.random.fold_in(jax.random.key(self.seed), state)
        hash_seed = jax.random.bits(key, dtype=jnp.uint32)
        table = sketch.encode(x, spec, seed=hash_seed)
        table = narrow(table, self.table_dtype, summands=wire.axis_size(axis_name))
        table = wire.psum(table, axis_name).astype(jnp.float32)
        candidates, _ = sketch.heavy_hitters(
            table,
            spec,
            x.size,
            self.candidates(x.size),
            rule=self.selection,
            key=key,
            seed=hash_seed,
        )
        exact = wire.psum(x[candidates], axis_name) / wire.axis_size(axis_name)
        kept = select.threshold_top_k(exact, self.k)
        indices = candidates.at[kept.indices].get(mode="fill", fill_value=x.size)
        kept = SparseStream(indices, kept.values)
        return deliver(x, kept, state + jnp.uint32(1))


# Of the words that a wanted compression leaves, this share buys candidates and the rest the table:
# near the even split that served the paper best (section 5.3, figures 1 and 3).
_CANDIDATES_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class SketchedBudget:
    """Chooses k or cols or both so that the step meets a wanted compression.

    Attributes:
        compression: words of all gradient leaves over words psummed in a step, dense leaves
            counted in both.
        k: as in `SketchedReducer`; None to choose it.
        cols: as in `SketchedReducer`; None to choose it.
        settings: the reducer's other settings; its k and cols are ignored.
    """

    compression: float
    settings: SketchedReducer
    k: int | None = None
    cols: int | None = None

    def __post_init__(self):
        for name in ("k", "cols"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, static_int(name, getattr(self, name)))
        if not self.compression >= 1:
            raise ValueError(f"compression={self.compression} must be at least 1 (10 means 10x)")
        if self.k is not None and self.cols is not None:
            raise ValueError(
                f"compression={self.compression}, k={self.k} and cols={self.cols} say too much: "
                "leave one of them out"
            )

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[SketchedReducer, ...]:
        """The chosen k and cols are split as `SketchedReducer.split` does.

        Raises:
            ValueError: the dense leaves, or the given k or cols, exceed the budget.
        """
        size, settings = sum(sizes), self.settings
        # The step's one other word tells whether all gradients are finite.
        words = int((size + dense_size) / self.compression) - dense_size - 1
        k, cols = self.k, self.cols
        if self.compression == 1 and k is None and cols is None:
            k = cols = size  # nothing to save: the reducer goes dense
        if k is None:
            share = words * _CANDIDATES_SHARE if cols is None else words - settings.rows * cols
            k = int(share) // settings.oversampling
        if cols is None:
            cols = (words - settings.oversampling * k) // settings.rows
        if k < 1 or cols < 1:
            raise ValueError(
                f"compression={self.compression} of {size} compressed and {dense_size} dense "
                f"elements leaves {words} words for sketch and candidates, which makes k={k} and "
                f"cols={cols}: ask for less compression, or let fewer leaves go dense"
            )
        return dataclasses.replace(settings, k=k, cols=cols).split(sizes, dense_size)
