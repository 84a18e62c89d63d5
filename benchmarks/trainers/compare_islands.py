"""Runs islands of MaxText's, beside MaxText alone, its DiLoCo and `LocalSteps`. One is killed.

    pip install -r benchmarks/trainers/requirements_maxtext.txt   # Python 3.12
    python benchmarks/trainers/compare_islands.py

Each island is a process with four emulated devices. Islands meet in a folder. With everything sent,
the losses of one island whose outer optimizer is the mean must be those of MaxText alone, and the
mean losses of two islands those of MaxText's DiLoCo, whose two replicas share eight devices. The
sizes of messages are those of files in the folder.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from compare import HERE, TOLERANCE, added, environment, furthest, without

NAMES = "oslo", "rome"
EVERY, STEPS = 5, 10
# Of the run in which one island is killed, and has to be back before the other ends.
KILLED = {"GRACE": "20", "PAUSE": "2", "VARIANT": "returning"}
KILLED_IN, MOST_STEPS = 3, 200

SCRIPT = (HERE / "maxtext_islands.py").read_text()
DILOCO, MEAN = "outer.diloco(0.3, 0.9, ", "outer.mean("
FEW = "two islands, 1 % sent", "two islands, in four bits"  # rows that need not equal the original
TOP_K, IN_FOUR_BITS = "jaxsparse.top_k(DENSITY", 'jaxsparse.quantized("int4", gather=True'


class Island:
    """A process that trains, and what it prints.

    Args:
        script: the text that it runs.
        folder: where it finds files and others.
        density: share of the entries that it sends.
        devices: their number.
        steps: of its life.
        named: further variables of its environment.
    """

    def __init__(
        self,
        script: str,
        folder: Path,
        density: float = 1.0,
        devices: int = 4,
        steps: int = STEPS,
        named: Mapping[str, str] = {},
    ) -> None:
        (path := folder / f"{named.get('NAME', 'trainer')}.py").write_text(script)
        env = environment(steps, density, devices) | {"STORE": str(folder / "run"), **named}
        self._errors = path.with_suffix(".errors")
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, path], env=env, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.losses = list[float]()
        self.digests = dict[int, str]()  # of parameters, by the round that begins with them

    def lines(self) -> Iterator[tuple[str, int]]:
        """Kind and number of each loss and each round, as they come.

        Raises:
            RuntimeError: the process failed.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, *rest = line.split()[:3] or [""]
            if kind == "loss":
                self.losses.append(float(rest[1]))
            elif kind == "round":
                self.digests[int(rest[0])] = rest[1]
            else:
                continue
            yield kind, int(rest[0])
        if self.process.wait():
            raise RuntimeError(self._errors.read_text()[-5000:])

    def ended(self) -> "Island":
        """This island, after its process."""
        for _ in self.lines():
            pass
        return self


def bytes_of_messages(folder: Path) -> set[int]:
    """The sizes of all messages of a run."""
    return {file.stat().st_size for file in folder.glob("run/messages/*/*")}


def alone(script: str, devices: int = 4) -> list[float]:
    """The losses of one process, with everything sent."""
    with tempfile.TemporaryDirectory() as folder:
        return Island(script, Path(folder), devices=devices).ended().losses


def two(script: str, density: float) -> tuple[list[float], set[int]]:
    """The mean losses of two islands, and the sizes of their messages.

    Raises:
        RuntimeError: their parameters differ after a round.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = [
            Island(script, folder, density, named={"NAME": name, "QUORUM": "2"}) for name in NAMES
        ]
        one, other = [island.ended() for island in started]
        rounds = set(range(1, STEPS // EVERY + 1))
        if one.digests != other.digests or set(one.digests) != rounds:
            raise RuntimeError(f"digests differ: {one.digests}, {other.digests}")
        losses = [(a + b) / 2 for a, b in zip(one.losses, other.losses, strict=True)]
        return losses, bytes_of_messages(folder)


def killed(script: str) -> None:
    """Two islands, of which one is killed after a round, and started again at once.

    When it has made some rounds more, both are told to leave.

    Raises:
        RuntimeError: parameters differ after a round of both, or the other had ended before.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = lambda name: Island(
            script, folder, steps=MOST_STEPS, named={"NAME": name, **KILLED}
        )
        one, first = (start(name) for name in NAMES)
        next(line for line in first.lines() if line == ("round", KILLED_IN))
        first.process.kill()
        first.process.wait()
        began, second = time.monotonic(), start(NAMES[1])
        back = next(number for _, number in second.lines())
        took = time.monotonic() - began
        next(line for line in second.lines() if line == ("round", back + 3))
        for island in (one, second):
            island.process.terminate()
        for island in (one, second):
            island.ended()
        for other in (first, second):
            shared = one.digests.keys() & other.digests.keys()
            if len(shared) < KILLED_IN or any(one.digests[i] != other.digests[i] for i in shared):
                raise RuntimeError(f"digests differ: {one.digests}, {other.digests}")
        messages = [file.name.split(".")[0] for file in folder.glob("run/messages/*/*")]
        print(
            f"{NAMES[1]} was killed after round {KILLED_IN}. {took:.0f} s later it had joined and "
            f"ended round {back}. Parameters were equal after rounds {sorted(first.digests)} and "
            f"{sorted(second.digests)}."
        )
        for name, island in zip(NAMES, (one, second)):
            print(
                f"{name}: {len(island.losses)} steps, loss {island.losses[0]:.3f} to "
                f"{island.losses[-1]:.3f}, {messages.count(name)} messages of {len(one.digests)}"
            )


def main() -> None:
    local = (HERE / "maxtext_local.py").read_text()
    assert DILOCO in SCRIPT
    assert TOP_K in SCRIPT
    print("| | first loss | last loss | largest difference | B of a message |")
    print("|---" * 5 + "|")
    is_good = added(SCRIPT) <= 8

    def row(
        title: str, losses: list[float], like: list[float], sizes: Collection[int] = ()
    ) -> None:
        nonlocal is_good
        far, size = furthest(losses, like), ", ".join(f"{x:,}" for x in sorted(sizes))
        is_good &= far <= TOLERANCE or title in FEW
        print(f"| {title} | {losses[0]:.6f} | {losses[-1]:.6f} | {far:.1e} | {size} |", flush=True)

    plain = alone(without(SCRIPT))
    row("MaxText alone", plain, plain)
    row("one island, mean", alone(SCRIPT.replace(DILOCO, MEAN)), plain)
    diloco = alone(without(local), devices=8)
    row("MaxText's DiLoCo, two replicas", diloco, diloco)
    row("`LocalSteps`, two workers", alone(local, devices=8), diloco)
    in_four_bits = SCRIPT.replace(TOP_K, IN_FOUR_BITS)
    for title, script, density in (
        ("two islands, all sent", SCRIPT, 1.0),
        (FEW[0], SCRIPT, 0.01),
        (FEW[1], in_four_bits, 1.0),
    ):
        losses, sizes = two(script, density)
        row(title, losses, diloco, sizes)
    killed(in_four_bits)
    sys.exit(0 if is_good else "losses differ, or too many lines were added")


if __name__ == "__main__":
    main()
