"""Errors of earlier nested-dict and trajectory buffers, B1 to B23, which ours must not have."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from rollout_data import load_expert_trajectories
from storage import (
    DictBuffer,
    FieldTypeError,
    NaiveReplayBuffer,
    RolloutDataError,
    SchemaError,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    UsageError,
    ZBuffer,
    load_buffer,
)
from tests.saved import config_of


def episode(length: int, start: int = 0, **more: object) -> dict:
    return {"observation": torch.arange(start, start + length).float().unsqueeze(1), **more}


def starts(buffer: TrajectoryDictBuffer | TrajectoryDictBufferMultiDim, length: int) -> set[int]:
    observation = buffer.sample(400 * length, length)["observation"]
    return set(observation.view(400, length, -1)[:, 0, -1].int().tolist())


def test_b1_the_last_valid_start_is_drawn() -> None:
    buffer = TrajectoryDictBuffer([episode(6)], "cpu", generator=0)
    assert starts(buffer, 2) == {0, 1, 2, 3}
    ring = TrajectoryDictBufferMultiDim(capacity=6, end_key="done", generator=0)
    ring.extend({"observation": episode(6)["observation"], "done": torch.eye(6)[:, 5:]})
    assert starts(ring, 2) == {0, 1, 2, 3}


def test_b2_a_window_does_not_leave_an_episode_of_its_length() -> None:
    buffer = TrajectoryDictBuffer(
        [episode(4, 10), episode(3, 20)], "cpu", 3, output_key_tp1=[], generator=0
    )
    assert starts(buffer, 3) == {10, 11, 20}
    ring = TrajectoryDictBufferMultiDim(capacity=3, output_key_tp1=[], end_key="done", generator=0)
    ring.extend({"observation": episode(3)["observation"], "done": torch.eye(3)[:, 2:]})
    assert starts(ring, 3) == {0}


def test_b4_boundaries_come_from_the_lengths() -> None:
    never = {"done": torch.zeros(4, 1, dtype=torch.bool)}
    episodes = [episode(4, 0, **never), episode(4, 10, **never), episode(4, 20, **never)]
    buffer = TrajectoryDictBuffer(episodes, "cpu", 2, generator=0)
    assert (
        buffer.lengths.tolist() == [4, 4, 4]
        and len(buffer.priorities) == len(buffer.motion_ids) == 3
    )
    assert starts(buffer, 2) == {0, 1, 10, 11, 20, 21}
    assert buffer.get_full_buffer()["done"].flatten().tolist() == ([False] * 3 + [True]) * 3
    assert not never["done"].any()
    inside = {"done": torch.tensor([[0], [1], [0], [0]], dtype=torch.bool)}
    with pytest.raises(ValueError, match="episode 1"):
        TrajectoryDictBuffer([episode(4), episode(4, 10, **inside)], "cpu")
    split = TrajectoryDictBuffer([episode(4, 10, motion_id=7, **inside)], "cpu", split_on_end=True)
    assert split.lengths.tolist() == [2, 2] and split.motion_ids == [7, 7]


def test_b5_a_nested_end_key_is_found() -> None:
    buffer = TrajectoryDictBufferMultiDim(capacity=6, end_key=("next", "done"), generator=0)
    done = torch.tensor([0, 0, 1, 0, 0, 1]).bool().unsqueeze(1)
    buffer.extend({"observation": episode(6)["observation"], "next": {"done": done}})
    assert starts(buffer, 2) == {0, 3}
    expert = TrajectoryDictBuffer([episode(3)], "cpu", end_key=("next", "done"))
    assert expert.get_full_buffer()["next"]["done"].flatten().tolist() == [False, False, True]


def test_b6_priorities_are_updated_in_part_and_never_become_nan() -> None:
    buffer = TrajectoryDictBuffer([episode(3, 10 * i) for i in range(4)], "cpu", generator=0)
    buffer.update_priorities(torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1, 3, 3]))
    assert torch.allclose(buffer.priorities, torch.tensor([0.25, 0.5, 0.25, 2.0]) / 3.0)
    for wrong in ([float("nan")], [-1.0], [float("inf")]):
        with pytest.raises(ValueError):
            buffer.update_priorities(wrong, [0])
    with pytest.raises(ValueError):
        buffer.update_priorities([1.0], [4])
    buffer.update_priorities([0.0] * 4)
    with pytest.warns(UserWarning, match="equally likely"):
        assert starts(buffer, 1) == {0, 1, 10, 11, 20, 21, 30, 31}


def test_b6_the_share_of_too_short_episodes_is_divided_among_the_others() -> None:
    buffer = TrajectoryDictBuffer(
        [episode(2), episode(8, 10), episode(8, 30)], "cpu", 4, generator=0
    )
    buffer.update_priorities([0.9, 0.075, 0.025])
    observation = buffer.sample(4 * 20_000)["observation"].view(-1, 4)[:, 0]
    assert abs((observation < 30).float().mean().item() - 0.75) < 0.02


def test_b7_no_episode_of_window_length_raises_a_clear_error() -> None:
    buffer = TrajectoryDictBuffer([episode(3), episode(5)], "cpu")
    with pytest.raises(ValueError, match=r"longest episode has 5 frames, and a window needs 9"):
        buffer.sample(8, 8)


def test_b8_the_axis_of_a_single_environment_is_kept() -> None:
    buffer = TrajectoryDictBufferMultiDim(
        capacity=1, n_dim=2, output_key_tp1=[], end_key="done", generator=0
    )
    buffer.extend({"observation": torch.ones(1, 1, 4), "done": torch.zeros(1, 1, 1)})
    assert buffer.sample(3, 1)["observation"].shape == (3, 4) and buffer.storage[
        "observation"
    ].shape == (1, 1, 4)
    for n_dim, lead in ((1, (6,)), (2, (6, 1))):
        flat = TrajectoryDictBufferMultiDim(capacity=6, n_dim=n_dim, end_key="done")
        flat.extend(
            {"observation": torch.arange(6.0).view(*lead, 1), "done": torch.zeros(*lead, 1)}
        )
        full = flat.get_full_buffer()
        assert full["observation"].flatten().tolist() == [0, 1, 2, 3, 4]
        assert full["next"]["observation"].flatten().tolist() == [1, 2, 3, 4, 5]


def test_b9_every_top_level_value_may_be_a_mapping() -> None:
    buffer = DictBuffer(capacity=3)
    buffer.extend({"obs": {"deep": {"x": torch.ones(2, 1)}}})
    assert buffer.sample(2)["obs"]["deep"]["x"].shape == (2, 1)


def test_b10_a_missing_and_a_new_key_are_refused_before_anything_is_written() -> None:
    buffer = DictBuffer(capacity=3)
    buffer.extend({"a": torch.zeros(1, 1), "b": {"c": torch.zeros(1, 1)}})
    for wrong in (
        {"a": torch.ones(1, 1)},
        {"a": torch.ones(1, 1), "b": {"c": torch.ones(1, 1)}, "d": torch.ones(1, 1)},
    ):
        with pytest.raises(KeyError, match=r"'(b/c|d)'"):
            buffer.extend(wrong)
    assert len(buffer) == 1 and not buffer.storage["a"].any()


def test_b11_an_oversized_write_keeps_the_newest_rows() -> None:
    buffer = DictBuffer(capacity=3)
    buffer.extend({"a": torch.arange(11).unsqueeze(1)})
    assert buffer.storage["a"].flatten().tolist() == [9, 10, 8] and buffer.total % 3 == 2


def test_b12_a_leaf_without_an_event_axis_raises_or_receives_one() -> None:
    for n_dim, lead in ((1, (4,)), (2, (4, 2))):
        strict = TrajectoryDictBufferMultiDim(capacity=4, n_dim=n_dim, output_key_tp1=[])
        with pytest.raises(ValueError, match="unsqueeze"):
            strict.extend({"observation": torch.zeros(*lead, 3), "done": torch.zeros(lead)})
        lenient = TrajectoryDictBufferMultiDim(
            capacity=4, n_dim=n_dim, output_key_tp1=[], auto_unsqueeze=True
        )
        for _ in range(2):
            lenient.extend({"observation": torch.zeros(*lead, 3), "done": torch.zeros(lead)})
        assert lenient.storage["done"].shape == (*lead, 1)


def test_b13_the_device_argument_of_load_wins(tmp_path: Path) -> None:
    buffer = DictBuffer(capacity=3)
    buffer.extend({"a": torch.ones(2, 1)})
    buffer.save(tmp_path / "b")
    config = tmp_path / "b" / "config.json"
    config.write_text(json.dumps({**config_of(config), "device": "cuda"}))
    assert DictBuffer.load(tmp_path / "b", device="cpu").storage["a"].device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.warns(
            UserWarning, match="'cuda' does not exist. The buffer is loaded onto the CPU"
        ):
            assert load_buffer(tmp_path / "b").device.type == "cpu"


def test_b14_the_separator_reaches_every_level_and_the_config(tmp_path: Path) -> None:
    buffer = DictBuffer(capacity=3, nested_key_separator="_", device=torch.device("cpu"))
    buffer.extend({"a": {"b": {"c": {"d": torch.ones(2, 1)}}}})
    buffer.save(tmp_path / "one")
    with h5py.File(tmp_path / "one" / "buffer.hdf5") as file:
        assert list(file) == ["a_b_c_d"]
    buffer.save(tmp_path / "two", nested_key_separator="++")
    assert (
        json.loads((tmp_path / "two" / "config.json").read_text())["nested_key_separator"] == "++"
    )
    for name in ("one", "two"):
        assert load_buffer(tmp_path / name).sample(1)["a"]["b"]["c"]["d"].shape == (1, 1)
    for separator in ("/", "b", ""):
        with pytest.raises(ValueError):
            DictBuffer(capacity=1, nested_key_separator=separator).save(
                tmp_path / "3"
            ) if separator == "" else buffer.save(
                tmp_path / "three", nested_key_separator=separator
            )
        assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "int8", "uint16", "bool", "int64", "complex64"]
)
def test_b15_every_dtype_and_an_empty_buffer_survive_saving(tmp_path: Path, dtype: str) -> None:
    buffer = DictBuffer(capacity=4, generator=3)
    buffer.save(tmp_path / "new")
    assert len(load_buffer(tmp_path / "new")) == 0
    buffer.extend({"x": torch.arange(6).view(3, 2).to(getattr(torch, dtype))})
    buffer.save(tmp_path / "b")
    loaded = load_buffer(tmp_path / "b")
    assert loaded.storage["x"].dtype is getattr(torch, dtype) and torch.equal(
        loaded.sample(20)["x"], buffer.sample(20)["x"]
    )
    buffer.clear()
    buffer.save(tmp_path / "b")
    loaded = load_buffer(tmp_path / "b")
    assert len(loaded) == 0 and loaded.storage["x"].dtype is getattr(torch, dtype)


def test_b16_classes_are_identified_by_their_whole_name(tmp_path: Path) -> None:
    TrajectoryDictBuffer([episode(3)], "cpu").save(tmp_path / "t")
    assert type(load_buffer(tmp_path / "t")) is TrajectoryDictBuffer
    config = tmp_path / "t" / "config.json"
    text = json.dumps(config_of(config))
    for target in ("a.b.MyDictBuffer", "DictBuffer.", ""):
        config.write_text(
            text.replace("storage.replay.trajectory_dict_buffer.TrajectoryDictBuffer", target)
        )
        with pytest.raises(ValueError, match="'DictBuffer'"):
            load_buffer(tmp_path / "t")
    config.write_text(text.replace("__target__", "target"))
    with pytest.raises(ValueError, match="__target__"):
        load_buffer(tmp_path / "t")


def test_b17_the_full_buffer_is_always_a_copy() -> None:
    for num_rows in (2, 3, 5):
        buffer = DictBuffer(capacity=3)
        buffer.extend({"a": torch.ones(num_rows, 2)})
        for order in ("ring", "time"):
            buffer.get_full_buffer(order)["a"].zero_()
        assert buffer.storage["a"].sum() == 2 * min(num_rows, 3)
        buffer.get_full_buffer(copy=False)["a"].zero_()
        assert buffer.storage["a"].sum() == 0


def test_b18_the_buffer_shares_no_memory_with_the_caller() -> None:
    buffer = DictBuffer(capacity=3)
    for _ in range(2):
        mine = torch.ones(1, 2)
        buffer.extend({"a": mine})
        mine.zero_()
    assert buffer.storage["a"][:2].sum() == 4
    sampled = buffer.sample(3)["a"]
    sampled.zero_()
    assert buffer.storage["a"][:2].sum() == 4


def test_b19_a_termination_without_truncation_ends_a_trajectory() -> None:
    terminated = torch.tensor([0, 1, 0, 0]).bool().unsqueeze(1)
    truncated = torch.tensor([0, 0, 0, 1]).bool().unsqueeze(1)
    for end_key in (None, ["terminated", ("truncated",)]):
        buffer = TrajectoryDictBufferMultiDim(capacity=4, end_key=end_key, generator=0)
        buffer.extend(
            {
                "observation": episode(4)["observation"],
                "terminated": terminated,
                "truncated": truncated,
            }
        )
        assert starts(buffer, 1) == {0, 2}


def test_b20_windows_not_trajectories_are_equally_likely() -> None:
    buffer = TrajectoryDictBufferMultiDim(capacity=12, output_key_tp1=[], generator=0)
    buffer.extend(
        {"observation": episode(12)["observation"], "done": (torch.arange(12) == 1).unsqueeze(1)}
    )
    first = buffer.sample(2 * 40_000, 2)["observation"].view(-1, 2)[:, 0]
    assert abs((first == 0).float().mean().item() - 0.1) < 0.01, (
        "one of ten windows, in one of two trajectories"
    )


def test_b21_z_accepts_any_number_of_vectors_and_raises_if_empty() -> None:
    buffer = ZBuffer(4, 2)
    with pytest.raises(ValueError, match="Call add"):
        buffer.sample(1)
    for size in (3, 11, 0, 2, 4, 7):
        buffer.add(torch.arange(size * 2.0).view(size, 2))
    assert len(buffer) == 4
    assert set(buffer.sample(200)[:, 0].tolist()) == {6.0, 8.0, 10.0, 12.0}
    for wrong in (torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 2, dtype=torch.complex64)):
        with pytest.raises(ValueError):
            buffer.add(wrong)
    needs_gradient = torch.ones(1, 2, requires_grad=True)
    buffer.add(needs_gradient)
    assert not buffer.sample(3).requires_grad


def test_b22_the_motion_list_keeps_spaces_and_the_files_keep_integers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a b.h5", "w") as file:
        file.attrs["num_episodes"] = 1
        group = file.create_group("ep_0")
        group["observation/state"] = np.arange(8.0).reshape(4, 2)
        group["observation/phase"] = np.arange(4).reshape(4, 1)
    (tmp_path / "list.txt").write_text("# motions\n\n   a b.h5  \n")
    buffer = load_expert_trajectories(tmp_path / "list.txt", tmp_path, 2, "cpu")
    full = buffer.get_full_buffer()["observation"]
    assert full["state"].dtype is torch.float32 and full["phase"].dtype is torch.int64
    assert buffer.file_names == ["a b.h5"] and buffer.motion_ids == [None]
    (tmp_path / "list.txt").write_text("a b.h5\n\nmissing.h5\n")
    with pytest.raises(FileNotFoundError, match="Line 3 of"):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path, 2, "cpu")
    (tmp_path / "list.txt").write_text("a b.h5\n")
    with h5py.File(tmp_path / "a b.h5", "r+") as file:
        file["ep_0"].move("observation", "other")
    with pytest.raises(TypeError):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path, 2, "cpu", obs_dict_mapper=dict)


def test_b23_sampling_adds_no_attribute_and_file_names_are_an_argument() -> None:
    buffer = TrajectoryDictBuffer([episode(3)], "cpu", file_names=["walk"])
    before = set(vars(buffer))
    buffer.sample(2, 1)
    assert set(vars(buffer)) == before and buffer.file_names == ["walk"]


def test_importing_errors_raises_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert issubclass(SchemaError, RolloutDataError)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_conjugate_and_negative_views_are_resolved_and_quantized_tensors_raise() -> None:
    buffer = DictBuffer(capacity=8, end_key="done")
    done = torch.zeros(2, 1)
    value = torch.tensor([[1 + 2j], [3 - 4j]], dtype=torch.complex64)
    buffer.extend({"x": value.conj(), "y": value.conj().imag, "done": done})
    assert torch.equal(buffer.storage["x"][:2], torch.conj_physical(value))
    assert buffer.storage["y"][:2].flatten().tolist() == [-2.0, 4.0]
    quantized = torch.quantize_per_tensor(torch.ones(2, 1), 0.1, 0, torch.quint8)
    with pytest.raises(
        FieldTypeError, match=r"field 'y' must be a dense tensor, got a quantized tensor"
    ):
        buffer.extend({"x": value, "y": quantized, "done": torch.ones(2, 1)})
    assert len(buffer) == 2
    buffer.extend({"x": value[:1], "y": value.real[:1].float(), "done": done[:1]})
    firsts = buffer.sample_transitions(64, next_keys=("x",))["x"]
    assert set(firsts.flatten().tolist()) == {1 - 2j, 3 + 4j}
    items = NaiveReplayBuffer(4)
    items.push({"x": value[0].conj()})
    assert items.sample(1)[0]["x"].item() == 1 - 2j


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_leaf_without_elements_is_kept(num_envs: int) -> None:
    buffer = DictBuffer(capacity=8, num_envs=num_envs, end_key="done", generator=0)
    rows = {
        "x": torch.ones(4, 3),
        "none": torch.ones(4, 0),
        "done": torch.tensor([[0], [0], [1], [1]]),
    }
    for _ in range(2):
        buffer.extend(rows, final={"none": torch.ones(4, 0), "x": torch.zeros(4, 3)})
    assert buffer.sample_transitions(5, next_keys=("x", "none"))["next"]["none"].shape == (5, 0)
    windows = TrajectoryDictBufferMultiDim(
        capacity=8, output_key_t=["none"], output_key_tp1=["none"], end_key="done", generator=0
    )
    windows.extend(rows, final={"none": torch.ones(4, 0)})
    assert windows.sample(4, 2)["next"]["none"].shape == (4, 0)


def test_windows_longer_than_the_ring_and_impossible_orders_are_refused() -> None:
    with pytest.raises(UsageError, match="seq_length must be at most the capacity of 5, got 8"):
        TrajectoryDictBufferMultiDim(capacity=5, seq_length=8)
    with pytest.raises(
        UsageError, match="TrajectoryDictBufferMultiDim: capacity must be >= 1, got 0"
    ):
        TrajectoryDictBufferMultiDim(0)
    buffer = TrajectoryDictBufferMultiDim(capacity=5, seq_length=2)
    for options in ({"order": "nonsense"}, {"copy": False}):
        with pytest.raises(UsageError, match="order must be 'ring' or 'time', with copy=True"):
            buffer.get_full_buffer(**options)


def test_final_rows_that_are_not_a_mapping_raise() -> None:
    buffer = DictBuffer(capacity=5, end_key="done")
    with pytest.raises(SchemaError, match="must be a nested mapping of tensors, got Tensor"):
        buffer.extend({"x": torch.ones(1, 1), "done": torch.ones(1, 1)}, final=torch.ones(1, 1))
