"""The contract: everything that must be equal for KV bytes to be interchangeable.

A contract has one canonical JSON form. A namespace is ``SHA-256(tenant ‖ 0 ‖ canonical JSON)``: two
engines share blocks exactly if every field here and their tenant are equal. Content that changes
per block (tokens, adapter, images, salts) belongs in the key; weights that change in place
(reloaded live) are tracked by the namespace's weights epoch.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from kvhearth.codec import CODECS, LOSSLESS, Encoding, encoding_of
from kvhearth.errors import KVHearthError, Reason

CONTRACT_VERSION = 1
PRIVATE = "private:"
"""Begins names of weights, seeds and draft models that one run of an engine alone has."""
CONTRACT_JSON_BYTES_MAX = 64 * 1024
CONTRACT_PARTS_MAX = 4096
"""Commas and opening brackets in a contract's JSON, its texts included, which bounds the time of
parsing it; 16 groups have some 150.
"""
GROUPS_MAX = 16
SHARDS_MAX = 256
KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 64
TOKEN_BYTES = 4
TOKENS_TOLD_MAX = 4096
"""Most tokens of a block whose ids are told: the smallest message that is allowed holds them."""
PAGE_BYTES_MAX = 1 << 30
WINDOW_TOKENS_MAX = 1 << 30
TEXT_CHARS_MAX = 1024

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element of each KV dtype."""


class GroupKind(enum.StrEnum):
    """Reach of a group's layers, which decides which blocks a hit needs.

    ``FULL``: every block from the start. ``SLIDING_WINDOW``: the blocks that cover the last
    ``window_tokens``. ``MAMBA``: the one block that holds the state at the boundary.
    """

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    MAMBA = "mamba"


@dataclass(frozen=True)
class GroupSpec:
    """One KV cache group: layers that share a block table.

    Attributes:
        kind: decides which blocks of the group a hit needs.
        block_tokens: tokens in one block of this group.
        page_bytes: bytes of one *shard* of one block (all layers of the group on one rank), as the
            daemon has it.
        layers: number of layers.
        token_bytes: bytes per token and layer on one shard (both K and V); 0 for state groups.
        shards: number of parts that a block is cut into; 1 when all ranks hold the same bytes
            (MLA).
        window_tokens: reach of a sliding window, else 0.
        source_bytes: bytes of one shard in the engine's pages, where the contract's codec encodes
            this group; else 0, and the engine's pages have ``page_bytes``.
    """

    kind: GroupKind
    block_tokens: int
    page_bytes: int
    layers: int = 1
    token_bytes: int = 0
    shards: int = 1
    window_tokens: int = 0
    source_bytes: int = 0

    @property
    def engine_bytes(self) -> int:
        """Bytes of one shard in the engine's pages."""
        return self.source_bytes or self.page_bytes


