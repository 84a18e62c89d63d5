"""Where islands meet: a folder, a bucket, or memory. Four operations are enough.

An object is created once and never changed. One `create` of a key succeeds, and who reads after it
finds the object. Nobody needs to hear whether its own `create` succeeded: it reads what stands
there. Folders, S3, GCS and Azure do that atomically, and so do servers that speak S3.
`docs/islands.md` says what stores promise, and what happens if one does less.
"""

import contextlib
import datetime
import os
import re
from typing import Any, Protocol

import obstore
from obstore import exceptions, store as stores

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

_STATUS = re.compile(r"status code: (\d{3})")  # in obstore's errors

# What an object that is there, or a request at the same time, makes of a create.
_CONFLICTS = exceptions.AlreadyExistsError, exceptions.PreconditionError
_REFUSALS = exceptions.PermissionDeniedError, exceptions.UnauthenticatedError
# What no second attempt mends.
_FINAL = (
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
)

# By the scheme of a URL, how names of obstore's environment variables begin.
_SERVICES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}


class UnreachableError(ConnectionError):
    """The store did not answer, or could not keep what it was given. Trying again may help."""


def not_shown(store: "Objects", what: str) -> UnreachableError:
    """The error of a store that was given something, or has shown it, and does not show it now."""
    return UnreachableError(
        f"{store} does not show {what}: it shows an old state, or does not keep what it is given"
    )


def of_another_run(store: "Objects", what: str, error: Exception) -> ValueError:
    """The error of a store that holds another run."""
    return ValueError(
        f"{store} holds {what} of another run: {error}. Give a run a prefix of its own, and the "
        "same settings to all of its islands"
    )


class Objects(Protocol):
    """What islands need of a store. Keys are relative paths with "/".

    All methods may raise `UnreachableError`, also after they did what was asked for.
    """

    def create(self, key: str, data: bytes) -> bool:
        """Keeps `data` under a key, unless there is an object already. Returns whether it did."""

    def get(self, key: str) -> bytes | None:
        """The object under a key, or None."""

    def names(self, folder: str) -> list[str]:
        """The names of objects right in a folder, sorted."""

    def delete(self, keys: list[str]) -> None:
        """Removes objects. Those that are not there don't matter."""


class Store:
    """An object store behind a URL, by obstore (`pip install 'jaxsparse[islands]'`).

    Args:
        url: a folder, as a path or as "file:///...", "memory://" for tests in one process, or a
            bucket and a prefix: "s3://bucket/run-7", "gs://bucket/run-7", "az://container/run-7".
            Each run has a prefix of its own. Nothing outside of it is read or written.
        options: what `obstore.store.from_url` takes besides, such as `region=`, `config=`,
            `client_options=`, `credential_provider=`. Credentials are found as obstore finds them,
            and never shown.

    Raises:
        ValueError: the URL or an option is not known to obstore. From `create` and `names`: the
            bucket does not exist.
        PermissionError: from all operations, the server refuses these credentials. Once an
            operation has succeeded, such an answer is taken for one that will pass, as after a jump
            of the clock, or while a token is renewed: it is an `UnreachableError`.

    >>> store = Store("memory://")
    >>> store.create("a/b", b"first"), store.create("a/b", b"second"), store.get("a/b")
    (True, False, b'first')
    """

    def __init__(self, url: str | os.PathLike[str], **options: Any) -> None:
        try:
            self.url = os.fspath(url)
            if not self.url:  # it would be the working directory
                raise ValueError('it is empty: give a folder, "memory://" or "s3://bucket/run-7"')
            if self.url.startswith("memory://") and self.url != "memory://":
                raise ValueError('a store in memory has no name: give "memory://"')
            if self.url == "memory://":
                self._store: Any = stores.MemoryStore()
            elif "://" not in self.url:
                self._store = stores.LocalStore(os.path.abspath(self.url), mkdir=True)
            elif self.url.startswith("file://"):
                self._store = stores.LocalStore(self.url.removeprefix("file://"), mkdir=True)
            else:
                # Islands try again themselves, and go on training meanwhile: see `Islands`.
                retries = {"max_retries": 1, "retry_timeout": datetime.timedelta(seconds=10)}
                # A whole request may take long. A server that says nothing for so long is silent.
                client = {"timeout": "1h", "connect_timeout": "10s", "read_timeout": "30s"}
                # With options of its own obstore forgets that the environment allows HTTP.
                service = _SERVICES.get(self.url.split("://")[0], "")
                if allows := os.environ.get(f"{service}_ALLOW_HTTP"):
                    client["allow_http"] = allows
                client |= options.pop("client_options", None) or {}
                options = {"retry_config": retries, **options, "client_options": client}
                self._store = stores.from_url(self.url, **options)
        except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
            raise ValueError(f"url={url!r} is no store: {_first_line(error)}") from error
        self._worked = set[str]()  # operations that have succeeded

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._ask("create", obstore.put, key, data, mode="create", use_multipart=False)
        except FileNotFoundError as error:
            raise self._tell_gone("create", error) from None
        except _CONFLICTS:
            # S3 answers 409 for "try again", too, if a delete or another create came between
            # (ConditionalRequestConflict). obstore makes one error of 409 and 412.
            try:
                self._ask("head", obstore.head, key)
            except FileNotFoundError:
                raise UnreachableError(f"{self} did not take {key!r}, which is not there") from None
            return False
        return True

    def get(self, key: str) -> bytes | None:
        read = lambda store, key: bytes(obstore.get(store, key).bytes())
        try:
            return self._ask("get", read, key)
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        listed = lambda store, folder: obstore.list_with_delimiter(store, folder)["objects"]
        try:
            found = self._ask("names", listed, folder)
        except FileNotFoundError as error:
            raise self._tell_gone("names", error) from None
        return sorted(each["path"].rsplit("/", 1)[-1] for each in found)

    def delete(self, keys: list[str]) -> None:
        try:
            self._ask("delete", obstore.delete, keys)  # S3 takes 1,000 in a request
        except FileNotFoundError:  # a folder's, which may have left the others
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._ask("delete", obstore.delete, key)

    def _ask(self, verb: str, operation: Any, *args: Any, **options: Any) -> Any:
        """What an operation returns. FileNotFoundError: the server says 404, maybe at a retry."""
        try:
            found = operation(self._store, *args, **options)
        except FileNotFoundError:
            raise
        except (exceptions.BaseError, OSError) as error:
            if verb == "create" and isinstance(error, _CONFLICTS):
                raise
            # Of a list, and of a second try, obstore tells the server's answer in words alone.
            match = _STATUS.search(str(error))
            status = match[1] if match else None
            if status == "404":
                raise FileNotFoundError(_first_line(error)) from None
            is_refused = isinstance(error, _REFUSALS) or status in ("401", "403")
            if isinstance(error, _FINAL) or (is_refused and verb not in self._worked):
                raise PermissionError(f"{self} refuses {args[0]!r}: {_first_line(error)}") from None
            raise UnreachableError(f"{self} does not answer: {_first_line(error)}") from None
        self._worked.add(verb)
        return found

    def _tell_gone(self, verb: str, error: FileNotFoundError) -> Exception:
        """The error of a bucket that is not there, or was there and is not shown now."""
        kind = UnreachableError if verb in self._worked else ValueError
        return kind(f"{self} is not there: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    # What follows may hold whole requests.
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_name(name: str) -> str:
    """The name of an island, which is part of its objects' keys. ValueError: it is no such name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"name={name!r} must be 1 to 64 letters, digits, '-' and '_', the first one a letter "
            "or a digit: it is part of file names"
        )
    return name
