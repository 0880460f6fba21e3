"""For a minute, four threads push into and sample from one manager, and memory stays constant.

`make soak` runs it.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tests.managed.stress import Stress, make

#: What the process may grow by after its first quarter of the time.
MAX_GROWTH_BYTES = 30 << 20


def memory_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_four_threads_push_and_sample_for_a_minute_without_a_torn_row_or_growth() -> None:
    duration_s = min(float(os.environ.get("SOAK_S", "60")), 60.0)
    stress = Stress(make())
    stress.run(duration_s / 4)
    before = memory_bytes()
    again = Stress(stress.manager)
    again.num_pushed = stress.num_pushed
    again.run(duration_s * 3 / 4)
    growth = memory_bytes() - before
    stress.num_sampled += again.num_sampled
    stress.num_updated += again.num_updated
    stress.num_given += again.num_given
    stress.check_counters()
    assert growth < MAX_GROWTH_BYTES, f"{growth >> 20} MiB more"
    print(
        f"{stress.num_sampled} items sampled, {sum(stress.num_pushed.values())} pushed, {growth >> 10} KiB more"
    )
