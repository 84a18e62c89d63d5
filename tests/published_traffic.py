"""Formulas for the rounds and words of the exchanges: the papers', with this library's room.

Compiled and traced programs are held against them. An all-gather has the rounds of a tree,
ceil(log2 W), as the papers count them. `jaxsparse.comm.links.rounds` has the rounds that libraries
build.
"""

import importlib
from typing import NamedTuple

import jax.numpy as jnp
from reference_formats import range_size

from jaxsparse import codecs
from jaxsparse.arrays import bits, blocks
from jaxsparse.collectives import sparcml
from jaxsparse.collectives.messages import MessageFormat

# Imported as a module: the package has a function of the same name.
union = importlib.import_module("jaxsparse.collectives.union")


class Traffic(NamedTuple):
    """The messages that one worker waits for, and the words that it receives."""

    rounds: int  # messages one after the other
    words: float  # number of words of 4 bytes that it receives

    def __add__(self, other):
        """One exchange after the other."""
        return Traffic(self.rounds + other.rounds, self.words + other.words)

    def seconds(self, link):
        return link.seconds(self.rounds, 4 * self.words)


def dense_traffic(size, workers):
    """A ring all-reduce (reduce-scatter, then all-gather)."""
    return Traffic(2 * (workers - 1), 2 * (workers - 1) / workers * size)


def recursive_double_traffic(k, size, workers, codec=codecs.COO):
    """log2 W rounds, and 2 more if W is no power of two. Words are those of full messages.

    The published range (section 5.3.1) goes from log2(W) 2k words, if all supports are equal, to (W
    - 1) 2k, if they are disjoint. Static shapes pay for the latter.
    """
    capacities = sparcml._capacities(k, size, workers)
    words = [MessageFormat(size, c, "sum", jnp.float32, codec).words for c in capacities]
    return Traffic(len(capacities), sum(words))


def split_allgather_traffic(k, size, workers, codec=codecs.COO, capacity=None, union_capacity=None):
    """W - 1 + ceil(log2 W) rounds. Each half receives W - 1 full messages.

    The published range (section 5.3.2) goes from 2 (W - 1)/W 2k words, if all supports are equal,
    to W 2k, if they are disjoint. Static shapes without capacities pay more than the latter, since
    all k entries of a worker may be for one owner.
    """
    first = sparcml.split_format(k, size, workers, "sum", jnp.float32, codec, capacity)
    second, is_cut = sparcml._gather_format(
        k, size, workers, "sum", jnp.float32, codec, capacity, union_capacity
    )
    is_bounded = capacity is not None or is_cut
    words = (workers - 1) * (first.words + second.words + is_bounded)
    return Traffic(workers - 1 + (workers - 1).bit_length(), words)


def dsar_split_allgather_traffic(k, size, workers, codec=codecs.COO, capacity=None, quantizer=None):
    """W - 1 + ceil(log2 W) rounds. W - 1 full messages in the first half, then (W - 1)/W d words.

    The published range (section 5.3.3) counts 0 to 2k words for the first half.
    """
    first = sparcml.split_format(k, size, workers, "sum", jnp.float32, codec, capacity)
    second = first.size if quantizer is None else quantizer.words(first.size)
    words = (workers - 1) * (first.words + second + (capacity is not None))
    return Traffic(workers - 1 + (workers - 1).bit_length(), words)


def all_gather_sum_traffic(k, size, workers, codec=codecs.COO):
    """ceil(log2 W) rounds, (W - 1) 2k words in COO."""
    message_format = MessageFormat(size, k, "sum", jnp.float32, codec)
    return Traffic((workers - 1).bit_length(), (workers - 1) * message_format.words)


def sparse_ring_traffic(k, size, workers, codec=codecs.COO, capacity=None):
    """2 (W - 1) rounds. Words are those of full messages."""
    formats = sparcml._formats(k, size, workers, "sum", jnp.float32, codec, capacity)
    last = formats[-1].words + (capacity is not None)
    words = sum(message_format.words for message_format in formats[:-1]) + (workers - 1) * last
    return Traffic(2 * (workers - 1), words)


def quantized_all_reduce_traffic(size, workers, quantizer):
    """W - 1 + ceil(log2 W) rounds, 2 (W - 1) words(m) with ranges of m = ceil(d / W) values.

    That is 2 (W - 1) / W of a vector's words. Whole groups in a range may be a 64th more.
    """
    m = range_size(size, workers, quantizer.group_size)
    words = 0 if workers == 1 else 2 * (workers - 1) * quantizer.words(m)
    return Traffic(workers - 1 + (workers - 1).bit_length(), words)


def union_traffic(blocks, workers):
    """W - 1 + ceil(log2 W) rounds and 2 (W - 1) ceil(n / W) words, with n = ceil(blocks / 32).

    Or ceil(log2 W) rounds and (W - 1) n words, if those are no more.
    """
    words = bits.words(blocks)
    gather = (workers - 1).bit_length()
    if union._is_gathered_whole(words, workers):
        return Traffic(gather, (workers - 1) * words)
    return Traffic(workers - 1 + gather, 2 * (workers - 1) * -(-words // workers))


def omni_reduce_traffic(reducer, size, workers):
    """The traffic of the union, and of a psum of the slots."""
    capacity = reducer._capacity(size, workers)
    if reducer._is_dense(capacity, size):
        return dense_traffic(size, workers)
    summed = dense_traffic(capacity * reducer.block_size, workers)
    return union_traffic(blocks.count(size, reducer.block_size), workers) + summed


def block_gather_traffic(reducer, size, workers):
    """ceil(log2 W) rounds, and (W - 1) messages."""
    if reducer._is_dense(size, workers):
        return dense_traffic(size, workers)
    return Traffic((workers - 1).bit_length(), (workers - 1) * reducer._words(size))


def s2_traffic(reducer, size, workers):
    """The traffic of the union, and of a psum of the table."""
    summed = dense_traffic(reducer.words(size, workers), workers)
    if reducer.words(size, workers) == size:
        return summed
    return union_traffic(blocks.count(size, reducer.block_size), workers) + summed


def sparcml_traffic(reducer, size, workers):
    """The traffic of each of SparCML's algorithms."""
    k, first = reducer.entries(size), {"capacity": reducer.capacity(size, workers)}
    words = {name: received / 4 for name, (_, received) in reducer.traffic(size, workers).items()}
    return {
        "recursive_double": recursive_double_traffic(k, size, workers)._replace(
            words=words["recursive_double"]
        ),
        "all_gather": all_gather_sum_traffic(k, size, workers),
        "dsar_split_allgather": dsar_split_allgather_traffic(k, size, workers, **first),
        "split_allgather": split_allgather_traffic(k, size, workers, **first)._replace(
            words=words["split_allgather"]
        ),
        "ring": sparse_ring_traffic(k, size, workers),
    }
