"""Reducers that see a vector as the matrices that a gradient's leaves are."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.reducers.base import Leaf, Reducer


class Matrix(NamedTuple):
    """One leaf's elements as equal matrices, one after the other, each row-major."""

    stack: int  # number of matrices: the layers of a scanned stack, or 1
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """The number of elements of all matrices."""
        return math.prod(self)


@dataclasses.dataclass(frozen=True)
class MatrixReducer(Reducer):
    """A reducer that sees its vector as the matrices of the leaves, as low-rank methods do.

    Attributes:
        stacked: a regular expression. A leaf whose key path contains a match is a stack of matrices
            along its first axis, one for each layer of a scanned model. None: there are no stacks.
        matrices: the matrices of each leaf of the bucket, in order. Error feedback sets them,
            because it knows the layout. None: the largest square matrix that the vector has
            elements for, and one row of the elements that are left.
    """

    stacked: str | None = dataclasses.field(default=None, kw_only=True)
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
        """A leaf (..., in, out) as rows of `out` elements, which is the layout of Flax kernels.

        A convolution's (3, 3, 16, 32) is one matrix of 144 rows. A stack of (12, 64, 256) is twelve
        matrices of 64 rows.
        """
        is_stack = self.stacked is not None and re.search(self.stacked, leaf.path) is not None
        stack, shape = (leaf.shape[0], leaf.shape[1:]) if is_stack else (1, leaf.shape)
        columns = shape[-1] if shape else 1
        return Matrix(stack, math.prod(shape[:-1]), columns)

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
