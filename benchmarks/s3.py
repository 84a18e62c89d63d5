"""moto's S3 server, whose objects outlive its process, and links to it of a given rate.

    python benchmarks/s3.py server --port 5055 --journal objects
    python benchmarks/s3.py links --ports 5056 5057 --to 5055 --rate 12.5e6 --counts counts

moto keeps objects in memory. Here each request that changes something stands in a journal before it
is answered, and a server that starts makes them again. So one that gets SIGKILL and is started
again has all that it ever said it had, as S3 does, and perhaps what it had no time to confirm.
(The kernel writes the file later. What a machine's end would lose is not kept.) As it starts, it
writes the journal anew, with the objects that there are and no past.

A link is a TCP proxy at a port. All its connections share its rate, as those of a machine do, so
that links are shaped without root. What it has passed on stands in the file `--counts`, which
outlives the process. Nothing delays small messages.
"""

import argparse
import asyncio
import contextlib
import io
import os
import pickle
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np

with contextlib.suppress(ImportError):  # links need none of it
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.moto_server import werkzeug_app
    from moto.s3.models import s3_backends
    from werkzeug import serving
    from werkzeug.test import create_environ, run_wsgi_app

_BURST = 64 * 1024  # bytes that pass at once after a pause, as from a network card's buffer
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHANGING = ("PUT", "POST", "DELETE")


class Journal:
    """A WSGI application around another one, whose changes it keeps in a file.

    Args:
        app: what answers.
        file: of the records, opened to write.
    """

    def __init__(self, app: Any, file: BinaryIO) -> None:
        self._app, self._file, self._lock = app, file, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in CHANGING:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        said: list[Any] = []
        # One at a time, so that the journal has them in the order in which they came true.
        with self._lock:
            parts = self._app(environ, lambda *answer: said.append(answer))
            found = b"".join(parts)
            if said[0][0].startswith("2"):
                add(self._file, environ, body)
        start_response(*said[0])
        return [found]


def add(file: BinaryIO, environ: dict[str, Any], body: bytes) -> None:
    """Appends a request as one record, and hands it to the kernel."""
    headers = {k: v for k, v in environ.items() if isinstance(v, str) and k != "SERVER_SOFTWARE"}
    pickle.dump((headers, body), file)
    file.flush()


def records(path: Path) -> Iterator[tuple[dict[str, str], bytes]]:
    """The requests in a journal. The last one may be cut, and was not answered then."""
    over = (FileNotFoundError, EOFError, pickle.UnpicklingError)
    with contextlib.suppress(*over), path.open("rb") as file:
        while True:
            yield pickle.load(file)


def objects() -> Iterator[tuple[str, bytes | None]]:
    """All buckets and what is in them, as paths, and None or bytes."""
    for bucket in s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.values():
        yield f"/{bucket.name}", None
        for key in list(bucket.keys.values()):
            yield f"/{bucket.name}/{quote(key.name)}", key.value


def restored(app: Any, path: Path) -> Journal:
    """`app` with all that the journal holds. The journal is as short as can be after it."""
    for headers, body in records(path):
        run_wsgi_app(app, {**create_environ(data=body), **headers}, buffered=True)
    short = path.with_suffix(".new")
    file = short.open("wb")
    for target, value in objects():
        add(file, create_environ(target, method="PUT", data=value), value or b"")
    os.replace(short, path)
    return Journal(app, file)


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
                counts[i] += (len(data), 0, requests.add(data))

            def count_down(data: bytes) -> None:
                counts[i] += (0, len(data), 0)

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
    """The counts in a file, which is made if it is not there: int64[ports, 3].

    Bytes to the server, bytes from it, and requests.
    """
    return np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(ports, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("server")
    one.add_argument("--port", type=int, required=True, help="where it listens")
    one.add_argument("--journal", type=Path, required=True, help="the file that keeps objects")
    one = kinds.add_parser("links")
    one.add_argument("--ports", type=int, nargs="+", required=True, help="one for each link")
    one.add_argument("--to", type=int, required=True, help="the server's port, on this machine")
    one.add_argument("--rate", type=float, required=True, help="bytes a second, each way")
    one.add_argument("--counts", type=Path, required=True, help="a file that keeps the counts")
    args = parser.parse_args()
    if args.kind == "links":
        counts = counts_in(args.counts, len(args.ports))
        asyncio.run(serve(args.ports, args.to, args.rate, counts))
        return
    app = restored(
        werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app), args.journal
    )
    handler = werkzeug_app.MotoRequestHandler
    serving.run_simple("127.0.0.1", args.port, app, threaded=True, request_handler=handler)


if __name__ == "__main__":
    main()
