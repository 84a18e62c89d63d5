"""benchmarks/chaos.py: its arithmetic and its plan without processes, and a short run with them."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from running import ENV, QUICK, ROOT

sys.path.append(str(ROOT / "benchmarks"))
import chaos
import chaos_numbers as numbers
import proxy
import synchronous

sys.path.pop()


def life(name, word, *told, start=0.0):
    """Steps of a second each, of pairs: the round, and the steps since the last message."""
    return [
        numbers.Step(name, word, round, steps, 0.1, start + i + 1.0)
        for i, (round, steps) in enumerate(told)
    ]


def test_steps_count_up_to_the_last_message_that_counted():
    # Messages after the second and the fourth step. A fifth one is lost with the process.
    first = life("oslo", "a", (0, 1), (0, 0), (0, 1), (1, 0), (1, 1))
    again = life("oslo", "b", (2, 1), (2, 0), (3, 1))
    rome = life("rome", "c", (0, 0), (0, 1), (1, 0), (2, 0))
    decisions = {
        0: {"oslo": "a", "rome": "c"},
        1: {"rome": "c"},
        2: {"oslo": "b"},  # rome is late
        3: {"rome": "c"},
    }
    found = numbers.counted_by_round(first + rome + again, decisions)
    assert found == {0: 2 + 1, 1: 2, 2: 2, 3: 1}
    # In the order in which lines arrive, lives are mixed.
    mixed = sorted(first + rome + again, key=lambda step: step.time)
    assert numbers.counted_by_round(mixed, decisions) == found


def test_a_message_that_never_counted_counts_with_the_next_one():
    steps = life("oslo", "a", (0, 0), (2, 0), (3, 1))
    assert numbers.counted_by_round(steps, {0: {}, 1: {}, 2: {"oslo": "a"}}) == {0: 0, 1: 0, 2: 2}
    assert numbers.counted_by_round(steps, {0: {"oslo": "another"}}) == {0: 0}
    # The late message that holds the first step alone.
    assert numbers.counted_by_round(steps, {1: {"oslo": "a"}}) == {1: 1}


def test_stalls_of_the_first_round_and_of_those_that_were_struck_are_left_out():
    calm = life("oslo", "a", *((i // 2, i % 2) for i in range(20)))
    assert numbers.longest_stall(calm).seconds == 0
    slow = lambda at, seconds: [
        step._replace(seconds=seconds) if i == at else step for i, step in enumerate(calm)
    ]
    for at, seconds in ((0, 0.0), (2, 0.0), (3, 2.9), (19, 2.9)):  # round 0 ends with step 2
        assert numbers.longest_stall(slow(at, 3.0)).seconds == pytest.approx(seconds)
    # Suspended from 8.5 to 9.5: the tenth step ends late, and round 5 follows with the eleventh.
    struck = [numbers.Struck("oslo", 8.5, 9.5)]
    assert [numbers.longest_stall(slow(at, 1.0), struck).seconds > 0 for at in (7, 9, 10, 11)] == [
        True,
        False,
        False,
        True,
    ]
    others = [numbers.Struck("rome", 8.5, 9.5)]
    assert numbers.longest_stall(slow(9, 1.0), others).seconds == pytest.approx(0.9)
    assert np.isnan(numbers.longest_stall(calm[:2]).seconds)


def test_losses_are_compared_at_equal_tokens():
    events = [{"at": r + 1, "held_out": 5.0 - r} for r in range(3)]
    points = numbers.curve(events, {0: 4, 1: 0, 2: 2, 3: 7}, tokens=10)
    assert points == [(40, 5.0), (40, 4.0), (60, 3.0)]
    calm = [(0.0, 6.0), (80.0, 2.0)]
    assert numbers.above(points, calm) == pytest.approx(0.0)
    assert numbers.above([*points, (81.0, 1.0)], calm) is None
    assert numbers.above([], calm) is None
    # Of the second half, the points that the calm run can show: 0.5 and 1.5 above it.
    calm = [(0.0, 2.0), (100.0, 2.0)]
    points = [(10.0, 9.0), (20.0, 9.0), (30.0, 2.5), (90.0, 3.5), (110.0, 7.0)]
    assert numbers.mean_above(points, calm) == pytest.approx((0.5 + 1.5) / 2)
    assert numbers.mean_above(points[:1], []) is None
    thin = numbers.thinned([(float(i), 2.0 * i) for i in range(100)], 10)
    assert len(thin) == 10
    assert thin[0] == (4.5, 9.0)
    assert numbers.thinned(points) == points


def test_a_bucket_lets_its_rate_through():
    now = [5.0]
    bucket = proxy.Bucket(1000.0, burst=500.0, clock=lambda: now[0])
    assert bucket.delay(500) == 0
    passed = 0
    for _ in range(100):
        now[0] += bucket.delay(100)
        passed += 100
    assert now[0] == pytest.approx(5.0 + passed / 1000.0)
    now[0] += 60.0  # a pause fills it no further than to its burst
    assert bucket.delay(500) == 0
    assert bucket.delay(700) == pytest.approx(0.7)
    assert bucket.delay(100) == pytest.approx(0.8)  # two connections share the link


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_requests_are_counted_however_bytes_are_cut(size):
    body = b"GET / HTTP/1.1\r\n\r\n"  # a body that looks like a request
    length = b"Content-Length: %d\r\nx: y\r\n\r\n" % len(body)
    data = (
        b"GET /runs/chaos/decisions/00000001 HTTP/1.1\r\nhost: c\r\n\r\n"
        b"PUT /runs/chaos/messages/00000001/a.0 HTTP/1.1\r\n" + length + body,
        b"GET /runs?list-type=2&prefix=chaos%2Fmessages%2F00000001%2F HTTP/1.1\r\na: b\r\n\r\n",
        b"POST /runs?delete HTTP/1.1\r\n" + length + body,
        b"HEAD /runs HTTP/1.1\r\na: b\r\n\r\nnonsense\r\n\r\n",
    )
    joined, requests = b"".join(data), proxy.Requests()
    parts = [joined[i : i + size] for i in range(0, len(joined), size)]
    assert [proxy.KINDS[kind] for part in parts for kind in requests.add(part)] == [
        "get decisions",
        "create messages",
        "names messages",
        "delete",
        "other",
        "other",
    ]


def test_each_is_struck_in_turn_and_has_time_to_recover():
    names = ("amsterdam", "bergen", "cork", "dover")
    times = {"seconds": 640.0, "period": 120.0, "away": 20.0}
    found = chaos.deeds(chaos.STORIES["kill"], names, **times, seed=0)
    assert [(d.time, d.what) for d in found[:4]] == [
        (120, "kill"),
        (140, "start"),
        (240, "kill"),
        (260, "start"),
    ]
    assert found[-1].time == 620
    struck = [d.name for d in found if d.what == "kill"]
    assert sorted(struck[:4]) == sorted(names)
    assert struck[4] == struck[0]
    orders = {tuple(chaos.victims(names, seed)) for seed in range(5)}
    assert len(orders) > 1
    assert chaos.deeds(chaos.STORIES["calm"], names, **times, seed=0) == []


def parsed(*flags):
    parser = chaos.options()
    return chaos.checked(parser, parser.parse_args(flags))


def test_flags_have_defaults_by_story():
    args = parsed("--story", "disk", "--rate", "80mbit")
    assert (args.over, args.away, args.rate) == ("folder", 60.0, 1e7)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "give --story"),
        (("--story", "fire"), "invalid choice: 'fire'"),
        (("--story", "calm", "--over", "folder", "--rate", "fast"), "'fast' is no bandwidth"),
        (("--story", "store", "--over", "folder"), "--story store is not possible with --over"),
        (("--story", "stop", "--period", "45"), "--away 60 must be less than --period 45"),
        (("--story", "kill", "--seconds", "130"), "there is no time for one failure"),
        (("--story", "calm", "--overlap", "10"), "--overlap 10 must be at least 1 and less than"),
        (("--story", "calm", "--seconds", "nan"), "--seconds nan must be above 0"),
        (("--story", "calm", "--seed", "-1"), "--seed -1 must be at least 0"),
        (("--story", "stop", "--synchronous"), "--story stop is of islands"),
        (("--story", "calm", "--synchronous", "--over", "s3"), "--over s3 is of islands"),
        (("--story", "calm", "--checkpoint-every", "0"), "--checkpoint-every 0 must be above 0"),
        (("--story", "calm", "--quorum", "5"), "--quorum 5 is more than --islands 4"),
    ],
)
def test_wrong_flags_are_named(flags, text, capsys):
    with pytest.raises(SystemExit):
        parsed(*flags)
    assert text in capsys.readouterr().err


def line(**fields):
    numbers = {"seconds": 60.0, "load": 1.0, "cores": 2, "failures": 0, "rounds": 9, "stall": 0.5}
    settings = {"settings": {"every": 10}, "rate": 1e7, "pause": 0.0}
    sizes = {"megabytes": None, "requests": 3.0}
    steps = {"made": 100, "counted": 90, "tokens": 900, "unlike": [], "ended": []}
    return {"seed": 0, **numbers, **settings, **sizes, **steps, **fields}


def test_a_table_compares_with_the_calm_run_of_the_same_seed_and_settings():
    calm = line(story="calm", curve=[(0.0, 3.0), (1000.0, 1.0)])
    kill = line(story="kill", curve=[(500.0, 2.5)])
    other = line(story="kill", curve=[(500.0, 2.5)], settings={"every": 30}, unlike=[7])
    rows = numbers.table([calm, kill, other]).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert "| +0.500 |" in rows[3]
    assert "+0.500" not in rows[2] + rows[4]
    assert "| 90.0 % | 100.0 % | yes |" in rows[3]
    assert "| 90.0 % |  | not in [7] |" in rows[4]
    assert "|  | 3.0 | well |" in rows[3]


def test_items_are_told_by_kind():
    measured = {"create messages": [1234.5, 310.0, 1.03], "get snapshots": [9.0, 8.0, 0.02]}
    rows = numbers.items({"items": measured}).splitlines()
    assert rows[2:] == [
        "| create messages | 1.03 | 1,234 | 310 |",
        "| get snapshots | 0.02 | 9 | 8 |",
    ]


def test_a_synchronous_job_is_compared_with_its_own_calm_run():
    of_islands = line(story="calm", curve=[])
    job = {"job": "synchronous", "megabytes": None, "requests": None, "curve": []}
    calm, kill = line(story="calm", **job), line(story="kill", **job, counted=45)
    rows = numbers.table([of_islands, calm, kill]).splitlines()
    assert rows[4].startswith("| kill, synchronous |")
    assert "| 45.0 % | 50.0 % |" in rows[4]
    assert "| 45.0 % |  |" in numbers.table([of_islands, kill]).splitlines()[3]


def test_steps_that_are_made_again_count_once():
    """Six steps of a second, a failure, and from the checkpoint after step 4 on three more."""
    made = [*range(1, 7), 5, 6, 7]
    times = [float(i) for i in range(1, 7)] + [20.0, 21.0, 22.0]
    steps = [synchronous.Step(step, at, 1.0) for step, at in zip(made, times)]
    inside, counted, stall = synchronous.told(steps, began=2.5, seconds=19.0)
    assert [step.step for step in inside] == [3, 4, 5, 6, 5, 6]
    assert counted == 6 - 2
    assert stall == pytest.approx(20.0 - 6.0 - 1.0)
    assert synchronous.told(steps, began=2.5, seconds=10.0)[1] == 4
    assert synchronous.told(steps[:2], began=2.5, seconds=10.0)[:2] == ([], 0)


def test_a_server_that_is_killed_has_all_that_it_said_it_had(tmp_path):
    pytest.importorskip("moto.server")
    processes = chaos.Processes()
    try:
        server = chaos.Server(processes, tmp_path, islands=1, rate=1e9)
        store, linked = server.store(), server.store(0)
        assert store.create("a/é b%2F", b"first")
        for i in range(5):
            linked.create(f"many/{i}", bytes([i]) * 1000)
        linked.delete(["many/0", "many/1"])
        for _ in range(2):
            server.cut()
            server.mend()
            assert linked.names("many") == ["2", "3", "4"]
            assert store.get("many/3") == bytes([3]) * 1000
            assert not linked.create("a/é b%2F", b"second")
            assert linked.get("a/é b%2F") == b"first"
            store.delete(["none"])  # stands in the journal, too
        with (tmp_path / "objects").open("ab") as journal:
            journal.write(b"\x80\x04\x95")  # of a request that was not answered
        server.cut()
        server.mend()
        assert linked.names("many") == ["2", "3", "4"]
    finally:
        processes.end()


@pytest.mark.slow
def test_a_run_in_which_an_island_is_killed(tmp_path):
    results, log = tmp_path / "results.jsonl", tmp_path / "log"
    small = [*("--islands", 2, "--width", 16, "--batch", 2, "--quorum", 1, "--grace", 2)]
    times = [*("--seconds", 20, "--period", 8, "--away", 4, "--pause", 0.05)]
    over = "s3" if importlib.util.find_spec("moto") else "folder"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--story", "kill"),
            *map(str, [*small, *times, "--over", over, "--jsonl", results, "--log", log]),
        ],
        env=ENV | QUICK | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    (found,) = map(json.loads, results.read_text().splitlines())
    assert (found["story"], found["failures"], found["ended"]) == ("kill", 2, [])
    assert found["unlike"] == []
    assert 0 < found["counted"] <= found["made"]
    (row,) = (row for row in done.stdout.splitlines() if row.startswith("| kill |"))
    assert row.count("|") == len(numbers.HEADS) + 1
