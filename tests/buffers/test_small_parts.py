"""PrefixSum, motion_priorities, samplers, expert lists, and samples in other libraries."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_data import load_expert_trajectories
from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage import (
    DictBuffer,
    NaiveReplayBuffer,
    PrefixSum,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
    load_buffer,
    motion_priorities,
)
from storage.core.memory import as_given
from storage.core.random_indices import Weighted, uniform
from storage.errors import FieldTypeError, UsageError
from tests.storage.rollouts import make_storage, make_transition

MOTIONS = Path(__file__).parents[1] / "data" / "humenv"


@given(st.lists(st.one_of(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 3)), max_size=12))
def test_prefix_sum_equals_a_list(steps: list) -> None:
    sums, model = PrefixSum(), []
    for step in steps:
        if isinstance(step, list):
            sums.extend(step)
            model += step
        elif step <= len(model):
            assert sums.pop_oldest(step) == sum(model[:step])
            model = model[step:]
        else:
            sums.add(step)
            model.append(step)
        frames = [
            (episode, offset) for episode, length in enumerate(model) for offset in range(length)
        ]
        assert (sums.total, len(sums)) == (len(frames), len(model))
        assert (
            sums.lengths.tolist() == model
            and sums.starts.tolist() == np.cumsum([0, *model])[:-1].tolist()
        )
        if frames:
            episode, offset = sums.locate(np.arange(len(frames)))
            assert list(zip(episode.tolist(), offset.tolist(), strict=True)) == frames
            assert sums.locate(len(frames) - 1) == frames[-1]
        for wrong in (-1, len(frames), [0, len(frames)]):
            with pytest.raises(IndexError):
                sums.locate(wrong)


def test_prefix_sum_counts_beyond_32_bits_and_checks_its_arguments() -> None:
    sums = PrefixSum([2**40, 2**40])
    assert sums.total == 2**41 and sums.locate(2**40 + 5) == (1, 5)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError):
            sums.add(wrong)
    with pytest.raises(ValueError):
        sums.extend([3, -1])
    with pytest.raises(IndexError):
        sums.pop_oldest(3)
    assert len(sums) == 2


def test_motion_priorities_follow_their_modes() -> None:
    scores = torch.tensor([0.1, 0.6, 0.7, 1.2, 5.0])
    before = scores.clone()
    assert torch.allclose(motion_priorities(scores), 2.0 ** torch.tensor([1.0, 1.2, 1.4, 2.4, 4.0]))
    assert torch.allclose(
        motion_priorities(scores, "bin"), torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0, 1.0])
    )
    assert torch.allclose(motion_priorities(scores, None), torch.tensor([1.0, 1.2, 1.4, 2.4, 4.0]))
    assert torch.allclose(
        motion_priorities(scores, None, 0, 1, 3), torch.tensor([0.3, 1.8, 2.1, 3.0, 3.0])
    )
    assert torch.equal(scores, before)
    assert motion_priorities(np.array([1, 2])).dtype is torch.float32
    with pytest.raises(ValueError, match="index 1"):
        motion_priorities([1.0, float("nan"), float("inf")])
    for wrong in ({"mode": "expo"}, {"min_value": 3.0}):
        with pytest.raises(ValueError):
            motion_priorities(scores, **wrong)


@pytest.mark.parametrize(
    "num_rows", [3 << 26, 5 << 25, 3 << 25, 3 << 22, (1 << 20) - 1, (1 << 20) + 1, 3 << 40]
)
def test_the_first_of_very_many_rows_come_no_oftener_than_the_last(num_rows: int) -> None:
    generator, num_draws = torch.Generator().manual_seed(0), 1_000_000
    # Rows that the remainder of 32 bits would favour must not be drawn more often than others.
    num_first = (1 << 32) % num_rows if num_rows < 1 << 32 else num_rows // 3
    drawn = uniform(num_rows, num_draws, generator)
    moved = uniform(num_rows, num_draws, generator, first=7)
    for actual in (drawn, moved - 7):
        assert int(actual.min()) >= 0 and int(actual.max()) < num_rows
        share = num_first / num_rows
        assert (
            abs(int((actual < num_first).sum()) - num_draws * share)
            <= 4 * (num_draws * share * (1 - share)) ** 0.5
        )


def test_samplers_draw_by_their_documented_law() -> None:
    generator = torch.Generator().manual_seed(0)
    weighted = Weighted(torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]))
    counts = torch.bincount(weighted.draw(40_000, generator), minlength=5)
    assert counts[[0, 2, 4]].sum() == 0 and abs(counts[1].item() - 10_000) < 400
    for wrong in ([0.0], [-1.0, 2.0], [], [float("nan")]):
        with pytest.raises(ValueError):
            Weighted(torch.tensor(wrong))


def test_recorded_motions_can_be_loaded() -> None:
    buffer = load_expert_trajectories(MOTIONS / "motions.txt", MOTIONS, 2, "cpu")
    assert buffer.num_episodes >= 2 and buffer.lengths.sum() == len(buffer)
    assert buffer.file_names[:2] == (MOTIONS / "motions.txt").read_text().split()[:2]
    batch = buffer.sample(8)
    assert (
        batch["observation"].dtype is torch.float32
        and batch["observation"].shape == batch["next"]["observation"].shape
    )
    assert (
        buffer.get_full_buffer()["motion_id"].dtype is torch.int64 and None not in buffer.motion_ids
    )


def test_an_observation_mapper_makes_nested_observations() -> None:
    def split(observation: torch.Tensor) -> dict:
        return {"first": observation[:, :2], "rest": observation[:, 2:]}

    buffer = load_expert_trajectories(MOTIONS / "motions.txt", MOTIONS, 2, "cpu", split)
    assert set(buffer.sample(4)["next"]["observation"]) == {"first", "rest"}


def test_broken_motion_files_are_refused(tmp_path: Path) -> None:
    source = next(MOTIONS.glob("*.hdf5"))
    (tmp_path / "list.txt").write_text("a.h5\n")
    (tmp_path / "a.h5").write_bytes(source.read_bytes()[:200])
    with pytest.raises(Exception, match=r"a\.h5"):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path, 1, "cpu")
    shutil.copy(source, tmp_path / "a.h5")
    import h5py

    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["ep_0/link"] = h5py.SoftLink("/ep_0/qpos")
    with pytest.raises(Exception, match="not followed"):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path, 1, "cpu")


def test_the_sizes_of_a_sample_must_fit() -> None:
    expert = TrajectoryDictBuffer([{"observation": torch.zeros(9, 2)}], "cpu", 4)
    ring = TrajectoryDictBufferMultiDim(capacity=9, seq_length=4, output_key_tp1=[])
    ring.extend({"observation": torch.zeros(9, 2), "done": torch.zeros(9, 1)})
    for buffer in (expert, ring):
        for batch_size, length in ((3, None), (6, None), (0, None), (4, 0), (5, 2), (2.0, 2)):
            with pytest.raises(ValueError):
                buffer.sample(batch_size, length)
        assert buffer.sample(8)["observation"].shape == (8, 2)
    assert "next" not in ring.sample(4) and "next" in expert.sample(4)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError):
            DictBuffer(capacity=3).sample(bad)


def test_pytree_and_compiled_consumers_accept_samples() -> None:
    from torch.utils import _pytree

    buffer = DictBuffer(capacity=8, generator=0)
    buffer.extend({"a": {"b": torch.rand(8, 3)}, "c": torch.rand(8, 1)})
    batch = buffer.sample(4)
    total = _pytree.tree_map(lambda leaf: leaf.sum(), batch)
    assert total["a"]["b"] == batch["a"]["b"].sum()
    compiled = torch.compile(
        lambda tree: tree["a"]["b"].sum(-1, keepdim=True) + tree["c"], backend="eager"
    )
    assert torch.allclose(compiled(batch), batch["a"]["b"].sum(-1, keepdim=True) + batch["c"])


def test_tensordicts_can_be_added_and_samples_converted_to_them() -> None:
    tensordict = pytest.importorskip("tensordict")
    buffer = DictBuffer(capacity=8, generator=0)
    buffer.extend(
        tensordict.TensorDict({"a": {"b": torch.arange(5.0).unsqueeze(1)}}, batch_size=[5])
    )
    batch = tensordict.TensorDict.from_dict(buffer.sample(4), batch_size=[4])
    assert batch["a", "b"].shape == (4, 1)


def test_every_type_of_tensordict_can_be_added() -> None:
    tensordict = pytest.importorskip("tensordict")
    flags = torch.zeros(5, 3, 1, dtype=torch.bool)
    steps = tensordict.TensorDict(
        {"observation": torch.arange(30.0).view(5, 3, 2), "next": {"done": flags}},
        batch_size=[5, 3],
    )
    ring = TrajectoryDictBufferMultiDim(
        capacity=20, n_dim=2, seq_length=2, end_key=("next", "done"), generator=0
    )
    ring.extend(steps)
    assert ring.sample(6)["observation"].shape == (6, 2)
    rows = steps[:, 0]
    buffer = DictBuffer(capacity=20, end_key=("next", "done"), generator=0)
    buffer.extend(rows)
    buffer.extend(tensordict.LazyStackedTensorDict.lazy_stack([rows[0], rows[1]]))
    buffer.extend({"observation": rows["observation"], "next": rows["next"]})
    assert buffer.get_full_buffer()["observation"][:, 0].tolist() == [
        0,
        6,
        12,
        18,
        24,
        0,
        6,
        0,
        6,
        12,
        18,
        24,
    ]
    as_tensordict = tensordict.TensorDict.from_dict(buffer.sample_transitions(4), batch_size=[4])
    assert as_tensordict["next", "observation"].shape == (4, 2)
    expert = TrajectoryDictBuffer([rows.exclude("next"), rows[:3].exclude("next")], "cpu", 2)
    assert expert.lengths.tolist() == [5, 3] and expert.sample(4)["observation"].shape == (4, 2)


def test_arguments_may_be_numpy_numbers(tmp_path: Path) -> None:
    item, two, four = np.int64(1), np.int32(2), np.int64(4)
    rows = {"observation": torch.zeros(4, 1), "done": torch.zeros(4, 1)}
    buffer = DictBuffer(capacity=four, num_envs=item, end_key="done")
    windows = TrajectoryDictBufferMultiDim(capacity=four, seq_length=two)
    latent = ZBuffer(four, two)
    latent.add(torch.zeros(3, 2))
    for each in (buffer, windows):
        each.extend(rows)
        assert len(each.sample(four)["observation"]) == 4
    assert len(buffer.sample_transitions(four, num_frames=two)["done"]) == 4
    assert len(latent.sample(two)) == 2 and len(windows.sample(four, two)["observation"]) == 4
    for each in (buffer, windows, latent):
        each.save(tmp_path / "b")  # the config is JSON
        assert type(load_buffer(tmp_path / "b")) is type(each)


class MappingLike:
    """A record that is no dict, but has items and keys."""

    def __init__(self, **items: object) -> None:
        self.given = items

    def items(self) -> object:
        return self.given.items()

    def keys(self) -> object:
        return self.given.keys()


def test_records_may_be_named_tuples_with_arrays() -> None:
    buffer = DictBuffer(capacity=8)
    buffer.extend(MappingLike(a=MappingLike(b=np.arange(4.0)[:, None]), c=[[1], [2], [3], [4]]))
    assert buffer.storage["a"]["b"].dtype is torch.float64 and buffer.storage["c"][
        :4
    ].flatten().tolist() == [
        1,
        2,
        3,
        4,
    ]
    narrow = DictBuffer(capacity=8, narrow=True)
    narrow.extend({"a": np.zeros((2, 1))})
    assert narrow.storage["a"].dtype is torch.float32
    buffer.extend({})
    buffer.extend({"a": {"b": torch.zeros(0, 1)}, "c": torch.zeros(0, 1, dtype=torch.int64)})
    assert len(buffer) == 4


def test_samples_may_be_contiguous_and_on_another_device() -> None:
    for contiguous in (False, True):
        buffer = DictBuffer(capacity=8, contiguous=contiguous, output_device="cpu", end_key="done")
        buffer.extend(
            {
                "a": torch.rand(8, 3),
                "done": torch.zeros(8, 1),
                "u": torch.zeros(8, 1, dtype=torch.uint8),
            }
        )
        leaves = [
            *buffer.sample(4).values(),
            *buffer.sample_transitions(4, next_keys=["a"])["next"].values(),
        ]
        assert all(leaf.is_contiguous() for leaf in leaves) or not contiguous


def test_the_global_random_state_does_not_change() -> None:
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    buffer = TrajectoryDictBufferMultiDim(capacity=9, generator=0)
    buffer.extend({"observation": torch.zeros(9, 1), "done": torch.zeros(9, 1)})
    z = ZBuffer(3, 1, generator=torch.Generator())
    z.add(torch.zeros(2, 1))
    expert = TrajectoryDictBuffer([{"observation": torch.zeros(4, 1)}], "cpu", generator=1)
    for call in (lambda: buffer.sample(4), lambda: z.sample(3), lambda: expert.sample(3)):
        call()
    assert (
        torch.equal(torch.get_rng_state(), state)
        and (np.random.get_state()[1] == numpy_state).all()
    )
    same = [
        TrajectoryDictBuffer([{"observation": torch.rand(9, 1)}], "cpu", generator=5)
        for _ in range(2)
    ]
    assert torch.equal(*(torch.stack([each.start_idx]) for each in same))


def backwards() -> np.ndarray:
    return np.arange(12.0, dtype=np.float32)[::-1].reshape(4, 3)


def swapped() -> np.ndarray:
    return np.arange(12, dtype=">f4").reshape(4, 3)


def unaligned() -> np.ndarray:
    return np.zeros(4, [("flag", "u1"), ("x", "f4", 3)])["x"]


def begins_between() -> np.ndarray:
    return np.frombuffer(bytearray(49), np.float32, 12, 1).reshape(4, 3)


def read_only() -> np.ndarray:
    array = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [backwards, swapped, unaligned, begins_between, read_only])
def test_arrays_that_torch_cannot_view_are_accepted_everywhere(make: Any, tmp_path: Path) -> None:
    array = make()
    assert as_given(array).data_ptr() % 4 == 0
    buffer, vectors, items = (
        DictBuffer(capacity=10),
        ZBuffer(10, 3),
        NaiveReplayBuffer(10, generator=0),
    )
    buffer.extend({"image": array})
    vectors.add(array)
    items.push([{"x": array}])
    storage = make_storage(4, 1)
    storage.add_transitions(make_transition(0, 4, observations=array))
    replay = TrajectoryReplayBuffer(seed=0)
    replay.add({"x": array.reshape(4, 1, 3), "rewards": torch.zeros(4, 1, 1)})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["num_episodes"] = 1
        file["ep_0/observation"] = array
    (tmp_path / "list.txt").write_text("a.h5\n")
    motions = load_expert_trajectories(tmp_path / "list.txt", tmp_path, 1, "cpu")
    actual = [
        buffer.get_full_buffer()["image"],
        vectors.state_dict()["tensors"]["buffer/z"],
        items.sample(1)[0]["x"],
        storage.observations[0],
        motions.get_full_buffer()["observation"],
    ]
    assert all(np.array_equal(np.asarray(x), array) for x in actual)
    assert {tuple(row) for row in replay.sample(50)["x"].reshape(-1, 3).tolist()} <= {
        tuple(row) for row in array.tolist()
    }


@pytest.mark.parametrize(
    "add", [lambda x: DictBuffer(capacity=9).extend({"x": x}), lambda x: ZBuffer(9, 3).add(x)]
)
def test_an_array_without_numbers_raises_with_the_reason(add: Any) -> None:
    with pytest.raises(
        FieldTypeError, match="must be a tensor or an array of numbers, got ndarray: can't convert"
    ):
        add(np.array([[None, 1, 2]], dtype=object))


def test_indices_that_are_not_integers_raise() -> None:
    episodes = [{"observation": torch.zeros(3, 1)}] * 2
    with pytest.raises(
        UsageError,
        match=r"idxs must be integers, got torch\.bool\. For a mask, pass mask\.nonzero\(",
    ):
        TrajectoryDictBuffer(episodes).update_priorities([1.0, 2.0], [True, False])
