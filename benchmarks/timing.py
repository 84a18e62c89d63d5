"""Shared by benchmarks: interleaved runs, sizes such as 2^20, and where they ran."""

import datetime
import json
from typing import Any

import jax

from jaxsparse.planner.measuring import interleaved as interleaved


def size_of(text: str) -> int:
    """The int that 2^20 or 1048576 stands for."""
    base, _, exponent = text.partition("^")
    return int(base) ** int(exponent or 1)


def where() -> dict[str, str]:
    """Versions, device and date. It prints them, too."""
    device: Any = jax.devices()[0]
    found = {
        "jax": jax.__version__,
        "backend": device.platform,
        "device_kind": device.device_kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def save(content: dict[str, Any], path: str | None) -> None:
    """Writes JSON if there is a path."""
    if path:
        with open(path, "w") as file:
            json.dump(content, file, indent=1)
