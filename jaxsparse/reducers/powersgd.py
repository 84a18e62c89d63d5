"""PowerSGD: the gradient of each layer as a matrix of low rank."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from jaxsparse.arrays import hashing
from jaxsparse.arrays.layout import cut, join
from jaxsparse.arrays.magnitude import LARGEST, clipped, scaled
from jaxsparse.arrays.settings import at_least, static_float
from jaxsparse.comm import wire
from jaxsparse.reducers.base import Conservation, Kept, SeededReducer, Sums
from jaxsparse.reducers.dense import Dense
from jaxsparse.reducers.matrices import Matrix, MatrixReducer

Iteration = Literal["alternating", "full"]
# A factor of a pair: 0 is left and has a matrix's rows, 1 is right and has its columns. (P and Q in
# the paper.)
Side = Literal[0, 1]

# Size of the noise: a few times the rounding of a unit vector. It moves only directions that
# rounding determines.
_NOISE = 4 * float(np.finfo(np.float32).eps)
# Largest rank at which a product of factors is computed as a sum of outer products, which XLA fuses
# with its readers. Matrix products are stored first, which takes longer at low ranks.
_FUSED_RANK = 16


class PowerState(NamedTuple):
    """The factors of the last mean, where the next exchange starts. Equal on all workers."""

    step: UInt32[Array, ""]  # number of exchanges so far
    # Left and right: float32, r vectors for each matrix, end to end; zeros at first. Or (), if no
    # matrix has factors, because Orbax saves no empty arrays.
    factors: tuple[Float[Array, " n"], ...]


class _Half(NamedTuple):
    """The result of half an iteration for one worker. Lists have one array for each matrix."""

    mean: tuple[list[Array], list[Array]]  # left and right factors of the mean
    own: tuple[list[Array], list[Array]]  # factors of the part that the residual lacks
    is_sent: list[Array]
    whole: list[Array]  # sums of the matrices that travel whole


@dataclasses.dataclass(frozen=True)
class PowerSGD(MatrixReducer, SeededReducer):
    """PowerSGD (Vogels et al., NeurIPS 2019): sums of factors of low rank, by all-reduce.

    The first axes of a leaf are a matrix's rows and the last ones its columns, cut where a row and
    a column together are shortest. For each matrix A of residual plus gradient, workers share r
    orthonormal vectors, project A on them, and all-reduce the projections. One step of a power
    iteration, warm-started from the last step's factors, is enough. The residual keeps the rest.
    Vectors travel dense, and so does each matrix that factors would not make `min_compression_rate`
    times smaller. All factors and such matrices travel in one message.

    The two forms differ in bytes and latency:

    * "alternating", as in the authors' later code (epfml/powersgd): half an iteration a step. Even
      steps project columns on left factors, odd steps project rows on right ones. A step has one
      all-reduce of r m or r n words for each matrix, r (n + m)/2 on average.
    * "full", as published (Algorithm 1): both halves in each step, so two all-reduces, one after
      the other, of r (n + m) words together.

    Low ranks approximate the first gradients badly, so start dense. With
    `jaxsparse.reducers.Staged((Dense(), PowerSGD(2)), (100,))` for a reducer, the first 100 steps
    send everything and leave no residual.

    With FSDP or tensor parallelism, each device factorises its shard of a parameter as a matrix of
    its own. Together, p shards have up to p times the rank, which approximates better. They also
    send more, because factors of the uncut side are not divided. A shard that is too small by
    `min_compression_rate` travels whole.

    Factors are no exact zeros. Those of the first steps are drawn, so that elements without
    gradients move, such as the rows of tokens that never come, until the residual has taken it
    back. Later they move by roundings, which an Adam behind the exchange makes steps of.

    No momentum is masked. The paper's momentum is that of the mean instead: chain
    `optax.trace(0.9)`, or an optimizer with momentum, behind it.

    Args:
        rank: r, the rank of the factors of each matrix, at least 1. It is min(n, m) where that is
            less.
        iteration: form of the iteration: "alternating", with one all-reduce a step, or "full", with
            two.
        min_compression_rate: least ratio of a matrix's elements to its factors'. A matrix is
            compressed if r (n + m) times this is below n m.
        seed: seed of the first vectors, and of those that replace zeros.
    """

    rank: Annotated[int, at_least(1, "1 to 4 are usual")]
    _: dataclasses.KW_ONLY
    iteration: Iteration = "alternating"
    min_compression_rate: float = 2.0

    def check(self) -> None:
        super().check()
        if not 0 <= static_float("min_compression_rate", self.min_compression_rate) < math.inf:
            raise ValueError(
                f"min_compression_rate={self.min_compression_rate} must be at least 0 and finite: "
                "2 compresses the matrices that have twice as many elements as their factors"
            )

    @property
    def conservation(self) -> Conservation:
        """Products of factors round."""
        return "to group rounding"

    def rank_of(self, matrix: Matrix) -> int:
        """The rank of a matrix's factors, or 0 if it travels whole."""
        rank = min(self.rank, matrix.rows, matrix.columns)
        elements = rank * (matrix.rows + matrix.columns)
        is_smaller = elements * self.min_compression_rate < matrix.rows * matrix.columns
        return rank if is_smaller else 0

    def init(self, size: int) -> PowerState:
        """Zeros, which the first exchange replaces by random directions."""
        left, right = (sum(map(math.prod, self._shapes(size, side))) for side in (0, 1))
        zeros = jnp.zeros(left, jnp.float32), jnp.zeros(right, jnp.float32)
        return PowerState(jnp.uint32(0), zeros if left else ())

    def reduce(
        self, x: Float[Array, " d"], state: PowerState, axis_name: str | None
    ) -> tuple[Sums, Kept]:
        """A matrix counts as not sent if the sum of its factors overflows."""
        if not state.factors:
            return Dense().reduce(x, state, axis_name)
        state = state._replace(factors=wire.varying_as(state.factors, x, axis_name))
        if self.iteration == "full":
            half = self._full(x, state, axis_name)
        else:
            # Branches return factors only, so that XLA fuses the products with their readers.
            halves = [functools.partial(self._half, axis_name=axis_name, given=i) for i in (0, 1)]
            is_even = state.step % jnp.uint32(2) == 0
            half = jax.lax.cond(is_even, *halves, x, state)
        matrices, others = self._divided(x)
        workers = wire.axis_size(axis_name)
        sums = [workers * mean for mean in map(_product, *half.mean)] + half.whole
        residuals = list(map(_rest, matrices, map(_product, *half.own), half.is_sent))
        residuals += map(jnp.zeros_like, others)
        left, right = map(join, half.mean)
        state = PowerState(state.step + jnp.uint32(1), (left, right))
        return Sums(self._united(sums), x.size), Kept(self._united(residuals), None, state)

    def _full(self, x: Array, state: PowerState, axis_name: str | None) -> "_Half":
        """Left factors from right ones, then right ones. The residual is what the mean lacks."""
        matrices, _ = self._divided(x)
        own = [_project(a, basis, 1) for a, basis in zip(matrices, self._bases(x.size, state, 1))]
        totals = [_checked(total)[0] for total in _psum(own, axis_name)]
        state = state._replace(factors=(join(totals), state.factors[1]))
        half = self._half(x, state, axis_name=axis_name, given=0)
        return half._replace(own=half.mean)

    def _half(self, x: Array, state: PowerState, *, axis_name: str | None, given: Side) -> "_Half":
        """Makes the other factors from the `given` ones. The residual is what own factors lack."""
        matrices, others = self._divided(x)
        bases = self._bases(x.size, state, given)
        own = [_project(a, basis, given) for a, basis in zip(matrices, bases)]
        sums = _psum([*own, *others], axis_name)
        totals, is_sent = zip(*map(_checked, sums[: len(own)]))
        means = [total / wire.axis_size(axis_name) for total in totals]
        pair = lambda made: (bases, made) if given == 0 else (made, bases)
        local = wire.varying(pair(own), axis_name)
        return _Half(pair(means), local, list(is_sent), sums[len(own) :])

    def _ranks(self, size: int) -> list[int]:
        return list(map(self.rank_of, self.matrices_of(size)))

    def _shapes(self, size: int, side: Side) -> list[tuple[int, int, int]]:
        """The shapes of the factors of one side: (stack, rank, rows or columns)."""
        return [
            (matrix.stack, rank, matrix[1 + side])
            for matrix, rank in zip(self.matrices_of(size), self._ranks(size))
            if rank
        ]

    def _divided(self, x: Array) -> tuple[list[Array], list[Array]]:
        """The matrices that factors compress, and the others."""
        parts = list(zip(self.cut(x), self._ranks(x.size)))
        return [a for a, rank in parts if rank], [a for a, rank in parts if not rank]

    def _united(self, parts: Sequence[Array]) -> Array:
        """The vector of the parts that `_divided` returns, one list behind the other."""
        ranks = self._ranks(sum(part.size for part in parts))
        count = sum(map(bool, ranks))
        matrices, others = iter(parts[:count]), iter(parts[count:])
        return self.joined([next(matrices if rank else others) for rank in ranks])

    def _bases(self, size: int, state: PowerState, side: Side) -> list[Array]:
        """The factors of one side, orthonormalised."""
        flat = state.factors[side]
        key = hashing.combine(self.seed, state.step, side)
        bits = hashing.keyed(jnp.arange(flat.size, dtype=jnp.uint32), key)
        noise = jax.lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * 2.0**-31
        shapes = self._shapes(size, side)
        pairs = list(zip(*cut((flat, noise), shapes)))
        # Factors of equal shapes are computed at once: a model of many layers has few shapes.
        bases: list[Array] = [flat] * len(shapes)
        for shape in dict.fromkeys(shape[1:] for shape in shapes):
            members = [i for i, each in enumerate(shapes) if each[1:] == shape]
            vectors, random = (jnp.concatenate(x) for x in zip(*(pairs[i] for i in members)))
            ends = list(itertools.accumulate(shapes[i][0] for i in members))[:-1]
            for i, basis in zip(members, jnp.split(_orthonormal(vectors, random), ends)):
                bases[i] = basis
        return bases


