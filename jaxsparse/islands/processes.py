"""Several processes of one island: the first one talks to the store, and all others follow it.

What an island does depends on the store's answers and on a clock. `lead` asks in the first process
alone, and tells the others what it found, or which error was raised. Bytes that were read go to the
others by the devices' own network (`spread`), and not once more over the slow link.

Collectives must start in the same order in all processes. So all that is here, and all compiled
programs, run in main threads. A thread of the first process may wait for other islands for hours,
which would end a collective. So words go through the key-value store of `jax.distributed`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from jaxsparse.islands.records import Decision
from jaxsparse.islands.store import UnreachableError
from jaxsparse.processes.agreement import compare_texts
from jaxsparse.processes.group import ProcessGroup, whole_group

P = ParamSpec("P")
T = TypeVar("T")

_BLOCK = 2**26  # bytes that travel at once, so that devices need little room for them
# Errors that are raised alike in all processes. Others are RuntimeErrors where they are only told.
_ERRORS = {each.__name__: each for each in (UnreachableError, PermissionError, ValueError)}

_Plain = Decision | str | bool | int | float | None


# What a function returned, and name and text of the error that it raised, or nothing.
_Told = tuple[_Plain | list[_Plain], str, str]


def is_first() -> bool:
    """Whether this process talks to the store."""
    return jax.process_index() == 0


def lead(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What a function returns or raises in the first process, in all of them, in the same order.

    That is a `Decision`, a number, a text, None, or a list of such. (Tuples become lists.)
    """
    if jax.process_count() == 1:
        return function(*args, **named)
    group = _group()
    if not is_first():
        found, kind, text = msgspec.json.decode(group.announce(None), type=_Told)
        if not kind:
            return cast(T, found)
        error = _ERRORS[kind](text) if kind in _ERRORS else RuntimeError(f"{kind}: {text}")
        error.add_note("It was raised in process 0 of this island, which talks to the store")
        raise error
    tell = lambda *told: group.announce(msgspec.json.encode(told).decode())
    try:
        result = function(*args, **named)
    except BaseException as error:
        tell(None, type(error).__name__, str(error))
        raise
    tell(result, "", "")
    return result


def broadcast(arrays: Sequence[np.ndarray], like: Sequence[Any]) -> Iterator[np.ndarray]:
    """The arrays of the first process, `like` these in shape and dtype, in all of them."""
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


def check_alike(settings: Mapping[str, Any], params: Any) -> None:
    """Raises unless the processes of this island begin alike, on parameters spread over all.

    RuntimeError: settings differ, or a process does not come within the limit of
    `jaxsparse.fail_at_once`. ValueError: parameters are those of single processes.
    """
    if jax.process_count() == 1:
        return
    wrong = _misplaced(params)
    texts = [f"{key}={value}" for key, value in settings.items()]
    compare_texts(_group(), "join", [*texts, wrong])
    if wrong:
        raise ValueError(wrong)


def check_weight(weight: float) -> None:
    """Raises RuntimeError in all processes of this island unless it is the same in each."""
    if jax.process_count() == 1:
        return
    own = np.array([weight]).view(np.uint32)  # devices may have no float64
    found = multihost_utils.process_allgather(own).view(np.float64).ravel().tolist()
    if len({*found}) > 1:
        raise RuntimeError(
            f"steps of this island weigh {found} in its processes since the last message that "
            "counted, and an island has one weight: give weight= the same number in all of them, "
            "as float(jnp.sum(mask)) is for a mask that is spread over all devices, and not that "
            "of a process's own rows"
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


def _group() -> ProcessGroup:
    group = whole_group()
    if group is None:
        raise ValueError(
            f"this island has {jax.process_count()} processes, which can't leave notes: start them "
            "by jax.distributed.initialize()"
        )
    return group
