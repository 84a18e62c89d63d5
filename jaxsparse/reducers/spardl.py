"""SparDL (Zhao et al., ICDE 2024)."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.arrays.settings import Count, check_vector, entries
from jaxsparse.arrays.stream import to_dense
from jaxsparse.collectives.spardl import Adaptation, bruck, recursive, spar_reduce_scatter
from jaxsparse.comm import wire
from jaxsparse.comm.wire import Group, bruck_all_gather
from jaxsparse.reducers.base import Conservation, Kept, Sums, keep_merged
from jaxsparse.reducers.entries import EntryReducer
from jaxsparse.select.top_k import SELECTORS


@dataclasses.dataclass(frozen=True)
class SparDL(EntryReducer):
    """SparDL (Zhao et al., ICDE 2024): a sparse all-reduce that never exceeds its budget.

    With one team, a step has 2 ceil(log2 W) exchanges and 4 k (W - 1) / W words in COO, for any
    number of workers and any supports. k is density d, rounded up to a multiple of W. With T teams,
    it has 2 ceil(log2(W / T)) + ceil(log2 T) exchanges and 4 k (W - T) / W words within teams.
    Between teams it has 2 k log2(T) T / W words ("recursive"), or between 2 k (T - 1) / W, where
    teams put forward different entries, and T times that, where they put forward the same ("bruck",
    whose messages adapt to within a tenth).

    With n = W / teams blocks of m = ceil(d / n) elements, at most L = ceil(density d / n) entries
    of each are delivered, for any supports of the workers. "bruck" brings the mean of the blocks'
    entries to L. Where teams overlap much in some blocks and little in others, the former deliver
    less than L. Momentum is masked where a worker put forward an entry that was delivered.

    Args:
        density: share of each bucket's elements that a step delivers, in (0, 1].
        teams: number of teams of workers, a divisor of their number. More teams mean fewer rounds,
            or as many. With "recursive", two teams receive as many words as one, and four or more
            receive more. With "bruck", more teams receive fewer words where they put forward
            different entries (down to 2 k (2 W - T - 1) / W), and more where they put forward the
            same ones. `jaxsparse.planner.autotune` can choose it.
        gather: the way in which teams add up their blocks. "recursive" needs a power of two of
            teams. "bruck" takes any number and adapts its messages, but not where a worker has
            several devices.
        residuals: rule for residuals. "global" loses nothing. "partial" and "local" lose a part,
            for comparison. Both also change what is sent: each block is cut to L entries before the
            first exchange, and what this cuts off is their residual of local parts. "global" cuts a
            block only just before it is sent.
        codec: see `top_k`, but with `codecs.EliasFano`, "bruck" needs value_bits=16 or 32.
        selection: the way in which entries are selected. "fast" keeps nearly the largest entries of
            a block, "exact" the largest.
    """

    _: dataclasses.KW_ONLY
    teams: Count = 1
    gather: Literal["recursive", "bruck"] = "recursive"
    residuals: Literal["global", "partial", "local"] = "global"

    @property
    def conservation(self) -> Conservation:
        return super().conservation if self.residuals == "global" else "leaks"

    def init(self, size: int) -> Any:
        """B-SAG's h, step and flag, or no state without B-SAG."""
        if self.gather == "recursive" or self.teams == 1:
            return ()
        # Zeros, because the start depends on the number of workers, unknown here: see `_started`.
        return Adaptation(jnp.float32(0), jnp.float32(0), jnp.bool_(False))

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        team, across = Group.teams(axis_name, self.teams)
        n, rank = team.size, team.rank
        check_vector("x", x)
        size = -(-x.size // n)
        k = min(size, entries(self.density, x.size, parts=n))
        pick = SELECTORS[self.selection]

        rows = jnp.pad(x, (0, n * size - x.size)).reshape(n, size)
        withheld = jnp.zeros_like(rows)
        if self.residuals != "global":
            first = jax.lax.map(lambda row: to_dense(pick(row, k), size), rows)
            rows, withheld = first, rows - first
        own, discarded, selected = spar_reduce_scatter(rows, k, team, select=pick, codec=self.codec)

        extra = []  # words beside the entries
        if self.teams > 1 and self.gather == "recursive":
            own, cut = recursive(own, size, k, across, codec=self.codec)
            discarded = discarded.at[rank].add(cut)
        elif self.teams > 1:
            state = _started(state, k, self.teams)
            own, cut, count = bruck(own, size, k, across, state, select=pick, codec=self.codec)
            discarded = discarded.at[rank].add(cut)
            extra = [count.astype(jnp.uint32)[None]]

        rounded = self.codec.rounded(own, size)
        message = self.codec.encode(own, size)
        # Workers of equal rank in all teams round the same block.
        lost = (own.values - rounded) / self.teams
        discarded = discarded.at[rank, own.indices].add(lost, mode="drop")
        messages = bruck_all_gather(jnp.concatenate([message, *extra]), team)
        if extra:
            counts = wire.replicated(messages[:, -1].astype(jnp.float32), axis_name)
            count = wire.most_of_devices(jnp.mean(counts), axis_name)
            state = state.adapt(count, k, self.teams)
            messages = messages[:, :-1]
        decode = functools.partial(self.codec.decode, capacity=k, size=size, dtype=x.dtype)
        total = jax.vmap(functools.partial(to_dense, size=size))(jax.vmap(decode)(messages))
        total = wire.replicated(total.reshape(-1)[: x.size], axis_name)
        # "global": all that was cut. "partial": where a sum arrived, what the first cut withheld.
        # "local": what the first cut withheld, everywhere.
        kept = discarded if self.residuals == "global" else withheld
        kept, selected = (blocks.reshape(-1)[: x.size] for blocks in (kept, selected))
        sums, mine = keep_merged(x, total, kept, selected, state)
        return sums, mine._replace(residual=kept) if self.residuals == "local" else mine


def _started(state: Adaptation, k: int, teams: int) -> Adaptation:
    """The state, or before the first exchange the one with which Alg. 2 starts.

    A state that was adapted with another number of workers is brought within today's bounds.
    """
    start = Adaptation.start(k, teams)
    now = state.within(k, teams)
    return jax.tree.map(lambda now, first: jnp.where(state.h > 0, now, first), now, start)
