"""LeRobot's own dataset class of version 2.1 reads our sets under its default configuration."""

from __future__ import annotations

import pytest

pytest.importorskip("lerobot", reason="its tests need lerobot: make test-readers")

from tests.readers.lerobot_sets import check_set, check_statistics, declare_operators

OPERATORS = declare_operators()
lerobot_dataset = pytest.importorskip("lerobot.datasets.lerobot_dataset")

VERSION = "v2.1"
STATISTICS = ("min", "max", "mean", "std")  # of several episodes it computes no others


@pytest.mark.skipif(lerobot_dataset.CODEBASE_VERSION != VERSION, reason="another release reads this version")
def test_cameras_an_open_end_and_statistics_are_read_under_the_default_configuration(tmp_path):
    check_set(lerobot_dataset.LeRobotDataset, tmp_path, VERSION)
    check_statistics(lerobot_dataset.LeRobotDataset, tmp_path, STATISTICS)
