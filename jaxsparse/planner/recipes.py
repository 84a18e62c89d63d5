"""The recipes of a plan: how to train, what to exchange, how often and in how many bits.

Each was trained. Its cost is in nats above dense gradients by the same optimizer, steps and seeds,
of the model in `MEASURED`. A test finds them in the runs of `benchmarks/frontier.py`.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxsparse import exchanges
from jaxsparse.feedback import Exchange

MEASURED = "a transformer of 136,384 parameters, 8 workers and 2,000 steps"
# Standard deviation over seeds of recipes that have several, for those that have one.
USUAL_SPREAD = 0.0124


class Cost(NamedTuple):
    """What a recipe cost."""

    nats: float  # a byte, above dense gradients
    spread: float | None = None  # standard deviation over seeds. None: one seed
    seeds: int = 1

    @property
    def most(self) -> float:
        """The cost with one standard deviation."""
        return self.nats + (USUAL_SPREAD if self.spread is None else self.spread)

    def __str__(self) -> str:
        seeds = "1 seed, usual spread" if self.spread is None else f"{self.seeds} seeds"
        return f"{self.nats:+.3f} ± {self.most - self.nats:.3f} nats a byte ({seeds})"


class RecipeExchange(NamedTuple):
    """One of the exchanges with its settings."""

    make: Callable[..., Exchange]
    args: tuple[str | int, ...]
    settings: Mapping[str, Any]
    passes: float  # computing of an exchange on an H100, in reads and writes of the vector

    def transformation(self, **options: Any) -> Exchange:
        return self.make(*self.args, **self.settings, **options)

    def written(self, **options: str) -> str:
        """The same as Python, with options as Python."""
        settings = {**{name: repr(value) for name, value in self.settings.items()}, **options}
        given = [*map(json.dumps, self.args), *(f"{name}={x}" for name, x in settings.items())]
        return f"jaxsparse.{self.make.__name__}({', '.join(given)})"


# Formats of fewer bits compute as int8 does, which was timed with 4 and with 32 workers. The time
# of chunks grows with the workers: 9 passes for 2, 37 for 32. These are for 8.
EXCHANGES = {
    "dense": RecipeExchange(exchanges.dense, (), {}, 2.3),
    **{x: RecipeExchange(exchanges.quantized, (x,), {}, 9.3) for x in ("int4", "int2", "sign")},
    "top 1/8": RecipeExchange(exchanges.chunked_top_k, (512,), {"decay": 0.95}, 16.8),
}


def island_options(exchange: str) -> dict[str, tuple[str, Any]]:
    """Options of an exchange on islands, as Python and as values.

    Islands share no mesh, and exchange in one message. Compressed, all leaves have residuals, so
    that a late island loses nothing.
    """
    options: dict[str, tuple[str, Any]] = {"axis_name": ("None", None)}
    if exchange != "dense":
        options["is_dense"] = "lambda *_: False", lambda *_: False
    if EXCHANGES[exchange].make is exchanges.quantized:
        options["gather"] = "True", True
    return options


# Rate and momentum of DiLoCo's outer optimizer. Published are 0.7 and 0.9, for some hundred steps
# from one exchange to the next. In runs of 20 to 200 exchanges 0.6 ended lower
# (`benchmarks/frontier_map.py --outer`).
NESTEROV = (0.7, 0.6)

_INNER = {
    "adamw": "inner = optax.adamw(lr, b2=0.95, weight_decay=0.1)",
    "muon": """\
# Muon takes all matrices: give muon_weight_dimension_numbers to leave embeddings and the last layer
# to Adam, and for kernels of more than two dimensions.
inner = optax.contrib.muon(
    lr, adam_b2=0.95, weight_decay=0.1, adam_weight_decay=0.1, consistent_rms=0.2
)""",
}
_GRADIENTS = """\
# Yours are mesh, params, lr, batches, and loss_of(params, batch), of one worker.
{inner}
tx = optax.chain({exchange}, inner)


@jax.jit
def step(params, opt_state, batch):
    loss, grads = jaxsparse.value_and_grad(loss_of)(params, batch)  # a row for each worker
    updates, opt_state = tx.update(grads, opt_state, params)  # ordinary means
    return optax.apply_updates(params, updates), opt_state, loss.mean()


params, opt_state = jaxsparse.shard((params, tx.init(params)), mesh)
for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)"""
_STEP = """\
{inner}


{jit}def step(state, batch):  # of one {worker}: it exchanges nothing
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = inner.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


exchange = {exchange}
optimizer = {optimizer}  # of the exchanged mean
"""
_LOCAL = f"""\
# Yours are mesh, params, lr, batches, and loss_of(params, batch).
{_STEP}train = jaxsparse.LocalSteps(step, exchange, optimizer, mesh, every={{every}})
state = train.init((params, inner.init(params)))
for batch in batches:
    state, losses = train(state, batch)
