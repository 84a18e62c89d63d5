"""gTop-k SGD (Shi et al., ICDCS 2019)."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.arrays.settings import entries
from jaxsparse.contrib.gtopk_sum import gtopk_sum as gtopk_all_reduce
from jaxsparse.reducers.base import Conservation, Kept, Sums, keep_merged, mask_of
from jaxsparse.reducers.entries import EntryReducer
from jaxsparse.select.top_k import SELECTORS


@dataclasses.dataclass(frozen=True)
class GTopK(EntryReducer):
    """gTop-k SGD (Shi et al., ICDCS 2019): each addition of two vectors keeps k entries.

    A step has log2 W exchanges of k = density d entries each, 2 k words in COO. If W is no power of
    two, it has floor(log2 W) + 2 exchanges. (The paper has a tree and a broadcast, twice as many.)
    Momentum is masked where a worker's own entry was delivered.

    Args:
        residuals: rule for residuals. "global" keeps all that is not delivered. "published" is the
            paper's rule, which loses a part of it.
    """

    _: dataclasses.KW_ONLY
    residuals: Literal["global", "published"] = "global"

    @property
    def conservation(self) -> Conservation:
        return super().conservation if self.residuals == "global" else "leaks"

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        stream = SELECTORS[self.selection](x, entries(self.density, x.size))
        result = gtopk_all_reduce(stream, x.size, axis_name=axis_name, codec=self.codec)
        unselected = x.at[stream.indices].set(0, mode="drop")
        discarded = result.residual if self.residuals == "global" else jnp.zeros_like(x)
        selected = mask_of(stream, x.size)
        return keep_merged(x, result.total, unselected + discarded, selected, state)
