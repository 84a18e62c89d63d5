"""The job that islands replace: one `jax.distributed` job, which starts again after each failure.

    python benchmarks/chaos.py --story calm --synchronous --pause 0.15
    python benchmarks/chaos.py --story kill --synchronous --pause 0.15 --period 60

Model, batches, local steps and exchange are those of the islands (examples/islands/island.py), and
so is what strikes whom and when. Processes, launcher and checkpoints are those of
examples/multihost: if a process gets SIGKILL, the launcher ends the others, and after `--away`
seconds, when the process could be started again, it starts all from the last good checkpoint.
Processes talk by Gloo over this machine's loopback, which no proxy slows down.

Checkpoints stand `--checkpoint-every` steps apart. Young's rule for that is sqrt(2 d M), with d
seconds in which a save stops training and M from one failure to the next: the line of a run has d.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path += [str(EXAMPLES / "multihost"), str(EXAMPLES / "local_updates"), str(EXAMPLES)]
launch: Any = importlib.import_module("launch")

FLAGS = ("every", "batch", "lr", "width", "seed", "pause", "checkpoint_every")
LENGTH = 64  # tokens of a window, as in island.py


class Step(NamedTuple):
    """A step that the job has made: its number, when it ended, and the seconds of its call."""

    step: int
    time: float
    seconds: float


class Ran(NamedTuple):
    """A run.

    Attributes:
        seconds: of the story, which begins after a first exchange and a first checkpoint.
        steps: the steps that the job made in it, those made again with them.
        counted: how much further it is.
        stall: the longest time from one step to the next, less the usual one.
        saving: seconds in which a checkpoint stops training, the median.
        failures: how often it was struck.
    """

    seconds: float
    steps: list[Step]
    counted: int
    stall: float
    saving: float
    failures: int


def told(steps: Sequence[Step], began: float, seconds: float) -> tuple[list[Step], int, float]:
    """Steps of a story, how far it got, and its longest stall. See `Ran`."""
    inside = [step for step in steps if began <= step.time < began + seconds]
    before = max((step.step for step in steps if step.time < began), default=0)
    times = [*(step.time for step in inside), began + seconds]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    stall = max(gaps, default=float("nan")) - statistics.median(gaps or [0.0])
    # What a checkpoint does not hold when the story ends may still count: nothing has ended it.
    return inside, (inside[-1].step if inside else before) - before, stall


class Job:
    """The job, from launch to launch."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._log = (args.log or folder / "log").open("a")
        self._pids: dict[int, int] = {}
        self._is_over = threading.Event()
        self.began: float | None = None
        self.steps: list[Step] = []
        self.saves: list[float] = []
        self.struck = 0
        self._down_until = 0.0  # when it may be started again

    def run(self, blows: Sequence[tuple[float, int]]) -> Ran:
        """Trains for the seconds of a story.

        Args:
            blows: when a process gets SIGKILL, seconds from the start of the story, and its rank.
        """
        args = self._args
        striker = threading.Thread(target=self._strike, args=(blows,), daemon=True)
        striker.start()
        while not self._is_over.is_set():
            self._pids.clear()
            outcome = launch.launch(
                [sys.executable, __file__, *self._flags()],
                args.islands,
                # One that is still starting when the story ends has no process that can be killed.
                timeout=None if self.began is None else max(0.1, self._left()),
                on_line=self._take,
                env=self._environment(),
            )
            if self._left() <= 0:
                break
            if not self._down_until:
                raise SystemExit(f"the job ended by itself: {outcome.report}")
            self._is_over.wait(max(0.0, self._down_until - time.time()))
            self._down_until = 0.0
        striker.join()
        assert self.began is not None
        steps, counted, stall = told(self.steps, self.began, args.seconds)
        saving = statistics.median(self.saves) if self.saves else float("nan")
        return Ran(args.seconds, steps, counted, stall, saving, self.struck)

    def _left(self) -> float:
        """Seconds of the story that are left."""
        return math.inf if self.began is None else self.began + self._args.seconds - time.time()

    def _flags(self) -> list[str]:
        flags = {flag: getattr(self._args, flag) for flag in FLAGS}
        flags["checkpoint_dir"] = self._folder / "checkpoints"
        return [
            text
            for flag, value in flags.items()
            for text in (f"--{flag.replace('_', '-')}", str(value))
        ]

    def _environment(self) -> Mapping[str, str]:
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "cache"),
            **os.environ,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def _take(self, rank: int, line: str) -> None:
        if not line.startswith("{"):
            self._log.write(f"[{rank}] {line}\n")
            self._log.flush()
            return
        with contextlib.suppress(ValueError):  # the last line of one that is killed may be cut
            fields = json.loads(line)
            if "pid" in fields:
                self._pids[rank] = fields["pid"]
            elif "save" in fields:
                self.saves.append(fields["save"])
            else:
                self.steps.append(Step(**fields))
                # All is compiled after an exchange and a checkpoint.
                first = max(2 * self._args.every, self._args.checkpoint_every + 1)
                if self.began is None and self.steps[-1].step >= first:
                    self.began = time.time()

    def _strike(self, blows: Sequence[tuple[float, int]]) -> None:
        while self.began is None:
            time.sleep(0.1)
        for at, rank in blows:
            time.sleep(max(0.0, self.began + at - time.time()))
            while rank not in self._pids and self._left() > 0:
                time.sleep(0.1)  # it is still starting
            print(f"{self._args.seconds - self._left():.0f} s: kill rank {rank}", flush=True)
            self._down_until = time.time() + self._args.away
            self.struck += self._kill(rank)
        time.sleep(max(0.0, self._left()))
        self._is_over.set()
        self._kill(0)

    def _kill(self, rank: int) -> bool:
        try:
            os.kill(self._pids.pop(rank), signal.SIGKILL)
        except (ProcessLookupError, KeyError):
            return False
        return True


