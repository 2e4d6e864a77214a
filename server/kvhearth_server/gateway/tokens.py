"""Identities of remote peers, and the file that has them: hashes of tokens, names in certificates.

The file is YAML: two lists, ``tokens`` and ``certificates``. It holds no secret that lets anybody
in, yet it tells who has one, so nobody else may read it.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import YAML_BYTES_MAX, parse_yaml
from kvhearth_server.config.value_types import check_tenant_name, parse_size
from kvhearth_server.observability.logs import one_line
from kvhearth_server.ownership import read_secret, replace_file

TOKEN_BYTES = 32
TOKEN_MARK = "kvh_"
"""First characters of tokens made here, by which scanners of source code can find leaked ones."""
IDENTITIES_MAX = 16_384
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,126}[\x21-\x7e])?")
_FIELDS = {
    "tokens": frozenset(("name", "tenant", "role", "hash", "bounds")),
    "certificates": frozenset(("name", "tenant", "role", "cn", "uri", "bounds")),
}
_I64_MAX = (1 << 63) - 1


class Role(enum.StrEnum):
    """What an identity may do: an ``engine`` stores and loads, an ``operator`` may also use the
    daemon's HTTP.
    """

    ENGINE = "engine"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Bounds:
    """Bounds of one identity over all its sessions; 0 for none.

    Attributes:
        sessions, connections: open at once.
        calls_per_s: calls and data requests, on average over a second.
        held_bytes, held_blocks: bound by its leases and reservations at once.
    """

    sessions: int = 0
    connections: int = 0
    calls_per_s: int = 0
    held_bytes: int = 0
    held_blocks: int = 0


_BOUNDS = frozenset(each.name for each in fields(Bounds))


@dataclass(frozen=True)
class Identity:
    """A remote peer's identity.

    Attributes:
        name: for the log; never the secret.
        tenant: the daemon's tenant whose blocks it uses.
    """

    name: str
    tenant: str
    role: Role = Role.ENGINE
    bounds: Bounds = Bounds()


Identities = Mapping[tuple[str, str], Identity]
"""Identities of a file, in its order, by what shows them: ``sha256`` and a token's digest, ``cn``
or ``uri`` and the name in a certificate.
"""


def of_token(identities: Identities, token: str) -> Identity | None:
    """Return the identity of a token. The time of the search tells nothing about others."""
    return identities.get(("sha256", _digest(token)))


def of_certificate(identities: Identities, certificate: Mapping[str, object]) -> Identity | None:
    """Return the identity of a verified certificate: by a URI, else by its only common name."""
    names = certificate_names(certificate, "commonName")
    keys = [("uri", uri) for uri in certificate_names(certificate, "URI")]
    keys += [("cn", name) for name in names if len(names) == 1]
    return next((identities[key] for key in keys if key in identities), None)


def certificate_names(certificate: Mapping[str, Any], kind: str) -> list[str]:
    """Return a certificate's names of a kind: ``commonName``, or ``URI`` of its alternatives."""
    if kind == "commonName":
        pairs = [pair for part in certificate.get("subject", ()) for pair in part]
    else:
        pairs = list(certificate.get("subjectAltName", ()))
    return [str(value) for name, value in pairs if name == kind]


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def read_identities(path: Path) -> Identities:
    """Read a file of identities.

    Raises:
        KVHearthError: ``config_invalid``: it cannot be read, others can read it, or a row is wrong.
    """
    with _naming(path, "kvhearth token new writes such a file"):
        return _parse(read_secret(path, YAML_BYTES_MAX))


