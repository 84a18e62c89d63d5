"""The file of results. It is complete after each row."""

import json
import os
from pathlib import Path
from typing import Any

_CELL = ("what", "system", "params", "density", "hosts", "rate")


class Records:
    """Rows and networks in a JSON file. A row replaces an earlier one of the same cell.

    Args:
        path: path of the file, which need not exist yet.

    Raises:
        ValueError: the file has no results of this benchmark.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.networks: list[dict[str, Any]] = []
        self.training: list[dict[str, Any]] = []
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text())
            self.rows, self.networks = content["rows"], content["networks"]
            self.training = content["training"]
            for row in self.rows:
                [row[name] for name in _CELL]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no file of this benchmark's results ({type(error).__name__}: {error}): "
                "name another one"
            ) from error

    def has(self, cell: dict[str, Any]) -> bool:
        """Whether there is a row of this cell, which is given by its fields, hosts and rate."""
        return any(all(row[name] == cell[name] for name in _CELL) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Adds one measured cell."""
        self.rows = _replaced(self.rows, row, _CELL)
        self._write()

    def add_network(self, network: dict[str, Any]) -> None:
        """Adds the measured links of a cluster."""
        self.networks = _replaced(self.networks, network, ("hosts", "rate"))
        self._write()

    def add_training(self, run: dict[str, Any]) -> None:
        """Adds one training run, from start to end."""
        self.training = _replaced(self.training, run, ("method", "hosts", "rate"))
        self._write()

    def _write(self) -> None:
        content = {"rows": self.rows, "networks": self.networks, "training": self.training}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, self.path)


def _replaced(
    rows: list[dict[str, Any]], new: dict[str, Any], names: tuple[str, ...]
) -> list[dict[str, Any]]:
    same = lambda row: all(row[name] == new[name] for name in names)
    return [row for row in rows if not same(row)] + [new]
