"""What to keep of a vector, and where it is.

    top_k           exactly the k largest magnitudes, in order; sorts
    fast_top_k      nearly the k largest, in no order; a few passes and no sort
    bucket_top_k    the k largest of each run of `bucket_size` elements (SparCML)
    compact         the positions of a mask's True elements, for masks of one's own

All have static sizes and work under jit, vmap and shard_map.
"""

from jaxsparse.select.buckets import bucket_top_k
from jaxsparse.select.compaction import compact
from jaxsparse.select.exact import check_k, top_k
from jaxsparse.select.fast import fast_top_k

__all__ = ["bucket_top_k", "check_k", "compact", "fast_top_k", "top_k"]
