"""The processes of a mesh: the notes that they leave each other, and a watch over who stays behind.

A collective waits for ever if one process does not join it, so nothing here is one. Processes leave
notes in the key-value store of JAX's coordination service, which also serves processes whose
devices wait. Each counts the calls of steps that it begins. A thread publishes the count, and ends
the process once counts differ and have not moved for a time: some process left out a step, or is
stuck elsewhere. Steps themselves do nothing but count.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from jaxsparse.comm import compat

_LONGEST = 2**31 - 1  # milliseconds that JAX can wait for a note
# The watch looks so often within its limit, but at least once in so many seconds.
_LOOKS, _PERIOD = 20, 5.0
_LAST_NOTE = 2.0  # seconds that the end of a watch may take
_LISTEN = 1.0  # seconds from one look for an announcement to the next, so that signals are heard
_SILENT = 10.0  # seconds of waiting for another process before a line of the log says so
_KEPT = 64  # so many announcements, and at most twice as many, are kept for those who lag

_LOG = logging.getLogger("jaxsparse")
_groups: dict[tuple[int, ...], "ProcessGroup"] = {}


class ProcessGroup:
    """The processes that hold devices of one mesh, by their numbers.

    Attributes:
        limit: seconds to wait for another process, see `watched`. None: for ever.
    """

    limit: ClassVar[float | None] = 600.0

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self._place = f"jaxsparse/{zlib.crc32(repr(members).encode())}"
        self._topics = self._calls = 0
        self._announced = self._dropped = 0
        self._step = "nothing"
        self._published = ""
        self._unmoved: dict[int, tuple[str, int]] = {}  # what each said, and in how many looks

    def begin(self, step: str) -> None:
        self._calls, self._step = self._calls + 1, step

    def meet(self, call: str) -> None:
        """Waits until all members make this call, whose collectives would wait without a word.

        It logs a warning once it has waited for a while, and raises RuntimeError after the limit.
        """
        self.begin(call)
        fix = (
            f"{call} communicates, so all processes must call it, equally often. Call it outside "
            "of `if jax.process_index() == 0:`, and print inside"
        )
        waiting = f"process {jax.process_index()} has waited for others in {call} for %g s. {fix}"
        warning = threading.Timer(_SILENT, _LOG.warning, (waiting, _SILENT))
        warning.daemon = True
        warning.start()
        limit = _LONGEST if self.limit is None else min(_LONGEST, max(1, int(1000 * self.limit)))
        try:
            compat.shared_store().wait_at_barrier(
                f"{self._place}/{self._calls} {call}", limit, list(self.members)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise RuntimeError(f"{waiting % self.limit}. JAX says: {error}") from None
        finally:
            warning.cancel()

    def topic(self) -> str:
        """A new word for notes. Members that do the same things in the same order get the same."""
        self._topics += 1
        return f"{self._topics}"

    def put(self, topic: str, note: str) -> None:
        key = f"{self._place}/{topic}/{jax.process_index()}"
        compat.shared_store().key_value_set_bytes(key, zlib.compress(note.encode()), True)

    def get(
        self, topic: str, processes: Sequence[int], seconds: float | None = None
    ) -> list[str | None]:
        """The notes of processes, as soon as all are there, or None for those that are late.

        `seconds` replaces the limit.
        """
        limit = self.limit if seconds is None else seconds
        start, store = time.monotonic(), compat.shared_store()
        keys, notes = [f"{self._place}/{topic}/{process}" for process in processes], {}
        try:
            for key in keys:
                rest = _LONGEST
                if limit is not None:
                    rest = min(_LONGEST, max(1, int(1000 * (limit - time.monotonic() + start))))
                notes[key] = store.blocking_key_value_get_bytes(key, rest)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            # One who is late must not make others late, whose notes are there: no time is left to
            # wait for an answer about each, so look once at all.
            notes = dict(store.key_value_dir_get_bytes(f"{self._place}/{topic}/"))
        return [zlib.decompress(notes[key]).decode() if key in notes else None for key in keys]

    def announce(self, note: str | None) -> str:
        """The note of the first member, for all. The others give None, and wait for it.

        They wait as long as it takes. If the first process dies, JAX ends the others.
        """
        number, first = self._announced, self.members[0]
        self._announced += 1
        topic, is_time = f"announced {number}", number % _KEPT == 0
        if note is not None:
            self.put(topic, note)
            if is_time:
                self._drop_old()
            return note
        while (found := self.get(topic, [first], _LISTEN)[0]) is None:
            pass
        if is_time:
            self.put("heard", f"{number}")
        return found

    def _drop_old(self) -> None:
        """Deletes announcements that all others have heard. They would fill the store."""
        store = compat.shared_store()
        notes = store.key_value_dir_get_bytes(f"{self._place}/heard/")
        if len(notes) < len(self.members) - 1:
            return
        heard = min(int(zlib.decompress(note)) for _, note in notes)
        for number in range(self._dropped, heard):
            store.key_value_delete(f"{self._place}/announced {number}/{self.members[0]}")
        self._dropped = max(self._dropped, heard)

    def publish(self) -> bool:
        """Tells the others how far this process has come. Returns whether that is news."""
        said = f"{self._calls} calls, the last of {self._step}"
        if said == self._published:
            return False
        self.put("calls", said)
        self._published = said
        return True

    def apart(self, looks: int) -> str | None:
        """How far members have come, if they differ and have not moved for so many looks."""
        if self.publish():
            self._unmoved = {}
            return None
        notes = compat.shared_store().key_value_dir_get_bytes(f"{self._place}/calls/")
        for key, note in notes:
            process, said = int(key.rpartition("/")[2]), zlib.decompress(note).decode()
            before, count = self._unmoved.get(process, ("", 0))
            self._unmoved[process] = (said, count + 1 if said == before else 1)
        stuck = {p: said for p, (said, count) in self._unmoved.items() if count > looks}
        if len(set(stuck.values())) < 2 or jax.process_index() not in stuck:
            return None
        return "; ".join(f"process {p} began {said}" for p, said in sorted(stuck.items()))


def group_of(mesh: Mesh) -> ProcessGroup | None:
    """The processes of a mesh. None if it is a single one, or if they can't leave notes."""
    return _group(tuple(sorted({device.process_index for device in mesh.devices.flat})))


