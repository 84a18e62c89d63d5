"""The layout of a gradient pytree in flat buckets, planned once from shapes.

Leaves with equal reducers are laid end to end, each row-major, in the order of `jax.tree.leaves`.
Each such vector is cut into the fewest buckets within the size limit, of nearly equal sizes. A leaf
may straddle buckets. Leaves that are not compressed are laid end to end in one dense vector. Empty
leaves are in neither.
"""

import itertools
import math
import re
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, DTypeLike, Float, Int

from jaxsparse.arrays.magnitude import LARGEST, clipped
from jaxsparse.arrays.platforms import by_platform, kept_flat
from jaxsparse.arrays.settings import static_int

__all__ = ["Layout", "layout_of", "small_or_vector"]  # what users meet

# A bucket as arrays, one for each leaf or part of a leaf in it. The array of a leaf is [1, *shape],
# and that of a part is flat. Adding piece by piece avoids joined buckets, which XLA would build
# first and keep in memory. XLA also writes a sum over a summand of the same shape, and accumulators
# are [1, *shape]. A bucket of more than _MOST_PIECES is one flat array instead: it takes a copy
# more, but XLA would compile several kernels for each piece, in time that grows faster than their
# number.
Pieces = tuple[Float[Array, "..."], ...]

_MOST_PIECES = 128
# A cut into more pieces hides the position of each _KNOWN-th from XLA, see `_hidden`.
_KNOWN = 16

# A function of one leaf's key path, as jax.tree_util.keystr prints it, and of its shape.
IsDense = Callable[[str, tuple[int, ...]], bool]


# Names that frameworks and trainers give to layers which a scan has stacked: "layers", "blocks",
# linen's "ScanBlock_0". A name with a number behind it is one layer of a list.
SCANNED = r"(?i)\b(scan\w*|stack\w*|layers|blocks)\b(?!\W*\d)"


def is_stack(path: str, shape: Sequence[int], pattern: str | None) -> bool:
    """Whether a leaf is a stack of matrices along its first axis, one for each layer of a scan."""
    return pattern is not None and len(shape) > 2 and re.search(pattern, path) is not None


def small_or_vector(path: str, shape: tuple[int, ...]) -> bool:
    """The default rule: vectors and scalars (biases, norms) and tiny matrices go dense."""
    del path
    return len(shape) <= 1 or math.prod(shape) < 1024


def everything(path: str, shape: tuple[int, ...]) -> bool:
    """The rule that lets all leaves go dense."""
    del path, shape
    return True


class _Piece(NamedTuple):
    """Elements [start, stop) of one ravelled leaf."""

    leaf: int
    start: int
    stop: int


