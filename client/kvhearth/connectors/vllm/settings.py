"""Options of ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvhearth.copiers.base import VERIFY_FRACTION
from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import parse_url

URL_ENV = "KVHEARTH_URL"
"""Environment variable that supplies ``url`` if the options do not."""


@dataclass(frozen=True)
class Settings:
    """Options accepted in ``kv_connector_extra_config``.

    Attributes:
        url: the daemon's address.
        lookup_wait_ms: how long a request waits for the daemon's answer before it proceeds without
            the cache.
        climb_wait_ms: longest wait of a request for blocks being promoted from SSD, where the wait
            is estimated to pay off.
        handover_wait_ms: how long a request that another engine has prefilled waits for its blocks.
        policy: ``auto`` loads a hit only where that is estimated to beat computing it; ``always``
            loads every hit.
        min_load_tokens, max_load_tokens: bounds of one load in tokens; 0 for none.
        offload_prompt_only: do not store blocks of generated tokens.
        held_percent: share of the engine's KV blocks that stores may keep from reuse.
        verify_fraction: fraction of the blocks loaded into GPU memory whose checksum is compared, 0
            to 1.
        touch_pages: touch the KV pages of a CPU engine in the background at startup, so that the
            first loads do not wait for the machine's memory.
        lease_s: age at which an unused lease is released; the request then looks up again.
        stock_tokens: tokens for which empty slots are held ready; 0 for two steps' worth.
        revision: identity of the weights, instead of the hub's revision or the files' digest.
        on_reset: effect of ``reset_prefix_cache(reset_connector)`` on blocks in the daemon:
            ``drop`` all of the namespace, ``keep`` them, or ``auto``: drop them if no other engine
            is attached to the namespace, or if weights are updated live.
        layout: order of the dimensions of vLLM's KV cache that the connector demands: ``BLHNC``,
            ``none``, or ``auto``: ``BLHNC`` on CUDA unless another connector runs beside it.
    """

    url: str = "kvhearth+unix:///run/kvhearth"
    lookup_wait_ms: int = 250
    climb_wait_ms: int = 5000
    handover_wait_ms: int = 2000
    policy: str = "auto"
    min_load_tokens: int = 0
    max_load_tokens: int = 0
    offload_prompt_only: bool = False
    held_percent: int = 25
    verify_fraction: float = VERIFY_FRACTION
    touch_pages: bool = True
    lease_s: int = 10
    stock_tokens: int = 0
    revision: str = ""
    on_reset: str = "auto"
    layout: str = "auto"


_CHOICES = {
    "policy": ("auto", "always"),
    "on_reset": ("auto", "drop", "keep"),
    "layout": ("auto", "BLHNC", "none"),
}
_BOUNDS: dict[str, tuple[float, float]] = {
    "verify_fraction": (0.0, 1.0),
    "lookup_wait_ms": (0, 60_000),
    "climb_wait_ms": (0, 600_000),
    "handover_wait_ms": (0, 600_000),
    "min_load_tokens": (0, 1 << 30),
    "max_load_tokens": (0, 1 << 30),
    "held_percent": (1, 90),
    "lease_s": (1, 600),
    "stock_tokens": (0, 1 << 24),
}


def parse_settings(
    given: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Check a user's options.

    Args:
        given: the options.
        environment: environment whose ``KVHEARTH_URL`` replaces an absent ``url``.

    Raises:
        KVHearthError: ``config_invalid`` or ``bad_url``, naming the option and its valid values.
    """
    known = {item.name: item for item in dataclasses.fields(Settings)}
    for name in given:
        value: Any = given[name]
        if name not in known:
            raise _bad(f"unknown option {name!r}; known: {', '.join(sorted(known))}")
        wanted: type = type(known[name].default)
        if not _is(value, wanted):
            raise _bad(f"{name} must be {wanted.__name__}, not {value!r}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise _bad(f"{name}={value!r} is not one of {', '.join(_CHOICES[name])}")
        if name in _BOUNDS:
            low, high = _BOUNDS[name]
            if not low <= value <= high:
                raise _bad(f"{name}={value} is not in {low}..{high}")
    settings = Settings(**{"url": environment.get(URL_ENV) or Settings.url, **given})
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


def _bad(problem: str) -> KVHearthError:
    return KVHearthError(Reason.CONFIG_INVALID, f"kv_connector_extra_config: {problem}")
