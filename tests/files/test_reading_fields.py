"""Fields of batches: components, dtypes, codecs, large fields, extras; and trajectory folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter
from storage.core.fields import DTYPES
from storage.errors import SchemaError, UsageError
from tests.files.readback import end_of, trajectories_of
from tests.files.recorded import drain, record

SAMPLES = Path(__file__).parents[1] / "data" / "trajectory_folders"


def opened(data_dir, num_envs=1, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", **options)


def numbered(shape, dtype):
    """Return different values, as far as the dtype can represent them."""
    values = torch.arange(int(np.prod(shape))).reshape(shape)
    return (values % 2).bool() if dtype == torch.bool else (values % 100).to(dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5)])
def test_every_dtype_and_shape_is_read_back_exactly(tmp_path, name, shape):
    dtype = DTYPES[name][0]
    observation = numbered((5, 2, *shape), dtype)
    action = numbered((5, 2, 3), dtype)
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        writer.add_rollout(
            observation=observation, action=action, done=torch.zeros(5, 2, dtype=torch.bool)
        )
    batch = opened(tmp_path, 2).get_batch(5)
    order = (
        batch.observation[0].reshape(2, -1)[:, 0].argsort()
        if name != "bool" and shape
        else torch.arange(2)
    )
    assert batch.observation.dtype == dtype and batch.action.dtype == dtype
    assert torch.equal(batch.observation[:, order].to(torch.float64), observation.to(torch.float64))
    assert torch.equal(batch.action[:, order].to(torch.float64), action.to(torch.float64))
    assert batch.reward is None and batch.privileged_observation is None and batch.extras is None


def components(num_steps, num_envs):
    return {
        "proprio": numbered((num_steps, num_envs, 4), torch.float32),
        "depth": torch.rand(num_steps, num_envs, 1, 6, 7),
        "command": numbered((num_steps, num_envs, 2), torch.float32) + 200,
    }


def test_components_are_joined_in_order_or_returned_as_a_dict(tmp_path):
    parts = components(6, 2)
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        writer.add_rollout(
            observation=parts, action=torch.zeros(6, 2, 1), done=torch.zeros(6, 2, dtype=torch.bool)
        )
    flat, by_name = (
        opened(tmp_path, 2).get_batch(6),
        opened(tmp_path, 2, flatten_observations=False).get_batch(6),
    )
    joined = torch.cat([part.flatten(2) for part in parts.values()], -1)
    assert torch.equal(flat.observation, joined)
    assert flat.observation.shape == (6, 2, 4 + 42 + 2)
    assert list(by_name.observation) == list(parts)
    assert all(torch.equal(by_name.observation[name], part) for name, part in parts.items())
    assert torch.equal(flat.next_observation[:-1], joined[1:])


def test_named_actions_are_returned_as_a_dict(tmp_path):
    action = {
        "arm": numbered((6, 2, 3), torch.float32),
        "hand": {"grip": numbered((6, 2), torch.int64)},
    }
    done = torch.zeros(6, 2, dtype=torch.bool)
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        writer.add_rollout(observation=numbered((6, 2, 4), torch.float32), action=action, done=done)
    batch = opened(tmp_path, 2).get_batch(6)
    assert torch.equal(batch.action["arm"], action["arm"])
    assert torch.equal(batch.action["hand"]["grip"], action["hand"]["grip"])
    assert batch.extras is None


def contents_of(folder):
    """Return values, end and final observation of each trajectory, in any order."""
    return sorted(
        (
            *(trajectory.column(name).tobytes() for name in sorted(trajectory.fields)),
            end_of(trajectory),
            *(value.tobytes() for _, value in sorted((trajectory.finals or {}).items())),
        )
        for trajectory in trajectories_of(folder)
    )


ENDS = ["terminated", "truncated", "terminated", "terminated", "truncated", "truncated"]


@pytest.mark.parametrize("mark_first_frame", [True, False])
@pytest.mark.parametrize("num_steps", [1, 5, 30, None])
def test_a_recorded_batch_equals_its_source(tmp_path, num_steps, mark_first_frame):
    record(tmp_path / "a", [4, 7, 1, 2, 1, 6], 2, ends=ENDS)
    options = {"num_transitions_per_env": num_steps, "mark_first_frame": mark_first_frame}
    with RolloutWriter(tmp_path / "b", 2, durable=False) as writer:
        for batch in opened(tmp_path / "a", 2, **options):
            (writer.add if num_steps is None else writer.add_rollout)(batch)
    assert (
        contents_of(tmp_path / "b") == contents_of(tmp_path / "a")
        and len(contents_of(tmp_path / "a")) == 6
    )


def test_final_observations_of_a_batch_are_recorded_if_all_ends_have_one(tmp_path):
    record(tmp_path / "a", [4, 7, 1, 2, 1, 6], 2, ends=ENDS, with_final=True)
    with RolloutWriter(tmp_path / "b", 2, durable=False) as writer:
        for batch in opened(tmp_path / "a", 2, num_transitions_per_env=4):
            finals = batch.next_observation, batch.next_privileged_observation
            writer.add_rollout(
                batch, final_observation=finals[0], final_privileged_observation=finals[1]
            )
    assert contents_of(tmp_path / "b") == contents_of(tmp_path / "a")


def test_recording_a_batch_without_is_last_raises(tmp_path):
    record(tmp_path / "a", [4, 1], 2, ends=["terminated", "truncated"])
    batch, plain = (
        opened(tmp_path / "a", 2, mark_first_frame=is_marked).get_batch(4)._replace(is_last=None)
        for is_marked in (True, False)
    )
    with RolloutWriter(tmp_path / "b", 2, durable=False) as writer:
        with pytest.raises(
            UsageError,
            match=r"is_last is None\. Set is_last, which separates first frames from ends",
        ):
            writer.add_rollout(batch)
        with pytest.raises(
            SchemaError,
            match=r"flag 'is_last' has shape \(2,\), expected \(4, 2\), the shape of 'done'",
        ):
            writer.add_rollout(batch._replace(is_last=batch.done[0]))
        writer.add_rollout(plain)  # a first frame is done only at a limit
    assert contents_of(tmp_path / "b") == contents_of(tmp_path / "a")


def test_coded_components_are_read_back_within_half_a_step(tmp_path):
    parts = components(6, 2)
    with RolloutWriter(
        tmp_path, 2, obs_disassemble_mapping={"depth": "normalized_image"}, durable=False
    ) as writer:
        writer.add_rollout(
            observation=parts, action=torch.zeros(6, 2, 1), done=torch.zeros(6, 2, dtype=torch.bool)
        )
    dataset = opened(tmp_path, 2, flatten_observations=False)
    batch = dataset.get_batch(6)
    assert dataset.metadata["obs_segments"] == {"proprio": [4], "depth": [1, 6, 7], "command": [2]}
    assert dataset.metadata["obs_disassemble_mapping"] == {"depth": "normalized_image"}
    error = (batch.observation["depth"] - parts["depth"]).abs().max()
    assert batch.observation["depth"].dtype == torch.float32 and 0 < error <= 0.5 / 255 + 1e-7
    assert torch.equal(batch.observation["proprio"], parts["proprio"])
    flat = opened(tmp_path, 2).get_batch(6)
    assert torch.equal(flat.observation[..., 4:46], batch.observation["depth"].flatten(2))


def test_a_flat_observation_is_split_by_segments_on_writing(tmp_path):
    observation = numbered((4, 2, 7), torch.float32)
    with RolloutWriter(tmp_path, 2, obs_segments={"a": (3,), "b": (2, 2)}, durable=False) as writer:
        writer.add_rollout(
            observation=observation,
            action=torch.zeros(4, 2, 1),
            done=torch.zeros(4, 2, dtype=torch.bool),
        )
    assert torch.equal(opened(tmp_path, 2).get_batch(4).observation, observation)
    by_name = opened(tmp_path, 2, flatten_observations=False).get_batch(4).observation
    assert torch.equal(by_name["b"], observation[..., 3:].reshape(4, 2, 2, 2))


def test_large_components_have_their_own_columns_and_final_observations(tmp_path):
    image = torch.arange(5 * 40 * 40 * 3).reshape(5, 1, 40, 40, 3).to(torch.uint8)
    vector = numbered((5, 1, 3), torch.float32)
    final = {"image": image[:1, :, :].squeeze(0) + 7, "vector": vector[0] - 50}
    done = torch.tensor([False, False, True, False, True])[:, None]
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for t in range(5):
            writer.add(
                observation={"image": image[t], "vector": vector[t]}, action=torch.zeros(1, 1), done=done[t],
                final_observation=final,
            )  # fmt: skip
    batch = opened(tmp_path, 1, flatten_observations=False).get_batch(5)
    assert torch.equal(batch.observation["image"], image) and torch.equal(
        batch.observation["vector"], vector
    )
    for t in range(5):
        follows = final if done[t] else {"image": image[t + 1], "vector": vector[t + 1]}
        assert torch.equal(batch.next_observation["image"][t], follows["image"])
        assert torch.equal(batch.next_observation["vector"][t], follows["vector"])


def test_components_keep_their_dtypes_in_a_dict_and_are_promoted_when_joined(tmp_path):
    parts = {
        "mask": numbered((3, 1, 2), torch.uint8),
        "pose": numbered((3, 1, 2), torch.float64) + 0.25,
    }
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        writer.add_rollout(
            observation=parts, action=torch.zeros(3, 1, 1), done=torch.zeros(3, 1, dtype=torch.bool)
        )
    batch = opened(tmp_path, flatten_observations=False).get_batch(3)
    assert batch.observation["mask"].dtype == torch.uint8 and torch.equal(
        batch.observation["pose"], parts["pose"]
    )
    joined = opened(tmp_path).get_batch(3).observation
    assert joined.dtype == torch.float64
    assert torch.equal(joined, torch.cat([parts["mask"].double(), parts["pose"]], -1))


def test_extra_fields_are_returned_by_name(tmp_path):
    label = numbered((4, 2, 3), torch.float32)
    log_prob = numbered((4, 2), torch.float32) - 9
    with RolloutWriter(tmp_path, 2, durable=False) as writer:
        writer.add_rollout(
            observation=torch.zeros(4, 2, 1), action=torch.zeros(4, 2, 1), done=torch.zeros(4, 2, dtype=torch.bool),
            action_label=label, log_prob=log_prob,
        )  # fmt: skip
    batch = opened(tmp_path, 2).get_batch(4)
    assert sorted(batch.extras) == ["action_label", "log_prob"]
    assert torch.equal(batch.extras["action_label"], label) and torch.equal(
        batch.extras["log_prob"], log_prob
    )
    step = opened(tmp_path, 2).get_batch()
    assert step.extras["log_prob"].shape == (2,)


@pytest.fixture
def folders(tmp_path):
    """The sample folders with modification times in the order of recording."""
    for name in ("ant", "components", "unpadded_names"):
        shutil.copytree(SAMPLES / name, tmp_path / name)
        for path in sorted((tmp_path / name).rglob("traj_*.pickle")):
            number = int(path.parent.name.split("_")[1])
            os.utime(path, ns=(10**15 + number * 10**9,) * 2)
    return tmp_path


def test_trajectory_folders_stream_like_their_rollouts(folders):
    arrays = np.load(Path(__file__).parents[1] / "data" / "mujoco" / "Ant-v5.npz")
    dataset = opened(folders / "ant", 1)
    streams = drain(dataset, 50)
    valid = torch.cat([batch.valid[:, 0] for batch in streams])
    seen = {
        name: torch.cat([getattr(batch, field)[:, 0] for batch in streams])[valid].numpy()
        for name, field in (
            ("observations", "observation"),
            ("actions", "action"),
            ("rewards", "reward"),
        )
    }
    timeout = torch.cat([batch.timeout[:, 0] for batch in streams])[valid].numpy()
    num_episodes = len({name.split("/")[0] for name in arrays})
    assert dataset.num_trajectories == num_episodes
    at = 0
    for number in range(num_episodes):
        actions = arrays[f"ep{number}/actions"]
        part = slice(at, at + len(actions))
        at += len(actions)
        observations = arrays[f"ep{number}/observations"][: len(actions)].astype(np.float32)
        assert np.array_equal(seen["observations"][part], observations)
        assert np.array_equal(seen["actions"][part], actions.astype(np.float32))
        assert np.allclose(
            seen["rewards"][part].reshape(-1), arrays[f"ep{number}/rewards"], atol=1e-6
        )
        assert timeout[part][-1] == (not arrays[f"ep{number}/terminated"][-1])
    assert at == valid.sum()


def test_coded_components_of_trajectory_folders_are_joined_in_order(folders):
    dataset = opened(folders / "components", 2)
    by_name = opened(folders / "components", 2, flatten_observations=False).get_batch(4).observation
    batch = dataset.get_batch(4)
    assert list(by_name) == ["proprio", "depth", "cmd"]
    assert torch.equal(
        batch.observation, torch.cat([part.flatten(2) for part in by_name.values()], -1)
    )
    assert by_name["depth"].dtype == torch.float32 and by_name["depth"].max() <= 1


def test_growing_trajectory_folders_are_scanned_at_every_pass(folders):
    dataset = opened(folders / "unpadded_names", 1, dataset_loops=2)
    before = dataset.get_batch(5).observation.clone()
    shutil.copytree(
        folders / "unpadded_names" / "trajectory_0", folders / "unpadded_names" / "trajectory_7"
    )
    lengths = dataset.num_frames
    rest = drain(dataset, 1)
    assert len(rest) + 5 == 2 * lengths + 15 and len(before) == 5


def test_folders_of_different_kinds_are_not_mixed(folders, tmp_path):
    with RolloutWriter(tmp_path / "new", 1, durable=False) as writer:
        writer.add(
            observation=np.zeros((1, 5), np.float32),
            action=np.zeros((1, 2), np.float32),
            done=[True],
        )
    with pytest.raises(ValueError, match="the folders have different formats"):
        opened([folders / "ant", tmp_path / "new"]).reset()


def test_without_a_final_privileged_observation_the_next_one_follows_the_stream(tmp_path):
    observation = numbered((4, 1, 2), torch.float32)
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for t in range(4):
            writer.add(
                observation=observation[t], privileged_observation=observation[t] + 50, action=torch.zeros(1, 1),
                done=[t == 1], final_observation=observation[t] - 50,
            )  # fmt: skip
    batch = opened(tmp_path).get_batch(4)
    assert torch.equal(batch.next_observation[1], observation[1] - 50)
    assert torch.equal(batch.next_privileged_observation[1], observation[2] + 50)
