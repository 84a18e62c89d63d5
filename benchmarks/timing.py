"""Shared by benchmarks: flags, tables, interleaved runs, sizes such as 2^20, and where they ran."""

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.planner.measuring import interleaved as interleaved


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a script's docstring, as it stands."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def row(*cells: object) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> str:
    """The first two rows."""
    return f"{row(*cells)}\n{'|---' * len(cells)}|"


def size_of(text: str) -> int:
    """The int that 2^20 or 1048576 stands for."""
    base, _, exponent = text.partition("^")
    return int(base) ** int(exponent or 1)


def doubled(x: jax.Array) -> Callable[[], jax.Array]:
    """A function that doubles a vector like `x` in its own buffer: 8 bytes of traffic a float."""
    double, buffer = jax.jit(lambda x: x * 2, donate_argnums=0), [jnp.zeros_like(x)]

    def run() -> jax.Array:
        buffer[0] = double(buffer[0])
        return buffer[0]

    return run


def peak(program: Any) -> int:
    """Bytes of a compiled program's arguments, outputs and temporaries together."""
    memory = program.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


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


def lines_in(path: Path) -> list[dict[str, Any]]:
    """Runs that a file has, each a line of JSON."""
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def add_line(path: Path, **fields: Any) -> None:
    """Appends a run."""
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def save(content: dict[str, Any], path: Any) -> None:
    """Writes JSON if there is a path: items of the lists and dicts in it have a line each."""

    def text(x: Any) -> str:
        if isinstance(x, list) and x:
            return "[\n " + ",\n ".join(json.dumps(item, default=str) for item in x) + "\n]"
        if isinstance(x, dict) and x:
            items = (f"{json.dumps(key)}: {json.dumps(y, default=str)}" for key, y in x.items())
            return "{\n " + ",\n ".join(items) + "\n}"
        return json.dumps(x, default=str)

    if path:
        parts = (f"{json.dumps(key)}: {text(x)}" for key, x in content.items())
        with open(path, "w") as file:
            file.write("{" + ",\n".join(parts) + "}\n")
