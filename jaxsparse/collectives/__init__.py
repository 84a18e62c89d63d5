"""Sums of vectors over workers, one algorithm a file.

All are called by every worker of an axis, inside `jax.shard_map` or `jax.vmap(axis_name=...)`, for
any number of workers. The sparse all-reduces take a `SparseStream` and return an `AllReduced`; each
`..._traffic` tells rounds and words.
"""

from jaxsparse.collectives.all_gather_sum import (
    all_gather_sum as all_gather_sum,
    all_gather_sum_traffic as all_gather_sum_traffic,
)
from jaxsparse.collectives.bruck_all_gather import bruck_all_gather as bruck_all_gather
from jaxsparse.collectives.dsar_split_allgather import (
    dsar_split_allgather as dsar_split_allgather,
    dsar_split_allgather_traffic as dsar_split_allgather_traffic,
)
from jaxsparse.collectives.group import Group as Group
from jaxsparse.collectives.gtopk import gtopk as gtopk, gtopk_traffic as gtopk_traffic
from jaxsparse.collectives.ok_topk import ok_topk as ok_topk, ok_topk_traffic as ok_topk_traffic
from jaxsparse.collectives.outcome import AllReduced as AllReduced
from jaxsparse.collectives.quantized_all_reduce import (
    quantized_all_reduce as quantized_all_reduce,
    quantized_all_reduce_traffic as quantized_all_reduce_traffic,
)
from jaxsparse.collectives.recursive_double import (
    recursive_double as recursive_double,
    recursive_double_traffic as recursive_double_traffic,
)
from jaxsparse.collectives.spar_reduce_scatter import spar_reduce_scatter as spar_reduce_scatter
from jaxsparse.collectives.sparse_ring import (
    sparse_ring as sparse_ring,
    sparse_ring_traffic as sparse_ring_traffic,
)
from jaxsparse.collectives.split_allgather import (
    split_allgather as split_allgather,
    split_allgather_traffic as split_allgather_traffic,
)
from jaxsparse.collectives.union import union as union, union_traffic as union_traffic
