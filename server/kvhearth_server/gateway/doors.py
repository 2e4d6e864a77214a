"""The guarded door: TLS and the identities behind it, read again while connections live.

Peers of other hosts come in by a certificate, a token or both (docs/protocol.md, section 6).
"""

from __future__ import annotations

import ipaddress
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.config.model import DEFAULT_TENANT_NAME
from kvhearth_server.gateway.identity import Identity
from kvhearth_server.gateway.roster import Roster, certificate_names, read_roster
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.ownership import exposed, foreign

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2: forward secrecy and authenticated encryption only."""
_REMEMBERED_MAX = 1024
_FAILURES_BURST = 8
_FAILURE_EVERY_S = 2.0
_ADDRESSES_MAX = 4096
_HASHERS_WAITING_MAX = 8
_HASH_WAIT_S = 3.0
_IPV6_SITE_BITS = 64
_NAME_CHARS = 128
_log = get_logger("kvhearth.doors")
_refusals = LimitedLog(_log)


def tls_context(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """Return a server's context: TLS 1.2 or newer, and with ``client_ca`` a certificate of it from
    every peer.

    Sessions are not resumed, so that each connection proves its certificate again.

    Raises:
        KVHearthError: ``config_invalid``: a file is missing, wrong, or others can read the key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(_CIPHERS)
    context.num_tickets = 0
    place, path = "tls_key", key
    try:
        if message := exposed(key):
            raise _invalid(place, path, message)
        place, path = "tls_cert", cert
        if message := foreign(cert):
            raise _invalid(place, path, message)
        # A key with a passphrase would ask the terminal for it.
        context.load_cert_chain(cert, key, password=lambda: b"")
        if client_ca is not None:
            place, path = "client_ca", client_ca
            if message := foreign(client_ca):
                raise _invalid(place, path, message)
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        why = (error.reason or "not PEM").lower().replace("_", " ")
        raise _invalid(place, path, f"it is no certificate with its key ({why})") from None
    except (OSError, ValueError) as error:
        raise _invalid(place, path, getattr(error, "strerror", None) or str(error)) from None
    return context


def _invalid(place: str, path: Path, message: str) -> KVHearthError:
    return KVHearthError(Reason.CONFIG_INVALID, f"{place}: {path}: {message}")


