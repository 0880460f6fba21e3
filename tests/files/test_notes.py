"""Notes of episodes and texts of frames are written with the frames, read back, and kept by every
tool. Damage is reported.
"""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter, WindowDataset, WindowMixture, prune
from rollout_data.blocks.annotation_table import EPISODES, MAX_NOTE_BYTES, TEXTS, text_id
from rollout_data.blocks.block_content import BlockContent, gathered
from rollout_data.blocks.block_header import open_block, read_header
from rollout_data.blocks.write_block import write_block
from rollout_data.tools.edit.pack_folder import check_folder, pack_dataset, repair_folder
from storage.errors import (
    CorruptFileError,
    FieldTypeError,
    RolloutDataError,
    SchemaError,
    UsageError,
)
from tests.files.notes_there import notes_of
from tests.files.test_block_file_damage import used_bytes
from tests.files.test_block_file_format import reference_reader

TASKS = ("pick the cube", "öffne die Tür \N{DOOR}", "")


def step(writer, t, num_envs=2, done=None, **more):
    frame = np.full((num_envs, 3), t, np.float32)
    writer.add(
        observation=frame,
        action=frame[:, :1],
        done=[False] * num_envs if done is None else done,
        **more,
    )


def said_in(folder: Path) -> dict[tuple[str, int], dict]:
    """Return the notes of each trajectory of a reader, by its env and its number within the env."""
    (notes, store), actual = notes_of(folder), {}
    index = store.index
    for number in np.lexsort((index.number, index.env)).tolist():
        env = int(index.env[number])
        actual[env, sum(key[0] == env for key in actual)] = notes.of(store, number)
    columns = {name: notes.column(store, name) for name in ("task", "seed", "success")}
    for number in range(len(index)):
        for name, column in columns.items():
            assert column[number] == notes.of(store, number).get(name)
    return actual


def record(folder: Path, num_steps: int, lengths=(3, 5), block_bytes=1 << 20, **options) -> dict:
    """Record two envs with episodes of these lengths: a task at the start, a success at the end."""
    expected, numbers, ages = {}, [0, 0], [0, 0]
    with RolloutWriter(folder, 2, block_bytes=block_bytes, durable=False, **options) as writer:
        for t in range(num_steps):
            notes, done = [None, None], [False, False]
            for env in (0, 1):
                key = env, numbers[env]
                if ages[env] == 0:
                    notes[env] = {"task": TASKS[numbers[env] % 3], "seed": 10 * env + numbers[env]}
                ages[env] += 1
                if ages[env] == lengths[env]:
                    notes[env] = {**(notes[env] or {}), "success": numbers[env] % 2 == 0}
                    done[env], ages[env], numbers[env] = True, 0, numbers[env] + 1
                expected.setdefault(key, {}).update(notes[env] or {})
            step(
                writer, t, done=done, episode=notes, instruction=[f"go to {t}", "stay"], mode="slow"
            )
    return expected


def test_notes_of_several_blocks_are_merged(tmp_path):
    for block_bytes in (1, 300, 1 << 20):
        folder = tmp_path / str(block_bytes)
        assert said_in_equals(
            folder, record(folder, 17, block_bytes=block_bytes, max_pending_blocks=1)
        )
    assert len(list((tmp_path / "1").glob("*.h5"))) > 10


def said_in_equals(folder, expected):
    assert said_in(folder) == expected
    return True


def test_a_later_note_of_the_same_name_replaces_the_earlier_one(tmp_path):
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for t, note in enumerate(
            [{"task": "lift", "seed": 1}, {"task": "drop"}, {"score": 2}, {"task": "throw"}]
        ):
            step(writer, t, num_envs=1, episode=note)
            writer.flush()
    assert said_in(tmp_path) == {(0, 0): {"task": "throw", "seed": 1, "score": 2}}


