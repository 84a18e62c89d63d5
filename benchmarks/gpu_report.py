"""Tables of the results of gpu.py, for a terminal and as Markdown."""

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import rich.console
import rich.markup
import rich.table

Record = dict[str, Any]


class Table(NamedTuple):
    """Rows under a title, and notes below them."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    notes: list[str]

    def show(self) -> None:
        """Prints the table to the terminal."""
        console = rich.console.Console(highlight=False)
        if self.rows:
            table = rich.table.Table(title=self.title, title_justify="left")
            for i, header in enumerate(self.headers):
                table.add_column(header, justify="right" if i else "left", overflow="fold")
            for row in self.rows:
                table.add_row(*map(rich.markup.escape, row))
            console.print(table)
        for note in self.notes:
            console.print(note, markup=False)

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"### {self.title}", ""]
        if self.rows:
            lines += [_line(self.headers), "|---|" + "---:|" * (len(self.headers) - 1)]
            lines += [*map(_line, self.rows), ""]
        return "\n".join(lines + [f"- {note}" for note in self.notes]).rstrip() + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _notes(records: list[Record]) -> list[str]:
    notes = [r["note"] for r in records if "note" in r]
    if skipped := [r["skipped"] for r in records if "skipped" in r]:
        notes.append(f"skipped for lack of time: {'; '.join(skipped)}")
    return notes + [f"failed: {r['failed']}: {r['why']}" for r in records if "why" in r]


def _named(records: list[Record]) -> list[Record]:
    return [r for r in records if "name" in r]


def of_tests(records: list[Record]) -> Table:
    """Counts of the suites, and the names of failures."""
    rows, notes = [], _notes(records)
    for r in _named(records):
        finished = "yes" if r["complete"] else "no, stopped"
        rows.append(
            [r["name"], str(r["passed"]), str(r["failed"]), finished, f"{r['seconds']:.0f}"]
        )
        notes += [f"failed: {test}" for test in r["failures"]]
        if r["complete"] and r["returncode"] not in (0, 1):
            notes.append(f"{r['name']}: pytest ended with {r['returncode']}: {r['tail'][-1:]}")
    return Table("Correctness", ["suite", "passed", "failed", "ran to its end", "s"], rows, notes)


def of_repeats(records: list[Record]) -> Table:
    """Counts of runs and elements of each decode that differ."""
    rows = []
    for r in _named(records):
        unlike = f"{r['runs']} of {r['times'] - 1}" if r["runs"] else "none"
        rows.append([r["name"], unlike, str(r["most"]), str(r["between_replicas"])])
    headers = ["decode", "runs unlike the first", "elements at most", "unlike between replicas"]
    return Table("Replicas stay bitwise equal", headers, rows, _notes(records))


def of_kernels(records: list[Record]) -> list[Table]:
    """A full table at 2^27 or the size next to it, and a short one of all sizes."""
    found = _named(records)
    sizes = sorted({r["size"] for r in found})
    if not sizes:
        return [Table("Kernels", [], [], _notes(records))]
    main = max((s for s in sizes if s <= 27), default=sizes[0])
    rows = []
    for r in (r for r in found if r["size"] == main):
        target, over = r["target"], r["over_floor"]
        verdict = "" if target is None else "over" if over > target else "met"
        wanted = "" if target is None else f"{target:g}"
        cells = [f"{r['ms']:.3f}", f"{over:.2f}", f"{r['over_donated']:.2f}", wanted, verdict]
        rows.append([r["name"], *cells])
    copies = {s: [r["bandwidth"] for r in found if r["size"] == s] for s in sizes}
    notes = [
        "the floor: the bytes that have to move, at the bandwidth of a donated x * 2 of that size, "
        f"here {min(copies[main]) / 1e9:.4g} to {max(copies[main]) / 1e9:.4g} GB/s read and written"
    ]
    headers = ["kernel", "ms", "of the floor", "of x * 2", "target", ""]
    full = Table(f"Kernels at 2^{main} float32", headers, rows, notes)

    short_cells = {(r["name"], r["size"]): f"{r['ms']:.3f} ({r['over_floor']:.1f})" for r in found}
    names = list(dict.fromkeys(r["name"] for r in found))
    rows = [[name, *(short_cells.get((name, s), "") for s in sizes)] for name in names]
    doubled = [f"{8e3 * 2**s / statistics.median(copies[s]):.3f}" for s in sizes]
    rows.insert(0, ["x * 2, donated", *doubled])
    notes = [f"2^{sizes[0]} is what a call takes at least", *_notes(records)]
    short = Table("Kernels: ms (of the floor)", ["kernel", *(f"2^{s}" for s in sizes)], rows, notes)
    return [full, short]


def of_forms(records: list[Record], kernels: list[Record]) -> Table:
    """Times of the forms for the other kind of device, beside those of this device's forms."""
    own = {(r["name"], r["size"]): r["ms"] for r in _named(kernels)}
    rows = []
    for r in _named(records):
        ms = own.get((r["name"], r["size"]))
        usual = [f"{ms:.3f}", f"{r['ms'] / ms:.1f}"] if ms else ["", ""]
        rows.append([r["name"], f"2^{r['size']}", f"{r['ms']:.3f}", *usual])
    headers = ["kernel", "size", "ms", "ms of this device's form", "ratio"]
    return Table("Forms that other devices get", headers, rows, _notes(records))


def of_steps(records: list[Record]) -> Table:
    """Times and memory of updates."""
    found = _named(records)
    gib = lambda count: "" if count is None else f"{count / 2**30:.3f}"
    rows = [
        [r["name"], f"{r['ms']:.2f}", gib(r["planned_bytes"]), gib(r["peak_bytes"] or None)]
        for r in found
    ]
    title = "Updates"
    if found:
        title += f" of {found[0]['params']} parameters, {found[0]['workers']} simulated workers"
    headers = ["method", "ms", "GiB as compiled", "GiB at the peak, if the highest so far"]
    return Table(title, headers, rows, _notes(records))


def of_trace(records: list[Record]) -> Table:
    """The folders of traces."""
    rows = [[r["name"], r["folder"]] for r in _named(records)]
    return Table("Traces", ["kernel", "folder"], rows, _notes(records))
