"""URLs of remotes: ``s3://bucket/prefix?endpoint=https://host``, ``valkeys://host:6379/prefix``.

And the rule by which a bucket drops old blocks, since nothing else evicts there.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import parse_duration_s
from kvhearth_server.tiers.remote.names import LAYOUT

_EXAMPLES = {
    "s3": "s3://bucket/prefix?endpoint=https://host&region=r",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix?account=name",
    "file": "file:///mnt/shared/kv",
    "valkey": "valkey://127.0.0.1:6379/prefix",
    "valkeys": "valkeys://host:6379,host2:6379/prefix?cluster=yes&user=name",
    "mooncake": "mooncake://host:50051/prefix?insecure=yes",
}
_DEFAULT_PORTS = {"valkey": 6379, "valkeys": 6379, "mooncake": 50051}
_SECRETS = frozenset(
    (
        *("password", "pass", "secret", "token", "key_id", "access_key", "secret_key", "sas"),
        *("access_key_id", "secret_access_key", "session_token", "account_key", "credentials"),
    )
)
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_PORTS = range(1, 65536)
_DAY_S = 86400.0
_DEFAULT_DAYS = 7


@dataclass(frozen=True)
class RemoteUrl:
    """A remote, as its URL names it.

    Attributes:
        scheme: ``s3``, ``gs``, ``az``, ``file``, ``valkey``, ``valkeys`` or ``mooncake``.
        bucket: bucket or container; the directory of ``file``; empty for servers.
        prefix: part of every object's name, without slashes at its ends; may be empty.
        hosts: host and port of each server; empty for buckets.
        endpoint: URL of the server of a bucket; empty for the provider's own.
        region: of the bucket.
        account: of an Azure container.
        user: name that a Valkey server knows.
        secret_file: file with the secret: a password; for ``s3`` two lines, the key's id and the
            key, and a session's token on a third; for ``gs`` a service account; for ``az`` the
            account's key. Empty for the client library's own chain of environment and metadata.
        ca, cert, key: files of certificates to trust, and of this host's own.
        ttl_s: time after which the remote may drop a block; 0 for never.
        cluster: whether the servers are a cluster.
        virtual_hosts: whether the bucket is a part of the host's name.
        protocol: ``tcp`` or ``rdma``.
        device: RDMA device.
        insecure: whether plain text to other hosts is accepted.
    """

    scheme: str
    bucket: str = ""
    prefix: str = ""
    hosts: tuple[tuple[str, int], ...] = ()
    endpoint: str = ""
    region: str = ""
    account: str = ""
    user: str = ""
    secret_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    ttl_s: float = 0.0
    cluster: bool = False
    virtual_hosts: bool = False
    protocol: str = "tcp"
    device: str = ""
    insecure: bool = False
    text: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """Scheme, place and prefix, for messages and metrics' labels."""
        host = ",".join(f"{name}:{port}" for name, port in self.hosts)
        path = "/".join(filter(None, (self.bucket or host, self.prefix)))
        return f"{self.scheme}://{path}"


def _bad(message: str) -> KVHearthError:
    return KVHearthError(Reason.CONFIG_INVALID, f"remote: {message}")


def _one_of(one: str, other: str, name: str, value: str) -> str:
    if value not in (one, other):
        raise _bad(f"{name}={value!r} is neither {one} nor {other}")
    return value


def _yes(name: str, value: str) -> bool:
    return _one_of("yes", "no", name, value) == "yes"


def _text(name: str, value: str) -> str:
    if not value or not value.isprintable():
        raise _bad(f"{name} is empty or not printable; give a value or leave it out")
    return value