def test_pack_repair_and_retention_keep_notes(tmp_path):
    expected = record(tmp_path / "a", 16, block_bytes=300)
    pack_dataset(tmp_path / "a", tmp_path / "b")
    pack_dataset(tmp_path / "b", tmp_path / "c", block_bytes=200)
    assert said_in(tmp_path / "b") == said_in(tmp_path / "c") == expected
    repair_folder(tmp_path / "c")
    assert said_in(tmp_path / "c") == expected and not check_folder(tmp_path / "c").problems
    windows = WindowDataset(tmp_path / "c", 1)
    numbers = {text_id(f"go to {t}") for t in range(16)} | {text_id("stay")}
    assert (
        set(torch.cat([windows[i]["instruction"] for i in range(len(windows))]).tolist()) == numbers
    )
    prune(tmp_path / "c", trajectories=2)
    assert 0 < len(said_in(tmp_path / "c")) < len(expected)


def test_episodes_with_coded_components_have_notes(tmp_path):
    with RolloutWriter(
        tmp_path, 1, durable=False, obs_disassemble_mapping={"cam": "shuffle+lz4"}
    ) as writer:
        for t in range(4):
            observation = {
                "cam": torch.full((1, 8, 8, 3), t, dtype=torch.uint8),
                "joints": torch.zeros(1, 3),
            }
            notes = [{"task": "look"}] if t == 0 else None
            step = {
                "action": torch.zeros(1, 1),
                "reward": torch.zeros(1),
                "done": torch.tensor([t == 3]),
            }
            writer.add(observation=observation, episode=notes, **step)
    (episode,) = rollout_data.open(tmp_path)
    assert episode.task == "look" and episode.observation["cam"][:, 0, 0, 0].tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_batches_have_the_number_of_the_task_on_demand(tmp_path):
    record(tmp_path, 30, block_bytes=500)
    task_of = {env: [TASKS[t // length % 3] for t in range(30)] for env, length in ((0, 3), (1, 5))}
    windows = WindowDataset(tmp_path, 1, texts=True)
    batch = windows.collate(windows.__getitems__(range(len(windows))))
    assert batch["task"].shape == (60,) and "task" not in WindowDataset(tmp_path, 1)[0]
    assert sorted(windows.texts[task] for task in batch["task"].tolist()) == sorted(
        task_of[0] + task_of[1]
    )
    dataset = RolloutDataset(tmp_path, 2, device="cpu", texts=True, cache="ram")
    first = dataset.get_batch(4)
    notes = {
        text_id(text): text for text in [*TASKS, "stay", "slow", *(f"go to {t}" for t in range(30))]
    }
    assert dataset.texts == windows.texts == WindowMixture([windows, windows]).texts == notes
    for t, n in np.ndindex(4, 2):
        assert dataset.texts[int(first.extras["task"][t, n])] == task_of_frame(task_of, first, t, n)
    buffer = dataset.get_buffer()
    dataset.fill_transition(buffer)
    assert buffer.extras["task"].shape == (2,) and int(buffer.extras["task"][0]) in notes
    loaded = pickle.loads(pickle.dumps(windows))
    assert torch.equal(loaded.collate(loaded.__getitems__(range(60)))["task"], batch["task"])


def task_of_frame(task_of, batch, t, n):
    """Return the task of a frame, from its observation (its step) and its instruction, which only
    env 0 has.
    """
    step = int(batch.observation[t, n, 0])
    is_env_0 = int(batch.extras["instruction"][t, n]) != text_id("stay")
    return task_of[0 if is_env_0 else 1][step]


def test_an_episode_without_a_task_has_the_number_0(tmp_path):
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        step(writer, 0, episode=[{"task": "lift"}, {"seed": 3}])
    windows = WindowDataset(tmp_path, 1, texts=True)
    assert [int(windows[n]["task"]) for n in range(2)] == [text_id("lift"), 0]
    assert (
        RolloutDataset(tmp_path, 2, device="cpu", texts=True)
        .get_batch(1)
        .extras["task"]
        .tolist()[0][1]
        == 0
    )


def test_batches_of_other_formats_have_the_number_of_the_task():
    path = Path(__file__).parents[1] / "data/formats/libero/KITCHEN_SCENE_put_the_cube_demo.hdf5"
    tasks = {episode.task for episode in rollout_data.open(path)}
    windows = WindowDataset(path, 1, texts=True)
    batch = RolloutDataset(path, 2, device="cpu", texts=True).get_batch(1)
    assert {windows.texts[int(windows[n]["task"])] for n in range(len(windows))} == tasks != {""}
    assert {windows.texts[task] for task in batch.extras["task"][0].tolist()} <= tasks


def test_an_episode_of_a_recording_has_its_notes_and_texts(tmp_path):
    expected = record(tmp_path, 15, block_bytes=500)
    for episode in rollout_data.open(tmp_path):
        notes = next(item for item in expected.values() if item["seed"] == episode.metadata["seed"])
        assert (episode.task, episode.success) == (notes["task"], notes.get("success"))
        assert episode["mode"] == ["slow"] * len(episode) and "mode" not in episode.schema
        first = int(episode.observation[0, 0])
        one_by_one = [f"go to {first + t}" for t in range(len(episode))]
        assert episode["instruction"] == (
            ["stay"] * len(episode) if episode.metadata["env"] else one_by_one
        )


def test_texts_are_stored_once_and_frames_have_their_numbers(tmp_path):
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        for t in range(50):
            step(writer, t, instruction=np.array(["left", "right"]), note="same")
        writer.add_rollout(
            observation=np.zeros((2, 2, 3), np.float32),
            action=np.zeros((2, 2, 1), np.float32),
            done=np.zeros((2, 2), bool),
            instruction=[["a", "b"], ["c", ""]],
            note="same",
            episode=[[None, None], [{"task": "late"}, None]],
        )
    header = open_block(next(tmp_path.glob("*.h5")), verify=True)
    assert sorted(text for _, text in header.read_notes(TEXTS)) == [
        "",
        "a",
        "b",
        "c",
        "left",
        "right",
        "same",
    ]
    assert header.schema["instruction"].is_text and header.schema["instruction"].dtype == "int64"
    batch = RolloutDataset(tmp_path, 2, device="cpu").get_batch(52)
    expected = [["left", "right"]] * 50 + [["a", "b"], ["c", ""]]
    assert batch.extras["instruction"].tolist() == [
        [text_id(text) for text in row] for row in expected
    ]
    assert said_in(tmp_path) == {(0, 0): {"task": "late"}, (1, 0): {}}


def test_the_number_of_a_text_is_fixed():
    assert [text_id(text) for text in ("", "a", "öffne")] == [0, NUMBER_OF_A, text_id("öffne")]


#: The digest of b"a", by coreutils: `printf a | b2sum -l 64`.
NUMBER_OF_A = int.from_bytes(bytes.fromhex("40f89e395b66422f"), "little", signed=True)


def test_the_reader_in_format_md_reads_notes(tmp_path):
    record(tmp_path, 16, block_bytes=500)
    notes_of = reference_reader("notes_of")
    for path in tmp_path.glob("*.h5"):
        header = read_header(path)
        with h5py.File(path) as file:
            for kind in (EPISODES, TEXTS):
                assert notes_of(file, kind) == list(header.read_notes(kind))
            assert all(isinstance(json.loads(text), dict) for _, text in notes_of(file, EPISODES))


def test_a_block_without_notes_has_no_tables_of_notes(tmp_path):
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        step(writer, 0, episode=[None, {}])
    with h5py.File(next(tmp_path.glob("*.h5"))) as file:
        assert not {"episodes", "texts", "notes_crc"} & {*file, *file.attrs}


def test_notes_of_a_dropped_episode_are_dropped(tmp_path):
    with RolloutWriter(tmp_path, 2, success_only=True, durable=False) as writer:
        step(writer, 0, episode=[{"task": "kept"}, {"task": "dropped"}])
        step(writer, 1, done=[True, True], success=[True, False], episode=[{"a": 1}, {"a": 2}])
        step(writer, 2, episode=[{"task": "never ended"}, None])
    assert said_in(tmp_path) == {(0, 0): {"task": "kept", "a": 1}}


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False)
            | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    ).filter(lambda said: not {"task", "success"} & said.keys())
)
def test_every_json_value_is_read_back(tmp_path_factory, said):
    folder = tmp_path_factory.mktemp("json")
    with RolloutWriter(folder, 1, durable=False) as writer:
        step(writer, 0, num_envs=1, episode=said)
    assert said_in(folder) == {(0, 0): said}


