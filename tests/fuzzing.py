"""Random transformations on random gradients, and the contract that each step must keep.

A `Program` says what is compiled: a transformation, a tree, and a number of workers, simulated or
on a mesh with inner axes. A `Data` describes the gradients of a few steps. Both print as code that
makes them again.
"""

import dataclasses
import functools
import math
from typing import NamedTuple, get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from at_density import settings_at
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from table import EXCHANGES

import jaxsparse
from jaxsparse import PerWorker, codecs, quantize, reducers
from jaxsparse.comm import wire
from jaxsparse.comm.meshes import Placement
from jaxsparse.feedback.options import Options
from jaxsparse.quantize import formats
from jaxsparse.reducers.base import Reducer
from jaxsparse.select.top_k import Bisection, Sampled

STEPS = 3
# Errors of one float32 operation: the relative error, and the loss of numbers below the normal
# ones. XLA's CPU backend takes subnormal operands for zeros, and returns zeros for subnormal
# results, in arithmetic and comparisons. Copies, signs, selections, sorts and conversions to and
# from 16 bits keep subnormal numbers.
ROUNDING, FLUSHED = 2.0**-24, 2.0**-126
LARGEST = float(np.finfo(np.float32).max)


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self):
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Program:
    name: str  # name of the transformation
    settings: dict
    workers: int
    leaves: tuple[Leaf, ...]
    compressed: str = "all"  # leaves: "all", "matrices", or those of the "default" rule
    momentum: float | None = None
    delay: int = 0
    inner: tuple[int, ...] = ()  # sizes of the mesh's inner axes; (): workers are simulated
    cuts: tuple[PartitionSpec, ...] = ()  # each leaf's partition over the inner axes
    first: Reducer | None = None  # the reducer of the first step, if that is another one

    def make(self):
        settings = dict(self.settings)
        if self.name != "dense" and self.compressed != "default":
            settings["is_dense"] = self._is_dense
        if self.inner:
            settings |= {"mesh": self.mesh, "specs": self.nested(self.cuts)}
        else:
            settings["workers"] = self.workers
        options = {"momentum": self.momentum}
        if self.name != "ef21_sgdm":  # has fewer options
            options["delay"] = self.delay
        if self.first is None:
            return EXCHANGES[self.name].transformation(**settings, **options)
        staged = reducers.Staged((self.first, EXCHANGES[self.name].reducer(**self.settings)), (1,))
        of_step = {key: value for key, value in settings.items() if key in Options.__annotations__}
        return jaxsparse.exchange(staged, **of_step, **options)

    @property
    def mesh(self):
        """The mesh of the workers and inner axes; None for simulated workers."""
        return _mesh((self.workers, *self.inner)) if self.inner else None

    @property
    def devices(self):
        """Number of devices of a worker."""
        return math.prod(self.inner)

    def _is_whole(self, leaf, cut):
        """Whether a leaf can't be cut over all inner axes, and so goes uncompressed."""
        axes = tuple(zip(_INNER, self.inner))
        placement = Placement(tuple((a, n) for a, n in axes if n > 1), (cut,))
        return not placement.is_cut(placement.exchanged(0, leaf.shape))

    def _is_dense(self, path, shape):
        if self.name == "dense":
            return True
        if self.compressed == "default":
            return len(shape) <= 1 or math.prod(shape) < 1024
        return self.compressed == "matrices" and len(shape) != 2

    def nested(self, leaves):
        """A tree of the leaves, in the order of `jax.tree.leaves`."""
        first, *rest = leaves
        return {"first": first, "rest": [rest[:1], {"deep": tuple(rest[1:])}]}

    @property
    def size(self):
        return sum(leaf.size for leaf in self.leaves)

    def cut(self, x):
        """Cuts the last axis into one part for each leaf."""
        return np.split(x, np.cumsum([leaf.size for leaf in self.leaves])[:-1], axis=-1)

    @property
    def is_compressed(self):
        """For each element of the tree, whether it is compressed."""
        packed = [not self._is_dense("", leaf.shape) for leaf in self.leaves]
        if self.inner:
            whole = map(self._is_whole, self.leaves, self.cuts)
            packed = [yes and not no for yes, no in zip(packed, whole)]
        return np.repeat(packed, [leaf.size for leaf in self.leaves])

    def by_leaf(self, of):
        """For each element of the tree, of(dtype of its leaf)."""
        return np.repeat(
            [float(of(leaf.dtype)) for leaf in self.leaves], [leaf.size for leaf in self.leaves]
        )

    @functools.cached_property
    def reducer(self):
        """The reducer of the first step, for a single bucket."""
        whole = self.first or EXCHANGES[self.name].reducer(**self.settings)
        return whole.split((max(1, int(self.is_compressed.sum())),))[0]

    @property
    def shares_scales(self):
        """Whether an element's error may be relative to other elements of its bucket."""
        return self.reducer.conservation not in ("exact", "to rounding")

    @property
    def spread(self):
        """How many times larger an element of a projection may be than the projected elements."""
        if self.name == "demo":  # which projects tiles
            return float(self.settings["chunk"])
        if self.name != "powersgd":
            return 1.0
        sides = [n for leaf in self.leaves if leaf.shape for n in _sides(leaf.shape)]
        return math.sqrt(max(sides, default=1))

    @property
    def fading(self):
        """The factor by which residuals decay in a step."""
        return self.settings.get("decay", 1.0)


