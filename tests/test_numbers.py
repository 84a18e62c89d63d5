"""Each number in README, docs/which.md and tables of docs/local.md is in a file of results.

`readme`, `which` and `local` write sentences and rows from files of results, as the pages have
them. Each is found in its page, and cut out. What is left then has no number but those of
`SETTINGS`. The first table of docs/which.md has the planner's answers: see tests/test_planner.py.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsparse.traffic import traced_bytes

ROOT = Path(__file__).parents[1]
LOCAL = ROOT / "benchmarks/results/local_updates"
RESULTS = ROOT / "benchmarks/results"
sys.path.append(str(ROOT / "benchmarks"))
frontier = importlib.import_module("frontier")
time_to_loss = importlib.import_module("time_to_loss")
recipes = importlib.import_module("recipes")
sys.path.remove(str(ROOT / "benchmarks"))

# What a page says with numbers that are no results, and the words around them.
SETTINGS = {
    "README.md": (
        "Status: 0.3,",
        "speaks S3.",
        "(8, and 64 simulated workers)",
        "(2 to 8), and on one H100, with JAX 0.10 to 0.12.",
        "http://localhost:8000",
        "Python 3.11 or newer",
        "with 8 emulated workers",
        "(seed 0;",
        "(`, H = 10)",
        "with 1 Gbit/s and less between them",
        "(November 2026)",
        "1 to 16 bits",
        "in 8 bits",
        "DeepSpeed's 1-bit and 0/1 Adam",
        "0/1 Adam skips",
        "in 1 bit",
        "Apache-2.0",
        "as measured on emulated links of 10 Mbit/s",
        "hosts with links of 10 Mbit/s",
        "for an assumed 0.1 s",
    ),
    "docs/which.md": (
        "in 16 bits now",
        "came to 1.4 nats on it",
        "1B parameters, 8 workers)",
        "Take 0.02 where",
        "as two steps: 8 steps dense, 12 with delay=1, where",
        "next step, 16 with 4 local steps at a time, and 24 with streaming",
        "from an H100's memory",
        "(bf16)",
        '"int2"',
        "EF21",
        "fewer than 1,024 elements",
        "batches, 8 simulated workers, and the best",
        "ranges of 3 seeds.",
        "(Adam, 600 steps)",
        "(300 steps)",
        "41 stands for 41 of every 4,096 elements, 1 %;",
        "| below 1, what waits",
        "| 0.01 | at 0.001 an entry",
        "4 bytes an entry instead of 8",
        "none for gradients, 0 for `, 0.95 for local steps",
        "do not let a schedule behind an exchange end at 0:",
    ),
    "docs/local.md": (
        "| 10 Mbit/s | 100 Mbit/s | 1 Gbit/s |",
        "| H = 10 | H = 30 | H = 100 |",
    ),
}


@functools.cache
def load(path: Path) -> Any:
    return json.loads(path.read_text())


# --- the files of results


class Local:
    """A method of results/local_updates, beside dense."""

    def __init__(self, file: str, method: str):
        methods = load(LOCAL / f"{file}.json")["methods"]
        found, dense = methods[method], methods["dense"]
        ends = [[seed["held_out"][-1] for seed in x["seeds"].values()] for x in (found, dense)]
        self.loss, self.above = np.mean(ends[0]), np.mean(ends[0]) - np.mean(ends[1])
        self.spread = np.std(ends[0], ddof=1)
        self.sent = dense["payload_bytes_a_step"] / found["payload_bytes_a_step"]
        self.received = dense["received_bytes_a_step"] / found["received_bytes_a_step"]


SYSTEMS = {  # of the runs of 10.9M parameters: what exchanges, and every how many steps
    "dense": ("dense", 1),
    "gradients, 4 bits": ("qsgd", 1),
    "updates, chunks": ("chunked_top_k", 1),
    "mean H=10": ("dense", 10),
    "DiLoCo H=10": ("dense", 10),
    "SparseLoCo H=10 12.5 %": ("chunked_top_k", 10),
}


@functools.cache
def gpt() -> dict[str, Any]:
    """Its runs with seconds, by rate of the links."""
    spec = importlib.util.spec_from_file_location(
        "results_of_local_updates", ROOT / "benchmarks/curves.py"
    )
    assert spec is not None
    assert spec.loader is not None
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    runs = results.load([LOCAL / "results_10.9m.json"])
    runs = {name: runs[name] for name in SYSTEMS}
    return results.over_measured(runs, SYSTEMS, LOCAL / "exchanges_10.9m.json", 0.1)


def seconds_to(goal: float, method: str, rate: str) -> float:
    """Mean over seeds of the seconds to a held-out loss."""
    curves = gpt()[rate][method].curves.values()
    return float(np.mean([c.seconds[np.flatnonzero(c.held_out <= goal)[0]] for c in curves]))


@functools.cache
def by_muon() -> tuple[Any, dict[str, float]]:
    """Ten steps of Muon by signs on the GPT: its run, and seconds to 1.4 nats by a link's rate."""
    found = time_to_loss.reached(
        argparse.Namespace(size="10.9m", until=1.4, steps=1500, eval_every=20)
    )
    name = "muon, local 10, sign"
    path = LOCAL / "exchanges_10.9m.json"
    timed = time_to_loss.over_measured(*found, path, 0.17)
    ends = lambda runs: np.mean([curve.seconds[-1] for curve in runs[name].curves.values()])
    return found[0][name], {rate: float(ends(runs)) for rate, runs in timed.items()}


