"""What error feedback carries from step to step."""

from typing import Any, NamedTuple

from jaxtyping import Array, Int

from jaxsparse.per_worker import PerWorker
from jaxsparse.reducers.base import Info


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`, for buckets of d_1, d_2, ... and n dense elements.

    With a `dense_axis`, d_i are the elements of this device's shard of a bucket, and all arrays
    that differ between shards (a mean's momentum, what reducers carry) are `PerWorker`, too.
    """

    # float32 or bfloat16 [1, d_i] as a worker sees it: not delivered so far
    residual: tuple[PerWorker, ...]
    momentum: tuple[Any, ...]  # PerWorker of the same, or of the mean; () without momentum
    dense_momentum: Any  # float32[n], the mean's momentum, replicated; () if n = 0 or without
    reducers: tuple[Any, ...]  # one carried state a bucket
    skipped: Int[Array, ""]  # int32: steps skipped because a gradient was not finite
    info: Info  # of the last step that was not skipped, summed over buckets and shards
    pending: Any = ()  # PerWorker float32[1, n], the last dense gradient; () if n = 0 or without
    roundings: Any = ()  # uint32: how often residuals were rounded to bfloat16; () if they are not
