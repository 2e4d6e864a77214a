"""An engine of LMCache's daemon, driven by a test: a line of JSON in, a line of JSON out.

It runs in LMCache's interpreter and has one layer, whose blocks are chunks of LMCache. Tokens and
KV are derived from a seed, so that whoever loads a prompt knows its bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from typing import Any

import numpy as np
import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK_TOKENS = 16
CHUNKS = 8
ANSWER_S = 300.0


class Engine:
    """One registered worker.

    Args:
        port: where LMCache's daemon listens.
        model: name of the model.
        dtype: torch's name of the KV's dtype, of two bytes.
        width: elements of a token.
    """

    def __init__(self, port: int, model: str, dtype: str, width: int) -> None:
        self._zmq = zmq.Context()
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=self._zmq)
        self._model, self._width = model, width
        self._layer = torch.zeros((CHUNKS, CHUNK_TOKENS, width), dtype=getattr(torch, dtype))
        self._transfer = EngineDrivenTransferContext(secrets.randbits(31), self.client)
        group = EngineGroupInfo(
            engine_group_id=0, layer_indices=(0,), tokens_per_block=CHUNK_TOKENS
        )
        self._transfer.register(
            {"layer": self._layer},
            model,
            1,
            1,
            ANSWER_S,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )

    @property
    def _bytes(self) -> Any:
        return self._layer.view(torch.uint8).numpy().reshape(CHUNKS, -1)

    def _kv(self, seed: int) -> Any:
        shape = (CHUNKS, CHUNK_TOKENS * self._width * 2)
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

    def _key(self, seed: int, worker_id: int | None) -> Any:
        tokens = [seed, *range(CHUNK_TOKENS * CHUNKS - 1)]
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker_id,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=secrets.token_hex(8),
            num_kv_readers=1,
        )

    def store(self, seed: int) -> bool:
        """Store a prompt."""
        self._bytes[:] = self._kv(seed)
        key = self._key(seed, 0)
        pages = [list(range(CHUNKS))]
        kv = {"layer": self._layer}
        done = self._transfer.submit_store(key.request_id, key, kv, pages, None, 1)
        return bool(done.result(timeout=ANSWER_S))

    def load(self, seed: int) -> tuple[int, int]:
        """Load the chunks of a prompt that LMCache finds: their number, and that of equal ones."""
        key = self._key(seed, None)
        self.client.lookup(key, 1).result(timeout=ANSWER_S)
        asked = self.client.wait_prefetch_status(key.request_id, ANSWER_S)
        found = int(asked.result(timeout=ANSWER_S) or 0)
        self._bytes[:] = 0
        if found:
            ours = key.__class__(**{**_fields(key), "worker_id": 0, "end": found * CHUNK_TOKENS})
            pages, kv = [list(range(found))], {"layer": self._layer}
            done = self._transfer.submit_retrieve(key.request_id, ours, kv, pages, None, 1)
            if not done.result(timeout=ANSWER_S):
                raise RuntimeError("LMCache did not load what it had found")
        self.client.end_session(key.request_id).result(timeout=ANSWER_S)
        same = (self._bytes == self._kv(seed)).all(axis=1)
        return found, int(same.sum())

    def clear(self) -> None:
        """Drop everything from LMCache's own memory."""
        self.client.clear().result(timeout=ANSWER_S)

    def close(self) -> None:
        """Leave, also a daemon that is dead."""
        self._transfer.close()
        self.client.close()
        self._zmq.destroy(0)


def _fields(key: Any) -> dict[str, Any]:
    names = ("model_name", "world_size", "token_ids", "start", "request_id", "num_kv_readers")
    return {name: getattr(key, name) for name in names}


def main() -> None:
    """Answer lines until the end of input. ``connect`` begins anew."""
    # LMCache logs to its standard output: only answers belong there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    engine: Engine | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("op")
        if name == "connect":
            if engine is not None:
                engine.close()
            engine, answer = Engine(**asked), None
        else:
            answer = getattr(engine, name)(**asked)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
