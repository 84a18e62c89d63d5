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
    """How one leaf's elements lie as equal matrices, one after the other, each row-major."""

    stack: int  # how many there are: the layers of a scanned stack, or 1
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return math.prod(self)


@dataclasses.dataclass(frozen=True)
class MatrixReducer(Reducer):
    """A reducer that sees its vector as the matrices that the leaves are, as low-rank methods do.

    Attributes:
        stacked: a regular expression; the leaves in whose key path it is found are stacks of
            matrices, one for each layer of a scanned model, along their first axis.
        matrices: of each leaf of the bucket, in order: set by error feedback, which knows the
            layout. None, as for a bare vector, makes it one row.
    """

    stacked: str | None = dataclasses.field(default=None, kw_only=True)
    matrices: tuple[Matrix, ...] | None = dataclasses.field(default=None, kw_only=True)

    @property
    def whole_leaves(self) -> bool:
        """Part of a matrix is none."""
        return True

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "MatrixReducer":
        """The same for the matrices of these leaves."""
        return dataclasses.replace(self, matrices=tuple(map(self.matrix, leaves)))

    def matrix(self, leaf: Leaf) -> Matrix:
        """How a leaf is seen: (..., in, out) as rows of `out` elements, the layout of Flax kernels.

        A convolution's (3, 3, 16, 32) is one matrix of 144 rows, a stack of (12, 64, 256) twelve
        matrices of 64 rows.
        """
        is_stack = self.stacked is not None and re.search(self.stacked, leaf.path) is not None
        stack, shape = (leaf.shape[0], leaf.shape[1:]) if is_stack else (1, leaf.shape)
        columns = shape[-1] if shape else 1
        return Matrix(stack, math.prod(shape[:-1]), columns)

    def cut(self, x: Float[Array, " d"]) -> list[Float[Array, "stack rows columns"]]:
        """The matrices of each leaf."""
        matrices = (Matrix(1, 1, x.size),) if self.matrices is None else self.matrices
        ends = itertools.accumulate(matrix.size for matrix in matrices)
        return [
            jax.lax.slice(x, (end - matrix.size,), (end,)).reshape(matrix)
            for matrix, end in zip(matrices, ends)
        ]

    def joined(self, parts: Sequence[Float[Array, "stack rows columns"]]) -> Float[Array, " d"]:
        """The inverse of `cut`."""
        return jnp.concatenate([part.reshape(-1) for part in parts])