@contextlib.contextmanager
def _naming(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors of a file into ``config_invalid``, without the lines that PyYAML quotes."""
    try:
        yield
        return
    except OSError as error:
        wrong = error.strerror or str(error)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        wrong = f"line {line}: {error.problem or 'not YAML'}"
    except (ValueError, yaml.YAMLError) as error:
        wrong = " ".join(str(error).split())
    raise KVHearthError(Reason.CONFIG_INVALID, one_line(f"tokens_file: {path}: {wrong}; {remedy}"))


def _parse(data: bytes) -> Identities:
    """Parse a file of identities; the message of an error has no hash.

    Raises:
        ValueError: a row is wrong.
        yaml.YAMLError: it is not YAML.
    """
    found = dict[tuple[str, str], Identity]()
    known = dict[str, Identity]()
    for table, rows in _tables(data).items():
        for number, row in enumerate(rows, 1):
            try:
                key, identity = _row(table, row)
                if known.setdefault(identity.name, identity) != identity:
                    raise ValueError(
                        f"{identity.name!r} is there with another tenant, role or bounds"
                    )
                if key in found:
                    raise ValueError(f"its {key[0]} is there twice; each has one identity")
            except ValueError as error:
                raise ValueError(f"{table[:-1]} {number}: {error}") from None
            found[key] = identity
    return found


def _tables(data: bytes) -> dict[str, list[Mapping[str, Any]]]:
    loaded = parse_yaml(data)
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict) or not loaded.keys() <= _FIELDS.keys():
        raise ValueError("write two lists: tokens and certificates")
    tables = {name: loaded.get(name) or [] for name in _FIELDS}
    for name, table in tables.items():
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            raise ValueError(f"{name}: write a list of rows such as {{name: a, tenant: default}}")
    if sum(map(len, tables.values())) > IDENTITIES_MAX:
        raise ValueError(f"more than {IDENTITIES_MAX} rows")
    return tables


def _row(table: str, row: Mapping[str, Any]) -> tuple[tuple[str, str], Identity]:
    """Return what shows a row's identity, and the identity."""
    if unknown := sorted(str(each) for each in row.keys() - _FIELDS[table]):
        known = ", ".join(sorted(_FIELDS[table]))
        raise ValueError(f"unknown field {unknown[0][:64]!r}; it has {known}")
    kind = "uri" if "uri" in row else "cn"
    shown = str(row.get(kind, ""))
    identity = Identity(
        str(row.get("name", shown)),
        str(row.get("tenant", "")),
        parse_role(row.get("role", Role.ENGINE)),
        parse_bounds(row.get("bounds") or {}),
    )
    if _NAME.fullmatch(identity.name) is None:
        raise ValueError("name: write 1..128 printable ASCII characters")
    check_tenant_name(identity.tenant)
    if table == "tokens":
        kind, _, shown = str(row.get("hash", "")).partition(":")
        if kind != "sha256":
            raise ValueError("hash: write sha256:HEX, as kvhearth token new does")
        if _DIGEST.fullmatch(shown) is None:
            raise ValueError("hash: has 64 hex digits")
    elif not shown or ("uri" in row and "cn" in row):
        raise ValueError("write its cn or its uri")
    return (kind, shown), identity


def parse_role(value: object) -> Role:
    """Parse a role's name.

    Raises:
        ValueError: there is no such role.
    """
    try:
        return Role(str(value))
    except ValueError:
        raise ValueError(f"role: write {', '.join(Role)}") from None


def parse_bounds(row: object) -> Bounds:
    """Parse a mapping of bounds.

    Raises:
        ValueError: an unknown bound, or no number.
    """
    if not isinstance(row, dict) or not row.keys() <= _BOUNDS:
        raise ValueError(f"bounds: write {', '.join(sorted(_BOUNDS))}")
    values = {name: parse_size(value) for name, value in row.items()}
    if any(not 0 <= value <= _I64_MAX for value in values.values()):
        raise ValueError("bounds: write numbers from 0 (none) on")
    return Bounds(**values)


def new_token() -> str:
    """Return a random token of 256 bits."""
    return TOKEN_MARK + base64.urlsafe_b64encode(secrets.token_bytes(TOKEN_BYTES)).decode()[:-1]


def hash_of(token: str) -> str:
    """Return the hash of a random token, as a row has it."""
    return f"sha256:{_digest(token)}"


def add_token(path: Path, identity: Identity, token: str) -> None:
    """Append a token's hash to a file of identities, which is made if it does not exist.

    Comments stay. The file is replaced as a whole, so that a reader sees the old or the new one.

    Raises:
        KVHearthError: ``config_invalid``: the file or the new row is wrong.
    """
    path = path.resolve()
    row: dict[str, object] = {
        "name": identity.name,
        "tenant": identity.tenant,
        "role": str(identity.role),
        "hash": hash_of(token),
    }
    if bounds := {name: value for name, value in asdict(identity.bounds).items() if value}:
        row["bounds"] = bounds
    with _naming(path, "mend it"), contextlib.ExitStack() as undo:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)  # two at once would lose one's row
        old = read_secret(path, YAML_BYTES_MAX) if path.exists() else b""
        wanted = {**_parse(old), ("sha256", _digest(token)): identity}
        new = _with_row(old.decode(), row).encode()
        if _parse(new) != wanted:
            raise ValueError("write the line 'tokens:', and each token in a line of its own below")
        replace_file(path, new)


def _with_row(text: str, row: Mapping[str, object]) -> str:
    """Return a file's text with one more token under the line ``tokens:``."""
    line = "- " + yaml.safe_dump(dict(row), default_flow_style=True, width=1 << 20, sort_keys=False)
    if "tokens:" not in text.splitlines():
        text = text.rstrip() + "\n\ntokens:\n" if text.strip() else "tokens:\n"
    head, mark, rest = ("\n" + text).partition("\ntokens:\n")
    indent = re.match(r" *(?=- )", rest)
    return f"{head}{mark}{indent[0] if indent else ''}{line}{rest}"[1:]
