"""Golden tests of the SSD tier's files: the format must not change, and old files must stay
readable.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    RECORD_DTYPE,
    DirectoryHead,
    Doubt,
    Footer,
    crc_good,
    doubts_of,
    footer_lines,
    footer_of,
    parse_directory_page,
    parse_segment_page,
)


def _made() -> ModuleType:
    path = Path(__file__).parent / "ssd_format.py"
    spec = importlib.util.spec_from_file_location("ssd_format", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = _made()
HEAD = MADE.HEAD


def page(name: str) -> np.ndarray:
    data = MADE.golden(name)
    return np.frombuffer(data.ljust(-(-len(data) // PAGE_BYTES) * PAGE_BYTES, b"\0"), np.uint8)


@pytest.mark.parametrize("name", sorted(MADE.pages()))
def test_what_is_written_is_what_was_written(name: str) -> None:
    assert MADE.pages()[name].rstrip(b"\0") == MADE.golden(name).rstrip(b"\0")


def test_what_was_written_is_read() -> None:
    assert parse_directory_page(page("ssd_directory")) == DirectoryHead(HEAD.log_id, 256 << 20)
    assert parse_segment_page(page("ssd_segment")) == HEAD
    record = np.frombuffer(page("ssd_record")[:192].tobytes(), RECORD_DTYPE)
    assert crc_good(record[0])
    assert doubts_of(record, HEAD, HEAD.segment_bytes) == {}
    tail = np.concatenate([page("ssd_footer_lines"), page("ssd_footer_page")])
    footer = footer_of(tail[-PAGE_BYTES:], HEAD)
    assert isinstance(footer, Footer)
    assert (footer.count, footer.end) == (2, 35)
    lines = footer_lines(tail, footer)
    assert lines is not None
    assert lines.tobytes() == MADE.records().tobytes()


@pytest.mark.parametrize("name", ["ssd_directory", "ssd_segment", "ssd_footer_page"])
def test_any_flipped_bit_of_a_head_is_seen(name: str) -> None:
    good = page(name).copy()
    for at in range(64):
        bad = good.copy()
        bad[at] ^= 1 << (at % 8)
        if name == "ssd_directory":
            assert isinstance(parse_directory_page(bad), Doubt)
        elif name == "ssd_segment":
            assert isinstance(parse_segment_page(bad), Doubt)
        else:
            answer = footer_of(bad, HEAD)
            assert answer is None or isinstance(answer, Doubt)


def test_another_version_is_told_from_damage() -> None:
    other = MADE.records().copy()
    other["version"] = 3
    MADE.seal(other)
    assert list(doubts_of(other, HEAD, HEAD.segment_bytes)) == [Doubt.VERSION]


def test_a_footer_of_another_log_or_an_earlier_life_is_not_believed() -> None:
    tail = page("ssd_footer_page")
    assert footer_of(tail, replace(HEAD, log_id=HEAD.log_id ^ 1)) is Doubt.FOREIGN
    assert footer_of(tail, replace(HEAD, sequence=HEAD.sequence + 1)) is None
