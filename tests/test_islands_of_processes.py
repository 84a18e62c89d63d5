"""Islands of several processes, beside others of one: equal bits, equal errors, and no hanging."""

import json
import re
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import run_islands
import running

from jaxsparse.islands import Store

SCRIPT = Path(run_islands.__file__)
# Each rank tells how it ends, and the launcher, which would end the others, learns nothing.
TELLS = ("/bin/sh", "-c", '"$@"; echo "ended $?"', "sh")


class Solo(threading.Thread):
    """An island of one device in this process, which makes some rounds."""

    def __init__(self, path, rounds, **settings):
        super().__init__()
        self._path, self._rounds, self._settings = path, rounds, settings
        self.start()
        while not Store(path).names("snapshots"):  # it is the first
            assert self.is_alive()
            time.sleep(0.01)

    def run(self):
        given = {"name": "solo", "seed": 1, **self._settings}
        self.train, self.state = run_islands.trained(
            Store(self._path), jax.devices()[:1], self._rounds, **given
        )

    def ended(self):
        self.join()
        return self.train.status().rounds, self.state


def in_processes(path, rounds, plan="train", *, ends=(0, 0), **settings):
    """What an island of two processes with two devices each printed: reports, and other lines."""
    given = json.dumps({"name": "pair", "seed": 2, **settings})
    command = [sys.executable, SCRIPT, path, rounds, given, plan]
    outcome, lines = running.in_processes(
        command, 2, devices=2, timeout=200, wrap=lambda rank: TELLS
    )
    text = "\n".join(line for each in lines for line in each)
    assert outcome.status == 0, outcome.report + text
    for each, end in zip(lines, ends):
        if end == 0:
            assert "ended 0" in each, text
        else:
            assert "ended 0" not in each, text
            assert any(line.startswith("ended ") for line in each), text
    reports = [
        [json.loads(line.removeprefix("round ")) for line in each if line.startswith("round ")]
        for each in lines
    ]
    return reports, lines


def words(path, reports):
    """The words of pair's messages, by round, which are so many bytes before a checksum."""
    sent = {f"{report['round']:08d}": report["sent"] for report in reports}
    files = sorted(Path(path).glob("messages/*/pair.*"))
    data = {file.parent.name: file.read_bytes() for file in files}
    return {round: data[round][-32 - sent[round] : -32] for round in data.keys() & sent}


def lines_of(lines, name):
    return [[line for line in each if line.startswith(f"{name}")] for each in lines]


def digests(reports):
    return {report["round"]: report["digest"] for report in reports}


def check_equal(tmp_path, rounds, plan="train", **settings):
    """Trains in two processes and in one, beside an island of one device. Returns all lines."""
    solo = Solo(tmp_path / "two", rounds, **settings)
    reports, lines = in_processes(tmp_path / "two", rounds, plan, **settings)
    others, _ = solo.ended()
    assert reports[0] == reports[1]
    expected = [(each.round, each.members, each.digest, each.received) for each in others]
    found = [(r["round"], tuple(r["members"]), r["digest"], r["received"]) for r in reports[0]]
    assert found == expected
    assert {members for _, members, _, _ in found} == {("pair", "solo")}
    # The same island as one process.
    solo = Solo(tmp_path / "one", rounds, **settings)
    train, state = run_islands.trained(
        Store(tmp_path / "one"), jax.devices()[:4], rounds, name="pair", seed=2, **settings
    )
    solo.ended()
    assert [each.digest for each in train.status().rounds] == [each.digest for each in others]
    one, two = (words(tmp_path / each, reports[0]) for each in ("one", "two"))
    assert one.keys() & two.keys()  # others are deleted already
    assert all(one[key] == two[key] for key in one.keys() & two.keys())
    digest = np.asarray(train._member.arithmetic.digest(state)).tolist()
    expected = f"digest {digest} {state.round} {state.steps}"
    assert lines_of(lines, "digest") == [[expected]] * 2
    return lines


@pytest.mark.slow
def test_an_island_of_two_processes(tmp_path):
    """It trains beside another one, and then all of its processes raise the same errors."""
    lines = check_equal(tmp_path, 3, "wrong", overlap=1)
    for what, text in {
        "settings": "RuntimeError: .* Process 1 has: every=4. Process 0 has: every=3",
        "state": "RuntimeError: .* Process 1 has: round=4. Process 0 has: round=3",
        "local": r"ValueError: parameters\['b'\] are on devices of 1 of this island's 2 processes",
        "weights": r"RuntimeError: .* weigh \[0\.3\d*, 1\.3\d*\] in its processes",
        "refused": "PermissionError: no access",
        "down": "UnreachableError: down",
    }.items():
        for said in lines_of(lines, what):
            assert re.match(f"{what}: {text}", said[0])
    assert lines_of(lines, "notes")[0] == ["notes True"]
    assert all("raised in process 0" in lines_of(lines, what)[1][0] for what in ("refused", "down"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": 0, "snapshots": 1},
        {"overlap": 2, "is_spread": False},
        {"overlap": 1, "fragments": 2, "snapshots": 1},
    ],
)
def test_overlaps(settings, tmp_path):
    check_equal(tmp_path, 3, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_while_others_wait_ends_them(victim, tmp_path):
    """Nobody else is there, so process 0 waits for the store, and process 1 for process 0."""
    in_processes(tmp_path, 3, f"wait {victim}", ends=(1, 1), overlap=1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_island_is_killed_and_comes_back(victim, tmp_path):
    settings = {"quorum": 1, "grace": 1.0, "overlap": 1}
    ends = threading.Event()
    solo = Solo(tmp_path, 10**6, each_step=lambda *_: ends.wait(0.2), **settings)
    try:
        in_processes(tmp_path, 0, f"kill {victim}", ends=(1, 1), counts=9, **settings)
        reports, lines = in_processes(tmp_path, 0, counts=2, **settings)
    finally:
        ends.set()
    others, _ = solo.ended()
    assert reports[0] == reports[1]
    assert len(set(map(tuple, lines_of(lines, "digest")))) == 1
    known = {each.round: each for each in others}
    for report in reports[0]:
        if report["round"] in known:
            assert report["digest"] == known[report["round"]].digest
            assert tuple(report["members"]) == known[report["round"]].members
    # It counted, then the other one was alone, and then it counted again. Its first report may be
    # of a round before, which it replays from a snapshot.
    sizes = "".join(str(len(known[round].members)) for round in sorted(known))
    assert re.search("21+2", sizes), sizes
    assert any(report["counted"] for report in reports[0])
