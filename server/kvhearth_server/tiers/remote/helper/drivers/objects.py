"""Buckets and directories by obstore: ``s3://``, ``gs://``, ``az://`` and ``file://``."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvhearth_server.tiers.base import Corrupt, Done, Failed, Failure, Missing, Outcome
from kvhearth_server.tiers.remote.helper.drivers.base import (
    DENIED,
    TIMEOUT,
    UNREACHABLE,
    Driver,
    Listed,
    Refused,
    first_line,
    time_class,
    told,
)
from kvhearth_server.tiers.remote.url import RemoteUrl

_CONNECT_S = 2.0
_REQUEST_S = 30.0
"""Bound of the library's own; each call has a shorter deadline."""
_DENIED = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "NoSuchBucket", "RequestTimeTooSkewed"),
    *("ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
)
_LISTED_AT_ONCE = 1000
_T = TypeVar("_T")


class _Away(Exception):
    """A directory is gone, or what was mounted there. The library would make it again."""


class ObjectDriver(Driver):
    """Values of a bucket or a directory.

    Raises:
        Refused: the store cannot be opened as the URL says.
    """

    value_bytes_max = 5_000_000_000
    """Largest object of one S3 PUT."""
    parallel = 8
    portion_max = 8

    def __init__(self, url: RemoteUrl) -> None:
        super().__init__(url)
        self._mounted = url.scheme == "file" and os.path.ismount(url.bucket)

    def _reopen(self) -> None:
        try:
            opened = functools.cache(functools.partial(_open, self.url, _options(self.url)))
            self._store = opened(_REQUEST_S)
        except (BaseError, OSError, ValueError) as error:
            raise Refused(f"{self.url.place} cannot be opened: {first_line(error)}") from None
        self._open = opened

    def _by(self, deadline: float) -> Any:
        """Return the store whose requests end by a deadline. May wait for a file system.

        Raises:
            _Away: there is no such directory now.
        """
        if self.url.scheme == "file":
            here = os.path.ismount if self._mounted else os.path.isdir
            if not here(self.url.bucket):
                raise _Away(f"{self.url.bucket} went away; mount or make it")
            return self._store
        return self._open(time_class(deadline))

    def put(
        self, names: Sequence[str], values: Sequence[memoryview], deadline: float
    ) -> list[Outcome]:
        pairs = zip(names, values, strict=True)
        return [self._put(name, value, deadline) for name, value in pairs]

    def _put(self, name: str, value: memoryview, deadline: float) -> Outcome:
        if time.monotonic() >= deadline:
            return TIMEOUT
        self.requests["put"] += 1
        try:
            obstore.put(self._by(deadline), self.prefix + name, value, use_multipart=False)
        except (BaseError, OSError, _Away) as error:
            return told(outcome_of(error), error)
        return Done()

    def get(
        self, names: Sequence[str], into: Sequence[memoryview], deadline: float
    ) -> list[memoryview | Outcome]:
        found: list[memoryview | Outcome] = [Missing()] * len(names)
        for row, (name, view) in enumerate(zip(names, into, strict=True)):
            found[row] = self._get(name, len(view), deadline)
            if isinstance(found[row], Missing):
                break
        return found

    def _get(self, name: str, size: int, deadline: float) -> memoryview | Outcome:
        if time.monotonic() >= deadline:
            return TIMEOUT
        self.requests["get"] += 1
        try:
            found = obstore.get(self._by(deadline), self.prefix + name)
            start, end = found.range
            if end - start != size:
                # Not downloaded: it is none of ours, or cut off.
                return Corrupt("remote")
            return memoryview(found.bytes())
        except (BaseError, OSError, _Away) as error:
            return told(outcome_of(error), error)

    async def exists(self, names: Sequence[str], size: int, deadline: float) -> list[Outcome]:
        return list(await asyncio.gather(*(self._exists(each, size, deadline) for each in names)))

    async def _exists(self, name: str, size: int, deadline: float) -> Outcome:
        self.requests["head"] += 1
        try:
            found = await _by(deadline, obstore.head_async(self._store, self.prefix + name))
        except (BaseError, OSError, TimeoutError) as error:
            return told(outcome_of(error), error)
        return Done() if found["size"] == size else Corrupt("remote")

    async def delete(self, names: Sequence[str], deadline: float) -> list[Outcome]:
        self.requests["delete"] += 1
        paths = [self.prefix + name for name in names]
        outcome: Outcome = Done()
        try:
            await _by(deadline, obstore.delete_async(self._store, paths))
        except (BaseError, OSError, TimeoutError) as error:
            outcome = told(outcome_of(error), error)
            if isinstance(outcome, Missing) and len(names) > 1:
                # A directory's driver ends at the first one that is not there.
                rows = [await self.delete([name], deadline) for name in names]
                return [row for (row,) in rows]
        return [Done() if isinstance(outcome, Missing) else outcome] * len(names)

    async def list(self, prefix: str) -> AsyncIterator[list[Listed]]:
        self.requests["list"] += 1
        listed = obstore.list(self._store, self.prefix + prefix, chunk_size=_LISTED_AT_ONCE)
        async for portion in listed:
            yield [
                Listed(
                    each["path"].removeprefix(self.prefix),
                    each["size"],
                    each["last_modified"].timestamp(),
                )
                for each in portion
            ]


