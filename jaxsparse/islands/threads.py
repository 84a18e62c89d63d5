"""Threads beside training: one for an exchange, one for a snapshot."""

import atexit
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jaxsparse.islands.exchange import Exchange
from jaxsparse.islands.processes import is_first, lead
from jaxsparse.islands.store import UnreachableError

# Exchanges whose threads may be at work as Python ends.
_RUNNING: "weakref.WeakSet[RunningExchange]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that comes back from a store's call once Python has ended would abort it."""
    for running in list(_RUNNING):
        running.stop(5.0)


class Silence:
    """How long a store has not answered.

    Attributes:
        said: what it said last, or None if it has answered since.
        wait: seconds until it is asked once more.
    """

    def __init__(self, poll: float, patience: float) -> None:
        self._poll, self._patience, self.wait = poll, patience, poll
        self.said: str | None = None
        self._since, self._at = 0.0, None

    def end(self) -> None:
        self.wait, self.said = self._poll, None

    def note(self, error: UnreachableError, at: Any = None) -> None:
        """Notes an error. Raises it once the store has been silent for `patience` seconds.

        `at` is how far the work has come. If that is further than at the error before, the store
        has answered meanwhile: a long replay may meet an error now and then.
        """
        now = time.monotonic()
        if self.said is None or at != self._at:
            self._since, self._at, self.wait = now, at, self._poll
        self.said = str(error)
        self.wait = min(2 * self.wait + 0.01, 10.0)
        if now - self._since > self._patience:
            raise error


class Writer:
    """Writes snapshots in a thread, one at a time, so that training does not wait for them.

    If the store is silent for `patience` seconds, the snapshot is left out, with a warning. Others
    write theirs.
    """

    def __init__(self, name: str, poll: float, patience: float) -> None:
        self._name, self._poll, self._patience = name, poll, patience
        # Threads are waited for by events. CPython takes a thread for ended if an interrupt comes
        # while it is joined.
        self._is_idle = threading.Event()
        self._is_idle.set()

    def start(self, write: Callable[[], None]) -> None:
        """Begins to write, unless the last one is still on its way: snapshots are large."""
        if not self._is_idle.is_set():
            return
        self._is_idle.clear()
        threading.Thread(
            target=self._run, args=(write,), name="islands-snapshot", daemon=True
        ).start()

    def wait(self, seconds: float) -> None:
        """Waits until it has written, at most so long."""
        _wait(self._is_idle, seconds)

    def _run(self, write: Callable[[], None]) -> None:
        silence = Silence(self._poll, self._patience)
        try:
            while True:
                try:
                    return write()
                except UnreachableError as error:
                    silence.note(error)
                time.sleep(silence.wait)
        except Exception as error:
            text = f"{self._name} could not write its snapshot, and leaves it out: {error}"
            warnings.warn(text, stacklevel=2)
        finally:
            self._is_idle.set()


def _wait(event: threading.Event, seconds: float) -> bool:
    """Waits for an event, at most so long, and hears signals. Returns whether it is there."""
    end = time.monotonic() + seconds
    while not event.wait(min(1.0, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


class RunningExchange:
    """An exchange in a thread.

    Of several processes, the first one has a thread, which does what is the store's alone. The rest
    is done by all, in their main threads and where the result is awaited: see `processes`.
    """

    def __init__(self, exchange: Exchange, poll: float, patience: float) -> None:
        self.exchange = exchange
        self._poll, self._silence = poll, Silence(poll, patience)
        self._error: BaseException | None = None
        self._is_stopped, self._has_ended = threading.Event(), threading.Event()
        self._has_ended.set()  # no thread is at work
        self._work = exchange.advance
        if not _may_compute_in_a_thread(exchange):
            exchange.prepare()
            self._work = exchange.look
        self._start()

    def _start(self) -> None:
        if is_first():
            _RUNNING.add(self)
            self._has_ended.clear()
            threading.Thread(target=self._run, name="islands", daemon=True).start()

    @property
    def trouble(self) -> str | None:
        """Why it does not go on, or None."""
        return self._silence.said or self.exchange.member.rounds.lacks

    def is_silent(self) -> bool:
        """Whether the store does not answer."""
        return self._silence.said is not None

    def is_stuck(self) -> bool:
        """Waits until it is done or the store does not answer. Returns whether that is so."""
        while not self._has_ended.wait(self._poll) and not self.is_silent():
            pass
        return not self._has_ended.is_set()

    def stop(self, seconds: float) -> bool:
        """Ends the thread, after its present look at the store. Returns whether it has in time."""
        self._is_stopped.set()
        return _wait(self._has_ended, seconds)

    def result(self, seconds: float) -> Exchange | None:
        """The exchange, at its end. None: it has none in these seconds. Raises what ended it."""
        end = time.monotonic() + seconds
        while lead(self._comes_to_its_end, end):
            if self.exchange.is_done or self._finish():
                return self.exchange
            self._start()
        return None

    def _comes_to_its_end(self, end: float) -> bool:
        """Waits for the thread until then."""
        if not _wait(self._has_ended, end - time.monotonic()):
            return False
        if self._error is not None:
            raise self._error
        return not self._is_stopped.is_set() or self.exchange.is_done

    def _finish(self) -> bool:
        """What all processes do once the first one has seen what it needs. Returns whether done."""
        try:
            if self.exchange.advance():
                return True
            self._silence.end()
        except UnreachableError as error:
            lead(self._silence.note, error, self.exchange.round)
        return False

    def _run(self) -> None:
        try:
            wait = self._silence.wait if self.is_silent() else 0.0
            while not self._is_stopped.wait(wait):
                try:
                    if self._work():
                        return
                    self._silence.end()
                except UnreachableError as error:
                    self._silence.note(error, self.exchange.round)
                wait = self._silence.wait
        except BaseException as error:  # for the thread that trains
            self._error = error
        finally:
            self._has_ended.set()


def _may_compute_in_a_thread(exchange: Exchange) -> bool:
    """Whether programs may start beside those of training.

    Programs with collectives must start in one order on all devices, which two threads don't keep.
    CPUs of one process match collectives by their runs.
    """
    leaves = [x for x in jax.tree.leaves(exchange.shared.params) if isinstance(x, jax.Array)]
    devices = {device for x in leaves for device in x.devices()}
    is_apart = len(devices) > 1 and any(device.platform != "cpu" for device in devices)
    return jax.process_count() == 1 and not is_apart
