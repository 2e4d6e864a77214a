"""The guarded door: TLS and the identities behind it, read again while connections live.

Peers of other hosts come in by a certificate, a token or both (docs/protocol.md, section 6).
"""

from __future__ import annotations

import ssl
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass
class _State:
    """What a reload replaces as one."""

    roster: Roster | None
    context: ssl.SSLContext | None
    web_context: ssl.SSLContext | None


class Doors:
    """Tells the identities of peers, and has the TLS contexts of new connections. Thread-safe.

    With neither tokens nor ``client_ca`` everyone is one identity. With
    ``client_ca`` alone each of its certificates is an engine of the only tenant.

    Raises:
        KVHearthError: ``config_invalid``: a file of the settings cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        tenants = [tenant.name for tenant in settings.tenants] or [DEFAULT_TENANT_NAME]
        self._only_tenant = tenants[0] if len(tenants) == 1 else ""
        self._lock = threading.Lock()
        self.refusals: Counter[str] = Counter()
        """Peers that were refused, by cause."""
        self._state = self._read()

    @property
    def know_peers(self) -> bool:
        """Whether peers have identities, which decide their tenants."""
        return self._settings.tokens_file is not None or self._settings.client_ca is not None

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
        """Return the identity of a peer. A secret decides before a certificate does.

        Args:
            secret: the token of ``Identify``; "" for none.
            certificate: the verified client certificate, as ``ssl.SSLSocket.getpeercert`` has it.
            address: the peer's, without its port, for the log.

        Raises:
            KVHearthError: ``peer_not_allowed``; the message does not contain the secret.
        """
        state = self._state
        if not self.know_peers:
            return Identity("anyone", self._tenant())
        if secret and state.roster is not None:
            if (found := state.roster.of_token(secret)) is not None:
                return found
            raise self._refusal("wrong_token", address, "no identity has this token")
        if certificate:
            return self._by_certificate(state, certificate, address)
        raise self._refusal("nothing_shown", address, "no token or certificate was shown")

    def of_token(self, token: str) -> Identity | None:
        """Return the identity of a token."""
        roster = self._state.roster
        return None if roster is None else roster.of_token(token)

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
