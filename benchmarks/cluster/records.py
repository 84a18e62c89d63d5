"""The file of results, which is complete after each row, and tables of it.

python benchmarks/cluster/records.py cluster.json
"""

import argparse
import collections
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_CELL = ("what", "system", "params", "density", "hosts", "rate")
# For each kind of record, what makes it another one.
_KINDS = {
    "networks": ("hosts", "rate"),
    "training": ("method", "hosts", "rate"),
    "rows": _CELL,
}


class Records:
    """Rows, networks and training runs in a JSON file, each of which replaces an earlier one.

    Args:
        path: path of the file, which need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self.kinds: dict[str, list[Row]] = {kind: [] for kind in _KINDS}
        if path.exists():
            self.kinds |= json.loads(path.read_text())

    def has(self, kind: str, wanted: Row) -> bool:
        """Whether there is a record with these fields."""
        return any(wanted.items() <= row.items() for row in self.kinds[kind])

    def add(self, kind: str, new: Row) -> None:
        """Adds a record."""
        same = lambda row: all(row[name] == new[name] for name in _KINDS[kind])
        self.kinds[kind] = [row for row in self.kinds[kind] if not same(row)] + [new]
        partial = self.path.with_suffix(".partial")
        partial.write_text(written(self.kinds))
        os.replace(partial, self.path)


def written(kinds: dict[str, list[Row]]) -> str:
    """Records as JSON, each in a line."""
    parts = (
        f' "{kind}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for kind, rows in kinds.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table(rows: Sequence[Row]) -> str:
    """Markdown: one table for each cell, fastest first."""
    cells: dict[tuple[Any, ...], list[Row]] = collections.defaultdict(list)
    for row in rows:
        where = (row[key] for key in ("what", "hosts", "rate", "params", "density"))
        cells[tuple(where)].append(row)
    lines: list[str] = []
    for (what, hosts, rate, params, density), found in sorted(cells.items()):
        lines += [
            f"**{what}, {hosts} hosts, {rate}, {params:,} elements, density {density:g}**\n",
            "| | ms | over dense | predicted ms | network | computing | measured / predicted | "
            "collectives (messages) | received kB | sent kB, counted | others |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        dense = next((row["seconds"] for row in found if row["system"] == "dense"), None)
        for row in sorted(found, key=lambda row: row["seconds"]):
            fields = (
                row["system"],
                _ms(row["seconds"]),
                "" if dense is None else f"{dense / row['seconds']:.2f}x",
                _ms(row["predicted_seconds"]),
                _ms(row["predicted_network_seconds"]),
                _ms(row["computing_seconds"]),
                f"{row['measured_over_predicted']:.2f}",
                f"{row['collectives']} ({row['messages']})",
                f"{row['received_bytes'] / 1e3:.0f}",
                f"{row['interface_sent_bytes'] / 1e3:.0f}",
                f"{row['others_cores']:.2f}",
            )
            lines.append(f"| {' | '.join(fields)} |")
        lines.append("")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def training_table(runs: Sequence[Row]) -> str:
    """Markdown: a table of the training runs."""
    head = "| trained | hosts | rate | steps | seconds | test accuracy | received kB a step |"
    lines = [head, "|---" * 7 + "|"]
    for run in runs:
        last = run["points"][-1]
        fields = (
            *(run["method"], f"{run['hosts']}", run["rate"], f"{last['step']}"),
            *(f"{last['seconds']:.1f}", f"{100 * last['accuracy']:.1f} %"),
            f"{run['received_bytes'] / 1e3:.0f}",
        )
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON that run.py wrote")
    kinds = Records(parser.parse_args().results).kinds
    print(training_table(kinds["training"]), table(kinds["rows"]), sep="\n")


if __name__ == "__main__":
    main()