def end(method: str) -> tuple[float, float]:
    """The loss at which a run ends, and the hours on links of 10 Mbit/s."""
    run = gpt()["10mbit"][method]
    return run.held_out[:, -1].mean(), next(iter(run.curves.values())).seconds[-1] / 3600


def mapped(recipe: str) -> float:
    """The loss at which a recipe of the map ends."""
    return float(np.mean([*load(recipes.RESULTS)["ends"][recipe][1].values()]))


SIGNS, ADAMW, MUON = "muon, local 10, sign", "adamw, gradients, dense", "muon, gradients, dense"


def ended(size: str, recipe: str, steps: int) -> float:
    """The loss on seed 0 at which a recipe ends with its tuned rate."""
    runs, one = frontier.Results(size), recipes.Recipe.parsed(recipe)
    rate = runs.tuned_rate(one, steps)
    assert rate is not None
    return runs.runs(one, steps)[rate, 0][-1]


def above(recipe: str, other: str) -> float:
    """Nats between two recipes of the map, on the seeds that both have."""
    ends = load(recipes.RESULTS)["ends"]
    (_, one), (_, two) = ends[recipe], ends[other]
    return float(np.mean([one[seed] - two[seed] for seed in one.keys() & two.keys()]))


def seconds_to_accuracy(method: str, goal: float) -> float:
    """Seconds of the small model on four hosts."""
    (run,) = [
        x
        for x in load(ROOT / "benchmarks/cluster/results.json")["training"]
        if (x["method"], x["hosts"], x["rate"]) == (method, 4, "100mbit")
    ]
    return next(x["seconds"] for x in run["points"] if x["accuracy"] >= goal)


class Trained:
    """A row of benchmarks/training.py, beside dense."""

    def __init__(self, task: str, row: str):
        rows = load(RESULTS / f"training_{task}.json")["rows"]
        found, dense = rows[row], rows["dense"]
        self.loss, self.spread = np.mean(found["losses"]), np.ptp(found["losses"])
        self.above = self.loss - np.mean(dense["losses"])
        self.right = 100 * np.mean(found["right"])  # of digits
        self.received = dense["received"] / found["received"]


def selecting() -> tuple[float, float]:
    """Times of selecting 0.1 % of 2^27 elements on one H100, as multiples of memory traffic."""
    gpu = load(RESULTS / "gpu.json")
    assert gpu["density"] == 0.001
    at = gpu["elements"].index(2**27)
    names = ("threshold_top_k", "fast_top_k", "sampled_top_k")
    times = [gpu["kernels"][name]["of_floor"][at] for name in names]
    return min(times), max(times)


# --- the pages, as they should be


