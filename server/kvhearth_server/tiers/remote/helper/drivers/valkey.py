"""Valkey and Redis servers, alone or as a cluster, by valkey-glide-sync."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from glide_shared import exceptions
from glide_shared.commands.core_options import ExpirySet, ExpiryType
from glide_sync import (
    AdvancedGlideClientConfiguration,
    AdvancedGlideClusterClientConfiguration,
    Batch,
    ClusterBatch,
    ClusterScanCursor,
    GlideClient,
    GlideClientConfiguration,
    GlideClusterClient,
    GlideClusterClientConfiguration,
    NodeAddress,
    ServerCredentials,
    TlsAdvancedConfiguration,
)

from kvhearth_server.tiers.base import Corrupt, Done, Failed, Failure, Missing, Outcome
from kvhearth_server.tiers.remote.helper.drivers.base import (
    DENIED,
    TIMEOUT,
    UNREACHABLE,
    Driver,
    Listed,
    Refused,
    time_class,
    told,
)
from kvhearth_server.tiers.remote.url import RemoteUrl

_CONNECT_MS = 2000
_SCAN = 1000
_ASKING = 2
"""Threads that ask and remove."""
_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM", "AuthenticationFailed", "invalid password")
_READ_ONLY = ("ReadOnly", "READONLY", "No primary node")
_T = TypeVar("_T")
_ALONE: Any = (GlideClient, GlideClientConfiguration, AdvancedGlideClientConfiguration)
_CLUSTER: Any = (
    *(GlideClusterClient, GlideClusterClientConfiguration),
    AdvancedGlideClusterClientConfiguration,
)
_Client = GlideClient | GlideClusterClient


class ValkeyDriver(Driver):
    """Values of Valkey. Calls run in threads, each with connections of its own.

    Raises:
        Refused: a file that the URL names cannot be read.
    """

    value_bytes_max = 512 << 20
    """Bound of a string; the server's proto-max-bulk-len may be lower."""
    parallel = 4

    def __init__(self, url: RemoteUrl) -> None:
        super().__init__(url)
        self._pool = ThreadPoolExecutor(_ASKING, "kvhearth-valkey")
        self._local = threading.local()

    def _reopen(self) -> None:
        self._opened = _options(self.url)

    def _client(self, deadline: float) -> _Client:
        """Return this thread's client whose deadline is the longest one before ``deadline``.

        Raises:
            exceptions.GlideError: no server can be reached.
        """
        time_ms = round(1000 * time_class(deadline))
        opened, kept = self._opened, self._local.__dict__
        if kept.get("opened") is not opened:
            for each in kept.get("clients", {}).values():
                each.close()
            kept |= {"opened": opened, "clients": {}}
        clients: dict[int, _Client] = kept["clients"]
        if time_ms not in clients:
            options, tls = opened
            client, configuration, advanced = _CLUSTER if self.url.cluster else _ALONE
            clients[time_ms] = client.create(
                configuration(
                    **options,
                    request_timeout=time_ms,
                    advanced_config=advanced(min(time_ms, _CONNECT_MS), tls),
                )
            )
        return clients[time_ms]

    def _batch(self) -> Any:
        return ClusterBatch(False) if self.url.cluster else Batch(False)

    def _call(self, call: Callable[[_Client], _T], deadline: float) -> _T | Outcome:
        """Make a call. It is not given up at the deadline: the library still uses its memory."""
        try:
            return call(self._client(deadline))
        except exceptions.GlideError as error:
            return told(outcome_of(error), error)

    async def _run(self, call: Callable[[_Client], _T], deadline: float) -> _T | Outcome:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._call, call, deadline)

    def put(
        self, names: Sequence[str], values: Sequence[memoryview], deadline: float
    ) -> list[Outcome]:
        self.requests["put"] += 1
        ttl_s = int(self.url.ttl_s)
        expiry = ExpirySet(ExpiryType.SEC, ttl_s) if ttl_s else None
        batch = self._batch()
        for name, value in zip(names, values, strict=True):
            # The library takes any buffer; only its types say bytes.
            batch.set(self.prefix + name, cast(bytes, value), expiry=expiry)

        def send(client: Any) -> Any:
            if len(names) == 1:
                return [client.set(self.prefix + names[0], values[0], expiry=expiry)]
            return client.exec(batch, raise_on_error=False)

        done = self._call(send, deadline)
        if not isinstance(done, list):
            return [_failed(done)] * len(names)
        return [self._stored(each) for each in done]

    def _stored(self, answer: Any) -> Outcome:
        if isinstance(answer, exceptions.GlideError):
            return told(outcome_of(answer), answer)
        return Done() if isinstance(answer, str | bytes) else Failed(Failure.IO)

    def get(
        self, names: Sequence[str], into: Sequence[memoryview], deadline: float
    ) -> list[memoryview | Outcome]:
        self.requests["get"] += 1
        keys: list[Any] = [self.prefix + name for name in names]
        found = self._call(lambda client: client.mget(keys, list(into)), deadline)
        if isinstance(found, list):
            return [_value(each, view) for each, view in zip(found, into, strict=True)]
        if isinstance(found, Corrupt) and len(names) > 1:
            # One of them is too long for its buffer.
            rows = [self.get([n], [i], deadline) for n, i in zip(names, into, strict=True)]
            return [row for (row,) in rows]
        return [_failed(found)] * len(names)

    async def exists(self, names: Sequence[str], size: int, deadline: float) -> list[Outcome]:
        self.requests["head"] += 1
        lengths = await self._lengths([self.prefix + name for name in names], deadline)
        if not isinstance(lengths, list):
            return [lengths] * len(names)
        known: dict[int, Outcome] = {0: Missing(), size: Done()}
        return [known.get(length, Corrupt("remote")) for length in lengths]

    async def _lengths(self, keys: Sequence[Any], deadline: float) -> list[int] | Outcome:
        """Return the length of each value, 0 for none."""

        batch = self._batch()
        for key in keys:
            batch.strlen(key)

        def ask(client: Any) -> Any:
            return client.exec(batch, raise_on_error=True)

        found = await self._run(ask, deadline)
        return found if isinstance(found, list) else _failed(found)

    async def delete(self, names: Sequence[str], deadline: float) -> list[Outcome]:
        self.requests["delete"] += 1
        keys: list[Any] = [self.prefix + name for name in names]
        found = await self._run(lambda client: client.unlink(keys), deadline)
        return [Done() if isinstance(found, int) else _failed(found)] * len(names)

    async def list(self, prefix: str) -> AsyncIterator[list[Listed]]:
        # The server does not tell times: they are 0.
        pattern = f"{self.prefix}{prefix}*"
        new: Any = ClusterScanCursor
        cursor: Any = new() if self.url.cluster else b"0"
        while True:
            self.requests["list"] += 1
            now = cursor

            def scan(client: Any, at: Any = now) -> Any:
                return client.scan(at, match=pattern, count=_SCAN)

            found = await self._run(scan, time.monotonic() + 10.0)
            if not isinstance(found, list):
                raise OSError(f"{self.url.place} cannot be listed: {found}")
            cursor, keys = found
            if keys:
                lengths = await self._lengths(keys, time.monotonic() + 10.0)
                if not isinstance(lengths, list):
                    raise OSError(f"{self.url.place} cannot be listed: {lengths}")
                names = [key.decode("utf-8", "replace").removeprefix(self.prefix) for key in keys]
                yield [Listed(*each, 0.0) for each in zip(names, lengths, strict=True)]
            if cursor.is_finished() if self.url.cluster else cursor == b"0":
                return

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _value(found: bytes | None, view: memoryview) -> memoryview | Outcome:
    return Missing() if found is None else view[: int(found)]


