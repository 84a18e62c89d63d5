"""EF-signSGD (Karimireddy et al., ICML 2019): one bit a value."""

import dataclasses

from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.quantize import Format
from jaxsparse.systems.quantized import Quantized
from jaxsparse.systems.table import system


@dataclasses.dataclass(frozen=True)
class _SignSGD(SystemOptions):
    """EF-signSGD (Karimireddy et al., ICML 2019): one bit a value, and error feedback.

    Each value becomes plus or minus the mean magnitude of its group, and so does each sum on its
    way back, as in dist-EF-blockSGD (Zheng et al., NeurIPS 2019). A worker receives
    2 (W - 1)/W (1 / 32 + 1 / group_size) d words a step: a 31st of a dense all-reduce's. It is
    `quantized("sign", group_size=1024, scale="float32")` by another name.

    `momentum` acts before the exchange (momentum correction), without masking, because everything
    is sent at each step. With Adam, chain `jaxsparse.per_worker(optax.scale_by_adam())` before it.
    1-bit Adam (Tang et al., ICML 2021) sends signs of momenta, and divides them by a second moment
    that is frozen after a warm-up. It would take three transformations of Optax around this one. It
    is not provided, because where coordinates have unlike scales, the mean magnitude of a group
    divided by small second moments makes large steps.

    Args:
        group_size: number of consecutive values that share a scale.

    Raises:
        ValueError: settings out of range.
    """

    group_size: int = dataclasses.field(default=1024, kw_only=True)

    def made(self) -> Quantized:
        return Quantized(Format("sign", self.group_size, "float32"), "nearest")


sign_sgd = system(
    _SignSGD,
    "sign_sgd",
    summary="[EF-signSGD](https://arxiv.org/abs/1901.09847): one bit a value",
    received="d (W-1)/W (1/4 + 8/group_size)",
)
