"""What failures cost a run of islands: stalls, steps that don't count, loss, bytes.

    pip install '.[examples,islands]' 'moto[server]'
    python benchmarks/chaos.py --story calm
    python benchmarks/chaos.py --story kill
    python benchmarks/chaos.py --show

Four islands (examples/islands/island.py), each a process, meet at moto's S3 server by HTTP. Between
each island and the server stands a proxy with a rate each way (links.py). After all have taken part
in a round, the story begins, which strikes once each `--period` seconds. results/islands.md tells
the stories. (For "disk" islands meet in a folder, which no proxy counts or slows down.) The islands
are struck in an order that `--seed` draws, as it draws batches. In the end all leave, at SIGTERM.
Each run is a line of `chaos.jsonl`.

Islands tell each step: the round that they are in, and how many steps they have made since their
last message. Decisions say in which rounds a message of a life counted. (A life is a process of an
island: one that was killed and started again has had two.) A message holds all steps that its life
made before it, because what was late or not sent stands in the residual. So the steps of a life up
to its last message that counted have counted, and those after it have not.
"""

import argparse
import bisect
import collections
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import links
import numpy as np
import timing

from jaxsparse.islands import Store
from jaxsparse.islands.protocol import decision_key, list_posted, list_rounds
from jaxsparse.islands.records import Decision

EXAMPLE = Path(__file__).parents[1] / "examples" / "islands"
# By a name of its own, because other folders have a run.py, too.
_spec: Any = importlib.util.spec_from_file_location("islands_run", EXAMPLE / "run.py")
run: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)

NAMES = run.NAMES[:4]
TOKENS = 8 * 64  # of a step: windows, and their length in island.py
RATE = 12.5e6  # bytes a second, of each link, each way
PATIENCE = 600.0  # seconds in which all islands must have taken part


class Story(NamedTuple):
    """What strikes an island, or all of them, and what ends that, after how many seconds."""

    strike: str = ""
    recover: str = ""
    away: float = 0.0


STORIES = {
    "calm": Story(),
    "kill": Story("kill", "start", 20.0),
    "stop": Story("stop", "go on", 60.0),
    "links": Story("cut", "mend", 30.0),
    "half": Story("half", "start", 20.0),
    "disk": Story("full", "free", 60.0),
    "slow": Story(),
}


class Deed(NamedTuple):
    """What is done, when (seconds from the start of the story), and to whom."""

    time: float
    what: str
    name: str


def victims(seed: int) -> list[str]:
    """The islands in the order in which they are struck. Then it begins again."""
    return [NAMES[i] for i in np.random.default_rng(seed).permutation(len(NAMES))]


