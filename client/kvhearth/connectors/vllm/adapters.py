"""LoRA adapters of one run of the engine: each is known by the digest of the files it came from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from kvhearth.connectors.vllm.identity import adapter_digest
from kvhearth.meters import Warnings

REMEMBERED_MAX = 4096


class Adapters:
    """Digests as they were when an adapter was first seen, since vLLM loads its files once: what
    lies there later is not what it computes with. Used by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._warnings = Warnings()

    def digest(self, lora_request: Any) -> bytes | None:
        """Digest of a request's adapter; None if it has none (said in the log).

        Args:
            lora_request: vLLM's; with its ``load_inplace`` the files are read anew.
        """
        path = str(lora_request.lora_path)
        key = (int(lora_request.lora_int_id), path)
        anew = bool(getattr(lora_request, "load_inplace", False))
        with self._lock:
            found = self._digests.get(key)
            if found is not None and not anew:
                self._digests.move_to_end(key)
                return found
        try:
            taken = adapter_digest(path)
        except OSError as error:
            with self._lock:
                self._digests.pop(key, None)
            self._warnings.warn("adapter", "KV of an adapter is not kept: %s", error)
            return None
        with self._lock:
            if not anew:
                taken = self._digests.setdefault(key, taken)
            self._digests[key] = taken
            self._digests.move_to_end(key)
            if len(self._digests) > REMEMBERED_MAX:
                self._digests.popitem(last=False)
        return taken
