"""The examples, run as a user runs them: in a process of their own, from any directory."""

import json
import re

import numpy as np
import pytest
from running import cache_in, run, started

SMALL = ["--hidden", "128", "--steps", "12"]
PARAMETERS = 64 * 128 + 128 * 128 + 128 * 10 + 2 * 128 + 10
DENSE = 4 * PARAMETERS


def quickstart(*flags, cwd, **settings):
    """Runs quickstart.py. Returns what it printed, and the "methods" of its JSON."""
    printed = run("quickstart.py", *flags, "--json", "result.json", cwd=cwd, **settings)
    return printed, json.loads((cwd / "result.json").read_text())["methods"]


@pytest.mark.slow
def test_quickstart_reports_every_method_in_table_and_json(tmp_path):
    flags = [*SMALL, "--devices", 3, "--compression", 8, "--seeds", 0, 1]
    flags += ["--methods", "local", "spardl", "sketched_sgd"]
    printed, methods = quickstart(*flags, cwd=tmp_path)
    names = ["dense", "local steps", "SparDL 1 %", "sketched 8x"]
    assert list(methods) == names
    for name, method in methods.items():
        losses, accuracies = np.array(method["train_loss"]), np.array(method["test_accuracy"])
        assert losses[0] != losses[1]  # the seeds differ
        assert losses.mean() < np.log(10)
        row = next(x for x in printed.splitlines() if x.startswith(name) and "±" in x)
        assert f"{100 * accuracies.mean():.2f} ±" in row
        assert f" {method['received_bytes']:,.0f} " in row
        assert f"{method['compression']:.2f}x" in row
    reduced = 2 * (3 - 1) / 3  # times an all-reduce of three devices brings what they hand over
    received = {name: method["received_bytes"] for name, method in methods.items()}
    assert received["dense"] == pytest.approx(reduced * DENSE)
    assert methods["sketched 8x"]["compression"] == pytest.approx(8, rel=0.01)

    # Four messages, each with a third of a worker's entries, and the uncompressed vectors.
    kernels = PARAMETERS - 2 * 128 - 10
    dense = 4 * (PARAMETERS - kernels + 1)
    pairs = 4 * 8 * -(-kernels // 300)
    assert received["SparDL 1 %"] == pytest.approx(reduced * dense + pairs)

    # Every tenth step, 10 bits for each of 64 in 4096 elements of the kernels, and the vectors.
    entries = 64 * (kernels // 4096) + min(64, kernels % 4096)
    words = -(-entries * 8 // 32) + -(-entries * 2 // 32) + -(-entries // 256)
    gathered = 4 * (2 * words + reduced * (PARAMETERS - kernels + 1 + 1))
    assert received["local steps"] == pytest.approx(gathered / 10, rel=0.01)


@pytest.mark.slow
def test_linen_trainer_exchanges_once_however_many_micro_batches(tmp_path):
    flags = ["--method", "sketched_sgd", "--accumulate", 5, "--devices", 3, "--hidden", 128]
    printed = run("linen_trainer.py", *flags, "--steps", 30, cwd=tmp_path)
    words = PARAMETERS // 10 + 1
    last = printed.splitlines()[-1]
    assert float(re.search(r"train loss ([\d.]+)", last)[1]) < np.log(10)
    assert float(re.search(r"accuracy ([\d.]+) %", last)[1]) > 30
    payload = int(re.search(r"([\d,]+) bytes", last)[1].replace(",", ""))
    assert payload == pytest.approx(4 * words, abs=20)  # a sketch has whole columns
    assert payload <= 4 * words
    assert "in 3 collective(s)" in last


@pytest.mark.slow
def test_quickstart_names_the_flag_that_is_wrong_and_the_remedy(tmp_path):
    said = run("quickstart.py", "--compression", 2000, cwd=tmp_path, rc=2)
    assert re.search("--compression: compression=2000.0 .* ask for less", said)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_sites_train_alone_and_go_on_from_what_was_saved(tmp_path):
    def trained(steps, folder):
        flags = ("--steps", steps, "--save", tmp_path / folder, "--every", 5, "--keep", 8)
        return run("two_sites.py", *flags, cwd=tmp_path, **cache_in(tmp_path)).splitlines()

    begun, straight = trained(8, "one"), trained(16, "two")
    resumed = trained(16, "one")
    assert "goes on after step 8" in resumed[0]
    # Step 10 and step 15, then bytes and accuracy.
    assert straight[1:] == resumed[1:]
    assert begun[0] == straight[0]
    received = re.search(r"receives ([\d,]+) bytes a step .* gradients are ([\d,]+)", straight[-4])
    sent, dense = (float(received[i].replace(",", "")) for i in (1, 2))
    # Every five steps, in 4 bits, with a scale for each group and biases in 32 bits.
    assert 5 * 6.5 < dense / sent < 5 * 8
    again = run("two_sites.py", "--steps", 16, "--save", tmp_path / "two", cwd=tmp_path, rc=1)
    assert "has step 16: give more --steps" in again


@pytest.mark.slow
def test_an_island_with_fsdp_comes_back_with_its_state_or_without(tmp_path):
    def command(save, rounds, *more):
        flags = ["--store", "run", "--name", "oslo", "--save", save, "--rounds", rounds]
        return [*flags, "--hidden", 64, "--quorum", 1, "--grace", 0, *more]

    settings = {"cwd": tmp_path, **cache_in(tmp_path)}

    def found(pattern, text):
        return re.search(pattern, text).groups()

    with started("islands_fsdp.py", *command("one", 100, "--pause", 0.1), **settings) as process:
        begun = next(line for line in process.stdout if line.startswith("round 2:"))
        process.terminate()
        told = process.stdout.read()
    assert process.returncode == 0
    # Warm-up to a twentieth of 100 rounds of ten steps.
    step, rate = found(r"round 2: step (\d+), rate ([\d.]+)", begun)
    assert (int(step), float(rate)) == (25, pytest.approx(0.003 * 25 / 50))
    round_, step = found(r"oslo leaves in round (\d+), at step (\d+), after [\d.]+ s", told)
    assert int(step) == 10 * int(round_) < 1000
    number = lambda pattern: int(found(pattern, told)[0].replace(",", ""))
    # Four devices share kernels, and hold biases whole.
    share = 4 * ((2 * 64 * 64 + 64 * 10) / 4 + 2 * 64 + 10)
    assert number(r"holds ([\d,]+) bytes of global") == share
    assert number(r"([\d,]+) of residuals") == pytest.approx(share, abs=20)  # and a few counts
    assert number(r"([\d,]+) of its own state") == pytest.approx(3 * share, abs=20)

    saved = run("islands_fsdp.py", *command("one", int(round_) + 2), **settings)
    assert f"oslo joins in round {round_} with its saved state, at step {step}" in saved
    last = int(found(r"oslo leaves in round (\d+)", saved)[0])
    assert last >= int(round_) + 2
    fresh = run("islands_fsdp.py", *command("two", last + 2), **settings)
    assert f"oslo joins in round {last} with a fresh optimizer, at step {10 * last}" in fresh
    assert float(found(r"test accuracy ([\d.]+) %", fresh)[0]) > 60


@pytest.mark.slow
def test_gspmd_trains_as_jax_alone_dense_and_nearly_so_in_four_bits(tmp_path):
    size = ["--width", 64, "--layers", 1, "--length", 16, "--windows", 16]
    printed = run("gspmd.py", *size, "--steps", 10, cwd=tmp_path)
    rows = re.findall(
        r"^(GSPMD|dense|int4) +([\d.]+) +([\d,]+) +([\d,]+) +([\d,]+)$", printed, re.M
    )
    assert [name for name, *_ in rows] == ["GSPMD", "dense", "int4"]
    loss, across, inside, held = (
        {name: float(values[i].replace(",", "")) for name, *values in rows} for i in range(4)
    )
    assert loss["GSPMD"] < np.log(256) - 0.5
    for name, rounding in (("dense", 2e-4), ("int4", 0.15)):
        assert loss[name] == pytest.approx(loss["GSPMD"], abs=rounding)
        assert inside[name] == pytest.approx(inside["GSPMD"], rel=0.05)
    # Four devices of a host share the matrices. Biases and norms are small, and stay whole.
    matrices, small = (2 * 256 + 16 + 12 * 64) * 64, 2 * 256 + 4 * 64
    assert across["dense"] == pytest.approx(4 * (matrices / 4 + small), abs=40)  # and some flags
    assert across["int4"] < 4 * (matrices / 4 / 7 + small) + 40
    # Parameters, two moments, and the residual of int4, whose small leaves have none.
    assert held["GSPMD"] == pytest.approx(3 * 4 * (matrices / 4 + small), rel=0.01)
    assert held["int4"] - held["GSPMD"] == pytest.approx(4 * matrices / 4, rel=0.05)


@pytest.mark.slow
def test_sketched_at_10x_is_within_a_point_of_dense(tmp_path):
    """After the 180 steps of README's table it is some 0.7 points below, and seeds decide."""
    flags = ["--simulate", 2, "--steps", 300, "--seeds", 1]
    flags += ["--methods", "sketched_sgd", "--compression", 10]
    _, methods = quickstart(*flags, cwd=tmp_path, compiles_quickly=False)
    dense, sketched = methods["dense"], methods["sketched 10x"]
    assert sketched["compression"] >= 10
    assert np.mean(dense["test_accuracy"]) > 0.96
    assert np.mean(sketched["test_accuracy"]) > np.mean(dense["test_accuracy"]) - 0.01
