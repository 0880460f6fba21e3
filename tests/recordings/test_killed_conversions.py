"""A conversion that was killed at any change of files resumes to the result of an uninterrupted
one.
"""

from __future__ import annotations

import pytest

from tests.recordings.conversions import (
    TARGETS,
    calls_of,
    check_killed,
    convert,
    demos,
    place,
    values,
)

#: Target -> calls before which a kill once left a target that was neither resumed nor read.
WINDOWS = {
    "lerobot 3.0": ("replace info.json", "replace tasks.parquet", "replace stats.json"),
    "lerobot 2.1": ("replace info.json", "replace tasks.jsonl"),
    "minari": ("replace metadata.json", "replace .main_data.hdf5.partial", "rename main_data.hdf5"),
    "rlinf": ("replace metadata.json", "replace trajectory_index.json"),
    "trajectory folders": ("replace metadata.json",),
    "rollout-data": ("link metadata.json",),
    "robomimic": ("replace .set.hdf5.partial", "rename set.hdf5"),
    "isaaclab": ("rename set.hdf5",),
    "d4rl": ("rename set.hdf5",),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_conversion_killed_at_some_calls_is_resumed(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    (tmp_path / "whole").mkdir()
    calls = calls_of(source, tmp_path / "whole", name)
    assert set(WINDOWS[name]) <= set(calls)
    whole = values(place(tmp_path / "whole", name))
    chosen = {*range(0, len(calls), max(1, len(calls) // 2))}
    for window in WINDOWS[name]:
        chosen |= {calls.index(window), len(calls) - 1 - calls[::-1].index(window)}
    for number in sorted(chosen):
        check_killed(source, tmp_path / str(number), name, number, False, whole)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TARGETS)
def test_a_conversion_killed_at_any_call_is_resumed(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    (tmp_path / "whole").mkdir()
    calls = calls_of(source, tmp_path / "whole", name)
    whole = values(place(tmp_path / "whole", name))
    for number, call in enumerate(calls):
        for is_after in (
            (False, True) if call.startswith(("flush", "close", "replace", "rename")) else (False,)
        ):
            check_killed(source, tmp_path / f"{number} {is_after}", name, number, is_after, whole)
    check_killed(source, tmp_path / "last", name, len(calls) - 1, True, whole)
    print(f"{name}: killed at {len(calls)} calls, such as {calls[:: max(1, len(calls) // 5)]}")
    assert convert(source, tmp_path / "last", name).num_present == 6
