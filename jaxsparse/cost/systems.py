"""All systems with settings that can be compared: what they deliver in a step, on how many workers.

The table that the planner, the profile of computing times and the benchmarks share.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxsparse import codecs, network
from jaxsparse.quantize import QSGD, Sign
from jaxsparse.reducers.base import Budget, Reducer
from jaxsparse.reducers.block_gather import BlockGatherReducer
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.reducers.dragonn import DragonnReducer
from jaxsparse.reducers.gtopk import GTopKReducer
from jaxsparse.reducers.ok_topk import OkTopkReducer
from jaxsparse.reducers.omni_reduce import OmniReduceReducer
from jaxsparse.reducers.quantized import QuantizedReducer
from jaxsparse.reducers.random_k import RandomKReducer
from jaxsparse.reducers.s2 import S2Reducer
from jaxsparse.reducers.selection import Bisection
from jaxsparse.reducers.sketched import SketchedBudget, SketchedReducer
from jaxsparse.reducers.sparcml import SparCMLReducer
from jaxsparse.reducers.spardl import SparDLReducer
from jaxsparse.reducers.top_k import TopKReducer
from jaxsparse.reducers.true_top_k import TrueTopKReducer
from jaxsparse.settings import static_int


class Request(NamedTuple):
    """What is to be exchanged."""

    density: float  # elements that a step delivers, as a share of all
    size: int  # elements
    workers: int
    link: network.Link | None = None  # that sparcml's choice of an algorithm reckons with
    touched: float | None = None  # share of the blocks that are not zero on a worker; None: all
    block_size: int = 256  # of the systems that send blocks
    dense_size: int = 0  # elements that travel dense beside these


class Choice(NamedTuple):
    """A system with its settings."""

    budget: Budget
    transformation: str  # the same as a Python expression, for a whole tree

    def reducer(self, size: int) -> Reducer:
        """For one vector of `size` elements, all of the budget's, with no dense leaves beside it.

        Raises:
            ValueError: the budget can't be met.
        """
        return self.budget.split((size,))[0]

    @property
    def expression(self) -> str:
        """The budget as a Python expression, for `jaxsparse.partition`."""
        return written(self.budget)


class System(NamedTuple):
    """One row of `SYSTEMS`."""

    choose: Callable[[Request], Choice]
    follows_density: bool = True  # or it sends the same whatever the density
    caveat: str = ""  # why a planner should not choose it by time alone


# Where the public names are, by the package that a class is in.
_PUBLIC = {
    "reducers": "jaxsparse",
    "codecs": "jaxsparse.codecs",
    "quantize": "jaxsparse.quantize",
    "network": "jaxsparse.planner",
}


def written(value: Any) -> str:
    """A setting as a Python expression; of a dataclass's fields those that differ from defaults.

    >>> written(SparDLReducer(0.01, codec=codecs.Packed()))
    'jaxsparse.SparDLReducer(density=0.01, codec=jaxsparse.codecs.Packed())'
    """
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }
    kind = type(value)
    return _call(f"{_PUBLIC[kind.__module__.split('.')[1]]}.{kind.__name__}", **given)


def _call(function: str, *args: Any, **settings: Any) -> str:
    parts = [*map(written, args), *(f"{name}={written(x)}" for name, x in settings.items())]
    return f"{function}({', '.join(parts)})"


def _alias(budget: Budget, name: str, *args: Any, **settings: Any) -> Choice:
    return Choice(budget, _call(f"jaxsparse.{name}", *args, **settings))


def _dense(request: Request) -> Choice:
    return _alias(DenseReducer(), "dense")


def _true_top_k(request: Request) -> Choice:
    k = entries(request.density, request.size)
    return _alias(TrueTopKReducer(k), "true_top_k", k)


def _sketched_sgd(request: Request) -> Choice:
    # Half of the words buy candidates, P for each coordinate delivered.
    settings = SketchedReducer(k=1, cols=1)
    words = 2 * settings.oversampling * request.density * request.size
    if words >= request.size:
        raise ValueError(
            f"density={request.density:g} times {settings.oversampling} candidates and as many "
            f"words of the sketch is all of the vector: ask for less than "
            f"{1 / (2 * settings.oversampling)}"
        )
    # Dense leaves count in both, and what is written is what a user would copy.
    dense_size = request.dense_size
    compression = float(f"{(request.size + dense_size) / (words + dense_size):.8g}")
    return _alias(SketchedBudget(compression, settings), "sketched_sgd", compression)


def _sparse(reducer: Callable[..., Budget], name: str, request: Request, **settings: Any) -> Choice:
    return _alias(reducer(request.density, **settings), name, request.density, **settings)


def _sparcml(request: Request) -> Choice:
    # 512 is SparCML's, of which less than one entry would be none.
    bucket_size = 512 if request.density * 512 >= 1 else round(1 / request.density)
    k = max(1, round(request.density * bucket_size))
    link: dict[str, Any] = {}
    if request.link not in (None, network.Link()):
        link["link"] = request.link
    return _alias(SparCMLReducer(k, bucket_size, **link), "sparcml", k, bucket_size, **link)


def _dgc(request: Request) -> Choice:
    return _alias(TopKReducer(request.density, selection="sampled"), "dgc", request.density)


def _ms_topk(request: Request) -> Choice:
    reducer = TopKReducer(request.density, selection=Bisection())
    return _alias(reducer, "ms_topk", request.density)


def _blocks(reducer: Callable[..., Budget], name: str, room: str, request: Request) -> Choice:
    settings: dict[str, Any] = {}
    density: float | None = request.density
    if request.touched is not None:
        # What any worker touches needs room if workers share it.
        shared = min(1.0, request.workers * request.touched)
        density, settings = None, {room: shared if room == "union_density" else request.touched}
    if request.block_size != 256:
        settings["block_size"] = request.block_size
    return _alias(reducer(density=density, **settings), name, density, **settings)


def _qsgd(request: Request) -> Choice:
    return _alias(QuantizedReducer(QSGD(4)), "qsgd", 4)


def _sign_sgd(request: Request) -> Choice:
    return _alias(QuantizedReducer(Sign(), "nearest"), "sign_sgd")


def _packed(reducer: Callable[..., Budget], name: str) -> System:
    return System(functools.partial(_sparse, reducer, name, codec=codecs.Packed()))


_BLOCKS = "selects whole blocks, which of dense gradients keep less than as many elements"
SYSTEMS: dict[str, System] = {
    "dense": System(_dense, follows_density=False),
    "true_top_k": System(_true_top_k, caveat="saves no bytes: a reference for accuracy"),
    "sketched_sgd": System(_sketched_sgd),
    "spardl": System(functools.partial(_sparse, SparDLReducer, "spardl")),
    "spardl_packed": _packed(SparDLReducer, "spardl"),
    "ok_topk": System(functools.partial(_sparse, OkTopkReducer, "ok_topk")),
    "ok_topk_packed": _packed(OkTopkReducer, "ok_topk"),
    "sparcml": System(_sparcml),
    "gtopk": System(functools.partial(_sparse, GTopKReducer, "gtopk")),
    "top_k": System(functools.partial(_sparse, TopKReducer, "top_k")),
    "top_k_packed": _packed(TopKReducer, "top_k"),
    "dgc": System(_dgc),
    "ms_topk": System(_ms_topk),
    "dragonn": System(functools.partial(_sparse, DragonnReducer, "dragonn")),
    "random_k": System(
        functools.partial(_sparse, RandomKReducer, "random_k"),
        caveat="selects blindly: to train as well it needs a far higher density",
    ),
    "s2_reducer": System(
        functools.partial(_blocks, S2Reducer, "s2_reducer", "union_density"),
        caveat="delivers noisy estimates, and selects whole blocks",
    ),
    "omni_reduce": System(
        functools.partial(_blocks, OmniReduceReducer, "omni_reduce", "union_density"),
        caveat=_BLOCKS,
    ),
    "sparse_all_gather": System(
        functools.partial(_blocks, BlockGatherReducer, "sparse_all_gather", "capacity_density"),
        caveat=_BLOCKS,
    ),
    "qsgd": System(_qsgd, follows_density=False),
    "sign_sgd": System(_sign_sgd, follows_density=False),
}
# These send what is not zero, exactly, where most blocks are: their caveats do not hold then.
OF_BLOCKS = ("omni_reduce", "sparse_all_gather")
# To these transformations bucket_size is that of the paper, and layout_bucket_size all others'.
OF_BUCKETS = ("sparcml", "qsgd", "sign_sgd")


def choose(
    name: str,
    density: float,
    *,
    size: int,
    workers: int,
    link: network.Link | None = None,
    touched: float | None = None,
    block_size: int = 256,
    dense_size: int = 0,
) -> Choice:
    """A system with settings that deliver about `density * size` elements of the mean in a step.

    Settings are the defaults but for these: `sketched_sgd` delivers as many coordinates, for which
    it psums eight times as many words; `sparcml` takes k of buckets of 512, or one of larger ones;
    `qsgd` (4 bits) and `sign_sgd` deliver everything. A name that ends in "_packed" has 4-byte
    entries.

    Args:
        name: a key of `SYSTEMS`; without "_packed" the name of its transformation.
        density: share of the elements that a step delivers, in (0, 1].
        size: elements of the vector.
        workers: their number.
        link: the network that `sparcml` chooses its algorithm for; None for `Link()`.
        touched: share of the blocks that are not zero on one worker, in (0, 1], if most are:
            systems of blocks then send these, and there is room for `workers` times as many where
            workers share it. None: gradients are dense, and blocks are selected.
        block_size: elements of a block: the width of an embedding.
        dense_size: elements of leaves that travel dense beside the vector, which the compression of
            `sketched_sgd` counts.

    Returns:
        The budget, and how to write it.

    Raises:
        ValueError: no such system, settings out of range, or the system can't be used with them.

    Example:
        >>> choose("sketched_sgd", 0.01, size=10**6, workers=8).transformation
        'jaxsparse.sketched_sgd(12.5)'
        >>> choose("sparcml", 0.01, size=10**6, workers=8).expression
        'jaxsparse.SparCMLReducer(k=5)'
    """
    if name not in SYSTEMS:
        raise ValueError(f"system {name!r} is unknown: use one of {', '.join(SYSTEMS)}")
    check_density(density)
    size, workers = static_int("size", size), static_int("workers", workers)
    dense_size = static_int("dense_size", dense_size)
    for setting, value, least in (
        ("size", size, 1),
        ("workers", workers, 1),
        ("dense_size", dense_size, 0),
    ):
        if value < least:
            raise ValueError(f"{setting}={value} must be at least {least}")
    request = Request(density, size, workers, link, touched, block_size, dense_size)
    return SYSTEMS[name].choose(request)
