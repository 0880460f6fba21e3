"""RolloutWriter: accepted steps and the files that it writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollout_data import RolloutWriter
from rollout_data.blocks.block_folder import read_metadata
from rollout_data.blocks.block_header import FINAL_OBSERVATION_ONLY
from storage import QueueRolloutStorage
from storage.errors import FieldTypeError, SchemaError, UsageError
from tests.files.readback import blocks_of, end_of, trajectories_of

N = 3


def step(t: int = 0, **changes: Any) -> dict[str, Any]:
    values = {
        "observation": np.full((N, 4), t, np.float32),
        "action": np.full((N, 2), t, np.float32),
        "reward": np.full(N, t, np.float32),
        "done": np.zeros(N, bool),
    }
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


def make(folder, **options):
    return RolloutWriter(folder, N, durable=False, **options)


def frames_in(folder):
    return sum(trajectory.length for trajectory in trajectories_of(folder))


def test_a_record_may_be_a_mapping_a_named_tuple_or_an_object(tmp_path):
    class Named(NamedTuple):
        observation: Any
        action: Any
        reward: Any
        done: Any
        next_observation: Any = None

    @dataclass
    class Plural:
        observations: Any
        actions: Any
        rewards: Any
        dones: Any
        time_outs: Any = None
        hidden_states: Any = None

    class Bare:
        def __init__(self, values):
            vars(self).update(values)

    values = step(5)
    forms = [
        values,
        Named(**values, next_observation=1),
        Plural(*values.values(), hidden_states=(1, 2)),
        Bare(values),
    ]
    with make(tmp_path) as writer:
        for form in forms:
            writer.add(form)
    for trajectory in trajectories_of(tmp_path):
        assert sorted(trajectory.fields) == ["action", "observation", "reward"]
        assert trajectory.column("observation").tolist() == [[5] * 4] * 4


def test_a_rollout_storage_is_recorded_as_far_as_it_is_filled(tmp_path):
    from storage.onpolicy.rollout_storage import RolloutStorage

    storage = RolloutStorage(N, 6, (4,), (5,), (2,), num_rewards=2)
    for t in range(4):
        transition = storage.Transition()
        transition.observations, transition.critic_observations = (
            torch.full((N, 4), t),
            torch.full((N, 5), t + 0.5),
        )
        transition.actions, transition.rewards = torch.full((N, 2), -t), torch.full((N, 2), t)
        for name in ("observations", "critic_observations", "actions", "rewards"):
            setattr(transition, name, getattr(transition, name).float())
        transition.dones = torch.tensor([t == 1, t == 2, False])
        transition.time_outs = torch.tensor([False, t == 2, False])
        transition.values, transition.actions_log_prob = (
            torch.full((N, 2), 9.0),
            torch.full((N,), 0.25),
        )
        transition.action_mean = transition.action_sigma = torch.zeros(N, 2)
        storage.add_transitions(transition)
    with make(tmp_path) as writer:
        writer.add_rollout(storage, include=("values", "actions_log_prob"), policy_version=3)
        with pytest.raises(UsageError, match="which is not a field of the storage"):
            writer.add_rollout(storage, include=("nothing",))
    actual = trajectories_of(tmp_path)
    assert [(item.env, item.length, end_of(item)) for item in actual] == [
        (0, 2, "terminated"),
        (1, 3, "truncated"),
        (2, 4, "open"),
        (0, 2, "open"),
        (1, 1, "open"),
    ]
    assert actual[0].column("privileged_observation").tolist() == [[0.5] * 5, [1.5] * 5]
    assert actual[0].column("values").shape == (2, 2) and actual[0].versions == [3, 3]


@pytest.mark.parametrize("num_steps", [3, 7, 8, 11, 16])
def test_a_queue_is_recorded_in_the_order_of_time_at_any_cursor(tmp_path, num_steps):
    storage = QueueRolloutStorage(N, 4, (1,), None, (1,), buffer_dilation_ratio=2.0)
    for t in range(num_steps):
        if t % 4 == 0:
            storage.clear()
        transition = storage.Transition()
        transition.observations, transition.actions = (
            torch.full((N, 1), float(t)),
            torch.zeros(N, 1),
        )
        transition.rewards, transition.dones = torch.zeros(N), torch.zeros(N)
        transition.values, transition.actions_log_prob = torch.zeros(N, 1), torch.zeros(N)
        transition.action_mean = transition.action_sigma = torch.ones(N, 1)
        storage.add_transitions(transition)
    cursor = storage.step
    with make(tmp_path) as writer:
        writer.add_rollout(storage)
    newest = list(range(max(num_steps - 8, 0), num_steps))
    assert [
        trajectory.column("observation")[:, 0].tolist() for trajectory in trajectories_of(tmp_path)
    ] == [newest] * N
    assert storage.step == cursor


def test_values_may_change_after_add(tmp_path):
    values = step(1)
    with make(tmp_path) as writer:
        writer.add(**values)
        for value in values.values():
            value[...] = 7
        writer.add(**step(2))
    assert [
        trajectory.column("observation")[:, 0].tolist() for trajectory in trajectories_of(tmp_path)
    ] == [[1, 2]] * N


def test_arrays_of_any_memory_layout_are_accepted(tmp_path):
    base = np.arange(N * 4, dtype=np.float32).reshape(N, 4)
    read_only = base.copy()
    read_only.flags.writeable = False
    forms = [
        base,
        np.asfortranarray(base),
        base[:, ::-1][:, ::-1],
        read_only,
        base.astype(">f4"),
        torch.from_numpy(base),
    ]
    forms += [torch.from_numpy(base.T.copy()).T, base.astype("<f4").tolist()]
    with make(tmp_path) as writer:
        for form in forms[:-1]:
            writer.add(**step(observation=form))
        with pytest.raises(FieldTypeError):
            writer.add(**step(observation=forms[-1]))  # python floats are float64
    assert trajectories_of(tmp_path)[1].column("observation").tolist() == [base[1].tolist()] * 7


def test_one_frame_of_one_env_is_recorded(tmp_path):
    with RolloutWriter(tmp_path, 1) as writer:
        writer.add(observation=torch.ones(1, 1), action=torch.ones(1), done=[True])
    (item,) = trajectories_of(tmp_path)
    assert (item.length, end_of(item)) == (1, "terminated")
    assert (writer.num_frames, writer.num_trajectories) == (1, 1)


def test_a_writer_without_steps_leaves_no_block(tmp_path):
    with make(tmp_path) as writer:
        writer.flush()
    assert list(tmp_path.iterdir()) == []
    with make(tmp_path) as writer:
        writer.add_rollout(**{name: value[None][:0] for name, value in step().items()})
    assert not blocks_of(tmp_path)


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ({"done": [1, 1, 0], "timeout": [0, 1, 1]}, ["terminated", "truncated", "open"]),
        ({"done": [[True], [False], [False]]}, ["terminated", "open", "open"]),
        ({"done": None, "timeout": [0, 1, 0]}, ["open", "truncated", "open"]),
        (
            {"done": None, "terminated": [1, 0, 1], "truncated": [0, 1, 1]},
            ["terminated", "truncated", "both"],
        ),
        ({"done": [1, 1, 0], "truncated": [0, 1, 0]}, ["terminated", "truncated", "open"]),
        ({"done": [1, 1, 0], "terminated": [0, 1, 0]}, ["truncated", "terminated", "open"]),
        ({"done": [0.0, 1.0, 0.0]}, ["open", "terminated", "open"]),
        ({"done": [1, 1, 0], "env_mask": [1, 0, 1]}, ["terminated", "open"]),
        ({"done": None}, ["open"] * 3),
    ],
)
def test_flags_state_how_a_trajectory_ends(tmp_path, flags, ends):
    with make(tmp_path) as writer:
        writer.add(**step(done=None))
        writer.add(
            **step(
                **{
                    name: value if value is None else np.array(value)
                    for name, value in flags.items()
                }
            )
        )
    actual = trajectories_of(tmp_path)
    masked = [item for item in actual if item.length == 1]
    assert [end_of(item) for item in actual if item not in masked] == ends
    assert all(end_of(item) == "open" for item in masked)


def test_flat_observations_are_cut_into_segments(tmp_path):
    with make(
        tmp_path,
        obs_segments={"b": (2,), "a": [1, 2]},
        obs_disassemble_mapping={"a": "normalized_image"},
    ) as writer:
        flat = torch.tensor([[5.0, 6.0, 0.25, 2.0]]).repeat(N, 1)
        writer.add(**step(observation=flat))
        parts = {"a": torch.tensor([[[0.5, float("nan")]]]).repeat(N, 1, 1), "b": torch.ones(N, 2)}
        writer.add(**step(observation=parts, done=np.ones(N), final_observation=flat))
    item = trajectories_of(tmp_path)[0]
    assert list(item.fields)[:2] == ["observation/b", "observation/a"]
    assert item.column("observation/b").tolist() == [[5, 6], [1, 1]]
    np.testing.assert_allclose(
        item.column("observation/a"), [[[0.25, 1]], [[0.5, 0]]], atol=0.5 / 255
    )
    assert item.finals["observation/b"].tolist() == [5, 6]
    metadata = read_metadata(tmp_path)
    assert list(metadata["obs_segments"].items()) == [("b", [2]), ("a", [1, 2])]


def test_a_missing_privileged_final_repeats_the_last_frame_and_sets_flag_64(tmp_path):
    with make(tmp_path) as writer:
        privileged = np.arange(N, dtype=np.float64)[:, None]
        final = np.full((N, 4), 9, np.float32)
        writer.add(
            **step(done=[1, 0, 1]), privileged_observation=privileged, final_observation=final
        )
    item, _, other = trajectories_of(tmp_path)
    assert item.flags & other.flags & FINAL_OBSERVATION_ONLY
    assert other.finals["observation"].tolist() == [9] * 4 and other.finals[
        "privileged_observation"
    ].tolist() == [2]


def test_discarded_trajectories_lose_their_published_parts_too(tmp_path):
    with make(tmp_path) as writer:
        writer.add(**step(0))
        writer.flush()
        writer.discard([0, 1])
        writer.add(**step(1))
        writer.discard(torch.tensor([1]))
        writer.add(**step(2, done=[1, 1, 1]))
        writer.discard([2])
        with pytest.raises(UsageError, match="ids must be in 0:3"):
            writer.discard([3])
    actual = trajectories_of(tmp_path)
    assert [
        (trajectory.env, trajectory.column("observation")[:, 0].tolist()) for trajectory in actual
    ] == [
        (2, [0, 1, 2]),
        (0, [1, 2]),
        (1, [2]),
    ]
    assert (writer.num_frames, writer.num_trajectories) == (6, 3)


def test_success_only_keeps_successful_trajectories_of_every_kind_of_end(tmp_path):
    with make(tmp_path, success_only=True, block_bytes=100) as writer:
        for t in range(6):
            ends = {"done": [t in (1, 3), t == 4, False], "timeout": [t == 1, False, False]}
            # Needed where something ends
            success = {"success": [t == 1, t == 4, True]} if t in (1, 3, 4) else {}
            writer.add(**step(t, **ends), **success)
        for value, got in (
            ({}, "success is missing. A writer with success_only expects a flag"),
            ({"success": [True]}, "success has shape (1,)"),
        ):
            with pytest.raises(SchemaError) as caught:
                writer.add(**step(6, done=[True, False, False]), **value)
            assert got in str(caught.value)
    actual = trajectories_of(tmp_path)
    assert [(item.env, item.length, end_of(item)) for item in actual] == [
        (0, 2, "truncated"),
        (1, 5, "terminated"),
    ]
    assert (writer.num_frames, writer.num_trajectories) == (7, 2)
    assert "success" not in actual[0].fields
    assert json.loads((tmp_path / "metadata.json").read_text())["success_traj_only"] is True


def test_end_times_are_strictly_increasing_even_if_the_clock_stops(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 1000)
    with make(tmp_path) as writer:
        for t in range(4):
            writer.add(**step(t, done=[t == 2, t == 1, t == 3]))
    assert [trajectory.end_time_ns for trajectory in trajectories_of(tmp_path)][:3] == [
        1002,
        1001,
        1003,
    ]


def test_blocks_are_cut_by_age(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with make(tmp_path, block_age_s=5) as writer:
        for t in range(9):
            now[0] = float(t)
            writer.add(**step(t))
    assert [header.num_frames // N for header in blocks_of(tmp_path)] == [7, 2]


def test_a_block_never_holds_more_than_its_share(tmp_path):
    with make(tmp_path, block_bytes=10_000, max_pending_blocks=2) as writer:
        for t in range(300):
            writer.add(**step(t))
    frame_bytes = blocks_of(tmp_path)[0].layouts["data"].frame_bytes
    assert max(header.num_frames for header in blocks_of(tmp_path)) * frame_bytes <= 5000
    assert frames_in(tmp_path) == 300 * N


def test_nonfinite_rewards_are_counted_or_raise(tmp_path):
    bad = np.array([np.nan, np.inf, 1], np.float32)
    with make(tmp_path / "a") as writer:
        writer.add(**step(reward=bad))
        assert writer.num_nonfinite_rewards == 2
        writer.add(**step(reward=bad, env_mask=np.array([False, True, True])))
        assert writer.num_nonfinite_rewards == 3
        writer.flush()
        assert writer.num_nonfinite_rewards == 3
        writer.add(**step())
    assert writer.num_nonfinite_rewards == 3
    assert np.isnan(trajectories_of(tmp_path / "a")[0].column("reward"))[0].all()
    with make(tmp_path / "b", nonfinite_rewards="refuse") as writer:
        with pytest.raises(UsageError) as caught:
            writer.add(**step(reward=bad))
        writer.add(**step(reward=bad, env_mask=np.array([False, False, True])))
    text = "RolloutWriter.add: field 'reward' has 2 NaN or infinite values."
    assert str(caught.value) == text
    assert frames_in(tmp_path / "b") == 1 and writer.num_nonfinite_rewards == 0


def test_two_writers_share_a_folder(tmp_path):
    with make(tmp_path) as item, make(tmp_path) as other:
        for writer in (item, other, item):
            writer.add(**step())
    assert frames_in(tmp_path) == 9 and item.name != other.name


def test_a_name_used_before_continues_its_numbering(tmp_path):
    for _ in range(2):
        with make(tmp_path, writer_name="robot-1") as writer:
            writer.add(**step(done=np.ones(N)))
            with pytest.raises(UsageError, match=r"is in use in .* by another writer"):
                make(tmp_path, writer_name="robot-1")
    assert [header.sequence for header in blocks_of(tmp_path)] == [0, 1]
    assert [trajectory.number for trajectory in trajectories_of(tmp_path)] == list(range(2 * N))


@pytest.mark.parametrize("num_envs", [1, 3, 4])
@pytest.mark.parametrize("is_step", [True, False])
@pytest.mark.parametrize("is_flat", [True, False])
def test_components_have_the_shape_of_obs_segments_whatever_the_number_of_envs(
    tmp_path, num_envs, is_step, is_flat
):
    segments, lead = {"b": (num_envs, 3), "a": (1,)}, (num_envs,) if is_step else (5, num_envs)
    values = np.arange(np.prod(lead) * num_envs * 3, dtype=np.float32).reshape(*lead, num_envs, 3)
    component = values.reshape(*lead, -1) if is_flat else values
    record = {
        "observation": {"b": component, "a": np.zeros((*lead, 1), np.float32)},
        "action": np.zeros((*lead, 1)),
    }
    ends = {
        "done": np.ones(lead, bool),
        "final_observation": {"b": component.reshape(-1, *component.shape[len(lead) :])},
    }
    ends["final_observation"]["a"] = np.zeros((values[..., 0, 0].size, 1), np.float32)
    with RolloutWriter(tmp_path, num_envs, obs_segments=segments, durable=False) as writer:
        (writer.add if is_step else writer.add_rollout)(**record, **ends)
    actual = sorted(
        trajectories_of(tmp_path), key=lambda item: item.column("observation/b").flat[0]
    )
    rows = values.reshape(-1, num_envs, 3)
    assert [trajectory.column("observation/b").tolist() for trajectory in actual] == [
        [row.tolist()] for row in rows
    ]
    assert [trajectory.finals["observation/b"].tolist() for trajectory in actual] == rows.tolist()


@pytest.mark.parametrize("is_step", [True, False])
@pytest.mark.parametrize("tail", [(), (1,)])
def test_a_component_may_be_a_number(tmp_path, is_step, tail):
    segments, lead = {"height": (), "pose": (2,)}, (N,) if is_step else (5, N)
    height = np.arange(np.prod(lead), dtype=np.float32).reshape(*lead, *tail)
    observation = {"height": height, "pose": np.zeros((*lead, 2), np.float32)}
    finals = {
        name: value.reshape(-1, *value.shape[len(lead) :]) + 1
        for name, value in observation.items()
    }
    with RolloutWriter(tmp_path, N, obs_segments=segments, durable=False) as writer:
        add = writer.add if is_step else writer.add_rollout
        for _ in range(2):
            add(
                observation=observation,
                action=np.zeros((*lead, 1)),
                done=np.ones(lead),
                final_observation=finals,
            )
    actual = [
        (trajectory.column("observation/height").tolist(), trajectory.finals)
        for trajectory in trajectories_of(tmp_path)
    ]
    assert sorted(values for values, _ in actual) == [
        [value] for value in sorted([*height.flat, *height.flat])
    ]
    assert all(finals["observation/height"].shape == () for _, finals in actual)
    assert all(finals["observation/height"] == values[0] + 1 for values, finals in actual)


def test_an_unlimited_block_size_allocates_no_memory_of_that_size(tmp_path):
    with make(tmp_path, block_bytes=1 << 50) as writer:
        writer.add(**step(1))
    assert frames_in(tmp_path) == N


def test_a_relative_folder_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    for name in ("here", "there/walk"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with make("walk") as writer:
        writer.add(**step(1))
        dataset_path = writer.data_dir
        monkeypatch.chdir(tmp_path / "there")
        writer.add(**step(2, done=np.ones(N, bool)))
    assert dataset_path == tmp_path / "here" / "walk"
    assert frames_in(dataset_path) == 2 * N and list((tmp_path / "there" / "walk").iterdir()) == []


def test_a_component_with_the_size_of_another_axis_raises(tmp_path):
    with (
        RolloutWriter(tmp_path, 4, obs_segments={"b": (4, 3)}) as writer,
        pytest.raises(SchemaError, match="'observation/b'"),
    ):
        writer.add_rollout(observation={"b": np.zeros((5, 4, 3))}, action=np.zeros((5, 4, 1)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_raises_and_writes_no_file(tmp_path):
    with make(tmp_path) as writer, pytest.raises(FieldTypeError, match="a nested tensor"):
        writer.add(**step(action=torch.nested.nested_tensor([torch.zeros(1)] * N)))
    assert trajectories_of(tmp_path) == []
