"""Whole updates of gpu.py, for workers that one device simulates, with matrices and vectors."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from gpu_stage import Program, Stage, memory, timed

import jaxsparse
from jaxsparse import data_parallel, shard

_LAYERS, _WIDTH = 16, 1024
# Floats for each parameter and worker: gradient, residual and temporaries (tests/test_bytes.py).
_FLOATS = 6.5


def methods(density: float, params: int) -> dict[str, Any]:
    vectors = _LAYERS * _WIDTH  # elements that travel dense
    # Sketched-SGD sends 4 k words of table and as many of candidates for k coordinates.
    sent = min(1.0, 8 * density) * params + vectors
    return {
        "dense": jaxsparse.dense(),
        "dragonn": jaxsparse.dragonn(density),
        "spardl": jaxsparse.spardl(density),
        "sketched_sgd": jaxsparse.sketched_sgd((params + vectors) / sent, rows=5, oversampling=4),
        "chunked_top_k": jaxsparse.chunked_top_k(64, 4096),
        "quantized int8": jaxsparse.quantized("int8"),
        "top_k": jaxsparse.top_k(density),
        "powersgd": jaxsparse.powersgd(4),
        "demo": jaxsparse.demo(64),
        "ok_topk": jaxsparse.ok_topk(density),
    }


def _room() -> float:
    """Bytes of memory that may be used."""
    limit = memory().get("bytes_limit")
    if limit:
        return 0.8 * limit
    return 0.25 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fitting(params: int, workers: int) -> int:
    """The number of parameters, halved until there is memory for all workers' vectors."""
    while params * workers * 4 * _FLOATS > _room():
        params //= 2
    return params


class Update(NamedTuple):
    """A step that is given gradients, and functions that make its arguments."""

    step: Callable[..., Any]
    start: Callable[[], Any]
    gradients: Callable[[jax.Array], Any]


def update_of(tx: optax.GradientTransformation, params: int, workers: int) -> Update:
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
        return shard((params, tx.init(params)), workers)

    def gradients(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
        return {
            name: jax.random.normal(keys[name], (workers, *shape)) ** 3
            for name, shape in shapes.items()
        }

    return Update(data_parallel(step, workers), jax.jit(start), jax.jit(gradients))


def steps(stage: Stage) -> None:
    """Measures the time and memory of an update by each method."""
    workers = stage.args.workers
    params = fitting(stage.args.params, workers)
    if params < stage.args.params:
        note = f"{stage.args.params} parameters do not fit for {workers} workers: {params} it is"
        stage.record(note=note)
        print(note, flush=True)
    made = {
        name: update_of(tx, params, workers)
        for name, tx in methods(stage.args.density, params).items()
        if stage.wanted(name)
    }
    programs: dict[str, Program] = {}
    for name, update in made.items():
        shapes = stage.attempt(f"the state of {name}", jax.eval_shape, update.start)
        if shapes is not None:
            gradients = jax.eval_shape(update.gradients, jax.random.key(0))
            programs[name] = (update.step, (shapes, gradients))
    for name, compiled in stage.compiled_apart(programs, donate=(0,)):

        def measure(compiled=compiled, update=made[name]):
            before = memory().get("peak_bytes_in_use", 0)
            state, gradient = [update.start()], update.gradients(jax.random.key(0))

            def run():
                state[0] = compiled(state[0], gradient)
                return state[0]

            return timed(run), before, memory().get("peak_bytes_in_use", 0)

        found = stage.attempt(f"an update of {name}", measure)
        if found is None:
            continue
        times, before, peak = found
        planned = compiled.memory_analysis()
        total = (
            planned.argument_size_in_bytes
            + planned.output_size_in_bytes
            - planned.alias_size_in_bytes
            + planned.temp_size_in_bytes
        )
        stage.record(
            name=name,
            params=params,
            workers=workers,
            ms=1e3 * times.median,
            min_ms=1e3 * times.least,
            planned_bytes=total,
            # The device tells the largest peak so far, which is this method's if it is a new one.
            peak_bytes=peak if peak > before else None,
        )
        print(f"{name:<14} {1e3 * times.median:>10.2f} ms, {total / 2**30:.2f} GiB", flush=True)
