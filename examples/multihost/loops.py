"""An event loop for libraries that close theirs while some of its tasks still run."""

import asyncio
import contextlib
from collections.abc import Iterator
from unittest import mock


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for all its tasks before it closes."""

    def close(self) -> None:
        while not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextlib.contextmanager
def patient_loops() -> Iterator[None]:
    """Makes new event loops wait for all their tasks.

    If Orbax can't read one array, it closes its loop while it still reads others. Python then says
    of each, at any later time, that it was never awaited or that the loop is closed.
    """
    with mock.patch("asyncio.new_event_loop", PatientLoop):
        yield
