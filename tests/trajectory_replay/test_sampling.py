"""Steps of the newest trajectories are drawn uniformly and complete, in memory and on disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import BufferEmptyError, ClosedError, FieldTypeError, SchemaError, UsageError
from tests.trajectory_replay.recorded import check_sample, code, drawn, equal, trajectory

KINDS = ["memory", "h5", "h5 without cache", "pt"]


def make(kind: str, folder: Path, **options: Any) -> TrajectoryReplayBuffer:
    if kind == "memory":
        return TrajectoryReplayBuffer(**options)
    options = {"cache_size": 2, **options}
    return TrajectoryReplayBuffer(
        enable_cache="without" not in kind,
        auto_save=True,
        auto_save_path=folder,
        trajectory_format=kind[:2],
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=8),
    window=st.integers(0, 5),
    flushes=st.booleans(),
)
def test_samples_have_only_steps_of_the_sample_window(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    shapes: list[tuple[int, int]],
    window: int,
    flushes: bool,
) -> None:
    with make(kind, tmp_path_factory.mktemp("auto"), sample_window_size=window) as buffer:
        for number, shape in enumerate(shapes):
            assert buffer.add(trajectory(number, *shape)) == number
        if flushes:
            buffer.flush()
        expected = torch.cat(
            [
                code(number, *shape).flatten()
                for number, shape in [*enumerate(shapes)][-window or None :]
            ]
        )
        seen = torch.cat([drawn(buffer, 40 * len(expected)) for _ in range(2)])
        assert sorted(set(seen.tolist())) == sorted(expected.tolist())
        live = shapes[-window or None :] if kind == "memory" else shapes
        assert len(buffer) == buffer.size == len(live)
        assert buffer.total_samples == sum(num_steps * num_envs for num_steps, num_envs in live)


def test_draws_are_uniform_over_steps_not_over_trajectories() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    for number, num_steps in enumerate([1, 10, 4]):
        buffer.add(trajectory(number, num_steps, 2))
    counts = torch.unique(drawn(buffer, 15_000), return_counts=True)[1].double()
    assert len(counts) == 30
    # 99.9 % of the chi-square distribution with 29 degrees of freedom lie below 58.3.
    assert ((counts - 500) ** 2 / 500).sum() < 58.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 1000])
def test_more_rows_than_there_are_steps_can_be_drawn(
    tmp_path: Path, kind: str, number: int
) -> None:
    """Trap R5."""
    with make(kind, tmp_path) as buffer:
        buffer.add(trajectory(0, 2, 2))
        assert len(drawn(buffer, number)) == number


def test_trajectories_are_kept_in_memory_without_a_cache_and_without_files() -> None:
    """Trap R1."""
    buffer = TrajectoryReplayBuffer(enable_cache=False, auto_save=False, sample_window_size=3)
    for number in range(5):
        buffer.add(trajectory(number))
    assert set((drawn(buffer, 500) // 10_000).tolist()) == {2, 3, 4}


def test_a_sample_window_size_of_zero_keeps_all_trajectories() -> None:
    """Trap R2."""
    buffer = TrajectoryReplayBuffer(sample_window_size=0, cache_size=1)
    for number in range(20):
        buffer.add(trajectory(number, 2, 2))
    assert set((drawn(buffer, 2000) // 10_000).tolist()) == set(range(20))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_trajectory_is_removed_from_index_totals_and_files(
    tmp_path: Path, kind: str
) -> None:
    """Trap R3."""
    with make(kind, tmp_path / "auto", sample_window_size=0, max_trajectories=2) as buffer:
        for number in range(6):
            buffer.add(trajectory(number))
        buffer.flush()
        assert buffer.trajectory_ids == [4, 5] and buffer.total_samples == 30
        with pytest.raises(
            KeyError,
            match=r"TrajectoryReplayBuffer.get: trajectory_id 3 is not in the buffer, which has 2 trajectories",
        ):
            buffer.get(3)
        if kind != "memory":
            assert sorted(
                path.name.split("_")[1] for path in (tmp_path / "auto").glob("trajectory_?_*")
            ) == ["4", "5"]
        assert set((drawn(buffer, 300) // 10_000).tolist()) == {4, 5}


@pytest.mark.parametrize("kind", KINDS)
def test_trajectories_may_have_different_keys(tmp_path: Path, kind: str) -> None:
    """Trap R7: no KeyError for new keys, no rows of others for missing ones."""
    with make(kind, tmp_path, sample_window_size=3) as buffer:
        buffer.add(trajectory(0, without=["extra"]))
        for number in range(1, 4):
            buffer.add(trajectory(number) | {"extra": code(number, 5, 3)})
        buffer.flush()
        sample = buffer.sample(200)
        assert torch.equal(sample["extra"], check_sample(sample, 200))
        buffer.add(trajectory(4, without=["half"]))
        buffer.flush()
        names = set(buffer.sample(300))
        assert names == {"rewards", "actions", "dones", "curr_obs"}
        sample = buffer.sample(300, keys=["rewards", "curr_obs/states"])
        assert torch.equal(sample["curr_obs"]["states"][:, 0], sample["rewards"].flatten())
        assert set((sample["rewards"].flatten() // 10_000).int().tolist()) == {2, 3, 4}
        with pytest.raises(KeyError, match=r"trajectory 4 has no field 'extra'"):
            buffer.sample(300, keys=["extra"])
        with pytest.raises(
            KeyError, match=r"trajectory \d has no field 'reward'\. The fields are 'rewards', "
        ):
            buffer.sample(3, keys=["reward"])


def test_trajectories_may_have_different_lengths() -> None:
    """Trap R7."""
    buffer = TrajectoryReplayBuffer(sample_window_size=4)
    for number, num_steps in enumerate([3, 3, 200, 3, 3, 3, 3, 150, 3, 3, 3, 3]):
        buffer.add(trajectory(number, num_steps, 1))
        values = drawn(buffer, 300)
        assert set((values // 10_000).tolist()) <= set(range(max(0, number - 3), number + 1))


def test_two_buffers_with_one_seed_draw_the_same_and_nothing_global_changes() -> None:
    """Trap R6."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    values = []
    for _ in range(2):
        buffer = TrajectoryReplayBuffer(seed=7)
        buffer.add(trajectory(0))
        values.append(drawn(buffer, 50))
    assert torch.equal(*values)
    assert (
        torch.equal(torch_state, torch.get_rng_state())
        and (np.random.get_state()[1] == numpy_state).all()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_added_trajectories_are_copied_at_once(tmp_path: Path, kind: str) -> None:
    """Trap R10: no copy in the worker while the caller continues."""
    with make(kind, tmp_path, sample_window_size=0) as buffer:
        given_ = trajectory(0)
        for leaf in (given_["rewards"], given_["actions"], given_["half"]):
            assert leaf.is_contiguous()
        for _ in range(10):
            buffer.add(given_)
            given_["rewards"].add_(10_000)
            given_["actions"].add_(torch.tensor([10_000, -10_000]))
        rewards = [buffer.get(number)["rewards"] for number in range(10)]
        assert [int(reward[0, 0]) for reward in rewards] == [
            10_000 * number for number in range(10)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_belong_to_the_caller(tmp_path: Path, kind: str) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.add(trajectory(0))
        for contiguous in (False, True):
            sample = buffer.sample(30, contiguous=contiguous)
            for leaf in (
                sample["rewards"],
                sample["curr_obs"]["states"],
                sample["curr_obs"]["images"],
            ):
                leaf.zero_()
                assert leaf.is_contiguous() or not contiguous
            drawn(buffer, 100)
        buffer.get(0)["rewards"].zero_()
        drawn(buffer, 100)


@dataclass
class Recorded:
    rewards: torch.Tensor
    obs: dict[str, np.ndarray]
    version: int
    nothing: None = None


def test_dataclasses_arrays_and_other_leaves_are_accepted() -> None:
    buffer = TrajectoryReplayBuffer()
    given_ = Recorded(torch.ones(4, 2, 1), {"x": np.arange(8, dtype=np.int16).reshape(4, 2)}, 3)
    buffer.add(given_)
    actual = buffer.get(0)
    assert actual["version"] == 3 and torch.equal(
        actual["obs"]["x"], torch.from_numpy(given_.obs["x"])
    )
    assert set(buffer.sample(3)) == {"rewards", "obs"}
    assert equal(buffer.get(buffer.add(trajectory(1))), trajectory(1))
    assert equal(buffer.get(1)["curr_obs"], trajectory(1)["curr_obs"])


def test_log_probabilities_without_rewards_are_enough() -> None:
    """Trap R12."""
    buffer = TrajectoryReplayBuffer()
    buffer.add({"prev_logprobs": torch.zeros(4, 2, 1)})
    assert buffer.total_samples == 8 and buffer.sample(3)["prev_logprobs"].shape == (3, 1)


def test_longer_flags_must_be_declared() -> None:
    # Two epochs of three steps: 6 + 2 - 1 are too few
    flags = torch.arange(14).reshape(7, 2, 1) % 2 == 0
    given_ = {"rewards": torch.zeros(6, 2, 1), "dones": torch.arange(16).reshape(8, 2, 1)}
    with pytest.raises(
        SchemaError,
        match=r"'dones' of a trajectory has shape .*, expected \[6, 2, ...\]\. Declare 'dones'",
    ):
        TrajectoryReplayBuffer().add(given_)
    first = TrajectoryReplayBuffer(drop_first=["dones"])
    first.add(given_)
    assert first.get(0)["dones"].flatten().tolist() == [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]
    last = TrajectoryReplayBuffer(drop_last=["dones"])
    last.add(given_)
    assert last.get(0)["dones"].flatten().tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    first.add({"rewards": torch.zeros(6, 2, 1), "dones": torch.zeros(6, 2, 1, dtype=torch.int64)})
    first.add({"rewards": torch.zeros(6, 2, 1), "dones": torch.arange(14).reshape(7, 2, 1)})
    assert first.get(2)["dones"].flatten().tolist() == list(range(2, 14))
    with pytest.raises(SchemaError, match="expected"):
        first.add({"rewards": torch.zeros(6, 2, 1), "dones": flags[:5]})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"actions": torch.zeros(4, 3, 2).double()},
            r"'actions' of a trajectory has shape .*, expected \[5, 3, ...\]",
        ),
        (
            {"rewards": torch.zeros(5)},
            r"'rewards' of a trajectory has shape \[5\], expected \[T, B, ...\]",
        ),
        (
            {"rewards": torch.zeros(5, 3, 2)},
            r"'rewards' has float32\[2\] per step, expected float32\[1\]",
        ),
        (
            {"rewards": torch.zeros(5, 3, 1).double()},
            r"'rewards' has float64\[1\] per step, expected float32\[1\]",
        ),
        ({"what": object()}, r"'what' of a trajectory must be a tensor, an array, a str"),
        ({"task": [object()]}, r"'task' of the trajectory cannot be saved as JSON"),
        ({"curr_obs": {"a/b": torch.zeros(5, 3)}}, r"without '/'"),
    ],
)
@pytest.mark.parametrize("kind", ["memory", "h5"])
def test_a_refused_trajectory_changes_nothing(
    tmp_path: Path, kind: str, wrong: dict[str, Any], text: str
) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.add(trajectory(0))
        with pytest.raises(SchemaError, match=text):
            buffer.add_trajectories([trajectory(1), trajectory(2) | wrong])
        assert buffer.trajectory_ids == [0] and buffer.total_samples == 15
        assert buffer.add(trajectory(1)) == 1
        drawn(buffer, 100)