def test_notes_may_have_numpy_and_torch_values(tmp_path):
    message = {
        "seed": np.int64(3),
        "goal": np.arange(2.0),
        "pose": torch.ones(1, 2),
        "success": np.True_,
        "task": None,
    }
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        step(writer, 0, num_envs=1, episode=message)
    expected = {"seed": 3, "goal": [0.0, 1.0], "pose": [[1.0, 1.0]], "success": True, "task": None}
    assert said_in(tmp_path) == {(0, 0): expected}


REFUSED = {
    "a list of 2 values": {"episode": [{"a": 1}]},
    "for each environment, or one mapping for a single environment, got dict": {
        "episode": {"a": 1}
    },
    "got int64": {"episode": [np.int64(1), None]},
    "got array": {"episode": np.arange(2)},
    "a mapping with str names": {"episode": [{1: 2}, None]},
    "'task' of the metadata of an episode must be str": {"episode": [{"task": 3}, None]},
    "'success' of the metadata of an episode must be bool": {"episode": [{"success": 1}, None]},
    "object is no JSON value": {"episode": [{"a": object()}, None]},
    "environment 1, which env_mask leaves out": {
        "episode": [None, {"a": 1}],
        "env_mask": [True, False],
    },
    "bytes of metadata, expected at most 1048576": {"episode": [{"a": "x" * MAX_NOTE_BYTES}, None]},
    "expected one text or shape (2,)": {"instruction": ["a"]},
    "Unicode texts of at most": {"instruction": "\ud800"},
    "at most 1048576 bytes": {"instruction": "x" * (MAX_NOTE_BYTES + 1)},
    "got int": {"instruction": ["a", 1]},
    "expected texts as in the first record": {"instruction": np.zeros(2, np.int64)},
}


