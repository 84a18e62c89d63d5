"""Links of a given rate to a server on this machine: a TCP proxy at a port for each.

    python benchmarks/links.py --ports 5056 5057 --to 5055 --rate 12.5e6 --counts counts

All connections of a link share its rate, as those of a machine do, so that links are shaped without
root. What it has passed on stands in the file `--counts`, which outlives the process. Nothing
delays small messages.
"""

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

_BURST = 64 * 1024  # bytes that pass at once after a pause, as from a network card's buffer
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Bucket:
    """A token bucket: in t seconds it lets at most `_BURST` + rate t bytes through."""

    def __init__(self, rate: float) -> None:
        self._rate, self._tokens, self._at = rate, float(_BURST), time.monotonic()

    def delay(self, size: int) -> float:
        """Takes the tokens of `size` bytes. Returns the seconds after which these may pass."""
        now = time.monotonic()
        self._tokens = min(_BURST, self._tokens + self._rate * (now - self._at)) - size
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class Requests:
    """Counts the HTTP requests of a connection. A body has the length that its header says."""

    def __init__(self) -> None:
        self._head, self._body = b"", 0  # what came of a header, what is missing of a body

    def add(self, data: bytes) -> int:
        """Takes the next bytes, however they are cut. Returns how many headers are whole now."""
        found = 0
        while data:
            skipped = min(self._body, len(data))
            self._body, data = self._body - skipped, data[skipped:]
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                break
            length = _LENGTH.search(head)
            self._head, self._body, found = b"", int(length[1]) if length else 0, found + 1
        return found


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
                counts[i] += (len(data), requests.add(data))

            def count_down(data: bytes) -> None:
                counts[i] += (len(data), 0)

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


def counts_in(path: Path, ports: int) -> np.ndarray:
    """The counts in a file, which is made if it is not there: int64[ports, 2].

    Bytes both ways, and requests.
    """
    return np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(ports, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ports", type=int, nargs="+", required=True, help="one for each link")
    add("--to", type=int, required=True, help="the server's port, on this machine")
    add("--rate", type=float, required=True, help="bytes a second, each way")
    add("--counts", type=Path, required=True, help="a file that keeps the counts")
    args = parser.parse_args()
    counts = counts_in(args.counts, len(args.ports))
    asyncio.run(serve(args.ports, args.to, args.rate, counts))


if __name__ == "__main__":
    main()
