"""The table of exchanges: what docs show of each, and tests check. A new reducer has a row here."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jaxsparse
from jaxsparse import contrib, exchanges
from jaxsparse.reducers import Reducer


class System(NamedTuple):
    """A row of the table."""

    transformation: Callable[..., Any]
    summary: str  # in Markdown
    received: str  # bytes that a worker receives in a step: d elements, k = density d, W workers
    # The law of its steps. "sums": that of `jaxsparse.exchange`, as the reducer's conservation
    # says. "differences": the update is the mean of the workers' momenta, less that of residuals.
    law: Literal["sums", "differences"] = "sums"

    @property
    def name(self) -> str:
        return self.transformation.__name__

    @property
    def path(self) -> str:
        """Where users find it."""
        home = jaxsparse if hasattr(jaxsparse, self.name) else contrib
        return f"{home.__name__}.{self.name}"

    def reducer(self, *args: Any, **settings: Any) -> Reducer:
        """The reducer of the whole tree with these settings."""
        if self.law == "differences":
            return settings["reducer"]
        return self.transformation(*args, **settings).reducer


SYSTEMS = {
    "omni_reduce": System(
        exchanges.omni_reduce,
        "[OmniReduce](https://dl.acm.org/doi/10.1145/3452296.3472904): a psum of the "
        "union's blocks",
        "8 (elements there is room for) (W-1)/W, and d/(4 block_size)",
    ),
    "sparse_all_gather": System(
        exchanges.sparse_all_gather,
        "blocks, gathered, as Parallax and Horovod do with sparse gradients",
        "4 k (W-1) (1 + 1/block_size)",
    ),
    "chunked_top_k": System(
        exchanges.chunked_top_k,
        "[SparseLoCo](https://arxiv.org/abs/2508.15706)'s exchange: k of every 4096 "
        "elements, 7 to 10 bits an entry",
        "1.34 k (W-1)",
    ),
    "demo": System(
        contrib.demo,
        "[DeMo](https://arxiv.org/abs/2411.19870): momenta of the workers' own, whose "
        "largest cosine coefficients are sent, 25 bits each",
        "3.07 k (W-1)",
    ),
    "dense": System(
        exchanges.dense,
        "exact mean by all-reduce",
        "8 d (W-1)/W",
    ),
    "dragonn": System(
        exchanges.dragonn,
        "DRAGONN (ICML 2022): entries hashed into k slots",
        "8 k (W-1)",
    ),
    "ef21_sgdm": System(
        contrib.ef21_sgdm,
        "[EF21-SGDM](https://arxiv.org/abs/2305.15155): differences of momenta and "
        "their estimates, by any other reducer",
        "the reducer's",
        law="differences",
    ),
    "gtopk": System(
        contrib.gtopk,
        "[gTop-k](https://arxiv.org/abs/1901.04359): k entries left of each sum of two workers'",
        "8 k log2 W; 8 k (floor(log2 W) + 2) if W is no power of two",
    ),
    "ok_topk": System(
        contrib.ok_topk,
        "[Ok-Topk](https://arxiv.org/abs/2201.07598): thresholds that are reused, balanced regions",
        "24 C (W-1), C = 2 k/W",
    ),
    "powersgd": System(
        exchanges.powersgd,
        "[PowerSGD](https://arxiv.org/abs/1905.13727): factors of low rank of each matrix",
        "4 r (n+m) (W-1)/W for each n x m matrix",
    ),
    "quantized": System(
        exchanges.quantized,
        "all values in a format of 1 to 16 bits, fed back",
        "d (W-1)/W (bits/4 + 4/group_size)",
    ),
    "qsgd": System(
        exchanges.qsgd,
        "[QSGD](https://arxiv.org/abs/1610.02132): all values in 2, 4 or 8 bits",
        "d (W-1)/W (bits/4 + 8/group_size)",
    ),
    "sign_sgd": System(
        contrib.sign_sgd,
        "[EF-signSGD](https://arxiv.org/abs/1901.09847): one bit a value",
        "d (W-1)/W (1/4 + 8/group_size)",
    ),
    "random_k": System(
        exchanges.random_k,
        "the same random coordinates on all workers, no indices",
        "8 k (W-1)/W",
    ),
    "s2_reducer": System(
        exchanges.s2_reducer,
        "S2 Reducer (2021): a sketch of the blocks that are not zero; unbiased, noisy",
        "8 rows cols (W-1)/W, and d/(4 block_size)",
    ),
    "sketched_sgd": System(
        exchanges.sketched_sgd,
        "[Sketched-SGD](https://arxiv.org/abs/1903.04488): count sketch, then the exact"
        " values of its candidates",
        "8 (rows cols + P k) (W-1)/W",
    ),
    "sparcml": System(
        exchanges.sparcml,
        "[SparCML](https://arxiv.org/abs/1802.08021): k of every 512 elements, exactly "
        "summed by the all-reduce that suits the network",
        "by algorithm",
    ),
    "spardl": System(
        exchanges.spardl,
        "[SparDL](https://arxiv.org/abs/2304.00737): reduce-scatter and all-gather that"
        " never exceed k entries",
        "16 k (W-1)/W",
    ),
    "top_k": System(
        exchanges.top_k,
        "local top-k, all-gathered (TopkA)",
        "8 k (W-1)",
    ),
    "dgc": System(
        exchanges.dgc,
        "[DGC](https://arxiv.org/abs/1712.01887): TopkA by a sampled threshold, momentum corrected",
        "8 k (W-1)",
    ),
    "ms_topk": System(
        contrib.ms_topk,
        "MSTopk (MLSys 2021): TopkA by bisection",
        "8 k (W-1)",
    ),
    "true_top_k": System(
        exchanges.true_top_k,
        "top k of the exact mean, error feedback: the ceiling for sketches",
        "8 d (W-1)/W",
    ),
}