def readme() -> Iterator[str]:
    """Sentences and rows of README."""
    small = lambda method: Local("results", method).loss
    yield f"A small transformer then ends at {small('updates, SparDL 1 %'):.2f} nats."
    yield (
        f"It ends at {small('gradients, SparDL 1 %'):.2f} with SparDL before Adam, at "
        f"{small('gradients, 4 bits'):.2f} with `qsgd(4)` before it, and at "
        f"{small('dense'):.2f} dense"
    )
    sparse, mean, dense = "SparseLoCo H=10 12.5 %", "mean H=10", "dense"
    seconds = lambda method: seconds_to(1.4, method, "10mbit")
    yield f"That model reaches 1.4 nats in {seconds(sparse) / 60:.1f} minutes"
    yield f"in {seconds(mean) / 60:.0f} minutes by a dense exchange of the same steps"
    yield f"in {seconds(dense) / 3600:.1f} hours by dense gradients"
    minutes = by_muon()[1]["10mbit"] / 60
    yield f"Ten local steps of Muon, exchanged as signs, reach it in {minutes:.1f} minutes"
    model = frontier.SIZES["136k"]
    dense_bytes, sign_bytes = (
        traced_bytes(recipes.EXCHANGES[x].transformation(), model.shapes, 8).received
        for x in ("dense", "sign")
    )
    yield (
        f"receive {10 * dense_bytes / sign_bytes:.0f} times fewer bytes than dense gradients for "
        "any number of workers."
    )
    signs, warm = "muon, local 10, sign", "muon, local 10, sign, warm 10 %"
    muon, adamw = (f"{x}, gradients, dense" for x in ("muon", "adamw"))
    yield (
        f"A transformer of {model.parameters:,} parameters then ends at {mapped(signs):.3f} nats. "
        f"Dense Muon ends at {mapped(muon):.3f}, so saving the bytes costs "
        f"{above(signs, muon):.3f}. Dense AdamW ends at {mapped(adamw):.3f}: Muon gains "
        f"{above(adamw, muon):.3f} by itself"
    )
    turns = recipes.Recipe.parsed(warm).exchanges(2000) / 2000
    yield (
        "If the first tenth of the run exchanges after each step, it receives "
        f"{dense_bytes / sign_bytes / turns:.0f} times fewer, and ends at {mapped(warm):.3f}: "
        f"{above(warm, muon):.3f} above dense Muon, {above(adamw, warm):.3f} below dense AdamW"
    )
    bits = 1 + 16 / 256  # of a sign, with a scale of 16 for each 256
    yield f"a factor of {32 / 16:.0f} to {32 / bits:.0f} |"

    found = Local("results_10.9m", sparse)
    settings, seeds = load(LOCAL / "results_10.9m.json")["settings"], gpt()["10mbit"][dense].curves
    assert settings["workers"] == 4
    yield (
        "A GPT of 10.9M parameters trained with four workers for "
        f"{settings['steps']:,} steps of AdamW, with {len(seeds)} seeds"
    )
    yield (
        f"a {found.sent:.0f}st of the bytes sent by dense gradients and a {found.received:.0f}th "
        f"of those received, and ended {found.above:.2f} nats above them"
    )
    (a, b), (c, d), (e, f), (g, h) = map(end, (sparse, mean, "gradients, 4 bits", dense))
    yield (
        f"hours on links of 10 Mbit/s. Ten local steps by SparseLoCo end at {a:.1f} nats after "
        f"{b:.1f} hours, the dense mean of ten steps at {c:.2f} after {d:.1f}, gradients in four "
        f"bits at {e:.2f} after {f:.1f}, dense gradients at {g:.2f} after {h:.0f}"
    )
    reached = lambda method: seconds_to_accuracy(method, 0.965)
    yield (
        "hosts with links of 100 Mbit/s (how), a small model reaches 96.5 % of test accuracy in "
        f"{reached('dense'):.0f} s dense, in {reached('spardl'):.1f} s by SparDL at 1 %, and in "
        f"{reached('chunked_top_k, every 10 steps'):.1f} s by 10 local steps, sent at 1 %."
    )
    names = ("dense", "local steps, 10, SparseLoCo", "SparDL, 1 %", "sketched 10x")
    runs = load(RESULTS / "quickstart.json")["methods"].values()
    for name, run in zip(names, runs, strict=True):
        yield (
            f"| {name} | {run['train_loss'][0]:.4f} | {100 * run['test_accuracy'][0]:.1f} % | "
            f"{run['received_bytes']:,.0f} | {run['compression']:.0f}x |"
        )
    low, high = selecting()
    yield (
        f"On one H100 selecting 0.1 % of 2^27 elements takes {low:.0f} to {high:.0f} times as long"
    )