@dataclass(frozen=True)
class Contract:
    """The properties of an engine's KV bytes that decide whether another engine can use them.

    Content that changes per block and weights reloaded live are excluded (see the module's
    docstring). ``with_codec`` makes the contract of blocks that are encoded at rest.
    """

    model: str
    revision: str
    kv_dtype: str
    groups: tuple[GroupSpec, ...]
    layout: str = "LNHC"
    model_dtype: str = "bfloat16"
    quantization: str = "none"
    hash_bytes: int = 32
    hash_algorithm: str = "sha256"
    hash_seed: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    rope_digest: str = ""
    draft_model: str = ""
    codec: str = LOSSLESS
    version: int = field(default=CONTRACT_VERSION)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def private(self) -> bool:
        """Whether its blocks are of one run of an engine alone: the weights, the block hashes or
        the draft model have no identity that another run could have.
        """
        named = self.revision.startswith(PRIVATE) or self.hash_seed.startswith(PRIVATE)
        return named or f":{PRIVATE}" in self.draft_model

    @property
    def world_size(self) -> int:
        """Number of ranks that hold KV: tensor parallel x pipeline parallel."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def token_bytes(self) -> int:
        """Most bytes that tell the ids of a block's tokens in a message."""
        told = [g.block_tokens for g in self.groups if g.block_tokens <= TOKENS_TOLD_MAX]
        return TOKEN_BYTES * max(told, default=0)

    def with_codec(self, codec: str) -> Contract:
        """Return the contract of the same blocks, encoded by a lossy codec; state groups stay.

        Args:
            codec: one of ``kvhearth.codec.CODECS``; ``none`` gives the lossless contract.

        Raises:
            KVHearthError: ``bad_contract`` for KV that the codec cannot encode.
        """
        plain = tuple(
            dataclasses.replace(group, page_bytes=group.engine_bytes, source_bytes=0)
            for group in self.groups
        )
        if codec == LOSSLESS:
            return dataclasses.replace(self, codec=codec, groups=plain)
        groups = tuple(_encoded(codec, self.kv_dtype, group) for group in plain)
        return dataclasses.replace(self, codec=codec, groups=groups)

    def encoding(self, group: int) -> Encoding | None:
        """Return how blocks of a group are encoded at rest, or None if they are as in the pages."""
        source_bytes = self.groups[group].source_bytes
        return encoding_of(self.codec, self.kv_dtype, source_bytes) if source_bytes else None

    def to_json(self) -> str:
        """Return the canonical JSON: sorted names, no spaces, ASCII only, no codec without one."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:
        values = dataclasses.asdict(self)
        # Contracts without a codec keep the text, and the namespace, of versions before codecs.
        if self.codec == LOSSLESS:
            del values["codec"]
        for group in values["groups"]:
            if not group["source_bytes"]:
                del group["source_bytes"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """Parse and check a contract; unknown and missing fields are refused by name.

        Raises:
            KVHearthError: ``bad_contract`` with the field that is wrong.
        """
        if len(text) > CONTRACT_JSON_BYTES_MAX:
            raise _bad("", f"longer than {CONTRACT_JSON_BYTES_MAX} bytes")
        if sum(map(text.count, ",{[")) > CONTRACT_PARTS_MAX:
            raise _bad("", f"more than {CONTRACT_PARTS_MAX} commas and brackets")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _bad("", f"not JSON: {error}") from None
        values = _fields(cls, data, "")
        groups = values.get("groups")
        if not isinstance(groups, list):
            raise _bad("groups", "must be a list")
        if len(groups) > GROUPS_MAX:
            raise _bad("groups", f"more than {GROUPS_MAX}")
        parsed = []
        for index, group in enumerate(groups):
            where = f"groups[{index}]."
            entry = _fields(GroupSpec, group, where)
            try:
                entry["kind"] = GroupKind(entry["kind"])
            except ValueError:
                raise _bad(where + "kind", f"unknown kind {entry['kind']!r}") from None
            parsed.append(GroupSpec(**entry))
        values["groups"] = tuple(parsed)
        return cls(**values)


def namespace_digest(tenant: str, contract: Contract) -> bytes:
    """Return the 32-byte name of the namespace of ``tenant`` and ``contract``."""
    return hashlib.sha256(tenant.encode() + b"\0" + contract.to_json().encode()).digest()


def differences(asked: Contract, stored: Contract) -> list[tuple[str, str, str]]:
    """Return the differing fields of two contracts, by name: (field, asked value, stored value)."""
    left, right = _flat(asked), _flat(stored)
    return [
        (name, left.get(name, "absent"), right.get(name, "absent"))
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]


def _flat(contract: Contract) -> dict[str, str]:
    values = dataclasses.asdict(contract)
    groups = values.pop("groups")
    for index, group in enumerate(groups):
        values.update({f"groups[{index}].{name}": value for name, value in group.items()})
    return {name: str(value) for name, value in values.items()}


def _encoded(codec: str, kv_dtype: str, group: GroupSpec) -> GroupSpec:
    if group.kind is GroupKind.MAMBA:
        return group
    try:
        encoding = encoding_of(codec, kv_dtype, group.page_bytes)
    except ValueError as error:
        raise _bad("codec", str(error)) from None
    return dataclasses.replace(
        group, page_bytes=encoding.stored_bytes, source_bytes=encoding.source_bytes
    )


def _bad(name: str, problem: str) -> KVHearthError:
    where = f"contract field {name!r}" if name else "contract"
    return KVHearthError(Reason.BAD_CONTRACT, f"{where}: {problem}", field=name)


def _fields(kind: type[Any], data: object, where: str) -> dict[str, Any]:
    """Return the fields of dataclass ``kind`` in ``data``, each checked for its declared type."""
    if not isinstance(data, dict):
        raise _bad(where.rstrip("."), "must be an object")
    known = {item.name: item for item in dataclasses.fields(kind)}
    for name in data:
        if name not in known:
            raise _bad(where + str(name)[:TEXT_CHARS_MAX], "unknown field")
    for name, item in known.items():
        required = item.default is dataclasses.MISSING
        if name not in data:
            if required:
                raise _bad(where + name, "missing")
            continue
        value = data[name]
        wanted = {"int": int, "str": str, "GroupKind": str}.get(str(item.type))
        if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise _bad(where + name, f"must be {wanted.__name__}, not {type(value).__name__}")
    return dict(data)


def _check(contract: Contract) -> None:
    if contract.version != CONTRACT_VERSION:
        raise _bad("version", f"{contract.version} is not {CONTRACT_VERSION}")
    _check_texts(contract)
    if not contract.model:
        raise _bad("model", "empty")
    if not contract.revision:
        raise _bad("revision", "empty: weights without an identity cannot share KV")
    if contract.kv_dtype not in DTYPE_BYTES:
        raise _bad("kv_dtype", f"{contract.kv_dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if not KEY_BYTES_MIN <= contract.hash_bytes <= KEY_BYTES_MAX:
        raise _bad(
            "hash_bytes", f"{contract.hash_bytes} is not in {KEY_BYTES_MIN}..{KEY_BYTES_MAX}"
        )
    _check_geometry(contract)
    if contract.codec not in CODECS:
        raise _bad("codec", f"{contract.codec!r} is not one of {', '.join(CODECS)}")
    if not 1 <= len(contract.groups) <= GROUPS_MAX:
        raise _bad("groups", f"{len(contract.groups)} groups, must be 1..{GROUPS_MAX}")
    for index, group in enumerate(contract.groups):
        _check_group(contract, group, f"groups[{index}].")
    if contract.codec != LOSSLESS and not any(group.source_bytes for group in contract.groups):
        raise _bad("codec", f"{contract.codec} encodes no state group, and there are no others")


def _check_geometry(contract: Contract) -> None:
    for name in ("tensor_parallel", "pipeline_parallel", "decode_context_parallel"):
        if not 1 <= getattr(contract, name) <= SHARDS_MAX:
            raise _bad(name, f"not in 1..{SHARDS_MAX}")
    if not 1 <= contract.world_size <= SHARDS_MAX:
        raise _bad("tensor_parallel", f"more than {SHARDS_MAX} ranks")


def _check_texts(contract: Contract) -> None:
    for item in dataclasses.fields(contract):
        value = getattr(contract, item.name)
        if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
            raise _bad(item.name, f"longer than {TEXT_CHARS_MAX} characters")
        if isinstance(value, str) and not value.isprintable():
            # This also catches half a surrogate pair, which JSON can write and protobuf cannot
            # carry.
            raise _bad(item.name, "not printable text")


def _check_group(contract: Contract, group: GroupSpec, where: str) -> None:
    if not 1 <= group.block_tokens <= 1 << 20:
        raise _bad(where + "block_tokens", f"{group.block_tokens} is not in 1..{1 << 20}")
    if not 1 <= group.page_bytes <= PAGE_BYTES_MAX:
        raise _bad(where + "page_bytes", f"{group.page_bytes} is not in 1..{PAGE_BYTES_MAX}")
    _check_codec(contract, group, where)
    if not 1 <= group.layers <= 4096:
        raise _bad(where + "layers", f"{group.layers} is not in 1..4096")
    if not 1 <= group.shards <= contract.world_size:
        raise _bad(where + "shards", f"{group.shards} is not in 1..{contract.world_size} ranks")
    if not 0 <= group.token_bytes <= PAGE_BYTES_MAX:
        raise _bad(where + "token_bytes", f"{group.token_bytes} is not in 0..{PAGE_BYTES_MAX}")
    if group.token_bytes % DTYPE_BYTES[contract.kv_dtype]:
        raise _bad(where + "token_bytes", f"not whole elements of {contract.kv_dtype}")
    if group.kind is not GroupKind.MAMBA:
        content = group.token_bytes * group.layers * group.block_tokens
        if group.token_bytes and not content <= group.engine_bytes <= 2 * content:
            raise _bad(
                where + ("source_bytes" if group.source_bytes else "page_bytes"),
                f"{group.engine_bytes} does not fit {group.layers} layers x {group.block_tokens} "
                f"tokens x {group.token_bytes} bytes = {content}",
            )
    windowed = group.kind is GroupKind.SLIDING_WINDOW
    if windowed != (group.window_tokens > 0) or not 0 <= group.window_tokens <= WINDOW_TOKENS_MAX:
        raise _bad(where + "window_tokens", f"{group.window_tokens} with kind {group.kind}")


def _check_codec(contract: Contract, group: GroupSpec, where: str) -> None:
    encoded = contract.codec != LOSSLESS and group.kind is not GroupKind.MAMBA
    if encoded != (group.source_bytes != 0):
        raise _bad(
            where + "source_bytes",
            f"{group.source_bytes} with codec {contract.codec}: use Contract.with_codec",
        )
    if not encoded:
        return
    if not 1 <= group.source_bytes <= PAGE_BYTES_MAX:
        raise _bad(where + "source_bytes", f"{group.source_bytes} is not in 1..{PAGE_BYTES_MAX}")
    try:
        encoding = encoding_of(contract.codec, contract.kv_dtype, group.source_bytes)
    except ValueError as error:
        raise _bad(where + "source_bytes", str(error)) from None
    if group.page_bytes != encoding.stored_bytes:
        raise _bad(
            where + "page_bytes",
            f"{group.page_bytes}, but {contract.codec} makes {group.source_bytes} bytes of "
            f"{contract.kv_dtype} {encoding.stored_bytes}",
        )
