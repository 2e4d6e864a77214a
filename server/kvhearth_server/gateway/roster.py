"""The file of identities: hashes of tokens, and names in certificates, with tenant, role, bounds.

The file is YAML: two lists, ``tokens`` and ``certificates``. It holds no secret that opens a door,
yet it tells who has one, so nobody else may read it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import YAML_BYTES_MAX, one_line, parse_yaml
from kvhearth_server.config.value_types import check_tenant_name, parse_size
from kvhearth_server.gateway.identity import Bounds, Identity, Role
from kvhearth_server.ownership import read_secret, replace_file

TOKEN_BYTES = 32
TOKEN_MARK = "kvh_"
"""First characters of tokens made here, by which scanners of source code can find leaked ones."""
IDENTITIES_MAX = 16_384
_DIGEST_BYTES = 32
_NODES_MAX = 16 * IDENTITIES_MAX
_NAME = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,126}[\x21-\x7e])?")
_TOKEN_FIELDS = frozenset(("name", "tenant", "role", "hash", "bounds"))
_CERTIFICATE_FIELDS = frozenset(("name", "tenant", "role", "cn", "uri", "bounds"))
_BOUNDS = frozenset(each.name for each in fields(Bounds))
_I64_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Roster:
    """The identities of one file.

    Attributes:
        tokens: identities by the SHA-256 digest of their random token.
        names, uris: identities by a certificate's common name, and by its URI.
        rows: name, kind and identity of each row, in the file's order.
    """

    tokens: Mapping[bytes, Identity] = field(default_factory=dict)
    names: Mapping[str, Identity] = field(default_factory=dict)
    uris: Mapping[str, Identity] = field(default_factory=dict)
    rows: Sequence[tuple[str, Identity]] = ()

    def of_token(self, token: str) -> Identity | None:
        """Return the identity of a token. The time of the search tells nothing about others."""
        return self.tokens.get(digest_of(token))

    def certified(self, certificate: Mapping[str, object]) -> Identity | None:
        """Return the identity of a verified certificate: by a URI, else by its only common name."""
        for uri in certificate_names(certificate, "URI"):
            if uri in self.uris:
                return self.uris[uri]
        names = certificate_names(certificate, "commonName")
        return self.names.get(names[0]) if len(names) == 1 else None


def certificate_names(certificate: Mapping[str, Any], kind: str) -> list[str]:
    """Return a certificate's names of a kind: ``commonName``, or ``URI`` of its alternatives."""
    if kind == "commonName":
        pairs = [pair for part in certificate.get("subject", ()) for pair in part]
    else:
        pairs = list(certificate.get("subjectAltName", ()))
    return [str(value) for name, value in pairs if name == kind]


def digest_of(token: str) -> bytes:
    """Return the digest by which a token is found."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def read_roster(path: Path) -> Roster:
    """Read a file of identities.

    Raises:
        KVHearthError: ``config_invalid``: it cannot be read, others can read it, or a row is wrong.
    """
    try:
        return parse_roster(read_secret(path, YAML_BYTES_MAX))
    except OSError as error:
        wrong = error.strerror or str(error)
    except (ValueError, yaml.YAMLError) as error:
        wrong = _wrong(error)
    raise KVHearthError(
        Reason.CONFIG_INVALID,
        one_line(f"tokens_file: {path}: {wrong}; kvhearth token new writes such a file"),
    )


def _wrong(error: Exception) -> str:
    """Return an error's cause without the lines of the file that PyYAML quotes."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'not YAML'}"


def parse_roster(data: bytes) -> Roster:
    """Parse a file of identities; the message of an error has no hash.

    Raises:
        ValueError: a row is wrong.
        yaml.YAMLError: it is not YAML.
    """
    loaded = _tables(data)
    tokens = dict[bytes, Identity]()
    names, uris = dict[str, Identity](), dict[str, Identity]()
    rows, known = list[tuple[str, Identity]](), dict[str, Identity]()
    for number, row in enumerate(loaded["tokens"], 1):
        with _naming(f"token {number}"):
            identity = _identity(row, _TOKEN_FIELDS, "", known)
            kind, _, rest = str(row.get("hash", "")).partition(":")
            if kind != "sha256":
                raise ValueError("hash: write sha256:HEX, as kvhearth token new does")
            digest = _hex(rest)
            if digest in tokens:
                raise ValueError("its hash is there twice; a token has one identity")
            tokens[digest] = identity
            rows.append((kind, identity))
    for number, row in enumerate(loaded["certificates"], 1):
        with _naming(f"certificate {number}"):
            kind, table = ("uri", uris) if "uri" in row else ("cn", names)
            name = str(row.get(kind, ""))
            identity = _identity(row, _CERTIFICATE_FIELDS, name, known)
            if not name or ("uri" in row and "cn" in row) or name in table:
                raise ValueError("write its cn or its uri, which no other row has")
            table[name] = identity
            rows.append((kind, identity))
    return Roster(tokens, names, uris, rows)