def which() -> Iterator[str]:
    """Rows of docs/which.md."""
    # What the costs are worth
    signs, dense = "muon, local 10, sign", "{}, gradients, dense"
    muon, adamw = (above(signs, dense.format(x)) for x in ("muon", "adamw"))
    below = above(dense.format("adamw"), dense.format("muon"))
    yield (
        f"Ten local steps of Muon by signs end {muon:.3f} nats above dense Muon, which ends "
        f"{below:.3f} below dense AdamW. So they end {-adamw:.3f} below dense AdamW."
    )
    losses, shorter = recipes.load_ends(), recipes.load_ends(shorter=True)
    few = shorter.ends[ADAMW].above(losses.ends[ADAMW])[0]
    yield (
        f"dense AdamW that trains for {shorter.steps} steps in place of {losses.steps:,} "
        f"ends {few:.3f} nats higher, and Muon in its place ends {below:.3f} lower."
    )
    seeds = {len(end.losses) for end in losses.ends.values()}
    size = frontier.SIZES["136k"]
    yield (
        f"a transformer of {size.parameters:,} parameters, with "
        f"{size.workers} workers, in {losses.steps:,} steps, with {min(seeds)} to "
        f"{max(seeds)} seeds"
    )
    size, steps = frontier.SIZES["1m"], shorter.steps
    larger, smaller = (
        {x: ended(name, x, steps) for x in (SIGNS, ADAMW, MUON)} for name in ("1m", "136k")
    )
    yield f"A model of {size.parameters:,} parameters orders recipes nearly alike"
    yield f"in {steps} steps and with one seed"
    yield (
        "ten local steps of Muon by signs end "
        f"{larger[ADAMW] - larger[SIGNS]:.3f} nats below its dense AdamW and "
        f"{larger[SIGNS] - larger[MUON]:.3f} above its dense Muon. In as many steps the small "
        f"model's end {smaller[SIGNS] - smaller[ADAMW]:.3f} above and "
        f"{smaller[SIGNS] - smaller[MUON]:.3f} above."
    )
    rows = ("mean H=10", "SparseLoCo H=10 12.5 %", "gradients, 4 bits")
    mean, sparse, bits = (Local("results_10.9m", x).above for x in rows)
    settings, seeds = (
        load(LOCAL / "results_10.9m.json")["settings"],
        gpt()["10mbit"][rows[0]].curves,
    )
    yield (
        f"On a GPT of 10.9M parameters, AdamW, {settings['steps']:,} steps and {len(seeds)} seeds, "
        f"ten local steps cost {mean:.2f} nats by their mean, {sparse:.2f} by `sparse_loco()`, and "
        f"four bits of gradients {bits:.2f}, by `qsgd(4)`"
    )
    both = [
        (losses.above_dense(name)[0], shorter.above_dense(name)[0])
        for name in losses.ends
        if name in shorter.ends and "random" not in name
    ]
    times = [b / a for a, b in both if a > 0.01]
    assert len(times) > 20
    yield (
        f"After {shorter.steps} steps instead of {losses.steps:,}, each at its best rate, "
        "recipes that cost a hundredth and more cost "
        f"{min(times):.1f} to {max(times):.1f} times as much (blind draws do not)."
    )

    # Which optimizer?
    runs = {x["method"]: x for x in load(RESULTS / "quantized.json")["results"]}
    words = runs["dense"]["words"] / runs["int8, feedback"]["words"]
    yield f'`quantized("int8")` ({words:.0f} times fewer bytes)'

    # Side by side
    for name, (text, digits) in {
        "dense": ("dense", "dense"),
        "10 local steps, mean": ("10 local steps, mean",) * 2,
        "10 local steps, `sparse_loco(k=64)`": ("10 local steps, SparseLoCo",) * 2,
        "`qsgd(4)`": ("4 bits, before Adam", "4 bits"),
        "`top_k(0.01)`, two-bit values, behind Adam": ("top-k, behind Adam, 2-bit values", None),
        "`chunked_top_k(41)`, behind Adam": ("chunked top-k, behind Adam", "chunked top-k"),
        "`spardl(0.01)`, behind Adam": ("SparDL, behind Adam", "SparDL"),
        "`spardl(0.01)`, two-bit values, behind Adam": ("SparDL, behind Adam, 2-bit values", None),
        "`random_k(0.08, reducer=systems.Quantized(), decay=0)`, behind Adam": (
            *("random-k as top-k, 4 bits, not fed back, behind Adam", None),
        ),
        "`random_k(0.02, decay=0)`, behind Adam": (
            *("random-k, not fed back, behind Adam", "random-k, not fed back"),
        ),
        "`demo(41)`, signed": ("DeMo", "DeMo"),
        "`powersgd(4)`, behind Adam": ("PowerSGD rank 4, behind Adam", "PowerSGD rank 4"),
        "`powersgd(2)`, behind Adam": ("PowerSGD rank 2, behind Adam", "PowerSGD rank 2"),
        "`ef21_sgdm(SparDL(0.01))`": ("EF21-SGDM, before Adam", "EF21-SGDM"),
    }.items():
        row = Trained("text", text)
        word = "range " if name == "dense" else ""
        cells = f"{row.loss:.3f} ({word}{row.spread:.3f}) | {factor(row.received)} |"
        if digits is None:
            cells += " | |"
        else:
            row = Trained("digits", digits)
            cells += f" {row.right:.1f} % | {factor(row.received)} |"
        yield f"| {name} | {cells}"
    steps, bits = (
        Trained("text", x).above for x in ("10 local steps, mean", "4 bits, before Adam")
    )
    yield f"Ten local steps cost it {steps:.2f} nats, four bits of gradients {bits:.2f}."
    yield f"In another small model ten local steps cost {steps:.2f} nats."


