"""Times compiled programs, and describes the device."""

import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def elapsed(run: Callable[[], Any]) -> float:
    """Seconds until the result of `run` is computed."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def interleaved(
    runs: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each repeat of each run.

    The runs take turns, so that a slow spell of the machine hits all alike.

    Args:
        runs: functions to time, by name.
        repeats: number of timed repeats of each run.
        warm_up: number of repeats before these, in which programs may be compiled.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(warm_up + repeats):
        for name, run in runs.items():
            spent = elapsed(run)
            if i >= warm_up:
                seconds[name].append(spent)
    return seconds


def here() -> dict[str, str]:
    """This process's first device, the version of JAX and the date, as fields of a `Measured`."""
    device: Any = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return {
        "device": f"{device.platform}: {device.device_kind}{cores}",
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
