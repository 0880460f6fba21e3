"""A target that cannot be written raises one error that names it.

It is never reported as a problem of the source.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

import rollout_data
from storage.errors import RolloutDataError, TargetError
from tests.recordings.conversions import (
    LENGTHS,
    FullDisk,
    calls_of,
    convert,
    demos,
    every_target,
    in_child,
    place,
    values,
)


@pytest.mark.each_value
@every_target
@pytest.mark.parametrize("folder", ["file/in", "x" * 300, "/proc/made"])
def test_an_unwritable_target_raises_an_error_with_its_path(tmp_path, name, folder):
    source = demos(tmp_path / "source.hdf5")
    (tmp_path / "file").touch()
    target = tmp_path / folder
    with pytest.raises(TargetError) as error:
        convert(source, target, name)
    assert repr(str(place(target, name))) in str(error.value)
    assert isinstance(error.value, RolloutDataError) and isinstance(error.value, OSError)
    assert error.value.errno


@every_target
def test_a_conversion_resumes_after_a_full_disk(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    (tmp_path / "whole").mkdir()
    calls = calls_of(source, tmp_path / "whole", name, FullDisk)
    whole = values(place(tmp_path / "whole", name))
    num_errors = 0
    numbers = range(1, len(calls), max(1, len(calls) // 12))
    for number in numbers:
        target = tmp_path / str(number)
        try:
            with FullDisk(number).watching():
                done = convert(source, target, name)
            # A call that failed without harm: a folder that was there, a cache of the index, a
            # temporary file.
            assert (done.num_episodes, done.problems) == (len(LENGTHS), []), calls[number]
        except TargetError as error:
            num_errors += 1
            assert "No space left on device" in str(error), calls[number]
            assert error.errno == errno.ENOSPC, calls[number]
            assert repr(str(place(target, name))) in str(error), calls[number]
        done = convert(source, target, name)
        assert (done.num_episodes, done.problems) == (len(LENGTHS), []), calls[number]
        assert values(place(target, name)) == whole, calls[number]
    assert num_errors >= len(numbers) // 3


@every_target
def test_a_file_size_limit_raises_an_error_of_the_target(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    statuses = set()
    for number, limit in enumerate((100, 1_000, 3_000, 6_000, 12_000)):
        target = tmp_path / str(number)

        def limited(target: Path = target, limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                done = convert(source, target, name)
            except TargetError as error:
                os._exit(7 if repr(str(place(target, name))) in str(error) else 8)
            os._exit(0 if (done.num_episodes, done.problems) == (6, []) else 9)

        statuses.add(in_child(limited))
        done = convert(source, target, name)
        assert (done.num_episodes, done.problems) == (6, [])
        assert len(rollout_data.open(place(target, name))) == 6
    assert 7 in statuses and statuses <= {0, 7}


def test_merge_and_split_raise_with_the_path_of_an_unwritable_target(tmp_path):
    source = demos(tmp_path / "source.hdf5")
    (tmp_path / "file").touch()
    for act in (
        rollout_data.merge,
        lambda item, out: rollout_data.split(item[0], {"a": 0.5, "b": 0.5}, out),
    ):
        with pytest.raises(TargetError, match=r"/file/made'"):
            act([source], tmp_path / "file" / "made")
