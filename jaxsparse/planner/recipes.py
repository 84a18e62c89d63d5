"""Recipes: how to train and what to exchange, how often and in how many bits.

A recipe's name says all of it:

    adamw, gradients, int4                  gradients before AdamW, by quantized("int4")
    adamw, updates, top 1/8                 updates of each worker's own Adam, by chunked top-k
    muon, local 10, sign                    Muon inside; displacements of 10 steps
    muon, local 10, int4, warm 10 %         the first tenth of the steps exchanges after each one
    muon, diloco 30, int2                   displacements of 30 steps, and DiLoCo's momentum outside

`benchmarks/frontier.py` trains them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.printing import with_options
from jaxsparse.systems import SYSTEMS, Choice, Quantized


class Exchange(NamedTuple):
    """A way to exchange: one of the systems, its settings, and options that all systems share."""

    system: str
    settings: Mapping[str, Any]
    density: float = 1.0  # share of the elements delivered, for computing times
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def choice(self) -> Choice:
        """The system with its settings. Options change no bytes."""
        return Choice(SYSTEMS[self.system], self.settings)

    def transformation(self, **options: Any) -> optax.GradientTransformationExtraArgs:
        """The exchange, with further options."""
        given = {**self.settings, **self.options, **options}
        return SYSTEMS[self.system].transformation(**given)

    def written(self, options: Sequence[str] = ()) -> str:
        """The transformation as a Python expression, with further options as Python."""
        own = [f"{name}={value!r}" for name, value in self.options.items()]
        return with_options(self.choice.transformation, [*own, *options])


def _chunks(n: int) -> Exchange:
    return Exchange("chunked_top_k", {"k": 4096 // n}, 1 / n, {"decay": 0.95})


# What exchanges, by its name in recipes. Computing times of all formats are those of eight bits,
# which profiles have. Chunks of 4,096 entries fade as SparseLoCo's do.
EXCHANGES: dict[str, Exchange] = {
    "dense": Exchange("dense", {}),
    **{
        name: Exchange("quantized", {"format": name})
        for name in ("int8", "int4", "int2", "ternary", "sign")
    },
    **{f"top 1/{n}": _chunks(n) for n in (8, 32, 64)},
    # The dumbest thing at equal bytes: coordinates drawn at random. The rest is dropped: fed back,
    # it would be stale.
    **{
        f"random 1/{n}": Exchange("random_k", {"density": 1 / n}, 1 / n, {"decay": 0.0})
        for n in (8, 20)
    },
    "random 1/8 in 4 bits": Exchange(
        "random_k", {"density": 1 / 8, "reducer": Quantized()}, 1 / 8, {"decay": 0.0}
    ),
    "SparDL 1 %": Exchange("spardl", {"density": 0.01}, 0.01),
    "sketched 20x": Exchange("sketched_sgd", {"compression": 20.0}, 0.05),
    "QSGD 4 bits": Exchange("qsgd", {"bits": 4}),
}

_KERNELS = (
    "# kernels: a tree like params, with optax.contrib.MuonDimensionNumbers for matrices between",
    "# layers, and None for what Adam takes: embeddings, the last layer, vectors.",
)
_INNER = {
    "adamw": ("inner = optax.adamw(lr, b2=0.95, weight_decay=0.1)",),
    "muon": (
        *_KERNELS,
        "inner = optax.contrib.muon(",
        "    lr, adam_b2=0.95, weight_decay=0.1, adam_weight_decay=0.1, consistent_rms=0.2,",
        "    muon_weight_dimension_numbers=kernels,",
        ")",
    ),
}
OPTIMIZERS = tuple(_INNER)
_PARALLEL = (
    "# step has tx: jaxsparse.data_parallel(step, mesh), and jaxsparse.shard((params, state), mesh)"
)
_DIRECTION = {"adamw": "optax.scale_by_adam(b2=0.95)"}
_LOCAL = ("local", "diloco")
# Rate and momentum of DiLoCo's outer optimizer. Published are 0.7 and 0.9, for some hundred steps
# from one exchange to the next. In runs of 20 to 200 exchanges 0.6 ended lower
# (`benchmarks/frontier_map.py --outer`).
NESTEROV = (0.7, 0.6)
_WHAT = ("gradients", "updates", *_LOCAL)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train and what to exchange.

    Attributes:
        optimizer: "adamw" or "muon".
        what: "gradients", "updates" (of each worker's own Adam), "local" (the mean of
            displacements) or "diloco" (the same with Nesterov momentum, by `NESTEROV`).
        every: steps from one exchange to the next, 1 unless local.
        exchange: a key of `EXCHANGES`.
        warm: percent of the steps that exchange after each one, first. 0 unless local.

    Raises:
        ValueError: there is no such recipe.
    """

    optimizer: str
    what: str
    every: int
    exchange: str
    warm: int = 0

    def __post_init__(self):
        known = self.exchange in EXCHANGES and self.every >= 1 and 0 <= self.warm < 100
        if self.what == "updates":
            known = known and self.optimizer in _DIRECTION
        if not self.is_local:
            known = known and (self.every, self.warm) == (1, 0)
        if not known or self.optimizer not in OPTIMIZERS or self.what not in _WHAT:
            raise ValueError(
                f"no recipe is called {str(self)!r}: an optimizer ({', '.join(OPTIMIZERS)}), what "
                "is exchanged (gradients, updates, local H, diloco H), and how "
                f"({', '.join(EXCHANGES)}), as in 'adamw, local 10, int4'"
            )

    @classmethod
    def parsed(cls, name: str) -> "Recipe":
        """The recipe of this name.

        Raises:
            ValueError: there is none.

        >>> Recipe.parsed("muon, local 10, int4, warm 10 %").every
        10
        """
        optimizer, what, exchange, warm, *_ = [*name.split(", "), "", "", "", ""]
        what, _, every = what.partition(" ")
        percent = warm.removeprefix("warm ").removesuffix(" %")
        try:
            recipe = cls(optimizer, what, int(every or 1), exchange, int(percent or 0))
        except ValueError:
            recipe = None
        if recipe is None or str(recipe) != name:
            raise ValueError(
                f"no recipe is called {name!r}: write one as in 'adamw, local 10, int4', with "
                f"one of {', '.join(EXCHANGES)}"
            )
        return recipe

    @property
    def is_local(self) -> bool:
        """Whether workers exchange what local steps moved."""
        return self.what in _LOCAL

    @property
    def plain_mean(self) -> "Recipe | None":
        """As many local steps with a dense mean, or None without local steps."""
        if not self.is_local:
            return None
        return Recipe(self.optimizer, "local", self.every, "dense")

    def __str__(self) -> str:
        what = f"{self.what} {self.every}" if self.is_local else self.what
        warm = f", warm {self.warm} %" if self.warm else ""
        return f"{self.optimizer}, {what}, {self.exchange}{warm}"

    def exchanges(self, steps: int) -> int:
        """The number of exchanges in so many steps, the last one at the end included."""
        first = self.warm * steps // 100
        return first + math.ceil((steps - first) / self.every)

    def memory(self, elements: int) -> int:
        """Bytes of residuals and of the outer state, which a trainer without us does not have."""
        if (self.what, self.exchange) == ("gradients", "dense"):
            return 0
        outer = 4 * self.is_local + 4 * (self.what == "diloco")  # parameters; momentum
        return elements * (_residuals(self.exchange) + outer)

    def written(self, steps: int, options: Sequence[str] = ()) -> tuple[str, ...]:
        """The recipe as Python, for a run of so many steps.

        Args:
            steps: steps of the run.
            options: of the exchange, as Python.
        """
        exchange = EXCHANGES[self.exchange]
        text = exchange.written(options)
        inner = _INNER[self.optimizer]
        if self.what == "gradients":
            return (*inner, f"tx = optax.chain({text}, inner)", _PARALLEL)
        if self.what == "updates":
            return (
                "tx = optax.chain(",
                f"    jaxsparse.per_worker({_DIRECTION[self.optimizer]}),",
                f"    {text},",
                "    optax.add_decayed_weights(0.1),",
                "    optax.scale_by_learning_rate(lr),",
                ")",
                _PARALLEL,
            )
        every = f"{self.every}"
        if first := self.warm * steps // 100:
            every = f"jaxsparse.Stages((1, {self.every}), ({first},))"
        return (
            *inner,
            f"outer = {self._outer(text, options)}",
            f"train = jaxsparse.LocalSteps(step, outer, mesh, every={every})",
            f"# step has inner, and exchanges nothing. Then: train.finish(state, {steps}).params",
        )

    def on_islands(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The recipe as Python for `jaxsparse.islands.Islands`, which has no warm start.

        Args:
            settings: those of `Islands` besides `every`.

        Raises:
            ValueError: it has no local steps, or a warm start.
        """
        if not self.is_local or self.warm:
            raise ValueError(f"{self} is no recipe for islands: take local steps and no warm start")
        options = [f"{name}={value}" for name, (value, _) in island_options(self.exchange).items()]
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return (
            *_INNER[self.optimizer],
            f"outer = {self._outer(EXCHANGES[self.exchange].written(options), options)}",
            'store = jaxsparse.islands.Store("s3://bucket/run-7")  # or a folder',
            "train = jaxsparse.islands.Islands(",
            f'    step, outer, store, name="oslo", every={self.every},',
            f"    {given},",
            ")",
            "# step has inner, and exchanges nothing. name is another one on each island.",
        )

    def _outer(self, exchange: str, options: Sequence[str]) -> str:
        """The outer optimizer as Python, with the exchange as Python."""
        k, rate, momentum = EXCHANGES[self.exchange].settings, *NESTEROV
        start = "mean()" if self.what == "local" else f"diloco({rate}, {momentum})"
        if self.exchange == "dense":
            kept = [option for option in options if option.startswith("axis_name")]
            return with_options(f"jaxsparse.outer.{start}", kept)
        if (self.what, EXCHANGES[self.exchange].system) == ("local", "chunked_top_k"):
            return with_options(f"jaxsparse.outer.sparse_loco(k={k['k']})", options)
        return with_options(f"jaxsparse.outer.{start}", [f"exchange={exchange}"])


def island_options(exchange: str) -> dict[str, tuple[str, Any]]:
    """What exchanges need on islands: each option as Python, and its value.

    Islands share no mesh, and exchange in one message. Compressed, all leaves have residuals, so
    that a late island loses nothing.
    """
    options: dict[str, tuple[str, Any]] = {"axis_name": ("None", None)}
    if exchange != "dense":
        options["is_dense"] = "lambda *_: False", lambda *_: False
    if EXCHANGES[exchange].system == "quantized":
        options["gather"] = "True", True
    return options


@functools.cache
def _residuals(exchange: str) -> int:
    """Bytes of an exchange's state on a worker for each element, from the state's shapes."""
    size = 2**16
    tx = EXCHANGES[exchange].transformation(axis_name=None, is_dense=lambda *_: False)
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct((size,), jnp.float32)})
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) // size
