"""What is left of a connection over HTTP once its peer has gone."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.transport.web.server import Listener, at_address

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def _ok(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_has_ended_keeps_no_memory(*, reset: bool) -> None:
    """Each reset one was kept by a timer, and from then on until the daemon was idle for long."""

    async def main() -> None:
        listener, bound = Listener(_ok, 8, lambda: None), at_address("127.0.0.1", 0)
        accepting = asyncio.create_task(listener.accept(bound))
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(REQUEST)
        async with asyncio.timeout(HUNG_S):
            await reader.readuntil(b"ok")
            connections = listener._uvicorn.server_state.connections
            (kept,) = map(weakref.ref, connections)
            if reset:
                line = writer.get_extra_info("socket")
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()
            while connections:
                await asyncio.sleep(0)
            for _ in range(10):  # cycles of the loop, in which callbacks let go of it
                await asyncio.sleep(0)
            assert kept() is None
        accepting.cancel()
        bound.close()

    asyncio.run(main())