def run(args: argparse.Namespace, blows: Sequence[tuple[float, int]]) -> Ran:
    """Runs a story."""
    with tempfile.TemporaryDirectory() as folder:
        return Job(args, Path(folder)).run(blows)


def train(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """One process of the job, until it is killed."""
    import jax
    import numpy as np
    import optax
    import shares
    from checkpoints import Checkpoints, Progress
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxsparse

    model: Any = importlib.import_module("model")
    print(json.dumps({"pid": os.getpid()}), flush=True)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    text = model.corpus()
    graphdef, params = nnx.split(
        model.Transformer(args.width, 2, 4, LENGTH, nnx.Rngs(0)), nnx.Param
    )
    tx = optax.adamw(args.lr, b2=0.95, weight_decay=0.1)

    def loss_of(params: Any, windows: jax.Array) -> jax.Array:
        return model.loss_of(nnx.merge(graphdef, params), windows)

    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    outer = jaxsparse.outer.sparse_loco(k=512, is_dense=lambda *_: False)
    steps = jaxsparse.LocalSteps(step, outer, mesh, every=args.every)
    state = steps.init((params, tx.init(params)))
    saved = Checkpoints(args, parser)
    state, progress = saved.resume(state, Progress(0, mesh.size, 0.0, []), mesh)
    rows = args.batch * mesh.size
    rng = np.random.default_rng([args.seed, jax.process_index(), progress.step])
    for done in range(progress.step, args.steps):
        windows = model.windows(text.train, args.batch, LENGTH, rng)
        began = time.perf_counter()
        state, loss = steps(state, shares.to_global(windows, rows, split), done)
        jax.block_until_ready((state, loss))
        seconds = time.perf_counter() - began
        tell(step=done + 1, time=time.time(), seconds=seconds)
        time.sleep(args.pause)
        began = time.perf_counter()
        saved.save(state, Progress(done + 1, mesh.size, 0.0, []))
        if (done + 1) % args.checkpoint_every == 0:
            tell(save=time.perf_counter() - began)


def tell(**fields: float) -> None:
    """Prints a line of JSON, in the first process alone."""
    import jax

    if jax.process_index() == 0:
        print(json.dumps(fields), flush=True)


def main() -> None:
    import processes

    import jaxsparse

    parser = argparse.ArgumentParser(description="One process of the job: see chaos.py.")
    processes.add_flags(parser)
    kinds = {flag: int for flag in FLAGS} | {"lr": float, "pause": float}
    for flag in FLAGS:
        parser.add_argument(f"--{flag.replace('_', '-')}", type=kinds[flag], required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    args = parser.parse_args()
    # What the checkpoints of examples/multihost want to know, and compare with what was saved.
    fixed = {"method": "sparse_loco", "density": 1 / 8, "compression": 1.0, "momentum": 0.0}
    sizes = {"local_steps": args.every, "outer_lr": 1.0, "steps": 10**9, "batch_size": args.batch}
    more = {"hidden": args.width, "keep": 2, "resume": True}
    args = argparse.Namespace(**vars(args), **fixed, **sizes, **more)
    processes.join(args, parser)
    with jaxsparse.fail_at_once():
        train(args, parser)


if __name__ == "__main__":
    main()
