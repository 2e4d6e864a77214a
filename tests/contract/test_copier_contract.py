"""Contract tests of ``copiers.base.Copier``, run against every copier."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash
from support.arena_fake import FakeArena, summed
from support.cases import cases
from support.cuda_fake import FakeDevice
from support.fake_gateway import TOKEN, FakeGateway, RealDataPort
from support.native import without_native

from kvhearth.copiers import Copier, Done, HostCopier, Ticket
from kvhearth.copiers.cudart import Cudart
from kvhearth.copiers.device import ArenaRegistration
from kvhearth.copiers.methods import AUTO, CopyMethod
from kvhearth.copiers.remote import RemoteCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, FLAG_SUMMED, FLAG_VERIFY, Records
from kvhearth.page_layout import PagedKV, Shape
from kvhearth.session.remote_arena import RemoteArena
from kvhearth.transports.data import DataLines
from kvhearth.transports.tcp import Dialer
from kvhearth.url import RemoteUrl
from kvhearth_lab.harness import HUNG_S

PAGES = 12
BOOT = "boot-1"


KINDS = [
    *("host-numpy", "host-fallback", "host-torch"),
    *("remote-direct", "remote-gateway", "remote-fallback", "remote-staged", "remote-scripted"),
    *(f"scripted-{method}" for method in ("unregistered", *CopyMethod)),
    *(pytest.param(f"cuda-{method}", marks=pytest.mark.gpu) for method in CopyMethod),
]
ONE_OF_EACH = [
    *("host-numpy", "remote-direct", "remote-scripted", f"scripted-{CopyMethod.BATCH}"),
    pytest.param(f"cuda-{CopyMethod.BATCH}", marks=pytest.mark.gpu),
]
with_each_class = pytest.mark.parametrize("make_rig", ONE_OF_EACH, indirect=True)
"""Runs a test of batches and their outcomes with each class, whatever moves its bytes."""


class Rig:
    """One copier with its pages and its arena, and means to hold its copies back."""

    def __init__(
        self, kind: str, layout: str = "single", gap_bytes: int = 0, **options: Any
    ) -> None:
        self.kind = kind
        self.bases: list[Any] = []
        self.tensors = self._tensors(layout)
        self.fill(1)
        self.kv = PagedKV(self.tensors)
        self.arena = FakeArena(self.kv.page_bytes + gap_bytes)
        self._go = threading.Event()
        self._go.set()
        # Portions of two blocks, of which two may be under way.
        portion_bytes = 2 * self.kv.page_bytes
        self.device = FakeDevice(portion_bytes=portion_bytes, window_bytes=2 * portion_bytes)
        self.registrations: list[ArenaRegistration] = []
        self.gateways: list[FakeGateway] = []
        self.remote: list[RemoteArena] = []
        # The engine captures graphs all the time: no call of the copier may break a capture.
        self.device.cuda.capturing = True
        self.copier = self._copier(options)

    def _copier(self, options: dict[str, Any]) -> Copier:
        if self.kind == "host-fallback":
            with without_native():
                return HostCopier(self.kv, self.arena, **options)
        if self.kind.startswith("host"):
            return HostCopier(self.kv, self.arena, **options)
        from kvhearth.copiers.cuda import CudaCopier

        if self.kind.startswith("remote"):
            return self._remote_copier(options)
        method = self.kind.partition("-")[2]
        if self.kind == "scripted-unregistered":
            method = AUTO
        elif self.kind.startswith("scripted"):
            self.device.cuda.pin(self.arena)
        else:
            import torch

            index = torch.cuda.current_device()
            self.registrations.append(ArenaRegistration(self.arena, Cudart(), index))
            assert self.registrations[-1].wait(HUNG_S), self.registrations[-1].error
        device = self.device if self.kind.startswith("scripted") else None
        return CudaCopier(self.kv, self.arena, device=device, method=method, seed=7, **options)

    def _remote_copier(self, options: dict[str, Any]) -> Copier:
        """Return a copier over real connections to a gateway that serves the rig's arena."""
        own = RealDataPort if self.kind == "remote-gateway" else FakeGateway
        self.gateways.append(gateway := own(self.arena))
        lines = DataLines(
            Dialer(RemoteUrl("127.0.0.1", gateway.port)),
            TOKEN,
            2,
            window_bytes=1 << 20,
            connect_s=HUNG_S,
            alive=lambda: True,
        )
        arena = self.arena
        # The rig's questions are the gateway's: it looks before and after each copy.
        remote = RemoteArena(gateway.welcome(), lines, 1 << 20, lambda: arena._alive)
        self.remote.append(remote)
        if self.kind == "remote-fallback":
            with without_native():
                return RemoteCopier(self.kv, remote, direct=True, **options)
        if self.kind == "remote-scripted":
            from kvhearth.copiers.cuda import CudaCopier

            self.device.cuda.pin(remote.staging)
            return RemoteCopier(
                self.kv,
                remote,
                lambda staging: CudaCopier(self.kv, staging, device=self.device),
                **options,
            )
        return RemoteCopier(self.kv, remote, direct=self.kind != "remote-staged", **options)

    def _base(self, *shape: int, dtype: str = "uint8") -> Any:
        remote_numpy = self.kind.startswith("remote") and self.kind != "remote-scripted"
        if remote_numpy or self.kind in ("host-numpy", "host-fallback"):
            base: Any = np.zeros(shape, {"bfloat16": "uint16"}.get(dtype, dtype))
        else:
            import torch

            device = "cuda" if self.kind.startswith("cuda") else "cpu"
            base = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        self.bases.append(base)
        return base

    def _tensors(self, layout: str) -> list[Any]:
        if layout == "single":
            return [self._base(PAGES, 3, 64)]
        if layout == "stacked":
            return list(self._base(4, PAGES, 64))
        if layout == "ragged":
            return [self._base(PAGES, 40), self._base(PAGES, 7, 8), self._base(PAGES, 24)]
        if layout == "strided":
            return [self._base(PAGES, 96)[:, :64]]
        if layout == "merged":
            base = self._base(PAGES, 3, 32)
            return [base[:, index] for index in range(3)]
        if layout == "bf16":
            return list(self._base(2, PAGES, 16, 4, dtype="bfloat16"))
        assert layout == "odd_bytes"
        return list(self._base(3, PAGES, 33))

    def fill(self, seed: int) -> None:
        """Fill all pages with random bytes, including the gaps between strided ones."""
        random = np.random.default_rng(seed)
        for base in self.bases:
            if isinstance(base, np.ndarray):
                view: Any = base.view(np.uint8)
                view[...] = random.integers(0, 256, view.shape, np.uint8)
            else:
                import torch

                view = base.view(torch.uint8)
                noise = random.integers(0, 256, tuple(view.shape), np.uint8)
                view.copy_(torch.from_numpy(noise))

    def page(self, page: int) -> bytes:
        """Return the shard in a page, read without the code under test."""
        return b"".join(_bytes_of(tensor[page]) for tensor in self.tensors)

    def pages(self) -> list[bytes]:
        """Return all shards."""
        return [self.page(page) for page in range(PAGES)]

    def extents(self, slots: list[int]) -> Records:
        """Return extents as the daemon would grant them."""
        return self.arena.extents(slots, self.kv.page_bytes)

    def slot(self, slot: int) -> bytes:
        """Return the block in a slot."""
        return self.arena.slot(slot)[: self.kv.page_bytes].tobytes()

    def store(self, pages: list[int], extents: Records, boot_id: str = BOOT) -> Done:
        return self.outcome(self.copier.store(boot_id, np.array(pages), extents))

    def load(self, extents: Records, pages: list[int], boot_id: str = BOOT) -> Done:
        return self.outcome(self.copier.load(boot_id, extents, np.array(pages)))

    def outcome(self, ticket: Ticket | None) -> Done:
        assert ticket is not None
        done = self.copier.wait(ticket, HUNG_S)
        assert done is not None
        assert done.ticket == ticket
        failed = int((~done.ok).sum())
        assert sum(done.reasons.values()) == failed
        assert done.bytes == (ticket.count - failed) * self.kv.page_bytes
        return done

    def checksums(self, slots: list[int]) -> np.ndarray:
        """Return the checksums that the daemon would have."""
        sums = b"".join(xxhash.xxh3_128_digest(self.slot(slot)) for slot in slots)
        return np.frombuffer(sums, np.uint8).reshape(-1, 16)

    def hold(self) -> None:
        """Let no copy end until ``proceed``."""
        if self.kind.startswith("cuda"):
            pytest.skip("a real device cannot be held back")
        self.device.held = self.kind.startswith("scripted")
        self._go.clear()
        if self.kind.startswith(("host", "remote")):
            self.arena.on_alive = lambda question: self._go.wait(HUNG_S) and None

    def proceed(self) -> None:
        self.device.held = False
        self._go.set()

    def close(self) -> None:
        self.proceed()
        assert self.copier.close(HUNG_S)
        self.copier.check_books()
        self.device.check_end()
        if self.kind in [f"scripted-{method}" for method in CopyMethod]:
            methods = {method for method, _, _ in self.device.cuda.submitted}
            assert methods <= {self.kind.partition("-")[2]}
        assert all(registration.close(HUNG_S) for registration in self.registrations)
        self.registrations.clear()
        for remote in self.remote:
            remote.close()
            remote.staging.check_books()
        for gateway in self.gateways:
            gateway.stop()
        self.remote.clear()
        self.gateways.clear()