@pytest.mark.parametrize("text", REFUSED)
def test_notes_that_are_not_json_raise_and_the_writer_continues(tmp_path, text):
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        step(writer, 0, instruction="a")
        if text == "got array":
            text = "got ndarray"
            given_now = REFUSED["got array"]
        elif text == "got int64":
            text, given_now = "a mapping with str names", REFUSED["got int64"]
        else:
            given_now = REFUSED[text]
        with pytest.raises((UsageError, SchemaError, FieldTypeError)) as caught:
            step(writer, 1, **{"instruction": "b", **given_now})
        assert text in str(caught.value)
        step(writer, 2, instruction="c", episode=[{"a": "x" * 1000}] * 2)
    assert said_in(tmp_path) == {(0, 0): {"a": "x" * 1000}, (1, 0): {"a": "x" * 1000}}


def test_notes_of_an_episode_have_at_most_one_mebibyte(tmp_path):
    large = {"a": "x" * (MAX_NOTE_BYTES - 100)}
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        step(writer, 0, num_envs=1, episode=large)
        with pytest.raises(UsageError, match="bytes of metadata, expected at most"):
            step(writer, 1, num_envs=1, episode=large)
        step(writer, 1, num_envs=1, done=[True], episode={"b": 1})
        step(writer, 2, num_envs=1, episode=large)
        writer.discard([0], leave_open=True)
        step(writer, 3, num_envs=1, episode=large)
    assert [len(notes) for notes in said_in(tmp_path).values()] == [2, 1, 1]


