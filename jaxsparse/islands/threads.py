"""Threads beside training: one for an exchange, one for a snapshot."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jaxsparse.islands.processes import is_first, lead
from jaxsparse.islands.round import Round
from jaxsparse.islands.store import UnreachableError

# Threads that may be at work as Python ends.
_RUNNING: "weakref.WeakSet[Asking]" = weakref.WeakSet()


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


class Asking:
    """A thread that calls `work`, which asks the store, until that returns anything but False.

    `at()` is how far it has come, see `Silence`. `error` is what ended it.
    """

    def __init__(
        self,
        work: Callable[[], bool | None],
        silence: Silence,
        at: Callable[[], Any] = lambda: None,
        name: str = "islands",
    ) -> None:
        self.silence = silence
        self.error: BaseException | None = None
        self._work, self._at, self._name = work, at, name
        # It is waited for by an event. CPython takes a thread for ended if an interrupt comes while
        # it is joined.
        self._is_stopped, self._has_ended = threading.Event(), threading.Event()
        self._has_ended.set()  # no thread is at work

    def start(self) -> None:
        _RUNNING.add(self)
        self._has_ended.clear()
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Waits for its end, at most so long, and hears signals. Returns whether it has ended."""
        end = time.monotonic() + seconds
        while not self._has_ended.wait(min(1.0, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True

    def stop(self, seconds: float) -> bool:
        """Ends it after its present look at the store. Returns whether it has ended in time."""
        self._is_stopped.set()
        return self.wait(seconds)

    def _run(self) -> None:
        try:
            wait = self.silence.wait if self.silence.said else 0.0
            while not self._is_stopped.wait(wait):
                try:
                    if self._work() is not False:
                        return
                    self.silence.end()
                except UnreachableError as error:
                    self.silence.note(error, self._at())
                wait = self.silence.wait
        except BaseException as error:  # for the thread that trains
            self.error = error
        finally:
            self._has_ended.set()


class RunningExchange(Asking):
    """An exchange in a thread.

    Of several processes, the first one has a thread, which does what is the store's alone. The rest
    is done by all, in their main threads and where the result is awaited: see `processes`.
    """

    def __init__(self, exchange: Round, silence: Silence) -> None:
        self.exchange, work = exchange, exchange.advance
        if not _may_compute_in_a_thread(exchange):
            exchange.prepare()
            work = exchange.look
        super().__init__(work, silence, lambda: exchange.round)
        self.start()

    def start(self) -> None:
        if is_first():
            super().start()

    @property
    def trouble(self) -> str | None:
        """Why it does not go on, or None."""
        return self.silence.said or self.exchange.member.rounds.lacks

    def is_silent(self) -> bool:
        """Whether the store does not answer."""
        return self.silence.said is not None

    def is_stuck(self) -> bool:
        """Waits until it is done or the store does not answer. Returns whether that is so."""
        while not self.is_silent() and not self._has_ended.wait(self.silence.wait):
            pass
        return not self._has_ended.is_set()

    def result(self, seconds: float) -> Round | None:
        """The exchange, at its end. None: it has none in these seconds. Raises what ended it."""
        end = time.monotonic() + seconds
        while lead(self._comes_to_its_end, end):
            if self.exchange.is_done or self._finish():
                return self.exchange
            self.start()
        return None

    def _comes_to_its_end(self, end: float) -> bool:
        """Waits for the thread until then."""
        if not self.wait(end - time.monotonic()):
            return False
        if self.error is not None:
            raise self.error
        return not self._is_stopped.is_set() or self.exchange.is_done

    def _finish(self) -> bool:
        """What all processes do once the first one has seen what it needs. Returns whether done."""
        try:
            if self.exchange.advance():
                return True
            self.silence.end()
        except UnreachableError as error:
            lead(self.silence.note, error, self.exchange.round)
        return False


def _may_compute_in_a_thread(exchange: Round) -> bool:
    """Whether programs may start beside those of training.

    Programs with collectives must start in one order on all devices, which two threads don't keep.
    CPUs of one process match collectives by their runs.
    """
    leaves = [x for x in jax.tree.leaves(exchange.shared.params) if isinstance(x, jax.Array)]
    devices = {device for x in leaves for device in x.devices()}
    is_apart = len(devices) > 1 and any(device.platform != "cpu" for device in devices)
    return jax.process_count() == 1 and not is_apart