params = train.finish(state).params"""
_ISLANDS = f"""\
# Yours are params, lr, batches, loss_of(params, batch), a bucket or folder, and the island's name.
{_STEP}train = jaxsparse.islands.Islands(
    step,
    exchange,
    optimizer,
    jaxsparse.islands.Store("s3://bucket/run-7"),
    name="oslo",
    every={{every}},
    {{settings}},
)
state = train.join((params, inner.init(params)))
for batch in batches:
    state, loss = train(state, batch)
params = train.leave(state).params"""


class Recipe(NamedTuple):
    """How to train and what to exchange."""

    #: "gradients", "local" (the mean of displacements of local steps) or "diloco" (the same with
    #: Nesterov momentum outside, by `NESTEROV`).
    what: str
    every: int  #: steps from one exchange to the next, H
    exchange: str  #: a key of `EXCHANGES`
    warm: int  #: percentage of initial steps that exchange every step
    costs: Mapping[str, Cost]  #: by the optimizer, "adamw" or "muon", where it was trained

    def __str__(self) -> str:
        what = self.what if self.what == "gradients" else f"{self.what} {self.every}"
        warm = f", warm {self.warm} %" if self.warm else ""
        return f"{what}, {self.exchange}{warm}"

    @property
    def is_for_islands(self) -> bool:
        """Islands have local steps, and one number of them."""
        return self.what != "gradients" and not self.warm

    def exchanges(self, steps: int) -> int:
        """The number of exchanges in so many steps, the last one at the end included."""
        first = self.warm * steps // 100
        return first + math.ceil((steps - first) / self.every)

    def written(
        self,
        optimizer: str,
        steps: int,
        island: Mapping[str, Any] | None = None,
    ) -> str:
        """The recipe as a program, for a run of so many steps.

        With `island`, settings of `jaxsparse.islands.Islands`, it is the program of an island.
        """
        every, outer, template = str(self.every), "1.0", _LOCAL if island is None else _ISLANDS
        if self.what == "gradients":
            template = _GRADIENTS
        if self.what == "diloco":
            outer = f"{NESTEROV[0]}, {NESTEROV[1]}, nesterov=True"
        if first := self.warm * steps // 100:
            every = f"jaxsparse.Stages((1, {self.every}), ({first},))"
        given = {} if island is None else island_options(self.exchange)
        options = {name: text for name, (text, _) in given.items()}
        return template.format(
            inner=_INNER[optimizer],
            exchange=EXCHANGES[self.exchange].written(**options),
            optimizer=f"optax.sgd({outer})",
            every=every,
            worker="worker" if island is None else "island",
            jit="" if island is None else "@jax.jit\n",
            settings=", ".join(f"{name}={value!r}" for name, value in (island or {}).items()),
        )


def _recipe(name: str, **costs: tuple[float, float, int] | tuple[float]) -> Recipe:
    """A recipe by its name. Costs are nats, and with several seeds also spread and seeds."""
    what, exchange, warm, *_ = [*name.split(", "), "", ""]
    what, _, every = what.partition(" ")
    percent = int(warm.removeprefix("warm ").removesuffix(" %") or 0)
    known = {optimizer: Cost(*cost) for optimizer, cost in costs.items()}
    return Recipe(what, int(every or 1), exchange, percent, known)


DENSE = _recipe("gradients, dense", adamw=(0.0,), muon=(0.0,))
RECIPES = (
    _recipe("gradients, int4", adamw=(0.0057, 0.0070, 3), muon=(0.0032, 0.0088, 3)),
    _recipe("local 3, int4", adamw=(0.0506,), muon=(0.0443, 0.0097, 3)),
    _recipe("local 5, sign", muon=(0.0580, 0.0117, 3)),
    _recipe("local 10, dense", adamw=(0.1386, 0.0037, 2), muon=(0.0660, 0.0074, 3)),
    _recipe("local 10, int4", adamw=(0.1412, 0.0064, 3), muon=(0.0642, 0.0088, 3)),
    _recipe("local 10, int4, warm 10 %", adamw=(0.0975,)),
    _recipe("local 10, int2", adamw=(0.1507,), muon=(0.0632, 0.0074, 3)),
    _recipe("local 10, sign", adamw=(0.1711, 0.0092, 3), muon=(0.0694, 0.0107, 3)),
    _recipe("local 10, sign, warm 10 %", muon=(0.0592, 0.0067, 3)),
    _recipe("local 10, top 1/8", adamw=(0.1561,), muon=(0.0721,)),
    _recipe("local 30, int4", adamw=(0.2707,), muon=(0.1135,)),
    _recipe("local 30, sign", adamw=(0.3390,), muon=(0.1594, 0.0031, 3)),
    _recipe("diloco 10, int4", adamw=(0.1241, 0.0064, 3), muon=(0.0674,)),
    _recipe("diloco 30, int4", adamw=(0.2128, 0.0084, 3), muon=(0.0830, 0.0121, 3)),
    _recipe("diloco 30, int2", muon=(0.0970, 0.0064, 3)),
    _recipe("diloco 30, sign", muon=(0.1440, 0.0056, 3)),
    _recipe("diloco 100, int4", adamw=(0.3266,), muon=(0.1655, 0.0022, 3)),
)
