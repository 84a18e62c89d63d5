"""Shared by the stages of gpu.py: a budget of time, results that outlive a crash, and timing."""

import concurrent.futures
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

# A program with its arguments.
Program = tuple[Callable[..., Any], tuple[Any, ...]]

_LEAST = 1.0  # seconds: nothing begins if less time is left
_BATCH = 0.01  # seconds between two waits, a hundred times the cost of a wait
_MOST_CALLS = 500
_MOST = 2.0  # seconds for all batches of a slow program


class Stage:
    """Writes results one by one, and keeps to its time, after which gpu.py ends the process.

    Attributes:
        args: arguments of the command.
    """

    def __init__(self, args: Any, name: str, records: Path, seconds: float):
        self.args = args
        self._name = name
        self._records = records
        self._end = time.monotonic() + seconds

    def record(self, **values: Any) -> None:
        """Adds a row of this stage. gpu.py reads it even if the process dies afterwards."""
        with self._records.open("a") as file:
            file.write(json.dumps({"stage": self._name, **values}) + "\n")

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
            self.skip(what)
        except TimeoutError:  # compiling takes longer than the time that is left
            self.skip(what)
        except Exception as error:  # one kernel's: the others are still worth their time
            first = (str(error).strip().splitlines() or ["no message"])[0]
            text = f"{type(error).__name__}: {first}"[:300]
            self.record(failed=what, why=text)
            print(f"failed: {what}: {text}", flush=True)
        return None

    def skip(self, what: str) -> None:
        """Says that there is no time for `what`."""
        self.record(skipped=what)
        print(f"skipped: {what}, {max(self.left, 0):.0f} s left", flush=True)

    def compiled(
        self, programs: dict[str, Program], donate: tuple[int, ...] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Names and compiled programs, in order, as they are ready. Several compile at a time."""

        def build(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            return jax.jit(f, donate_argnums=donate).lower(*args).compile()

        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        futures = {name: pool.submit(build, *program) for name, program in programs.items()}
        try:
            for name, future in futures.items():
                left = max(self.left, 0.0)
                program = self.attempt(f"{name} (compiling)", future.result, left)
                if program is not None:
                    yield name, program
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def compiled_apart(
        self, programs: dict[str, Program], donate: tuple[int, ...] = ()
    ) -> Iterator[tuple[str, Any]]:
        """The same, but nothing compiles meanwhile, because dispatching calls needs the cores."""
        left = iter(programs.items())
        while some := dict(itertools.islice(left, os.cpu_count())):
            yield from list(self.compiled(some, donate))


class Times(NamedTuple):
    """Times of one call, over batches of calls."""

    median: float  # seconds
    least: float


def timed(
    run: Callable[[], Any],
    wait: Callable[[Any], Any] = jax.block_until_ready,
    batches: int = 7,
) -> Times:
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
    batches = max(3, min(batches, int(_MOST / (calls * one))))
    seconds = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            out = run()
        wait(out)
        seconds.append((time.perf_counter() - start) / calls)
    return Times(statistics.median(seconds), min(seconds))


@functools.lru_cache(maxsize=1)
def donated_double(size: int) -> Callable[[], jax.Array]:
    """A function that doubles a vector in its own buffer: 8 bytes of traffic an element."""
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    buffer = [jax.numpy.zeros(size, jax.numpy.float32)]

    def run():
        buffer[0] = double(buffer[0])
        return buffer[0]

    return run


def device() -> Any:
    """The device that everything runs on."""
    return jax.devices()[0]


def memory() -> dict[str, int]:
    """The device's numbers about its memory. A CPU has none."""
    return device().memory_stats() or {}
