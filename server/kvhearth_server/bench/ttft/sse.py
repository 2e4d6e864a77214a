"""Server-sent events, and a completion that is made of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_EVENT_BYTES_MAX = 1 << 20
_DONE = "[DONE]"
_SHOWN_CHARS = 200


class EngineFailed(Exception):
    """An engine or a peer's daemon cannot be measured; the text says why, in one line."""


class EventStream:
    """Cuts bytes, as they come from a socket, into events."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._held_bytes = 0

    def feed(self, part: bytes) -> Iterator[str]:
        """The data of each event that ``part`` completes.

        Raises:
            EngineFailed: an event has more than 1 MiB, or is no UTF-8.
        """
        *lines, self._rest = (self._rest + part).split(b"\n")
        if self._held_bytes + len(self._rest) > _EVENT_BYTES_MAX:
            raise EngineFailed("the engine sends an event without end")
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._lines.append(text[5:].removeprefix(b" "))
                self._held_bytes += len(text)
            elif not text and self._lines:
                data = b"\n".join(self._lines)
                self._lines, self._held_bytes = [], 0
                try:
                    yield data.decode()
                except UnicodeDecodeError:
                    raise EngineFailed("the engine sends an event that is no UTF-8") from None


@dataclass(frozen=True)
class Answer:
    """A completion.

    Attributes:
        ttft_s: from the request to the first token.
        tokens: ids of all tokens.
        cached: prompt tokens that the engine did not compute.
    """

    ttft_s: float
    tokens: tuple[int, ...]
    cached: int


class Completion:
    """Gathers the events of one streamed completion.

    Args:
        started: when the request was sent, seconds of any clock.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._ttft_s: float | None = None
        self._tokens: list[int] = []
        self._cached: int | None = None
        self.done = False

    def take(self, data: str, now: float) -> None:
        """One event that came at ``now``.

        Raises:
            EngineFailed: it is none of a completion's.
        """
        if data == _DONE:
            self.done = True
            return
        event = _object(data)
        if "error" in event:
            raise EngineFailed(f"the engine answers: {str(event['error'])[:_SHOWN_CHARS]}")
        for choice in _list(event.get("choices"), data):
            ids = _list(choice.get("token_ids") if isinstance(choice, dict) else None, data)
            if ids and self._ttft_s is None:
                self._ttft_s = now - self._started
            self._tokens += [int(each) for each in ids]
        usage = event.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            self._cached = int(details.get("cached_tokens") or 0)

    def answer(self, tokens: int) -> Answer:
        """The whole, after its end.

        Raises:
            EngineFailed: it is not whole; ``tokens`` were asked for.
        """
        if self._ttft_s is None or len(self._tokens) != tokens or not self.done:
            raise EngineFailed(f"the engine sent {len(self._tokens)} tokens instead of {tokens}")
        if self._cached is None:
            raise EngineFailed("the engine does not say how many tokens were cached")
        return Answer(self._ttft_s, tuple(self._tokens), self._cached)


def _object(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise EngineFailed(f"the engine sends no JSON object: {data[:_SHOWN_CHARS]!r}")
    return event


def _list(value: object, data: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise EngineFailed(f"the engine sends no completion: {data[:_SHOWN_CHARS]!r}")
    return value
