"""Sums of vectors over workers, one a file.

Every worker of an axis calls them, inside `jax.shard_map` or `jax.vmap(axis_name=...)`, for any
number of workers. The sparse all-reduces take a `SparseStream` over vectors of `size` elements and
return an `AllReduced`. Their `op` combines entries, by name or as a `stream.Combination`; only for
sums may the `codec` of the messages round, or a capacity bound them.

Partial sums are dense in memory: arriving entries are added to a dense array (of a range, or of the
whole vector), and `select.compact` takes entries out again, in a pass or two. A merge of sorted
streams would need sorts, which cost more on a CPU from a density of 0.3 % on.
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
