"""Four islands on this machine, one of which is killed and comes back.

    python examples/islands/run.py

The islands meet in a folder. After some rounds one of them gets SIGKILL, and is started again some
seconds later. At the end all parameters are compared.
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
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        store = args.store or str(Path(folder) / "store")
        flags = ["--store", store, "--rounds", str(args.rounds), "--events", str(events), *more]
        rounds = run(args, flags, events)
    report(rounds)


def start(name: str, flags: list[str]) -> subprocess.Popen[bytes]:
    # One thread each, because they share this machine.
    env = {**os.environ, "NPROC": "1"}
    command = [sys.executable, str(HERE / "island.py"), "--name", name, *flags]
    return subprocess.Popen(command, env=env)


def run(args: argparse.Namespace, flags: list[str], events: Path) -> list[dict[str, Any]]:
    """Trains, and returns what islands told of their rounds."""
    running = {name: start(name, flags) for name in NAMES[: args.islands]}
    victim, kill, back_at = NAMES[1], args.kill, None
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


if __name__ == "__main__":
    main()