def _failed(outcome: Any) -> Outcome:
    return outcome if isinstance(outcome, Failed | Corrupt) else Failed(Failure.IO)


def outcome_of(error: exceptions.GlideError) -> Outcome:
    """Translate an error of the library's."""
    text = str(error)
    if any(word in text for word in _DENIED):
        return DENIED
    if isinstance(error, exceptions.TimeoutError):
        return TIMEOUT
    if any(word in text for word in _READ_ONLY):
        return Failed(Failure.READ_ONLY)
    if isinstance(error, exceptions.ConnectionError | exceptions.ClosingError):
        return UNREACHABLE
    if "OOM" in text:
        return Failed(Failure.NO_SPACE)
    if "buffer" in text.lower():
        return Corrupt("remote")
    return Failed(Failure.IO)


def _options(url: RemoteUrl) -> tuple[dict[str, Any], TlsAdvancedConfiguration | None]:
    """Return the options of every client, and those of TLS."""
    try:
        secret = (
            Path(url.secret_file).read_text(encoding="utf-8").strip() if url.secret_file else ""
        )
        ca = Path(url.ca).read_bytes() if url.ca else None
        cert = Path(url.cert).read_bytes() if url.cert else None
        key = Path(url.key).read_bytes() if url.key else None
    except OSError as error:
        raise Refused(f"{url.place}: {error.filename} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Refused(f"{url.place}: secret_file={url.secret_file} is no text") from None
    if url.user and not secret:
        raise Refused(f"{url.place}: user={url.user} needs secret_file=/path with its password")
    tls = url.scheme == "valkeys"
    advanced = TlsAdvancedConfiguration(
        root_pem_cacerts=ca, client_cert_pem=cert, client_key_pem=key
    )
    return {
        "addresses": [NodeAddress(host, port) for host, port in url.hosts],
        "use_tls": tls,
        "credentials": ServerCredentials(secret, url.user or None) if secret else None,
        "client_name": "kvhearth",
    }, (advanced if tls else None)
