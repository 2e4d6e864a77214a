"""Options that a user gives a connector."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from kvhearth.codec import CODECS
from kvhearth.copiers.base import VERIFY_FRACTION
from kvhearth.copiers.methods import AUTO, CopyMethod
from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import DEFAULT_URL, parse_url

URL_ENV = "KVHEARTH_URL"
"""Environment variable that supplies ``url`` if the options do not."""

SettingsT = TypeVar("SettingsT", bound="CacheSettings")


def one_of(*choices: str) -> Any:
    """Declare an option that is one of ``choices``; the first one is the default."""
    return field(default=choices[0], metadata={"choices": choices})


def between(default: float, low: float, high: float) -> Any:
    """Declare an option from ``low`` to ``high``, inclusive."""
    return field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True)
class CacheSettings:
    """Options of every adapter.

    Attributes:
        PLACE: name, for error messages, of the place where the user gives the options.
        url: the daemon's address; ``kvhearth+unix:`` for the one on this host that is found.
        promotion_wait_ms: longest wait of a request for blocks being promoted from SSD.
        revision: identity of the weights, instead of the hub's revision or the files' digest.
    """

    PLACE: ClassVar[str] = "options"

    url: str = DEFAULT_URL
    promotion_wait_ms: int = between(5000, 0, 600_000)
    revision: str = ""


@dataclass(frozen=True)
class Settings(CacheSettings):
    """Options of every engine's connector; a subclass adds those of one engine.

    Attributes:
        lookup_wait_ms: how long a request waits for the daemon's answer before it proceeds without
            the cache.
        handover_wait_ms: how long a request that another engine has prefilled waits for its blocks.
        policy: ``auto`` loads a hit only where that is estimated to beat computing it; ``always``
            loads every hit.
        min_load_tokens, max_load_tokens: bounds of one load in tokens.
        offload_prompt_only: do not store blocks of generated tokens.
        held_percent: share of the engine's KV blocks that stores may keep from reuse.
        verify_fraction: fraction of the blocks loaded into GPU memory whose checksum is compared, 0
            to 1.
        copy_method: method of copies between GPU memory and the arena: ``loop``, ``batch``,
            ``kernel``, or ``auto`` for the environment's ``KVHEARTH_COPY_METHOD``, else the fastest
            that was measured.
        touch_pages: touch the KV pages of a CPU engine in the background at startup, so that the
            first loads do not wait for the machine's memory.
        lease_s: age at which an unused lease is released; the request then looks up again.
        pool_tokens: tokens for which empty slots are held ready; 0 for two steps' worth.
        on_reset: effect of a reset of the engine's prefix cache on blocks in the daemon: ``drop``
            all of the namespace, ``keep`` them, or ``auto``: drop them if no other engine is
            attached to the namespace, or if weights are updated live.
        codec: how blocks are encoded at rest; ``fp8`` and ``int4`` lose precision, in a namespace
            of their own.
    """

    lookup_wait_ms: int = between(250, 0, 60_000)
    handover_wait_ms: int = between(2000, 0, 600_000)
    policy: str = one_of("auto", "always")
    min_load_tokens: int = between(0, 0, 1 << 30)
    max_load_tokens: int = between(1 << 30, 0, 1 << 30)
    offload_prompt_only: bool = False
    held_percent: int = between(25, 1, 90)
    verify_fraction: float = between(VERIFY_FRACTION, 0.0, 1.0)
    copy_method: str = one_of(AUTO, *CopyMethod)
    touch_pages: bool = True
    lease_s: int = between(10, 1, 600)
    pool_tokens: int = between(0, 0, 1 << 24)
    on_reset: str = one_of("auto", "drop", "keep")
    codec: str = one_of(*CODECS)


def parse_settings(
    kind: type[SettingsT], given: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> SettingsT:
    """Check a user's options.

    Args:
        kind: class of the options.
        given: the options.
        environment: environment whose ``KVHEARTH_URL`` replaces an absent ``url``.

    Raises:
        KVHearthError: ``config_invalid`` or ``bad_url``, naming the option and its valid values.
    """
    known = {item.name: item for item in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise _bad(kind, f"unknown option {name!r}; known: {names}")
        wanted, limits = type(known[name].default), known[name].metadata
        if not _is(value, wanted):
            raise _bad(kind, f"{name} must be {wanted.__name__}, not {value!r}")
        if value not in limits.get("choices", (value,)):
            raise _bad(kind, f"{name}={value!r} is not one of {', '.join(limits['choices'])}")
        low, high = limits.get("bounds", (value, value))
        if not low <= value <= high:
            raise _bad(kind, f"{name}={value} is not in {low}..{high}")
    settings = kind(**{"url": environment.get(URL_ENV) or CacheSettings.url, **given})
    try:
        parse_url(settings.url)
    except KVHearthError as error:
        if "url" in given:
            raise
        raise KVHearthError(error.reason, f"{URL_ENV}: {error.message}") from error
    return settings


def _is(value: object, wanted: type) -> bool:
    """Whether ``value`` has exactly the wanted type, so a bool is no number; an int is accepted for
    a float.
    """
    return type(value) is wanted or (wanted is float and type(value) is int)


def _bad(kind: type[CacheSettings], problem: str) -> KVHearthError:
    return KVHearthError(Reason.CONFIG_INVALID, f"{kind.PLACE}: {problem}")
