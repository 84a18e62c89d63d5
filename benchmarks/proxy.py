"""A TCP proxy with a rate for each port and direction, which counts bytes and requests to S3.

    python benchmarks/proxy.py --ports 5056 5057 --to 5055 --rate 12.5e6 --counts counts

All connections of a port share its rate, as those of a machine share its link. So links are shaped
without root. What a port has passed on stands in the file `--counts`, which outlives the process:
int64[ports, kinds, 3], bytes to the server, bytes from it, and requests, by what was asked for
(`KINDS`). All bytes of a connection from one request to the next, headers with them, are of its
kind. Nothing delays small messages.
"""

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

TO_SERVER, FROM_SERVER, REQUESTS = range(3)
# An operation, and what it is for. What is deleted stands in the body of a POST.
_FOLDERS = ("messages", "decisions", "snapshots")
KINDS = (
    *(f"{operation} {folder}" for operation in ("create", "get", "names") for folder in _FOLDERS),
    "delete",
    "other",
)
_OPERATIONS = {"PUT": "create", "GET": "get"}
_BURST = 64 * 1024  # bytes that pass at once after a pause, as from a network card's buffer
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Bucket:
    """A token bucket: in t seconds it lets at most burst + rate t bytes through.

    Args:
        rate: bytes a second.
        burst: bytes that it holds when it is full.
        clock: seconds, for differences alone.
    """

    def __init__(
        self, rate: float, burst: float = _BURST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = burst, clock()

    def delay(self, size: int) -> float:
        """Takes the tokens of `size` bytes. Returns the seconds after which these may pass."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + self._rate * (now - self._at)) - size
        self._at = now
        return max(0.0, -self._tokens / self._rate)


def kind_of(head: bytes) -> int:
    """The place in `KINDS` of a request, from its header."""
    method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
    target = rest.split(" ")[0]
    operation = "names" if "list-type=" in target else _OPERATIONS.get(method, "other")
    folder = next((each for each in _FOLDERS if each in target), "")
    kind = "delete" if target.endswith("?delete") else f"{operation} {folder}"
    return KINDS.index(kind if kind in KINDS else "other")


class Requests:
    """The HTTP requests of a connection. A body has the length that its header says.

    Attributes:
        kind: of the last one, the place in `KINDS`.
    """

    def __init__(self) -> None:
        self.kind = len(KINDS) - 1
        self._head, self._body = b"", 0  # what came of a header, what is missing of a body

    def add(self, data: bytes) -> list[int]:
        """Takes the next bytes, however they are cut. Returns the kinds of requests in them.

        A request counts when its header is there.
        """
        kinds: list[int] = []
        while data:
            skipped = min(self._body, len(data))
            self._body, data = self._body - skipped, data[skipped:]
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                break
            found = _LENGTH.search(head)
            self._head, self._body, self.kind = b"", int(found[1]) if found else 0, kind_of(head)
            kinds.append(self.kind)
        return kinds


async def serve(ports: list[int], to: int, rate: float, counts: np.ndarray) -> None:
    """Passes on what comes, for ever."""

    async def passed(
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bucket: Bucket,
        count: Callable[[bytes], None],
    ) -> None:
        while data := await reader.read(16 * 1024):
            await asyncio.sleep(bucket.delay(len(data)))
            count(data)
            writer.write(data)
            await writer.drain()

    def server(i: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        upward, downward = Bucket(rate), Bucket(rate)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests = Requests()

            def count_up(data: bytes) -> None:
                for kind in requests.add(data):
                    counts[i, kind, REQUESTS] += 1
                counts[i, requests.kind, TO_SERVER] += len(data)

            def count_down(data: bytes) -> None:
                counts[i, requests.kind, FROM_SERVER] += len(data)

            writers = [writer]
            with contextlib.suppress(OSError):
                back, there = await asyncio.open_connection("127.0.0.1", to)
                writers.append(there)
                both = [
                    asyncio.create_task(passed(reader, there, upward, count_up)),
                    asyncio.create_task(passed(back, writer, downward, count_down)),
                ]
                # Once one side is closed, so is the other.
                _, rest = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in rest:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
            for each in writers:
                each.close()

        return connected

    servers = [
        await asyncio.start_server(server(i), "127.0.0.1", port) for i, port in enumerate(ports)
    ]
    await asyncio.gather(*(each.serve_forever() for each in servers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ports", type=int, nargs="+", required=True, help="where it listens, one for each link")
    add("--to", type=int, required=True, help="the server's port, on this machine")
    add("--rate", type=float, required=True, help="bytes a second, each way")
    add("--counts", type=Path, required=True, help="a file that keeps what was counted")
    args = parser.parse_args()
    asyncio.run(serve(args.ports, args.to, args.rate, opened(args.counts, len(args.ports))))


def opened(path: Path, ports: int) -> np.ndarray:
    """The counts in a file, which is made if it is not there."""
    shape = (ports, len(KINDS), 3)
    return np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=shape)


if __name__ == "__main__":
    main()