def _tables(data: bytes) -> dict[str, list[Mapping[str, Any]]]:
    loaded = parse_yaml(data, _NODES_MAX)
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict) or not loaded.keys() <= {"tokens", "certificates"}:
        raise ValueError("write two lists: tokens and certificates")
    tables = {name: loaded.get(name) or [] for name in ("tokens", "certificates")}
    for name, table in tables.items():
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            raise ValueError(f"{name}: write a list of rows such as {{name: a, tenant: default}}")
    if sum(map(len, tables.values())) > IDENTITIES_MAX:
        raise ValueError(f"more than {IDENTITIES_MAX} rows")
    return tables


@contextlib.contextmanager
def _naming(row: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row}: {error}") from None


def _identity(
    row: Mapping[str, Any], known_fields: frozenset[str], name: str, known: dict[str, Identity]
) -> Identity:
    """Return a row's identity. Rows of one name are one identity, so they must agree."""
    unknown = sorted(str(each) for each in row.keys() - known_fields)
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:64]!r}; it has {', '.join(known_fields)}")
    found = Identity(
        str(row.get("name", name)),
        str(row.get("tenant", "")),
        parse_role(row.get("role", Role.ENGINE)),
        parse_bounds(row.get("bounds") or {}),
    )
    if _NAME.fullmatch(found.name) is None:
        raise ValueError("name: write 1..128 printable ASCII characters")
    check_tenant_name(found.tenant)
    if known.setdefault(found.name, found) != found:
        raise ValueError(f"{found.name!r} is there with another tenant, role or bounds")
    return found


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


def _hex(text: str) -> bytes:
    """Return the digest of hex digits."""
    with contextlib.suppress(ValueError):
        found = bytes.fromhex(text)
        if len(found) == _DIGEST_BYTES:
            return found
    raise ValueError(f"hash: has {2 * _DIGEST_BYTES} hex digits")


def new_token() -> str:
    """Return a random token of 256 bits."""
    return TOKEN_MARK + base64.urlsafe_b64encode(secrets.token_bytes(TOKEN_BYTES)).decode()[:-1]


def hash_of(token: str) -> str:
    """Return the hash of a random token, as a row has it."""
    return "sha256:" + digest_of(token).hex()


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
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two at once would lose one's row
            old = read_secret(path, YAML_BYTES_MAX) if path.exists() else b""
            parse_roster(old)
            new = _with_row(old, row)
            parse_roster(new)
            replace_file(path, new)
        finally:
            os.close(folder)
    except OSError as error:
        wrong = error.strerror or str(error)
    except (ValueError, yaml.YAMLError) as error:
        wrong = _wrong(error)
    else:
        return
    raise KVHearthError(Reason.CONFIG_INVALID, one_line(f"tokens_file: {path}: {wrong}; mend it"))


def _with_row(old: bytes, row: Mapping[str, object]) -> bytes:
    """Return the file with one more token: under the line ``tokens:``, or written anew."""
    wanted = _tables(old)
    wanted["tokens"] = [*wanted["tokens"], row]
    line = "- " + yaml.safe_dump(dict(row), default_flow_style=True, width=1 << 20, sort_keys=False)
    text = old.decode()
    if "tokens:" not in text.splitlines():
        text = text.rstrip() + "\n\ntokens:\n" if text.strip() else "tokens:\n"
    head, mark, rest = ("\n" + text).partition("\ntokens:\n")
    indent = re.match(r" *(?=- )", rest)
    for candidate in (
        f"{head}{mark}{indent[0] if indent else ''}{line}{rest}"[1:],
        _dumped(wanted),
    ):
        with contextlib.suppress(ValueError, yaml.YAMLError):
            found = _tables(candidate.encode())
            same = sorted(map(repr, found["tokens"])) == sorted(map(repr, wanted["tokens"]))
            if same and found["certificates"] == wanted["certificates"]:
                return candidate.encode()
    raise ValueError("a token cannot be appended")


def _dumped(tables: Mapping[str, object]) -> str:
    full = {name: table for name, table in tables.items() if table}
    return yaml.safe_dump(full, sort_keys=False, allow_unicode=True)
