"""Credentials: who comes in by a token or a certificate, and what a reload changes."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.certificates import Authority

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.config.load import Settings, load_settings
from kvhearth_server.gateway.credentials import Credentials, tls_context
from kvhearth_server.gateway.tokens import (
    Bounds,
    Identity,
    Role,
    add_token,
    hash_of,
    new_token,
    read_identities,
)

pytestmark = pytest.mark.usefixtures("no_environment")

A, B = "token-of-a-" + "x" * 30, "token-of-b-" + "y" * 30


def written(path: Path, *rows: str, certificates: tuple[str, ...] = ()) -> Path:
    """Write a file of identities that only its owner can read."""
    path.touch(mode=0o600)
    lists = [("tokens", rows), ("certificates", certificates)]
    path.write_text(
        "".join(f"{n}:\n" + "".join(f"- {{{r}}}\n" for r in rs) for n, rs in lists if rs)
    )
    return path


def credentials_of(
    tokens: Path | None = None, count: Callable[[str], None] | None = None, **settings: Any
) -> Credentials:
    return Credentials(Settings(listen="127.0.0.1:0", tokens_file=tokens, **settings), count)


def refused(
    credentials: Credentials, secret: str, certificate: Any = None, address: str = "10.0.0.1"
) -> str:
    with pytest.raises(KVHearthError) as caught:
        credentials.identify(secret, certificate, address)
    assert caught.value.reason is Reason.PEER_NOT_ALLOWED
    assert not secret or secret not in caught.value.message
    return caught.value.message


# -- settings ----------------------------------------------------------------------------------


@cases("address", ["0.0.0.0:9461", "[::]:9461", "192.168.1.2:9461", "host:9461"])
def test_a_door_that_others_reach_needs_tls_and_identities(address: str) -> None:
    with pytest.raises(KVHearthError, match="tls_cert and tls_key, and tokens_file or client_ca"):
        load_settings({"listen": address})
    tls = {"tls_cert": "/c", "tls_key": "/k"}
    with pytest.raises(KVHearthError, match="give tokens_file or client_ca, or a loopback"):
        load_settings({"listen": address, **tls})
    with pytest.raises(KVHearthError, match="give tls_cert and tls_key, or a loopback"):
        load_settings({"listen": address, "tokens_file": "/t"})
    for more in ({"insecure": True}, {**tls, "tokens_file": "/t"}, {**tls, "client_ca": "/a"}):
        assert load_settings({"listen": address, **more}).listen == address


def test_the_door_is_shut_by_default_and_open_on_loopback() -> None:
    assert Settings().listen_address is None
    for address in ("127.0.0.1:9461", "[::1]:9461", "localhost:9461"):
        assert Settings(listen=address).listen_address is not None
    with pytest.raises(KVHearthError, match="give tls_key, too"):
        load_settings({"tls_cert": "/c"})
    with pytest.raises(KVHearthError, match="client_ca: needs TLS"):
        load_settings({"client_ca": "/c"})
    with pytest.raises(KVHearthError, match="identity tells which"):
        load_settings({"listen": "127.0.0.1:0", "tenants": ["a=1:64MiB", "b=2:64MiB"]})


# -- tokens ------------------------------------------------------------------------------------


def test_tokens_have_tenants_roles_and_bounds(tmp_path: Path) -> None:
    causes = list[str]()
    path = written(
        tmp_path / "tokens",
        f"name: a, tenant: t1, hash: '{hash_of(A)}', bounds: {{held_bytes: 1GiB, sessions: 2}}",
        f"name: b, tenant: t2, role: operator, hash: '{hash_of(B)}'",
    )
    credentials = credentials_of(path, causes.append)
    bounds = Bounds(sessions=2, held_bytes=1 << 30)
    assert credentials.identify(A, None) == Identity("a", "t1", Role.ENGINE, bounds)
    assert (
        credentials.identify(B, None)
        == credentials.of_token(B)
        == Identity("b", "t2", Role.OPERATOR)
    )
    same = {refused(credentials, wrong) for wrong in (A[:-1], B + "z", "\ud800", "x" * 256)}
    assert len(same) == 1, "a refusal tells which token exists"
    assert "token or certificate" in refused(credentials, "")
    assert Counter(causes) == {"wrong_token": 4, "nothing_shown": 1}


@cases(
    ("content", "why"),
    [
        ("[1]", "two lists"),
        ("tokens: 7", "a list of rows"),
        ("tokens: [{name: a, tenant: t, hash: 'md5:00'}]", "sha256:HEX"),
        ("tokens: [{name: a, tenant: t, hash: 'sha256:00'}]", "64 hex digits"),
        ("tokens: [{name: a, tenant: 'T!', hash: x}]", "tenant name"),
        ("tokens: [{tenant: t, hash: x}]", "name: write"),
        ("tokens: [{name: a, tenant: t, role: root, hash: x}]", "role: write"),
        ("tokens: [{name: a, tenant: t, hash: x, secret: y}]", "unknown field 'secret'"),
        ("tokens: [{name: a, tenant: t, hash: x, bounds: {sessions: -1}}]", "numbers from 0"),
        ("tokens: [{name: a, tenant: t, hash: x, bounds: {seats: 1}}]", "bounds: write"),
        ("tokens: [{name: a, tenant: t, hash: 'scrypt:1024:8:1:00:00'}]", "sha256:HEX"),
        ("certificates: [{tenant: t}]", "name: write"),
        ("certificates: [{name: n, tenant: t}]", "cn or its uri"),
        ("certificates: [{cn: a, tenant: t}, {cn: a, tenant: u}]", "another tenant"),
        ("tokens: [", "line 1: expected"),
        ("tokens: &a [*a]", "no aliases"),
    ],
)
def test_broken_files_are_refused_with_the_fix(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(KVHearthError) as caught:
        credentials_of(path)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert why in caught.value.message
    assert "kvhearth token new" in caught.value.message


def test_files_of_secrets_are_the_daemons_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens", f"name: a, tenant: t, hash: '{hash_of(A)}'")
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(KVHearthError, match=r"chmod (600|go-w)"):
            credentials_of(path)
    with pytest.raises(KVHearthError, match="No such file"):
        credentials_of(tmp_path / "none")
    cert, key = Authority(tmp_path).issue("localhost")
    key.chmod(0o644)
    with pytest.raises(KVHearthError, match=r"tls_key: .*chmod 600"):
        tls_context(cert, key)


# -- certificates ------------------------------------------------------------------------------


def shown(cn: str = "", uri: str = "") -> dict[str, Any]:
    """What ``getpeercert`` returns for such a certificate."""
    return {
        "subject": ((("organizationName", "o"),), (("commonName", cn),)),
        "subjectAltName": (("DNS", "localhost"), *((("URI", uri),) if uri else ())),
    }


def test_certificates_name_tenants_by_the_file_only(tmp_path: Path) -> None:
    path = written(
        tmp_path / "tokens",
        f"name: a, tenant: t1, hash: '{hash_of(A)}'",
        certificates=(
            "cn: gpu-7, tenant: t2, role: operator",
            "uri: 'spiffe://x/engine', name: engines, tenant: t3",
        ),
    )
    credentials = credentials_of(path)
    assert credentials.identify("", shown("gpu-7")) == Identity("gpu-7", "t2", Role.OPERATOR)
    assert credentials.identify("", shown("gpu-7", "spiffe://x/engine")).tenant == "t3"
    assert credentials.identify(A, shown("gpu-7")).tenant == "t1"
    assert "certificate" in refused(credentials, "", shown("a"))
    assert "token" in refused(credentials, "wrong", shown("gpu-7"))
    two = {"subject": ((("commonName", "gpu-7"),), (("commonName", "other"),))}
    assert "certificate" in refused(credentials, "", two)


class Server:
    """Accepts TLS connections under the credentials' present context, and answers who they are."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = ThreadPoolExecutor(16)
        self._threads.submit(self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._threads.submit(self._serve, self._listener.accept()[0])

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(HUNG_S)
        context = self._credentials.context
        assert context is not None
        with (
            contextlib.suppress(OSError, KVHearthError),
            contextlib.closing(connection),
            context.wrap_socket(connection, server_side=True) as wrapped,
        ):
            secret = wrapped.recv(256).decode().strip("-")
            certificate = wrapped.getpeercert() or None
            found = self._credentials.identify(secret, certificate, "127.0.0.1")
            wrapped.sendall(f"{found.name}@{found.tenant}".encode())
            while wrapped.recv(256):
                wrapped.sendall(f"{found.name}@{found.tenant}".encode())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads.shutdown()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def client(
    server: Server, ca: Path, own: tuple[Path, Path] | None = None, secret: str = "-"
) -> tuple[ssl.SSLSocket, str]:
    """Connect, say a secret, and return the connection and the answer; "" if it was closed."""
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(*own)
    raw = socket.create_connection(server.address, timeout=HUNG_S)
    wrapped = context.wrap_socket(raw, server_hostname="127.0.0.1")
    with contextlib.suppress(OSError):
        wrapped.sendall(secret.encode())
        return wrapped, wrapped.recv(256).decode()
    return wrapped, ""


def test_real_certificates_over_real_sockets(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.issue("localhost")
    path = written(tmp_path / "tokens", certificates=("cn: gpu-7, tenant: t2",))
    credentials = credentials_of(path, tls_cert=cert, tls_key=key, client_ca=authority.path)
    foreign = Authority(tmp_path, "foreign")
    peers = {
        "gpu-7@t2": authority.issue("gpu-7"),
        "": authority.issue("gpu-8"),
        " expired": authority.issue("gpu-7", days=-1, file="expired"),
        " foreign": foreign.issue("gpu-7", file="foreign-7"),
        " none": None,
    }
    with contextlib.closing(Server(credentials)) as server:
        for answer, own in peers.items():
            wrapped, said = client(server, authority.path, own)
            assert said == answer.partition(" ")[0], (answer, said)
            wrapped.close()
        old = ssl.create_default_context(cafile=str(authority.path))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        raw = socket.create_connection(server.address, timeout=HUNG_S)
        with pytest.raises(OSError, match=r"(?i)ssl|protocol|reset"):
            old.wrap_socket(raw, server_hostname="127.0.0.1")
        raw.close()


def test_without_a_map_a_certificate_is_the_only_tenants(
    tmp_path: Path, authority: Authority
) -> None:
    cert, key = authority.issue("localhost")
    tls = {"tls_cert": cert, "tls_key": key, "client_ca": authority.path}
    credentials = credentials_of(None, **tls)
    assert credentials.identify("", shown("gpu-7")) == Identity("gpu-7", "default")
    assert "token or certificate" in refused(credentials, "anything")
    only_tokens = written(tmp_path / "tokens", f"name: a, tenant: t, hash: '{hash_of(A)}'")
    assert "certificate" in refused(credentials_of(only_tokens, **tls), "", shown("gpu-7"))


def test_a_reload_keeps_connections_and_a_broken_file_keeps_the_old(
    tmp_path: Path, authority: Authority
) -> None:
    """New handshakes see the new certificate and tokens; the connection that lives goes on."""
    cert, key = authority.issue("localhost")
    path = written(tmp_path / "tokens", f"name: a, tenant: t1, hash: '{hash_of(A)}'")
    credentials = credentials_of(path, tls_cert=cert, tls_key=key)
    second = Authority(tmp_path, "second")
    with contextlib.closing(Server(credentials)) as server:
        living, said = client(server, authority.path, secret=A)
        assert said == "a@t1"
        new_cert, new_key = second.issue("localhost", file="new")
        cert.write_bytes(new_cert.read_bytes())
        assert not credentials.reload(), "the key does not fit"
        client(server, authority.path, secret=A)[0].close()
        key.write_bytes(new_key.read_bytes())
        written(path, f"name: b, tenant: t2, hash: '{hash_of(B)}'")
        assert credentials.reload()
        living.sendall(b"more")
        assert living.recv(256) == b"a@t1"
        living.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            client(server, authority.path)
        found, said = client(server, second.path, secret=B)
        assert said == "b@t2"
        found.close()
        refused_one, said = client(server, second.path, secret=A)
        assert said == ""
        refused_one.close()
        path.write_text("tokens: [")
        assert not credentials.reload()
        assert credentials.identify(B, None).name == "b"


# -- tokens that are made ----------------------------------------------------------------------


def test_tokens_are_appended_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    tokens = [new_token() for _ in range(3)]
    for number, token in enumerate(tokens):
        add_token(path, Identity(f"n{number}", "t", Role.OPERATOR, Bounds(sessions=number)), token)
        if not number:
            path.write_text(
                "# whose\n" + path.read_text() + "certificates:\n- {cn: x, tenant: t}\n"
            )
    assert path.read_text().startswith("# whose")
    assert path.stat().st_mode & 0o777 == 0o600
    credentials = credentials_of(path)
    for number, token in enumerate(tokens):
        assert token not in path.read_text()
        bounds = Bounds(sessions=number)
        assert credentials.identify(token, None) == Identity(
            f"n{number}", "t", Role.OPERATOR, bounds
        )
    assert len(read_identities(path)) == 4
    with pytest.raises(KVHearthError, match="another tenant, role or bounds"):
        add_token(path, Identity("n0", "other"), new_token())
    path.write_text("tokens:\n  - {name: i, tenant: t, hash: '" + hash_of(A) + "'}  # deep\n")
    add_token(path, Identity("j", "t"), tokens[0])
    assert "# deep" in path.read_text()
    assert len(read_identities(path)) == 2
    path.write_text("tokens: [{name: i, tenant: t, hash: '" + hash_of(A) + "'}]\n")
    with pytest.raises(KVHearthError, match="in a line of its own"):
        add_token(path, Identity("j", "t"), tokens[0])
