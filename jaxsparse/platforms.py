"""Two forms of one function: which of them runs is decided by the device that it is compiled for.

Loops over tiles, whose working set fits into a cache, suit a CPU. A GPU starts at least one kernel
a turn, some microseconds each, and has threads for a whole vector at once.
"""

from collections.abc import Callable
from typing import TypeVar

from jax import Array, lax

__all__ = ["by_platform"]

# By a name of this file's, for tests and benchmarks that choose otherwise.
platform_dependent = lax.platform_dependent

Result = TypeVar("Result")


def by_platform(
    *operands: Array, default: Callable[..., Result], gpu: Callable[..., Result]
) -> Result:
    """`gpu(*operands)` on NVIDIA's and AMD's GPUs, elsewhere `default(*operands)`.

    Both are traced, one is compiled. They must return the same, bit for bit unless the caller says
    otherwise to its own: a test holds one against the other on CPU.

    Args:
        operands: arrays.
        default: for CPUs and everything else.
        gpu: for GPUs.
    """
    return platform_dependent(*operands, default=default, cuda=gpu, rocm=gpu)
