"""The messages that a program sends as it is traced, before XLA optimises it."""

import contextlib
from typing import NamedTuple
from unittest import mock

from jaxsparse.comm import wire

NAMES = ("psum", "pmax", "all_gather", "permute", "all_to_all")


class Message(NamedTuple):
    """One collective."""

    op: str
    payload_bytes: int  # operand bytes that one worker hands over


@contextlib.contextmanager
def record():
    """Collects the messages that are traced inside the block.

    A collective inside a loop is listed once, and every branch of a conditional is listed.
    `jaxsparse.traffic.wire_bytes` counts both right, from the compiled program.
    """
    messages = []

    def recording(name, function):
        def run(x, axis_name, *pairs):
            # A single worker sends nothing, and neither does an empty permutation.
            if axis_name not in (None, ()) and all(pairs):
                messages.append(Message(name, x.size * x.dtype.itemsize))
            return function(x, axis_name, *pairs)

        return run

    with contextlib.ExitStack() as stack:
        for name in NAMES:
            wrapped = recording(name, getattr(wire, name))
            stack.enter_context(mock.patch.object(wire, name, wrapped))
        yield messages
