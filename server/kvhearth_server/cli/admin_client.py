"""Connects the verbs to a running daemon: HTTP on its unix socket."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import ADMIN_SOCKET, default_socket_dir, find_socket_dir
from kvhearth.wire.frames import rebuild_error
from kvhearth_server.cli import liveness
from kvhearth_server.cli.output import parsed, short
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.value_types import directory as absolute
from kvhearth_server.engine.snapshot import Stats
from kvhearth_server.transport import reports

DEADLINE_S = 20.0
_NAMED = 8
"""Number of namespaces that a message names."""

Report = TypeVar("Report")


def directory(given: Path | None) -> Path:
    """Return the daemon's directory: as given (flag, environment), else from the settings.

    Raises:
        KVHearthError: ``config_invalid``.
    """
    if given is not None:
        return parsed("--socket-dir", absolute, given)
    found = load_settings({}).socket_dir
    return find_socket_dir() if found == default_socket_dir() else found


def daemon_at(given: Path | None) -> AdminClient:
    """Return the client of a directory's daemon; raises as ``directory``."""
    return AdminClient(directory(given))


class _Connection(http.client.HTTPConnection):
    """HTTP to a unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class AdminClient:
    """Asks the daemon of a directory; each call is a connection of its own.

    Args:
        folder: the daemon's directory of sockets.
        deadline_s: longest wait for any part of an answer.

    Raises:
        KVHearthError: from every call: ``daemon_away``, ``not_admin``, or the daemon's refusal.
    """

    def __init__(self, folder: Path | str, deadline_s: float = DEADLINE_S) -> None:
        self._path, self._deadline_s = Path(folder) / ADMIN_SOCKET, deadline_s

    def stats(self) -> Stats:
        """Return sizes, counts and counters."""
        return self._ask(Stats, "/v1/stats")

    def sessions(self) -> reports.Sessions:
        """Return the attached processes."""
        return self._ask(reports.Sessions, "/v1/sessions")

    def leases(self) -> reports.Leases:
        """Return the readers' leases."""
        return self._ask(reports.Leases, "/v1/leases")

    def pins(self) -> reports.Pins:
        """Return the pins."""
        return self._ask(reports.Pins, "/v1/pins")

    def unpin(self, namespace: str | None = None, session: str | None = None) -> reports.Unpinned:
        """End the pins of a namespace (all 64 hex digits), of a session, of both, or all."""
        body = {"namespace": namespace, "session": session}
        return self._ask(reports.Unpinned, "/v1/pins:end", body)

    def namespaces(self) -> reports.Namespaces:
        """Return all namespaces."""
        return self._ask(reports.Namespaces, "/v1/namespaces")

    def explain_contract(self, tenant: str, text: str) -> reports.ContractPlace:
        """Return the namespace of a contract, and those that are near it."""
        body = {"tenant": tenant, "contract": json.loads(text)}
        return self._ask(reports.ContractPlace, "/v1/contracts:explain", body)

    def explain_key(self, key: bytes) -> reports.KeyPlaces:
        """Return the places of a key."""
        return self._ask(reports.KeyPlaces, f"/v1/keys/{key.hex()}")

    def evict(self, namespace: str, keep_bytes: int, tier: str | None) -> reports.Evicted:
        """Remove blocks of a namespace (all 64 hex digits) down to ``keep_bytes``."""
        body = {"keep_bytes": keep_bytes, "tier": tier}
        return self._ask(reports.Evicted, f"/v1/namespaces/{namespace}:evict", body)

    def forget(self, namespace: str, epoch: int, label: str | None = None) -> reports.Bumped:
        """Make all blocks of a namespace (all 64 hex digits) invalid, if ``epoch`` is current;
        ``label`` names the new weights at remotes.
        """
        body = {"expected_epoch": epoch, "label": label}
        return self._ask(reports.Bumped, f"/v1/namespaces/{namespace}:bump-epoch", body)

    def drain(self) -> reports.Drained:
        """Make the daemon refuse new stores and sessions."""
        return self._ask(reports.Drained, "/v1/admin:drain", {})

    def reload_settings(self) -> reports.Reload:
        """Make the daemon read its settings again."""
        return self._ask(reports.Reload, "/v1/admin:reload", {})

    def books(self) -> reports.Books:
        """Have the daemon recount everything."""
        return self._ask(reports.Books, "/debug/books")

    def namespace(self, name: str) -> reports.Namespace:
        """Return the namespace whose hex digest starts with ``name``.

        Raises:
            KVHearthError: ``unknown_namespace`` unless there is exactly one.
        """
        every = self.namespaces().namespaces
        found = [each for each in every if name and each.namespace.startswith(name.lower())]
        if len(found) == 1:
            return found[0]
        message = f"no namespace starts with {name!r}; kvhearth ls lists all of them"
        if found:
            names = ", ".join(short(each.namespace) for each in found[:_NAMED])
            more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            message = (
                f"{len(found)} namespaces start with {name!r}: {names}{more}; give more digits"
            )
        raise KVHearthError(Reason.UNKNOWN_NAMESPACE, message)

    def _ask(self, kind: type[Report], path: str, body: Any = None) -> Report:
        """Get a report, or post ``body`` for it."""
        place = str(self._path)
        connection = _Connection(place, self._deadline_s)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                content = {"content-type": "application/json"}
                connection.request("POST", path, json.dumps(body), content)
            answer = connection.getresponse()
            data = answer.read()
        except TimeoutError:
            message = f"the daemon at {place} does not answer within {self._deadline_s:g} s"
            raise KVHearthError(Reason.DEADLINE, message) from None
        except PermissionError:
            raise KVHearthError(Reason.NOT_ADMIN, liveness.denied(place)) from None
        except (OSError, http.client.HTTPException):
            raise KVHearthError(Reason.DAEMON_AWAY, liveness.away(place)) from None
        finally:
            connection.close()
        if answer.status >= http.client.BAD_REQUEST:
            raise _refusal(data)
        found: Report = TypeAdapter(kind).validate_json(data)
        return found


def _refusal(data: bytes) -> KVHearthError:
    """Return the error of a problem document."""
    try:
        found = json.loads(data)
        return rebuild_error(found["reason"], found["detail"], found["details"])
    except (ValueError, KeyError, TypeError):
        return KVHearthError(Reason.INTERNAL, "the daemon answers with no reason; see its log")
