"""Signals that tell the launcher to stop."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The launcher itself was told to stop."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """A handler that raises `Stopped`."""
    raise Stopped(number)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within it the signals that ask for an end go to `handler`, but for those that are ignored."""
    before = {number: signal.getsignal(number) for number in STOPS}
    mine = [number for number in STOPS if before[number] not in (signal.SIG_IGN, None)]
    try:
        for number in mine:
            signal.signal(number, handler)
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """Puts signals off to its end: an exception in between would forget a process just started."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted by signals
        return
    arrived: list[int] = []
    with handled(lambda number, frame: arrived.append(number)):
        yield
    for number in arrived:
        signal.raise_signal(number)
