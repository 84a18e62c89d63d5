"""Sketched-SGD (Ivkin et al., NeurIPS 2019)."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, UInt32

from jaxsparse import select, sketch
from jaxsparse.collectives import wire
from jaxsparse.feedback.options import transformation
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.layout import narrow, split_evenly
from jaxsparse.reducers.base import (
    Budget,
    Reduced,
    Reducer,
    SeededReducer,
    bucket_seeds,
    deliver_means,
)
from jaxsparse.stream import SparseStream
from jaxsparse.systems.dense import Dense
from jaxsparse.systems.row import Case, Request, Settings, System


@dataclasses.dataclass(frozen=True)
class SketchedSGD(SeededReducer):
    """Finds heavy coordinates of the mean in a summed count sketch, and sums them exactly.

    An exchange of d elements psums the rows x cols table, and then the exact values at
    oversampling * k candidates. No indices travel, because all workers decode the same table. The
    number of words does not depend on the number of workers. If it would be no less than d, the
    bucket is summed densely instead.

    Attributes:
        k: number of coordinates delivered, over all buckets.
        cols: number of columns of the sketch, over all buckets.
        rows: number of independent rows of the sketch. An estimate is the median over them.
        oversampling: number of candidates fetched exactly for each delivered coordinate, the
            paper's P. Alg. 1 has no P: with selection="heavymix" it must be 1.
        selection: "top_k" for Alg. 3, "heavymix" for Alg. 1.
        table_dtype: dtype of the table on the wire. If it is narrower than float32, each of W
            workers clips its table to the largest power of two that the sum can hold W times.
    """

    changes_few = True
    k: int
    cols: int
    rows: int = 5
    oversampling: int = 4
    selection: Literal["top_k", "heavymix"] = "top_k"
    table_dtype: DTypeLike = "float32"

    def check(self) -> None:
        if self.oversampling < 1 or (self.selection == "heavymix" and self.oversampling != 1):
            raise ValueError(
                f"oversampling={self.oversampling} must be at least 1, and 1 with "
                "selection='heavymix', which fetches the k coordinates that it delivers"
            )
        if jnp.dtype(self.table_dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"table_dtype={self.table_dtype} is unknown: use float32, bfloat16 or float16"
            )
        # One spelling for each dtype, so that equal settings compare and print alike.
        object.__setattr__(self, "table_dtype", jnp.dtype(self.table_dtype).name)
        sketch.SketchSpec(self.rows, self.cols, self.seed)  # raises where these are wrong

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        """Splits k and cols in proportion to the buckets' sizes, into at least 1 each."""
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
        """The number of coordinates fetched exactly from a bucket of `size` elements."""
        return min(size, self.oversampling * self.k)

    def words(self, size: int) -> int:
        """The words that a bucket of `size` elements psums: table and candidates, or all d."""
        return min(size, self.rows * self.cols + self.candidates(size))

    def init(self, size: int) -> UInt32[Array, ""]:
        """The number of exchanges so far, which determines hashes and keys."""
        select.check_k(self.k, size)
        return jnp.uint32(0)

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        if self.words(x.size) == x.size:
            return Dense()(x, state, axis_name=axis_name)
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
        return deliver_means(x, kept, state + jnp.uint32(1))


# Share of the words that go to candidates. The table takes the rest. This is near the even split
# that served the paper best (section 5.3, figures 1 and 3).
_CANDIDATES_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class SketchedBudget(Budget):
    """Chooses k, cols or both so that the step reaches the compression asked for.

    Attributes:
        compression: words of all gradient leaves over the words psummed in a step. Dense leaves
            count in both.
        k: as in `SketchedSGD`. None: choose it.
        cols: as in `SketchedSGD`. None: choose it.
        settings: the reducer's other settings. Their k and cols are ignored.
    """

    compression: float
    settings: SketchedSGD
    k: int | None = None
    cols: int | None = None

    def check(self) -> None:
        if not self.compression >= 1:
            raise ValueError(f"compression={self.compression} must be at least 1 (10 means 10x)")
        if self.k is not None and self.cols is not None:
            raise ValueError(
                f"compression={self.compression}, k={self.k} and cols={self.cols} cannot all hold: "
                "leave one of them out"
            )

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        """Chooses k and cols, and splits them as `SketchedSGD.split` does.

        Raises:
            ValueError: the dense leaves, or the given k or cols, exceed the budget.
        """
        size, settings = sum(sizes), self.settings
        # One more word says whether all gradients are finite.
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


