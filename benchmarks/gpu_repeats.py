"""Repeats the decodes of gpu.py on one input, because replicas must stay bitwise equal.

The data are not integers. Sums of integers are exact in any order, and would hide a change of it.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gpu_kernels import Inputs
from gpu_stage import Program, Stage

from jaxsparse import quantize, select, sketch
from jaxsparse.arrays.stream import SparseStream, to_dense

sys.path.append(str(Path(__file__).parents[1] / "tests"))
at_density: Any = importlib.import_module("at_density")

_DENSITY = 0.01
# Programs that may differ from run to run, because one scatter adds entries of one index in any
# order. A worker's own sketch is made so on a GPU. Nothing that each replica makes for itself is.
DUPLICATES = "to_dense, 8 entries an index (no promise)"
ANY_ORDER = (DUPLICATES, "sketch.encode", "mean of sketched_sgd", "mean of s2_reducer")


def _kernels(size: int) -> dict[str, Program]:
    i = Inputs(size, _DENSITY)
    distinct = select.top_k(i.x, i.k)
    repeated = SparseStream(jnp.tile(distinct.indices, 8), jnp.concatenate([i.x[: i.k]] * 8))
    scattered = lambda stream: to_dense(stream, size)
    qsgd = quantize.QSGD(4)
    return {
        "sketch.encode": (lambda x: sketch.encode(x, i.spec), (i.x,)),
        "sketch.decode": (lambda t: sketch.decode(t, i.spec, size), (i.table,)),
        "heavy_hitters": (lambda t: sketch.heavy_hitters(t, i.spec, size, i.k), (i.table,)),
        "heavymix": (
            lambda t, key: sketch.heavy_hitters(t, i.spec, size, i.k, rule="heavymix", key=key),
            (i.table, i.key),
        ),
        "sketch.l2_norm": (sketch.l2_norm, (i.table,)),
        "to_dense": (scattered, (distinct,)),
        DUPLICATES: (scattered, (repeated,)),
        "hash_extract": (lambda x: select.hash_extract(x, i.threshold, i.k), (i.x,)),
        "slot_max": (lambda x: select.slot_max(x, i.k), (i.x,)),
        "threshold_top_k": (lambda x: select.threshold_top_k(x, i.k), (i.x,)),
        "fast_top_k": (lambda x: select.fast_top_k(x, i.k), (i.x,)),
        "QSGD": (lambda x, key: quantize.quantize(x, qsgd, key), (i.x, i.key)),
        "QSGD, back": (lambda q: quantize.dequantize(q, qsgd, size), (i.quantized,)),
    }


def exchanges(size: int, workers: int) -> dict[str, Callable[[jax.Array], Any]]:
    """Exchanges of vectors [workers, size] by system. One device simulates the workers."""
    programs: dict[str, Callable[[jax.Array], Any]] = {}
    for name in at_density.NAMES:
        reducer = at_density.reducer_at(name, _DENSITY, size)

        def exchange(x, reducer=reducer):
            reduced = reducer(x, reducer.init(size), axis_name="data")
            return {"mean": reduced.mean, "residual": reduced.kept.whole(x).residual}

        programs[name] = jax.vmap(exchange, axis_name="data")
    return programs


def _means(size: int, workers: int) -> dict[str, Program]:
    x = jax.random.normal(jax.random.key(2), (workers, size)) ** 3
    return {f"mean of {name}": (run, (x,)) for name, run in exchanges(size, workers).items()}


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32) if x.dtype == jnp.float32 else x


@jax.jit
def _different(a: Any, b: Any) -> Any:
    """The number of elements whose bits differ."""
    counts = jax.tree.map(lambda x, y: jnp.sum(_bits(x) != _bits(y)), a, b)
    return sum(jax.tree.leaves(counts))


def repeats(stage: Stage) -> None:
    """Runs each program several times, and counts the elements that differ from the first run."""
    size, times = 2**stage.args.repeat_size, stage.args.repeats
    programs = _kernels(size) | _means(size, stage.args.workers)
    programs = {name: program for name, program in programs.items() if stage.wanted(name)}
    for name, compiled in stage.compiled(programs):
        arguments = programs[name][1]

        def check(compiled=compiled, arguments=arguments):
            first = compiled(*arguments)
            unlike = [int(_different(compiled(*arguments), first)) for _ in range(times - 1)]
            apart = 0
            if isinstance(first, dict):
                mean = first["mean"]
                apart = int(_different(mean, jnp.broadcast_to(mean[:1], mean.shape)))
            return {"runs": sum(n > 0 for n in unlike), "most": max(unlike, default=0)} | {
                "between_replicas": apart
            }

        found = stage.attempt(f"{name}, {times} times", check)
        if found is not None:
            on_cpu = stage.args.platform == "cpu" and name != DUPLICATES
            repeatable = name not in ANY_ORDER or on_cpu
            stage.record(name=name, size=size, times=times, repeatable=repeatable, **found)
            unequal = found["runs"] or found["between_replicas"]
            print(f"{name:<45} {f'DIFFERS: {found}' if unequal else 'equal'}", flush=True)
