"""Reducers that see a vector as the matrices that a gradient's leaves are."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.arrays.layout import SCANNED, is_stack
from jaxsparse.reducers.base import Leaf, Reducer


class Matrix(NamedTuple):
    """One leaf's elements as equal matrices, one after the other, each row-major."""

    stack: int  # number of matrices: the layers of a scanned stack, or 1
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return math.prod(self)


@dataclasses.dataclass(frozen=True)
class MatrixReducer(Reducer):
    """A reducer that sees its vector as the matrices of the leaves, as low-rank methods do.

    Args:
        stacked: a regular expression. A leaf of three or more dimensions whose key path contains a
            match is a stack of matrices along its first axis, one for each layer of a scanned
            model. By default "layers", "blocks" and names that begin with "scan" or "stack" match,
            where no number follows. None: there are no stacks.
        matrices: the matrices of each leaf of the bucket, in order, which error feedback knows.
            None: the largest square matrix that the vector has elements for, and one row of what is
            left.
    """

    stacked: str | None = dataclasses.field(default=SCANNED, kw_only=True)
    matrices: tuple[Matrix, ...] | None = dataclasses.field(
        default=None, kw_only=True, metadata={"is_setting": False}
    )

    @property
    def whole_leaves(self) -> bool:
        """Yes: a part of a matrix is no matrix."""
        return True

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "MatrixReducer":
        """The same reducer for the matrices of these leaves.

        Neighbouring matrices of one shape become one stack. A program computes it at once, without
        a copy of each matrix.
        """
        matrices: list[Matrix] = []
        for matrix in map(self.matrix, leaves):
            if matrices and matrices[-1][1:] == matrix[1:]:
                matrix = matrix._replace(stack=matrices.pop().stack + matrix.stack)
            matrices.append(matrix)
        return dataclasses.replace(self, matrices=tuple(matrices))

    def matrix(self, leaf: Leaf) -> Matrix:
        """A leaf's first axes as rows and its last ones as columns, cut where their sum is least.

        So factors are smallest. A convolution's (3, 3, 16, 32) is one matrix of 144 rows, and a
        kernel (64, 4, 16) of four heads one of 64. A stack of (12, 64, 256) is twelve matrices of
        64 rows.
        """
        shape = leaf.shape
        is_cut = is_stack(leaf.path, shape, self.stacked)
        stack, shape = (shape[0], shape[1:]) if is_cut else (1, shape)
        cuts = [*range(len(shape) - 1, 0, -1)] or [0]  # vectors are one row
        sides = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in cuts]
        return Matrix(stack, *min(sides, key=sum))

    def matrices_of(self, size: int) -> tuple[Matrix, ...]:
        """The matrices of a vector of `size` elements."""
        if self.matrices is not None:
            return self.matrices
        side = math.isqrt(size)
        square, rest = Matrix(1, side, side), Matrix(1, 1, size - side**2)
        return (square, rest) if rest.size else (square,)

    def cut(self, x: Float[Array, " d"]) -> list[Float[Array, "stack rows columns"]]:
        """The matrices of each leaf."""
        matrices = self.matrices_of(x.size)
        ends = itertools.accumulate(matrix.size for matrix in matrices)
        return [
            jax.lax.slice(x, (end - matrix.size,), (end,)).reshape(matrix)
            for matrix, end in zip(matrices, ends)
        ]

    def joined(self, parts: Sequence[Float[Array, "stack rows columns"]]) -> Float[Array, " d"]:
        """The inverse of `cut`."""
        return jnp.concatenate([part.reshape(-1) for part in parts])
