"""Sketched-SGD (Ivkin et al., NeurIPS 2019)."""

import dataclasses
import warnings
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, UInt32

from jaxsparse.arrays.layout import narrow, split_evenly
from jaxsparse.arrays.settings import check_k, static_float
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.comm import wire
from jaxsparse.reducers.base import (
    Kept,
    Reducer,
    SeededReducer,
    Sums,
    bucket_seeds,
    keep_rest,
)
from jaxsparse.reducers.dense import Dense
from jaxsparse.select.top_k import threshold_top_k
from jaxsparse.sketch.codec import encode
from jaxsparse.sketch.heavy import heavy_hitters
from jaxsparse.sketch.tiles import SketchSpec

# Share of the words that go to candidates of "top_k". The table takes the rest. 0.5 and 0.75 differ
# little, and 0.25 is worse, as in the paper (|S| / Pk of 0.35 to 1.7 in section 5.3; more did
# worse).
_CANDIDATES_SHARE = 0.5
# Compression up to which one row is at least as good as three. A large coordinate pollutes a column
# of each row, and with a single row it so makes 2 x compression false candidates. With three rows
# few of them stay.
_ONE_ROW = 10
# Columns for each coordinate of "heavymix". The noise of a row's estimate is then a third of the
# threshold. With three rows fewer than k of d normal values pass, up to a compression of 900.
_HEAVYMIX_COLUMNS = 8


def _table_dtype(name: str, value: Any) -> str:
    """The dtype's name: one spelling, so that equal settings compare and print alike."""
    try:
        found = jnp.dtype(value).name
    except TypeError:
        found = "none"
    if found not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{name}={value} is unknown: use float32, bfloat16 or float16")
    return found


TableDType = Annotated[DTypeLike, _table_dtype]


