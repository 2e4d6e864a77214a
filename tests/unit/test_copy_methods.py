"""Methods of copying: the choice, the file of rates, the measurement, and the driver's entry."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_fake import FakeCuda, FakeDevice

from kvhearth.copiers import CopyKind
from kvhearth.copiers.cudart import BatchCall, find_batch_call, numa_node_of
from kvhearth.copiers.measure import Measurement
from kvhearth.copiers.methods import (
    AUTO,
    FRAGMENT_BYTES,
    METHOD_ENV,
    CopyMethod,
    Rates,
    choose,
    load_rates,
    rates_path,
    requested,
    save_rates,
)
from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness import HUNG_S

LOOP, BATCH, KERNEL = CopyMethod
ALL = dict.fromkeys(CopyMethod, "")


def _rates(**rows: tuple[float, ...]) -> Rates:
    table = {CopyMethod(name): row for name, row in rows.items()}
    return Rates(dict.fromkeys(CopyKind, table))


class TestChoice:
    def test_an_argument_precedes_the_environment(self) -> None:
        assert requested(AUTO, {}) == AUTO
        assert requested(AUTO, {METHOD_ENV: "loop"}) == LOOP
        assert requested("batch", {METHOD_ENV: "loop"}) == BATCH
        assert requested(AUTO, {METHOD_ENV: ""}) == AUTO
        for argument, environment in (("fast", {}), (AUTO, {METHOD_ENV: "fast"})):
            with pytest.raises(KVHearthError, match="'fast'") as caught:
                requested(argument, environment)
            assert caught.value.reason is Reason.CONFIG_INVALID

    def test_small_fragments_go_by_the_kernel(self) -> None:
        rates = _rates(
            loop=(1, 4, 16, 40, 50), batch=(3, 9, 30, 48, 51), kernel=(20, 20, 38, 48, 52)
        )
        sizes = (100, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 64 << 20)
        found = [rates.best(CopyKind.LOAD, size) for size in sizes]
        assert found == [KERNEL, KERNEL, KERNEL, KERNEL, BATCH, BATCH, BATCH]
        assert rates.best(CopyKind.LOAD, (64 << 10) - 1) is KERNEL

    def test_a_kernel_must_gain_a_quarter(self) -> None:
        assert _rates(loop=(8,) * 5, batch=(10,) * 5, kernel=(12.4,) * 5).best(
            CopyKind.STORE, 1
        ) is (BATCH)
        assert _rates(loop=(8,) * 5, batch=(10,) * 5, kernel=(12.6,) * 5).best(
            CopyKind.STORE, 1
        ) is (KERNEL)

    def test_one_call_is_preferred_to_many_at_equal_speed(self) -> None:
        assert _rates(loop=(50,) * 5, batch=(48,) * 5).best(CopyKind.STORE, 1) is BATCH
        assert _rates(loop=(50,) * 5, batch=(47,) * 5).best(CopyKind.STORE, 1) is LOOP
        assert _rates(loop=(50,) * 5, batch=(0,) * 5).best(CopyKind.STORE, 1) is LOOP

    def test_before_anything_was_measured(self) -> None:
        assert choose(CopyKind.LOAD, 1, AUTO, ALL, None) is BATCH
        assert choose(CopyKind.LOAD, 1, AUTO, {**ALL, BATCH: "old"}, None) is LOOP
        assert choose(CopyKind.LOAD, 1, KERNEL, ALL, None) is KERNEL

    def test_a_method_that_vanished_is_not_used(self) -> None:
        rates = _rates(loop=(1,) * 5, batch=(2,) * 5, kernel=(9,) * 5)
        assert choose(CopyKind.LOAD, 1, AUTO, ALL, rates) is KERNEL
        assert choose(CopyKind.LOAD, 1, AUTO, {**ALL, KERNEL: "gone"}, rates) is BATCH
        assert choose(CopyKind.LOAD, 1, KERNEL, {**ALL, KERNEL: "gone"}, rates) is BATCH


class TestFile:
    RATES = _rates(loop=(1, 2, 3, 4, 5), batch=(2, 3, 4, 5, 6.5))

    def test_rates_come_back(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "rates.json"
        assert load_rates(path, "gpu") is None
        save_rates(path, "gpu", self.RATES)
        save_rates(path, "other", _rates(loop=(9,) * 5))
        assert load_rates(path, "gpu") == self.RATES
        assert load_rates(path, "third") is None
        assert list(path.parent.iterdir()) == [path]

    def test_a_file_that_is_not_right_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "rates.json"
        for text in (
            "",
            "{",
            "[]",
            "7",
            '{"gpu": 1}',
            '{"gpu": {}}',
            '{"gpu": {"store": {"loop": [1, 2, 3, 4, 5]}}}',
            '{"gpu": {"store": {"loop": [1]}, "load": {"loop": [1]}}}',
            '{"gpu": {"store": {"loop": "12345"}, "load": {"walk": [1, 2, 3, 4, 5]}}}',
            '{"gpu": {"store": {"batch": [1,2,3,4,5]}, "load": {"batch": [1,2,3,4,5]}}}',
            '{"gpu": {"store": {"loop": [1,2,3,4,NaN]}, "load": {"loop": [1,2,3,4,5]}}}',
            '{"gpu": {"store": {"loop": [1,2,3,4,-1]}, "load": {"loop": [1,2,3,4,5]}}}',
            "[" * 20_000,
            " " * (64 << 10) + "{}",
        ):
            path.write_text(text)
            assert load_rates(path, "gpu") is None, text[:80]
            save_rates(path, "gpu", self.RATES)
            assert load_rates(path, "gpu") == self.RATES

    def test_a_torn_file_is_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "rates.json"
        save_rates(path, "gpu", self.RATES)
        whole = path.read_bytes()
        for end in range(0, len(whole), 7):
            path.write_bytes(whole[:end])
            assert load_rates(path, "gpu") is None

    def test_the_file_is_bounded(self, tmp_path: Path) -> None:
        path = tmp_path / "rates.json"
        for number in range(40):
            save_rates(path, f"gpu {number}", self.RATES)
        assert len(json.loads(path.read_text())) == 16
        assert load_rates(path, "gpu 39") == self.RATES

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("")
        save_rates(blocked / "rates.json", "gpu", self.RATES)
        assert load_rates(blocked / "rates.json", "gpu") is None

    def test_it_is_in_the_users_cache(self) -> None:
        assert rates_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvhearth/copy-rates.json")


class TestMeasurement:
    @pytest.fixture
    def cuda(self) -> Iterator[FakeCuda]:
        cuda = FakeCuda()
        cuda.capturing = True
        yield cuda
        assert cuda.broken_by == []
        assert cuda.left_behind() == []
        assert cuda.contexts == {cuda.device}
        assert threading.get_ident() not in set().union(*cuda.callers.values())

    def measured(self, cuda: FakeCuda, path: Path) -> FakeDevice:
        device = FakeDevice(cuda)
        # 64 KiB of scratch: the larger fragments do not fit and count as unknown.
        measurement = Measurement(device, path, scratch_bytes=64 << 10)
        assert measurement.wait(HUNG_S)
        return device

    def test_all_methods_are_measured_once(self, cuda: FakeCuda, tmp_path: Path) -> None:
        path = tmp_path / "rates.json"
        device = self.measured(cuda, path)
        rates = device.rates
        assert rates is not None
        assert rates.methods() == set(CopyMethod)
        for kind in CopyKind:
            for method in CopyMethod:
                assert rates.values[kind][method][0] > 0
        assert load_rates(path, "scripted GPU, CUDA 13001") == rates
        again = FakeCuda()
        assert self.measured(again, path).rates == rates
        assert again.submitted == []

    def test_a_new_method_is_measured(self, cuda: FakeCuda, tmp_path: Path) -> None:
        path = tmp_path / "rates.json"
        cuda.missing = {"kernel": "no compiler"}
        rates = self.measured(cuda, path).rates
        assert rates is not None
        assert rates.methods() == {LOOP, BATCH}
        rates = self.measured(FakeCuda(), path).rates
        assert rates is not None
        assert rates.methods() == set(CopyMethod)

    def test_a_method_that_garbles_is_not_used(
        self, cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cuda.garbles = "batch"
        rates = self.measured(cuda, tmp_path / "rates.json").rates
        assert rates is not None
        assert all(rates.values[kind][BATCH] == (0.0,) * len(FRAGMENT_BYTES) for kind in CopyKind)
        assert rates.best(CopyKind.STORE, 4096) is not BATCH
        assert "wrong bytes" in caplog.text

    def test_a_method_that_fails_is_not_used(self, cuda: FakeCuda, tmp_path: Path) -> None:
        cuda.fail_call = "kernel"
        rates = self.measured(cuda, tmp_path / "rates.json").rates
        assert rates is not None
        assert rates.values[CopyKind.LOAD][KERNEL] == (0.0,) * len(FRAGMENT_BYTES)

    @pytest.mark.parametrize("call", ["scratch", "cudaSetDevice"])
    def test_without_a_result_copies_go_on(self, cuda: FakeCuda, tmp_path: Path, call: str) -> None:
        cuda.fail_call = call
        assert self.measured(cuda, tmp_path / "rates.json").rates is None
        assert list(tmp_path.iterdir()) == []

    def test_it_takes_a_bounded_time(self, cuda: FakeCuda, tmp_path: Path) -> None:
        device, times = FakeDevice(cuda), iter(range(10_000))
        path = tmp_path / "rates.json"
        # Each look at this clock takes half a second: two cells, and the time is over.
        measurement = Measurement(
            device, path, clock=lambda: next(times) / 2, scratch_bytes=64 << 10
        )
        assert measurement.wait(HUNG_S)
        assert device.rates is not None
        assert next(times) < 60


class _Driver:
    """The part of a driver library that is asked for its batched copy."""

    def __init__(self, version: int, offered: dict[int, int]) -> None:
        self._version = version
        self._offered = offered

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._version
        return 0

    def cuGetProcAddress_v2(
        self, symbol: bytes, found: Any, version: Any, flags: Any, status: Any
    ) -> int:
        assert (symbol, flags.value) == (b"cuMemcpyBatchAsync", 0)
        found._obj.value = self._offered.get(version.value)
        return 0 if version.value in self._offered else 500


class TestBatchCall:
    """The call as the driver sees it, by a function of the driver's own signature."""

    @pytest.mark.parametrize("failed_index", [False, True])
    def test_arguments(self, failed_index: bool) -> None:
        seen: list[Any] = []
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        middle = [pointer] if failed_index else []

        def driver(*given: Any) -> int:
            targets, sources, sizes, count, attributes, firsts, kinds, *rest = given
            words = ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))
            arrays = [
                ctypes.cast(array, ctypes.POINTER(ctypes.c_uint64))[:count]
                for array in (targets, sources, sizes)
            ]
            first = ctypes.cast(firsts, ctypes.POINTER(ctypes.c_size_t))[0]
            seen.extend([*arrays, words[:6], first, kinds, len(rest), rest[-1]])
            return 3

        types = [pointer, pointer, pointer, size, pointer, pointer, size, *middle, pointer]
        entry = ctypes.CFUNCTYPE(ctypes.c_int, *types)(driver)
        address = ctypes.cast(entry, pointer).value
        assert address is not None
        call = BatchCall(address, failed_index)
        columns = [np.array(values, np.int64) for values in ([1 << 40, 2], [3, 4], [5, 6])]
        assert call(columns[0], columns[1], columns[2], 77) == 3
        # Sources are read in stream order, the hints of managed memory are empty, overlap is asked.
        attributes = [1, 0, 0, 0, 0, 1]
        assert seen == [[1 << 40, 2], [3, 4], [5, 6], attributes, 0, 1, 1 + failed_index, 77]

    def test_the_newest_entry_is_taken(self) -> None:
        for version, offered, failed_index in (
            (13000, {13000: 1, 12080: 2}, False),
            (12080, {12080: 2}, True),
            (12090, {12080: 2}, True),
            (13010, {12080: 2}, True),
        ):
            found = find_batch_call(_Driver(version, offered))
            assert isinstance(found, BatchCall), version
            assert bool(found._failed) == failed_index, version

    def test_an_old_driver_has_none(self) -> None:
        for version, offered in ((12040, {}), (13000, {}), (12060, {12080: 1})):
            found = find_batch_call(_Driver(version, offered))
            assert isinstance(found, str), version
            assert f"{version // 1000}.{version % 1000 // 10}" in found


class TestNumaNode:
    def test_a_device_of_a_node(self, tmp_path: Path) -> None:
        folder = tmp_path / "0000:3b:00.0"
        folder.mkdir()
        for text, node in (("1\n", 1), ("-1\n", -1), ("", -1), ("-7", -1)):
            (folder / "numa_node").write_text(text)
            assert numa_node_of("0000:3B:00.0", tmp_path) == node
        assert numa_node_of("0000:3C:00.0", tmp_path) == -1
