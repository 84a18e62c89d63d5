"""moto's S3 server, whose objects outlive its process.

    python benchmarks/s3_server.py --port 5055 --journal objects

moto keeps objects in memory. Here each request that changes something stands in a journal before it
is answered, and a server that starts makes them again. So one that gets SIGKILL and is started
again has all that it ever said it had, as S3 does, and perhaps what it had no time to confirm.
(The kernel writes the file later. What a machine's end would lose is not kept.)

As it starts, it writes the journal anew, with the objects that there are and no past.
"""

import argparse
import contextlib
import io
import os
import pickle
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import s3_backends
from werkzeug.serving import run_simple
from werkzeug.test import create_environ, run_wsgi_app

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


def opened(app: Any, path: Path) -> Journal:
    """`app` with all that the journal holds. The journal is as short as can be after it."""
    for headers, body in records(path):
        run_wsgi_app(app, {**create_environ(data=body), **headers}, buffered=True)
    short = path.with_suffix(".new")
    file = short.open("wb")
    for target, value in objects():
        add(file, create_environ(target, method="PUT", data=value), value or b"")
    os.replace(short, path)
    return Journal(app, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, required=True, help="where it listens")
    parser.add_argument("--journal", type=Path, required=True, help="the file that keeps objects")
    args = parser.parse_args()
    app = opened(DomainDispatcherApplication(create_backend_app), args.journal)
    run_simple("127.0.0.1", args.port, app, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main()
