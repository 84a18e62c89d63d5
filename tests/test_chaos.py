"""benchmarks/chaos.py: its arithmetic and its plan without processes, and a short run with them."""

import importlib.util
import json
import subprocess
import sys

import pytest
from running import ENV, QUICK, ROOT

sys.path.append(str(ROOT / "benchmarks"))
import chaos
import s3

sys.path.pop()


def test_a_bucket_lets_its_rate_through():
    now = [5.0]
    bucket = s3.Bucket(1000.0, burst=500.0, clock=lambda: now[0])
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
    joined, requests = b"".join(data), s3.Requests()
    parts = [joined[i : i + size] for i in range(0, len(joined), size)]
    assert sum(map(requests.add, parts)) == 6


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
    assert row.count("|") == len(chaos.HEADS) + 1