class Layout(NamedTuple):
    """A static plan for one tree structure; make it with `layout_of` or `plan_groups`."""

    treedef: Any
    paths: tuple[str, ...]
    names: tuple[str, ...]  # the paths in short, all different
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    buckets: tuple[tuple[_Piece, ...], ...]
    groups: tuple[Hashable, ...]
    dense: tuple[_Piece, ...]

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        return tuple(_size(pieces) for pieces in self.buckets)

    @property
    def dense_sizes(self) -> tuple[int, ...]:
        """Numbers of elements of the leaves in the dense vector, in their order."""
        return tuple(_size([piece]) for piece in self.dense)

    @property
    def dense_size(self) -> int:
        return _size(self.dense)

    def leaves(self, bucket: int) -> list[tuple[str, tuple[int, ...]]]:
        """Key paths and shapes of the leaves that have a piece in a bucket."""
        return [(self.paths[p.leaf], self.shapes[p.leaf]) for p in self.buckets[bucket]]

    def flatten(self, tree: Any) -> tuple[list[Pieces], Float[Array, " n"]]:
        """The buckets of `tree`, in pieces, and its dense vector, all in float32."""
        leaves = dict(enumerate(self.treedef.flatten_up_to(tree)))
        return self.buckets_of(leaves), self.dense_of(leaves)

    def unflatten(self, buckets: Sequence[Pieces], dense: Float[Array, " n"]) -> Any:
        """The tree from buckets and dense vector, each leaf in its own shape and dtype."""
        found = self.leaves_in(buckets) | self.leaves_in_dense(dense)
        leaves = [
            narrow(found.get(i, jnp.zeros((0,), jnp.float32)), dtype).reshape(shape)
            for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes))
        ]
        return self.treedef.unflatten(leaves)

    def buckets_of(self, leaves: Mapping[int, Array]) -> list[Pieces]:
        """The buckets, in pieces and in float32, from leaves by number."""
        pieces = [_pieces(leaves, own) for own in self.buckets]
        return [own if len(own) <= _MOST_PIECES else (join(own),) for own in pieces]

    def dense_of(self, leaves: Mapping[int, Array]) -> Float[Array, " n"]:
        """The dense vector, in float32, from leaves by number."""
        return join(_pieces(leaves, self.dense))

    def leaves_in(self, buckets: Sequence[Pieces]) -> dict[int, Array]:
        """The leaves in buckets, by number, in their shapes and in the buckets' dtype."""
        return self._leaves(zip(buckets, self.buckets))

    def leaves_in_dense(self, dense: Float[Array, " n"]) -> dict[int, Array]:
        """The leaves in the dense vector, by number and in their shapes."""
        return self._leaves([((dense,), self.dense)])

    def _leaves(self, vectors: Iterable[tuple[Pieces, Sequence[_Piece]]]) -> dict[int, Array]:
        parts: dict[int, list[Array]] = {}
        for arrays, own in vectors:
            if len(own) != 1 and len(arrays) == 1:
                arrays = cut(arrays[0], [(piece.stop - piece.start,) for piece in own])
            for array, piece in zip(arrays, own, strict=True):
                parts.setdefault(piece.leaf, []).append(array)
        return {leaf: join(part).reshape(self.shapes[leaf]) for leaf, part in parts.items()}


def _pieces(leaves: Mapping[int, Array], own: Sequence[_Piece]) -> Pieces:
    def piece(x: Array, start: int, stop: int) -> Array:
        if stop - start == x.size:
            return x.reshape(1, *x.shape)
        return jax.lax.slice(x.reshape(-1), (start,), (stop,))

    return tuple(piece(leaves[leaf], a, b).astype(jnp.float32) for leaf, a, b in own)


