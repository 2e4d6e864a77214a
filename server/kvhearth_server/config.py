"""Every setting of the daemon, once: flags, environment, YAML and help are derived from it.

The order is flag > ``KVHEARTH_*`` environment > YAML file > default. ``Settings(...)`` itself reads
nothing from outside, so that a test gets exactly what it writes; ``load_settings`` reads all of it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvhearth import faults
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.settings_file import (
    WRONG_CHARS_MAX,
    cut,
    one_line,
    read_settings_file,
)
from kvhearth_server.units import format_size
from kvhearth_server.values import (
    HttpAddress,
    OptionalSize,
    Seconds,
    Shown,
    Size,
    Tenants,
    TenantSetting,
    Uids,
    host_and_port,
    is_loopback,
    lower,
    parse_tenant,
)

__all__ = ["Settings", "Shown", "TenantSetting", "load_settings", "parse_tenant"]

ENV_PREFIX = "KVHEARTH_"
CONFIG_ENV = "KVHEARTH_CONFIG"
ATTACH_SOCKET_NAME = "attach.sock"
GRPC_SOCKET_NAME = "grpc.sock"
CALLS_SOCKET_NAME = "calls.sock"
DEFAULT_TENANT_NAME = "default"
HUGEPAGE_BYTES = 2 << 20
PAGE_BYTES = 4096
SOCKET_PATH_BYTES_MAX = 107  # sun_path is 108 bytes and ends in a zero
_PROBLEMS_MAX = 20
_NAME_CHARS_MAX = 64
_VALUE_CHARS_MAX = 200


class Settings(BaseSettings):
    """The daemon's settings. Frozen; sizes in bytes, durations in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True
    )

    socket_dir: Path = Field(
        Path("/run/kvhearth"), description="Directory of the unix sockets and the admin token."
    )
    memory: Size = Field(
        1 << 30, gt=0, description="Memory of all tenants together; rounded down to whole slabs."
    )
    arena_dir: Path | None = Field(
        None,
        description="Directory on hugetlbfs or tmpfs for the arena's files: the cache survives a "
        "restart of the daemon. Without it the memory is anonymous.",
    )
    hugepages: Literal["require", "prefer", "off"] = Field(
        "prefer", description="2 MiB pages: refuse to start without, step down, or do not use them."
    )
    slab_bytes: Size = Field(64 << 20, description="What is given to one slot size at a time.")
    slot_bytes_min: Size = Field(16 << 10, description="Smallest slot; a power of two.")
    tenants: Tenants = Field(
        (),
        description="A tenant with its own segment; repeat for more (environment: separate by "
        "spaces). Default: one tenant named 'default' with all the memory.",
    )
    allow_uids: Uids = Field(
        (), description="Further user ids of the default tenant, beside the daemon's own."
    )
    held_fraction_max: float = Field(
        0.8,
        gt=0,
        lt=1,
        description="Part of a segment that leases, stocks, pins and quarantine may hold together.",
    )
    stock_fraction_max: float = Field(
        0.25, gt=0, lt=1, description="Part of a segment that one group may hold reserved."
    )
    namespace_quota: OptionalSize = Field(
        None,
        gt=0,
        description="Most memory of one namespace, half of it reserved. Default: no quota.",
    )
    keys_max: int = Field(8192, ge=1, le=1 << 20, description="Most keys in one request.")
    message_bytes_max: Size = Field(
        4 << 20, ge=64 << 10, le=1 << 30, description="Longest message that is taken."
    )
    sessions_max: int = Field(256, ge=1, le=65536, description="Most attached processes.")
    namespaces_max: int = Field(1024, ge=1, le=1 << 20, description="Most namespaces.")
    leases_max: int = Field(4096, ge=1, le=1 << 20, description="Most leases of one group.")
    pins_max: int = Field(1024, ge=1, le=65535, description="Most pins of one namespace.")
    pin_ttl_max_s: Seconds = Field(86400, description="Longest time to live of a pin.")
    attach_timeout_s: Seconds = Field(5, gt=0, description="Longest handshake of an attach.")
    drain_timeout_s: Seconds = Field(
        10, description="At shutdown: how long calls in flight may take to end."
    )
    drain_grace_s: Seconds = Field(
        0.5,
        description="How long a dead client's slots stay unused after its mapping is gone "
        "(its GPU's last write).",
    )
    drain_grace_no_pidfd_s: Seconds = Field(
        5, description="The same where the kernel cannot tell a process's end (before Linux 6.5)."
    )
    eviction: Literal["s3fifo", "sieve"] = Field("s3fifo", description="Eviction policy.")
    switch_interval_s: Seconds = Field(
        0.0005, gt=0, le=0.1, description="Python's thread switch interval (GIL) in the daemon."
    )
    sum_threads: int = Field(1, ge=1, le=64, description="Threads that take checksums.")
    verify_adopted: bool = Field(
        True,
        description="Verify adopted blocks in the background after a restart; readers verify "
        "what was not reached yet.",
    )
    http: HttpAddress = Field(
        "127.0.0.1:9460",
        description="Where metrics, probes and operators' HTTP are served: HOST:PORT (port 0: any "
        "free one), or off.",
    )
    http_insecure: bool = Field(
        False,
        description="Serve HTTP on an address that other machines may reach; it is not encrypted.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)] = (
        Field("info", description="Least level that is logged.")
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="Form of the log on stderr; auto is console on a terminal, else json."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller passes; ``load_settings`` merges the other sources by name."""
        return (init_settings,)

    @field_validator("socket_dir", "arena_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        if "\0" in str(value):
            raise ValueError("a path has no zero byte; choose another directory")
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError("not UTF-8, which gRPC wants; choose another directory") from None
        try:
            return Path(os.path.abspath(value.expanduser()))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"not a directory here: {error}; write it from / on") from None

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = [*self._size_problems(), *self._tenant_problems()]
        path_bytes = len(os.fsencode(self.attach_socket))
        if path_bytes > SOCKET_PATH_BYTES_MAX:
            problems.append(
                f"socket_dir: {str(self.attach_socket)!r} has {path_bytes} bytes, a unix socket's "
                f"path has at most {SOCKET_PATH_BYTES_MAX}; choose a shorter directory"
            )
        if self.stock_fraction_max > self.held_fraction_max:
            problems.append(
                f"stock_fraction_max: {self.stock_fraction_max} is more than held_fraction_max "
                f"({self.held_fraction_max}); lower it"
            )
        address = self.http_address
        if address and not self.http_insecure and not is_loopback(address[0]):
            problems.append(
                f"http: other machines may reach {self.http}; give a loopback address such as "
                "127.0.0.1:9460, or say http_insecure"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _size_problems(self) -> list[str]:
        slab, slot = self.slab_bytes, self.slot_bytes_min
        if slot < PAGE_BYTES or slot & (slot - 1):
            return [f"slot_bytes_min: {slot} is not a power of two of at least {PAGE_BYTES}"]
        if slab <= 0 or slab % HUGEPAGE_BYTES:
            return [f"slab_bytes: {format_size(slab)} is not a multiple of 2MiB; try 64MiB"]
        if slab % slot:
            return [
                f"slab_bytes: {format_size(slab)} is not a multiple of slot_bytes_min "
                f"({format_size(slot)}); try 64MiB and 16KiB"
            ]
        if self.memory < slab:
            return [
                f"memory: {format_size(self.memory)} is less than one slab "
                f"({format_size(slab)}); give more memory or lower slab_bytes"
            ]
        return []

    def _tenant_problems(self) -> list[str]:
        problems = []
        names = [tenant.name for tenant in self.tenants]
        uids = [uid for tenant in self.tenants for uid in tenant.uids]
        total = sum(tenant.bytes for tenant in self.tenants)
        if len(set(names)) < len(names):
            problems.append("tenants: a name is there twice; give each tenant its own")
        if len(set(uids)) < len(uids):
            problems.append("tenants: a user id is there twice; a user id is of one tenant")
        problems += [
            f"tenants: {tenant.name} has {format_size(tenant.bytes)}, less than one slab "
            f"({format_size(self.slab_bytes)}); give it more or lower slab_bytes"
            for tenant in self.tenants
            if tenant.bytes < self.slab_bytes
        ]
        if total > self.memory:
            problems.append(
                f"tenants: {format_size(total)} together is more than memory "
                f"({format_size(self.memory)}); raise memory or give them less"
            )
        if self.tenants and self.allow_uids:
            problems.append("allow_uids: is for the default tenant only; name the uids in tenants")
        return problems

    @property
    def attach_socket(self) -> Path:
        """Where engines attach."""
        return self.socket_dir / ATTACH_SOCKET_NAME

    @property
    def calls_socket(self) -> Path:
        """Where engines call."""
        return self.socket_dir / CALLS_SOCKET_NAME

    @property
    def grpc_socket(self) -> Path:
        """Where decisions are asked for."""
        return self.socket_dir / GRPC_SOCKET_NAME

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of HTTP; None if it is off."""
        return host_and_port(self.http)

    @property
    def memory_bytes(self) -> int:
        """``memory`` in whole slabs."""
        return self.memory // self.slab_bytes * self.slab_bytes

    def effective_tenants(self, own_uid: int) -> tuple[TenantSetting, ...]:
        """The tenants that the daemon of user ``own_uid`` serves, their bytes in whole slabs."""
        if not self.tenants:
            uids = tuple(dict.fromkeys((own_uid, *self.allow_uids)))
            return (TenantSetting(DEFAULT_TENANT_NAME, uids, self.memory_bytes),)
        slab = self.slab_bytes
        return tuple(TenantSetting(t.name, t.uids, t.bytes // slab * slab) for t in self.tenants)


def load_settings(flags: Mapping[str, object], config_path: Path | None = None) -> Settings:
    """The settings from flags, environment and YAML file.

    Args:
        flags: by field name; only those that were given.
        config_path: the YAML file; without it the one that ``KVHEARTH_CONFIG`` names, if any.

    Raises:
        KVHearthError: ``CONFIG_INVALID``; it names each bad setting, its value and the fix.
    """
    path = config_path or (Path(found) if (found := os.environ.get(CONFIG_ENV)) else None)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    from_env = EnvSettingsSource(Settings)()
    for values, origin in (
        (read_settings_file(path), lambda name: f"{name} (in {path})"),
        (from_env, lambda name: ENV_PREFIX + name.upper()),
        (dict(flags), lambda name: "--" + name.replace("_", "-")),
    ):
        merged |= values
        origins |= {name: origin(name) for name in values}
    # Told apart here, because pydantic-settings takes names like _env_file for its own arguments.
    unknown = [name for name in merged if name not in Settings.model_fields]
    problems = [
        f"{cut(origins[name], WRONG_CHARS_MAX)}: there is no such setting; {_hint(name)}"
        for name in unknown
    ]
    try:
        settings = Settings(**{n: v for n, v in merged.items() if n not in unknown})
    except ValidationError as error:
        problems += [_explain(dict(line), merged, origins) for line in error.errors()]
    if problems:
        more = len(problems) - _PROBLEMS_MAX
        told = problems[:_PROBLEMS_MAX] + ([f"and {more} more"] if more > 0 else [])
        raise KVHearthError(Reason.CONFIG_INVALID, one_line("; ".join(told)))
    return settings


def unread_environment() -> list[str]:
    """``KVHEARTH_*`` variables that are set and that no setting reads, sorted: probably misspelt.

    They are worth a warning and not a refusal: Kubernetes sets ``KVHEARTH_PORT`` and the like in
    every pod beside a Service of that name.
    """
    known = {CONFIG_ENV, faults.ENVIRONMENT_NAME}
    known |= {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    return sorted(n for n in os.environ if n.startswith(ENV_PREFIX) and n not in known)


def _explain(
    line: Mapping[str, Any], written: Mapping[str, object], origins: Mapping[str, str]
) -> str:
    """One line of pydantic's as a sentence for a person: setting, value, what is wrong, fix."""
    cause = line.get("ctx", {}).get("error")
    wrong = str(cause) if cause is not None else str(line["msg"])
    if not line["loc"]:
        return wrong
    name = str(line["loc"][0])
    value = cut(repr(written[name]), _VALUE_CHARS_MAX)
    return f"{origins[name]}: {value}: {wrong[:1].lower()}{cut(wrong[1:], WRONG_CHARS_MAX)}"


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name[:_NAME_CHARS_MAX], Settings.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else "see kvhearth serve --help"
