"""LeRobot's own dataset class of version 2.1 reads our sets under its default configuration."""

from __future__ import annotations

import pytest

pytest.importorskip("lerobot", reason="its tests need lerobot: make test-readers")

from tests.readers.lerobot_sets import (
    check_gaps,
    check_set,
    check_statistics,
    check_video,
    declare_operators,
    decode,
)

OPERATORS = declare_operators()
lerobot_dataset = pytest.importorskip("lerobot.datasets.lerobot_dataset")

VERSION = "v2.1"
STATISTICS = ("min", "max", "mean", "std")  # of several episodes it computes no others


pytestmark = pytest.mark.skipif(
    lerobot_dataset.CODEBASE_VERSION != VERSION, reason="another release reads this version"
)


def test_cameras_an_open_end_and_statistics_are_read_under_the_default_configuration(tmp_path):
    check_set(lerobot_dataset.LeRobotDataset, tmp_path, VERSION)
    check_statistics(lerobot_dataset.LeRobotDataset, tmp_path, STATISTICS)


def test_fields_that_an_episode_lacks_are_nan_and_false_and_the_rest_is_as_recorded(tmp_path):
    check_gaps(lerobot_dataset.LeRobotDataset, tmp_path, VERSION)


def test_pixels_of_video_are_those_of_the_source_also_after_an_episode_was_left_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lerobot_dataset, "decode_video_frames", decode)
    check_video(lerobot_dataset.LeRobotDataset, tmp_path, VERSION)
