"""Tables, figures and statements from the results of `run.py`.

    python benchmarks/cluster/summary.py cluster.json
    python benchmarks/cluster/summary.py cluster.json --markdown table.md --figures figures

Nothing is measured here.
"""

import argparse
import collections
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cells import is_fixed
from namespaces import Rate
from records import Records

Row = dict[str, Any]
Key = tuple[str, int, str, int, float]  # what, hosts, rate, params, density

# A factor. Times that differ by less say nothing about an order.
_TELLING = 1.1
_SHOWN = (
    *("dense", "sketched_sgd", "spardl", "spardl_packed", "ok_topk", "sparcml", "gtopk", "top_k"),
    *("qsgd", "sign_sgd"),
)
# Systems that pick the largest entries of a worker, or nearly so.
_ENTRIES = ("spardl", "ok_topk", "top_k", "gtopk", "dgc", "ms_topk", "dragonn", "sparcml")


class Published(NamedTuple):
    """The authors' MPI code on links shaped alike, two cores for all ranks, 4,000,000 floats, 1 %.

    Seconds are medians of another run, on another day, so a ratio near 1 decides nothing.
    """

    hosts: int
    rate: str
    system: str  # our system of the same name
    seconds: float  # selection included
    sent: float  # bytes a rank sends


PEERS = (
    Published(8, "100mbit", "dense", 2.415, 28.5e6),
    Published(8, "100mbit", "ok_topk", 0.224, 724e3),
    Published(8, "100mbit", "spardl", 0.353, 571e3),
    Published(8, "100mbit", "top_k", 0.733, 2286e3),
    Published(4, "100mbit", "ok_topk", 0.141, 607e3),
    Published(4, "100mbit", "spardl", 0.215, 488e3),
    Published(4, "1gbit", "ok_topk", 0.081, 599e3),
    Published(4, "1gbit", "spardl", 0.147, 483e3),
)


class Claim(NamedTuple):
    """A statement about the results."""

    text: str
    holds: bool | None  # None: not measured
    numbers: str

    def __str__(self) -> str:
        verdict = {True: "yes", False: "NO", None: "not measured"}[self.holds]
        return f"| {self.text} | {verdict} | {self.numbers} |"


def cells(rows: Iterable[Row]) -> dict[Key, dict[str, Row]]:
    """Rows of each cell by system. Rows that ignore the density are in the cells of all."""
    found: dict[Key, dict[str, Row]] = collections.defaultdict(dict)
    densities: dict[tuple[Any, ...], set[float]] = collections.defaultdict(set)
    for row in rows:
        where = row["what"], row["hosts"], row["rate"], row["params"]
        densities[where].add(row["density"])
        found[*where, row["density"]][row["system"]] = row
    for where, several in densities.items():
        common: dict[str, Row] = {}
        for density in several:
            common |= {
                name: row for name, row in found[*where, density].items() if is_fixed(row["system"])
            }
        for density in several:
            found[*where, density] = common | found[*where, density]
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1], _speed(item[0][2]),
                                                        item[0][3:])))  # fmt: skip


def _speed(rate: str) -> float:
    return Rate(rate).bits or float("inf")


def ranked(found: dict[Key, dict[str, Row]], pairs_of: str = "all") -> tuple[int, int]:
    """Numbers of pairs of systems: those that the model orders as measured, and all pairs.

    Args:
        found: rows by cell.
        pairs_of: "all": all systems of a cell. "dense": dense with each other system.

    Returns:
        Both counts, without pairs whose times differ by less than a tenth.
    """
    right = total = 0
    seen = set()  # a row that stands in several cells counts once
    for systems in found.values():
        for a, b in itertools.combinations(systems.values(), 2):
            if (id(a), id(b)) in seen:
                continue
            seen |= {(id(a), id(b)), (id(b), id(a))}
            if pairs_of == "dense" and "dense" not in (a["system"], b["system"]):
                continue
            low, high = sorted((a["seconds"], b["seconds"]))
            if high < _TELLING * low:
                continue
            total += 1
            faster = a["seconds"] < b["seconds"]
            right += faster == (a["predicted_seconds"] < b["predicted_seconds"])
    return right, total