def _bytes_of(tensor: Any) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    import torch

    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


@pytest.fixture(params=KINDS)
def make_rig(request: pytest.FixtureRequest) -> Any:
    if request.param.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
    rigs: list[Rig] = []

    def make(layout: str = "single", **options: Any) -> Rig:
        if rigs:
            rigs.pop().close()
        rigs.append(Rig(request.param, layout, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


MakeRig = Any
SHAPES = {
    "single": Shape.SINGLE,
    "stacked": Shape.STACKED,
    "ragged": Shape.RAGGED,
    "strided": Shape.SINGLE,
    "merged": Shape.SINGLE,
    "bf16": Shape.STACKED,
    "odd_bytes": Shape.STACKED,
}
FORWARD = ([2, 3, 4, 5, 6], [1, 2, 3, 4, 5], [5, 6, 7, 8, 9])
MIXED = ([9, 0, 1, 4, 3], [7, 8, 3, 2, 15], [1, 2, 11, 10, 4])
"""Pages of a store, its slots, and the pages of the load."""
GAPS = (0, 64)
PAIRWISE = [
    (layout, order, GAPS[(number + moved) % 2])
    for number, layout in enumerate(SHAPES)
    for moved, order in enumerate((FORWARD, MIXED))
]
"""Each layout with each order and each gap between slots, and each order with each gap."""

CHECKED = (0, FLAG_SUMMED, FLAG_VERIFY, FLAG_SUMMED | FLAG_VERIFY)
ALONE = [
    *((harm, flags) for harm in ("none", "byte", "generation", "moved") for flags in CHECKED),
    *((harm, CHECKED[-1]) for harm in ("length", "page", "boot", "death")),
]
"""Harms, each with the flags of a load on which its outcome may depend."""


class TestCopierContract:
    @cases(("layout", "order", "gap_bytes"), PAIRWISE)
    def test_roundtrip(self, make_rig: MakeRig, layout: str, order: Any, gap_bytes: int) -> None:
        rig = make_rig(layout, gap_bytes=gap_bytes)
        assert rig.kv.shape is SHAPES[layout]
        pages, slots, targets = order
        before = rig.pages()

        stored = rig.store(pages, rig.extents(slots))
        assert stored.ok.all()
        assert [rig.slot(slot) for slot in slots] == [before[page] for page in pages]
        assert rig.pages() == before
        others = set(range(rig.arena.slot_count)) - set(slots)
        assert all((rig.arena.slot(slot) == 0xA5).all() for slot in others)

        rig.fill(2)
        expected = rig.pages()
        for page, target in zip(pages, targets, strict=True):
            expected[target] = before[page]
        due = summed(rig.extents(slots), rig.checksums(slots), FLAG_SUMMED | FLAG_VERIFY)
        assert rig.load(due, targets).ok.all()
        assert rig.pages() == expected

    def test_sums_are_right_or_left_to_the_daemon(self, make_rig: MakeRig) -> None:
        rig = make_rig("stacked")
        slots = [4, 5, 9]
        done = rig.store([0, 1, 2], rig.extents(slots))
        if rig.kind.startswith(("host", "remote")):
            assert (done.checksums == rig.checksums(slots)).all()
        else:
            assert done.checksums is None

    def test_segments_are_told_apart(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.close()
        rig.arena = FakeArena(rig.kv.page_bytes, 4, segments=3)
        rig.copier = rig._copier({})
        slots = [0, 5, 10, 3]  # the first three are one step apart, each in a segment of its own
        before = rig.pages()
        assert rig.store([0, 1, 2, 3], rig.extents(slots)).ok.all()
        assert [rig.slot(slot) for slot in slots] == before[:4]
        rig.fill(2)
        assert rig.load(rig.extents(slots), [3, 2, 1, 0]).ok.all()
        assert rig.pages()[:4] == before[3::-1]

    def test_a_slot_that_left_use_is_neither_written_nor_loaded(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        extents = rig.extents([0, 1, 2])
        rig.arena.bump(1)
        before = rig.pages()
        done = rig.store([0, 1, 2], extents)
        assert done.ok.tolist() == [True, False, True]
        assert done.reasons == {"stale_generation": 1}
        assert (rig.arena.slot(1) == 0xA5).all()
        assert rig.slot(2) == rig.page(2)
        done = rig.load(extents, [5, 6, 7])
        assert done.ok.tolist() == [True, False, True]
        assert rig.pages()[5:8] == [before[0], before[6], before[2]]

    @cases("direction", ["store", "load"])
    def test_a_slot_leaves_use_during_the_copy(self, make_rig: MakeRig, direction: str) -> None:
        rig = make_rig()
        extents = rig.extents([0, 1, 2])
        rig.store([0, 1, 2], extents)
        questions = rig.arena.questions
        rig.arena.on_alive = lambda question: (
            rig.arena.bump(1) if question == questions + 2 else None
        )
        pages = [3, 4, 5]
        done = rig.store(pages, extents) if direction == "store" else rig.load(extents, pages)
        assert done.ok.tolist() == [True, False, True]
        assert done.reasons == {"stale_generation": 1}
        if done.checksums is not None:
            assert not done.checksums[1].any()

    def test_a_wrong_byte_is_found(self, make_rig: MakeRig) -> None:
        rig = make_rig("stacked")
        slots = [0, 1, 2, 3]
        rig.store([0, 1, 2, 3], rig.extents(slots))
        extents = summed(rig.extents(slots), rig.checksums(slots), FLAG_SUMMED | FLAG_VERIFY)
        rig.arena.slot(2)[100] ^= 1
        before = rig.pages()
        done = rig.load(extents, [4, 5, 6, 7])
        assert done.ok.tolist() == [True, True, False, True]
        assert done.reasons == {"checksum_mismatch": 1}
        assert [rig.page(page) for page in (4, 5, 7)] == [before[0], before[1], before[3]]

    def test_what_must_be_verified_and_cannot_is_not_ok(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        extents = rig.extents([0, 1])
        rig.store([0, 1], extents)
        extents["flags"] = [FLAG_VERIFY, 0]
        done = rig.load(extents, [2, 3])
        assert done.ok.tolist() == [False, True]
        assert done.reasons == {"checksum_mismatch": 1}

    @cases("dead", [False, True])
    def test_nothing_of_another_boot_or_a_dead_daemon_is_touched(
        self, make_rig: MakeRig, dead: bool
    ) -> None:
        rig = make_rig()
        before = rig.pages()
        extents = rig.extents([0, 1])
        rig.arena.switch_alive(not dead)
        boot_id = BOOT if dead else "boot-0"
        for done in (rig.store([0, 1], extents, boot_id), rig.load(extents, [0, 1], boot_id)):
            assert not done.ok.any()
            assert done.reasons == {"stale_boot": 2}
        assert rig.arena.untouched()
        assert rig.pages() == before

    @cases("direction", ["store", "load"])
    def test_the_daemon_dies_during_the_copy(self, make_rig: MakeRig, direction: str) -> None:
        rig = make_rig()
        extents = rig.extents([0, 1])
        rig.arena.on_alive = lambda question: rig.arena.switch_alive(question < 2)
        done = rig.store([0, 1], extents) if direction == "store" else rig.load(extents, [0, 1])
        assert not done.ok.any()
        assert done.reasons == {"stale_boot": 2}

    @cases(
        ("field", "value"),
        [
            ("offset", 16 * 192 - 191),
            ("offset", 2**64 - 1),
            ("offset", 2**63),
            ("segment", 1),
            ("segment", 65535),
            ("length", 191),
            ("length", 193),
            ("length", 0),
            ("length", 2**32 - 1),
            ("slot", 16),
            ("slot", 2**32 - 1),
        ],
    )
    def test_a_bad_extent_touches_nothing(self, make_rig: MakeRig, field: str, value: int) -> None:
        rig = make_rig()
        before = rig.pages()
        extents = rig.extents([0, 1, 2])
        extents[field][1] = value
        for done in (rig.store([0, 1, 2], extents[1:2].repeat(3)), rig.load(extents[1:2], [5])):
            assert set(done.reasons) == {"bad_extent"}
            assert not done.ok.any()
        assert rig.arena.untouched()
        assert rig.pages() == before
        assert rig.store([0, 1, 2], extents).ok.tolist() == [True, False, True]
        assert rig.slot(0) + rig.slot(2) == before[0] + before[2]

    @cases("page", [-1, PAGES, 2**62, -(2**63)])
    def test_a_bad_page_touches_nothing(self, make_rig: MakeRig, page: int) -> None:
        rig = make_rig("stacked")
        before = rig.pages()
        for done in (rig.store([page], rig.extents([0])), rig.load(rig.extents([0]), [page])):
            assert done.reasons == {"bad_page": 1}
        assert rig.arena.untouched()
        assert rig.pages() == before
        assert rig.load(rig.extents([0, 1]), [3, page]).ok.tolist() == [True, False]

    @cases(("harm", "flags"), ALONE)
    def test_one_block_alone_fares_as_among_others(
        self, make_rig: MakeRig, flags: int, harm: str
    ) -> None:
        outcomes = []
        for count in (1, 2):
            rig = make_rig()
            slots = [3, 8][:count]
            rig.store([0, 1][:count], rig.extents(slots))
            extents = summed(rig.extents(slots), rig.checksums(slots), flags)
            pages, boot_id = [5, 7][:count], "boot-0" if harm == "boot" else BOOT
            if harm == "byte":
                rig.arena.slot(3)[50] ^= 1
            elif harm == "generation":
                rig.arena.bump(3)
            elif harm == "length":
                extents["length"][0] += 1
            elif harm == "page":
                pages[0] = PAGES
            questions = rig.arena.questions
            if harm == "moved":
                rig.arena.on_alive = lambda question, rig=rig, questions=questions: (
                    rig.arena.bump(3) if question == questions + 2 else None
                )
            elif harm == "death":
                rig.arena.on_alive = lambda question, rig=rig, questions=questions: (
                    rig.arena.switch_alive(question < questions + 2)
                )
            before = rig.page(5)
            loaded = rig.load(extents, pages, boot_id)
            touched = rig.page(5) != before
            stored = rig.store(pages, extents, boot_id)
            sums = None if stored.checksums is None else stored.checksums[0].tobytes()
            why = [set(done.reasons) for done in (loaded, stored)] if count == 1 else []
            outcomes.append((loaded.ok[0], stored.ok[0], sums, touched, rig.slot(3)))
            assert all(len(reasons) <= 1 for reasons in why)
            assert [not reasons for reasons in why] in ([], [loaded.ok[0], stored.ok[0]])
            assert loaded.bytes == rig.kv.page_bytes * np.count_nonzero(loaded.ok)
        assert outcomes[0] == outcomes[1]

    def test_a_tail_that_just_fits(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        last = rig.arena.slot_count - 1
        assert rig.store([PAGES - 1], rig.extents([last])).ok.all()
        assert rig.slot(last) == rig.page(PAGES - 1)

    @with_each_class
    def test_arrays_of_wrong_shape_are_refused(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        extents = rig.extents([0, 1])
        bad = [
            (np.array([0]), extents),
            (np.array([0.0, 1.0]), extents),
            (np.array([[0, 1]]), extents[None]),
            (np.array([0, 1]), np.zeros(2, np.uint32)),
        ]
        for pages, records in bad:
            with pytest.raises(KVHearthError) as caught:
                rig.copier.store(BOOT, pages, records)
            assert caught.value.reason is Reason.BAD_EXTENTS
        assert rig.arena.untouched()

    @with_each_class
    def test_an_empty_batch_has_an_outcome(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        done = rig.store([], np.zeros(0, EXTENT_DTYPE))
        assert (len(done.ok), done.bytes, done.reasons) == (0, 0, {})

    @with_each_class
    def test_callers_may_reuse_their_arrays(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.hold()
        pages, extents = np.array([0, 1]), rig.extents([0, 1])
        ticket = rig.copier.store(BOOT, pages, extents)
        pages[:], extents["offset"] = 10**9, 10**9
        rig.proceed()
        assert rig.outcome(ticket).ok.all()

    @with_each_class
    def test_the_queue_is_bounded(self, make_rig: MakeRig) -> None:
        rig = make_rig(queue_max=2)
        rig.hold()
        extents = rig.extents([0, 1, 2])
        tickets = [
            rig.copier.store(BOOT, np.array([index]), extents[index : index + 1])
            for index in range(3)
        ]
        assert tickets[0] is not None
        assert tickets[1] is not None
        assert tickets[2] is None
        assert rig.copier.store(BOOT, np.array([2]), extents[2:], wait_s=0.02) is None
        rig.proceed()
        late = rig.copier.store(BOOT, np.array([2]), extents[2:], wait_s=HUNG_S)
        assert rig.outcome(late).ok.all()
        assert {done.ticket for done in rig.copier.poll()} <= set(tickets[:2])

    @with_each_class
    def test_a_wait_ends_at_its_deadline(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.hold()
        ticket = rig.copier.store(BOOT, np.array([0]), rig.extents([0]))
        assert ticket is not None
        assert rig.copier.wait(ticket, 0.02) is None
        assert rig.copier.wait(ticket, 0.0) is None
        assert not rig.copier.drain(0.02)
        assert rig.copier.poll() == []
        rig.proceed()
        assert rig.copier.drain(HUNG_S)
        assert rig.outcome(ticket).ok.all()

    @with_each_class
    def test_an_outcome_is_given_out_once(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        tickets = [rig.copier.store(BOOT, np.array([0]), rig.extents([slot])) for slot in (0, 1)]
        assert rig.copier.drain(HUNG_S)
        assert [done.ticket for done in rig.copier.poll()] == tickets
        assert rig.copier.poll() == []
        with pytest.raises(KVHearthError) as caught:
            rig.copier.wait(tickets[0], HUNG_S)
        assert caught.value.reason is Reason.INTERNAL

    @cases("direction", ["store", "load"])
    def test_the_caller_never_waits_for_the_verdict(
        self, make_rig: MakeRig, direction: str
    ) -> None:
        rig = make_rig()
        extents = rig.extents([0, 1])
        rig.store([0, 1], extents)
        judging, go, judges = threading.Event(), threading.Event(), []
        asked_before = rig.arena.questions

        def stall(question: int) -> None:
            if question == asked_before + 2:  # after the last copy
                judges.append(threading.get_ident())
                judging.set()
                go.wait(HUNG_S)

        rig.arena.on_alive = stall
        if direction == "store":
            ticket = rig.copier.store(BOOT, np.array([2, 3]), extents)
        else:
            due = summed(extents, rig.checksums([0, 1]), FLAG_SUMMED | FLAG_VERIFY)
            ticket = rig.copier.load(BOOT, due, np.array([2, 3]))
        assert ticket is not None
        began = time.monotonic()
        while not judging.is_set():
            assert rig.copier.poll() == []
            assert time.monotonic() - began < HUNG_S
        assert threading.get_ident() not in judges
        assert rig.copier.wait(ticket, 0.02) is None
        assert not rig.copier.close(0.02)
        go.set()
        assert rig.outcome(ticket).ok.all()

    @with_each_class
    def test_threads_may_submit_at_once(self, make_rig: MakeRig) -> None:
        rig = make_rig("stacked")
        before = rig.pages()

        def store(first: int) -> bool:
            return bool(rig.store([first, first + 1], rig.extents([first, first + 1])).ok.all())

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(store, (0, 2, 4))) == [True] * 3
        assert [rig.slot(slot) for slot in range(6)] == before[:6]

    @pytest.mark.realtime("forks")
    @pytest.mark.parametrize("make_rig", [f"scripted-{CopyMethod.BATCH}"], indirect=True)
    def test_a_forked_child_has_no_copier(
        self, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cache keeps a forked child from the host copier; CUDA ends with a fork."""
        rig = make_rig()
        rig.hold()
        ticket = rig.copier.store(BOOT, np.array([0]), rig.extents([0]))
        assert ticket is not None
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 0)
            assert rig.copier.poll() == []
            assert rig.copier.wait(ticket, HUNG_S) is None
            assert rig.copier.drain(HUNG_S)
            assert rig.copier.close(HUNG_S)
            with pytest.raises(KVHearthError, match="closed"):
                rig.copier.store(BOOT, np.array([1]), rig.extents([1]))
        rig.proceed()
        assert rig.outcome(ticket).ok.all()

    @with_each_class
    def test_close_drains(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.hold()
        tickets = [
            rig.copier.store(BOOT, np.array([slot]), rig.extents([slot])) for slot in range(3)
        ]
        assert not rig.copier.close(0.02)
        with pytest.raises(KVHearthError) as caught:
            rig.copier.store(BOOT, np.array([0]), rig.extents([0]))
        assert caught.value.reason is Reason.CLOSED
        rig.proceed()
        assert rig.copier.close(HUNG_S)
        assert rig.copier.close(HUNG_S)
        outcomes = rig.copier.poll()
        assert [done.ticket for done in outcomes] == tickets
        assert all(done.ok.all() for done in outcomes)