def local() -> Iterator[str]:
    """Rows of docs/local.md."""
    for name, method in {
        "gradients, dense": "dense",
        "gradients, 4 bits (`qsgd(4)`)": "gradients, 4 bits",
        "updates behind Adam, `chunked_top_k()` (2 seeds)": "updates, chunks",
        "each 10 steps: what they moved, dense mean": "mean H=10",
        "the same, `diloco()`": "DiLoCo H=10",
        "the same, `sparse_loco(k=512)`": "SparseLoCo H=10 12.5 %",
        "the same, `sparse_loco(k=64)`": "SparseLoCo H=10",
    }.items():
        found, rates = Local("results_10.9m", method), ("10mbit", "100mbit", "1gbit")
        seconds = [seconds_to(1.4, method, x) for x in rates if method in SYSTEMS]
        cells = [f"{x:,.0f} s " for x in seconds] or ["", "", ""]
        yield (
            f"| {name} | {found.loss:.3f} ± {found.spread:.3f} | {found.sent:,.0f}x | "
            f"{'| '.join(cells)}|"
        )
    run, seconds = by_muon()
    gpt_dense = traced_bytes(
        recipes.EXCHANGES["dense"].transformation(), frontier.SIZES["10.9m"].shapes, 4
    )
    cells = [f"{seconds[rate]:,.0f} s " for rate in ("10mbit", "100mbit", "1gbit")]
    yield (
        '| each 10 steps of Muon, `quantized("sign")` | | '
        f"{gpt_dense.payload / run.payload:,.0f}x | {'| '.join(cells)}|"
    )
    yield f"(dense gradients: {Local('results', 'dense').loss:.3f})"
    for name, method in {
        "plain mean": "mean H={}",
        "`diloco(0.3)`, or 0.7 at H = 30": "DiLoCo H={}",
        "`sparse_loco(k=512)`": "SparseLoCo H={} 12.5 %",
        "`sparse_loco(k=123)`": "SparseLoCo H={} 3 %",
        "`sparse_loco(k=64)`": "SparseLoCo H={}",
    }.items():
        found = [Local("results", method.format(every)) for every in (10, 30, 100)]
        fewer = Local("results", "mean H=10").sent
        if "sparse" in name:
            words = " fewer bytes sent" if "512" in name else ""
            name += f", {found[0].sent / fewer:.0f} times{words}"
        yield f"| {name} | {' | '.join(f'{x.loss:.3f}' for x in found)} |"


