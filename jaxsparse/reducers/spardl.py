"""SparDL (Zhao et al., ICDE 2024)."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import codecs
from jaxsparse.collectives import spar_all_gather, wire
from jaxsparse.collectives.bruck_all_gather import bruck_all_gather
from jaxsparse.collectives.group import Group
from jaxsparse.collectives.spar_reduce_scatter import spar_reduce_scatter
from jaxsparse.reducers.base import Laws, Reduced
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.reducers.residuals import settle
from jaxsparse.reducers.selection import Selection, check_selection, selector
from jaxsparse.select.checks import check_vector
from jaxsparse.settings import static_int
from jaxsparse.stream import to_dense


@dataclasses.dataclass(frozen=True)
class SparDLReducer:
    """Spar-Reduce-Scatter within teams, Spar-All-Gather between them, all-gather within them.

    With n = W / teams blocks of m = ceil(d / n) elements, L = ceil(density d / n) entries of each
    are delivered, whatever the workers' supports: the budget is met by cutting, never overrun.

    Attributes:
        density: share of the elements that is delivered, in (0, 1].
        teams: into how many teams the workers divide. More of them save rounds, up to
            log2(teams), and cost words.
        gather: how teams add up their blocks: "recursive" (R-SAG) for a power of two of teams,
            "bruck" (B-SAG, adaptive) for any number, but not with a `dense_axis`.
        residuals: "global" feeds back all that is not delivered. The others leak and are here for
            comparison: "partial" forgets what other workers cut of an entry that is delivered in
            part, "local" all but what a worker itself left out at first.
        codec: of the messages.
        selection: "fast" or "exact" top-k.
    """

    density: float
    teams: int = 1
    gather: Literal["recursive", "bruck"] = "recursive"
    residuals: Literal["global", "partial", "local"] = "global"
    codec: codecs.Codec = codecs.COO
    selection: Selection = "fast"

    def __post_init__(self):
        check_density(self.density)
        codecs.check_codec(self.codec)
        check_selection(self.selection)
        object.__setattr__(self, "teams", static_int("teams", self.teams))
        if self.gather not in ("recursive", "bruck"):
            raise ValueError(f"gather={self.gather!r} is unknown: use 'recursive' or 'bruck'")
        if self.residuals not in ("global", "partial", "local"):
            raise ValueError(
                f"residuals={self.residuals!r} is unknown: use 'global', 'partial' or 'local'"
            )

    @property
    def laws(self) -> Laws:
        """All mass is conserved with global residuals only; B-SAG's h never asks for all."""
        whole = self.codec.is_exact and (self.teams == 1 or self.gather == "recursive")
        return Laws(conserves=self.residuals == "global", dense_at_full_budget=whole)

    @property
    def adapts_messages(self) -> bool:
        """B-SAG's follow h."""
        return self.gather == "bruck" and self.teams > 1

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["SparDLReducer", ...]:
        """The same for each bucket."""
        return (self,) * len(sizes)

    def init(self, size: int) -> Any:
        """B-SAG's h, step and flag; else no state."""
        if self.gather == "recursive" or self.teams == 1:
            return ()
        # What it starts with depends on the number of workers, unknown here: see `_started`.
        return spar_all_gather.Adaptation(jnp.float32(0), jnp.float32(0), jnp.bool_(False))

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        check_vector("x", x)
        team, across = Group.teams(axis_name, self.teams)
        n, size = team.size, -(-x.size // team.size)
        k = min(size, entries(self.density, x.size, parts=n))
        pick = selector(self.selection)

        rows = jnp.pad(x, (0, n * size - x.size)).reshape(n, size)
        withheld = jnp.zeros_like(rows)
        if self.residuals != "global":
            first = jax.lax.map(lambda row: to_dense(pick(row, k), size), rows)
            rows, withheld = first, rows - first
        own, discarded, selected = spar_reduce_scatter(rows, k, team, select=pick, codec=self.codec)

        extra = []  # words beside the entries
        if self.teams > 1 and self.gather == "recursive":
            own, cut = spar_all_gather.recursive(own, size, k, across, codec=self.codec)
            discarded = discarded.at[team.rank].add(cut)
        elif self.teams > 1:
            state = _started(state, k, self.teams)
            (own, cut), count = spar_all_gather.bruck(
                own, size, k, across, state, select=pick, codec=self.codec
            )
            discarded = discarded.at[team.rank].add(cut)
            extra = [count.astype(jnp.uint32)[None]]

        # Workers of equal rank in all teams round the same block.
        lost = (own.values - self.codec.rounded(own.values)) / self.teams
        discarded = discarded.at[team.rank, own.indices].add(lost, mode="drop")
        message = jnp.concatenate([self.codec.encode(own, size), *extra])
        messages = bruck_all_gather(message, team)
        if extra:
            counts = wire.replicated(messages[:, -1].astype(jnp.float32), axis_name)
            state = state.adapt(jnp.mean(counts), k, self.teams)
            messages = messages[:, :-1]
        streams = jax.vmap(lambda words: self.codec.decode(words, k, size, x.dtype))(messages)
        total = jax.vmap(lambda stream: to_dense(stream, size))(streams)

        flat = lambda blocks: blocks.reshape(-1)[: x.size]
        total = wire.replicated(flat(total), axis_name)
        if self.residuals == "global":
            return settle(x, total, flat(discarded), flat(selected), state, n * self.teams)
        reduced = settle(x, total, flat(withheld), flat(selected), state, n * self.teams)
        return reduced if self.residuals == "partial" else reduced._replace(residual=flat(withheld))


def _started(state: spar_all_gather.Adaptation, k: int, teams: int) -> spar_all_gather.Adaptation:
    """The state, or before the first exchange what Alg. 2 starts with.

    A state that was adapted among another number of workers is brought within today's bounds.
    """
    start = spar_all_gather.Adaptation.start(k, teams)
    now = state.within(k, teams)
    return jax.tree.map(lambda now, first: jnp.where(state.h > 0, now, first), now, start)