async def _by(deadline: float, waiting: Awaitable[_T]) -> _T:
    async with asyncio.timeout(deadline - time.monotonic()):
        return await waiting


def outcome_of(error: BaseException) -> Outcome:
    """Translate an error of the library's."""
    text = str(error)
    if isinstance(error, _Away):
        return UNREACHABLE
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return DENIED
    if isinstance(error, FileNotFoundError):
        return DENIED if "NoSuchBucket" in text else Missing()
    if isinstance(error, TimeoutError) or "timed out" in text or "TimedOut" in text:
        return TIMEOUT
    if isinstance(error, OSError):
        return Failed(Failure.NO_SPACE) if "No space" in text else Failed(Failure.IO)
    if any(word in text for word in _DENIED):
        return DENIED
    if "performing HEAD" in text and "400 Bad Request" in text:
        return DENIED  # the answer to HEAD has no body; a token that expired is answered so
    answered = "non-2xx status" in text or "Header missing" in text
    return Failed(Failure.IO) if answered else UNREACHABLE


def _open(url: RemoteUrl, options: dict[str, Any], time_s: float) -> Any:
    """Open a store whose requests end within a time."""
    if url.scheme == "file":
        if not Path(url.bucket).is_dir():
            raise Refused(f"{url.bucket} is no directory; mount or make it")
        return LocalStore(url.bucket)
    client: Any = {
        **({"root_certificate": Path(url.ca).read_bytes()} if url.ca else {}),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, time_s)),
        "timeout": timedelta(seconds=time_s),
        "allow_http": url.endpoint.startswith("http://"),
    }
    retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=time_s)}
    store: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[url.scheme]
    return store(url.bucket, client_options=client, retry_config=retry, **options)


def _options(url: RemoteUrl) -> dict[str, Any]:
    """Return what the URL and its secret's file say of a bucket."""
    text = Path(url.secret_file).read_text(encoding="utf-8") if url.secret_file else ""
    secret, options = text.split(), dict[str, Any]()
    if url.scheme == "s3":
        return _options_s3(url, secret)
    if url.scheme == "gs":
        if text:
            options["service_account_key"] = text
        if url.endpoint:
            options["config"] = {"base_url": url.endpoint}
    elif url.scheme == "az":
        if secret:
            options["account_key"] = secret[0]
        if url.endpoint:
            options["endpoint"] = url.endpoint
        options["account_name"] = url.account or None
    return options


def _options_s3(url: RemoteUrl, secret: Sequence[str]) -> dict[str, Any]:
    if url.secret_file and len(secret) not in (2, 3):
        raise Refused(
            f"secret_file={url.secret_file} does not have two lines, the key's id and the key"
        )
    names = ("access_key_id", "secret_access_key", "session_token")
    options: dict[str, Any] = dict(zip(names, secret, strict=False))
    if url.endpoint:
        options["endpoint"] = url.endpoint
    if url.region or url.endpoint:
        options["region"] = url.region or "us-east-1"
    options["virtual_hosted_style_request"] = url.virtual_hosts or not url.endpoint
    options["unsigned_payload"] = True
    return options
