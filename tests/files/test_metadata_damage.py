"""A damaged metadata.json beside intact blocks: the blocks are read with their own fields, and the
file is reported.
"""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from rollout_data import RolloutDataset, RolloutWriter
from rollout_data.blocks.block_folder import INDEX_CACHE_NAME, save_index_cache
from rollout_data.tools.edit.pack_folder import check_folder, repair_folder
from storage.errors import CorruptFileError, DataFileError, RolloutDataWarning
from tests.files.recorded import drain, frames_of, record

FLIPS = {
    "a field of another name": ("observation", "nbservation"),
    "an unknown codec": ('"codec": "raw"', '"codec": "rax"'),
    "an unknown dtype": ("float32", "floau32"),
    "another shape": ("3", "7"),
    "a key of another name": ('"fields"', '"gields"'),
    "no JSON": ("{", "["),
}


def spoil(data_dir, what, has_cache):
    path = data_dir / "metadata.json"
    text = path.read_text()
    before, after = FLIPS[what]
    if before not in text:
        pytest.skip(f"{before} is not written")
    path.write_text(text.replace(before, after, 1))
    if not has_cache:
        (data_dir / INDEX_CACHE_NAME).unlink()
    return path


def numbers_of(dataset):
    return sorted({number for batch in drain(dataset, 4) for *_, number, _ in frames_of(batch)})


def opened(data_dir, **options):
    return RolloutDataset(data_dir, 1, device="cpu", **options)


@pytest.mark.each_value
@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("what", FLIPS)
def test_blocks_with_damaged_metadata_are_read_and_the_file_is_named(tmp_path, what, has_cache):
    record(tmp_path, [4, 4, 4], flush_every=4)
    path = spoil(tmp_path, what, has_cache)
    dataset = opened(tmp_path)
    with pytest.warns(RolloutDataWarning, match="metadata.json"):
        assert numbers_of(dataset) == [0, 1, 2]
    (problem,) = dataset.problems
    assert type(problem) is CorruptFileError
    assert str(problem).startswith(repr(str(path))) and "verify --repair" in str(problem)
    assert list(dataset.metadata["obs_segments"]) == []
    assert dataset.metadata["fields"][0]["name"] == "observation"


@pytest.mark.filterwarnings("ignore:.*does not contain the fields of the blocks")
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_block_that_differs_from_most_blocks_is_left_out_without_metadata(tmp_path, has_cache):
    record(tmp_path, [4, 4], flush_every=4)
    spoil(tmp_path, "no JSON", has_cache=True)
    with RolloutWriter(tmp_path / "b", 1, durable=False) as writer:
        writer.add(
            observation=np.zeros((1, 5), np.float32),
            action=np.zeros((1, 2), np.float32),
            done=[True],
        )
    next((tmp_path / "b").glob("rollout_*.h5")).rename(tmp_path / "aa.h5")
    shutil.rmtree(tmp_path / "b")
    if not has_cache:
        (tmp_path / INDEX_CACHE_NAME).unlink()
    dataset = opened(tmp_path)
    with pytest.warns(RolloutDataWarning, match=r"aa.h5.*float32\[5\] instead of float32\[3\]"):
        assert numbers_of(dataset) == [0, 1]
    texts = sorted(str(problem) for problem in dataset.problems)
    assert len(texts) == 2 and "metadata.json'" in texts[0] and "aa.h5'" in texts[1]


@pytest.mark.parametrize("has_cache", [True, False])
def test_metadata_decides_which_of_several_schemas_is_read(tmp_path, has_cache):
    record(tmp_path, [4])
    with RolloutWriter(tmp_path / "b", 1, durable=False) as writer:
        for _ in range(2):
            writer.add(
                observation=np.zeros((1, 5), np.float32),
                action=np.zeros((1, 2), np.float32),
                done=[True],
            )
            writer.flush()
    for path in (tmp_path / "b").glob("rollout_*.h5"):
        path.rename(tmp_path / path.name)
    if not has_cache:
        (tmp_path / INDEX_CACHE_NAME).unlink()
    dataset = opened(tmp_path)
    with pytest.warns(RolloutDataWarning, match="has other fields than the data folder"):
        assert numbers_of(dataset) == [0]
    assert len(dataset.problems) == 2


def test_an_index_cache_of_the_minority_schema_changes_no_result(tmp_path):
    record(tmp_path / "a", [4, 4], flush_every=4)
    with RolloutWriter(tmp_path / "b", 1, durable=False) as writer:
        writer.add(
            observation=np.zeros((1, 5), np.float32),
            action=np.zeros((1, 2), np.float32),
            done=[True],
        )
    shutil.rmtree(tmp_path / "b" / "damaged", ignore_errors=True)
    (tmp_path / "b" / "metadata.json").unlink()
    save_index_cache(tmp_path / "b")
    for path in (tmp_path / "a").glob("rollout_*.h5"):
        path.rename(tmp_path / "b" / path.name)
    dataset = opened(tmp_path / "b")
    with pytest.warns(RolloutDataWarning, match=r"float32\[5\] instead of float32\[3\]"):
        assert numbers_of(dataset) == [0, 1]
    assert len(dataset.problems) == 1


def test_metadata_without_matching_blocks_do_not_exclude_later_blocks(tmp_path):
    record(tmp_path / "a", [4])
    spoil(tmp_path / "a", "a field of another name", has_cache=False)
    (path,) = (tmp_path / "a").glob("rollout_*.h5")
    path.rename(tmp_path / path.name)
    (tmp_path / "a" / "text.h5").write_text("hello")
    dataset = opened(tmp_path / "a")
    with pytest.warns(RolloutDataWarning, match="text.h5"):
        assert dataset.num_trajectories == 0
    (tmp_path / path.name).rename(path)
    with pytest.warns(RolloutDataWarning, match="metadata.json"):
        assert numbers_of(dataset) == [0]


def test_repair_rebuilds_the_metadata_with_their_context(tmp_path):
    record(tmp_path, [4], metadata={"env": "walk"})
    path = spoil(tmp_path, "a field of another name", has_cache=True)
    assert list(check_folder(tmp_path).problems) == ["metadata.json"]
    repair_folder(tmp_path)
    assert not check_folder(tmp_path).problems
    made = json.loads(path.read_text())
    assert made["env"] == "walk" and made["fields"][0]["name"] == "observation"
    record(tmp_path, [3], first_number=1)
    assert numbers_of(opened(tmp_path)) == [0, 1]


def test_a_folder_that_cannot_be_listed_raises_a_clear_error(tmp_path, monkeypatch):
    record(tmp_path, [4])
    scandir = os.scandir

    def refuse(path="."):
        if str(path) == str(tmp_path):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(
        DataFileError, match=rf"The data folder '{tmp_path}' cannot be listed.*Permission denied"
    ):
        opened(tmp_path).get_batch()