def factor(times: float) -> str:
    return f"{times:.1f}x" if 1.05 < times < 9.95 else f"{times:.0f}x"


# --- the pages, as they are


def text_of(page: str) -> str:
    """A page in one line, without blocks of code and targets of links.

    Of docs/which.md, all but its first table, and of docs/local.md, tables of losses.
    """
    text = (ROOT / page).read_text()
    text = re.sub(r"^```.*?^```$|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    if page == "docs/which.md":
        assert tables[0].startswith("| dense exchange over step |")
        text = text.replace(tables[0], "")
    if page == "docs/local.md":
        text = "\n".join(table for table in tables if "held-out" in table)
    return " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).split())


@functools.cache
def results_of(page: str) -> list[str]:
    """What a page should say."""
    return [*{"README.md": readme, "docs/which.md": which, "docs/local.md": local}[page]()]


def check(page: str, text: str) -> None:
    """Raises AssertionError if a result is missing, or a number is neither result nor setting."""
    for result in results_of(page):
        assert result in text, f"{page} does not say: {result}"
        text = text.replace(result, " ... ", 1)
    text = re.sub("`[^`]*`", "`", text)
    for phrase in SETTINGS[page]:
        assert phrase in text, f"{page} does not say: {phrase}"
        text = text.replace(phrase, " ... ")
    left = re.findall(r".{0,40}\d.{0,40}", text)
    assert not left, f"no file of results has these numbers of {page}: {left}"


def test_the_table_of_kernels_has_the_numbers_of_its_file():
    gpu, text = load(RESULTS / "gpu.json"), (RESULTS / "gpu.md").read_text()
    table = re.findall(r"^\| (.+?) \| (\d*) ?\| (\S+ \(.*\)) \|$", text, re.MULTILINE)
    rows = {name.replace("`", ""): (target, cells) for name, target, cells in table}
    assert rows == {
        name: (
            str(kernel["target"] or ""),
            " | ".join(f"{ms:.3f} ({x:.1f})" for ms, x in zip(kernel["ms"], kernel["of_floor"])),
        )
        for name, kernel in gpu["kernels"].items()
    }
    low, high = selecting()
    encode = gpu["kernels"]["sketch.encode"]["of_floor"][gpu["elements"].index(2**27)]
    assert (
        f"selecting 0.1 % of 2^27 values takes {low} to {high} times as long as moving their "
        f"bytes, and encoding a\nsketch {encode:.0f} times"
    ) in text
    for setting in (gpu["device"], gpu["date"], f"jax {gpu['jax']}", gpu["command"]):
        assert setting in text
    assert f"selecting 0.1 % of 2^27 elements takes {low} to {high} times" in text_of(
        "docs/trainer.md"
    )


def test_costs_are_told_from_what_muon_gains():
    muon, adamw, signs = "muon, gradients, dense", "adamw, gradients, dense", "muon, local 10, sign"
    warm = f"{signs}, warm 10 %"
    dense = f"by AdamW and at {mapped(muon):.3f} by Muon."
    text = text_of("benchmarks/results/best_use_of_a_byte.md")
    for told in (
        f"Dense gradients end at {mapped(adamw):.3f} nats {dense}",
        f"{above(signs, muon):.3f} for those ten steps, {above(warm, muon):.3f} with the first",
        f"difference to AdamW: {above(signs, adamw):+.3f}, and {above(warm, adamw):+.3f}.",
        f"what Muon gains by itself, {above(adamw, muon):.3f}.",
    ):
        assert told in text
    local = (ROOT / "docs/local.md").read_text()
    assert f"Muon gains the {above(adamw, muon):.3f} between the two" in local


@pytest.mark.parametrize("page", SETTINGS)
def test_numbers_are_those_of_the_files_of_results(page):
    check(page, text_of(page))


@pytest.mark.parametrize("page", SETTINGS)
def test_an_altered_number_is_noticed(page):
    text = text_of(page)
    check(page, text)
    in_code = {i for m in re.finditer("`[^`]*`", text) for i in range(*m.span())}
    numbers = [m for m in re.finditer(r"\d[\d.,]*", text) if m.start() not in in_code]
    assert len(numbers) > 60
    for number in numbers:
        at = number.start()
        altered = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        with pytest.raises(AssertionError):
            check(page, altered)
