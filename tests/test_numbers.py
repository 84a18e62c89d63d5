"""README, docs/which.md and docs/papers.md have the numbers of committed results, and of commands.

An entry has words of a page, the format of numbers that follow them there in this order, within a
few lines, and what files say. docs/papers.md also quotes pages of results (`numbers`) and what
SparCML's model says of measured times (`order`).
"""

# ruff: noqa: E501 - a line is an entry
import argparse
import contextlib
import functools
import importlib
import io
import itertools
import json
import re
import sys

import numpy as np
import pytest
from running import ROOT, python

from jaxsparse.traffic import traced_bytes

# fmt: off
load = functools.cache(lambda name: json.loads((ROOT / f"benchmarks/{name}.json").read_text()))
ROWS = {task: load(f"results/training_{task}")["rows"] for task in ("text", "digits")}
loss = lambda name, task="text": np.mean(ROWS[task][name]["losses"])
two, three = ((lambda *values, form=form: [format(x, form) for x in values]) for form in (".2f", ".3f"))
cost, behind = lambda *names: [loss(x) - loss("dense") for x in names], lambda *names: [loss(f"{x}, behind Adam") for x in names]
SENT = {x["method"]: x["words"] for x in load("results/quantized")["results"]}
RANDOM, TEN = "random-k, not fed back", "10 local steps, mean"


