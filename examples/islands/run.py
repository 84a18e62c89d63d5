"""Four islands on this machine, one of which is killed and comes back.

    python examples/islands/run.py

The islands meet in a folder. After some rounds one of them gets SIGKILL, and is started again some
seconds later. At the end all parameters are compared, and what happened is drawn.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("amsterdam", "bergen", "cork", "dover", "essen", "faro", "ghent", "hull")
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--islands", type=int, default=4, choices=range(2, len(NAMES) + 1))
    add("--rounds", type=int, default=80)
    add("--kill", type=int, default=6, help="round after which one is killed; 0: none")
    add("--away", type=float, default=3.0, help="seconds until it is started again")
    add("--store", help="a folder or a URL; a new folder if left out")
    add("--figure", type=Path, help="draw the rounds into this file")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        store = args.store or str(Path(folder) / "store")
        flags = ["--store", store, "--rounds", str(args.rounds), "--events", str(events), *more]
        started = time.time()
        rounds = run(args, flags, events)
    report(rounds)
    if args.figure:
        draw(rounds, started, args.figure)


def start(name: str, flags: list[str]) -> subprocess.Popen[bytes]:
    # One thread each, because they share this machine.
    env = {**os.environ, "NPROC": "1"}
    command = [sys.executable, str(HERE / "island.py"), "--name", name, *flags]
    return subprocess.Popen(command, env=env)


def run(args: argparse.Namespace, flags: list[str], events: Path) -> list[dict[str, Any]]:
    """Trains, and returns what islands told of their rounds."""
    running = {name: start(name, flags) for name in NAMES[: args.islands]}
    victim, back_at = NAMES[1], None
    kill = args.kill
    try:
        while running:
            time.sleep(0.1)
            for name, process in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[name]
                    if status and status != -signal.SIGKILL:
                        raise SystemExit(f"{name} ended with status {status}")
            if kill and any(e["round"] >= kill for e in told(events)) and victim in running:
                running[victim].kill()
                print(f"{victim} is killed", flush=True)
                kill, back_at = 0, time.time() + args.away
            if back_at and time.time() > back_at:
                running[victim] = start(victim, flags)
                back_at = None
        return told(events)
    finally:
        for process in running.values():
            process.kill()


def told(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text().splitlines(True) if events.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def digests_of(events: list[dict[str, Any]]) -> dict[int, set[str]]:
    """Digests of the parameters after each round: one, if they are equal on all islands."""
    digests = collections.defaultdict(set)
    for event in events:
        digests[event["round"]].add(event["digest"])
    return digests


def report(events: list[dict[str, Any]]) -> None:
    digests = digests_of(events)
    unlike = [round for round, found in digests.items() if len(found) > 1]
    waits = sorted(e["waited"] for e in events if e["waited"] is not None)
    own = [e for e in events if e["sent"]]
    print(f"{len(digests)} rounds; parameters equal bit for bit on all islands: {not unlike}")
    print(f"{sum(e['counted'] for e in own)} of {len(own)} messages counted")
    print(
        f"from a message to the decision: median {waits[len(waits) // 2]:.2f} s, "
        f"longest {waits[-1]:.2f} s"
    )
    last = max(events, key=lambda e: (e["round"], e["time"]))
    print(f"held-out loss after round {last['round']}: {last['held_out']:.3f}")
    if unlike:
        raise SystemExit(f"parameters differ in rounds {unlike}")


def draw(events: list[dict[str, Any]], started: float, path: Path) -> None:
    """Who took part in which round, and the loss."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, sharex=True, figsize=(7, 4.5), height_ratios=(1, 1), layout="constrained"
    )
    names = sorted({e["name"] for e in events}, reverse=True)
    kinds = (("counted", "o", "C0"), ("late", "x", "C1"), ("replayed", ".", "C7"))
    for kind, marker, color in kinds:
        of = [e for e in events if kind_of(e) == kind]
        top.scatter(
            [e["time"] - started for e in of],
            [names.index(e["name"]) for e in of],
            marker=marker,
            color=color,
            label=kind,
        )
    top.set_yticks(range(len(names)), names)
    top.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.25), frameon=False)
    for name in names[::-1]:
        of = sorted((e for e in events if e["name"] == name), key=lambda e: e["time"])
        bottom.plot([e["time"] - started for e in of], [e["held_out"] for e in of], label=name)
    bottom.set(xlabel="seconds", ylabel="held-out loss (nats)")
    figure.savefig(path, transparent=True, dpi=120)


def kind_of(event: dict[str, Any]) -> str:
    if event["waited"] is None:
        return "replayed"
    return "counted" if event["counted"] else "late"


if __name__ == "__main__":
    main()