def group_with(tree: Any) -> ProcessGroup | None:
    """The processes that hold the arrays of a tree. None if it is a single one."""
    arrays = [
        x
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    ]
    devices: set[Any] = {device for x in arrays for device in x.sharding.device_set}
    return _group(tuple(sorted({device.process_index for device in devices})))


def whole_group() -> ProcessGroup | None:
    """All processes of the run. None if it is a single one, or if they can't leave notes."""
    if compat.shared_store() is None:
        return None  # counting processes would start JAX, which may be too early
    return _group(tuple(range(jax.process_count())))


def _group(members: tuple[int, ...]) -> ProcessGroup | None:
    if len(members) < 2 or compat.shared_store() is None:
        return None
    return _groups.setdefault(members, ProcessGroup(members))


@contextlib.contextmanager
def watched(limit: float | None) -> Iterator[None]:
    """Ends this process if, inside, members of a group stay apart for `limit` seconds."""
    before, ProcessGroup.limit = ProcessGroup.limit, limit
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(limit, done), daemon=True)
    if limit is not None:
        watch.start()
    try:
        yield
    finally:
        done.set()
        ProcessGroup.limit = before
        if limit is not None:
            # Python aborts at its end if a thread then comes back from C++, as from its last note.
            # The store may not answer, so there is an end to this wait.
            watch.join(_LAST_NOTE)


def _watch(limit: float, done: threading.Event) -> None:
    period = min(limit / _LOOKS, _PERIOD)
    # If the store is gone, JAX ends this process.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        # Looks are counted, because the clock also runs while the machine sleeps.
        while not done.wait(period):
            for group in list(_groups.values()):
                if said := group.apart(round(limit / period)):
                    _leave(said, limit)
        for group in list(_groups.values()):
            group.publish()  # others, who still look, must not take an old count for the last


def _leave(said: str, limit: float) -> None:
    print(
        f"Processes have been apart for {limit:g} s: {said}. One left out a step, or is stuck "
        "elsewhere: jaxsparse.fail_at_once(limit=...) sets how long others wait for it. This "
        f"process, {jax.process_index()}, ends. It is here:",
        file=sys.stderr,
        flush=True,
    )
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(1)