def benchmarks(*names):
    """Programs, as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
        return [*map(importlib.import_module, names)]


def numbers(page, words, after=""):
    """Numbers behind words of a page of results, on their line and the next two."""
    text = (ROOT / f"benchmarks/results/{page}.md").read_text()
    text = text[text.index(after) :]
    lines = text[text.index(words) + len(words) :].split("\n")[:3]
    return [float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(lines))]


@functools.cache
def order():
    """SparCML's words over dense's by the model, and what its command prints of measured times."""
    (module,) = benchmarks("sparcml_order")
    flags, printed = argparse.Namespace(measured=ROOT / "benchmarks/cluster/sparcml.json"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.compare(module.Link(4e-4, 11.95e6), flags)
    by = {W: module.library(2**17, 2**24, W) for W in (8, 32, 128)}
    shares = [100 * x["recursive_double"].words / x["dense"].words for x in by.values()]
    return shares, re.search(r"model: (\d+) of (\d+)", printed.getvalue()).groups()


def probability(balls, bins, low, high):
    """That a share of the bins between these stays empty (Lemma A.10)."""
    law, full = np.eye(bins + 1)[0], np.arange(bins + 1) / bins  # by the number of full bins
    for _ in range(balls):
        law = law * full + np.roll(law * (1 - full), 1)
    return law[(1 - full >= low) & (1 - full <= high)].sum()


@functools.cache
def papers():
    nets = {}
    runs = load("results/sketched_training")["runs"]
    for run in (x for x in runs if (x["width"], x["windows"]) == (168, 8)):
        nets.setdefault((run["row"], run["steps"]), {}).setdefault(run["rate"], []).append(run["held_out"])
    words = lambda x, n=1200: min(np.mean(y) for y in nets[x, n].values() if len(y) == 3)
    long = lambda x: words(x, 9600)
    once = lambda x: min(*map(np.mean, nets[x, 60_000].values()), np.inf)
    SHAPE = "sketched, k=d/900", "dense", "true top-k, k=d/900", "random-k, words of k=d/900, decay 0"
    grid = {x["name"]: x for x in load("results/sketch_sizing")["results"] if (x["hidden"], x["ratio"]) == (128, 10)}
    sized = lambda *names, of=grid: [100 * of[x][key] for x in names for key in ("right", "deviation")]
    later = {x["name"]: x for x in load("results/sketch_sizing_long")["results"]}
    hosts = {(x["system"], x["params"], x["density"]): 1e3 * x["seconds"]
             for file in ("results", "sparcml") for x in load(f"cluster/{file}")["rows"]
             if (x["what"], x["hosts"], x["rate"]) == ("exchange", 8, "100mbit")}
    host = lambda *names: [hosts[name, 16_000_000, 0.01] for name in names]
    big = lambda *names: [hosts[name, 24_000_000, 0.03125] for name in names]
    rest = {(x["what"], x["system"], x["density"]): x for x in load("cluster/results")["rows"]
            if (x["params"], x["hosts"], x["rate"]) == (16_000_000, 8, "100mbit")}
    step = lambda share, *names, key="seconds", what="step": [1e3 * rest[what, x, share][key] for x in names]
    wait = functools.partial(step, key="predicted_network_seconds")
    OTHERS = "spardl", "top_k", "ok_topk", "gtopk"
    cml = lambda name, share=0.1: hosts["dense", 10**6, 0.1] / hosts[name, 10**6, share]
    ms = {x: y["ms"][3] for x, y in load("results/gpu")["kernels"].items()}  # at 2^27
    tables = {x["name"].removeprefix("table in "): x for x in load("results/sketch_dtypes")["results"]}
    narrow = [100 * tables[x][key] for x in ("float32", "bfloat16", "float16") for key in ("right", "deviation")]
    held = {(x["sum"], x["share"], x["workers"]): x for x in load("results/rooms")["rows"]}
    room = lambda name: [held[name, share, 8][x] for x in ("paid", "needed") for share in (0.01, 0.1)]
    SKETCHED = "sketched_sgd(10)", "random-k, k=2345", "true top-k, k=586", "dense"
    DSAR, PACKED, RD, AG = "sparcml:dsar_split_allgather", "ok_topk_packed", "sparcml:recursive_double", "sparcml:all_gather"
    ends = load("results/recipes")["ends"]
    mapped = lambda name: np.mean([*ends[f"adamw, {name}"][1].values()])
    fewer = {(x["system"], x["density"]): x["seconds"] for x in load("cluster/results")["rows"]
             if (x["what"], x["params"], x["hosts"], x["rate"]) == ("step", 16_000_000, 4, "100mbit")}
    lead = lambda share: (fewer["dgc", share] / fewer["dragonn", share], np.divide(*step(share, "dgc", "dragonn")))
    gigabit = {x["system"]: 1e3 * x["seconds"] for x in load("cluster/results")["rows"]
               if (x["what"], x["params"], x["hosts"], x["rate"], x["density"]) == ("step", 16_000_000, 4, "1gbit", 0.01)}
    unshaped = {(x["system"], x["hosts"]): x["interface_received_bytes"] for x in load("cluster/results")["rows"]
                if (x["what"], x["params"], x["rate"], x["density"]) == ("exchange", 10**6, "none", 0.01)}
    team = {(x["system"], x["hosts"]): 1e3 * x["seconds"] for x in load("cluster/teams")["rows"]}
    grown = lambda name: team[name, 8] / team[name, 3]
    small = lambda name, W: min(x["held_out"] for x in runs if (x["row"], x["width"], x["workers"]) == (name, 32, W))
    even, best = ([words(f"sketched 10x, k=d/{k}, P={P}", 400) for k, P in x] for x in (((40, 2), (80, 4)), ((40, 3), (80, 6))))
    tried = lambda task, name, *rates: [ROWS[task][name]["tried"][rate] for rate in rates]
    paid = lambda name: numbers("papers", f"| {name} |", "## Words")
    score = lambda name, after: numbers("papers", f"| {name} |", after)[2 : 4]
    shares, agree = order()
    ours, mass = numbers("time", "adding up messages takes"), "the residuals lose, at a rate"
    both = [*step(0.001, "spardl"), *step(0.01, "spardl")]
    steps = step(0.01, "dense", "dragonn", "dgc")
    wired, fast = ([numbers("sparse", f"| {x} |", "A step on")[n] for x in names] for n, names in enumerate((("dense", "split_allgather"), ("dense", "all_gather"))))
    return [
        ("1,026,816 parameters ends at", ".3f", *map(words, ("sketched 10x", "true top-k, k of 10x", "dense", "random-k 10x, decay 0", "random-k 10x"))),
        ("our 20x, the paper's 36x,", ".3f", words("sketched 20x") - words("dense"), long("sketched 20x") - long("dense"), *map(long, ("sketched 20x", "dense", "true top-k, k of 20x", "random-k 20x, decay 0"))),
        ("15 rows, P = 16; 21x) ends at", ".3f", *(words(x, 19_200) for x in SHAPE), *map(once, SHAPE)),
        ("a larger one gains", ".2f", best[0] - best[1]),
        ("on digits: as published", ".1f", *sized(*SKETCHED, "sketched_sgd(10), decay 0.5"), *sized(*SKETCHED, of=later)),
        ("Behind Adam, where the paper has SGD,", ".3f", *(mapped(x) for x in ("updates, sketched 20x", "gradients, dense", "updates, random 1/20"))),
        ("interfaces count", ".2f", *(unshaped[x, 8] / unshaped[x, 4] for x in ("sketched_sgd", "top_k"))),
        ("With 256, `top_k` receives", ".1f", numbers("papers", "| 256 |", "received | local top-k")[6]), ("Local top-k loses:", ".2f", small("local top-k 10x", 1), small("local top-k 10x", 256), small("dense", 1)),
        ("the net's gap to true top-k is", ".3f", *(words("sketched 10x", n) - words("true top-k, k of 10x", n) for n in (400, 1200))),
        ("costs accuracy (Fig. 3)", ".3f", *map(words, ("sketched 5x", "sketched 10x", "sketched 20x", "dense"))),
        ("On the convolutional net, it is within", ".2f", max(x - y for x, y in zip(even, best))),
        ("the error over dense SGD's is", "", *(f"{x:.{n}f}" for x, n in zip(numbers("papers", "| sketched |", "### The rate of SGD"), (1, 1, 2, 2)))),
        ("With twice the curvature it is", "", *(f"{x:.{n}f}" for x, n in zip(numbers("papers", "5.6e+04,"), (0, 2)))),
        ("on the convolutional net: ", ".3f", *map(words, ("true top-k, k of 20x", "true top-k, k of 10x", "dense", "true top-k, k of 5x"))),
        ("on digits at 10x, 5 seeds:", "", *{f"{tables[x]['loss']:.3f}" for x in ("float32", "bfloat16", "float16")}, *(f"{x:.1f}" for x in narrow)),
        ("has the lowest training loss (", ".3f", *(numbers("papers", f"| {x} |", "## S2")[1] for x in ("0.5 of them", "0.25 of them", "0.1 of them"))),
        ("trains the embedding: perplexity", ".1f", *numbers("sparse", "| s2, sketch ratio 0.5 |")[:2], *numbers("sparse", "| dense |")[:2]), ("± 3.0, with a", ".0f", numbers("sparse", "| s2, sketch ratio 0.5 |")[5]),
        ("the same if Adam trains it", ".1f", *numbers("sparse", "sketch's noise costs 3 %:")[:4]),
        ("**partly**: an exchange takes", ".0f", 100 - 100 * np.divide(*big("s2_reducer:local", "sparse_all_gather"))), ("room for all workers' blocks:", ".0f", 100 - 100 * np.divide(*big("s2_reducer:local", "omni_reduce"))),
        ("in SparCML's worst case, nearly disjoint supports:", "", f"{np.divide(*big('sparcml', 's2_reducer:local')):.1f}", "5326", f"{np.divide(*host('sparcml', 's2_reducer')):.1f}"),
        ("at 1 % of 16M: whole steps", ".0f", *step(0.01, "s2_reducer", "omni_reduce", "sparcml", "sparse_all_gather"), gigabit["s2_reducer"], gigabit["omni_reduce"]),
        ("By the union, at 1 % of 16M,", ".0f", 100 - 100 * np.divide(*host("s2_reducer", "omni_reduce")), *host("s2_reducer", "omni_reduce")),
        ("where `sparse_all_gather` takes", ".0f", *big("sparse_all_gather"), *host("sparse_all_gather")), ("where `sparcml` takes", ".0f", *big("sparcml"), *host("sparcml")),
        ("of 24M elements an exchange takes", ".0f", *big("s2_reducer:local", "omni_reduce"), hosts["random_k", 24_000_000, 0.01575]), ("**Partly** by `slot_max`:", ".0f", *big("dragonn", "dgc")),
        ("sum in 4 bits is", ".1f", cml(f"{DSAR}:4"), cml("qsgd")),
        ("on a net's gradients", ".1f", *room("recursive_double")), ("sparse split: 3.5 to 16 k at W = 8", ".1f", *room("split_allgather")), ("selects 1 % at most, it has", "", *(f"{100 * x / 1_026_816:.{places}f}" for share, places in ((0.01, 1), (0.1, 0)) for x in held["recursive_double", share, 8]["last_needs"])),
        ("Equal supports with even room take", ".2f", paid("split_allgather, even room")[2]), ("dense split: 87.5 to 89.5 k at d = 100 k", ".2f", paid("dsar_split_allgather, even room")[2], paid("dsar_split_allgather, 4 bits")[2]),
        ("On 2, 4 and 8 hosts", "", *agree), ("recursive doubling receives", ".0f", *shares),
        ("plain all-gather of 1M elements:", "", f"{cml(AG, 0.01):.1f}", f"{cml(AG, 0.001):.0f}", f"{cml(RD, 0.01):.1f}", f"{cml(RD, 0.001):.0f}"),
        ("linear classifiers lose nothing", ".0f", *(1 / x for x in (numbers("sparse", f"| logistic | {y} |")[4] for y in ("recursive_double", "split_allgather")))),
        ("a step on 8 hosts is", ",.0f", *(x for slow, quick in (wired, fast) for x in (slow / quick, quick, slow))),
        ("coordinate descent 1.8 times faster", ".3f", 100 * numbers("sparse", "| sparse |")[3]),
        ("at dense's rate 8 and 16 of 512 end at", ".3f", *(tried("text", f"SparCML, {x} of 512, behind Adam", rate)[0] for rate in ("0.005", "0.02") for x in (8, 16)), *tried("text", "dense", "0.005")),
        ("wants 8 times dense's rate:", ".3f", *tried("digits", "SparCML, 16 of 512", "0.4", "0.05"), *tried("digits", "dense", "0.05")),
        ("2 of 512 are", "", f"{2 / 512 * 20e6:,.0f}", "0.63", "0.47"), ("4 of 512 behind Adam reach 2.4 nats", ".1f", np.divide(*(numbers("papers", f"| {x} |", "### SparCML beside")[n] for x, n in (("BMUF of ten steps", 6), ("4 of 512, updates behind Adam", 5))))),
        ("a dense sum gains 2 / kappa at most", "", "4", *(f"{cml(DSAR, x):.1f}" for x in (0.01, 0.1))),
        ("on digits all end alike, and they are", "", *two(*cost(*(f"SparCML, {x} of 512, behind Adam" for x in (8, 16)))), *three(loss("dense"))), ("`group_top_k` takes", ".2f", ms["group_top_k"]),
        *((x, "", *two(srs[2], srs[4]), *(f"{y:.0f}" for y in srs[:2])) for x, srs in (("2 ceil(log2 W) rounds, for any W", paid("spardl")), ("the same with R-SAG (eq. 7)", paid("spardl, R-SAG, 2 teams")))),
        ("Corrected, it is", ".2f", paid("spardl, B-SAG, 2 teams")[4], *paid("spardl, B-SAG, 2 teams")[2:4]),
        ("On 8 hosts one team takes", ".0f", *(team[x, 8] for x in ("spardl_packed", "spardl_packed:8:bruck")), *(numbers("papers", f"| {x} |", "messages in a row")[2] for x in ("`spardl_packed`, one team", '8 teams, "bruck"'))),
        ("14 teams of one worker", "", "13b", *two(*score('14, 14, "bruck"', mass), *score('14, 2, "recursive"', mass)[:1], *score('14, 7, "bruck"', mass)[:1], *score("14, at random", mass))),
        ("as accurate as others after as many steps", ".2f", *score("`spardl(0.01)`", mass), *score("dense", mass), *score("14, at random", mass)),
        ("on digits at tuned rates global", ".2f", *(x for y in ("`spardl(0.01)`", '`residuals="partial"`', '`residuals="local"`') for x in score(y, mass))),
        ("an exchange of 4M elements grows", ".1f", *map(grown, ("spardl_packed", f"{PACKED}:1.5", "top_k_packed"))),
        ("10 to 1 % 0.21 (Fig. 16)", "", *(f"{x:.0f}" for x in reversed(both)), f"{both[0] / both[1]:.2f}"),
        ("0.3.0's steps took", ".0f", *step(0.01, *OTHERS), *step(0.001, *OTHERS), *step(0.01, "spardl", key="computing_seconds"), *step(0.01, "spardl")),
        ("faster than Ok-Topk's (Figs. 8, 10)", ".0f", *(hosts[x, 4 * 10**6, 0.01] for x in ("spardl_packed", PACKED, f"{PACKED}:1.5"))),
        ("faster than TopkA, 6.4", ".0f", *host("spardl", "top_k"), *wait(0.01, "spardl", "top_k", what="exchange"), *(hosts[x, 10**6, 0.01] for x in ("spardl", DSAR))),
        ("network's parts are", "", *(f"{x:.0f}" for x in wait(0.01, *OTHERS)), *(f"{x / wait(0.01, 'spardl')[0]:.1f}" for x in (wait(0.01, "gtopk")[0], wait(0.01, "top_k")[0]))),
        ("the same, on a CPU", ".2f", *numbers("time", "With a threshold of its own, DRAGONN takes")[:2]),
        ("a share is within 0.36 to 0.38 with", ".2f", probability(1024, 1024, 0.36, 0.38)), ("within 0.13 to 0.14 with", ".2f", probability(1024, 512, 0.13, 0.14)),
        ("As many entries as slots keep", ".0f", *(numbers("time", f"| `select.{x}` |", "## Selecting")[1] for x in ("hash_extract", "slot_max"))), ("no term W d, but", ".1f", ours[1]),
        ("16 messages of 0.1 % take", "", f"{ours[0] + 0.016 * ours[1]:.2f}", f"{16 * ours[2]:.1f}"),
        ("at all ratios (Fig. 8)", ".0f", *step(0.01, "dragonn", "dgc", "qsgd"), *step(0.001, "dragonn", "dgc")),
        ("the same steps take", "", f"{steps[0]:.0f}", *(f"{steps[0] / x:.1f}" for x in steps[1:])),
        ("the lead over DGC grows", ".2f", *lead(0.01), *lead(0.001)),
        ("the same, on a language model", ".3f", *behind("SparDL", "top-k"), loss("dense")),
        ("on an H100 at 2^27 a compaction takes", ".3f", ms["compact"], ms["hash_extract"]), ("at as many bytes: DGC takes", "", *three(ms["sampled_top_k"], ms["hash_extract"], ms["slot_max"]), f"{100 - 100 * ms['slot_max'] / ms['sampled_top_k']:.0f}"),
        ("for `lax.top_k`,", "", *two(ms["lax.top_k"]), f"{ms['threshold_top_k']:.3f}"),
        ("an exchange is faster than DGC's", ".0f", *host("dragonn", "dgc", "top_k")),
        ("on a small language model: after 600 steps, 6 sends of an entry,", ".3f", *behind("DRAGONN", "DGC"), loss("dense")),
        ("ends there at a loss of", ".3f", loss("random-k", "digits"), loss("DRAGONN", "digits"), loss(RANDOM, "digits"), *behind("random-k as top-k, not fed back", "DRAGONN")),
        ("fewer steps than SignSGD", ".0f", *step(0.01, "dragonn", "sign_sgd"), *host("dragonn", "sign_sgd")),
    ]


@functools.cache
def pages():
    curves, frontier, recipes, to_loss = benchmarks("curves", "frontier", "recipes", "time_to_loss")
    LOCAL = ROOT / "benchmarks/results/local_updates"
    gpt = curves.load([LOCAL / "results_10.9m.json"])
    end, over = lambda runs, name: runs[name].ends.mean(), lambda name: end(gpt, name) - end(gpt, "dense")
    CHUNKS, MEAN, BITS = "SparseLoCo H=10 12.5 %", "mean H=10", "gradients, 4 bits"
    HOW = {"dense": ("dense", 1), BITS: ("qsgd", 1), MEAN: ("dense", 10), CHUNKS: ("chunked_top_k", 10)}
    timed = lambda *a: curves.over_measured(*a[:2], LOCAL / "exchanges_10.9m.json", a[2])["10mbit"]
    slow = timed({x: gpt[x] for x in HOW}, HOW, 0.1) | timed(*to_loss.reached(), 0.17)
    hours = lambda name: slow[name].curves[0].seconds[-1] / 3600
    ends, shorter = recipes.load_ends(), recipes.load_ends(shorter=True)
    SIGNS, MUON, ADAMW = "muon, local 10, sign", "muon, gradients, dense", "adamw, gradients, dense"
    mapped = lambda name: np.mean([*ends.ends[name].losses.values()])
    above = lambda one, two: ends.ends[one].above(ends.ends[two])[0]
    model, seeds = frontier.SIZES["136k"], {len(x.losses) for x in ends.ends.values()}
    moved = lambda name: traced_bytes(recipes.EXCHANGES[name].transformation(), model.shapes, 8).received
    both = [(ends.above_dense(x)[0], shorter.above_dense(x)[0]) for x in ends.ends if x in shorter.ends and "random" not in x]
    longer = [b / a for a, b in both if a > 0.01]
    ended = lambda size, name: (runs := frontier.Results(size)).runs(one := recipes.Recipe.parsed(name), 600)[runs.tuned_rate(one, 600), 0][-1]
    factor = lambda x: f"{x:.1f}x" if 1.05 < x < 9.95 else f"{x:.0f}x"
    saved = lambda t, name: factor(ROWS[t]["dense"]["received"] / ROWS[t][name]["received"])
    side = lambda text, digits: (f"{loss(text):.3f}", f"{np.ptp(ROWS['text'][text]['losses']):.3f}", saved("text", text), *(score(digits) if digits else ()))
    score = lambda name: (f"{100 * np.mean(ROWS['digits'][name]['right']):.1f} %", saved("digits", name))
    quick = lambda x: (f"{x['train_loss'][0]:.4f}", f"{100 * x['test_accuracy'][0]:.1f} %", f"{x['received_bytes']:,.0f}", f"{x['compression']:.0f}x")
    tried = load("results/quickstart")["methods"]
    s1, a1, m1, s2, a2, m2 = (ended(x, y) for x in ("1m", "136k") for y in (SIGNS, ADAMW, MUON))
    SIDE = {  # rows of a table: what exchanges the text's gradients and those of digits
        "|---|---|---|---|---| | dense |": ("dense", "dense"), "| 10 local steps, mean |": (TEN, TEN),
        "| 10 local steps, SparseLoCo |": ("10 local steps, SparseLoCo",) * 2, "| `qsgd(4)` |": ("4 bits, before Adam", "4 bits"),
        "| `top_k(0.01)`, two-bit values, behind Adam |": ("top-k, behind Adam, 2-bit values", ""), "| `chunked_top_k(41)`, behind Adam |": ("chunked top-k, behind Adam", "chunked top-k"),
        "| `spardl(0.01)`, behind Adam |": ("SparDL, behind Adam", "SparDL"), "| `spardl(0.01)`, two-bit values, behind Adam |": ("SparDL, behind Adam, 2-bit values", ""),
        "| `random_k(0.08, reducer=reducers.Quantized(), decay=0)`, behind Adam |": ("random-k as top-k, 4 bits, not fed back, behind Adam", ""),
        "| `random_k(0.02, decay=0)`, behind Adam |": (f"{RANDOM}, behind Adam", RANDOM), "| `demo(41)`, signed |": ("DeMo", "DeMo"),
        "| `powersgd(4)`, behind Adam |": ("PowerSGD rank 4, behind Adam", "PowerSGD rank 4"), "| `powersgd(2)`, behind Adam |": ("PowerSGD rank 2, behind Adam", "PowerSGD rank 2"),
        "| `ef21_sgdm(SparDL(0.01))` |": ("EF21-SGDM, before Adam", "EF21-SGDM"),
    }
    COSTS = [  # words of a row, steps between exchanges, what is sent, its recipe, and optimizers
        ("gradients, dense", 1, "dense", "gradients, dense", "adamw", "muon"), ('gradients, `quantized("int4")`', 1, "int4", "gradients, int4", "adamw", "muon"),
        ("ten local steps, dense", 10, "dense", "local 10, dense", "adamw", "muon"), ('ten local steps, `quantized("int4")`', 10, "int4", "local 10, int4", "adamw", "muon"),
        ("ten local steps, `contrib.sign_sgd()`", 10, "sign", "local 10, sign", "adamw", "muon"), ("updates of each worker's Adam, `spardl(0.01)`", 1, "SparDL 1 %", "updates, SparDL 1 %", "adamw"),
        ("the same, a random 20th of the coordinates", 1, "random 1/20", "updates, random 1/20", "adamw"), ("the same, `sketched_sgd(20)`", 1, "sketched 20x", "updates, sketched 20x", "adamw"),
    ]
    PAGES = {"README.md": [
        ("ten local steps by SparseLoCo", ".1f", end(gpt, CHUNKS), hours(CHUNKS)),
        ("their mean", "", *two(end(gpt, MEAN)), f"{hours(MEAN):.1f}", *two(end(gpt, BITS)), f"{hours(BITS):.1f}", *two(end(gpt, "dense")), f"{hours('dense'):.0f}"),
        ("A transformer of", ",", model.parameters, model.workers, ends.steps),
        *((f"| {words} |", "", f"{every * moved('dense') / moved(sent):.0f}x", *three(*(mapped(f"{x}, {recipe}") for x in by))) for words, every, sent, recipe, *by in COSTS),
        ("`spardl(0.01)` ends within an image (0.3 %) of dense's", "", quick(tried["dense"])[1], quick(tried["SparDL 1 %"])[3][:-1]),
    ], "docs/which.md": [
        ("steps of Muon by signs end", ".3f", above(SIGNS, MUON), above(ADAMW, MUON), -above(SIGNS, ADAMW)),
        ("AdamW that trains for", "", "600", "2,000", *three(shorter.ends[ADAMW].above(ends.ends[ADAMW])[0], above(ADAMW, MUON))),
        ("a transformer of", ",", model.parameters, model.workers, ends.steps, min(seeds), max(seeds)),
        ("parameters, AdamW,", "", "1,500", "3", *two(over(MEAN), over(CHUNKS), over(BITS))),
        ("A model of", "", f"{frontier.SIZES['1m'].parameters:,}", f"{shorter.steps}", *three(a1 - s1, s1 - m1, s2 - a2, s2 - m2)),
        ("hundredth and more cost", ".1f", min(longer), max(longer)),
        ('`quantized("int8")` (', ".0f", SENT["dense"] / SENT["int8, feedback"]),
        ("In another small model ten local steps cost", ".2f", *cost(TEN)),
        ("Ten local steps cost it", ".2f", *cost(TEN, "4 bits, before Adam")),
        *((x, "", *side(*y)) for x, y in SIDE.items()),
    ]}
    return PAGES


# fmt: on


def missing(page, entries):
    """Numbers of the files that a page does not have."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text())
    text = " ".join(text.split())
    for anchor, form, *values in entries:
        left = text[text.index(anchor) + len(anchor) :][:800] if anchor in text else ""
        for value in values:
            shown = value if isinstance(value, str) else format(value, form)
            found = re.search(rf"(?<![\d.,]){re.escape(shown)}(?!\d|[.,]\d)", left)
            if found is None:
                yield f"{shown} does not follow {anchor!r}"
                break
            left = left[found.end() :]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/which.md"])