@pytest.fixture(scope="module")
def block(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("block")
    record(folder, 6, writer_name="w")
    return folder / "rollout_w_000000.h5"


def everything(path: Path) -> tuple:
    header = open_block(path, verify=True)
    notes = [list(header.read_notes(kind)) for kind in (EPISODES, TEXTS)]
    return (
        header.schema,
        header.fragments.tobytes(),
        notes,
        header.read_rows("data", "frames", 0, 12).tobytes(),
    )


def test_flipped_bits_are_reported_or_without_effect(block, tmp_path):
    good, data, work = everything(block), bytearray(block.read_bytes()), tmp_path / block.name
    rng = np.random.default_rng(0)
    for position in rng.choice(used_bytes(block), 300, replace=False).tolist():
        data[position] ^= (bit := 1 << int(rng.integers(8)))
        work.write_bytes(data)
        data[position] ^= bit
        try:
            assert everything(work) == good, f"bit {bit} of byte {position} was returned as data"
        except RolloutDataError as error:
            assert str(work) in str(error)


@pytest.mark.parametrize("kind", [EPISODES, TEXTS])
def test_every_flipped_bit_of_the_notes_is_reported_and_loses_only_that_note(block, tmp_path, kind):
    with h5py.File(block) as file:
        places = {
            part: (file[kind][part].id.get_offset(), file[kind][part].nbytes) for part in file[kind]
        }
    data, good = bytearray(block.read_bytes()), everything(block)
    for part, (offset, num_bytes) in places.items():
        for position in range(offset, offset + num_bytes, 11):
            folder = tmp_path / f"{part}{position}"
            folder.mkdir()
            shutil.copy(block.parent / "metadata.json", folder)
            data[position] ^= 16
            (folder / block.name).write_bytes(data)
            data[position] ^= 16
            with pytest.raises(CorruptFileError):
                open_block(folder / block.name, verify=True)
            if part == "bytes":
                report = repair_folder(folder)
                assert report.num_frames == 12 and list(report.salvaged.values()) == [0]
                kept = everything(folder / block.name)
                for before, now, which in zip(good[2], kept[2], (EPISODES, TEXTS), strict=True):
                    assert len(now) == len(before) - (which == kind) and set(now) <= set(before)
                assert kept[3] == good[3]


def rewritten(block: Path, path: Path, **parts) -> Path:
    """Copy a block with other notes of episodes and right checksums of the tables."""
    shutil.copy(block, path)
    with h5py.File(path, "r+", alignment_threshold=1, alignment_interval=64) as file:
        for name, values in parts.items():
            del file["episodes"][name]
            file["episodes"][name] = values
        tables = [file[kind]["table"][()].tobytes() for kind in (EPISODES, TEXTS)]
        file.attrs["notes_crc"] = np.int64(zlib.crc32(b"".join(tables)))
    return path


def test_opening_a_block_without_the_checksum_of_its_notes_raises(block, tmp_path):
    path = tmp_path / "other.h5"
    shutil.copy(block, path)
    with h5py.File(path, "r+") as file:
        del file.attrs["notes_crc"]
    with pytest.raises(CorruptFileError, match="the checksum of the annotations is missing"):
        read_header(path)


def test_opening_a_block_with_contradictory_tables_of_notes_raises(block, tmp_path):
    with h5py.File(block) as file:
        table, data = file["episodes/table"][()], file["episodes/bytes"][()]
    huge = table.copy()
    huge["num_bytes"] = 1 << 30
    read_header(rewritten(block, tmp_path / "same.h5", table=table, bytes=data))
    for text, parts in {
        "bytes each, sorted by key, got": {"table": huge},
        "sorted by key": {"table": table[::-1].copy()},
        "'episodes/table' has dtype": {"table": np.arange(3)},
        f"expected annotations of {len(data) - 1} bytes": {"bytes": data[:-1]},
    }.items():
        with pytest.raises(CorruptFileError, match=text):
            read_header(rewritten(block, tmp_path / "other.h5", **parts))


@pytest.mark.parametrize("data", [b"{", b"[1]", b"[" * 100_000, b"\xff", b"9" * 10_000])
def test_unreadable_notes_are_reported_as_damage(block, tmp_path, data):
    header = read_header(block)
    tables, fragments = gathered([(header, fragment) for fragment in header.fragments])
    notes = {EPISODES: [(int(fragments["trajectory"][0]), data)]}
    content = BlockContent(
        header.schema, "w", 0, fragments, header.reward_sums, tables, notes=notes
    )
    write_block(tmp_path, content, durable=False)
    notes, store = notes_of(tmp_path)
    for read in (lambda: notes.column(store, "task"), lambda: notes.of(store, 0)):
        with pytest.raises(CorruptFileError, match=block.name):
            read()


def test_a_damaged_note_removes_only_itself_from_the_table(tmp_path):
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for number in range(6):
            writer.add(
                observation=np.zeros((1, 1)),
                action=np.zeros(1),
                done=[True],
                episode=[{"task": f"task {number}"}],
            )
    (path,) = tmp_path.glob("rollout_*.h5")
    data = bytearray(path.read_bytes())
    data[data.index(b"task 3") + 5] ^= 1
    path.write_bytes(data)
    recording = rollout_data.open(tmp_path)
    assert recording.table["task"].tolist() == [
        "task 0",
        "task 1",
        "task 2",
        "",
        "task 4",
        "task 5",
    ]
    assert len(recording.filter(task="task 4")) == 1 and recording[3].length == 1
    assert any("note" in str(problem) for problem in recording.problems)