def table(rows: Iterable[Row]) -> str:
    """Markdown: one table for each cell, fastest first."""
    lines: list[str] = []
    for (what, hosts, rate, params, density), systems in cells(rows).items():
        lines += [
            f"**{what}, {hosts} hosts, {rate}, {params:,} parameters, density {density:g}**\n",
            "| | ms | over dense | predicted ms | network | computing | measured / predicted | "
            "collectives (messages) | received kB | interface kB | others |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        dense = systems.get("dense")
        for name, row in sorted(systems.items(), key=lambda item: item[1]["seconds"]):
            gain = "" if dense is None else _gain(dense["seconds"] / row["seconds"])
            fields = (
                name,
                _ms(row["seconds"]),
                gain,
                _ms(row["predicted_seconds"]),
                _ms(row["predicted_network_seconds"]),
                _ms(row["computing_seconds"]),
                f"{row['measured_over_predicted']:.2f}",
                f"{row['collectives']} ({row['messages']})",
                f"{row['received_bytes'] / 1e3:.0f}",
                f"{row['interface_received_bytes'] / 1e3:.0f}",
                f"{row['others_cores']:.2f}",
            )
            lines.append(f"| {' | '.join(fields)} |")
        lines.append("")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _gain(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 1 else f"{ratio:.2f}x, slower"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The statements that the emulated cluster is to show."""
    found = cells(rows)
    return [*_against_dense(found), *_against_model(found), *_bytes(found), *_against_peers(found)]


def _against_dense(found: dict[Key, dict[str, Row]]) -> list[Claim]:
    key = ("exchange", 8, "100mbit", 16_000_000, 0.01)
    systems = found.get(key, {})
    where = "8 hosts, 100 Mbit/s, 16M parameters, 1 %"
    result = []
    families = {"SparDL": "spardl", "top-k all-gather": "top_k", "Sketched-SGD": "sketched_sgd"}
    for title, family in families.items():
        gains = {
            name: systems["dense"]["seconds"] / row["seconds"]
            for name, row in systems.items()
            if "dense" in systems and _family(name) == family
        }
        numbers = ", ".join(f"{name} {gain:.1f}x" for name, gain in gains.items())
        best = max(gains, key=gains.__getitem__, default=None)
        by = "" if best is None else f" ({best})"
        text = f"{where}: {title}{by} at least 10 times faster than dense"
        result.append(Claim(text, None if best is None else gains[best] >= 10, numbers))
    sparse = {name: row for name, row in systems.items() if _family(name) in _ENTRIES}
    if sparse:
        fastest = {
            kind: min(sparse, key=lambda name: sparse[name][kind])
            for kind in ("seconds", "predicted_seconds")
        }
        chosen = sparse[fastest["predicted_seconds"]]["seconds"]
        holds = chosen < _TELLING * sparse[fastest["seconds"]]["seconds"]
        numbers = f"fastest {fastest['seconds']}, by the model {fastest['predicted_seconds']}"
    else:
        holds, numbers = None, ""
    text = f"{where}: the model's fastest that picks large entries is that, or within a tenth of it"
    result.append(Claim(text, holds, numbers))
    return result


def _family(system: str) -> str:
    return system.partition(":")[0].removesuffix("_packed")


def _against_model(found: dict[Key, dict[str, Row]]) -> list[Claim]:
    result = []
    for hosts, rate in sorted({(k[1], k[2]) for k in found}, key=lambda each: _speed(each[1])):
        here = {k: v for k, v in found.items() if (k[1], k[2]) == (hosts, rate)}
        rows = list(
            {id(row): row for systems in here.values() for row in systems.values()}.values()
        )
        worst = max(rows, key=lambda row: row["measured_over_predicted"])
        over = sum(row["measured_over_predicted"] > 1.5 for row in rows)
        numbers = (
            f"{over} of {len(rows)} above; largest {worst['measured_over_predicted']:.2f} "
            f"({worst['what']} of {worst['system']}, {worst['params']:,}, {worst['density']:g}), "
            f"smallest {min(row['measured_over_predicted'] for row in rows):.2f}"
        )
        where = f"{hosts} hosts, {rate}"
        result.append(Claim(f"{where}: no time above 1.5 times the model's", not over, numbers))
    for pairs_of, text in (("all", "pairs of systems"), ("dense", "dense against another")):
        right, total = ranked(found, pairs_of)
        share = f"{right} of {total}, {100 * right / max(1, total):.1f} %"
        holds = right >= 0.9 * total if total else None
        result.append(Claim(f"at least 90 % ranked as predicted: {text}", holds, share))
    slower = {
        id(row): row["predicted_seconds"] > systems["dense"]["predicted_seconds"]
        for systems in found.values()
        if "dense" in systems
        for row in systems.values()
        if row["seconds"] > _TELLING * systems["dense"]["seconds"]
    }
    if slower:
        foreseen = sum(slower.values())
        numbers = f"{foreseen} of {len(slower)} such cases"
        holds = foreseen >= 0.9 * len(slower)
        result.append(
            Claim("where a system is slower than dense, the model said so", holds, numbers)
        )
    return result


def _bytes(found: dict[Key, dict[str, Row]]) -> list[Claim]:
    result = []
    for system in ("sketched_sgd", "top_k"):
        received: dict[tuple[int, float], dict[int, Row]] = {}
        for (what, hosts, rate, params, density), systems in found.items():
            if what == "exchange" and rate == "none" and system in systems:
                received.setdefault((params, density), {})[hosts] = systems[system]
        pairs = [by_hosts for by_hosts in received.values() if {4, 8} <= by_hosts.keys()]
        text = f"{system}: bytes from 4 to 8 hosts grow as said, counted at interfaces within 5 %"
        if not pairs:
            result.append(Claim(text, None, ""))
            continue
        by_hosts = pairs[0]
        off = [
            by_hosts[hosts]["interface_received_bytes"] / by_hosts[hosts]["received_bytes"] - 1
            for hosts in (4, 8)
        ]
        growth = by_hosts[8]["interface_received_bytes"] / by_hosts[4]["interface_received_bytes"]
        # A ring all-reduce passes 2 (W - 1) / W of its operand to each, an all-gather W - 1.
        said = 7 / 6 if system == "sketched_sgd" else 7 / 3
        numbers = (
            f"{growth:.3f} times, by the formula {said:.3f}; above wire_bytes by "
            f"{100 * off[0]:.1f} % (4), {100 * off[1]:.1f} % (8)"
        )
        holds = abs(growth / said - 1) < 0.05 and max(map(abs, off)) < 0.05
        result.append(Claim(text, holds, numbers))
    return result


def _against_peers(found: dict[Key, dict[str, Row]]) -> list[Claim]:
    result = []
    for hosts, rate in dict.fromkeys((peer.hosts, peer.rate) for peer in PEERS):
        systems = found.get(("exchange", hosts, rate, 4_000_000, 0.01), {})
        theirs = [peer for peer in PEERS if (peer.hosts, peer.rate) == (hosts, rate)]
        where = f"{hosts} hosts, {rate}, 4M floats, 1 %"

        def add(text: str, row: Row | None, key: str, most: float, other: str) -> None:
            holds = None if row is None else row[key] <= most
            numbers = "" if row is None else f"{_ms(row['seconds'])} ms, {_sent(row)}; "
            result.append(Claim(f"{where}: {text}", holds, numbers + other))  # noqa: B023

        packed = systems.get("spardl_packed")
        best = min(theirs, key=lambda peer: peer.seconds)
        other = f"the fastest of it, {best.system}: {_ms(best.seconds)} ms"
        add("spardl_packed faster than research code", packed, "seconds", best.seconds, other)
        if hosts == 8:
            add("spardl_packed sends at most 300 kB", packed, "interface_sent_bytes", 300e3, "")
        for peer in theirs:
            if peer.system in ("ok_topk", "top_k"):
                other = f"theirs {_ms(peer.seconds)} ms, {peer.sent / 1e3:.0f} kB"
                text = f"{peer.system} no slower than its research code"
                add(text, systems.get(peer.system), "seconds", peer.seconds, other)
                for name, row in systems.items():  # 4-byte entries, or less room in messages
                    if name != peer.system and _family(name) == peer.system:
                        text = f"{name} no slower than research code of {peer.system}"
                        add(text, row, "seconds", peer.seconds, other)
    return result


def _sent(row: Row) -> str:
    return f"{row['interface_sent_bytes'] / 1e3:.0f} kB"


def draw(rows: Sequence[Row], shown: Sequence[str], by: str, path: Path) -> bool:
    """A panel for each size and density: time against bandwidth, or against hosts.

    Args:
        rows: rows of all cells.
        shown: systems to draw.
        by: "rate", at the number of hosts that has the most rates, or "hosts", at the rate that has
            the most numbers of hosts.
        path: path of the PNG.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure

    index, other = (2, 1) if by == "rate" else (1, 2)
    found = {key: systems for key, systems in cells(rows).items() if key[0] == "exchange"}
    several: dict[Any, set[Any]] = collections.defaultdict(set)
    for key in found:
        several[key[other]].add(key[index])
    if not several or max(map(len, several.values())) < 2:
        return False
    fixed = max(several, key=lambda value: len(several[value]))
    found = {key: systems for key, systems in found.items() if key[other] == fixed}
    values: set[Any] = {key[index] for key in found}
    order = sorted(values, key=_speed if by == "rate" else int)
    panels = sorted(
        panel for panel in {key[3:] for key in found} if sum(key[3:] == panel for key in found) > 1
    )
    figure = Figure(figsize=(4 * len(panels) + 1.5, 4), dpi=90, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for i, name in enumerate(shown):
            points = [
                (order.index(key[index]), systems[name])
                for key, systems in found.items()
                if key[3:] == panel and name in systems
            ]
            if not points:
                continue
            x, at = zip(*sorted(points, key=lambda point: point[0]))
            color = f"C{i % 10}"
            axes.plot(x, [row["seconds"] for row in at], "o-", color=color, label=name, ms=4)
            axes.plot(x, [row["predicted_seconds"] for row in at], ":", color=color)
        axes.set(yscale="log", xticks=range(len(order)), xticklabels=order)
        axes.set_xlabel("rate of each link" if by == "rate" else "hosts")
        axes.set_title(f"{panel[0]:,} parameters, density {panel[1]:g}", fontsize=9)
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("seconds of one exchange (dotted: predicted)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.suptitle(f"{fixed} hosts" if by == "rate" else f"links of {fixed}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def draw_training(runs: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draws accuracy against seconds of training, if there are runs. Returns whether it did."""
    from matplotlib.figure import Figure

    if not runs:
        return False
    figure = Figure(figsize=(6, 3.5), dpi=90, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        points = run["points"]
        axes.plot(
            [point["seconds"] for point in points],
            [100 * point["accuracy"] for point in points],
            "o-",
            ms=3,
            label=f"{run['method']}, {run['hosts']} hosts, {run['rate']}",
        )
    axes.set(xscale="log", xlabel="seconds of training", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def training_table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a table of the training runs."""
    if not runs:
        return ""
    lines = ["| trained | hosts | rate | steps | seconds | test accuracy | received kB a step |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for run in runs:
        last = run["points"][-1]
        fields = (
            run["method"],
            str(run["hosts"]),
            run["rate"],
            str(last["step"]),
            f"{last['seconds']:.1f}",
            f"{100 * last['accuracy']:.1f} %",
            f"{run['received_bytes'] / 1e3:.0f}",
        )
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines) + "\n"


def sparcml_times(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows of SparCML's algorithms, as `benchmarks/sparcml_order.py --measured` reads them."""
    return [
        {
            "algorithm": name.removeprefix("sparcml:"),
            "workers": key[1],
            "size": key[3],
            "density": key[4],
            "seconds": row["seconds"],
        }
        for key, systems in cells(rows).items()
        if any(name.startswith("sparcml:") for name in systems)
        for name, row in systems.items()
        if name == "dense" or name.startswith("sparcml:")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("results", type=Path, help="JSON that run.py wrote")
    add("--markdown", type=Path, help="file for what is printed otherwise")
    add("--figures", type=Path, help="folder for cluster_rate.png, cluster_hosts.png and "
        "cluster_training.png")  # fmt: skip
    add("--systems", nargs="+", default=list(_SHOWN), help="in figures")
    add(
        "--sparcml",
        type=Path,
        metavar="JSON",
        help="file of what sparcml_order.py --measured reads",
    )
    args = parser.parse_args(argv)
    if not args.results.exists():
        parser.error(f"{args.results} does not exist: measure with run.py --json {args.results}")
    try:
        records = Records(args.results)
    except ValueError as error:
        parser.error(str(error))
    head = "| | holds | |\n|---|---|---|\n"
    told = "\n".join(map(str, claims(records.rows)))
    text = f"{head}{told}\n\n{training_table(records.training)}\n{table(records.rows)}"
    if args.markdown:
        args.markdown.write_text(text)
    else:
        print(text)
    if args.sparcml:
        args.sparcml.write_text(json.dumps(sparcml_times(records.rows), indent=1) + "\n")
    if args.figures:
        for by in ("rate", "hosts"):
            draw(records.rows, args.systems, by, args.figures / f"cluster_{by}.png")
        draw_training(records.training, args.figures / "cluster_training.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