def test_a_page_has_the_numbers_of_the_files(page):
    assert not [*missing(page, pages()[page])]


def test_papers_have_the_numbers_of_the_results():
    assert not [*missing("docs/papers.md", papers())]


@pytest.mark.slow
def test_an_even_share_delivers_as_the_page_says():
    (sizing,) = benchmarks("sketch_sizing")
    least, rng = {}, np.random.default_rng(0)
    for ratio, (name, make) in itertools.product((10, 20, 100), sizing.TAILS.items()):
        x = make(rng, 2**17)
        for rows in (1, 3, 5):
            given = [sizing.delivered(x, ratio, rows, y, rng)[0] for y in (0.25, 0.5, 0.75)]
            if "normal" not in name:
                least[ratio] = min(least.get(ratio, 1), given[1] / max(given))
    entry = (
        "even share delivers within",
        ".0f",
        *(100 - 100 * min(least[x] for x in y) for y in ((10, 20), (100,))),
    )
    assert not [*missing("docs/papers.md", [entry])]


@pytest.mark.slow
def test_the_table_of_words_is_what_its_command_prints():
    printed = python(ROOT / "benchmarks/collectives.py", "--workers", 8, 14)
    page = (ROOT / "benchmarks/results/papers.md").read_text().split("\n### Rooms")[0]
    of_8, of_14, table = (
        {name: cells for name, *cells in re.findall(pattern, text, re.MULTILINE)}
        for text, pattern in (
            *(
                (x, r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|")
                for x in printed.split("\n| W = 14 ")
            ),
            (page, r"^\| (\w.+?) \| (\d+) / (\d+)" + r" \| (.+?)" * 4 + r" \|"),
        )
    )
    assert len(table) == 13
    for name, (first, second, *words) in table.items():
        assert [first, *words[:2]] == of_8[name], name
        assert [second, *words[2:]] == of_14[name], name