@dataclasses.dataclass(frozen=True)
class SketchedSGD(SeededReducer):
    """Sketched-SGD (Ivkin et al., NeurIPS 2019, Alg. 3): heavy coordinates of the mean gradient.

    Workers psum a count sketch of momentum-corrected, error-corrected gradients, agree on
    oversampling * k candidates, psum those exactly, and apply the k largest. In a step, each worker
    psums rows * cols + oversampling * k words, the dense leaves and one more word, for any number
    of workers. If a bucket would take no fewer words than it has elements, it is summed densely
    instead. The update is a mean in gradient units, where the paper has a sum.

    What the sketch recovers: an estimate is off by about ||x|| / sqrt(cols). So a coordinate is
    found if its square is several times ||x||^2 / cols. With the default sizes at a compression of
    10 that is some 5 times the root mean square of x. Gradients with heavy tails have such
    coordinates. Residuals of small dense models can be too flat: candidates are then drawn almost
    blindly, what waits for its turn is stale, and `random_k` with as many words and `decay=0` may
    train better (`benchmarks/sketch_sizing.py`, `benchmarks/sketched_training.py`). Compare the
    two. With fewer than k columns even k equal coordinates that held all of the norm would drown in
    noise: `init` then warns. Some 6 % of the candidates are not those of the largest estimates
    (`sketch.heavy_hitters`).

    The learning rate stays behind the exchange, so what waits in the residual is applied at the
    rate of the step that delivers it. Momentum is masked at the coordinates that the update changes
    (momentum factor masking).

    Args:
        compression: ratio of *payload words*: the words of all gradient leaves over the words
            psummed in a step. Dense leaves count in both. (The paper also counts what a server
            sends back: 2d / (rows cols + Pk + k), about twice this number.) It chooses each of `k`
            and `cols` that is not given; it must be None if both are.
        k: number of coordinates of the whole tree that a step updates.
        rows: number of rows of the sketch. Default: 3, or 1 with "top_k" and a compression of at
            most 10. The paper has 5 and 15.
        cols: number of columns of the sketch for the whole tree.
        oversampling: number of candidates fetched exactly for each updated coordinate, the paper's
            P (16 to 36 there). Default: rows + 1, or 1 with "heavymix", which has no P. Candidates
            and table then share the words evenly, and cols is at least k.
        selection: rule for candidates. "top_k" takes nearly the largest estimates (Alg. 3).
            "heavymix" takes those of them above 1/sqrt(k) of the norm, and fills up at random (Alg.
            1). A compression then gives it 8 columns for each of k, so that noise alone seldom
            passes: Lemma 1 needs the order of k, and with k columns 6 times k coordinates of normal
            data pass at 10x.
        table_dtype: dtype of the table on the wire. bfloat16 or float16 halve it (section 6) if the
            backend can sum them. XLA on CPU widens them to float32. Exact values stay float32. The
            table is clipped so that the sum over workers does not overflow. A compression counts
            columns as words of float32, whatever their dtype.

    Example:
        >>> from jaxsparse import sketched_sgd
        >>> import jax, jax.numpy as jnp, optax
        >>> tx = optax.chain(
        ...     sketched_sgd(k=2, cols=16, rows=3, axis_name=None, momentum=0.9), optax.sgd(0.1)
        ... )
        >>> params = {"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}
        >>> state = tx.init(params)
        >>> updates, state = jax.jit(tx.update)(params, state)
        >>> int(jnp.count_nonzero(updates["kernel"])), int(jnp.count_nonzero(updates["bias"]))
        (2, 32)
    """

    compression: float | None = None
    _: dataclasses.KW_ONLY
    k: int | None = None
    rows: int | None = None
    cols: int | None = None
    oversampling: int | None = None
    selection: Literal["top_k", "heavymix"] = "top_k"
    table_dtype: TableDType = "float32"

    def check(self) -> None:
        if self.compression is None and (self.k is None or self.cols is None):
            raise ValueError(
                f"k={self.k} and cols={self.cols}: give compression=10 for a tenth of the words, "
                "or both"
            )
        if self.compression is not None:
            if not static_float("compression", self.compression) >= 1:
                raise ValueError(
                    f"compression={self.compression} must be at least 1 (10 means 10x)"
                )
            if self.k is not None and self.cols is not None:
                raise ValueError(
                    f"compression={self.compression}, k={self.k} and cols={self.cols} cannot all "
                    "hold: leave one of them out"
                )
        if self.fetched < 1 or (self.selection == "heavymix" and self.fetched != 1):
            raise ValueError(
                f"oversampling={self.oversampling} must be at least 1, and 1 with "
                "selection='heavymix', which fetches the k coordinates that it delivers"
            )
        cols = 1 if self.cols is None else self.cols
        SketchSpec(self.used_rows, cols, self.seed)  # raises where these are wrong

    @property
    def used_rows(self) -> int:
        if self.rows is not None:
            return self.rows
        few = self.compression is not None and self.compression <= _ONE_ROW
        return 1 if few and self.selection == "top_k" else 3

    @property
    def fetched(self) -> int:
        """The number of candidates fetched exactly for each coordinate delivered."""
        if self.oversampling is not None:
            return self.oversampling
        return self.used_rows + 1 if self.selection == "top_k" else 1

    def sized(self, size: int, dense_size: int = 0) -> tuple[int, int]:
        """K and cols for `size` compressed elements in all, beside `dense_size` dense ones."""
        k, cols, compression = self.k, self.cols, self.compression
        if compression == 1 and k is None and cols is None:
            return size, size  # nothing to save: the reducer goes dense
        if compression is not None:
            # One more word says whether all gradients are finite.
            words = int((size + dense_size) / compression) - dense_size - 1
            if k is None:
                if cols is not None:
                    share: float = words - self.used_rows * cols
                elif self.selection == "top_k":
                    share = words * _CANDIDATES_SHARE
                else:
                    share = words / (_HEAVYMIX_COLUMNS * self.used_rows + 1)
                k = int(share) // self.fetched
            if cols is None:
                cols = (words - self.fetched * k) // self.used_rows
            if k < 1 or cols < 1:
                raise ValueError(
                    f"compression={compression} of {size} compressed and {dense_size} dense "
                    f"elements leaves {words} words for sketch and candidates, which makes k={k} "
                    f"and cols={cols}: ask for less compression, or let fewer leaves go dense"
                )
        assert k is not None
        assert cols is not None
        return k, cols

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        """Splits k and cols in proportion to the buckets' sizes, into at least 1 each."""
        if not sizes:
            return ()
        k, cols = self.sized(sum(sizes), dense_size)
        check_k(k, sum(sizes))
        shares = zip(split_evenly(k, sizes), split_evenly(cols, sizes))
        return tuple(
            dataclasses.replace(
                self,
                compression=None,
                k=max(1, own_k),
                rows=self.used_rows,
                cols=max(1, own_cols),
                oversampling=self.fetched,
                seed=seed,
            )
            for (own_k, own_cols), seed in zip(shares, bucket_seeds(self.seed, len(sizes)))
        )

    def candidates(self, size: int) -> int:
        """The number of coordinates fetched exactly from a bucket of `size` elements."""
        return min(size, self.fetched * self.sized(size)[0])

    def words(self, size: int) -> int:
        """The words that a bucket of `size` elements psums: table and candidates, or all d."""
        return min(size, self.used_rows * self.sized(size)[1] + self.candidates(size))

    def init(self, size: int) -> UInt32[Array, ""]:
        """The number of exchanges so far, which determines hashes and keys."""
        k, cols = self.sized(size)
        check_k(k, size)
        if cols < k and self.words(size) < size:
            warnings.warn(
                f"cols={cols} are too few for k={k} coordinates: even if these held all of the "
                "norm, estimates would be noise, and candidates drawn blindly, as by random_k. "
                "Give at least k columns, or a smaller k",
                stacklevel=2,
            )
        return jnp.uint32(0)

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        if self.words(x.size) == x.size:
            return Dense().reduce(x, state, axis_name)
        k, cols = self.sized(x.size)
        spec = SketchSpec(self.used_rows, cols, self.seed)
        key = jax.random.fold_in(jax.random.key(self.seed), state)
        hash_seed = jax.random.bits(key, dtype=jnp.uint32)
        table = encode(x, spec, seed=hash_seed)
        table = narrow(table, self.table_dtype, summands=wire.axis_size(axis_name))
        table = wire.psum(table, axis_name).astype(jnp.float32)
        candidates, _ = heavy_hitters(
            table,
            spec,
            x.size,
            self.candidates(x.size),
            rule=self.selection,
            key=key,
            seed=hash_seed,
        )
        largest = threshold_top_k(wire.psum(x[candidates], axis_name), k)
        indices = candidates.at[largest.indices].get(mode="fill", fill_value=x.size)
        return keep_rest(x, SparseStream(indices, largest.values), state + jnp.uint32(1))
