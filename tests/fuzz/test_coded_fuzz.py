"""Flip a bit of thousands of bytes of a block with coded components, one at a time.

`make soak` runs it.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.files import coded
from tests.files.test_block_file_damage import check_flips, used_bytes

NUM_FLIPS = 5000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_flipped_bits_of_a_coded_block_are_reported_or_without_effect(tmp_path):
    (path,) = coded.record(tmp_path / "data", num_steps=4, num_envs=2).glob("*.h5")
    positions = used_bytes(path)
    chosen = np.random.default_rng(0).choice(
        positions, min(NUM_FLIPS, len(positions)), replace=False
    )
    counts = check_flips(path, tmp_path / path.name, sorted(chosen.tolist()), [2])
    assert counts["CorruptFileError"] > 0.1 * sum(counts.values())
    print(f"flipped {sum(counts.values())} bits: {counts}")
