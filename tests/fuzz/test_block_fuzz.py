"""Flip a bit of every byte of a small block, one at a time.

This takes minutes, so `make soak` runs it.
"""

from __future__ import annotations

import pytest

from tests.files.test_block_file_damage import block, check_flips, used_bytes

__all__ = ["block"]  # the fixture


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_flipped_bit_is_reported_or_without_effect(block, tmp_path):
    counts = check_flips(block, tmp_path / block.name, used_bytes(block), [0, 6])
    print(f"flipped {sum(counts.values())} bits: {counts}")
