"""The stages of gpu.py that need JAX: kernels, and whole updates.

Times stand beside the least that memory traffic takes. Updates are of workers that one device
simulates, with matrices and vectors.
"""

import argparse
import concurrent.futures
import functools
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import timing

import jaxsparse
from jaxsparse import codecs, contrib, quantize, select, shard, sketch
from jaxsparse.arrays.stream import to_dense
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.quantize import packing

# A program with its arguments.
Program = tuple[Callable[..., Any], tuple[Any, ...]]

_WORKERS, _DENSITY = 8, 0.001  # of updates; of kernels and updates

# --- a stage: a budget of time, results that outlive a crash, and timing

_LEAST = 1.0  # seconds: nothing begins if less time is left
_BATCH = 0.01  # seconds between two waits, a hundred times the cost of a wait
_MOST_CALLS = 500
_MOST = 2.0  # seconds for all batches of a slow program


class Stage:
    """Writes results one by one, and keeps to its time, after which gpu.py ends the process."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self._end = time.monotonic() + args.seconds

    def record(self, **values: Any) -> None:
        """Adds a row, and prints it. gpu.py reads it even if the process dies afterwards."""
        with self.args.records.open("a") as file:
            file.write(json.dumps(values) + "\n")
        shown = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in values.values())
        print(*shown, sep=", ", flush=True)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def wanted(self, name: str) -> bool:
        """Whether --only leaves the program of this name in."""
        return not self.args.only or any(word in name for word in self.args.only)

    def attempt(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args). If it fails or time is up: None, and a row that says why."""
        try:
            if self.left >= _LEAST:
                return function(*args)
            self.record(skipped=what)
        except TimeoutError:  # compiling takes longer than the time that is left
            self.record(skipped=what)
        except Exception as error:  # one kernel's: the others are still worth their time
            first = (str(error).strip().splitlines() or ["no message"])[0]
            self.record(failed=what, why=f"{type(error).__name__}: {first}"[:300])
        return None

    def compiled(
        self, programs: dict[str, Program], donate: tuple[int, ...] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Names and compiled programs, in order.

        Those that --only leaves in. As many as there are cores compile at a time. Nothing compiles
        while the caller has one, because dispatching calls needs the cores.
        """

        def build(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            return jax.jit(f, donate_argnums=donate).lower(*args).compile()

        left = ((name, each) for name, each in programs.items() if self.wanted(name))
        while some := dict(itertools.islice(left, os.cpu_count())):
            pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
            futures = {name: pool.submit(build, *program) for name, program in some.items()}
            ready = {
                name: self.attempt(f"{name} (compiling)", future.result, max(self.left, 0.0))
                for name, future in futures.items()
            }
            pool.shutdown(wait=False, cancel_futures=True)
            yield from ((name, program) for name, program in ready.items() if program is not None)


def timed(run: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Seconds of a call among many that are queued behind each other.

    Calls run on a GPU's queue in order. So one wait after many calls times the device, and not the
    way to it and back. If a program is shorter than its dispatch, the dispatch is timed, which a
    training step pays, too. (A loop inside one program would have to change its input at each turn,
    or XLA would hoist the work out. This change is a pass over memory, as long as some kernels.)
    """
    wait(run())  # compiles, if it was not compiled before
    start = time.perf_counter()
    wait(run())
    one = time.perf_counter() - start
    calls = min(max(math.ceil(_BATCH / one), 1), _MOST_CALLS)
    batches = max(3, min(7, int(_MOST / (calls * one))))
    seconds = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            out = run()
        wait(out)
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def run_stage(args: argparse.Namespace) -> None:
    """Runs one stage in this process."""
    stage, (device, *_) = Stage(args), jax.devices()
    if (device.platform == "cpu") != (args.platform == "cpu"):
        sys.exit(f"--platform={args.platform}, but JAX runs on {device}: install jax[cuda13]")
    if args.stage == "device":
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
        stage.record(chip=device.device_kind, platform=device.platform, **versions)
    else:
        {"kernels": kernels, "steps": steps}[args.stage](stage)


# --- kernels


class Kernel(NamedTuple):
    """One row of the table: bytes that have to move, whatever the algorithm, and a program."""

    traffic: float
    program: Callable[..., Any]
    arguments: tuple[Any, ...]


class Inputs:
    """Inputs of all kernels at one size: cubed normals, among which k entries are to be found."""

    def __init__(self, size: int):
        self.size, self.k = size, max(1, int(_DENSITY * size))
        self.spec = sketch.SketchSpec(rows=5, cols=max(1, size // 64))
        self.x = jax.jit(lambda key: jax.random.normal(key, (size,)) ** 3)(jax.random.key(0))
        self.table, self.key = sketch.encode(self.x, self.spec), jax.random.key(1)
        self.selected = 4 * size + 8 * self.k  # bytes of a vector and of its entries
        self.both = 4 * size + 4 * self.table.size

    def kernels(self) -> dict[str, Kernel]:
        """The table's kernels.

        heavy_hitters never stores the vector in which it looks for entries. It counts as read once
        all the same, or hardly anything would have to move.
        """
        size, k, spec, x, table = self.size, self.k, self.spec, self.x, self.table
        # The threshold that k magnitudes reach on average.
        threshold = statistics.NormalDist().inv_cdf(1 - k / size / 2) ** 3
        block, qsgd, codec = 256, quantize.QSGD(4), codecs.EliasFano()
        block_k = max(1, int(_DENSITY * -(-size // block)))
        packed = 4 * size + size * qsgd.bits / 8
        quantized = packed + 4 * size / qsgd.group_size
        of_chunks = lambda x: select.group_top_k(x, 64, 4096)
        encode = lambda stream: codec.encode(stream, size)
        chunks = of_chunks(x)
        count, levels = chunks.values.size, jnp.clip(x, -7, 7).astype(jnp.int32)
        decode = lambda words: to_dense(codec.decode(words, count, size, jnp.float32), size)
        top_k = {
            name: Kernel(self.selected, functools.partial(getattr(select, name), k=k), (x,))
            for name in ("threshold_top_k", "fast_top_k", "sampled_top_k")
        }
        return top_k | {
            "hash_extract": Kernel(
                self.selected,
                lambda x, t: select.hash_extract(x, t, k),
                (x, jnp.float32(threshold)),
            ),
            "slot_max": Kernel(self.selected, lambda x: select.slot_max(x, k), (x,)),
            "sketch.encode": Kernel(self.both, lambda x: sketch.encode(x, spec), (x,)),
            "heavy_hitters": Kernel(
                self.selected, lambda t: sketch.heavy_hitters(t, spec, size, k), (table,)
            ),
            "compact": Kernel(
                size + 4 * k, lambda m: select.compact(m, k), (jnp.abs(x) >= threshold,)
            ),
            "block_top_k": Kernel(
                4 * size + 8 * block * block_k,  # the blocks found are read and written
                lambda x: select.block_top_k(x, block_k, block),
                (x,),
            ),
            "sketch.decode": Kernel(self.both, lambda t: sketch.decode(t, spec, size), (table,)),
            "QSGD, 4 bits": Kernel(
                quantized, lambda x, key: quantize.quantize(x, qsgd, key), (x, self.key)
            ),
            "QSGD, back": Kernel(
                quantized,
                lambda q: quantize.dequantize(q, qsgd, size),
                (quantize.quantize(x, qsgd, None),),
            ),
            "pack": Kernel(packed, lambda levels: packing.pack(levels, qsgd.bits, size), (levels,)),
            "group_top_k": Kernel(4 * size + 8 * count, of_chunks, (x,)),
            "2-bit entries": Kernel((8 + 14 / 8) * count, encode, (chunks,)),
            "2-bit entries, back": Kernel(
                14 / 8 * count + 4 * size, decode, (jax.jit(encode)(chunks),)
            ),
            "lax.top_k": Kernel(self.selected, lambda x: jax.lax.top_k(jnp.abs(x), k)[1], (x,)),
        }


def kernels(stage: Stage) -> None:
    """Times all kernels, size by size. The first sizes are the ones that matter."""
    torch, why = _torch(stage.args.platform)
    if torch is None:
        stage.record(note=why)
    for exponent in stage.args.sizes:
        if (inputs := stage.attempt(f"inputs of 2^{exponent}", Inputs, 2**exponent)) is None:
            continue
        found = stage.attempt(f"kernels of 2^{exponent}", inputs.kernels) or {}
        row = functools.partial(_row, stage, exponent, timing.doubled(inputs.x))
        for name, compiled in stage.compiled({n: k[1:] for n, k in found.items()}):
            run = functools.partial(compiled, *found[name].arguments)
            row(name, found[name].traffic, functools.partial(timed, run))
        if torch is not None and stage.wanted("torch.topk"):
            row("torch.topk", inputs.selected, functools.partial(_torch_timed, torch, inputs))


def _row(
    stage: Stage,
    exponent: int,
    copy: Callable[[], Any],
    name: str,
    traffic: float,
    measure: Callable[[], float],
) -> None:
    """Times one kernel, and a copy just before it, because the clocks of a chip change."""
    if found := stage.attempt(f"{name} at 2^{exponent}", lambda: (timed(copy), measure())):
        floor, seconds = found
        bandwidth = 8 * 2**exponent / floor
        of_floor, ms = seconds * bandwidth / traffic, 1e3 * seconds
        stage.record(name=name, exponent=exponent, ms=ms, bandwidth=bandwidth, over_floor=of_floor)


def _torch(platform: str) -> tuple[Any, str]:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None, "torch is not installed: its rows are left out"
    if platform == "gpu" and not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no GPU: its rows are left out"
    torch.set_default_device("cuda" if platform == "gpu" else "cpu")
    return torch, ""


def _torch_timed(torch: Any, inputs: Inputs) -> float:
    """Seconds of torch.topk."""
    has_gpu = torch.cuda.is_available()
    try:
        x = torch.randn(inputs.size) ** 3
        run = lambda: torch.topk(x.abs(), inputs.k, sorted=False)
        return timed(run, lambda out: torch.cuda.synchronize() if has_gpu else None)
    finally:
        if has_gpu:
            torch.cuda.empty_cache()  # for JAX, which shares the memory


# --- updates

_LAYERS, _WIDTH = 16, 1024
# Floats for each parameter and worker: gradient, residual and temporaries (tests/test_bytes.py).
_FLOATS = 6.5


def methods(params: int) -> dict[str, Any]:
    vectors = _LAYERS * _WIDTH  # elements that travel dense
    # Sketched-SGD sends 4 k words of table and as many of candidates for k coordinates.
    sent = min(1.0, 8 * _DENSITY) * params + vectors
    return {
        "dense": jaxsparse.dense(),
        "dragonn": jaxsparse.dragonn(_DENSITY),
        "spardl": jaxsparse.spardl(_DENSITY),
        "sketched_sgd": jaxsparse.sketched_sgd((params + vectors) / sent, rows=5, oversampling=4),
        "chunked_top_k": jaxsparse.chunked_top_k(64, 4096),
        "quantized int8": jaxsparse.quantized("int8"),
        "top_k": jaxsparse.top_k(_DENSITY),
        "powersgd": jaxsparse.powersgd(4),
        "demo": contrib.demo(64),
        "ok_topk": contrib.ok_topk(_DENSITY),
    }


def fitting(params: int) -> int:
    """The number of parameters, halved until there is memory for all workers' vectors."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")  # a CPU has none
    here = 0.25 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    while params * _WORKERS * 4 * _FLOATS > (0.8 * limit if limit else here):
        params //= 2
    return params


class Update(NamedTuple):
    """A step that is given gradients, and functions that make its arguments."""

    step: Callable[..., Any]
    start: Callable[[], Any]
    gradients: Callable[[jax.Array], Any]


def update_of(tx: optax.GradientTransformation, params: int) -> Update:
    rows = max(1, params // _LAYERS // _WIDTH)
    shapes: dict[str, tuple[int, ...]] = {f"kernel{i}": (rows, _WIDTH) for i in range(_LAYERS)}
    shapes |= {f"bias{i}": (_WIDTH,) for i in range(_LAYERS)}
    tx = optax.chain(tx, optax.sgd(0.1))

    def step(state, gradient):
        params, opt_state = state
        own = jax.tree.map(lambda g: g[0], gradient)
        updates, opt_state = tx.update(own, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def start():
        params = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
        return shard((params, tx.init(params)), _WORKERS)

    def gradients(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
        return {
            name: jax.random.normal(keys[name], (_WORKERS, *shape)) ** 3
            for name, shape in shapes.items()
        }

    return Update(run_on_workers(step, _WORKERS), jax.jit(start), jax.jit(gradients))


def steps(stage: Stage) -> None:
    """Measures the time and memory of an update by each method."""
    params = fitting(stage.args.params)
    if params < stage.args.params:
        stage.record(note=f"there is room for updates of {params} parameters")
    transformations = methods(params)
    names = filter(stage.wanted, transformations)
    made = {name: update_of(transformations[name], params) for name in names}
    programs: dict[str, Program] = {}
    for name, update in made.items():
        state = stage.attempt(f"the state of {name}", jax.eval_shape, update.start)
        if state is not None:
            gradient = jax.eval_shape(update.gradients, jax.random.key(0))
            programs[name] = (update.step, (state, gradient))
    for name, compiled in stage.compiled(programs, donate=(0,)):

        def measure(compiled=compiled, update=made[name]):
            state, gradient = [update.start()], update.gradients(jax.random.key(0))

            def run():
                state[0] = compiled(state[0], gradient)
                return state[0]

            return timed(run)

        if seconds := stage.attempt(f"an update of {name}", measure):
            gib = timing.peak(compiled) / 2**30
            stage.record(name=name, params=params, workers=_WORKERS, ms=1e3 * seconds, gib=gib)
