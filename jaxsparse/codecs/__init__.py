"""Codecs: the wire formats of sparse vectors.

Index and value travel in one message, so that a sparse exchange takes one round and not two.

    COO          32-bit indices and values, exact
    Packed()     16-bit indices and values
    EliasFano()  indices near their entropy, values in 2 to 32 bits

A worker encodes what it has selected, all gather the messages, and each decodes them one by one,
in one order, because sums of floats depend on it:

    >>> import jax, jax.numpy as jnp
    >>> from jaxsparse import codecs, select
    >>> from jaxsparse.arrays.stream import to_dense
    >>> codec, k, d = codecs.Packed(), 2, 6
    >>> def mean(x):
    ...     message = codec.encode(select.top_k(x, k), d)
    ...     messages = jax.lax.all_gather(message, "data")
    ...     read = jax.vmap(lambda words: to_dense(codec.decode(words, k, d, jnp.float32), d))
    ...     return read(messages).mean(0)
    >>> own = jnp.float32([[5, 0, 1, -3, 2, 0], [0, 4, 0, 1, -2, 8]])  # a row for each worker
    >>> jax.vmap(mean, axis_name="data", out_axes=None)(own).tolist()
    [2.5, 2.0, 0.0, -1.5, 0.0, 4.0]

In the place of `jax.vmap`, `jax.shard_map` runs the same function on a mesh.
"""

from jaxsparse.codecs.codec import (
    COO as COO,
    Codec as Codec,
    bits as bits,
    from_bits as from_bits,
)
from jaxsparse.codecs.elias_fano import EliasFano as EliasFano
from jaxsparse.codecs.packed import Packed as Packed