def _path(name: str, value: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise _bad(f"{name}={value!r} is no absolute path of a file")
    return value


def _duration(name: str, value: str) -> float:
    try:
        seconds = parse_duration_s(value)
    except ValueError as error:
        raise _bad(f"{name}={value!r} is {error}") from None
    if not 1.0 <= seconds <= 10 * 365 * 86400.0:
        raise _bad(f"{name}={value!r} is not 1 s to 10 years")
    return seconds


def _endpoint(name: str, value: str) -> str:
    parts = urlsplit(value)
    _refuse_user(parts)
    if parts.scheme not in ("http", "https") or not _host(parts) or parts.query or parts.fragment:
        raise _bad(f"{name}={value!r} is not of the form https://host:port")
    return value.rstrip("/")


_READERS: dict[str, Callable[[str, str], object]] = {
    **dict.fromkeys(("region", "account", "user", "device"), _text),
    **dict.fromkeys(("secret_file", "ca", "cert", "key"), _path),
    **dict.fromkeys(("cluster", "virtual_hosts", "insecure"), _yes),
    "endpoint": _endpoint,
    "ttl": _duration,
    "protocol": partial(_one_of, "tcp", "rdma"),
}
_BUCKETS = ("endpoint", "secret_file", "ca", "ttl", "insecure")
_SERVERS = ("cluster", "user", "secret_file", "ttl", "insecure")
_OPTIONS = {
    "s3": ("region", "virtual_hosts", *_BUCKETS),
    "gs": _BUCKETS,
    "az": ("account", *_BUCKETS),
    "file": (),
    "valkey": _SERVERS,
    "valkeys": (*_SERVERS, "ca", "cert", "key"),
    "mooncake": ("protocol", "device", "insecure"),
}


def parse_remote(text: str) -> RemoteUrl:
    """Parse the URL of a remote.

    Raises:
        KVHearthError: ``config_invalid`` with a sentence that says what to do; never with a secret.
    """
    try:
        parts = urlsplit(text)
        scheme = parts.scheme
    except ValueError as error:
        raise _bad(f"the URL cannot be read ({error}); write {_EXAMPLES['s3']}") from None
    if scheme not in _OPTIONS:
        raise _bad(f"{scheme or 'no'} scheme is known; use one of {', '.join(_OPTIONS)}")
    _refuse_user(parts)
    if parts.fragment:
        raise _bad(f"a URL has no fragment; write {_EXAMPLES[scheme]}")
    options = _options(scheme, parts.query)
    if scheme == "file":
        return _file_url(parts, text)
    found = RemoteUrl(
        scheme,
        bucket="" if scheme in _DEFAULT_PORTS else _bucket(parts),
        prefix=_prefix(parts),
        hosts=_hosts(parts) if scheme in _DEFAULT_PORTS else (),
        text=text,
        **options,  # type: ignore[arg-type]
    )
    _check(found)
    return found


def _refuse_user(parts: SplitResult) -> None:
    if "@" in parts.netloc:
        raise _bad(
            "a URL holds no credentials, since it is shown in logs and process lists: use "
            "secret_file=/path, user=NAME for Valkey, or the provider's environment variables"
        )


def _options(scheme: str, query: str) -> dict[str, object]:
    known = _OPTIONS[scheme]
    found: dict[str, object] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name.lower() in _SECRETS or name.lower().startswith(("aws_", "azure_", "google_")):
            raise _bad(
                f"the URL holds a secret ({name}), and it is shown in logs and process lists: use "
                "secret_file=/path or the provider's environment variables"
            )
        if name not in known:
            message = f"unknown parameter {name!r} of {scheme}://"
            raise _bad(f"{message}; known: {', '.join(known) or 'none'}")
        field_name = "ttl_s" if name == "ttl" else name
        if field_name in found:
            raise _bad(f"{name} is given twice; give it once")
        found[field_name] = _READERS[name](name, value)
    return found


def _file_url(parts: SplitResult, text: str) -> RemoteUrl:
    path = unquote(parts.path).rstrip("/")
    if parts.netloc or not path.startswith("/") or "\0" in path:
        raise _bad(f"a directory is written {_EXAMPLES['file']} (three slashes)")
    if ".." in Path(path).parts:
        raise _bad("the directory's path has a '..'; write it out")
    return RemoteUrl("file", bucket=path, text=text)


def _host(parts: SplitResult) -> str:
    try:
        _ = parts.port
        return parts.hostname or ""
    except ValueError:
        return ""


def _bucket(parts: SplitResult) -> str:
    if not _BUCKET.fullmatch(parts.netloc):
        raise _bad(f"{parts.netloc!r} is no bucket's name; write {_EXAMPLES[parts.scheme]}")
    return parts.netloc


def _prefix(parts: SplitResult) -> str:
    prefix = parts.path.strip("/")
    if prefix and (not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise _bad(
            f"prefix {prefix!r} has other characters than letters, digits, '.', '_', '-', '/'; "
            f"write {_EXAMPLES[parts.scheme]}"
        )
    return prefix


def _hosts(parts: SplitResult) -> tuple[tuple[str, int], ...]:
    found = []
    for each in parts.netloc.split(","):
        place = urlsplit(f"//{each}")
        host = _host(place)
        port = place.port if host else None
        if not host or (port is not None and port not in _PORTS):
            raise _bad(f"{each!r} is no host and port; write {_EXAMPLES[parts.scheme]}")
        found.append((host, port or _DEFAULT_PORTS[parts.scheme]))
    return tuple(found)


def is_local(host: str) -> bool:
    """Whether a host is this machine's loopback, which nobody else can listen to."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(url: RemoteUrl) -> None:
    if url.scheme == "mooncake" and not url.insecure:
        raise _bad(
            "Mooncake has neither encryption nor passwords, and any peer can read its pool: use it "
            "in a closed network only and add insecure=yes"
        )
    plain = [host for host, _ in url.hosts] if url.scheme == "valkey" else []
    if url.endpoint.startswith("http://"):
        plain = [_host(urlsplit(url.endpoint))]
    open_hosts = [host for host in plain if not is_local(host)]
    if open_hosts and not url.insecure:
        safe = "valkeys://" if url.scheme == "valkey" else "endpoint=https://"
        raise _bad(
            f"{open_hosts[0]} would be reached in plain text, which everybody on the way can read "
            f"and change: use {safe}, or add insecure=yes in a closed network"
        )
    if url.key and not url.cert:
        raise _bad("key needs cert, this host's own certificate")
    if url.cert and not url.key:
        raise _bad("cert needs key, the key of this host's certificate")
    if len(url.hosts) > 1 and not url.cluster and url.scheme != "mooncake":
        raise _bad("several hosts are the nodes of a cluster; add cluster=yes")
    if url.scheme == "mooncake" and len(url.hosts) > 1:
        raise _bad("one Mooncake master is named; remove the others")
    if url.scheme == "az" and not (url.account or url.endpoint):
        raise _bad(f"az:// needs account=NAME; write {_EXAMPLES['az']}")


def lifecycle_rule(url: RemoteUrl) -> str:
    """Return a command that gives a bucket its rule; blocks live for the URL's ``ttl``, at least a
    day, or for a week.
    """
    days = max(round(url.ttl_s / _DAY_S), 1) if url.ttl_s else _DEFAULT_DAYS
    prefix = "/".join(filter(None, (url.prefix, LAYOUT))) + "/"
    if url.scheme == "gs":
        condition = {"age": days, "matchesPrefix": [prefix]}
        rule = json.dumps({"rule": [{"action": {"type": "Delete"}, "condition": condition}]})
        return (
            f"echo {shlex.quote(rule)} > rule.json && gcloud storage buckets update "
            f"gs://{url.bucket} --lifecycle-file=rule.json"
        )
    if url.scheme == "az":
        filters = {"blobTypes": ["blockBlob"], "prefixMatch": [f"{url.bucket}/{prefix}"]}
        actions = {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": days}}}
        definition = {"actions": actions, "filters": filters}
        rule = json.dumps(
            {"rules": [{"name": "kvhearth", "type": "Lifecycle", "definition": definition}]}
        )
        return (
            f"az storage account management-policy create --account-name {url.account or 'NAME'} "
            f"--policy {shlex.quote(rule)}"
        )
    expiry = {
        "ID": "kvhearth",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    place = f" --endpoint-url {shlex.quote(url.endpoint)}" if url.endpoint else ""
    rule = json.dumps({"Rules": [expiry]})
    return (
        f"aws s3api put-bucket-lifecycle-configuration --bucket {url.bucket}{place} "
        f"--lifecycle-configuration {shlex.quote(rule)}"
    )
