"""One recipe for a run, or none: what a trainer gains, what that costs, and how to write it."""

import dataclasses
import functools
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.arrays import layout
from jaxsparse.arrays.settings import static_count, static_float
from jaxsparse.comm.links import Link, rounds
from jaxsparse.planner.recipes import (
    DENSE,
    EXCHANGES,
    MEASURED,
    RECIPES,
    Cost,
    Recipe,
    island_options,
)
from jaxsparse.traffic.report import WireBytes
from jaxsparse.traffic.traced import traced_bytes

# What an NVIDIA H100 reads and writes in a donated x * 2, in bytes a second.
MEMORY_BANDWIDTH = 2.856e12
# What takes more than this share of the hours is not worth the change. Among recipes that take this
# many times the hours of the fastest, the cost decides.
_MUCH_FASTER, _ABOUT_AS_FAST = 0.9, 1.05
_MOST = 2**44
# An island's requests besides messages, one after the other: two looks for a decision with a list
# between them, one more look or the decision, and a look whether the others are ahead. It looks
# each `poll` seconds.
_REQUESTS, _POLL = 5, 0.2


class Moved(NamedTuple):
    """What an exchange moves."""

    messages: int  # that a worker waits for, one after the other
    received: float  # bytes that it receives

    @classmethod
    def counted(cls, moved: WireBytes) -> "Moved":
        """What a program's collectives move."""
        waits = sum(c.count * rounds(c.op, c.group_size) for c in moved.collectives)
        return cls(waits, moved.received)


