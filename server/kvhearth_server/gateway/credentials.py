"""Credentials: TLS and the identities of peers, read again while connections live.

Peers of other hosts come in by a certificate, a token or both (docs/protocol.md, section 6).
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.config.model import DEFAULT_TENANT_NAME
from kvhearth_server.gateway import tokens
from kvhearth_server.gateway.tokens import Identities, Identity, certificate_names, read_identities
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.ownership import exposed, foreign

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2: forward secrecy and authenticated encryption only."""
_NAME_CHARS = 128
_log = get_logger("kvhearth.credentials")
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
    with _naming("tls_key", key, exposed):
        pass
    with _naming("tls_cert", cert, foreign):
        # A key with a passphrase would ask the terminal for it.
        context.load_cert_chain(cert, key, password=lambda: b"")
    if client_ca is not None:
        with _naming("client_ca", client_ca, foreign):
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextlib.contextmanager
def _naming(place: str, path: Path, wrong: Callable[[Path], str]) -> Iterator[None]:
    """Name a setting and its file in the error of one that others may use, or that is broken."""
    try:
        if message := wrong(path):
            raise ValueError(message)
        yield
        return
    except ssl.SSLError as error:
        why = (error.reason or "not PEM").lower().replace("_", " ")
        message = f"it is no certificate with its key ({why})"
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or str(error)
    raise KVHearthError(Reason.CONFIG_INVALID, f"{place}: {path}: {message}")


@dataclass(frozen=True)
class _Files:
    """Content of the files, which a reload replaces as one."""

    identities: Identities = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    web_context: ssl.SSLContext | None = None


class Credentials:
    """Tells the identities of peers, and has the TLS contexts of new connections. Thread-safe.

    With neither tokens nor ``client_ca`` everyone is one identity. With ``client_ca`` alone each of
    its certificates is an engine of the only tenant.

    Args:
        refused: called with the cause of each refusal of a peer.

    Raises:
        KVHearthError: ``config_invalid``: a file of the settings cannot be used.
    """

    def __init__(self, settings: Settings, refused: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._refused = refused
        tenants = [tenant.name for tenant in settings.tenants] or [DEFAULT_TENANT_NAME]
        self._only_tenant = tenants[0] if len(tenants) == 1 else ""
        self._files = self._read()

    @property
    def know_peers(self) -> bool:
        """Whether peers have identities, which decide their tenants."""
        return self._settings.tokens_file is not None or self._settings.client_ca is not None

    @property
    def context(self) -> ssl.SSLContext | None:
        """Context of the gateway's next connection; None without TLS."""
        return self._files.context

    @property
    def web_context(self) -> ssl.SSLContext | None:
        """Context of the next HTTP connection, which needs no certificate; None without TLS."""
        return self._files.web_context

    def reload(self) -> bool:
        """Read the files again, for connections from now on; return whether they could be used.

        A broken file leaves everything as it was. Connections that live are not touched.
        """
        try:
            files = self._read()
        except KVHearthError as error:
            _log.error("credentials.not_reloaded", reason=error.message)
            return False
        self._files = files
        _log.info(
            "credentials.reloaded",
            identities=len(files.identities),
            tls=files.context is not None,
        )
        return True

    def identify(
        self, secret: str, certificate: Mapping[str, Any] | None, address: str = ""
    ) -> Identity:
        """Return the identity of a peer. A secret decides before a certificate does.

        Args:
            secret: the token of ``Identify``; "" for none.
            certificate: the verified client certificate, as ``ssl.SSLSocket.getpeercert`` has it.
            address: the peer's, without its port, for the log.

        Raises:
            KVHearthError: ``peer_not_allowed``; the message does not contain the secret.
        """
        identities = self._files.identities
        if not self.know_peers:
            return Identity("anyone", self._tenant())
        if secret and self._settings.tokens_file is not None:
            found = tokens.of_token(identities, secret)
            cause, message = "wrong_token", "no identity has this token"
        elif certificate and self._settings.tokens_file is not None:
            found = tokens.of_certificate(identities, certificate)
            cause, message = "wrong_certificate", "no identity has this certificate"
        elif certificate:
            return Identity(_name_in(certificate), self._tenant())
        else:
            found = None
            cause, message = "nothing_shown", "no token or certificate was shown"
        if found is not None:
            return found
        if self._refused is not None:
            self._refused(cause)
        _refusals.warning("credentials.refused", kind=cause, cause=cause, address=address[:64])
        raise KVHearthError(Reason.PEER_NOT_ALLOWED, message)

    def of_token(self, token: str) -> Identity | None:
        """Return the identity of a token."""
        return tokens.of_token(self._files.identities, token)

    def _tenant(self) -> str:
        if not self._only_tenant:
            raise KVHearthError(
                Reason.PEER_NOT_ALLOWED, "an identity decides the tenant here: show a token"
            )
        return self._only_tenant

    def _read(self) -> _Files:
        of = self._settings
        identities = read_identities(of.tokens_file) if of.tokens_file else {}
        if of.tls_cert is None or of.tls_key is None:
            return _Files(identities)
        context = tls_context(of.tls_cert, of.tls_key, of.client_ca)
        return _Files(identities, context, tls_context(of.tls_cert, of.tls_key))


def _name_in(certificate: Mapping[str, Any]) -> str:
    """Return a printable name in a certificate, the URI first."""
    names = [*certificate_names(certificate, "URI"), *certificate_names(certificate, "commonName")]
    plain = [name for name in names if name.isascii() and name.isprintable()]
    return (plain or ["unnamed"])[0][:_NAME_CHARS]
