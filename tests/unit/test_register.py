"""Registration of the arena: in pieces, all or nothing, no error left behind."""

from __future__ import annotations

import threading

import pytest
from support.arena_fake import FakeArena
from support.cuda_fake import FakeRegistrar

from kvhearth.copiers.register import PIECE_BYTES_MAX, ArenaRegistration, CudartRegistrar
from kvhearth.errors import KVHearthError, Reason

PIECE_BYTES = 8192
DEADLINE_S = 10.0


def _arena() -> FakeArena:
    return FakeArena(4096, 5, segments=2)


def test_pieces_cover_every_segment_once() -> None:
    arena, registrar = _arena(), FakeRegistrar()
    registration = ArenaRegistration(arena, registrar, piece_bytes=PIECE_BYTES)
    assert registration.wait(DEADLINE_S)
    assert (registration.ready, registration.error) == (True, "")
    starts = [arena.address(segment) for segment in (0, 1)]
    assert registrar.calls == [
        (start + offset, size)
        for start in starts
        for offset, size in ((0, 8192), (8192, 8192), (16384, 4096))
    ]
    assert registration.close(DEADLINE_S)
    assert registrar.registered == {}
    assert not registration.ready
    assert registration.close(DEADLINE_S)
    assert registrar.sticky == 0


@pytest.mark.parametrize("fail_at", [1, 2, 6])
def test_a_refused_piece_undoes_the_others(fail_at: int) -> None:
    registrar = FakeRegistrar(fail_at)
    registration = ArenaRegistration(_arena(), registrar, piece_bytes=PIECE_BYTES)
    assert not registration.wait(DEADLINE_S)
    assert not registration.ready
    assert f"piece {fail_at} of 6" in registration.error
    assert "returned 2" in registration.error
    assert registrar.registered == {}
    assert registrar.sticky == 0, "the engine's next kernel launch would report it"
    assert len(registrar.calls) == fail_at
    assert registration.close(DEADLINE_S)


class _Stuck(FakeRegistrar):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def register(self, address: int, size_bytes: int) -> int:
        self.go.wait(DEADLINE_S)
        return super().register(address, size_bytes)


def test_closing_while_it_registers() -> None:
    registrar = _Stuck()
    registration = ArenaRegistration(_arena(), registrar, piece_bytes=PIECE_BYTES)
    assert not registration.wait(0.01)
    assert not registration.close(0.01)
    registrar.go.set()
    assert registration.close(DEADLINE_S)
    assert len(registrar.calls) == 1
    assert registrar.registered == {}
    assert (registration.ready, registration.error) == (False, "")


def test_a_driver_that_raises() -> None:
    class Broken(FakeRegistrar):
        def register(self, address: int, size_bytes: int) -> int:
            raise OSError("scripted")

    registration = ArenaRegistration(_arena(), Broken(), piece_bytes=PIECE_BYTES)
    assert not registration.wait(DEADLINE_S)
    assert "scripted" in registration.error


@pytest.mark.parametrize("piece_bytes", [0, -4096, 5000, PIECE_BYTES_MAX + 4096])
def test_bad_pieces_are_refused(piece_bytes: int) -> None:
    with pytest.raises(KVHearthError) as caught:
        ArenaRegistration(_arena(), FakeRegistrar(), piece_bytes=piece_bytes)
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_a_torch_without_cuda_is_said() -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(KVHearthError, match="no CUDA"):
        CudartRegistrar(0)