@dataclasses.dataclass(frozen=True)
class _SketchedSGD(SystemOptions):
    """Sketched-SGD (Ivkin et al., NeurIPS 2019, Alg. 3): heavy coordinates of the mean gradient.

    Workers psum a count sketch of momentum-corrected, error-corrected gradients, agree on
    oversampling * k candidates, psum those exactly, and apply the k largest. In a step, each worker
    psums rows * cols + oversampling * k words, the dense leaves and one more word, for any number
    of workers. The update is a mean in gradient units, where the paper has a sum. On a GPU replicas
    stay equal, but a repeated run may differ in the last bits: see `sketch.encode`.

    `momentum` acts before the exchange (momentum correction), and is masked at the coordinates that
    the update changes (momentum factor masking).

    Args:
        compression: ratio of *payload words*: the words of all gradient leaves over the words
            psummed in a step. Dense leaves count in both. (The paper also counts what a server
            sends back: 2d / (rows cols + Pk + k), about twice this number.) It chooses each of `k`
            and `cols` that is not given; it must be None if both are.
        k: number of coordinates of the whole tree that a step updates.
        rows: number of rows of the sketch.
        cols: number of columns of the sketch for the whole tree.
        oversampling: number of candidates fetched exactly for each updated coordinate, the paper's
            P (16 to 36 there). Default: 4, or 1 with "heavymix", which has no P.
        selection: rule for candidates. "top_k" takes the largest estimates (Alg. 3). "heavymix"
            takes those above 1/sqrt(k) of the norm, and fills up at random (Alg. 1).
        seed: seed of the hash functions, which are fresh at each step.
        table_dtype: dtype of the table on the wire. bfloat16 or float16 halve it (section 6) if the
            backend can sum them. XLA on CPU widens them to float32. Exact values stay float32.

    Returns:
        The transformation. Chain an optimizer after it.

    Raises:
        ValueError: settings out of range, or too many or too few of `compression`, `k`, `cols`.

    Example:
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
    rows: int = 5
    cols: int | None = None
    oversampling: int | None = None
    selection: Literal["top_k", "heavymix"] = "top_k"
    seed: int = 0
    table_dtype: DTypeLike = "float32"

    def made(self) -> Budget:
        k, cols, oversampling = self.k, self.cols, self.oversampling
        if oversampling is None:
            oversampling = 4 if self.selection == "top_k" else 1
        settings = SketchedSGD(
            k=1 if k is None else k,
            cols=1 if cols is None else cols,
            rows=self.rows,
            oversampling=oversampling,
            selection=self.selection,
            seed=self.seed,
            table_dtype=self.table_dtype,
        )
        if self.compression is not None:
            return SketchedBudget(self.compression, settings, k, cols)
        if k is None or cols is None:
            raise ValueError(
                f"k={k} and cols={cols}: give both, or a compression that sets the rest"
            )
        return settings


sketched_sgd = transformation(_SketchedSGD, "sketched_sgd")


def _settings(request: Request) -> Settings:
    # Candidates take half of the words, P for each delivered coordinate.
    oversampling = SketchedSGD(k=1, cols=1).oversampling
    words = 2 * oversampling * request.density * request.size
    if words >= request.size:
        raise ValueError(
            f"density={request.density:g} with {oversampling} candidates for each coordinate, and "
            "as many words of sketch, takes no fewer words than the vector: ask for less than "
            f"{1 / (2 * oversampling)}"
        )
    # Dense leaves count in both. The digits are rounded so that users can copy them.
    dense_size = request.dense_size
    compression = float(f"{(request.size + dense_size) / (words + dense_size):.8g}")
    return {"compression": compression}


SKETCHED_SGD = System(
    sketched_sgd,
    summary="[Sketched-SGD](https://arxiv.org/abs/1903.04488): count sketch, then the exact values "
    "of its candidates",
    received="8 (rows cols + P k) (W-1)/W",
    cases={
        "": Case({"k": 11, "cols": 53}, {"k": 601, "cols": 601}),
        "even_rows": Case({"k": 11, "cols": 53, "rows": 4, "seed": 3}, {"k": 601, "cols": 1}),
        "heavymix": Case(
            {"k": 31, "cols": 53, "selection": "heavymix"},
            {"k": 601, "cols": 7, "selection": "heavymix"},
        ),
    },
    settings=_settings,
)
