"""Checkpoints with Orbax: a stopped run goes on, with the same number of workers or another."""

import argparse
import secrets
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from digits import number
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from orbax.checkpoint import checkpoint_managers as policies

import jaxsparse

T = TypeVar("T")

# Flags that determine the model, the method's state, the learning rates and the order of the data.
FIXED = (
    "method",
    "density",
    "compression",
    "momentum",
    "local_steps",
    "outer_lr",
    "steps",
    "batch_size",
    "lr",
    "hidden",
    "seed",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints").add_argument
    add(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="where to save; all processes must see it",
    )
    add(
        "--checkpoint-every",
        type=number(int, 1),
        default=20,
        metavar="STEPS",
        help="the last step is saved as well, and a step at which a preemption is announced "
        "(default: 20)",
    )
    add("--keep", type=number(int, 1), default=2, metavar="N", help="the last N only (default: 2)")
    add(
        "--resume",
        action="store_true",
        help="go on from the last complete checkpoint, if there is one",
    )


class Progress(NamedTuple):
    """The progress of a run, which is saved beside its state."""

    step: int  # number of steps that are done
    workers: int  # number of workers that did the last step
    seconds: float  # seconds of training
    points: list[dict[str, Any]]  # points of the report


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, args: argparse.Namespace, parser: argparse.ArgumentParser):
        self._parser = parser
        self._directory = args.checkpoint_dir.absolute()
        self._settings = {name: getattr(args, name) for name in FIXED}
        if jax.process_count() > 1:
            self._check_shared()
        policy = policies.AnySavePolicy(
            [
                policies.FixedIntervalPolicy(args.checkpoint_every),
                policies.PreemptionCheckpointingPolicy(),
            ]
        )
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "progress": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=args.keep,
                save_decision_policy=policy,
                cleanup_tmp_directories=True,  # a killed run may leave them half-written
            ),
        )
        if not args.resume and (steps := self._manager.all_steps()):
            parser.error(
                f"--checkpoint-dir {args.checkpoint_dir} holds a run that came to step "
                f"{max(steps)}: add --resume to go on from there, or name another directory"
            )

    def _check_shared(self) -> None:
        """Ends the program if processes see different directories. A save would then never end."""
        token = multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31)))
        file = self._directory / f"seen-{token}"
        if jax.process_index() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            file.touch()
        multihost_utils.sync_global_devices("touched")
        seen = multihost_utils.process_allgather(np.array(file.exists()))
        if jax.process_index() == 0:
            file.unlink()
        if not seen.all():
            self._parser.error(
                f"--checkpoint-dir {self._directory}: process 0 wrote a file there that processes "
                f"{np.flatnonzero(~seen).tolist()} do not see. Name a directory of a file system "
                "that all machines share"
            )

    def latest(self) -> int | None:
        """The last complete checkpoint, as process 0 sees it.

        Orbax writes a checkpoint under a temporary name, and renames it when it is complete. But a
        directory whose copying was interrupted may have the final name. It is renamed, to be out of
        the way.
        """
        while True:
            # On a network's file system processes may see different files, so process 0 decides.
            newest, is_complete = -1, False
            if jax.process_index() == 0:
                newest = max(self._manager.all_steps(), default=-1)
                is_complete = newest >= 0 and self._is_complete(newest)
            newest, is_complete = multihost_utils.broadcast_one_to_all(
                np.array([newest, is_complete])
            ).tolist()
            if newest < 0:
                return None
            if is_complete:
                return newest
            name = f"incomplete-{newest}-{secrets.token_hex(4)}"
            self._say(f"checkpoint {newest} is incomplete and renamed to {name}")
            if jax.process_index() == 0:
                (self._directory / str(newest)).rename(self._directory / name)
            multihost_utils.sync_global_devices("renamed")
            self._manager.reload()

    def _is_complete(self, step: int) -> bool:
        return self._manager.metadata(step).commit_timestamp_nsecs is not None

    def resume(self, fresh: T, start: Progress, mesh: Mesh) -> tuple[T, Progress]:
        """State and progress of the last complete checkpoint, or those given if there is none.

        Args:
            fresh: state of a new run on `mesh`. It is deleted if there is a checkpoint.
            start: progress of a new run.
            mesh: mesh of all workers.
        """
        step = self.latest()
        if step is None:
            self._say(f"no checkpoint in {self._directory}: from the start")
            return fresh, start
        state, progress = self.restore(step, fresh, mesh)
        self._say(f"resumed after step {progress.step} of {self._settings['steps']}")
        if progress.workers != mesh.size:
            self._say(
                f"{progress.workers} workers saved it: what their residuals hold back is carried "
                f"over to {mesh.size}"
            )
        return state, progress

    def restore(self, step: int, fresh: T, mesh: Mesh) -> tuple[T, Progress]:
        """State and progress that were saved at `step`.

        If the number of workers is still the same, each worker reads its own residuals. Otherwise
        each process reads all residuals into host memory, and keeps the averages that become its
        workers' new residuals.

        Args:
            step: step of a complete checkpoint.
            fresh: state of a new run on `mesh`, for its shapes, dtypes and shardings. It is
                deleted, so that the state that is read can have its memory.
            mesh: mesh of all workers.
        """
        read: Any = ocp.args.Composite
        saved = self._manager.restore(step, args=read(progress=ocp.args.JsonRestore())).progress
        self._check(saved["settings"])
        progress = Progress(**saved["progress"])
        has_moved = progress.workers != mesh.size

        def target(x: jax.Array, spec: PartitionSpec) -> Any:
            if not has_moved or spec == PartitionSpec():
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            shape = (progress.workers, *x.shape[1:])
            return np.broadcast_to(np.zeros((), x.dtype), shape)  # has the memory of one element

        targets = jax.tree.map(target, fresh, jaxsparse.specs(fresh))
        jax.tree.map(lambda x: x.delete(), fresh)
        restored = self._manager.restore(step, args=read(state=ocp.args.StandardRestore(targets)))
        state = jaxsparse.reshard(restored.state, mesh) if has_moved else restored.state
        return state, progress

    def _check(self, settings: dict[str, Any]) -> None:
        """Ends the program if the run that is resumed had other settings."""
        for name, value in self._settings.items():
            if (saved := settings.get(name)) != value:
                flag = "--" + name.replace("_", "-")
                self._parser.error(
                    f"{flag} {value}: the run in {self._directory} has {flag} {saved}. "
                    "Give that to go on with it, or name another --checkpoint-dir"
                )

    def save(self, state: Any, progress: Progress) -> None:
        """Saves if a checkpoint is due. Call it after each step, in all processes."""
        if progress.step != self._settings["steps"] and not self._manager.should_save(
            progress.step
        ):
            return
        saved = {"settings": self._settings, "progress": progress._asdict()}
        # Arrays are copied before this returns, so donation may overwrite them. Files come later.
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(saved)
            ),
            force=True,
        )

    def _say(self, text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    def close(self) -> None:
        """Waits until all checkpoints are written.

        Do not call it on an error: it would wait for processes that may be gone.
        """
        self._manager.close()
