"""The snapshots that islands begin from, and go on from if messages are gone."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save

from jaxsparse.comm.marks import map_marked
from jaxsparse.islands.arithmetic import Shared, place_as, shared_leaves
from jaxsparse.islands.processes import broadcast, gather, is_first, lead
from jaxsparse.islands.protocol import Rounds
from jaxsparse.islands.records import DTYPES, BrokenError, ForeignError, Snapshot
from jaxsparse.islands.store import UnreachableError, not_shown, of_another_run


def make(rounds: Rounds, shared: Shared, round: int) -> bytes:
    """What islands share as a round begins. Only the first process has it."""
    arrays = {path: gather(x) for path, x in shared_leaves(shared)}  # in all processes
    if not is_first():
        return b""
    whole = {path: np.ascontiguousarray(x).reshape(x.shape) for path, x in arrays.items()}
    return Snapshot(round, rounds.settings).to_bytes(save(whole))


def _arrays_of(
    data: bytes, round: int, settings: str, like: Sequence[tuple[str, Any]]
) -> list[np.ndarray]:
    """The arrays of a snapshot, which must be like others with their paths, in their order."""
    _, body = Snapshot.from_bytes(data, round, settings)
    try:
        found = dict(safetensors.deserialize(bytes(body)))
    except safetensors.SafetensorError as error:
        raise BrokenError(f"its arrays can't be read: {error}") from None
    described = {path: (list(x.shape), DTYPES[x.dtype.name]) for path, x in like}
    if described != {path: (each["shape"], each["dtype"]) for path, each in found.items()}:
        raise ForeignError("its arrays are not those of this run")
    return [np.frombuffer(found[path]["data"], x.dtype).reshape(x.shape) for path, x in like]


def read_newest(rounds: Rounds, shared: Shared, after: int = -1) -> tuple[Shared, int] | None:
    """The newest snapshot that can be read, of a round past `after`, and this round.

    `shared` is of the same shapes, and keeps what is this island's own. None: the store lists no
    snapshot. It raises UnreachableError if the store lists some and shows none that can be read,
    and ValueError if all are another run's.
    """
    like, arrays = shared_leaves(shared), list[np.ndarray]()

    def read() -> int | None:
        trouble: Exception | None = None
        for round in reversed(rounds.snapshots()):
            if round <= after:
                break
            data = rounds.snapshot(round)
            if data is None:
                trouble = not_shown(rounds.store, f"the snapshot of round {round} that it lists")
                continue
            try:
                arrays.extend(_arrays_of(data, round, rounds.settings, like))
                return round
            except BrokenError as error:
                text = f"the snapshot of round {round} is left out: {error}"
                warnings.warn(text, stacklevel=2)
                if not isinstance(error, ForeignError):
                    trouble = UnreachableError(f"{rounds.store} shows no whole snapshot: {text}")
                elif trouble is None:
                    trouble = of_another_run(rounds.store, "snapshots", error)
        if trouble is not None:
            raise trouble
        return None

    round = lead(read)
    if round is None:
        return None
    return _with_arrays(shared, broadcast(arrays, [x for _, x in like])), round


def _with_arrays(shared: Shared, arrays: Iterable[np.ndarray]) -> Shared:
    found = iter(arrays)
    return map_marked(lambda x, is_own: x if is_own else place_as(next(found), x), shared)


def find_origin(rounds: Rounds, shared: Shared) -> tuple[Shared, int]:
    """The newest snapshot and its round. If there is none, this island writes the first."""
    found = read_newest(rounds, shared)
    if found is None and lead(rounds.decided, 0) is not None:
        # The run has begun, and a second snapshot of its start would stand there for nothing.
        raise not_shown(rounds.store, "any snapshot of its run")
    if found is None:
        lead(rounds.keep, 0, make(rounds, shared, 0))
        found = read_newest(rounds, shared)  # that of another island, if it was first
    if found is None:
        raise not_shown(rounds.store, "the snapshot of round 0 that it was given")
    return found


def check_run(rounds: Rounds, round: int) -> None:
    """Raises unless the store holds the run of a saved state of this round."""
    # A list may come late. Of a run that has decided nothing yet, the first snapshot tells.
    first = lambda: round == 0 and rounds.snapshot(0) is not None
    has_snapshots = lead(lambda: bool(rounds.snapshots()) or first())
    # Decisions stay for ever, so that of the round before the state's tells which run it is.
    is_its_run = round > 0 and lead(rounds.decided, round - 1) is not None
    if not has_snapshots and not is_its_run:
        raise ValueError(
            f"{rounds.store} holds no run, but the state is of its round {round}: give the URL "
            "of that run, or join with state.worker to begin another one"
        )
    if not has_snapshots:
        raise not_shown(rounds.store, "any snapshot of its run")
    if round and not is_its_run:
        raise UnreachableError(
            f"{rounds.store} does not show the decision of round {round - 1}, but the state is "
            f"of round {round}: it shows an old state, or holds another run. Then give the "
            "URL of the state's run, or join with state.worker"
        )
