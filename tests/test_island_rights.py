"""What a store asks of a server that speaks S3. docs/islands.md names the rights for it."""

import http.server
import threading

import pytest

from jaxsparse.islands import Store, UnreachableError

LISTED = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
DELETED = b"<DeleteResult><Deleted><Key>run/a/b</Key></Deleted></DeleteResult>"


class Server(http.server.BaseHTTPRequestHandler):
    """Notes what it is asked for."""

    def asked(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, self.headers.get("If-None-Match")))
        answer = {"PUT": b"", "POST": DELETED, "HEAD": b""}.get(self.command, LISTED)
        if self.server.breaks_off:
            self.server.breaks_off, self.server.says = False, {"GET": 404}
            self.send_response(200)
            self.send_header("ETag", '"0"')
            self.send_header("Last-Modified", "Wed, 25 Nov 2026 12:00:00 GMT")
            self.send_header("Content-Length", str(2 * len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            self.close_connection = True
            return
        self.send_response(self.server.says.get(self.command, 200))
        for header in (("ETag", '"0"'), ("Last-Modified", "Wed, 25 Nov 2026 12:00:00 GMT")):
            self.send_header(*header)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self):
        self.asked()

    def do_HEAD(self):
        self.asked()

    def do_PUT(self):
        self.asked()

    def do_POST(self):
        self.asked()

    def do_DELETE(self):
        self.asked()

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        found.asked, found.says, found.breaks_off = [], {}, False
        # It looks each hundredth of a second whether it shall end. The usual is half a second.
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()


def opened(server):
    keys = {"access_key_id": "any", "secret_access_key": "any", "region": "us-east-1"}
    config = {**keys, "endpoint": f"http://127.0.0.1:{server.server_port}"}
    return Store("s3://bucket/run", config=config, client_options={"allow_http": True})


def test_the_environment_allows_http(server, monkeypatch):
    keys = {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "REGION": "us-east-1"}
    keys |= {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "ALLOW_HTTP": "true"}
    for key, value in keys.items():
        monkeypatch.setenv(f"AWS_{key}", value)
    assert Store("s3://runs/one").names("messages") == []
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(UnreachableError):
        Store("s3://runs/one").names("messages")


@pytest.mark.parametrize("status", [409, 412])
def test_what_is_not_taken_and_not_there_is_tried_again(status, server):
    """S3 answers 409 if a request came between, and an object need not be there after that."""
    store = opened(server)
    server.says = {"PUT": status}
    assert not store.create("a/b", b"x")
    server.says = {"PUT": status, "HEAD": 404}
    with pytest.raises(UnreachableError, match="did not take 'a/b', which is not there"):
        store.create("a/b", b"x")
    assert [each[0] for each in server.asked] == ["PUT", "HEAD"] * 2


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (401, PermissionError, "refuses 'snapshots'"),
        (403, PermissionError, "refuses 'snapshots'"),
        (404, ValueError, "is not there"),
        (400, UnreachableError, "does not answer"),  # of a token that has run out, for one
    ],
)
def test_wrong_keys_and_buckets_are_not_tried_again(status, error, text, server):
    """Joining begins with a list. It would be tried for `patience` seconds."""
    server.says = {"GET": status}
    with pytest.raises(error, match=text):
        opened(server).names("snapshots")


@pytest.mark.parametrize("status", [401, 403, 404, 409])
def test_what_has_worked_is_tried_again(status, server):
    """A clock that has jumped, or a token that is renewed, ends no training."""
    store = opened(server)
    asks = {
        "create": lambda: store.create("a/b", b"x"),
        "get": lambda: store.get("a/b"),
        "names": lambda: store.names("a"),
        "delete": lambda: store.delete(["a/b", "a/c"]),
    }
    for ask in asks.values():
        ask()
    server.says = dict.fromkeys(["GET", "PUT", "POST"], status)
    answers = {("create", 409): False, ("get", 404): None, ("delete", 404): None}
    for what, ask in asks.items():
        if (what, status) in answers:
            assert ask() is answers[what, status]
        else:
            with pytest.raises(UnreachableError, match=r"does not answer|is not there"):
                ask()
    server.says = {}
    assert store.get("a/b") == LISTED


def test_an_object_that_is_deleted_as_it_is_read_is_not_there(server):
    """The first answer breaks off. The server says 404 to obstore's second try."""
    store = opened(server)
    assert store.get("a/b") == LISTED
    server.breaks_off = True
    assert store.get("a/b") is None
    assert [each[0] for each in server.asked] == ["GET"] * 3


def test_each_operation_is_one_request_of_one_right(server):
    store = opened(server)
    assert store.create("a/b", b"x" * 10**6)
    assert store.get("a/b") == LISTED
    assert store.names("a") == []
    store.delete(["a/b", "a/c", "a/d"])
    listing = server.asked[2]
    assert listing[:1] == ("GET",)
    assert listing[1].startswith("/bucket?")
    assert {"list-type=2", "prefix=run%2Fa%2F"} <= set(listing[1].split("?")[1].split("&"))
    assert [each for each in server.asked if each != listing] == [
        ("PUT", "/bucket/run/a/b", "*"),  # s3:PutObject
        ("GET", "/bucket/run/a/b", None),  # s3:GetObject
        ("POST", "/bucket?delete", None),  # s3:DeleteObject
    ]