def join(pieces: Sequence[Float[Array, "..."]]) -> Float[Array, " d"]:
    """The vector of pieces laid end to end."""
    flat = [kept_flat(piece.reshape(-1), piece.shape) for piece in pieces]
    if not flat:
        return jnp.zeros((0,), jnp.float32)
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def cut(vectors: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Cuts a vector into pieces of these shapes. In a tree of vectors, it cuts each."""
    sizes = list(map(math.prod, shapes))
    starts = [0, *itertools.accumulate(sizes)][:-1]
    if len(sizes) <= _KNOWN or not 0 < sum(sizes) < 2**31:
        piece = lambda x, a, n: jax.lax.slice(x, (a,), (a + n,))
        each: Any = list(zip(starts, sizes, shapes))
    else:
        piece = lambda x, a, n: jax.lax.dynamic_slice(x, (a,), (n,), allow_negative_indices=False)
        hidden = _hidden(starts[::_KNOWN], jax.tree.leaves(vectors)[0])
        known = [jnp.int32(a - starts[i - i % _KNOWN]) for i, a in enumerate(starts)]
        each = [
            (hidden[i // _KNOWN] + a, n, s) for i, (a, n, s) in enumerate(zip(known, sizes, shapes))
        ]
    return jax.tree.map(
        lambda x: tuple(kept_flat(piece(x, a, n), s).reshape(s) for a, n, s in each), vectors
    )


def _hidden(numbers: Sequence[int], x: Float[Array, " d"]) -> tuple[Int[Array, ""], ...]:
    """The numbers as int32 arrays, whose values XLA does not know when it compiles.

    XLA compiles each kernel once, however often a program has it. But constants are part of a
    kernel, so with known positions each of many leaves takes a kernel of its own, which takes a CPU
    10 ms or more to compile. With hidden ones, leaves of equal shapes share theirs. (A barrier does
    not hide constants. On a GPU a condition would wait for the host, so they are known there.) `x`
    has an element at least, and no value of it changes the result.
    """
    known = lambda *_: tuple(map(jnp.int32, numbers))

    @custom_vmap
    def hidden(first: Array) -> tuple[Array, ...]:
        bits = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
        is_true = jax.lax.population_count(bits) <= 32  # always
        return jax.lax.cond(is_true, known, lambda: tuple(map(jnp.zeros_like, known())))

    @hidden.def_vmap
    def rule(workers: int, batched: Any, first: Array) -> Any:
        return hidden(first[0]), (False,) * len(numbers)

    return by_platform(x[0], default=hidden, gpu=known)


def narrow(x: Array, dtype: DTypeLike, summands: int = 1) -> Array:
    """Float32 `x` in another float dtype, clipped so that a sum of `summands` fits it."""
    if float(jnp.finfo(dtype).max) < LARGEST:
        x = clipped(x, dtype, summands)
    return x.astype(dtype)


def _size(pieces: Sequence[_Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


LONG_BUCKET = 2**30  # elements of a bucket that nothing else bounds


def layout_of(
    tree: Any,
    *,
    is_dense: IsDense = small_or_vector,
    bucket_size: int | None = None,
    alignment: int = 1,
) -> Layout:
    """Plans the layout of `tree` from its leaves' shapes and dtypes alone.

    Args:
        tree: pytree of floating-point arrays (or `jax.ShapeDtypeStruct`s) of any float dtypes.
        is_dense: function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape that
            says whether the leaf travels uncompressed. By default vectors, scalars and leaves below
            1024 elements do.
        bucket_size: most elements that a bucket may have. None: one bucket.
        alignment: number that divides the sizes of all buckets but the last, even if they then
            exceed `bucket_size`.

    Returns:
        The layout. Bucket sizes differ by less than twice the alignment, that is, by at most one
        element if it is 1.

    >>> layout = layout_of({"bias": jnp.zeros(8), "kernel": jnp.zeros((64, 32))})
    >>> layout.bucket_sizes, layout.dense_size
    ((2048,), 8)
    """
    groups = [None if dense else 0 for dense in picked(tree, is_dense)]
    return plan_groups(tree, groups, bucket_size=bucket_size, alignment={0: alignment})


def usual_bucket_size(size: int) -> int:
    """The most elements of a bucket where none are given, of `size` elements of a device.

    A bucket of 2**22 is a layer of a model of ordinary size. Of eight, one has nothing to hide
    behind, and each one has to be compiled. A vector has at most 2**31 - 1 elements.
    """
    return min(max(2**22, -(-size // 8)), LONG_BUCKET)


def picked(tree: Any, rule: IsDense) -> list[bool]:
    """Whether the rule picks each leaf."""
    return [rule(path, shape) for path, shape in named_leaves(tree)]


def check_arrays(name: str, tree: Any) -> None:
    """Raises ValueError if a leaf of `tree`, which is called `name`, is no array and no number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        try:
            jax.typeof(leaf)
        except TypeError as error:
            dtype = f" and dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is {str(leaf)[:40]!r} of type "
                f"{type(leaf).__name__}{dtype}, which is no array: keep functions, strings and "
                "other static parts of a model out of the tree, as with eqx.partition(model, "
                "eqx.is_array) or nnx.split(model), and close over them"
            ) from error


