"""Every setting of the daemon, once: flags, environment, YAML and help are derived from it.

``Settings(...)`` itself reads nothing from outside, so that a test gets exactly what it writes;
``config.load_settings`` reads flags, environment and file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvhearth.errors import KVHearthError
from kvhearth.url import (
    ADMIN_SOCKET,
    ATTACH_SOCKET,
    CALLS_SOCKET,
    GRPC_SOCKET,
    SYSTEM_SOCKET_DIR,
)
from kvhearth_server.config.value_types import (
    Address,
    OptionalFile,
    OptionalSize,
    Remote,
    Seconds,
    Size,
    SsdDir,
    SsdDirs,
    Tenants,
    TenantSetting,
    Uids,
    directory,
    format_size,
    host_and_port,
    is_loopback,
    lower,
    on_or_off,
)

ENV_PREFIX = "KVHEARTH_"
DEFAULT_TENANT_NAME = "default"
HUGEPAGE_BYTES = 2 << 20
PAGE_BYTES = 4096
MIB = 1 << 20
SSD_SEGMENT_BYTES_LEAST = 64 << 10
SSD_DIR_BYTES_MAX = 1 << 50
SSD_TOKENS_PART = 64
"""Tokens get at most this part of an SSD directory: blocks are 100 times as large, or more."""
SOCKET_PATH_BYTES_MAX = 107  # sun_path is 108 bytes and ends in a zero


RELOADABLE = frozenset(
    {
        *("sessions_max", "leases_max", "pins_max", "pin_ttl_max_s"),
        *("held_fraction_max", "stock_fraction_max", "pinned_fraction_max"),
        *("ssd_bytes_per_day", "log_level"),
        *("remote_write", "remote_bytes_per_s", "remote_bytes_per_day", "remote_requests_per_s"),
    }
)
"""Settings that a serving daemon applies when it reads them again."""


class Settings(BaseSettings):
    """The daemon's settings. Frozen; sizes in bytes, durations in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True
    )
    _arena_fallback: str = PrivateAttr("")

    socket_dir: Path = Field(
        SYSTEM_SOCKET_DIR,
        description="Directory of the unix sockets and the admin token. For a user who may not "
        "write there: $XDG_RUNTIME_DIR/kvhearth.",
    )
    memory: Size = Field(
        1 << 30, gt=0, description="Memory for all tenants together, rounded down to whole slabs."
    )
    arena_dir: Path | None = Field(
        None,
        description="Directory on hugetlbfs or tmpfs for the arena's files; the cache then "
        "survives a restart of the daemon; none: anonymous memory. Default: /dev/shm/kvhearth-UID "
        "if socket_dir is the default too and there is room, else none.",
    )
    keep_memory: bool = Field(
        False,
        description="Keep the arena's memory across restarts in systemd's descriptor store, and "
        "not in files of arena_dir: a tenant can then cut off none.",
    )
    discard_arena: bool = Field(
        False,
        description="Delete the arena in arena_dir if these settings cannot take it over. By "
        "default the daemon refuses to start.",
    )
    hugepages: Literal["require", "prefer", "off"] = Field(
        "prefer",
        description="Huge pages: require them, prefer them, or do not use them. An arena_dir on "
        "hugetlbfs always requires them.",
    )
    slab_bytes: Size = Field(
        64 << 20, description="Unit in which memory is given to one slot size."
    )
    slot_bytes_min: Size = Field(16 << 10, description="Smallest slot size; a power of two.")
    tenants: Tenants = Field(
        (),
        description="Tenant with SIZE of memory and SSD of the SSD tier, which no other tenant "
        "uses; repeatable (environment: separate by spaces). SSD is by default in proportion to "
        "memory. Default: one tenant named 'default' with everything.",
    )
    allow_uids: Uids = Field(
        (), description="User ids of the default tenant, in addition to the daemon's own."
    )
    held_fraction_max: float = Field(
        0.8,
        gt=0,
        lt=1,
        description="Largest part of a segment that leases, reservations and quarantine hold "
        "together.",
    )
    stock_fraction_max: float = Field(
        0.25, gt=0, lt=1, description="Largest part of a segment that one engine may hold reserved."
    )
    pinned_fraction_max: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Largest part of a segment that pins keep until nothing else is left to evict.",
    )
    namespace_quota: OptionalSize = Field(
        None,
        gt=0,
        description="Memory limit of one namespace; at most half of it reserved. Default: none.",
    )
    shared_index: bool = Field(
        True,
        description="Let engines on this host find blocks in a read-only table, without a call. "
        "Takes up to 0.5 % of memory; needs the native module.",
    )
    keys_max: int = Field(
        8192,
        ge=1,
        le=1 << 20,
        description="Maximum number of keys in one call; clients send longer requests in portions.",
    )
    event_tokens: Size = Field(
        256 << 20,
        ge=0,
        description="Limit of the file with the token ids of stored blocks, which routers need in "
        "the events of engines that publish them: 4 bytes a token and 100 a block. It is in the "
        "first of ssd_dirs, of which it has at most a 64th part, else in arena_dir (on hugetlbfs: "
        "in socket_dir), else in memory. 0: none are kept.",
    )
    message_bytes_max: Size = Field(
        4 << 20, ge=64 << 10, le=1 << 30, description="Maximum size of a message."
    )
    sessions_max: int = Field(
        256, ge=1, le=65536, description="Maximum number of attached processes."
    )
    namespaces_max: int = Field(1024, ge=1, le=1 << 20, description="Maximum number of namespaces.")
    leases_max: int = Field(
        4096, ge=1, le=1 << 20, description="Maximum number of leases of one engine."
    )
    pins_max: int = Field(
        1024, ge=1, le=65535, description="Maximum number of pins of one namespace."
    )
    pin_ttl_max_s: Seconds = Field(86400, description="Maximum time to live of a pin.")
    attach_timeout_s: Seconds = Field(
        5, gt=0, description="Time limit of an attach handshake, and of each frame of a call."
    )
    drain_timeout_s: Seconds = Field(
        10, description="Time limit at shutdown for calls in flight and for write-back to SSD."
    )
    drain_grace_s: Seconds = Field(
        0.5,
        description="Time for which a dead client's slots stay unused after its mapping is gone, "
        "because its GPU may still be writing.",
    )
    drain_grace_no_pidfd_s: Seconds = Field(
        5,
        description="The same time on kernels that do not report a process's end (before "
        "Linux 6.5).",
    )
    switch_interval_s: Seconds = Field(
        0.0005, gt=0, le=0.1, description="Python's thread switch interval in the daemon."
    )
    sum_threads: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of threads that compute checksums in memory; as many more verify "
        "transfers to and from the SSD tier.",
    )
    ssd_dirs: SsdDirs = Field(
        (),
        description="Directory of the SSD tier and the limit of its size; repeatable, one for each "
        "drive, blocks are striped across them (environment: separate by spaces). Default: no SSD "
        "tier.",
    )
    ssd_interface: Literal["auto", "libaio", "threads"] = Field(
        "auto", description="Kernel interface for disk I/O; auto picks the best available."
    )
    ssd_depth: int = Field(
        32, ge=1, le=4096, description="Maximum number of disk requests in flight."
    )
    ssd_segment_bytes: Size = Field(
        0,
        ge=0,
        le=1 << 40,
        description="Size of the log's files in a new directory; 0 chooses it from the directory's "
        "size, usually 256MiB.",
    )
    ssd_flush: bool = Field(
        False,
        description="Acknowledge a block on SSD only after the drive has flushed its cache. Blocks "
        "then survive a power cut; writes are slower.",
    )
    ssd_prewrite: bool = Field(
        False,
        description="Write each new log file once before its first use, so that later writes are "
        "steady. Skipped while ssd_bytes_per_day leaves no room for a whole file.",
    )
    ssd_bytes_per_day: Size = Field(
        0,
        ge=0,
        description="Limit of bytes written per day, all drives together; may be exceeded by one "
        "file. 0: no limit.",
    )
    ssd_admission: Literal["all", "seen_twice"] = Field(
        "all",
        description="Admission policy: write every block, or only blocks stored at least twice.",
    )
    remote: Remote = Field(
        "",
        description="URL of a remote tier behind memory and SSD, shared by the daemons of a fleet: "
        "s3://bucket/prefix?endpoint=https://host&region=r, gs://, az://, valkeys://host:6379, "
        "mooncake://host:50051, file:///mnt/shared/kv. Default: none.",
    )
    remote_write: Literal["reuse", "all", "never"] = Field(
        "reuse",
        description="Blocks that are published to the remote: those that are hit a second time "
        "with all blocks before them, all, or none.",
    )
    remote_staging: Size = Field(
        256 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="Memory of the remote's helper process through which all bytes pass.",
    )
    remote_bytes_per_s: Size = Field(
        0, ge=0, description="Limit of bytes published to the remote per second. 0: no limit."
    )
    remote_bytes_per_day: Size = Field(
        0, ge=0, description="Limit of bytes published to the remote per day. 0: no limit."
    )
    remote_requests_per_s: int = Field(
        0, ge=0, description="Limit of blocks published to the remote per second. 0: no limit."
    )
    remote_fleet_key_file: OptionalFile = Field(
        None,
        description="File with the fleet's secret, which names blocks at remotes and encrypts them "
        "there; the same on all hosts, for the daemon's user only (0600); kvhearth remote init-key "
        "makes one. A remote needs it.",
    )
    grpc: Annotated[Literal["on", "off"], BeforeValidator(on_or_off)] = Field(
        "on",
        description="Engines' calls over gRPC, for clients in other languages that run as the "
        "daemon's user; engines that use frames need none.",
    )
    http: Address = Field(
        "127.0.0.1:9460",
        description="Address of metrics, probes and the operators' HTTP API: HOST:PORT (port 0: "
        "any free port), or off.",
    )
    http_insecure: bool = Field(
        False,
        description="Allow plain HTTP on an address that other machines can reach, without TLS and "
        "tokens.",
    )
    listen: Address = Field(
        "off",
        description="Address of the gateway for engines on other hosts: HOST:PORT, or off. An "
        "address that others can reach needs tls_cert, tls_key, and tokens_file or client_ca.",
    )
    gateway_uids: Uids = Field(
        (),
        description="User ids whose processes may speak for any tenant, as a gateway does. "
        "Default: the daemon's own if listen is set, else none.",
    )
    tls_cert: OptionalFile = Field(
        None,
        description="File (PEM) with the certificate chain of the gateway, and of HTTP on an "
        "address that others can reach. Read again at SIGHUP, as tls_key, client_ca, tokens_file.",
    )
    tls_key: OptionalFile = Field(
        None, description="File (PEM) with the private key of tls_cert; not readable by others."
    )
    client_ca: OptionalFile = Field(
        None,
        description="File (PEM) of the authorities whose certificates peers of the gateway must "
        "have (mTLS). tokens_file maps them to tenants; without a map all are the only tenant's.",
    )
    tokens_file: OptionalFile = Field(
        None,
        description="File (YAML) of identities: hashes of tokens, and names in certificates, with "
        "tenant, role and bounds (kvhearth token new). Not readable by others.",
    )
    insecure: bool = Field(
        False,
        description="Allow a gateway's address that others can reach without TLS or without "
        "identities: whoever reaches it reads and writes the cache.",
    )
    read_token_file: OptionalFile = Field(
        None,
        description="File with a token that only reads over HTTP: sums, and the lists of "
        "sessions, namespaces and leases. Read at the start. Default: the admin token only.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)] = (
        Field("info", description="Lowest level that is logged.")
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="Format of the log on stderr; auto is console on a terminal, else json."
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
        """Use only the caller's values; ``load_settings`` merges the other sources by name."""
        return (init_settings,)

    @property
    def arena_fallback(self) -> str:
        """Reason why an arena that nobody placed is in anonymous memory; "" if it is not."""
        return self._arena_fallback

    def without_arena_dir(self, reason: str) -> Self:
        """Return these settings with the reason why the default ``arena_dir`` is not used."""
        copy = self.model_copy(update={"arena_dir": None})
        copy._arena_fallback = reason
        return copy

    @field_validator("arena_dir", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return None if value == "none" else value

    @field_validator(
        *("socket_dir", "arena_dir", "read_token_file", "remote_fleet_key_file"),
        *("tls_cert", "tls_key", "client_ca", "tokens_file"),
    )
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else directory(value)

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = [*self._size_problems(), *self._tenant_problems(), *self._ssd_problems()]
        problems += self._remote_problems()
        path_bytes = len(os.fsencode(self.attach_socket))
        if path_bytes > SOCKET_PATH_BYTES_MAX:
            problems.append(
                f"socket_dir: {str(self.attach_socket)!r} has {path_bytes} bytes, a unix socket's "
                f"path has at most {SOCKET_PATH_BYTES_MAX}; choose a shorter directory"
            )
        if self.keep_memory and self.arena_dir is None:
            problems.append("keep_memory: needs an arena_dir for the journal; give one on tmpfs")
        if self.stock_fraction_max > self.held_fraction_max:
            problems.append(
                f"stock_fraction_max: {self.stock_fraction_max} is more than held_fraction_max "
                f"({self.held_fraction_max}); lower it"
            )
        problems += self._door_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _door_problems(self) -> list[str]:
        problems = list[str]()
        named = self.tokens_file is not None or self.client_ca is not None
        if (self.tls_cert is None) != (self.tls_key is None):
            problems.append("tls_cert: a certificate and its key go together; give tls_key, too")
        if self.client_ca is not None and self.tls_cert is None:
            problems.append("client_ca: needs TLS; give tls_cert and tls_key")
        address = self.listen_address
        if address and not self.insecure and not is_loopback(address[0]):
            lacks = ["tls_cert and tls_key"] if self.tls_cert is None else []
            lacks += [] if named else ["tokens_file or client_ca"]
            if lacks:
                problems.append(
                    f"listen: other machines may reach {self.listen}; give {', and '.join(lacks)}, "
                    "or a loopback address such as 127.0.0.1:9461, or say insecure"
                )
        if address and len(self.tenants) > 1 and self.tokens_file is None:
            problems.append(
                "listen: with several tenants a peer's identity tells which is its; give "
                "tokens_file (kvhearth token new makes one)"
            )
        if self.http_routable and not self.http_insecure and not self.http_guarded:
            problems.append(
                f"http: other machines may reach {self.http}; give a loopback address such as "
                "127.0.0.1:9460, or tls_cert, tls_key and tokens_file, or say http_insecure"
            )
        return problems

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

    def _remote_problems(self) -> list[str]:
        if not self.remote:
            return []
        from kvhearth_server.tiers.remote.url import parse_remote

        try:
            parse_remote(self.remote)
        except KVHearthError as error:
            return [error.message]
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

    def _ssd_problems(self) -> list[str]:
        if not self.ssd_dirs:
            return []
        from kvhearth_server.engine.epoch_store import RESERVE_BYTES
        from kvhearth_server.tiers.ssd.settings import (
            SEGMENTS_LEAST,
            capacity_least,
            quota_segments,
            segment_bytes_for,
            segments_max,
        )

        wanted = self.ssd_segment_bytes
        if wanted % PAGE_BYTES or 0 < wanted < SSD_SEGMENT_BYTES_LEAST:
            return [
                f"ssd_segment_bytes: {wanted} is not a multiple of {PAGE_BYTES} of at least 64KiB; "
                "try 256MiB, or 0 to have it chosen"
            ]
        problems = list[str]()
        paths = [each.path for each in self.ssd_dirs]
        problems += [
            f"ssd_dirs: {path} is there twice; give each drive one directory"
            for path in sorted({path for path in paths if paths.count(path) > 1})
        ]
        for each in self.ssd_dirs:
            room = max(0, self.ssd_room(each))
            segment = wanted or segment_bytes_for(room)
            least = RESERVE_BYTES + capacity_least(segment)
            if each.bytes < least:
                problems.append(
                    f"ssd_dirs: {each.path} has {format_size(each.bytes)}, too little for the "
                    f"log's files; give it {format_size(-(-least // MIB) * MIB)} or more"
                )
            elif each.bytes > SSD_DIR_BYTES_MAX:
                problems.append(
                    f"ssd_dirs: {each.path} has {format_size(each.bytes)}, more than any drive; "
                    "give it at most 1024TiB"
                )
            else:
                files = segments_max(room, segment)
                problems += [
                    f"tenants: {name} has room for {most} files of {format_size(segment)} in "
                    f"{each.path}, and needs {SEGMENTS_LEAST}; give it more of the SSD tier, or "
                    "lower ssd_segment_bytes"
                    for name, part in self.ssd_quotas().items()
                    if (most := quota_segments(files, part)) < SEGMENTS_LEAST
                ]
        given, whole = sum(t.ssd_bytes for t in self.tenants), sum(d.bytes for d in self.ssd_dirs)
        if given > whole:
            problems.append(
                f"tenants: together they get {format_size(given)} of the SSD tier's "
                f"{format_size(whole)}; give them less"
            )
        return problems

    def ssd_room(self, place: SsdDir) -> int:
        """Return the bytes of an SSD directory that are for blocks."""
        from kvhearth_server.engine.epoch_store import RESERVE_BYTES

        tokens = self.ssd_token_bytes if place == self.ssd_dirs[0] else 0
        return place.bytes - RESERVE_BYTES - tokens

    @property
    def ssd_token_bytes(self) -> int:
        """Bytes of the first SSD directory that are for tokens; none if it has just enough for
        blocks.
        """
        if not self.ssd_dirs:
            return 0
        from kvhearth_server.engine.epoch_store import RESERVE_BYTES
        from kvhearth_server.tiers.ssd.settings import capacity_least, segment_bytes_for

        size = self.ssd_dirs[0].bytes
        room = max(0, size - RESERVE_BYTES)
        spare = room - capacity_least(self.ssd_segment_bytes or segment_bytes_for(room))
        return max(0, min(self.event_tokens, size // SSD_TOKENS_PART, spare))

    def ssd_quotas(self) -> dict[str, float]:
        """Return the part of the SSD tier that each tenant may use, 0 to 1."""
        if not self.tenants:
            return {DEFAULT_TENANT_NAME: 1.0}
        whole = sum(each.bytes for each in self.ssd_dirs)
        left = max(0, whole - sum(each.ssd_bytes for each in self.tenants))
        memory = sum(each.bytes for each in self.tenants if not each.ssd_bytes) or 1
        return {
            each.name: (each.ssd_bytes or left * each.bytes / memory) / whole
            for each in self.tenants
        }

    @property
    def attach_socket(self) -> Path:
        """Path of the socket where engines attach."""
        return self.socket_dir / ATTACH_SOCKET

    @property
    def calls_socket(self) -> Path:
        """Path of the socket for calls as frames."""
        return self.socket_dir / CALLS_SOCKET

    @property
    def grpc_socket(self) -> Path:
        """Path of the engines' gRPC socket."""
        return self.socket_dir / GRPC_SOCKET

    @property
    def admin_socket(self) -> Path:
        """Path of the operators' HTTP socket."""
        return self.socket_dir / ADMIN_SOCKET

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of HTTP; None if it is off."""
        return host_and_port(self.http)

    @property
    def http_routable(self) -> bool:
        """Whether other machines may reach HTTP."""
        address = self.http_address
        return address is not None and not is_loopback(address[0])

    @property
    def http_guarded(self) -> bool:
        """Whether HTTP has TLS and needs a token for everything but the probes."""
        files = self.tls_cert is not None and self.tokens_file is not None
        return self.http_routable and not self.http_insecure and files

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Host and port of the gateway; None if it is off."""
        return host_and_port(self.listen)

    @property
    def memory_bytes(self) -> int:
        """``memory`` in whole slabs."""
        return self.memory // self.slab_bytes * self.slab_bytes

    def rounded(self) -> list[tuple[str, int, int]]:
        """Sizes that are not whole slabs: (memory or a tenant's name, bytes asked for, bytes
        used).
        """
        slab = self.slab_bytes
        asked = [(each.name, each.bytes) for each in self.tenants] or [("memory", self.memory)]
        return [(name, size, size // slab * slab) for name, size in asked if size % slab]

    def effective_gateway_uids(self, own_uid: int) -> tuple[int, ...]:
        """Return the users whose processes may speak for any tenant."""
        return self.gateway_uids or ((own_uid,) if self.listen_address else ())

    def effective_tenants(self, own_uid: int) -> tuple[TenantSetting, ...]:
        """Return the tenants that the daemon of user ``own_uid`` serves, their bytes in whole
        slabs.
        """
        if not self.tenants:
            uids = tuple(dict.fromkeys((own_uid, *self.allow_uids)))
            return (TenantSetting(DEFAULT_TENANT_NAME, uids, self.memory_bytes),)
        slab = self.slab_bytes
        return tuple(replace(t, bytes=t.bytes // slab * slab) for t in self.tenants)