def deeds(args: argparse.Namespace) -> list[Deed]:
    """All that is done in a run. What has no time to recover is left out."""
    strike, recover, away = STORIES[args.story]
    found: list[Deed] = []
    order = ["all"] if strike == "cut" else victims(args.seed)
    for i in range(int((args.seconds - away) // args.period) if strike else 0):
        at, name = (i + 1) * args.period, order[i % len(order)]
        found += [Deed(at, strike, name), Deed(at + away, recover, name)]
    return found


# --- numbers of a run

Points = list[tuple[float, float]]  # tokens that counted, held-out loss


class Step(NamedTuple):
    """A step that an island has made."""

    name: str  # the island
    life: str  # its process
    round: int  # that it was in then
    steps: int  # since its last message: 0 if it sent one after this step
    seconds: float  # that the call of the training step took
    time: float  # when it ended, seconds


class Struck(NamedTuple):
    """An island that could not go on for a time, such as one that was suspended."""

    name: str
    start: float
    end: float


def by_life(steps: Iterable[Step]) -> dict[str, list[Step]]:
    lives: dict[str, list[Step]] = collections.defaultdict(list)
    for step in steps:
        lives[step.life].append(step)
    return lives


def counted_by_round(
    steps: Iterable[Step], decisions: Mapping[int, Mapping[str, str]]
) -> dict[int, int]:
    """How many steps counted for the first time in each round.

    Args:
        steps: the steps of each life in their order.
        decisions: for each round the members whose messages counted, with their lives.
    """
    counted = dict.fromkeys(sorted(decisions), 0)
    for life, own in by_life(steps).items():
        sent = [(step.round, made) for made, step in enumerate(own, 1) if step.steps == 0]
        rounds, held, before = [round for round, _ in sent], [made for _, made in sent], 0
        for round in counted:
            # A late message is sent in a later round than the one at whose end it was made.
            last = bisect.bisect_right(rounds, round)
            if decisions[round].get(own[0].name) == life and last:
                counted[round] += held[last - 1] - before
                before = held[last - 1]
    return counted


def longest_stall(steps: Iterable[Step], struck: Sequence[Struck]) -> float:
    """The longest call of a step, less the usual one, of islands that no failure struck: seconds.

    The first round of each life is left out, with its end: programs are compiled then. So is the
    time in which an island is struck, up to the end of the round in which it goes on.
    """
    kept: dict[str, list[float]] = collections.defaultdict(list)
    for own in by_life(steps).values():
        blows = [one for one in struck if one.name == own[0].name]
        waits_in: int | None = own[0].round  # the round whose end it has to see
        for step in own:
            if any(b.start <= step.time and step.time - step.seconds <= b.end for b in blows):
                waits_in = step.round
            elif waits_in is None:
                kept[step.name].append(step.seconds)
            elif step.round > waits_in:
                waits_in = None
    stalls = (max(seconds) - float(np.median(seconds)) for seconds in kept.values())
    return max(stalls, default=float("nan"))


def curve(events: Iterable[Mapping[str, Any]], counted: Mapping[int, int]) -> Points:
    """Held-out losses after rounds, over the tokens that have counted by then.

    Args:
        events: what islands told of rounds, with the loss at the start of round `at`.
        counted: steps by round, see `counted_by_round`.
    """
    losses = {e["at"] - 1: e["held_out"] for e in events}
    total = dict(zip(counted, itertools.accumulate(counted.values())))
    return [(TOKENS * total[round], losses[round]) for round in total if round in losses]


def thinned(points: Points, most: int = 60) -> Points:
    """Means of `most` groups of neighbours, or all points if there are fewer."""
    if not points:
        return []
    parts = np.array_split(np.asarray(points), min(most, len(points)))
    return [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in parts]


def above(points: Points, calm: Points) -> float | None:
    """How far the last loss is above the calm run's at as many tokens, or None if it has fewer."""
    if not points or not calm or not calm[0][0] <= points[-1][0] <= calm[-1][0]:
        return None
    tokens, loss = points[-1]
    return loss - float(np.interp(tokens, *np.transpose(calm)))


def mean_above(points: Points, calm: Points) -> float | None:
    """As `above`, but the mean of all losses of the second half that the calm run can show."""
    found = [above(points[: i + 1], calm) for i in range(len(points) // 2, len(points))]
    known = [x for x in found if x is not None]
    return float(np.mean(known)) if known else None


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Runs as Markdown. The calm run to compare with has the same settings and the same seed."""
    heads = ("story", "seed", "failures", "rounds", "longest stall", "steps that count")
    rows = [
        timing.head(*heads, "of calm's a second", "equal", "above calm", "second half", "requests")
    ]
    rate = lambda line: line["counted"] / line["seconds"]  # of all islands together
    like = lambda line: [line[key] for key in ("seed", "settings", "pause")]
    for line in lines:
        is_calm = line["story"] == "calm"
        calm = [one for one in lines if one["story"] == "calm" and like(one) == like(line)]
        curves: list[Points] = [one["curve"] for one in calm if one["curve"]]
        most: Points = max(curves, key=lambda points: points[-1][0], default=[])
        longest = max(calm, key=lambda one: one["seconds"], default=None)
        differences = [None if is_calm else f(line["curve"], most) for f in (above, mean_above)]
        rows.append(
            timing.row(
                *(line["story"], line["seed"], line["failures"], line["rounds"]),
                f"{line['stall']:.1f} s",
                f"{100 * line['counted'] / line['made']:.1f} %",
                "" if longest is None else f"{100 * rate(line) / rate(longest):.1f} %",
                "yes" if not line["unlike"] else f"not in {line['unlike']}",
                *("" if x is None else f"{x:+.3f}" for x in differences),
                "" if line["requests"] is None else f"{line['requests']:.1f}",
            )
        )
    return "\n".join(rows)


# --- processes


class Processes:
    """A group of processes that ends with this one, also if this one gets SIGKILL.

    A shell in the group waits for the end of its stdin, a pipe that this process alone can write
    to. Then it kills the group, those that are suspended, too.
    """

    def __init__(self) -> None:
        guard = ["sh", "-c", "trap '' TERM; read -r _; kill -KILL 0"]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, process_group=0)
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[object], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.DEVNULL,
            process_group=self._guard.pid,
            **options,
        )
        self._all.append(process)
        return process

    def end(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        for process in (self._guard, *self._all):
            process.wait()


class Server:
    """moto's S3 server with a bucket, and a proxy for each island."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes, self._counts = processes, folder / "counts"
        self.port, *self._ports = free_ports(1 + len(NAMES))
        self.url, self._end = "s3://runs/chaos", f"http://127.0.0.1:{self.port}"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes.start(["-m", "moto.server", "--port", self.port], **quiet)
        answers(self.port)
        bucket = urllib.request.Request(f"{self._end}/runs", method="PUT")
        urllib.request.urlopen(bucket).close()
        self.counts = links.counts_in(self._counts, len(NAMES))
        self.mend()

    def cut(self) -> None:
        self._links.kill()
        self._links.wait()

    def mend(self) -> None:
        flags = ("--to", self.port, "--rate", RATE, "--counts", self._counts)
        self._links = self._processes.start([links.__file__, *flags, "--ports", *self._ports])
        for port in self._ports:
            answers(port)

    def store(self) -> Store:
        """The store, without a proxy."""
        keys = {"access_key_id": "any", "secret_access_key": "any", "region": "us-east-1"}
        config = {**keys, "endpoint": self._end}
        return Store(self.url, config=config, client_options={"allow_http": True})

    def environment(self, name: str) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports[NAMES.index(name)]}",
        }


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answers(port: int, seconds: float = 60.0) -> None:
    """Waits until something listens at a port, for so many seconds at most."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


class Chaos:
    """A run: its islands, what they told, and what is done to them."""

    def __init__(self, args: argparse.Namespace, processes: Processes, folder: Path) -> None:
        self._args, self._processes = args, processes
        self.server = None if args.story == "disk" else Server(processes, folder)
        self._url = str(folder / "store") if self.server is None else self.server.url
        self.store = Store(self._url) if self.server is None else self.server.store()
        self._cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self.steps: list[Step] = []
        self.events: list[dict[str, Any]] = []
        self.struck: list[Struck] = []

    def start(self, name: str, pause: float) -> None:
        env = os.environ | {
            "NPROC": "1",
            # An island that is started again has compiled programs, as on a machine of its own.
            "JAX_COMPILATION_CACHE_DIR": self._cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        if self.server is not None:
            env |= self.server.environment(name)
        flags = settings_of(self._args) | {
            "name": name,
            "store": self._url,
            "poll": 0.2,
            "alone": 10_000,  # steps without the store
            "quorum": 2,
            "seed": self._args.seed,
            "rounds": 10**9,
            "pause": pause,
            # A pipe, so that an island that can't write to files still tells what it does.
            "events": "/dev/stdout",
            "steps": "/dev/stdout",
        }
        command = [text for flag, value in flags.items() for text in (f"--{flag}", value)]
        process = self._processes.start(
            [EXAMPLE / "island.py", *command], env=env, stdout=subprocess.PIPE
        )
        self._running[name] = process
        self._readers.append(threading.Thread(target=self._read, args=(process,), daemon=True))
        self._readers[-1].start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # The last line of one that is killed may be cut. Others are for people.
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                if "held_out" in fields:
                    self.events.append(fields)
                else:
                    self.steps.append(Step(**fields))

    def look(self) -> None:
        """Tells of islands that have ended."""
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[name]
                print(f"{name} ended with status {process.returncode}", flush=True)

    def wait_for(self, names: Iterable[str]) -> None:
        """Waits until these islands have ended a round."""
        end = time.monotonic() + PATIENCE
        while not set(names) <= past_a_round(self.steps[:]):
            self.look()
            if not self._running or time.monotonic() > end:
                raise SystemExit(f"islands ended, or made no round in {PATIENCE:g} s")
            time.sleep(0.1)

    def begin(self) -> None:
        """Starts all islands, and waits until each has ended a round."""
        args = self._args
        slow = victims(args.seed)[0] if args.story == "slow" else None
        others = [name for name in NAMES if name != slow]
        for name in others:
            self.start(name, args.pause)
        self.wait_for(others)
        if slow is not None:
            compute = float(np.median([step.seconds for step in self.steps]))
            self.start(slow, 3 * args.pause + 2 * compute)
            self.wait_for(NAMES)

    def play(self) -> float:
        """Does all that the story has. Returns the seconds that it took."""
        began = time.monotonic()
        for deed in [*deeds(self._args), Deed(self._args.seconds, "", "")]:
            while time.monotonic() < began + deed.time:
                self.look()
                time.sleep(min(0.1, max(0.0, began + deed.time - time.monotonic())))
            if deed.what:
                print(f"{deed.time:.0f} s: {deed.what} {deed.name}", flush=True)
                self.do(deed.what, deed.name)
        return time.monotonic() - began

    def do(self, what: str, name: str) -> None:
        if what == "start":
            self.start(name, self._args.pause)
        elif what in ("cut", "mend"):
            assert self.server is not None
            self.server.cut() if what == "cut" else self.server.mend()
        elif name not in self._running:
            return  # it has ended by itself, which is told
        elif what in ("kill", "half"):
            life = next(step.life for step in reversed(self.steps) if step.name == name)
            process = self._running.pop(name)
            process.kill()
            process.wait()
            if what == "half":
                self._put_halves(name, life)
        elif what == "stop":
            now = time.time()
            self.struck.append(Struck(name, now, now + STORIES["stop"].away))
            self._running[name].send_signal(signal.SIGSTOP)
        elif what == "go on":
            self.struck[-1] = self.struck[-1]._replace(end=time.time())
            self._running[name].send_signal(signal.SIGCONT)
        elif what in ("full", "free"):
            pid = self._running[name].pid
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            size = len(self._message()[1]) - 1 if what == "full" else hard
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))

    def _message(self) -> tuple[int, bytes]:
        """The open round, and a message of the one before."""
        open_round = list_rounds(self.store, "decisions")[-1] + 1
        name, life = list_posted(self.store, open_round - 1)[0]
        data = self.store.get(f"messages/{open_round - 1:08d}/{name}.{life}")
        assert data is not None
        return open_round, data

    def _put_halves(self, name: str, life: str) -> None:
        """Half messages in the open round, of a stranger and of one that has been killed.

        If that one has already sent its message there, the half stands in the round after it.
        """
        open_round, data = self._message()
        half = data[: len(data) // 2]
        self.store.create(f"messages/{open_round:08d}/stranger.{life}", half)
        for round in (open_round, open_round + 1):
            if self.store.create(f"messages/{round:08d}/{name}.{life}", half):
                return

    def leave(self) -> None:
        """Ends all islands, by SIGTERM at first. Fewer than the quorum would wait for long."""
        for process in self._running.values():
            process.terminate()
        end = time.monotonic() + 2 * self._args.grace + 20
        while self._running and time.monotonic() < end:
            time.sleep(0.1)
            self.look()
        for process in self._running.values():
            process.kill()
        for reader in self._readers:
            reader.join()

    def decisions(self) -> dict[int, dict[str, str]]:
        """Whose messages counted in each round."""
        found = {}
        for round in list_rounds(self.store, "decisions"):
            data = self.store.get(decision_key(round))
            assert data is not None
            found[round] = Decision.from_bytes(data, round)[0].lives
        return found


def past_a_round(steps: Sequence[Step]) -> set[str]:
    """The islands that have ended a round."""
    lives = by_life(steps).values()
    return {own[0].name for own in lives if own[-1].round > own[0].round}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the loss at a number of tokens depends on without failures, and the grace."""
    inner = {"every": 10, "overlap": 5, "lr": 0.01}
    return {**inner, "grace": args.grace, "batch": 8, "width": 64}


def told(args: argparse.Namespace, chaos: Chaos, seconds: float) -> dict[str, Any]:
    """A run's line."""
    steps, events, decisions = chaos.steps, chaos.events, chaos.decisions()
    counted = counted_by_round(steps, decisions)
    points = curve(events, counted)
    sent = sum(e["sent"] > 0 for e in events)
    counts = None if chaos.server is None else chaos.server.counts.sum(axis=0)
    return {
        **{key: getattr(args, key) for key in ("story", "seed", "pause", "period")},
        **{"seconds": round(seconds, 1), "load": round(os.getloadavg()[1], 1)},
        **{"cores": os.cpu_count(), "jax": jax.__version__},
        "settings": settings_of(args),
        "failures": sum(deed.what == STORIES[args.story].strike for deed in deeds(args)),
        "rounds": len(decisions),
        "stall": round(longest_stall(steps, chaos.struck), 2),
        "made": len(steps),
        "counted": sum(counted.values()),
        "unlike": [r for r, found in sorted(run.digests_of(events).items()) if len(found) > 1],
        "megabytes": None if counts is None else round(float(counts[0]) / sent / 1e6, 4),
        "requests": None if counts is None else round(float(counts[1]) / sent, 2),
        "curve": [(round(x), round(y, 4)) for x, y in thinned(points)],
    }


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--story", choices=STORIES, help="what happens")
    add("--seed", type=int, default=0, help="of batches, and of the order of victims")
    add("--seconds", type=float, default=1200.0, help="length of the story (1200)")
    add("--period", type=float, default=120.0, help="seconds from one failure to the next (120)")
    add("--grace", type=float, default=5.0, help="seconds to wait for those that are late (5)")
    add("--pause", type=float, default=0.0, help="seconds that all islands sleep in each step")
    add("--jsonl", type=Path, default=Path(__file__).with_suffix(".jsonl"), help="results")
    add("--show", action="store_true", help="the table of all runs, and no run")
    args = parser.parse_args()
    if args.show:
        print(table(timing.lines_in(args.jsonl)))
        return
    if args.story is None:
        parser.error(f"give --story ({', '.join(STORIES)}), or --show")
    strike, _, away = STORIES[args.story]
    if strike and not (away < args.period <= args.seconds - away):
        parser.error(f"--story {args.story} needs {away:g} < --period <= --seconds - {away:g}")
    if args.story != "disk" and importlib.util.find_spec("moto") is None:
        parser.error("a story but disk needs a server: pip install 'moto[server]'")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    processes = Processes()
    with tempfile.TemporaryDirectory() as folder:
        try:
            chaos = Chaos(args, processes, Path(folder))
            chaos.begin()
            seconds = chaos.play()
            chaos.leave()
            line = told(args, chaos, seconds)
        finally:
            processes.end()
    timing.add_line(args.jsonl, **line)
    rows = table(timing.lines_in(args.jsonl)).splitlines()
    print(*rows[:2], rows[-1], sep="\n")


if __name__ == "__main__":
    main()
