"""A state with checksums of its arrays, so that a damaged checkpoint is not restored silently.

Files of checkpoints may have no checksums of what is in them. Those of Orbax have none, and a
changed bit comes back as another parameter.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array, UInt32

from jaxsparse.arrays.hashing import mix
from jaxsparse.arrays.layout import check_arrays

# Arrays in host memory go to a device in blocks of so many elements.
_BLOCK = 2**24


class Checksummed(NamedTuple):
    """A state and the checksums of its arrays.

    Attributes:
        state: the state.
        checksums: uint32[leaves], in the order of the leaves' names.
    """

    state: Any
    checksums: UInt32[Array, " leaves"]


def attach(state: Any) -> Checksummed:
    """A state to be saved, with a checksum of 32 bits for each array.

        manager.save(step, args=ocp.args.StandardSave(jaxsparse.checksums.attach(state)))
        target = jax.tree.map(as_saved, jaxsparse.checksums.attach(new))
        restored = manager.restore(step, args=ocp.args.StandardRestore(target))
        state = jaxsparse.checksums.verify(restored)

    A checksum is a sum over the elements, of hashes of their bits and places. So it does not depend
    on how an array is spread over devices and processes. One changed element always changes it;
    more change it but for one case in 2^32.

    Args:
        state: any tree of arrays, as a trainer has it. All processes must call it.

    Returns:
        A tree of the state and one array more, which any library saves and restores.

    Raises:
        ValueError: a leaf is no array.

    Example:
        >>> saved = attach({"w": jnp.arange(3.0)})
        >>> verify(saved)["w"].tolist()
        [0.0, 1.0, 2.0]
        >>> verify(saved._replace(state={"w": jnp.arange(3.0).at[2].set(2.5)}))
        Traceback (most recent call last):
        ValueError: 1 of 1 arrays is not as saved, such as leaf['w']: restore an older checkpoint
    """
    found = np.array([*_checksums(state).values()], np.uint32)
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(state)]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    if mesh is None:
        return Checksummed(state, jnp.asarray(found))
    replicated = NamedSharding(mesh, PartitionSpec())
    return Checksummed(
        state, jax.make_array_from_callback(found.shape, replicated, found.__getitem__)
    )


def verify(saved: Any) -> Any:
    """The state of a restored `checksums.attach`, if all its arrays are as they were saved.

    Args:
        saved: the restored tree, or a dict of its two parts, as libraries restore it by name. It
            holds JAX arrays, and NumPy arrays of which each process has all rows. All processes
            must call it.

    Raises:
        ValueError: an array is not as saved, and has the name that the message says.
    """
    state, sums = (
        (saved["state"], saved["checksums"]) if isinstance(saved, Mapping) else tuple(saved)
    )
    found = _checksums(state)
    expected = np.asarray(sums.addressable_data(0) if isinstance(sums, jax.Array) else sums)
    if expected.shape != (len(found),):
        raise ValueError(
            f"the state has {len(found)} arrays and {expected.size} checksums: restore it into "
            "jaxsparse.checksums.attach(state) of a state of the program that saved it"
        )
    if wrong := [name for (name, own), other in zip(found.items(), expected) if own != other]:
        raise ValueError(
            f"{len(wrong)} of {len(found)} arrays {'is' if len(wrong) == 1 else 'are'} not as "
            f"saved, such as leaf{wrong[0]}: restore an older checkpoint"
        )
    return state


def _checksums(state: Any) -> dict[str, int]:
    """The checksum of each leaf, by its path, in the order of names."""
    check_arrays("leaf", state)
    # Trees restored by name have dicts where a state has tuples, whose fields have an order.
    name = lambda path: tuple(keystr((key,), simple=True) for key in path)
    leaves = sorted(tree_flatten_with_path(state)[0], key=lambda each: name(each[0]))
    found: dict[str, Any] = {}
    on_devices: dict[Any, list[str]] = {}  # one program has arrays of the same devices
    for path, x in leaves:
        key = keystr(path)
        found[key] = x if isinstance(x, jax.Array) else _of_host(np.asarray(x))
        if isinstance(x, jax.Array):
            on_devices.setdefault(frozenset(x.sharding.device_set), []).append(key)
    for names in on_devices.values():
        sums = jax.device_get(_of_arrays([found[key] for key in names]))
        found.update(zip(names, map(int, sums)))
    return found


@jax.jit
def _of_arrays(arrays: list[Array]) -> list[UInt32[Array, ""]]:
    def one(x: Array) -> UInt32[Array, ""]:
        index = jnp.uint32(0)
        for axis in range(x.ndim):
            size = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
            index = index + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * size
        return _sum(_words(x), index)

    return [one(jax.random.key_data(x) if _is_key(x) else x) for x in arrays]


def _of_host(x: np.ndarray) -> int:
    """The checksum of an array in host memory, in blocks that a device has memory for."""
    flat, total = np.ascontiguousarray(x).reshape(-1), 0
    for start in range(0, flat.size, _BLOCK):
        block = _whole_bytes(flat[start : start + _BLOCK])
        words = block.view(f"u{min(4, block.itemsize)}").reshape(len(block), -1)
        total += int(_of_block(words, np.uint32(start % 2**32)))
    return total % 2**32


@jax.jit
def _of_block(words: Array, start: Array) -> UInt32[Array, ""]:
    index = start + jax.lax.iota(jnp.uint32, len(words))
    return _sum([words[:, i] for i in range(words.shape[1])], index)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _whole_bytes(x: Any) -> Any:
    """An array whose elements take whole bytes, of which no two are equal if they were not."""
    if x.dtype == bool:
        return x.astype(np.uint8)
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo
    return x.astype(np.float32) if info(x.dtype).bits < 8 else x


def _words(x: Array) -> list[Array]:
    """The bits of each element, in words of up to 32 bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    x = _whole_bytes(x)
    bits = jax.lax.bitcast_convert_type(x, f"uint{min(32, 8 * x.dtype.itemsize)}")
    return [bits] if x.dtype.itemsize <= 4 else [bits[..., 0], bits[..., 1]]


def _sum(words: list[Array], index: Array) -> UInt32[Array, ""]:
    """The sum, modulo 2^32, of hashes of each element's words and its index."""
    bits = functools.reduce(
        lambda bits, word: mix(bits) ^ word, [w.astype(jnp.uint32) for w in words]
    )
    return mix(bits ^ mix(index)).sum(dtype=jnp.uint32)
