"""DeMo: momentum that stays on the workers, which send its largest cosine coefficients."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.magnitude import LARGEST, largest_magnitude
from jaxsparse.arrays.settings import check_k
from jaxsparse.arrays.stream import SparseStream, add_to, to_dense
from jaxsparse.codecs.elias_fano import EliasFano
from jaxsparse.reducers.base import Conservation, Gathered, Kept, Sums
from jaxsparse.reducers.matrices import Matrix, MatrixReducer
from jaxsparse.select.groups import count_entries, group_top_k

ValueBits = Literal[2, 4, 8, 16, 32]

_LARGEST_CHUNK = 256  # indices in its tiles have 16 bits
_MOST_WORKERS = 2**20  # whose sums may not overflow
_MOST = 2**30  # largest number of elements of a part, so that int32 indices count them


class _Tiling(NamedTuple):
    """The tiles of a matrix. Tiles at its lower and right edges may stick out."""

    height: int
    width: int
    down: int  # number of tiles in a column
    across: int  # number of tiles in a row

    @property
    def size(self) -> int:
        return self.height * self.width


@dataclasses.dataclass(frozen=True)
class DeMo(Gathered, MatrixReducer):
    """DeMo (Peng, Quesnelle and Kingma, 2024): decoupled momentum, in cosine coefficients.

    Each worker keeps a momentum of its own, M. In a step, with the paper's beta = `decay`:

        M = decay * M + g
        q = the k largest cosine coefficients of each tile of M
        M = M - inverse transform of q
        u = inverse transform of the mean of all workers' q

    u is the update. So M is the residual of error feedback, and it fades. It holds all that was not
    sent, and the rounding of values on the wire.

    A leaf is a matrix, or a stack of matrices, as in `powersgd`. A matrix is cut into the fewest
    tiles of at most `chunk` rows and columns, of nearly equal sides, and a tile that sticks out is
    filled with zeros. (The published code takes the largest divisor of a side up to `chunk`, which
    is the same for the sides of usual models, and 1 for a larger prime.) Vectors go dense by
    default, so that their u is the mean gradient. Otherwise they are matrices of one row.

    The published step is signed. It has no other optimizer behind it, though any may stand there:

        tx = optax.chain(jaxsparse.contrib.demo(), optax.scale_by_sign(),
                         optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(4e-4))

    The published code adds g to M times the learning rate. At a constant rate, the sign hides this
    factor. Under a schedule, old gradients would keep their old rates. All elements of a tile move
    by the learning rate if any coefficient of it arrives, also those without gradients, such as the
    rows of tokens that never come.

    A worker receives W - 1 messages of 12 + `value_bits` bits an entry of tiles of 64 x 64. On a
    mesh with inner axes each device transforms its own shards.

    Args:
        k: number of coefficients of each tile that a worker sends. Smaller tiles send k, too, or
            all. With k = chunk**2, u is the mean gradient and M stays 0, up to rounding.
        chunk: the largest side of a tile, at most 256. An index takes some 9 bits.
        value_bits: number of bits of a value: 16 (bfloat16), 32 (exact), or 2, 4 or 8, as in
            `chunked_top_k`.

    Example:
        >>> from jaxsparse.contrib import demo
        >>> tx = demo(1, 4, axis_name=None, is_dense=lambda path, shape: False)
        >>> grads = jnp.float32([1, 2, 3, 4])
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> [round(u, 4) for u in updates.tolist()]
        [2.5, 2.5, 2.5, 2.5]
    """

    k: int = 32
    chunk: int = 64
    _: dataclasses.KW_ONLY
    value_bits: ValueBits = 16

    def check(self) -> None:
        chunk = self.chunk
        if not 1 <= chunk <= _LARGEST_CHUNK:
            raise ValueError(
                f"chunk={chunk} must lie between 1 and {_LARGEST_CHUNK}: it is the side of a "
                "tile, and 64 is usual"
            )
        check_k(self.k, chunk**2, f"chunk**2={chunk**2}")
        _ = self.codec  # raises where it is wrong

    @property
    def conservation(self) -> Conservation:
        """Transforms round."""
        return "to group rounding"

    @property
    def codec(self) -> EliasFano:
        return EliasFano(self.value_bits)

    def tiling(self, matrix: Matrix) -> _Tiling:
        """The fewest tiles of at most `chunk` rows and columns, of nearly equal sides.

        >>> DeMo().tiling(Matrix(1, 768, 100))[:2], DeMo().tiling(Matrix(1, 1, 127))[:2]
        ((64, 50), (1, 64))
        """
        down, across = (-(-n // self.chunk) for n in matrix[1:])
        return _Tiling(-(-matrix.rows // down), -(-matrix.columns // across), down, across)

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        """Tiles with elements too large for the transform stay."""
        if not x.size:  # no size is too large, because an index counts within a tile
            raise ValueError(
                "x.size=0 must lie between 1 and any size: skip a vector that is empty"
            )
        messages, own = [], []
        for part in self._parts(x):
            q = _transformed(_small_enough(part))
            tile_size = math.prod(q.shape[1:])
            stream = group_top_k(q.reshape(-1), min(self.k, tile_size), tile_size)
            messages.append(self.codec.encode(stream, q.size))
            sent = stream._replace(values=self.codec.rounded(stream, q.size))
            own.append(_inverse(to_dense(sent, q.size).reshape(q.shape)))
        return jnp.concatenate(messages), Kept(x - self._whole(own, x.size), None, state)

    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        """No sum overflows, because no tile has too large elements."""
        parts = jax.eval_shape(self._parts, jax.ShapeDtypeStruct((size,), jnp.float32))
        sums, start = [], 0
        for count, height, width in (part.shape for part in parts):
            d = count * width * height
            n = count_entries(d, min(self.k, width * height), width * height)
            end = start + self.codec.words(n, d)
            read = lambda m, n=n, d=d: self.codec.decode(m, n, d, jnp.float32)
            added = _added(messages[:, start:end], read, d)
            sums.append(_inverse(added.reshape(count, width, height)))
            start = end
        return Sums(self._whole(sums, size), size)

    def _parts(self, x: Float[Array, " d"]) -> list[Float[Array, "tiles height width"]]:
        """The tiles of all matrices, in parts of at most _MOST elements and of equal sides."""
        tiles: dict[tuple[int, int], list[Array]] = {}
        for matrix in self.cut(x):
            t = self.tiling(Matrix(*matrix.shape))
            rest = t.down * t.height - matrix.shape[1], t.across * t.width - matrix.shape[2]
            padded = jnp.pad(matrix, ((0, 0), (0, rest[0]), (0, rest[1])))
            grid = padded.reshape(-1, t.height, t.across, t.width).swapaxes(1, 2)
            tiles.setdefault(t[:2], []).append(grid.reshape(-1, *t[:2]))
        return [
            whole[start : start + _MOST // math.prod(sides)]
            for sides, own in tiles.items()
            for whole in [own[0] if len(own) == 1 else jnp.concatenate(own)]
            for start in range(0, len(whole), _MOST // math.prod(sides))
        ]

    def _whole(
        self, parts: Sequence[Float[Array, "tiles height width"]], size: int
    ) -> Float[Array, " d"]:
        """The inverse of `_parts`."""
        tiles: dict[tuple[int, ...], Array] = {}
        for part in parts:
            sides = part.shape[1:]
            tiles[sides] = jnp.concatenate([tiles[sides], part]) if sides in tiles else part
        matrices, used = [], dict.fromkeys(tiles, 0)
        for matrix in self.matrices_of(size):
            t = self.tiling(matrix)
            start, count = used[t[:2]], matrix.stack * t.down * t.across
            used[t[:2]] += count
            grid = tiles[t[:2]][start : start + count]
            grid = grid.reshape(-1, t.across, t.height, t.width).swapaxes(1, 2)
            whole = grid.reshape(matrix.stack, t.down * t.height, t.across * t.width)
            matrices.append(whole[:, : matrix.rows, : matrix.columns])
        return self.joined(matrices)


def _added(
    messages: UInt32[Array, "n words"], read: Callable[[Array], SparseStream], size: int
) -> Float[Array, " d"]:
    """The sum of the streams that `read` makes of the messages, one after the other."""
    add = lambda total, message: (add_to(total, read(message)), None)
    return jax.lax.scan(add, to_dense(read(messages[0]), size), messages[1:])[0]


def _small_enough(tiles: Float[Array, "tiles h w"]) -> Float[Array, "tiles h w"]:
    """The tiles, with zeros in place of each tile whose transform or sum could overflow.

    A coefficient is at most sqrt(h w) times the largest element, its rounding twice that, and an
    element of the inverse transform at most sqrt(h w) times the largest coefficient.
    """
    largest = largest_magnitude(tiles.reshape(len(tiles), -1), axis=1)
    limit = LARGEST / (4 * _MOST_WORKERS * math.prod(tiles.shape[1:]))
    return jnp.where((largest <= limit)[:, None, None], tiles, 0)


def _transformed(tiles: Float[Array, "tiles h w"]) -> Float[Array, "tiles w h"]:
    """The orthonormal cosine transform (DCT-II) of the rows and columns of each tile, transposed.

    Products along the last axis are the fast ones. One transposition between two is enough.
    """
    return _times(_times(tiles, _basis(tiles.shape[2]).T).swapaxes(1, 2), _basis(tiles.shape[1]).T)


def _inverse(coefficients: Float[Array, "tiles w h"]) -> Float[Array, "tiles h w"]:
    """The tiles that have these transforms."""
    _, width, height = coefficients.shape
    return _times(_times(coefficients, _basis(height)).swapaxes(1, 2), _basis(width))


def _times(tiles: Float[Array, "tiles m n"], basis: np.ndarray) -> Float[Array, "tiles m n"]:
    if len(basis) == 1:
        return tiles
    return jnp.einsum("tij,jk->tik", tiles, jnp.asarray(basis), precision=jax.lax.Precision.HIGHEST)


@functools.cache
def _basis(n: int) -> np.ndarray:
    """The matrix A of the orthonormal DCT-II of n numbers: A x are the coefficients."""
    from scipy import fft  # not at the top, because it takes long to import

    return fft.dct(np.eye(n), axis=0, norm="ortho").astype(np.float32)