class Failures:
    """Wrong secrets by address: some at once, then one in a while. Not thread-safe.

    The oldest address is forgotten beyond a number of them; of IPv6 a site counts as one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """Return the seconds until another wrong secret of an address is looked at."""
        until = self._until.get(_site(address), 0.0)
        return max(0.0, until - self._clock() - _FAILURES_BURST * _FAILURE_EVERY_S)

    def note(self, address: str) -> None:
        """Count a wrong secret."""
        site, now = _site(address), self._clock()
        self._until[site] = max(now, self._until.pop(site, now)) + _FAILURE_EVERY_S
        if len(self._until) > _ADDRESSES_MAX:
            self._until.popitem(last=False)


def _site(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        bits = int(found) >> (128 - _IPV6_SITE_BITS)
        return str(mapped) if mapped else f"v6:{bits:x}"
    return str(found)


@dataclass
class _State:
    """What a reload replaces as one."""

    roster: Roster | None
    context: ssl.SSLContext | None
    web_context: ssl.SSLContext | None
    remembered: OrderedDict[bytes, Identity] = field(default_factory=OrderedDict)


class Doors:
    """A ``Doorkeeper`` by the settings, and the TLS contexts of new connections. Thread-safe.

    Random tokens are found at once, whatever others try. A secret hashed by scrypt is hashed by one
    thread at a time, is remembered once it was right, and is not looked at while its address has
    sent too many wrong ones. With neither tokens nor ``client_ca`` everyone is one identity. With
    ``client_ca`` alone each of its certificates is an engine of the only tenant.

    Raises:
        KVHearthError: ``config_invalid``: a file of the settings cannot be used.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        tenants = [tenant.name for tenant in settings.tenants] or [DEFAULT_TENANT_NAME]
        self._only_tenant = tenants[0] if len(tenants) == 1 else ""
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self._waiting = 0
        self._failures = Failures(clock)
        self.refusals: Counter[str] = Counter()
        """Peers that were refused, by cause."""
        self._state = self._read()

    @property
    def context(self) -> ssl.SSLContext | None:
        """Context of the gateway's next connection; None without TLS."""
        return self._state.context

    @property
    def web_context(self) -> ssl.SSLContext | None:
        """Context of the next HTTP connection, which needs no certificate; None without TLS."""
        return self._state.web_context

    def reload(self) -> bool:
        """Read the files again, for connections from now on; return whether they could be used.

        A broken file leaves everything as it was. Connections that live are not touched.
        """
        try:
            state = self._read()
        except KVHearthError as error:
            _log.error("doors.not_reloaded", reason=error.message)
            return False
        self._state = state
        rows = len(state.roster.rows) if state.roster else 0
        _log.info("doors.reloaded", identities=rows, tls=state.context is not None)
        return True

    def identify(
        self, secret: str, certificate: dict[str, object] | None, address: str = ""
    ) -> Identity:
        """See ``Doorkeeper.identify``. A secret decides before a certificate does."""
        state = self._state
        if state.roster is None and self._settings.client_ca is None:
            return Identity("anyone", self._tenant())
        if secret and state.roster is not None:
            return self._by_secret(state, state.roster, secret, address)
        if certificate:
            return self._by_certificate(state, certificate, address)
        raise self._refusal("nothing_shown", address, "no token or certificate was shown")

    def known(self, secret: str) -> Identity | None:
        """Return the identity of a random token, or of one that was right before, at once."""
        state = self._state
        if state.roster is None:
            return None
        keyed = state.roster.keyed(secret.encode(errors="surrogatepass"))
        with self._lock:
            return state.roster.fast.get(keyed) or state.remembered.get(keyed)

    def _by_secret(self, state: _State, roster: Roster, secret: str, address: str) -> Identity:
        data = secret.encode(errors="surrogatepass")
        keyed = roster.keyed(data)
        with self._lock:
            found = roster.fast.get(keyed) or state.remembered.get(keyed)
            wait_s = self._failures.wait_s(address)
        if found is not None:
            return found
        if wait_s:
            raise self._refusal(
                "too_many_failures",
                address,
                f"too many wrong tokens from this address; wait {wait_s:.0f} s",
            )
        found = self._slow(roster, data, address)
        with self._lock:
            if found is None:
                self._failures.note(address)
            else:
                state.remembered[keyed] = found
                while len(state.remembered) > _REMEMBERED_MAX:
                    state.remembered.popitem(last=False)
        if found is None:
            raise self._refusal("wrong_token", address, "no identity has this token")
        return found

    def _slow(self, roster: Roster, secret: bytes, address: str) -> Identity | None:
        """Try every row of scrypt, whichever matches."""
        if not roster.slow:
            return None
        with self._lock:
            crowded = self._waiting >= _HASHERS_WAITING_MAX
            self._waiting += not crowded
        if crowded or not self._hashing.acquire(timeout=_HASH_WAIT_S):
            if not crowded:
                self._leave()
            raise self._refusal("crowded", address, "too many tokens are being checked; try again")
        try:
            matches = [row.identity for row in roster.slow if row.matches(secret)]
        finally:
            self._hashing.release()
            self._leave()
        return matches[0] if matches else None

    def _leave(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _by_certificate(
        self, state: _State, certificate: Mapping[str, Any], address: str
    ) -> Identity:
        roster = state.roster
        if roster is not None:
            found = roster.certified(certificate)
            if found is None:
                raise self._refusal(
                    "wrong_certificate", address, "no identity has this certificate"
                )
            return found
        uris = certificate_names(certificate, "URI")
        names = [*uris, *certificate_names(certificate, "commonName")]
        plain = [name for name in names if name.isascii() and name.isprintable()]
        return Identity((plain or ["unnamed"])[0][:_NAME_CHARS], self._tenant())

    def _tenant(self) -> str:
        if not self._only_tenant:
            raise KVHearthError(
                Reason.PEER_NOT_ALLOWED, "an identity decides the tenant here: show a token"
            )
        return self._only_tenant

    def _refusal(self, cause: str, address: str, message: str) -> KVHearthError:
        with self._lock:
            self.refusals[cause] += 1
            _refusals.warning("doors.refused", kind=cause, cause=cause, address=address[:64])
        return KVHearthError(Reason.PEER_NOT_ALLOWED, message)

    def _read(self) -> _State:
        of = self._settings
        roster = read_roster(of.tokens_file) if of.tokens_file else None
        if of.tls_cert is None or of.tls_key is None:
            return _State(roster, None, None)
        context = tls_context(of.tls_cert, of.tls_key, of.client_ca)
        return _State(roster, context, tls_context(of.tls_cert, of.tls_key))
