"""Checksums equal those of zlib, with each implementation."""

from __future__ import annotations

import importlib
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.core import durable_files as durable


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_checksums_equal_those_of_zlib_in_one_piece_and_in_two(data: bytes, cut: int) -> None:
    assert durable.crc32(data) == zlib.crc32(data)
    assert durable.crc32(data[cut:], durable.crc32(data[:cut])) == zlib.crc32(data)
    assert durable.crc32(np.frombuffer(data, np.uint8)) == zlib.crc32(data)


def test_zlib_is_used_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zlib_ng", None)
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    try:
        assert importlib.reload(durable).crc32 is zlib.crc32
    finally:
        monkeypatch.undo()
        importlib.reload(durable)


def test_zlib_ng_is_used_if_it_is_installed() -> None:
    zlib_ng = pytest.importorskip("zlib_ng.zlib_ng", reason="the extra `fast` is not installed")
    assert durable.crc32 is zlib_ng.crc32