def _orthonormal(
    vectors: Float[Array, "stack r n"], noise: Float[Array, "stack r n"]
) -> Float[Array, "stack r n"]:
    """An orthonormal basis of the vectors, random in the directions that these leave open.

    It is Gram-Schmidt in float32, twice for each vector, which makes vectors as orthogonal as
    Householder's QR does. A vector that is zero, or depends on those before it, becomes a random
    one, of `noise` in [-1, 1): as a zero it would stay zero for ever, and the rank would be lost.
    Only elementwise operations and sums compute the basis, so that all workers get the same bits.
    """
    shares, _ = scaled(vectors, axis=2)
    start = _normalised(shares) + noise * (_NOISE / math.sqrt(vectors.shape[2]))

    def add(i: Array, basis: Array) -> Array:
        vector = jax.lax.dynamic_index_in_dim(start, i, axis=1)
        for _ in range(2):
            vector = _normalised(vector)
            shares = jnp.sum(basis * vector, axis=2, keepdims=True)
            vector = vector - jnp.sum(shares * basis, axis=1, keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(basis, _normalised(vector), i, axis=1)

    return jax.lax.fori_loop(0, vectors.shape[1], add, jnp.zeros_like(start))


def _normalised(vectors: Array) -> Array:
    """The vectors scaled to length 1. Zeros stay zeros."""
    square = jnp.sum(vectors * vectors, axis=2, keepdims=True)
    return vectors * jnp.where(square > 0, jax.lax.rsqrt(square), 0)


def _project(
    matrices: Float[Array, "stack rows columns"], basis: Float[Array, "stack r n"], given: Side
) -> Float[Array, "stack r m"]:
    """The other factor: A^T times the basis on the left, or A times the basis on the right."""
    sum_over = "srn,snm->srm" if given == 0 else "srm,snm->srn"
    return jnp.einsum(sum_over, basis, matrices, precision=jax.lax.Precision.HIGHEST)


def _product(
    left: Float[Array, "stack r rows"], right: Float[Array, "stack r columns"]
) -> Float[Array, "stack rows columns"]:
    """The matrices that left and right factors make."""
    if left.shape[1] > _FUSED_RANK:
        return jnp.einsum("srn,srm->snm", left, right, precision=jax.lax.Precision.HIGHEST)
    outer = (left[:, i, :, None] * right[:, i, None, :] for i in range(left.shape[1]))
    return functools.reduce(operator.add, outer)


def _checked(total: Float[Array, "stack r m"]) -> tuple[Array, Bool[Array, "stack 1 1"]]:
    """Sums of factors, zeros for each matrix whose product could overflow, and a mask of others.

    NaN and inf of any worker end up in the sum, so all workers decide alike.
    """
    limit = LARGEST / (2 * total.shape[1])
    is_sent = jnp.all(jnp.abs(total) <= limit, axis=(1, 2), keepdims=True)
    return jnp.where(is_sent, total, 0), is_sent


def _rest(matrix: Array, delivered: Array, is_sent: Array) -> Array:
    # A difference can overflow, and an inf would stay for ever.
    rest = clipped(matrix - delivered)
    return jnp.where(is_sent, rest, matrix)


def _psum(parts: Sequence[Array], axis_name: str | None) -> list[Array]:
    """The sums of several arrays, in one message."""
    total = wire.psum(join(parts), axis_name)
    return list(cut(total, [part.shape for part in parts]))
