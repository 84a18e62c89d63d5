"""Several processes of one island: the first one talks to the store, and all others follow it.

What an island does depends on the store's answers and on a clock. All else is computed, and alike
in all processes. So `lead` asks in the first process alone, and tells the others what it found, or
which error was raised. Then all processes do the same, in the same order, errors with it.

Others don't read from the store themselves: the bytes would cross the slow link once a process, and
an object may be deleted between two reads. Bytes go from the first process to the others by the
devices' own network (`spread`).

Collectives must start in the same order in all processes. So all that is here, and all compiled
programs, run in main threads. A thread of the first process may talk to the store meanwhile.

Words go through the key-value store of `jax.distributed` and by no collective, because the first
process may wait for other islands for minutes or hours. Collectives that wait so long are ended.

One process leads itself: it calls the function, and keeps the arrays.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from jaxsparse.islands.protocol import GoneError
from jaxsparse.islands.records import Decision
from jaxsparse.islands.store import UnreachableError
from jaxsparse.processes.group import Group, whole_group

P = ParamSpec("P")
T = TypeVar("T")

_BLOCK = 2**26  # bytes that travel at once, so that devices need little room for them
# Errors that are raised alike in all processes. Others are RuntimeErrors where they are only told.
_ERRORS = {
    each.__name__: each for each in (UnreachableError, GoneError, PermissionError, ValueError)
}

_Plain = Decision | str | bool | int | float | None


class _Told(msgspec.Struct):
    """What a function returned or raised in the first process."""

    found: _Plain | list[_Plain] = None
    error: str = ""
    text: str = ""


def is_first() -> bool:
    """Whether this process talks to the store."""
    return jax.process_index() == 0


def lead(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What a function returns or raises in the first process, in all of them.

    Call it in all processes, in the same order. The result is a `Decision`, a number, a text, None,
    or a list of such. (Tuples become lists.)
    """
    if jax.process_count() == 1:
        return function(*args, **named)
    group = _group()
    if not is_first():
        return _hear(msgspec.json.decode(group.announce(None), type=_Told))
    try:
        found = function(*args, **named)
    except BaseException as error:
        _tell(group, _Told(error=type(error).__name__, text=str(error)))
        raise
    _tell(group, _Told(found))  # type: ignore[arg-type]
    return found


def _tell(group: Group, told: _Told) -> None:
    group.announce(msgspec.json.encode(told).decode())


def _hear(told: _Told) -> Any:
    if not told.error:
        return told.found
    kind = _ERRORS.get(told.error)
    error = kind(told.text) if kind else RuntimeError(f"{told.error}: {told.text}")
    error.add_note("It was raised in process 0 of this island, which talks to the store")
    raise error


def spread(arrays: Sequence[np.ndarray], like: Sequence[Any]) -> Iterator[np.ndarray]:
    """The arrays of the first process, in all of them, one by one.

    Those of others don't matter. All processes have arrays `like` these in shape and dtype.
    """
    if jax.process_count() == 1:
        yield from arrays
        return
    for i, x in enumerate(like):
        size = x.size * x.dtype.itemsize
        if is_first():
            data = np.ascontiguousarray(arrays[i]).reshape(-1).view(np.uint8)
        else:
            data = np.empty(size, np.uint8)
        for start in range(0, size, _BLOCK):
            part = data[start : start + _BLOCK]
            # Powers of two, so that few programs are compiled.
            block = np.zeros(1 << (part.size - 1).bit_length(), np.uint8)
            block[: part.size] = part
            heard = multihost_utils.broadcast_one_to_all(block)
            if not is_first():
                part[:] = heard[: part.size]
        yield data.view(x.dtype).reshape(x.shape)


def gather(x: Any) -> np.ndarray:
    """An array that may be spread over the devices of several processes, in each of them."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def check_alike(settings: Any, params: Any) -> None:
    """Compares how the processes of this island begin.

    Args:
        settings: what they must have in common, in JSON's types.
        params: their parameters, each of which must be spread over devices of all processes.

    Raises:
        ValueError: processes differ, or parameters are those of single processes.
        RuntimeError: a process does not come within the limit of `jaxsparse.fail_at_once`.
    """
    if jax.process_count() == 1:
        return
    group = _group()
    topic = group.topic()
    group.put(topic, msgspec.json.encode([_misplaced(params), settings], enc_hook=str).decode())
    notes = group.get(topic, group.members)
    missing = [str(i) for i, note in enumerate(notes) if note is None]
    if missing:
        raise RuntimeError(
            f"process {', '.join(missing)} of this island did not join within {group.limit:g} s: "
            "all of its processes call join, and then the same steps in the same order"
        )
    said = [msgspec.json.decode(note) for note in notes if note is not None]
    for error, theirs in said:
        if error:
            raise ValueError(error)
        if theirs != said[0][1]:
            i, (key, value) = next(
                (i, item)
                for i, (_, other) in enumerate(said)
                for item in other.items()
                if item[1] != said[0][1][item[0]]
            )
            raise ValueError(
                f"process {i} of this island has {key}={value!r}, and process 0 has "
                f"{said[0][1][key]!r}: start all processes of an island alike"
            )


def _misplaced(params: Any) -> str:
    """What is wrong with the devices of parameters, or nothing."""
    everywhere = set(range(jax.process_count()))
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        devices = x.sharding.device_set if isinstance(x, jax.Array) else ()
        there = {device.process_index for device in devices}  # type: ignore[attr-defined]
        if there != everywhere:
            return (
                f"parameters{jax.tree_util.keystr(path)} are on devices of {len(there)} of this "
                f"island's {len(everywhere)} processes: make them on a mesh of all, as by "
                "jax.make_array_from_callback, or by jax.jit with out_shardings"
            )
    return ""


def _group() -> Group:
    group = whole_group()
    if group is None:
        raise ValueError(
            f"this island has {jax.process_count()} processes, which can't leave notes: start them "
            "by jax.distributed.initialize()"
        )
    return group
