"""Dropping, keeping and tagging: all readers, undoing, several editors, running writers, kills."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import (
    RolloutDataset,
    RolloutWriter,
    WindowDataset,
    WindowLoader,
    WindowMixture,
    convert,
    drop,
    edits_of,
    keep,
    loader,
    prune,
    push,
    tag,
    undrop,
    untag,
)
from rollout_data.blocks.edit_blocks import edit_sequence, named_edit
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.cli.info_command import describe
from rollout_data.tools.edit.pack_folder import check_folder, pack_dataset, repair_folder
from storage.errors import DataFileError, UsageError
from tests.editing.folders import (
    LENGTHS,
    by_the_format,
    content,
    folder_of,
    ids,
    number_of,
    streamed,
    windowed,
)
from tests.recordings.sets import write_demos

STEPS = ["drop", "keep", "undrop", "tag", "untag"]
GONE = ["a:1", "a:4", "b:0", "b:9"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Ten trajectories of one writer, in two blocks."""
    return folder_of(tmp_path_factory.mktemp("sound") / "walk", ("a",), flush_every=15)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> Path:
    return folder_of(tmp_path_factory.mktemp("of_two") / "walk", flush_every=15)


@pytest.fixture
def walk(of_two: Path, tmp_path: Path) -> Path:
    """A copy of ten trajectories of each of two writers, in two blocks each."""
    shutil.copytree(of_two, tmp_path / "walk")
    return tmp_path / "walk"


def edit_files(path: Path) -> list[Path]:
    return [item for item in sorted(path.iterdir()) if named_edit(item.name)]


def test_every_reader_skips_dropped_trajectories(walk: Path, tmp_path: Path) -> None:
    every, dropped = ids(walk), set(GONE)
    assert drop(walk, GONE) == 4
    left, numbers = every - dropped, {number_of(item) for item in every - dropped}
    assert ids(walk) == by_the_format(walk) == left, "also readers that know nothing of edits"
    assert streamed(walk) == streamed(rollout_data.open(walk)) == numbers
    assert streamed([walk], random_shuffle_traj_order=True, seed=3) == numbers
    windows = WindowDataset(walk, 2)
    assert windowed(windows) == windowed(WindowDataset(rollout_data.open(walk), 2)) == numbers
    mixed = WindowLoader(WindowMixture([windows, WindowDataset(walk, 2)]), 16)
    assert {int(item) for batch in mixed for item in batch["observation"][:, 0, 0]} <= numbers
    actual: set[int] = set()
    for batch in loader(
        RolloutDataset(walk, 2, device="cpu", num_transitions_per_env=3), num_workers=2
    ):
        actual |= {int(item) for item in batch.observation[..., 0][batch.valid.squeeze(-1)]}
    assert actual == numbers
    assert describe(str(walk))["num_dropped_later"] == 4 and describe(str(walk))[
        "total_trajectories"
    ] == len(left)
    assert check_folder(walk).num_trajectories == len(left)
    convert(walk, tmp_path / "copy", progress=False)
    assert len(ids(tmp_path / "copy")) == len(left)
    push(walk, "memory://walk_without")
    assert ids("memory://walk_without") == left and streamed("memory://walk_without") == numbers


def test_verify_checks_dropped_trajectories(walk: Path) -> None:
    drop(walk, list(ids(walk)))
    path = next(walk.glob("rollout_a_0*.h5"))
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    assert list(check_folder(walk).problems) == [path.name]


def test_pack_removes_dropped_trajectories_and_keeps_tags(walk: Path, tmp_path: Path) -> None:
    drop(walk, GONE)
    tag(walk, "a:0", task="push", success=True)
    before = content(walk)
    pack_dataset(walk, tmp_path / "packed")
    pack_dataset(walk)
    for path in (walk, tmp_path / "packed"):
        after = content(path)
        assert [item[:2] for item in after.values()] == [item[:2] for item in before.values()]
        assert [item[2].get("task") for item in after.values()] == [
            item[2].get("task") for item in before.values()
        ]
        assert (
            not edit_files(path)
            and edits_of(path) == {"dropped": [], "said": {}}
            and undrop(path) == 0
        )


