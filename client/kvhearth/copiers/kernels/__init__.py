"""GPU kernels in Triton: copies of fragments, checksums, codecs. Triton is imported at first use.

Every function takes addresses as integers: of the current device's memory, or of host memory that
is registered with CUDA, which has the same address on the device. In Triton's interpreter
(``TRITON_INTERPRET=1`` before the first use) addresses of plain CPU memory work too.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvhearth.codec import ELEMENT_BYTES, Encoding
from kvhearth.copiers.kernels.xxh3 import LONG_BYTES_MIN, constants

PROGRAMS = 32
"""Programs that copy at once. Each has 8 KiB under way, which covers the latency of a PCIe bus;
more would take multiprocessors from the engine's own kernels.
"""
_BLOCK = 1024
_EXACT = {"enable_fp_fusion": False}
"""No fused multiply-add: the codecs' bytes are those of the CPU."""
_SUM_BLOCKS = 8
"""KiB that one program sums at once."""
_ENCODED_GROUPS = 32
"""Groups of elements that one program encodes or decodes at once."""


def available() -> str | None:
    """Return why the kernels cannot be used in this process, or None if they can."""
    try:
        torch: Any = importlib.import_module("torch")
        interpreted = _programs().INTERPRETED
    except ImportError as error:
        return f"no Triton: {error}"
    if interpreted or torch.cuda.is_available():
        return None
    return "no CUDA device, and TRITON_INTERPRET is not set"


def move(descriptors: Any, stream: Any = None) -> None:
    """Copy n fragments with one launch, asynchronously on a device.

    Args:
        descriptors: torch int64 tensor of shape (n, 3), contiguous, on the device that copies:
            source address, destination address, bytes. Any alignment and length will do, 0 too;
            two addresses that are multiples of 8 are faster. Fragments must not overlap.
        stream: torch stream of the launch; None for the current one.

    Raises:
        ValueError: descriptors of another dtype, shape or layout.
    """
    _check_table(descriptors, 3)
    count = len(descriptors)
    if count:
        grid = (min(count, PROGRAMS), max(1, PROGRAMS // count))
        with _on(stream):
            _programs().move_fragments[grid](
                descriptors, count, BLOCK=_BLOCK, num_warps=8, **_EXACT
            )


def accumulate(fragments: Any, run_bytes: int, stream: Any = None) -> Any:
    """Read n shards and return the lanes of their checksums, asynchronously on a device.

    ``xxh3.checksums`` makes checksums of them on the CPU. A shard is the concatenation of equal
    runs, wherever these are.

    Args:
        fragments: torch int64 tensor of shape (n, m), contiguous, on the device that reads:
            addresses of the runs of each shard, multiples of 8.
        run_bytes: bytes of a run, a multiple of 8.
        stream: torch stream of the launches; None for the current one.

    Returns:
        torch uint64 tensor of shape (n, 8) on that device.

    Raises:
        ValueError: runs that are not whole words, or shards below ``LONG_BYTES_MIN`` bytes, which
            XXH3 treats otherwise.
    """
    torch: Any = importlib.import_module("torch")
    parts = fragments.shape[-1]
    _check_table(fragments, parts)
    count, size = len(fragments), parts * run_bytes
    if run_bytes % 8 or size < LONG_BYTES_MIN:
        raise ValueError(f"{parts} runs of {run_bytes} bytes: {LONG_BYTES_MIN} and more, by 8")
    rows = (size - 1) // 1024 + 1
    with _on(stream):
        table = torch.from_numpy(constants()).to(fragments.device, non_blocking=True)
        sums, lanes = (
            torch.empty(shape, dtype=torch.uint64, device=fragments.device)
            for shape in ((count, rows, 8), (count, 8))
        )
        if count:
            grid = (count, -(-rows // _SUM_BLOCKS))
            given = (run_bytes, size, rows)
            _programs().sum_blocks[grid](
                fragments, parts, sums, table, *given, BLOCKS=_SUM_BLOCKS, num_warps=4, **_EXACT
            )
            _programs().fold_shards[(count,)](
                fragments, parts, sums, lanes, table, *given, num_warps=1, **_EXACT
            )
    return lanes


def encode(
    fragments: Any, run_bytes: int, targets: Any, encoding: Encoding, stream: Any = None
) -> None:
    """Gather the runs of n shards and write them encoded, with one launch, asynchronously.

    The bytes are those of ``Encoding.encode``, except that a device may take values below 2^-126
    for 0.

    Args:
        fragments: torch int64 tensor of shape (n, m), contiguous, on the device that copies:
            addresses of the runs of each shard, multiples of an element's size.
        run_bytes: bytes of a run, whole elements.
        targets: torch int64 tensor of shape (n,), contiguous: addresses of the blocks at rest,
            multiples of 16.
        encoding: codec and sizes.
        stream: torch stream of the launch; None for the current one.

    Raises:
        ValueError: runs that do not make up a shard, or tables of another shape or dtype.
    """
    _launch(f"encode_{encoding.codec}", fragments, run_bytes, targets, encoding, stream)


def decode(
    sources: Any, fragments: Any, run_bytes: int, encoding: Encoding, stream: Any = None
) -> None:
    """Read n encoded shards at ``sources`` and scatter them to their runs; see ``encode``."""
    _launch(f"decode_{encoding.codec}", fragments, run_bytes, sources, encoding, stream)


def _launch(
    name: str, fragments: Any, run_bytes: int, blocks: Any, encoding: Encoding, stream: Any
) -> None:
    parts = fragments.shape[-1]
    _check_table(fragments, parts)
    _check_table(blocks[:, None], 1)
    whole = run_bytes % ELEMENT_BYTES[encoding.dtype] == 0
    if not whole or parts * run_bytes != encoding.source_bytes or len(blocks) != len(fragments):
        raise ValueError(
            f"{len(fragments)} shards of {parts} runs of {run_bytes} bytes for {len(blocks)} "
            f"blocks of {encoding.source_bytes} bytes of {encoding.dtype}"
        )
    count = len(fragments)
    if count:
        grid = (min(count, PROGRAMS), max(1, PROGRAMS // count))
        with _on(stream):
            getattr(_programs(), name)[grid](
                fragments,
                parts,
                blocks,
                count,
                encoding.elements,
                run_bytes,
                DTYPE=encoding.dtype,
                GROUPS=_ENCODED_GROUPS,
                num_warps=4,
                **_EXACT,
            )


def _check_table(table: Any, columns: int) -> None:
    """Refuse a tensor that is no contiguous int64 table of so many columns."""
    fits = table.ndim == 2 and table.shape[1] == columns and table.is_contiguous()
    if not fits or str(table.dtype) != "torch.int64":
        raise ValueError(
            f"a tensor of shape {tuple(table.shape)} and {table.dtype}: pass a contiguous int64 "
            f"tensor of {columns} columns"
        )


def _programs() -> Any:
    return importlib.import_module("kvhearth.copiers.kernels.programs")


def _on(stream: Any) -> AbstractContextManager[Any]:
    if stream is None:
        return nullcontext()
    context: AbstractContextManager[Any] = importlib.import_module("torch").cuda.stream(stream)
    return context