def _sides(shape):
    return math.prod(shape[:-1]), shape[-1]


_INNER = ("fsdp", "tp")
_INNER_MESHES = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (3, 2), (4, 2), (1, 2, 2), (2, 2, 2))


@functools.cache
def _mesh(shape: tuple[int, ...]) -> Mesh:
    names = ("data", *_INNER)[: len(shape)]
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)


def _cut(rng, leaf: Leaf, inner: tuple[int, ...]) -> PartitionSpec:
    """A random partition. Each axis that cuts the leaf cuts a dimension that it divides."""
    parts: list = [()] * len(leaf.shape)
    left = list(leaf.shape)
    for axis, size in zip(_INNER, inner):
        fits = [i for i, n in enumerate(left) if n and n % size == 0]
        if fits and rng.random() < 0.5:
            i = fits[rng.integers(len(fits))]
            parts[i], left[i] = (*parts[i], axis), left[i] // size
    return PartitionSpec(*(part or None for part in parts))


def draw_program(
    seed: int, number: int, name: str | None = None, is_on_mesh: bool = False
) -> Program:
    """The `number`-th program of a seed, for one transformation or for each in turn.

    With `is_on_mesh` it runs on a mesh with inner axes.
    """
    rng = np.random.default_rng([seed, number])
    names = list(EXCHANGES)
    name = name or names[number % len(names)]
    compressed = _pick(rng, "all", "all", "matrices", "default")
    leaves = tuple(_leaf(rng) for _ in range(rng.integers(0, 5)))
    if compressed != "all":
        leaves = (*leaves, Leaf(_pick(rng, (33, 32), (3, 400), (1024, 1)), _dtype(rng)))
    leaves = (Leaf(_pick(rng, (1,), (11,), (9, 70), ()), _dtype(rng)), *leaves)
    workers, inner, cuts = int(_pick(rng, 1, 2, 3, 4, 5, 6, 7, 8, 12)), (), ()
    if is_on_mesh:
        workers, *sizes = _INNER_MESHES[rng.integers(len(_INNER_MESHES))]
        inner, leaves = tuple(sizes), (*leaves, Leaf((48, 40), _dtype(rng)))
        cuts = tuple(_cut(rng, leaf, inner) for leaf in leaves)
    program = Program(
        name,
        {},
        workers,
        leaves,
        compressed,
        _pick(rng, None, None, 0.9, 0.5),
        int(rng.random() < 0.2),
        inner,
        cuts,
    )
    size = int(program.is_compressed.sum())
    settings = draw_settings(name, rng, max(size, 1), program.workers)
    limit = _pick(rng, None, None, None, -(-size // 2), max(1, size // 2))
    if name != "dense":
        settings["bucket_size"] = limit
    if program.delay and "decay" in settings:
        settings["decay"] = 1.0  # after a delayed exchange residuals fade, but not their rounding
    if EXCHANGES[name].law == "differences":
        program = dataclasses.replace(program, delay=0)
    first = None
    if name in CHANGING and rng.random() < 0.1:
        first = reducers.Dense()
        if name != "powersgd":
            reducer = EXCHANGES[name].reducer(**settings)
            first = dataclasses.replace(reducer, density=min(1.0, 4 * reducer.density))
    return dataclasses.replace(program, settings=settings, first=first)


def _pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def _dtype(rng):
    return _pick(rng, "float32", "float32", "bfloat16", "float16")


def _leaf(rng):
    return Leaf(_pick(rng, (), (0,), (3, 0), (1,), (1, 1), (7,), (20, 13), (5, 4, 3)), _dtype(rng))


def _density(rng, size):
    """A random density, from one entry to all entries."""
    share = _pick(rng, 1 / size, 1.0, *10 ** rng.uniform(-2.5, 0, 4))
    return float(share)


def _codec(rng):
    return _pick(
        rng,
        codecs.COO,
        codecs.COO,
        codecs.Packed(),
        codecs.Packed(jnp.dtype(jnp.float16)),
        codecs.EliasFano(value_bits=16),
    )


def _selection(rng):
    return _pick(rng, "fast", "fast", "exact", "sampled", Sampled(5), Bisection(3))


def _count(rng, size):
    return int(_pick(rng, 1, size, *rng.integers(1, size + 1, 2)))


def _blocks(rng, size, room):
    # A density, or room for a bucket of any size: without either, a reducer is refused.
    density = _pick(rng, None, _density(rng, size))
    space = _pick(rng, None, _density(rng, size)) if density else _density(rng, size)
    return {"density": density, "block_size": int(_pick(rng, 1, 4, 13, 256)), room: space}


def _spardl(rng, size, workers):
    teams = _pick(rng, *(t for t in range(1, workers + 1) if workers % t == 0))
    is_power = teams & (teams - 1) == 0
    return {
        "density": _density(rng, size),
        "teams": teams,
        "gather": _pick(rng, "recursive", "bruck") if is_power else "bruck",
        "codec": _codec(rng),
        "selection": _selection(rng),
    }


def _sparcml(rng, size, workers):
    group = int(_pick(rng, 4, 16, 512))
    bits = _pick(rng, None, None, None, 2, 4, 8)
    algorithms = ["auto", "dsar_split_allgather"]
    if bits is None:
        algorithms += ["recursive_double", "split_allgather", "all_gather", "ring"]
    algorithm = _pick(rng, *algorithms)
    return {
        "k": _count(rng, min(group, 8)),
        "group_size": group,
        "algorithm": algorithm,
        "bits": bits,
        "rounding": _pick(rng, "stochastic", "nearest"),
        "codec": _codec(rng),
    }


def _sketched(rng, size, workers):
    selection = _pick(rng, "top_k", "top_k", "heavymix")
    cols = _count(rng, max(1, size // 3))
    return {
        "k": _count(rng, min(cols, max(1, size // 4))),  # more than columns warn
        "cols": cols,
        "rows": int(rng.integers(1, 6)),
        "oversampling": 1 if selection == "heavymix" else int(rng.integers(1, 5)),
        "selection": selection,
        "table_dtype": _pick(rng, "float32", "float32", "bfloat16", "float16"),
    }


def _ok_topk(rng, size, workers):
    return {
        "density": _density(rng, size),
        "refresh_every": int(rng.integers(1, 4)),
        "rebalance_every": int(rng.integers(1, 4)),
        "capacity_factor": float(_pick(rng, 1.0, 1.3, 2.0, 8.0)),
        "codec": _codec(rng),
        "selection": _selection(rng),
    }


def _s2(rng, size, workers):
    return {
        **_blocks(rng, size, "union_density"),
        "rows": int(rng.integers(1, 4)),
        "sketch_ratio": float(_pick(rng, 0.2, 0.5, 1.0)),
    }


def _dragonn(rng, size, workers):
    extract = _pick(rng, "hash", "slot_max")
    return {
        "density": _density(rng, size),
        "extract": extract,
        "samples": _pick(rng, None, 9) if extract == "hash" else None,
        "passing": _pick(rng, 0.5, 1.0, 2.0) if extract == "hash" else 1.0,
        "codec": _codec(rng),
    }


def _qsgd(rng, size, workers):
    rounding = _pick(rng, "stochastic", "nearest")
    return {
        "bits": int(_pick(rng, 2, 4, 8)),
        "group_size": int(_pick(rng, 1, 6, 64, 1024)),
        "scale": _pick(rng, "max", "max", "l2"),
        "rounding": rounding,
    }


def _quantized(rng, size, workers):
    name = str(_pick(rng, *get_args(formats.FormatName)))
    return {
        "format": name,
        "group_size": int(_pick(rng, 2, 32, 256, 1024)),
        "scale": _pick(rng, *get_args(formats.Scale)),
        "gather": bool(not rng.integers(4)),
    }


def _random_k(rng, size, workers):
    inner = reducers.TopK(_density(rng, size), codec=_codec(rng), selection=_selection(rng))
    return {
        "density": _density(rng, size),
        "reducer": _pick(rng, reducers.Dense(), reducers.RandomK(0.5), inner),
    }


def _powersgd(rng, size, workers):
    rank = int(_pick(rng, 1, 2, 4, 20))
    return {
        "rank": rank,
        "iteration": _pick(rng, "alternating", "full"),
        "min_compression_rate": float(_pick(rng, 0.0, 1.0, 2.0)),
    }


def _top_k(rng, size, workers):
    together = _pick(rng, codecs.EliasFano(), codecs.EliasFano(value_bits=4))
    return {
        "density": _density(rng, size),
        "codec": _pick(rng, *[_codec(rng)] * 3, together),
        "selection": _selection(rng),
    }


def draw_settings(name, rng, size, workers):
    """Random settings for `size` compressed elements, from SETTINGS or for a density."""
    if name in SETTINGS:
        return SETTINGS[name](rng, size, workers)
    return settings_at(name, _density(rng, size), size)


def _chunked_top_k(rng, size, workers):
    chunk_size = int(_pick(rng, 1, 7, 64, 4096))
    return {
        "k": _count(rng, min(chunk_size, 40)),
        "chunk_size": chunk_size,
        "value_bits": int(_pick(rng, 2, 2, 4, 8, 16, 32)),
    }


def _demo(rng, size, workers):
    chunk = int(_pick(rng, 1, 3, 8, 64))
    return {
        "k": _count(rng, min(chunk**2, 20)),
        "chunk": chunk,
        "value_bits": int(_pick(rng, 2, 8, 16, 16, 32)),
        "decay": float(_pick(rng, 1.0, 0.999, 0.5)),
    }


def _ef21(rng, size, workers):
    density = _density(rng, size)
    return {
        "reducer": _pick(
            rng,
            reducers.TopK(density, codec=_codec(rng), selection=_selection(rng)),
            reducers.SparDL(density, codec=_codec(rng)),
            reducers.ChunkedTopK(_count(rng, 7), 7, value_bits=int(_pick(rng, 2, 8, 32))),
            reducers.Quantized(quantize.QSGD(4, 64), rounding="nearest"),
        )
    }


# Those of which some programs have another reducer in the first step.
CHANGING = ("spardl", "ok_topk", "random_k", "top_k", "gtopk", "dgc", "dragonn", "ms_topk")
CHANGING += ("powersgd",)
SETTINGS = {  # functions of a generator, a size and a number of workers, richer than the rows
    "true_top_k": lambda rng, size, workers: {"k": _count(rng, size)},
    "sketched_sgd": _sketched,
    "top_k": _top_k,
    "gtopk": _top_k,
    "chunked_top_k": _chunked_top_k,
    "ok_topk": _ok_topk,
    "sparcml": _sparcml,
    "spardl": _spardl,
    "dgc": _top_k,
    "dragonn": _dragonn,
    "ms_topk": lambda rng, size, workers: {
        "density": _density(rng, size),
        "passes": int(rng.integers(0, 33)),
        "codec": _codec(rng),
    },
    "s2_reducer": _s2,
    "omni_reduce": lambda rng, size, workers: _blocks(rng, size, "union_density"),
    "sparse_all_gather": lambda rng, size, workers: _blocks(rng, size, "capacity_density"),
    "qsgd": _qsgd,
    "quantized": _quantized,
    "random_k": _random_k,
    "sign_sgd": lambda rng, size, workers: {"group_size": int(_pick(rng, 1, 6, 64, 1024))},
    "powersgd": _powersgd,
    "demo": _demo,
    "ef21_sgdm": _ef21,
}


class Fault(NamedTuple):
    """One value that is not finite, in one worker's gradient."""

    step: int
    worker: float  # place among the workers, from 0 to 1
    place: float  # place in the tree, from 0 to 1
    value: float


@dataclasses.dataclass(frozen=True)
class Data:
    """The gradients of STEPS steps, drawn from `seed`."""

    seed: int
    support: str  # one of SUPPORTS
    filled: float  # share of the elements in a support, for supports of any size
    exponent: float  # decimal logarithm of the usual magnitude
    spread: float  # spread of the usual magnitudes, in decades
    ties: bool  # all usual magnitudes are equal
    negative_zeros: bool
    repeats: bool  # all steps have the same gradients
    fault: Fault | None
    magnitude: str = "usual"  # or one of SPECIAL
    signs: str = "random"  # one of SIGNS

    def gradients(self, program: Program) -> np.ndarray:
        """float64[STEPS, W, d]: gradients that the leaves' dtypes represent exactly."""
        rng = np.random.default_rng(self.seed)
        workers, size = program.workers, program.size
        shape = (1 if self.repeats else STEPS, workers, size)
        x = self._magnitudes(rng, shape)
        if self.signs != "positive":
            x *= rng.choice([-1.0, 1.0], shape)
        if self.support == "cancelling":
            x[:, 1::2] = -x[:, : workers - 1 : 2]
        if self.support == "equal":
            x[:] = x[:, :1]
        x *= self._mask(rng, workers, size)
        x = np.broadcast_to(x, (STEPS, workers, size)).copy()
        if self.signs == "alternating":
            x[1::2] *= -1
        if self.negative_zeros:
            x[(x == 0) & (rng.random(x.shape) < 0.5)] = -0.0
        parts = zip(program.cut(x), program.leaves)
        x = np.concatenate([in_dtype(part, leaf.dtype) for part, leaf in parts], axis=-1)
        if self.fault is not None and size:
            step, worker, place, value = self.fault
            x[step, int(worker * workers), int(place * size)] = value
        return x

    def _magnitudes(self, rng, shape):
        """Magnitudes of one kind, or of all kinds."""
        decades = 0 if self.ties else self.spread * rng.standard_normal(shape)
        usual = 10.0 ** np.clip(self.exponent + decades, -50, 38.5)
        kinds = {
            "usual": usual,
            "largest": LARGEST,
            "near largest": LARGEST * rng.uniform(0, 1, shape),
            "sums near largest": LARGEST / shape[1] * rng.uniform(0.9, 1.1, shape),
            "subnormal": FLUSHED * rng.uniform(0, 2, shape),
        }
        if self.magnitude == "mixed":
            return np.choose(rng.integers(len(kinds), size=shape), list(kinds.values()))
        return np.broadcast_to(kinds[self.magnitude], shape).copy()

    def _mask(self, rng, workers, size):
        if self.support in ("random", "equal"):
            return rng.random((workers, size)) < self.filled
        if self.support == "identical":
            return np.broadcast_to(rng.random(size) < self.filled, (workers, size))
        if self.support == "disjoint":
            return rng.integers(0, workers, size) == np.arange(workers)[:, None]
        if self.support == "clustered":
            start = rng.integers(0, max(size, 1), (workers, 1))
            return (np.arange(size) - start) % max(size, 1) < math.ceil(self.filled * size)
        if self.support == "one worker":
            return np.arange(workers)[:, None] == rng.integers(workers)
        return np.float64(self.support != "empty")


SUPPORTS = (
    "all", "random", "identical", "disjoint", "clustered", "one worker", "cancelling", "equal",
    "empty"
)  # fmt: skip
# Magnitudes at which sums overflow or vanish; near-largest ones do so in some orders only.
SPECIAL = ("largest", "near largest", "sums near largest", "subnormal", "mixed")
SIGNS = ("random", "positive", "alternating")  # alternating: changing at each step

_faults = st.builds(
    Fault,
    st.integers(0, STEPS - 1),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)


def _cases(magnitudes):
    return st.builds(
        Data,
        seed=st.integers(0, 2**32 - 1),
        support=st.sampled_from(SUPPORTS),
        filled=st.sampled_from([0.01, 0.1, 0.5, 0.9]),
        magnitude=magnitudes,
        exponent=st.one_of(
            st.floats(-3, 3), st.floats(-30, 30), st.sampled_from([-45, -38, -37, 38])
        ),
        spread=st.sampled_from([0.3, 1.0, 3.0, 12.0]),
        ties=st.booleans(),
        signs=st.sampled_from(SIGNS),
        negative_zeros=st.booleans(),
        repeats=st.booleans(),
        fault=st.one_of(st.none(), st.none(), st.none(), _faults),
    )


usual_cases = _cases(st.just("usual"))
special_cases = _cases(st.sampled_from(SPECIAL))
all_cases = st.one_of(usual_cases, special_cases)


def in_dtype(x, dtype):
    """`x` in float64, clipped and rounded to a float dtype."""
    limit = float(jnp.finfo(dtype).max)
    return np.clip(x, -limit, limit).astype(jnp.dtype(dtype)).astype(np.float64)


def _poisoned(x, axis_name):
    """`wire.replicated`, but a value that differs between workers becomes an enormous one.

    Under vmap, such a value would otherwise be replaced by the first worker's.
    """
    rows = jax.lax.all_gather(x, axis_name)
    bits = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    agree = jnp.all(bits == bits[:1], axis=0)
    enormous = 2**30 if jnp.issubdtype(x.dtype, jnp.integer) else LARGEST
    return jnp.where(agree, rows[0], jnp.asarray(enormous, x.dtype))


class Outcome(NamedTuple):
    """The updates and states of all steps."""

    updates: np.ndarray  # float64[STEPS, d]
    states: list  # STEPS + 1 states; the first is the initial one


def compiled(program: Program):
    """A function from gradients to an `Outcome`. Raises ValueError if the program is refused."""
    tx = program.make()
    params = program.nested([jnp.zeros(leaf.shape, leaf.dtype) for leaf in program.leaves])
    start = tx.init(params)

    def put(part, cut):
        """Places a leaf's gradients on the mesh. Their first axis is that of the steps."""
        if program.mesh is None:
            return part
        return jax.device_put(part, NamedSharding(program.mesh, PartitionSpec(None, "data", *cut)))

    @jax.jit
    def run(state, gradients):
        # Each step puts out the state that it starts with. This is the state that the step before
        # carried on, to the bit. If a step also put out its new state, XLA might compute that
        # twice, and round it in two ways.
        def one(before, gradients):
            updates, after = tx.update(gradients, before, params)
            return after, (updates, before)

        last, (updates, states) = jax.lax.scan(one, state, gradients)
        return updates, states, last

    def outcome(gradients: np.ndarray) -> Outcome:
        parts = [
            part.astype(jnp.dtype(leaf.dtype)).reshape(*part.shape[:2], *leaf.shape)
            for part, leaf in zip(program.cut(gradients), program.leaves)
        ]
        parts = list(map(put, parts, program.cuts or [PartitionSpec()] * len(parts)))
        arrays = run(start, program.nested(parts))
        if program.mesh is not None:
            jaxsparse.check_replicas(arrays)
        updates, states, last = jax.device_get(arrays)
        parts = [x.astype(np.float64).reshape(STEPS, -1) for x in jax.tree.leaves(updates)]
        at = lambda i: jax.tree.map(lambda x: x[i], states)
        return Outcome(np.concatenate(parts, axis=-1), [*map(at, range(STEPS)), last])

    with mock.patch.object(wire, "replicated", _poisoned):
        outcome(np.zeros((STEPS, program.workers, program.size)))  # traced here, with the patch
    return outcome


class Books(NamedTuple):
    """The accumulators of a state, in float64. n elements are compressed, m are not."""

    residual: np.ndarray  # [W, n]
    momentum: np.ndarray  # [W, n], or [n] of the mean; zeros without momentum
    dense_momentum: np.ndarray  # [m]
    pending: np.ndarray  # [W, m]; zeros without delay

    @classmethod
    def of(cls, program, state):
        workers, n = program.workers, int(program.is_compressed.sum())
        packed = {name: state.momentum.get(name) for name in state.residual}
        of_mean = not all(isinstance(node, PerWorker | None) for node in packed.values())
        dense = [node for name, node in state.momentum.items() if name not in packed]

        def joined(field, *lead, size):
            arrays = [np.asarray(x, np.float64) for x in jax.tree.leaves(field)]
            rows = [x.reshape(*lead, -1) for x in arrays]
            return np.concatenate(rows, axis=-1) if rows else np.zeros((*lead, size))

        return cls(
            joined(state.residual, workers, size=n),
            joined(packed, *(() if of_mean else (workers,)), size=n),
            joined(dense, size=program.size - n),
            joined(state.pending, workers, size=program.size - n),
        )


def check(program: Program, data: Data, outcome) -> None:
    """Runs the steps and raises AssertionError where one breaks the contract.

    For every element, with v the residuals (decayed), u the gradients with momentum, and A the sum
    over workers of the magnitudes that enter (residual, momentum, gradient):

        sum of (v + u) before == W update + sum of v after,  to (4 W + 16) (2**-24 A + W 2**-126)

    A worker's own v + u takes three roundings, the sum over workers W - 1, and the mean two. An
    exchange has at most W + 1 stages (a ring's). A stage may keep something back or round it away.
    This takes three roundings: it is taken out, divided among the workers that keep it, and added
    to what they kept before. These shares make at most A together. The sum that is left takes one
    rounding. Rounding to a leaf's dtype takes three more. Each of these operations can also flush a
    number below 2**-126 to zero, on each worker.

    Where elements share a scale, A is twice the sum of the workers' largest elements. Where
    elements are projected together (`Program.spread`), the bound is also multiplied by the square
    root of their number: a projection keeps the length of a row, column or tile, but may put it
    all into one element.

    v + u and u are clipped to float32, and where sums over workers overflow, some systems clip. No
    state ever holds an inf or NaN. A step with finite gradients is skipped only if those of an
    uncompressed leaf overflow together.
    """
    gradients = data.gradients(program)
    updates, states = outcome(gradients)
    for state in states:
        _check_finite(state)
    if EXCHANGES[program.name].law == "differences":
        _check_differences(program, gradients, updates, states)
        return
    for step in range(STEPS):
        _check_step(program, gradients[step], updates[step], states[step], states[step + 1])


def _check_finite(state):
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(x.dtype, jnp.floating):
            is_finite = np.all(np.isfinite(x.astype(np.float32)))
            assert is_finite, f"the state is not finite at {jax.tree_util.keystr(path)}"


def _check_step(program, gradients, update, before, after):
    was, now = Books.of(program, before), Books.of(program, after)
    packed, decay = program.is_compressed, program.momentum or 0.0
    finite = np.where(np.isfinite(gradients), gradients, 0)  # what waits of a step that is skipped
    g, dense = finite[:, packed], finite[:, ~packed]
    own = was.momentum if was.momentum.ndim == 2 else np.zeros_like(g)

    entering = program.fading * np.abs(was.residual) + decay * np.abs(own) + np.abs(g)
    may_overflow = np.abs(was.pending if program.delay else dense).sum(0).max(initial=0)
    may_overflow = may_overflow > 0.99 * LARGEST
    skipped = int(after.skipped) - int(before.skipped)
    assert skipped in (0, 1)
    if not np.all(np.isfinite(gradients)):
        assert skipped, "a gradient that is not finite must skip the step"
    elif skipped:
        assert may_overflow, "a finite step was skipped"
    assert np.all(np.isfinite(update)), "an update is not finite"
    if skipped and not program.delay:
        assert not np.any(update), "a skipped step's update must be zero"
        np.testing.assert_array_equal(now.dense_momentum, was.dense_momentum)
    if skipped and may_overflow and program.delay:
        return  # a delayed sum that overflows is dropped, but this step's gradients are not
    if skipped:
        dense = np.zeros_like(dense)
    if program.delay:
        np.testing.assert_array_equal(now.pending, dense)
        dense = was.pending
    if program.delay or not skipped:
        _check_dense(program, dense, was.dense_momentum, now.dense_momentum, update)
    if not packed.any():
        return

    if was.momentum.ndim == 1 or not decay:
        u = g
    elif not program.delay:
        u = _held(decay * own + g)
        _check_masked(now.momentum, u, np.zeros_like(u), entering)
    else:
        u = now.momentum
        _check_masked(u, _held(decay * own + g), g, entering)
    if program.delay:
        x, added = was.residual, u
    else:
        x, added = _held(program.fading * was.residual + u), np.zeros_like(u)
    mean, of_mean = update[packed], np.zeros(np.count_nonzero(packed))
    if was.momentum.ndim == 1 and skipped and not program.delay:
        np.testing.assert_array_equal(now.momentum, was.momentum)
    elif was.momentum.ndim == 1:
        of_mean = decay * np.abs(was.momentum) + np.abs(now.momentum)
        of_mean[np.abs(now.momentum) >= LARGEST] = np.inf  # clipped
        mean = now.momentum - decay * was.momentum
        # XLA may compute the momentum twice, and round it in two ways.
        bound = 4 * (ROUNDING * of_mean + FLUSHED)
        _check_delivered(program, packed, now.momentum, bound, update)
    _check_sums(program, x, added, entering + of_mean, mean, now.residual)
    if skipped and not program.delay and not program.reducer.conserves:
        error = np.abs(now.residual - x)
        assert np.all(error <= 4 * (ROUNDING * entering + FLUSHED)), "more waits than was to send"
    # Sketches, signs, products and transforms. Add each new system that uses one of these.
    mixes = program.name in ("s2_reducer", "sign_sgd", "powersgd", "demo")
    mixes |= program.settings.get("format") in ("sign", "int2")  # zero counts as positive
    if not mixes:
        something = np.abs(mean) > 4 * (ROUNDING * of_mean + FLUSHED * (of_mean > 0))
        assert not np.any(something & np.all(x == 0, axis=0)), "what no worker has was delivered"
    if not skipped or program.delay:
        _check_counts(program, x, added, update[packed], now.residual, after.info)


def _check_differences(program, gradients, updates, states):
    """Checks the steps of a system with the other law, see `contrib.ef21`.

    For every element the update is g, and g == mean of (v - residual), to the rounding of all steps
    so far. v is the momentum. It changes by (1 - momentum) (gradient - v).
    """
    workers, packed = program.workers, program.is_compressed
    everywhere = np.ones(program.size, bool)
    scale = 0.0
    for gradient, update, before, after in zip(gradients, updates, states, states[1:]):
        inner = Books.of(program, after.feedback)
        left = np.zeros((workers, program.size))
        left[:, packed] = inner.residual
        was, now = (_joined(state.momentum, workers) for state in (before, after))
        estimate = _joined(after.estimate)
        skipped = int(after.feedback.skipped) - int(before.feedback.skipped)
        assert skipped in (0, 1)
        entering = np.abs(was) + np.abs(left) + np.abs(now)
        entering += np.abs(np.where(np.isfinite(gradient), gradient, 0))
        if not np.all(np.isfinite(gradient)):
            assert skipped, "a gradient that is not finite must skip the step"
        else:
            largest = entering.sum(0).max(initial=0)
            assert not skipped or largest > 0.99 * LARGEST, "a finite step was skipped"
        assert int(after.steps) == int(before.steps) + 1 - skipped
        if skipped:
            assert not np.any(update), "a skipped step's update must be zero"
            _check_same_bits(before.estimate, after.estimate)
        eta = 1 - (program.momentum or 0.0) if before.steps else 1
        expected = was + eta * (gradient - was)
        if skipped:  # of compressed leaves, what float32 holds of the changes waits
            fits = np.abs(gradient - was) <= LARGEST
            expected = np.where(fits & packed, expected, was)
        error = np.abs(now - expected)
        assert np.all(error <= 8 * (ROUNDING * entering + FLUSHED)), "not the momentum"
        if not skipped:
            # XLA may compute the estimate twice, and round it in two ways.
            twice = 4 * (ROUNDING * np.abs(estimate) + FLUSHED)
            _check_delivered(program, everywhere, estimate, twice, update)
        largest = entering.max(initial=0) if program.shares_scales else entering.max(0)
        scale = scale + 2 * workers * largest
        # Values beyond float32 are clipped.
        bound = np.where(scale >= LARGEST, np.inf, _bound(program, scale) * STEPS)
        error = np.abs(workers * estimate - (now - left).sum(0))
        assert np.all(error <= bound), (
            f"the update is not the mean of the workers' estimates: {error.max()}"
        )


def _joined(tree, *lead):
    """All arrays of a tree, joined along the last axis behind the leading axes."""
    parts = [np.asarray(x, np.float64).reshape(*lead, -1) for x in jax.tree.leaves(tree)]
    return np.concatenate(parts, axis=-1)


def _check_same_bits(before, after):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after)):
        same = np.asarray(x).tobytes() == np.asarray(y).tobytes()
        assert same, f"a skipped step changed the state at {jax.tree_util.keystr(path)}"


def _held(x):
    return np.clip(x, -LARGEST, LARGEST)


def _check_masked(momentum, expected, masked, entering):
    """Checks that each element of the momentum is the expected one, or the masked one."""
    error = np.minimum(np.abs(momentum - masked), np.abs(momentum - expected))
    assert np.all(error <= 4 * (ROUNDING * entering + FLUSHED)), "momentum is neither u nor masked"


def _bound(program, scale):
    return (4 * program.workers + 16) * (ROUNDING * scale + program.workers * FLUSHED)


def _check_dense(program, gradients, momentum_before, momentum, update):
    """Checks that elements that are not compressed have exact means."""
    decay = program.momentum or 0.0
    expected = gradients.mean(0) + decay * momentum_before
    bound = _bound(program, np.abs(gradients).sum(0) + decay * np.abs(momentum_before))
    if decay:
        error = np.abs(momentum - np.clip(expected, -LARGEST, LARGEST))
        assert np.all(error <= bound), "not the mean's momentum"
    _check_delivered(program, ~program.is_compressed, expected, bound, update)


def _check_delivered(program, where, expected, bound, update):
    """Checks that the update is `expected`, but for rounding and clipping to the leaves' dtypes."""
    limit = program.by_leaf(lambda dtype: jnp.finfo(dtype).max)[where]
    eps = program.by_leaf(lambda dtype: 0 if dtype == "float32" else jnp.finfo(dtype).eps)[where]
    tiny = program.by_leaf(lambda dtype: jnp.finfo(dtype).tiny)[where]
    expected = np.clip(expected, -limit, limit)
    error = np.abs(update[where] - expected)
    assert np.all(error <= bound + eps / 2 * np.maximum(np.abs(expected), tiny)), "not the mean"


def _check_sums(program, x, added, entering, mean, residual):
    """Checks that all that goes into an exchange, and nothing else, comes out of it or is kept."""
    scale = (entering + np.abs(added)).sum(0)
    if program.shares_scales:
        largest = entering.max(axis=1, initial=0).sum()
        scale = np.full_like(scale, 2 * largest)
    bound = _bound(program, scale) * (program.spread if program.shares_scales else 1)
    if program.settings.get("density", 0) is None:
        # What rounding to the leaves' dtypes removes is not fed back, as for uncompressed leaves.
        packed = program.is_compressed
        eps = program.by_leaf(lambda t: 0 if t == "float32" else jnp.finfo(t).eps)[packed]
        tiny = program.by_leaf(lambda t: jnp.finfo(t).tiny)[packed]
        bound += program.workers * eps / 2 * np.maximum(np.abs(mean) * (1 + 2**-7), tiny)
        # What lies beyond their range is not fed back either.
        limit = program.by_leaf(lambda t: jnp.finfo(t).max)[packed]
        bound = np.where(np.abs(mean) >= limit, np.inf, bound)
    if program.name in ("sparcml", "spardl", "gtopk"):
        # A partial sum that overflows and finds no room is clipped to float32.
        bound = np.where(scale >= LARGEST, scale, bound)
    # What is added behind the exchange, a gradient or what rounding takes, is clipped, too. A leaf
    # of few bits may then take its rounding from what was clipped.
    packed = program.is_compressed
    eps = program.by_leaf(lambda t: 0 if t == "float32" else jnp.finfo(t).eps)[packed]
    is_clipped = np.any(np.abs(residual) >= LARGEST * (1 - eps), axis=0) & (scale >= LARGEST)
    if program.shares_scales:
        # What an exchange leaves may be larger than what came. It is clipped before more is added.
        was_clipped = (np.abs(x) + np.abs(mean) >= LARGEST) & (added != 0)
        is_clipped |= np.any(was_clipped, axis=0)
    bound = np.where(is_clipped, scale, bound)
    if program.reducer.conserves:
        came, left = (x + added).sum(0), program.workers * mean + residual.sum(0)
        error = np.abs(came - left)
        i = int(np.argmax(error / bound))
        assert error[i] <= bound[i], (
            f"of compressed element {i} {came[i]} went in and {left[i]} is accounted for: off by "
            f"{error[i] / bound[i]:.3g} bounds, where {program.reducer.conservation=}"
        )


# These systems may sum densely, and then count everything, or carry the momentum of the mean.
_COUNT_MORE = ("dense", "sketched_sgd", "s2_reducer", "omni_reduce", "sparse_all_gather")


def _check_counts(program, x, added, update, residual, info):
    dense = program.size - update.size
    sends_all = program.settings.get("density", 0) is None  # momentum is then the mean's
    delivered, overflow = int(info.delivered), int(info.overflow)
    assert delivered <= program.size
    magnitudes = np.abs(np.concatenate([x[x != 0], added[added != 0]]))
    is_normal = magnitudes.min(initial=1) > 1e-29 and magnitudes.max(initial=0) < 1e37
    is_single = all(leaf.dtype == "float32" for leaf in program.leaves)
    if not sends_all:
        assert delivered >= np.count_nonzero(update) + dense
    if program.name not in _COUNT_MORE and not program.shares_scales and is_normal and is_single:
        assert delivered == np.count_nonzero(update) + dense
    kept = residual - added
    assert overflow >= 0
    if overflow and is_normal:
        assert np.any(kept), "entries found no room, but none is kept"
    if sends_all and not overflow and is_normal:
        assert not np.any(kept), "blocks are kept, but none is counted"