@functools.lru_cache(maxsize=256)
def moved_by(
    exchange: str,
    size: int,
    dense_size: int,
    workers: int,
    *,
    at_once: bool = False,
    islands: bool = False,
) -> Moved:
    """What one exchange (a key of `EXCHANGES`) moves.

    `size` elements may be compressed, `dense_size` ones travel dense. In buckets, unless it is
    `at_once`, between steps. An island sends a message, which the store must have before others
    read it, and reads those of the others, one after the other.
    """
    is_cut = exchange != "dense" and not (at_once or islands)
    count = max(1, -(-size // (layout.usual_bucket_size(size) if is_cut else layout.LONG_BUCKET)))
    shapes = {"w": (1, -(-size // count)), "b": (-(-dense_size // count),)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    options = {name: value for name, (_, value) in island_options(exchange).items()}
    options["axis_name"] = "data"
    options = options if islands else {}
    if exchange != "dense":
        options["bucket_size"] = layout.LONG_BUCKET
    tx = EXCHANGES[exchange].transformation(**options)
    # Of two islands, one receives a message of the other.
    waits, received = Moved.counted(traced_bytes(tx, tree, 2 if islands else workers))
    if islands:
        return Moved(workers + _REQUESTS, workers * count * received)
    return Moved(count * waits, count * received)


class Forecast(NamedTuple):
    """A run by one recipe. Bytes and seconds of a step are means."""

    recipe: Recipe
    received: float  # bytes that a worker, maybe of many devices, receives in a step
    exchange: float  # seconds of an exchange
    step: float  # seconds of a step, with its share of an exchange
    hours: float  # of the whole run
    cost: Cost
    overlap: int = 0  # steps of an island beside an exchange


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer of `plan`. It prints as text."""

    #: the recipe to take. None: leave your trainer as it is, or, of islands, no recipe costs so
    #: little.
    best: Forecast | None
    program: str  #: `best` as Python
    dense: Forecast  #: dense gradients
    forecasts: tuple[Forecast, ...]  #: of all recipes of the optimizer, the fastest first
    given: str  #: what was asked, in words
    answer: str  #: what to do, in words

    @property
    def speedup(self) -> float:
        """Hours of dense gradients over those of `best`."""
        return 1.0 if self.best is None else self.dense.hours / self.best.hours

    def __str__(self) -> str:
        lines = [self.given, f"dense gradients: {_told(self.dense)}"]
        if self.best is None:
            return "\n".join([*lines, self.answer])
        lines += [f"{self.best.recipe}: {_told(self.best)}", self.answer, "", self.program]
        return "\n".join(lines)


def plan(
    params: Any,
    workers: int,
    link: Link,
    step_seconds: float,
    *,
    islands: bool = False,
    steps: int = 100_000,
    optimizer: str = "adamw",
    nats: float = 0.1,
    dtype: str = "float32",
    memory_bandwidth: float = MEMORY_BANDWIDTH,
) -> Plan:
    """Answers "leave your trainer as it is", or one recipe, with its hours, bytes and cost.

    Of recipes that take a tenth less time than dense gradients and cost at most `nats`, it takes
    the fastest, or one that takes up to 5 % longer and costs less. A step takes `step_seconds` and
    its share of an exchange: rounds times latency, plus received bytes over bandwidth, plus passes
    over memory. Nothing overlaps but an island's exchange, which goes through a store: with N
    islands, messages of m bytes, latency L and bandwidth B it takes N (L + m / B) + 5 L, and
    islands look at the store every 0.2 s.

    Costs were measured on a small model, in a short run. They tell recipes apart, and are no
    prediction for yours.

    Args:
        params: a tree of arrays or of `jax.ShapeDtypeStruct`s, or their number of elements. Vectors
            and leaves below 1,024 elements travel dense.
        workers: number of workers, W: of what exchanges as one, such as a host with its GPUs.
        link: latency and bandwidth of a worker (`jaxsparse.planner.measure_network`). Of an island,
            those to the store.
        step_seconds: seconds of a step without its exchange, by this optimizer.
        islands: whether workers are islands (`jaxsparse.islands`), which meet in a store.
        steps: steps of the run.
        optimizer: "adamw" or "muon".
        nats: what the recipe may cost at most, with its standard deviation over seeds, above dense
            gradients by the same optimizer.
        dtype: "float32" or "bfloat16", in which the trainer exchanges gradients now.
        memory_bandwidth: bytes that a device reads and writes in a second. An H100's by default.

    >>> slow = plan(10**7, 8, Link(50e-6, 1.25e6), step_seconds=0.1)
    >>> str(slow.best.recipe), slow.speedup > 5
    ('local 3, int4', True)
    """
    workers, steps = static_count("workers", workers, 2), static_count("steps", steps)
    if not isinstance(link, Link):
        raise ValueError(f"link={link!r} must be a jaxsparse.Link(latency=..., bandwidth=...)")
    for name, value in (("step_seconds", step_seconds), ("memory_bandwidth", memory_bandwidth)):
        if not 0 < static_float(name, value) < math.inf:
            raise ValueError(f"{name}={value} must be above 0 and finite")
    if static_float("nats", nats) < 0:
        raise ValueError(f"nats={nats} must be at least 0")
    for name, asked, known in (
        ("optimizer", optimizer, ("adamw", "muon")),
        ("dtype", dtype, ("float32", "bfloat16")),
    ):
        if asked not in known:
            raise ValueError(f"{name}={asked!r} is unknown: use one of {', '.join(known)}")
    size, dense_size = _elements(params)
    others = (workers - 1) / workers

    def forecast(recipe: Recipe, islands: bool, share: float = 1.0) -> Forecast:
        at_once = recipe.what != "gradients"
        moved = moved_by(
            recipe.exchange, size, dense_size, workers, at_once=at_once, islands=islands
        )
        received, overlap = share * moved.received, 0
        passed = 8 * EXCHANGES[recipe.exchange].passes * (size + dense_size)
        seconds = link.seconds(moved.messages, received) + passed / memory_bandwidth
        if islands:  # its own message is sent, and all but one look in vain
            received, seconds = others * received, seconds + others * _POLL
            overlap = min(recipe.every - 1, math.ceil(seconds / step_seconds))
        exchanges = recipe.exchanges(steps) / steps
        step = step_seconds + exchanges * max(0.0, seconds - overlap * step_seconds)
        cost, hours = recipe.costs[optimizer], steps * step / 3600
        return Forecast(recipe, exchanges * received, seconds, step, hours, cost, overlap)

    dense = forecast(DENSE, False, 0.5 if dtype == "bfloat16" else 1.0)
    found = sorted(
        (
            forecast(recipe, islands)
            for recipe in RECIPES
            if optimizer in recipe.costs
            and (recipe.is_for_islands or not islands)
            and (size or recipe.exchange == "dense")  # or all leaves travel dense
        ),
        key=lambda f: (f.hours, f.cost.nats),
    )
    most = math.inf if islands else _MUCH_FASTER * dense.hours
    cheap = [f for f in found if f.cost.most <= nats and f.hours <= most]
    near = [f for f in cheap if f.hours <= _ABOUT_AS_FAST * cheap[0].hours]
    best = min(near, key=lambda f: f.cost.nats, default=None)
    program = ""
    if best is not None:
        every, island = best.recipe.every, None
        if islands:
            sending = link.seconds(1, best.received * every / (workers - 1))
            island = {
                "overlap": best.overlap,
                # To send a message, and what islands of one speed differ by.
                "grace": float(math.ceil(sending + every * step_seconds / 10 + 1)),
                # Of two, one goes on alone. Of more, one waits for another.
                "quorum": 2 if workers > 2 else 1,
            }
        program = best.recipe.written(optimizer, steps, island)
        answer = (
            f"{dense.hours / best.hours:.3g} times as fast. It cost {best.cost} above dense "
            f"{optimizer}, of at most {nats:g}, on {MEASURED}: no prediction for yours."
        )
    elif islands:
        answer = (
            f"No recipe of {optimizer} for islands cost {nats:g} nats a byte or less with its "
            f"spread, on {MEASURED}. The least is {min(f.cost.most for f in found):.3f}."
        )
    else:
        answer = (
            f"Leave your trainer as it is: no recipe that cost at most {nats:g} nats a byte with "
            f"its spread, on {MEASURED}, saves a tenth of the hours."
        )
    given = (
        f"{size + dense_size:,} parameters, {workers} {'islands' if islands else 'workers'}, "
        f"{8e-9 * link.bandwidth:g} Gbit/s, {1e3 * link.latency:g} ms, {steps:,} steps of "
        f"{step_seconds:g} s by {optimizer}"
    )
    return Plan(best, program, dense, tuple(found), given, answer)


def _elements(params: Any) -> tuple[int, int]:
    """The number of elements that may be compressed, and of those that travel dense."""
    if isinstance(params, numbers.Number | str):  # the elements of one matrix
        totals = [static_count("params", params), 0]
    else:
        totals = [0, 0]
        for path, shape in layout.named_leaves(params):
            totals[layout.small_or_vector(path, shape)] += math.prod(shape)
    if not 0 < sum(totals) <= _MOST:
        raise ValueError(f"params have {sum(totals):,} elements: plan 1 to {_MOST:,}")
    return totals[0], totals[1]


def _told(forecast: Forecast) -> str:
    power = min(3, max(0, int(math.log10(max(forecast.received, 1)) // 3)))
    received = f"{forecast.received / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
    return (
        f"a step takes {forecast.step:.3g} s with its exchange, for which a worker receives "
        f"{received}; {forecast.hours:,.1f} hours in all"
    )
