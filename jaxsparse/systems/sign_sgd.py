"""EF-signSGD (Karimireddy et al., ICML 2019): one bit a value."""

from typing import Unpack

import optax

from jaxsparse.feedback import error_feedback
from jaxsparse.feedback.options import LeafOptions, exchange_options
from jaxsparse.quantize import Sign
from jaxsparse.systems.quantized import Quantized
from jaxsparse.systems.row import Case, System


def signed(group_size: int = 1024) -> Quantized:
    """The reducer of `sign_sgd`, for the same argument."""
    return Quantized(Sign(group_size), "nearest")


@exchange_options()
def sign_sgd(
    *,
    group_size: int = 1024,
    **options: Unpack[LeafOptions],
) -> optax.GradientTransformationExtraArgs:
    """EF-signSGD (Karimireddy et al., ICML 2019): one bit a value, and error feedback.

    Each value becomes plus or minus the mean magnitude of its group, and so does each sum on its
    way back, as in dist-EF-blockSGD (Zheng et al., NeurIPS 2019). A worker receives
    2 (W - 1)/W (1 / 32 + 1 / group_size) d words a step: a 31st of a dense all-reduce's.

    `momentum` acts before the exchange (momentum correction), without masking, because everything
    is sent at each step. With Adam, chain `jaxsparse.per_worker(optax.scale_by_adam())` before it.
    1-bit Adam (Tang et al., ICML 2021) sends signs of momenta, and divides them by a second moment
    that is frozen after a warm-up. It would take three transformations of Optax around this one. It
    is not provided, because where coordinates have unlike scales, the mean magnitude of a group
    divided by small second moments makes large steps.

    Args:
        group_size: number of consecutive values that share a scale.
        **options: as for all transformations.

    Raises:
        ValueError: settings out of range.
    """
    return error_feedback(signed(group_size), **options)


SIGN_SGD = System(
    sign_sgd,
    signed,
    summary="[EF-signSGD](https://arxiv.org/abs/1901.09847): one bit a value",
    received="d (W-1)/W (1/4 + 8/group_size)",
    cases={"": Case({"group_size": 64}, {"group_size": 64})},
    settings=lambda request: {},
    follows_density=False,
)
