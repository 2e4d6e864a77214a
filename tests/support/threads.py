"""Threads of the client and the tiers that a test must not leave behind."""

from __future__ import annotations

import threading


def own_threads() -> set[threading.Thread]:
    """Return KVHearth's threads in this process."""
    return {each for each in threading.enumerate() if each.name.startswith("kvhearth")}


def left_since(before: set[threading.Thread]) -> list[str]:
    """Return the names of KVHearth's threads that started since ``before`` and still run. Threads
    that an earlier test left do not count against this one.
    """
    return sorted(each.name for each in own_threads() - before)
