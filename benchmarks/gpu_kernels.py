"""The kernels of gpu.py: times beside the least that their memory traffic takes, and traces."""

import functools
import importlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gpu_stage import Program, Stage, Times, donated_double, timed

from jaxsparse import codecs, quantize, select, sketch
from jaxsparse.arrays import platforms
from jaxsparse.arrays.stream import SparseStream, to_dense

_BLOCK = 256
_FORMS_SIZE = 22  # 2^22: with 2^27, loops over tiles would take most of a GPU's time
_QSGD = quantize.QSGD(4)
_CHUNK_K, _CHUNK_SIZE = 64, 4096
_CHUNKS = codecs.EliasFano()


class Inputs:
    """Inputs of all kernels at one size: cubed normals, among which k entries are to be found."""

    def __init__(self, size: int, density: float):
        self.size = size
        self.k = max(1, int(density * size))
        self.blocks = -(-size // _BLOCK)
        self.block_k = max(1, int(density * self.blocks))
        self.spec = sketch.SketchSpec(rows=5, cols=max(1, size // 64))
        # The threshold that k magnitudes reach on average.
        self.threshold = statistics.NormalDist().inv_cdf(1 - self.k / size / 2) ** 3
        self.key = jax.random.key(1)

    def made(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args)."""
        return jax.jit(function)(*args)

    @functools.cached_property
    def x(self) -> jax.Array:
        """float32[size]."""
        return self.made(lambda key: jax.random.normal(key, (self.size,)) ** 3, jax.random.key(0))

    @functools.cached_property
    def mask(self) -> jax.Array:
        """Mask of the elements of x whose magnitude reaches the threshold."""
        return self.made(lambda x: jnp.abs(x) >= self.threshold, self.x)

    @functools.cached_property
    def table(self) -> jax.Array:
        """The sketch of x."""
        return self.made(lambda x: sketch.encode(x, self.spec), self.x)

    @functools.cached_property
    def levels(self) -> jax.Array:
        """Integers of 4 bits."""
        return self.made(lambda x: jnp.clip(x, -7, 7).astype(jnp.int32), self.x)

    @functools.cached_property
    def quantized(self) -> quantize.QuantizedVector:
        """The values of x in 4 bits each."""
        return self.made(lambda x: quantize.quantize(x, _QSGD, None), self.x)

    @functools.cached_property
    def chunks(self) -> SparseStream:
        """The largest entries of each chunk."""
        return self.made(_of_chunks, self.x)

    @functools.cached_property
    def message(self) -> jax.Array:
        """The entries of `chunks`, packed."""
        return self.made(lambda stream: _CHUNKS.encode(stream, self.size), self.chunks)


def _of_chunks(x: jax.Array) -> SparseStream:
    return select.group_top_k(x, _CHUNK_K, _CHUNK_SIZE)


class Kernel(NamedTuple):
    """One row of the table."""

    traffic: Callable[[Inputs], float]  # bytes that have to move, whatever the algorithm
    program: Callable[[Inputs], Program]
    target: float | None = None  # limit: a multiple of that traffic's time at a copy's bandwidth


def _selected(i: Inputs) -> float:
    return 4 * i.size + 8 * i.k


def _table(i: Inputs) -> float:
    return 4 * i.spec.rows * i.spec.cols


def _entries(i: Inputs) -> float:
    return i.size * _CHUNK_K / _CHUNK_SIZE


def _packed(i: Inputs) -> float:
    return i.size * _QSGD.bits / 8 + 4 * i.size / _QSGD.group_size


# heavy_hitters never stores the vector in which it looks for entries. It counts as read once all
# the same, or hardly anything would have to move.
KERNELS = {
    "hash_extract": Kernel(
        _selected,
        lambda i: (
            lambda x, t: select.hash_extract(x, t, i.k),
            (i.x, jnp.float32(i.threshold)),
        ),
        3,
    ),
    "slot_max": Kernel(_selected, lambda i: (lambda x: select.slot_max(x, i.k), (i.x,)), 3),
    "sketch.encode": Kernel(
        lambda i: 4 * i.size + _table(i),
        lambda i: (lambda x: sketch.encode(x, i.spec), (i.x,)),
        4,
    ),
    "heavy_hitters": Kernel(
        _selected,
        lambda i: (lambda table: sketch.heavy_hitters(table, i.spec, i.size, i.k), (i.table,)),
        8,
    ),
    "threshold_top_k": Kernel(
        _selected, lambda i: (lambda x: select.threshold_top_k(x, i.k), (i.x,)), 6
    ),
    "fast_top_k": Kernel(_selected, lambda i: (lambda x: select.fast_top_k(x, i.k), (i.x,))),
    "compact": Kernel(
        lambda i: i.size + 4 * i.k, lambda i: (lambda m: select.compact(m, i.k), (i.mask,))
    ),
    "block_top_k": Kernel(
        lambda i: 4 * i.size + 8 * _BLOCK * i.block_k,  # the blocks found are read and written
        lambda i: (lambda x: select.block_top_k(x, i.block_k, _BLOCK), (i.x,)),
    ),
    "sketch.decode": Kernel(
        lambda i: 4 * i.size + _table(i),
        lambda i: (lambda table: sketch.decode(table, i.spec, i.size), (i.table,)),
    ),
    "QSGD, 4 bits": Kernel(
        lambda i: 4 * i.size + _packed(i),
        lambda i: (
            lambda x, key: quantize.quantize(x, _QSGD, key),
            (i.x, i.key),
        ),
    ),
    "QSGD, back": Kernel(
        lambda i: 4 * i.size + _packed(i),
        lambda i: (
            lambda q: quantize.dequantize(q, _QSGD, i.size),
            (i.quantized,),
        ),
    ),
    "pack": Kernel(
        lambda i: 4 * i.size + i.size * _QSGD.bits / 8,
        lambda i: (lambda levels: quantize.pack(levels, _QSGD.bits), (i.levels,)),
    ),
    "group_top_k": Kernel(
        lambda i: 4 * i.size + 8 * _entries(i), lambda i: (_of_chunks, (i.x,)), 10
    ),
    "2-bit entries": Kernel(
        lambda i: (8 + 14 / 8) * _entries(i),
        lambda i: (lambda stream: _CHUNKS.encode(stream, i.size), (i.chunks,)),
    ),
    "2-bit entries, back": Kernel(
        lambda i: 14 / 8 * _entries(i) + 4 * i.size,
        lambda i: (
            lambda words: to_dense(
                _CHUNKS.decode(words, i.chunks.values.size, i.size, jnp.float32), i.size
            ),
            (i.message,),
        ),
    ),
    "sampled_top_k": Kernel(_selected, lambda i: (lambda x: select.sampled_top_k(x, i.k), (i.x,))),
    "lax.top_k": Kernel(_selected, lambda i: (lambda x: jax.lax.top_k(jnp.abs(x), i.k)[1], (i.x,))),
}


# Kernels that CPU and GPU have different forms of.
TWO_FORMS = (
    *("hash_extract", "slot_max", "sketch.encode", "sketch.decode", "heavy_hitters"),
    *("threshold_top_k", "fast_top_k", "compact"),
)


def table(stage: Stage) -> None:
    """Times all kernels, size by size. The first sizes are the ones that matter."""
    torch, why = _torch(stage.args.platform)
    if torch is None:
        stage.record(note=why)
        print(why, flush=True)
    for exponent in stage.args.sizes:
        inputs = Inputs(2**exponent, stage.args.density)
        _time_all(stage, exponent, inputs, KERNELS)
        if torch is not None:
            for name, torch_run in _torch_runs(torch, inputs, stage.args.platform).items():
                if stage.wanted(name):
                    measure = functools.partial(_torch_timed, torch, torch_run)
                    _row(stage, exponent, inputs, name, measure)


def choose_forms(platform: str) -> None:
    """Makes all later traces take the forms of one platform: "default" or "cuda"."""
    platforms.platform_dependent = lambda *operands, **forms: forms[platform](*operands)
    jax.clear_caches()


def other_forms(stage: Stage) -> None:
    """Times the forms that this device does not take by itself, at one of the wanted sizes.

    It needs a process of its own, because others must not find the programs that it traces.
    """
    choose_forms("default" if stage.args.platform == "gpu" else "cuda")
    sizes = stage.args.sizes
    exponent = max((size for size in sizes if size <= _FORMS_SIZE), default=min(sizes))
    inputs = Inputs(2**exponent, stage.args.density)
    _time_all(stage, exponent, inputs, {name: KERNELS[name] for name in TWO_FORMS})


def _time_all(stage: Stage, exponent: int, inputs: Inputs, kernels: dict[str, Kernel]) -> None:
    programs: dict[str, Program] = {}
    for name, kernel in kernels.items():
        if stage.wanted(name):
            program = stage.attempt(f"{name} at 2^{exponent}", kernel.program, inputs)
            if program is not None:
                programs[name] = program
    for name, compiled in stage.compiled_apart(programs):
        run = functools.partial(compiled, *programs[name][1])
        _row(stage, exponent, inputs, name, functools.partial(timed, run))


def _row(
    stage: Stage, exponent: int, inputs: Inputs, name: str, measure: Callable[[], Times]
) -> None:
    """Times one kernel, and a copy just before it, because the clocks of a chip change."""
    both = stage.attempt(
        f"{name} at 2^{exponent}", lambda: (timed(donated_double(inputs.size)), measure())
    )
    if both is None:
        return
    floor, times = both
    sketched = name == "torch count sketch"
    kernel = KERNELS["sketch.encode" if sketched else "lax.top_k" if "torch" in name else name]
    bandwidth = 8 * inputs.size / floor.median
    of_floor = times.median * bandwidth / kernel.traffic(inputs)
    target = None if "torch" in name else kernel.target
    stage.record(
        name=name,
        size=exponent,
        k=inputs.k,
        ms=1e3 * times.median,
        min_ms=1e3 * times.least,
        bandwidth=bandwidth,
        over_floor=of_floor,
        over_donated=times.median / floor.median,
        target=target,
    )
    mark = f"  over its target of {target}" if target and of_floor > target else ""
    print(
        f"2^{exponent:<3} {name:<20} {1e3 * times.median:>10.3f} ms  "
        f"{of_floor:>7.2f} of the floor{mark}",
        flush=True,
    )


def _torch(platform: str) -> tuple[Any, str]:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None, "torch is not installed: its rows are left out"
    if platform == "gpu" and not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no GPU: its rows are left out"
    return torch, ""


def _torch_runs(torch: Any, inputs: Inputs, platform: str) -> dict[str, Callable[[], Any]]:
    """The top-k of torch, and a count sketch with stored hashes, which is usual there."""
    made: dict[str, Any] = {}
    where = "cuda" if platform == "gpu" else "cpu"

    def x() -> Any:
        if "x" not in made:
            made["x"] = torch.randn(inputs.size, device=where) ** 3
        return made["x"]

    def top_k() -> Any:
        return torch.topk(x().abs(), inputs.k, sorted=False)

    def count_sketch() -> Any:
        rows, cols = inputs.spec.rows, inputs.spec.cols
        if "buckets" not in made:
            shape = (rows, inputs.size)
            made["buckets"] = torch.randint(cols, shape, device=where)
            made["signs"] = 2 * torch.randint(2, shape, device=where, dtype=torch.int8) - 1
        sketched = torch.zeros(rows, cols, device=where)
        for row in range(rows):
            sketched[row].scatter_add_(0, made["buckets"][row], x() * made["signs"][row])
        return sketched

    return {"torch.topk": top_k, "torch count sketch": count_sketch}


def _torch_timed(torch: Any, run: Callable[[], Any]) -> Times:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    try:
        return timed(run, lambda out: synchronize())
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for JAX, which shares the memory


def trace(stage: Stage) -> None:
    """Profiles the kernels that are furthest above their floors, at the largest size."""
    inputs = Inputs(2 ** max(stage.args.sizes), stage.args.density)
    programs = {name: KERNELS[name].program(inputs) for name in stage.args.slowest}
    for name, compiled in stage.compiled(programs):
        arguments = programs[name][1]
        folder = f"{stage.args.trace}/{name.replace(' ', '_').replace(',', '')}"

        def profile(compiled=compiled, arguments=arguments, folder=folder):
            jax.block_until_ready(compiled(*arguments))
            with jax.profiler.trace(folder):
                for _ in range(3):
                    jax.block_until_ready(compiled(*arguments))
            return True

        if stage.attempt(f"trace of {name}", profile):
            stage.record(name=name, folder=folder)
            print(f"trace of {name} in {folder}", flush=True)
