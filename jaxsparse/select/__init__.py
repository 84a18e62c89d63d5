"""What to keep of a vector, and where it is.

    top_k           exactly the k largest magnitudes, in order; sorts
    threshold_top_k exactly the k largest, in no order and without a sort
    fast_top_k      nearly the k largest, in no order; a few passes and no sort
    sampled_top_k   at most k that reach a threshold estimated from a sample (DGC)
    bisection_top_k nearly the k largest, up to the bracket that bisection leaves (MSTopk)
    group_top_k     the k largest of each run of `group_size` elements (SparCML)
    block_top_k     the k blocks of largest l2 norm (S2 Reducer, OmniReduce)
    hash_extract    entries above a threshold, in hashed slots (DRAGONN)
    slot_max        the largest of each of m random sets, without a threshold
    compact         the positions of a mask's True elements, for your own masks

All have static sizes and work under jit, vmap and shard_map. x is a float vector of d elements
without NaN. float64 is ranked as float32. Seeds are integers below 2**32, and may be traced. A
stream has distinct int32 indices, and the values of x there, in its dtype. An empty slot has index
d and value 0.
"""

from jaxsparse.select.compaction import compact as compact
from jaxsparse.select.fast import fast_top_k as fast_top_k, slot_max as slot_max
from jaxsparse.select.groups import block_top_k as block_top_k, group_top_k as group_top_k
from jaxsparse.select.slots import hash_extract as hash_extract
from jaxsparse.select.top_k import (
    Bisection as Bisection,
    Sampled as Sampled,
    bisection_top_k as bisection_top_k,
    sampled_top_k as sampled_top_k,
    threshold_top_k as threshold_top_k,
    top_k as top_k,
)
