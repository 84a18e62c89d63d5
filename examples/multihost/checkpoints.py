"""Checkpoints with Orbax: a stopped run goes on, with the same number of workers or another."""

import argparse
import json
import secrets
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import processes
from digits import number
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from locks import HeldError, Lock
from loops import patient_loops
from orbax.checkpoint import checkpoint_managers as policies

import jaxsparse

T = TypeVar("T")

# Flags that determine the model, the method's state, the learning rates and the order of the data.
FIXED = (
    *("method", "density", "compression", "momentum", "local_steps", "outer_lr"),
    *("steps", "batch_size", "lr", "hidden", "seed"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-dir", type=Path, metavar="DIR",
        help="where to save; all processes must see it")  # fmt: skip
    add("--checkpoint-every", type=number(int, 1), default=20, metavar="STEPS", help="the last "
        "step is saved as well, and a step at which a preemption is announced "
        "(default: 20)")  # fmt: skip
    add("--keep", type=number(int, 1), default=2, metavar="N", help="the last N only (default: 2)")
    add("--resume", action="store_true",
        help="go on from the last good checkpoint, if there is one")  # fmt: skip


class Progress(NamedTuple):
    """The progress of a run, which is saved beside its state."""

    step: int  # number of steps that are done
    workers: int  # number of workers that did the last step
    seconds: float  # seconds of training
    points: list[dict[str, Any]]  # points of the report


class DamagedError(Exception):
    """A checkpoint can't be read, or its content is not what was saved. The message says why."""


class IncompleteError(DamagedError):
    """A checkpoint without the mark that Orbax writes at the end."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, args: argparse.Namespace, parser: argparse.ArgumentParser):
        self._parser = parser
        self._directory = args.checkpoint_dir.absolute()
        self._settings = {name: getattr(args, name) for name in FIXED}
        self._lock = Lock(self._directory)
        self._enter()
        due = policies.FixedIntervalPolicy(args.checkpoint_every)
        policy = policies.AnySavePolicy([due, policies.PreemptionCheckpointingPolicy()])
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
        if not args.resume and (newest := self._newest()) is not None:
            self._lock.release()
            parser.error(
                f"--checkpoint-dir {args.checkpoint_dir} holds a run that came to step "
                f"{newest}: add --resume to go on from there, or name another directory"
            )

    def _enter(self) -> None:
        """Locks the directory. Ends the program if it can't be used.

        If processes saw different directories, a save would never end.
        """
        flag = f"--checkpoint-dir {self._directory}"
        token = str(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
        error = ""
        if jax.process_index() == 0:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._lock.take(token, self._say)
            except HeldError as held:
                error = str(held)
            except OSError as failed:
                error = f"{failed.strerror}. Name a directory that this user can write to"
        if error := processes.first_error(error):
            self._parser.error(f"{flag}: {error}")
        shares = jax.process_index() == 0 or self._lock.share(token)
        seen = np.atleast_1d(multihost_utils.process_allgather(np.array(shares)))
        if not seen.all():
            self._parser.error(
                f"{flag}: process 0 wrote a file there that processes "
                f"{np.flatnonzero(~seen).tolist()} do not see. Name a directory of a file system "
                "that all machines share"
            )

    def _newest(self, before: int = sys.maxsize) -> int | None:
        """The step of the newest checkpoint before the step given, as process 0 sees it.

        On a network's file system processes may see different files.
        """
        step = max((step for step in self._manager.all_steps() if step < before), default=-1)
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        return None if step < 0 else step

    def resume(self, fresh: T, start: Progress, mesh: Mesh) -> tuple[T, Progress]:
        """State and progress of the last good checkpoint, or those given if there is none.

        Orbax writes a checkpoint under a temporary name, and renames it when it is complete. But
        files may be lost or damaged later, and a directory whose copying was interrupted may have
        the final name. Such checkpoints are renamed, to be out of the way, once an older one is
        good. If none is, the program ends, and changes nothing.

        Args:
            fresh: state of a new run on `mesh`, for its shapes, dtypes and shardings. It is
                deleted if there is a checkpoint, so that the state that is read can have its
                memory.
            start: progress of a new run.
            mesh: mesh of all workers.
        """
        step = self._newest()
        if step is None:
            self._say(f"no checkpoint in {self._directory}: from the start")
            return fresh, start

        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, jaxsparse.checksums.attach(fresh))
        jax.tree.map(lambda x: x.delete(), fresh)
        damaged: dict[int, DamagedError] = {}
        while step is not None:
            try:
                state, progress = self._restore(step, like, mesh)
                break
            except DamagedError as error:
                damaged[step] = error.with_traceback(None)
                step = self._newest(before=step)
        else:
            listed = "\n".join(f"  {step}: {why}" for step, why in damaged.items())
            self._parser.error(
                f"--resume: no checkpoint in {self._directory} is good:\n{listed}\n"
                "Repair one, or name another --checkpoint-dir to start again"
            )
        for step, why in damaged.items():
            kind = "incomplete" if isinstance(why, IncompleteError) else "damaged"
            name = f"{kind}-{step}-{secrets.token_hex(4)}"
            self._say(f"checkpoint {step} is {kind} and renamed to {name}: {why}")
            if jax.process_index() == 0:
                (self._directory / str(step)).rename(self._directory / name)
        if damaged:
            multihost_utils.sync_global_devices("renamed")
            self._manager.reload()
        self._say(f"resumed after step {progress.step} of {self._settings['steps']}")
        if progress.workers != mesh.size:
            self._say(
                f"{progress.workers} workers saved it: what their residuals hold back is carried "
                f"over to {mesh.size}"
            )
        return state, progress

    def _restore(self, step: int, like: Any, mesh: Mesh) -> tuple[Any, Progress]:
        """State and progress that were saved at `step`. All processes agree on the outcome.

        If the number of workers is still the same, each worker reads its own residuals. Otherwise
        each process reads all residuals into host memory, and keeps the averages that become its
        workers' new residuals.

        Raises:
            DamagedError: the checkpoint is not what was saved.
        """
        mark = _read(lambda: self._manager.metadata(step).commit_timestamp_nsecs)
        if error := processes.first_error("it has no commit mark" if mark is None else ""):
            raise IncompleteError(error)
        # Orbax's manager makes a process that read its part wait for one that could not, so the
        # handlers read.
        folder = self._manager.directory / str(step)
        saved = _read(lambda: _checked(ocp.JsonCheckpointHandler().restore(folder / "progress")))
        self._compare(saved["settings"], saved["arrays"], _described(like.state))
        progress = Progress(**saved["progress"])
        has_moved = progress.workers != mesh.size

        def target(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Any:
            if not has_moved or spec == PartitionSpec():
                return x
            shape = (progress.workers, *x.shape[1:])
            return np.broadcast_to(np.zeros((), x.dtype), shape)  # has the memory of one element

        arguments = ocp.args.StandardRestore(
            jax.tree.map(target, like, jaxsparse.specs(like, inner=False))
        )
        handler = ocp.StandardCheckpointHandler()
        restored = _read(lambda: handler.restore(folder / "state", args=arguments))
        state = _read(lambda: jaxsparse.checksums.verify(restored))
        return (jaxsparse.reshard(state, mesh) if has_moved else state), progress

    def _compare(
        self, settings: dict[str, Any], arrays: dict[str, str], expected: dict[str, str]
    ) -> None:
        """Ends the program if the run that is resumed had other settings or arrays."""
        for name, value in self._settings.items():
            if (saved := settings.get(name)) != value:
                flag = "--" + name.replace("_", "-")
                self._parser.error(
                    f"{flag} {value}: the run in {self._directory} has {flag} {saved}. "
                    "Give that to go on with it, or name another --checkpoint-dir"
                )
        for name in [*expected, *arrays]:
            if (saved := arrays.get(name)) != (own := expected.get(name)):
                self._parser.error(
                    f"--resume: the run in {self._directory} has {saved or 'nothing'} at "
                    f"{name}, and this program has {own or 'nothing'} there. Go on with the "
                    "program that saved it, or name another --checkpoint-dir"
                )

    def save(self, state: Any, progress: Progress) -> None:
        """Saves if a checkpoint is due. Call it after each step, in all processes."""
        if progress.step != self._settings["steps"] and not self._manager.should_save(
            progress.step
        ):
            return
        saved = {
            "settings": self._settings,
            "progress": progress._asdict(),
            "arrays": _described(state),
        }
        # Arrays are copied before this returns, so donation may overwrite them. Files come later.
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(jaxsparse.checksums.attach(state)),
                progress=ocp.args.JsonSave({**saved, "crc32": _crc32(saved)}),
            ),
            force=True,
        )

    def _say(self, text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    def close(self) -> None:
        """Waits until all checkpoints are written, and unlocks the directory.

        Do not call it on an error: it would wait for processes that may be gone.
        """
        self._manager.close()
        self._lock.release()


def _read(read: Callable[[], T]) -> T:
    """What `read` returns in this process.

    Raises:
        DamagedError: it failed in a process, this one or another. All processes raise this.
    """
    own = ""
    try:
        with patient_loops():
            result = read()
    except Exception as failed:
        own = f"{type(failed).__name__}: {failed}".partition("\n")[0][:200]
    if error := processes.first_error(own):
        raise DamagedError(error)
    return result


def _checked(saved: dict[str, Any]) -> dict[str, Any]:
    """What was saved beside the state, if its checksum is right."""
    expected = saved.pop("crc32")
    if _crc32(saved) != expected:
        raise ValueError("the file of the progress is not as saved")
    return saved


def _crc32(saved: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(saved, sort_keys=True).encode())


def _described(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array. A per-worker array has those of a worker's row."""

    def describe(x: Any, spec: PartitionSpec) -> str:
        shape = x.shape if spec == PartitionSpec() else x.shape[1:]
        return f"{x.dtype}{list(shape)}"

    found = jax.tree.map(describe, tree, jaxsparse.specs(tree, inner=False))
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
