"""Threads of the client and the tiers that a test must not leave behind."""

from __future__ import annotations

import threading


def own_threads() -> set[threading.Thread]:
    """Those of this process that are KVHearth's."""
    return {each for each in threading.enumerate() if each.name.startswith("kvhearth")}


def left_since(before: set[threading.Thread]) -> list[str]:
    """Names of such threads that were not there before and are there now: what an earlier test
    left, it left, and this one is not to fail for it.
    """
    return sorted(each.name for each in own_threads() - before)