def test_prune_counts_kept_trajectories_and_restores_none(walk: Path) -> None:
    order = rollout_data.open(walk).ids
    drop(walk, order[-4:])
    prune(walk, trajectories=3)
    assert order[-7:-4] == rollout_data.open(walk).ids[-3:] and not ids(walk) & set(order[-4:])
    assert edit_files(walk)


@settings(max_examples=4, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.sets(st.integers(0, 9))), max_size=6))
def test_edits_equal_set_operations_and_undoing_restores_the_recording(
    sound: Path, tmp_path_factory, steps
) -> None:
    walk = tmp_path_factory.mktemp("law") / "walk"
    shutil.copytree(sound, walk)
    before, every = content(walk), ids(walk)
    dropped: set[str] = set()
    tags: dict[str, int] = {}
    for place, (step, numbers) in enumerate(steps):
        chosen = {f"a:{number}" for number in numbers}
        if step == "drop":
            drop(walk, chosen)
            dropped |= chosen
        elif step == "undrop":
            undrop(walk, chosen)
            dropped -= chosen
        elif step == "keep" and not chosen & dropped:
            keep(walk, chosen)
            dropped |= every - chosen
        elif step == "tag":
            assert tag(walk, chosen, place=place) == len(chosen)
            tags |= dict.fromkeys(chosen, place)
        elif step == "untag":
            untag(walk, chosen)
            tags = {item: value for item, value in tags.items() if item not in chosen}
        assert by_the_format(walk) == every - dropped
        actual = {episode.id: episode.metadata.get("place") for episode in rollout_data.open(walk)}
        assert actual == {item: tags.get(item) for item in every - dropped}
    undrop(walk)
    untag(walk)
    assert content(walk) == before and edits_of(walk) == {"dropped": [], "said": {}}