def test_invalid_trajectories_raise() -> None:
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(SchemaError, match="the fields of a trajectory include no tensor"):
        buffer.add({"name": "x"})
    with pytest.raises(FieldTypeError):
        buffer.add({"rewards": torch.zeros(2, 2, dtype=torch.complex64)})
    with pytest.raises(SchemaError):
        buffer.add({"rewards": torch.zeros(0, 2)})
    with pytest.raises(
        BufferEmptyError,
        match=r"^TrajectoryReplayBuffer.sample: the buffer is empty. Call add",
    ):
        buffer.sample(1)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_the_number_of_rows_is_checked(number: Any) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add(trajectory(0))
    with pytest.raises(ValueError, match=r"num_chunks must be .*>= 1"):
        buffer.sample(number)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sample_window_size": -1},
        {"cache_size": -1},
        {"max_trajectories": -1},
        {"trajectory_format": "h6"},
        {"trajectory_format": "pkl"},
        {"auto_save": True},
        {"rank": 1},
        {"world_size": 0},
        {"drop_first": "dones"},
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TrajectoryReplayBuffer(**arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_clearing_the_cache_stops_nothing(tmp_path: Path, kind: str) -> None:
    """Trap R11."""
    with make(kind, tmp_path, sample_window_size=4) as buffer:
        for number in range(3):
            buffer.add(trajectory(number))
        buffer.flush()
        drawn(buffer, 50)
        buffer.clear_cache()
        if kind == "memory":
            assert len(buffer) == 0
        else:
            assert buffer.cached_ids == [] and set((drawn(buffer, 300) // 10_000).tolist()) == {
                0,
                1,
                2,
            }
        buffer.add(trajectory(3))
        assert 3 in set((drawn(buffer, 300) // 10_000).tolist())
        buffer.clear()
        with pytest.raises(BufferEmptyError):
            buffer.sample(1)
        assert buffer.add(trajectory(4)) == 4 and buffer.size == 1
        assert set((drawn(buffer, 50) // 10_000).tolist()) == {4}


@pytest.mark.parametrize("kind", KINDS)
def test_threads_add_and_sample_at_once(tmp_path: Path, kind: str) -> None:
    """Trap R8: no row of another trajectory."""
    with make(kind, tmp_path, sample_window_size=3) as buffer:
        buffer.add(trajectory(0, 3, 2))
        failures: list[BaseException] = []
        done = threading.Event()

        def sample() -> None:
            try:
                # Locks are not fair: samplers that never rest may keep `add` out
                while not done.wait(0.0005):
                    drawn(buffer, 64)
            except BaseException as failure:  # noqa: BLE001 - shown below
                failures.append(failure)

        threads = [threading.Thread(target=sample) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(1, 40):
            buffer.add(trajectory(number, 1 + number % 5, 2))
        done.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert sorted(set((drawn(buffer, 500) // 10_000).tolist())) == [37, 38, 39]


def test_only_trajectories_of_a_recent_policy_are_drawn() -> None:
    buffer = TrajectoryReplayBuffer()
    for number in range(6):
        buffer.add(trajectory(number), weights_version=number // 2)
    buffer.add(trajectory(6))
    values = check_sample(buffer.sample(300, min_weights_version=1), 300)
    assert set((values // 10_000).tolist()) == {2, 3, 4, 5}
    buffer.add(trajectory(7) | {"weights_version": 2})
    values = check_sample(buffer.sample(300, min_weights_version=2), 300)
    assert set((values // 10_000).tolist()) == {4, 5, 7}
    with pytest.raises(BufferEmptyError, match="no trajectory has the weights_version 3 or later"):
        buffer.sample(1, min_weights_version=3)
    assert (
        buffer.about(7)["weights_version"] == 2
        and len({buffer.about(number)["uuid"] for number in range(8)}) == 8
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_buffer_raises(tmp_path: Path, kind: str) -> None:
    """Trap R14: closing early and twice raises no error."""
    make(kind, tmp_path / "unused").close()
    buffer = make(kind, tmp_path / "used")
    buffer.add(trajectory(0))
    buffer.close()
    buffer.close()
    for call in (
        lambda: buffer.sample(1),
        lambda: buffer.add(trajectory(1)),
        lambda: buffer.save_checkpoint(tmp_path),
    ):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.bool]
)
def test_trajectories_of_other_keys_are_drawn_together_in_every_dtype(dtype: torch.dtype) -> None:
    buffer = TrajectoryReplayBuffer()
    for value, more in ((0, ()), (1, ("extra",))):
        leaf = torch.full((3, 2, 4), value).to(dtype)
        buffer.add(
            {"rewards": torch.full((3, 2), float(value)), "leaf": leaf, **dict.fromkeys(more, leaf)}
        )
    batch = buffer.sample(50)
    assert (
        set(batch) == {"rewards", "leaf"}
        and batch["leaf"].dtype is dtype
        and batch["rewards"].unique().numel() == 2
    )
    assert torch.equal(batch["leaf"].long(), batch["rewards"].view(-1, 1).expand(50, 4).long())
