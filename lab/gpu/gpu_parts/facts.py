"""Part a: facts of the machine, and a daemon that serves a host copier from these sources."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import kvhearth
from gpu_parts.common import Report, run_part
from kvhearth_lab.bench.daemon import served
from kvhearth_lab.bench.gpu.stage import Stage, copy_methods
from kvhearth_lab.harness.daemon import module

PACKAGES = ("torch", "triton", "numpy", "grpcio", "protobuf", "xxhash", "transformers", "vllm")
SMI_FIELDS = (
    "name,driver_version,memory.total,pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,clocks.max.sm,power.limit,persistence_mode"
)
SMI_S = 15.0
SYMBOLS = ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuStreamCreateWithPriority")
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
PAGE_BYTES = 64 * 1024
BLOCKS = 8
DONE_S = 30.0


def text_of(path: str | Path) -> str:
    """Return a small file's text, or empty."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def host_facts() -> dict[str, Any]:
    """Return facts that need no device."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    huge = Path("/sys/kernel/mm/hugepages")
    memory = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines())
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": next(
            (
                line.partition(":")[2].strip()
                for line in text_of("/proc/cpuinfo").splitlines()
                if line.startswith("model name")
            ),
            platform.machine(),
        ),
        "memory_gib": int(memory["MemTotal"].split()[0]) >> 20,
        "available_gib": int(memory["MemAvailable"].split()[0]) >> 20,
        "cgroup_memory_max": text_of("/sys/fs/cgroup/memory.max"),
        "page_bytes": resource.getpagesize(),
        "transparent_hugepages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_hugepages": text_of("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "hugetlb": {
            each.name: {
                "total": text_of(each / "nr_hugepages"),
                "free": text_of(each / "free_hugepages"),
            }
            for each in (sorted(huge.iterdir()) if huge.is_dir() else ())
        },
        "memlock": [
            "unlimited" if each == resource.RLIM_INFINITY else each for each in (soft, hard)
        ],
        "numa_nodes": text_of("/sys/devices/system/node/online") or "not told",
        "packages": {name: version_of(name) for name in PACKAGES},
        "compute_sanitizer": sanitizer() or "not installed",
        "copy_methods": copy_methods(),
    }


def version_of(package: str) -> str:
    """Return the version of an installed package, or that there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def sanitizer() -> str:
    """Return the path of compute-sanitizer, or empty."""
    found = shutil.which("compute-sanitizer")
    return found or next((path for path in SANITIZERS if os.access(path, os.X_OK)), "")


def driver_facts() -> dict[str, Any]:
    """Return facts of the driver that need no device of torch's."""
    facts: dict[str, Any] = {}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"problem": f"no driver library: {error}"}
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    facts["symbols"] = {name: hasattr(driver, name) for name in SYMBOLS}
    facts["smi"] = smi("--query-gpu=" + SMI_FIELDS, "--format=csv")
    facts["topology"] = smi("topo", "-m")
    return facts


def smi(*words: str) -> str:
    """Return the output of nvidia-smi, or why there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout or done.stderr).strip()[:2000]


def device_facts(stage: Stage) -> dict[str, Any]:
    """Return facts of the stage's GPU."""
    torch = stage.torch
    properties = torch.cuda.get_device_properties(0)
    names = ("name", "total_memory", "multi_processor_count", "major", "minor", "L2_cache_size")
    facts = {name: getattr(properties, name, None) for name in names}
    facts["devices"] = torch.cuda.device_count()
    facts["torch_cuda"] = torch.version.cuda
    bus = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in bus:
        path = Path(f"/sys/bus/pci/devices/{bus[0]:04x}:{bus[1]:02x}:{bus[2]:02x}.0")
        link = ("numa_node", "current_link_speed", "current_link_width", "max_link_speed")
        facts["pcie"] = {name: text_of(path / name) or "not told" for name in link}
    return facts


def round_trip(report: Report) -> None:
    """Start the daemon as ``-m kvhearth_server``; store and load with a host copier, compare."""
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 255, (BLOCKS, PAGE_BYTES), np.uint8)
    contract = kvhearth.contract_for(blocks, model="facts", revision="1", block_tokens=16)
    keys = [f"block {index}" for index in range(BLOCKS)]
    with served(module("kvhearth_server", "serve"), memory="64MiB", http="off") as daemon:
        ready = daemon.ready()
        report.put(daemon={"started_s": round(float(ready["seconds"]), 2)})
        with kvhearth.open(daemon.client_url, contract, wait_s=DONE_S) as cache:
            stored = cache.store(keys, blocks).result(DONE_S)
            report.check("host copier stores", stored.stored == BLOCKS, stored)
            loaded = np.zeros_like(blocks)
            done = cache.load(keys, loaded).result(DONE_S)
            report.check("host copier loads", done.usable_blocks == BLOCKS, done)
            report.check("loaded bytes are equal", bool(np.array_equal(blocks, loaded)))


def measure(report: Report, stage: Stage) -> None:
    """Report facts, most certain first."""
    report.put(host=host_facts())
    report.put(driver=driver_facts())
    if stage.real:
        report.put(device=device_facts(stage))
    round_trip(report)


if __name__ == "__main__":
    run_part(measure)