def test_a_tag_replaces_recorded_notes_and_untag_restores_them(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for t in range(4):
            metadata = {"task": "pick", "success": False, "grip": 1} if t % 2 else None
            writer.add(
                observation=np.zeros((1, 2)),
                action=np.zeros((1, 1)),
                done=[t % 2 == 1],
                episode=[metadata],
            )
    recording = rollout_data.open(tmp_path)
    assert tag(tmp_path, 0, success=True, reviewer="ada") == 1
    first, second = rollout_data.open(tmp_path)
    assert (first.success, first.task, first.metadata["grip"], first.metadata["reviewer"]) == (
        True,
        "pick",
        1,
        "ada",
    )
    assert second.success is False and recording.table["success"].tolist() == [0, 0]
    assert rollout_data.open(tmp_path).table["success"].tolist() == [1, 0]
    assert tag(tmp_path, recording.ids, task="place") == 2
    assert [episode.task for episode in rollout_data.open(tmp_path)] == ["place", "place"]
    assert untag(tmp_path) == 2
    assert [(episode.success, episode.task) for episode in rollout_data.open(tmp_path)] == [
        (False, "pick")
    ] * 2


def test_a_push_carries_edits_and_their_undoing(walk: Path) -> None:
    url, every = "memory://edited", ids(walk)
    push(walk, url)
    drop(walk, GONE)
    tag(walk, "a:0", task="push")
    push(walk, url)
    assert ids(url) == every - set(GONE) and content(url) == content(walk)
    undrop(walk, "a:1")
    push(walk, url)
    assert ids(url) == every - set(GONE) | {"a:1"}
    undrop(walk)
    untag(walk)
    push(walk, url)
    assert content(url) == content(walk) and ids(url) == every
    fsspec.filesystem("memory").rm("/edited", recursive=True)


def test_many_editors_at_once_lose_no_edit(walk: Path) -> None:
    every = sorted(ids(walk))
    threads = [threading.Thread(target=drop, args=(walk, [item])) for item in every[6:10]]
    threads += [
        threading.Thread(target=tag, args=(walk, [item]), kwargs={"place": item})
        for item in every[10:16]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ids(walk) == {*every} - {*every[6:10]}
    places = {
        item: episode[2]["place"]
        for item, episode in content(walk).items()
        if "place" in episode[2]
    }
    assert places == {item: item for item in every[10:16]}
    assert not [name for name in os.listdir(walk) if name.startswith((".tmp", ".rollout"))]


def test_a_running_writer_continues_and_its_dropped_trajectories_stay_dropped(
    tmp_path: Path,
) -> None:
    with RolloutWriter(tmp_path, 2, durable=False, writer_name="live") as writer:

        def add(count: int, done: bool = False) -> None:
            for t in range(count):
                ends = [done and t == count - 1] * 2
                writer.add(observation=np.full((2, 1), t), action=np.zeros((2, 1)), done=ends)
            writer.flush()

        add(3)
        growing = rollout_data.open(tmp_path).ids
        dataset = RolloutDataset(tmp_path, 1, device="cpu", dataset_loops=0)
        dataset.get_batch(1)
        drop(tmp_path, growing[0])
        add(2, done=True)
        assert ids(tmp_path) == {growing[1]}
        add(4, done=True)
        assert len(ids(tmp_path)) == 3 and growing[0] not in ids(tmp_path)
        for _ in range(30):
            dataset.get_batch(1)
    with RolloutWriter(tmp_path, 2, durable=False, writer_name="live") as writer:
        writer.add(observation=np.full((2, 1), 0), action=np.zeros((2, 1)), done=[True, True])
    assert len(ids(tmp_path)) == 5 and growing[0] not in ids(tmp_path)
    assert all(named_edit(path.name) or int(path.stem[-6:]) < 10 for path in tmp_path.glob("*.h5"))


def test_a_resumed_stream_skips_trajectories_dropped_before_and_after_its_state(walk: Path) -> None:
    order = rollout_data.open(walk).ids
    drop(walk, order[3])
    dataset = RolloutDataset(walk, 1, device="cpu", num_transitions_per_env=1)
    dataset.get_batch(LENGTHS[0])
    state = dataset.state_dict()
    drop(walk, order[5])
    resumed = RolloutDataset(walk, 1, device="cpu", num_transitions_per_env=1)
    resumed.load_state_dict(state)
    actual = {
        int(item)
        for batch in resumed
        for item in batch.observation[..., 0][batch.valid.squeeze(-1)]
    }
    assert actual and not actual & {number_of(order[3]), number_of(order[5])}


def test_an_incomplete_edit_is_ignored_and_a_newer_one_replaces_it(walk: Path) -> None:
    every = ids(walk)
    drop(walk, "a:1")
    old = {path.name: path.read_bytes() for path in edit_files(walk)}
    drop(walk, ["a:2", "b:2"])
    assert len(edit_files(walk)) == 2 and ids(walk) == every - {"a:1", "a:2", "b:2"}
    for name, data in old.items():  # as if it had been killed before it removed them
        (walk / name).write_bytes(data)
    assert ids(walk) == every - {"a:1", "a:2", "b:2"}
    next(path for path in edit_files(walk) if named_edit(path.name)[0] == "b").unlink()
    assert ids(walk) == every - {"a:1"}, "the earlier one holds"
    assert drop(walk, "b:5") == 1 and ids(walk) == every - {"a:1", "b:5"}
    assert {named_edit(path.name)[1] for path in edit_files(walk)} == {edit_sequence(3, 2)}


def test_a_damaged_edit_is_reported_and_repaired_without_losing_other_edits(walk: Path) -> None:
    drop(walk, ["a:1", "b:2"])
    path = edit_files(walk)[0]
    path.write_bytes(path.read_bytes()[:100])
    assert path.name in check_folder(walk).problems
    with pytest.raises(DataFileError, match="verify --repair"):
        drop(walk, "a:3")
    assert "b:2" not in ids(walk)
    repair_folder(walk)
    assert not check_folder(walk).problems and "b:2" not in ids(walk) and drop(walk, "a:3") == 1


def test_an_invalid_edit_is_one_clear_error(walk: Path, tmp_path: Path, capsys) -> None:
    demos = write_demos(tmp_path / "demos.hdf5", [3, 4])
    with pytest.raises(
        UsageError,
        match=r"demos.hdf5\' has another format than block files\. Convert it with",
    ):
        drop(demos, "demo_0")
    with pytest.raises(
        UsageError, match=r"the id 'a:77' is unknown\. Choose ids such as 'a:7', 'a:0', "
    ):
        drop(walk, "a:77")
    with pytest.raises(UsageError, match="ids must be names, or numbers in -20:20, got 20"):
        tag(walk, 20, task="x")
    with pytest.raises(
        UsageError, match="'success' of the metadata of an episode must be bool or None, got 'yes'"
    ):
        tag(walk, 0, success="yes")
    with pytest.raises(UsageError, match=r"the names \['ends'\] are reserved"):
        tag(walk, 0, ends="unknown")
    push(walk, "memory://no_edit")
    with pytest.raises(
        UsageError,
        match=r"path must be one folder on this machine.*Edit a local folder, then push it",
    ):
        drop("memory://no_edit", "a:1")
    assert main(["keep", "memory://no_edit", "a:1"]) == 2
    text = capsys.readouterr().err
    assert "keep: path must be one folder" in text and "Raised by drop" not in text
    assert not edit_files(walk)
    assert main(["drop", str(walk)]) == 2 and "Pass ids or --select" in capsys.readouterr().err


def test_the_commands_edit_and_undo(walk: Path, capsys) -> None:
    every = ids(walk)
    assert (
        main(["drop", str(walk), "a:1", "--json"]) == 0
        and '"num_trajectories": 1' in capsys.readouterr().out
    )
    assert main(["keep", str(walk), "--select", "length>5"]) == 0
    assert ids(walk) == {item for item in every if LENGTHS[int(item[2:])] > 5} - {"a:1"}
    assert main(["keep", str(walk), "--undo"]) == 0 and ids(walk) == every
    assert main(["tag", str(walk), "a:2", "--set", "success=true", "--set", "task=walk far"]) == 0
    assert [episode.task for episode in rollout_data.open(walk).filter(success=True)] == [
        "walk far"
    ]
    assert main(["tag", str(walk), "a:2", "--undo"]) == 0
    assert not len(rollout_data.open(walk).filter(success=True))
    capsys.readouterr()
    main(["drop", str(walk), "a:1", "a:2"])
    main(["info", str(walk)])
    assert "2 dropped (2 by edits)" in capsys.readouterr().out
    assert main(["drop", str(walk), "--undo", "a:1"]) == 0 and ids(walk) == every - {"a:2"}
    assert (
        main(["pack", str(walk), "--in-place", "--block-mb", "0"]) == 2
        and "block_bytes" in capsys.readouterr().err
    )


def test_a_tag_of_none_states_that_a_value_is_unknown(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        metadata = {"task": "pick", "success": True}
        writer.add(
            observation=np.zeros((1, 2)), action=np.zeros((1, 1)), done=[True], episode=[metadata]
        )
    tag(tmp_path, 0, success=None)
    (episode,) = rollout_data.open(tmp_path)
    assert (episode.success, episode.task) == (None, "pick")
    untag(tmp_path)
    assert rollout_data.open(tmp_path)[0].success is True


def test_a_stream_follows_edits_from_its_next_scan(walk: Path) -> None:
    every = {number_of(name) for name in rollout_data.open(walk).ids}
    dataset = RolloutDataset(walk, 1, device="cpu", dataset_loops=2)
    begun = [int(dataset.get_batch(1).observation.reshape(-1)[0])]
    drop(walk, GONE)
    while (batch := next(dataset, None)) is not None:
        begun += batch.observation[batch.is_first].reshape(-1)[:1].int().tolist()
    dropped = {number_of(item) for item in GONE}
    assert sorted(begun) == sorted([*every, *(every - dropped)])