def named_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf, by its key path as `jax.tree_util.keystr` prints it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def named_leaves(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The key path of each leaf, as `jax.tree_util.keystr` prints it, and its shape.

    Raises ValueError if a leaf is no array of a float dtype, or if there are no elements.
    """
    check_arrays("leaf", tree)
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
    for name, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"leaf{name} has dtype {jnp.result_type(leaf)}: only floating-point gradients can "
                "be exchanged. Differentiate with respect to float parameters only, or remove the "
                "leaf from the gradient tree"
            )
    named = [(name, jnp.shape(leaf)) for name, leaf in leaves]
    if not any(math.prod(shape) for _, shape in named):
        raise ValueError(
            f"the gradient tree has {len(leaves)} leaves and no elements: nothing to exchange. "
            "Check the filter (nnx.Param?) that selects the trained parameters"
        )
    return named


def plan_groups(
    tree: Any,
    groups: Sequence[Hashable | None],
    *,
    bucket_size: int | None = None,
    alignment: Mapping[Hashable, int] = {},
    whole_leaves: Container[Hashable] = (),
) -> Layout:
    """Plans a layout as `layout_of` does, with separate buckets for several groups of leaves.

    Args:
        tree: see `layout_of`.
        groups: the group of each leaf, in the order of `jax.tree.leaves`: any hashable, or None for
            a dense leaf. The layout's `groups` has that of each bucket, in the order of first
            leaves.
        bucket_size: see `layout_of`.
        alignment: alignment of each group, as in `layout_of`. Default: 1.
        whole_leaves: groups whose leaves must not straddle buckets. A leaf above the limit then has
            a bucket of its own.
    """
    if bucket_size is not None:
        bucket_size = static_int("bucket_size", bucket_size)
        if bucket_size < 1:
            raise ValueError(
                f"bucket_size={bucket_size} must be at least 1, or None for one bucket"
            )
    leaves, treedef = jax.tree.flatten(tree)
    named = named_leaves(tree) if leaves else []  # Optax takes groups without a leaf
    dense: list[_Piece] = []
    members: dict[Hashable, list[_Piece]] = {}
    for i, ((_, shape), group) in enumerate(zip(named, groups, strict=True)):
        if size := math.prod(shape):
            pieces = dense if group is None else members.setdefault(group, [])
            pieces.append(_Piece(i, 0, size))
    buckets = [
        (bucket, group)
        for group, pieces in members.items()
        for bucket in (
            _deal(pieces, bucket_size)
            if group in whole_leaves
            else _cut(pieces, bucket_size, alignment.get(group, 1))
        )
    ]
    return Layout(
        treedef=treedef,
        paths=tuple(name for name, _ in named),
        names=short_names(tree),
        shapes=tuple(shape for _, shape in named),
        dtypes=tuple(jnp.result_type(leaf) for leaf in leaves),
        buckets=tuple(bucket for bucket, _ in buckets),
        groups=tuple(group for _, group in buckets),
        dense=tuple(dense),
    )


def short_names(tree: Any) -> tuple[str, ...]:
    """A name for each leaf: its keys with dots between them, such as "layers.0.kernel"."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    # Paths of Flax's variables end with "value". Those of gradients for them don't always.
    is_value = lambda path: bool(path) and getattr(path[-1], "name", None) == "value"
    paths = [path[:-1] if is_value(path) else path for path in paths]
    names = [jax.tree_util.keystr(p, simple=True, separator=".") or "parameters" for p in paths]
    if len(set(names)) < len(names):  # keys with dots in them
        names = list(map(jax.tree_util.keystr, paths))
    return tuple(names)


def _deal(pieces: Sequence[_Piece], limit: int | None) -> list[tuple[_Piece, ...]]:
    """Fills buckets with whole leaves in order, up to `limit`."""
    buckets: list[list[_Piece]] = [[]]
    for piece in pieces:
        if limit is not None and buckets[-1] and _size([*buckets[-1], piece]) > limit:
            buckets.append([])
        buckets[-1].append(piece)
    return list(map(tuple, buckets))


def _cut(pieces: Sequence[_Piece], limit: int | None, alignment: int) -> list[tuple[_Piece, ...]]:
    """Cuts the concatenation of `pieces` into the fewest buckets within `limit`, evenly."""
    total = _size(pieces)
    units = -(-total // alignment)
    count = 1 if limit is None else -(-units // max(1, limit // alignment))
    sizes = [share * alignment for share in split_evenly(units, [1] * count)]
    sizes[-1] -= units * alignment - total
    buckets: list[tuple[_Piece, ...]] = []
    rest = list(reversed(pieces))
    for size in sizes:
        bucket = []
        while size:
            leaf, start, stop = rest.pop()
            taken = min(size, stop - start)
            bucket.append(_Piece(leaf, start, start + taken))
            if start + taken < stop:
                rest.append(_Piece(leaf, start + taken, stop))
            size -= taken
        buckets.append(tuple(bucket))
    return buckets


def split_evenly(total: int, weights: Sequence[int]) -> list[int]:
    """Integers that add up to `total`, as nearly proportional to `weights` as rounding allows."""
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
