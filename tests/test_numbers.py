"""README, docs/which.md and docs/papers.md have the numbers of committed files of results.

An entry of `PAGES` has words of a page, the format of numbers that follow them there in this order,
within a few lines, and what the files say.
"""

# ruff: noqa: E501 - a line is an entry
import functools
import importlib
import json
import re
import sys

import numpy as np
import pytest
from running import ROOT

from jaxsparse.traffic import traced_bytes


# fmt: off
@functools.cache
def pages():
    sys.path.append(str(ROOT / "benchmarks"))
    curves, frontier, recipes, to_loss = map(importlib.import_module, ("curves", "frontier", "recipes", "time_to_loss"))
    sys.path.pop()
    load = functools.cache(lambda name: json.loads((ROOT / f"benchmarks/{name}.json").read_text()))
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
    rows = {task: load(f"results/training_{task}")["rows"] for task in ("text", "digits")}
    loss = lambda name, task="text": np.mean(rows[task][name]["losses"])
    factor = lambda x: f"{x:.1f}x" if 1.05 < x < 9.95 else f"{x:.0f}x"
    saved = lambda t, name: factor(rows[t]["dense"]["received"] / rows[t][name]["received"])
    side = lambda text, digits: (f"{loss(text):.3f}", f"{np.ptp(rows['text'][text]['losses']):.3f}", saved("text", text), *(score(digits) if digits else ()))
    score = lambda name: (f"{100 * np.mean(rows['digits'][name]['right']):.1f} %", saved("digits", name))
    nets = {}
    for run in load("results/sketched_training")["runs"]:
        nets.setdefault((run["row"], run["steps"], run["width"]), {}).setdefault(run["rate"], []).append(run["held_out"])
    words = lambda x, n=1200: min(np.mean(y) for y in nets[x, n, 168].values() if len(y) == 3)
    long = lambda x: words(x, 9600)
    once = lambda x: min(*map(np.mean, nets[x, 60_000, 168].values()), np.inf)
    SHAPE = "sketched, k=d/900", "dense", "true top-k, k=d/900", "random-k, words of k=d/900, decay 0"
    grid = {x["name"]: x for x in load("results/sketch_sizing")["results"] if (x["hidden"], x["ratio"]) == (128, 10)}
    sized = lambda *names: [100 * grid[x][key] for x in names for key in ("right", "deviation")]
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
    sent = {x["method"]: x["words"] for x in load("results/quantized")["results"]}
    quick = lambda x: (f"{x['train_loss'][0]:.4f}", f"{100 * x['test_accuracy'][0]:.1f} %", f"{x['received_bytes']:,.0f}", f"{x['compression']:.0f}x")
    tried = load("results/quickstart")["methods"]
    s1, a1, m1, s2, a2, m2 = (ended(x, y) for x in ("1m", "136k") for y in (SIGNS, ADAMW, MUON))
    two, three = ((lambda *values, form=form: [format(x, form) for x in values]) for form in (".2f", ".3f"))
    RANDOM, RD, AG = "random-k, not fed back", "sparcml:recursive_double", "sparcml:all_gather"
    DSAR, PACKED, TEN = "sparcml:dsar_split_allgather", "ok_topk_packed", "10 local steps, mean"
    tables = {x["name"].removeprefix("table in "): x for x in load("results/sketch_dtypes")["results"]}
    narrow = [100 * tables[x][key] for x in ("float32", "bfloat16", "float16") for key in ("right", "deviation")]
    held = {(x["sum"], x["share"], x["workers"]): x for x in load("results/rooms")["rows"]}
    room = lambda name: [held[name, share, 8][x] for x in ("paid", "needed") for share in (0.01, 0.1)]
    SKETCHED = "sketched_sgd(10)", "random-k, k=2345", "true top-k, k=586", "dense"
    cost, behind = lambda *names: [loss(x) - loss("dense") for x in names], lambda *names: [loss(f"{x}, behind Adam") for x in names]
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
        ('`quantized("int8")` (', ".0f", sent["dense"] / sent["int8, feedback"]),
        ("In another small model ten local steps cost", ".2f", *cost(TEN)),
        ("Ten local steps cost it", ".2f", *cost(TEN, "4 bits, before Adam")),
        *((x, "", *side(*y)) for x, y in SIDE.items()),
    ], "docs/papers.md": [
        ("1,026,816 parameters ends at", ".3f", *map(words, ("sketched 10x", "true top-k, k of 10x", "dense", "random-k 10x, decay 0", "random-k 10x"))),
        ("our 20x, the paper's 36x,", ".3f", words("sketched 20x") - words("dense"), long("sketched 20x") - long("dense"), *map(long, ("sketched 20x", "dense", "true top-k, k of 20x", "random-k 20x, decay 0"))),
        ("15 rows, P = 16; 21x) ends at", ".3f", *(words(x, 19_200) for x in SHAPE), *map(once, SHAPE)),
        ("on digits as published:", ".1f", *sized(*SKETCHED, "sketched_sgd(10), decay 0.5")),
        ("(the paper has SGD):", ".3f", *(mapped(f"adamw, {x}") for x in ("updates, sketched 20x", "gradients, dense", "updates, random 1/20"))),
        ("on the convolutional net: ", ".3f", *map(words, ("true top-k, k of 20x", "true top-k, k of 10x", "dense", "true top-k, k of 5x"))),
        ("on digits at 10x, 5 seeds:", "", *{f"{tables[x]['loss']:.3f}" for x in ("float32", "bfloat16", "float16")}, *(f"{x:.1f}" for x in narrow)),
        ("40 % less time (", ".0f", *host("s2_reducer", "omni_reduce")),
        ("where `sparse_all_gather` takes", ".0f", *big("sparse_all_gather"), *host("sparse_all_gather")), ("where `sparcml` takes", ".0f", *big("sparcml"), *host("sparcml")),
        ("of 24M elements an exchange takes", ".0f", *big("s2_reducer:local", "omni_reduce"), hosts["random_k", 24_000_000, 0.01575]), ("**Partly** by `slot_max`:", ".0f", *big("dragonn", "dgc")),
        ("sum in 4 bits is", ".1f", cml(f"{DSAR}:4"), cml("qsgd")),
        ("on a net's gradients", ".1f", *room("recursive_double")), ("sparse split: 3.5 to 16 k at W = 8", ".1f", *room("split_allgather")), ("selects 1 % at most, it has", "", *(f"{100 * x / 1_026_816:.{places}f}" for share, places in ((0.01, 1), (0.1, 0)) for x in held["recursive_double", share, 8]["last_needs"])),
        ("alone: on 8 hosts", ".1f", cml(RD, 0.01), cml(AG, 0.01)), ("of 1M elements;", ".0f", cml(RD, 0.001), cml(AG, 0.001)),
        ("gains a constant factor at most", ".1f", cml(DSAR, 0.01)),
        ("as dense on digits,", "", *two(*cost(*(f"SparCML, {x} of 512, behind Adam" for x in (8, 16)))), *three(loss("dense"))), ("`group_top_k` takes", ".2f", ms["group_top_k"]),
        ("faster than Ok-Topk's (Figs. 8, 10)", ".0f", *(hosts[x, 4 * 10**6, 0.01] for x in ("spardl_packed", PACKED, f"{PACKED}:1.5"))),
        ("faster than TopkA, 6.4", ".0f", *host("spardl", "top_k"), *wait(0.01, "spardl", "top_k", what="exchange"), *(hosts[x, 10**6, 0.01] for x in ("spardl", DSAR))),
        ("0.3.0's steps took", ".0f", *step(0.01, *OTHERS), *step(0.001, *OTHERS)), ("network's parts are", ".0f", *wait(0.01, *OTHERS)),
        ("Whole steps of 0.3.0:", ".0f", *step(0.01, "dragonn", "dgc"), *step(0.001, "dragonn", "dgc")),
        ("the same, on a language model", ".3f", *behind("SparDL", "top-k"), loss("dense")),
        ("on an H100 at 2^27 a compaction takes", ".3f", ms["compact"], ms["hash_extract"]), ("at as many bytes: DGC takes", "", *three(ms["sampled_top_k"], ms["hash_extract"], ms["slot_max"]), f"{100 - 100 * ms['slot_max'] / ms['sampled_top_k']:.0f}"),
        ("for `lax.top_k`,", "", *two(ms["lax.top_k"]), f"{ms['threshold_top_k']:.3f}"),
        ("an exchange is faster than DGC's", ".0f", *host("dragonn", "dgc", "top_k")), ("One exchange at 1 % takes", ".0f", *host("dragonn", "qsgd")),
        ("on a small language model at", ".3f", *behind("DRAGONN", "DGC"), loss("dense")),
        ("it ends at a loss of", ".3f", loss("random-k", "digits"), loss("DRAGONN", "digits"), loss(RANDOM, "digits"), *behind("random-k as top-k, not fed back", "DRAGONN")),
        ("An exchange takes", ".0f", *host("dragonn", "sign_sgd")),
    ]}
    return PAGES


# fmt: on


def missing(page):
    """Numbers of the files that a page does not have."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text())
    text = " ".join(text.split())
    for anchor, form, *values in pages()[page]:
        left = text[text.index(anchor) + len(anchor) :][:800] if anchor in text else ""
        for value in values:
            shown = value if isinstance(value, str) else format(value, form)
            found = re.search(rf"(?<![\d.,]){re.escape(shown)}(?!\d|[.,]\d)", left)
            if found is None:
                yield f"{shown} does not follow {anchor!r}"
                break
            left = left[found.end() :]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/which.md", "docs/papers.md"])
def test_a_page_has_the_numbers_of_the_files(page):
    assert not [*missing(page)]
