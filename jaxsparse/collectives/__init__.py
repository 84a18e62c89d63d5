"""Sums of vectors over workers, one a file.

Every worker of an axis calls them, inside `jax.shard_map` or `jax.vmap(axis_name=...)`, for any
number of workers. The sparse all-reduces take a `SparseStream` over vectors of `size` elements and
return an `AllReduced`. Their `op` combines entries, by name or as a `stream.Combination`; only for
sums may the `codec` of the messages round, or a capacity bound them.

Partial sums are dense in memory: arriving entries are added to a dense array (of a range, or of the
whole vector), and `select.compact` takes entries out again, in a pass or two. A merge of sorted
streams would need sorts, which cost more on a CPU from a density of 0.3 % on.

Example, three workers that hold two entries each of vectors of five elements:
    >>> import jax, jax.numpy as jnp
    >>> from jaxsparse import collectives, select
    >>> rows = jnp.float32([[3, 0, 0, 1, 0], [0, 0, 2, 2, 0], [1, 0, 0, 0, 4]])
    >>> def total_of(row):
    ...     return collectives.all_gather_sum(select.top_k(row, 2), 5, axis_name="data").total
    >>> jax.vmap(total_of, axis_name="data")(rows)[0].tolist()
    [4.0, 0.0, 2.0, 3.0, 4.0]
"""

from jaxsparse.collectives.messages import AllReduced as AllReduced
from jaxsparse.collectives.quantized_all_reduce import quantized_all_reduce as quantized_all_reduce
from jaxsparse.collectives.sparcml import (
    all_gather_sum as all_gather_sum,
    dsar_split_allgather as dsar_split_allgather,
    recursive_double as recursive_double,
    sparse_ring as sparse_ring,
    split_allgather as split_allgather,
)
from jaxsparse.collectives.spardl import spar_reduce_scatter as spar_reduce_scatter
from jaxsparse.collectives.union import union as union
from jaxsparse.comm.shards import Residual as Residual
