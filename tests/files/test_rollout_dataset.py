"""The promises of RolloutDataset, one by one, on recordings whose values encode their origin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data import RolloutDataset, RolloutWriter
from storage.errors import CorruptFileError, DatasetExhausted, UsageError, WaitTimeoutError
from tests.files.recorded import drain, frames_of, record

ENDS = ["terminated", "truncated"]


def open_cpu(data_dir, num_envs, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", **options)


def check_transitions(batch, recorded, mark_first_frame=True):
    """Check every transition of a batch by arithmetic: fields, flags and next observation."""
    by_number = {item.number: item for item in recorded}
    for step, env, number, frame in frames_of(batch):
        item = by_number[number]
        observation = batch.observation[step, env]
        assert observation[2] == 1000 * number + frame
        assert torch.equal(batch.privileged_observation[step, env], -observation)
        assert torch.equal(batch.action[step, env], observation[:2] * 10)
        assert batch.reward[step, env] == observation[2]
        is_last = frame == item.length - 1
        is_first = bool(batch.is_first[step, env])
        assert bool(batch.is_last[step, env]) == is_last
        assert bool(batch.done[step, env]) == (is_last or (is_first and mark_first_frame))
        assert bool(batch.timeout[step, env]) == (is_last and item.end != "terminated")
        following = batch.next_observation[step, env].tolist()
        assert batch.next_privileged_observation[step, env].tolist()[0] == -following[0]
        if not is_last:
            assert following[:2] == [number, frame + 1]
        elif item.has_final:
            assert following[:2] == [number, frame + 0.5]


@pytest.mark.parametrize("cache", ["none", "ram", "device"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_frame_is_delivered_once_in_order_with_its_flags(cache, tmp_path_factory, data):
    data_dir = tmp_path_factory.mktemp("data")
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    ends = [data.draw(st.sampled_from(ENDS)) for _ in lengths[:-1]] + [
        data.draw(st.sampled_from([*ENDS, "open"]))
    ]
    recorded = record(
        data_dir,
        lengths,
        num_envs=data.draw(st.integers(1, 3)) if ends[-1] != "open" else 1,
        ends=ends,
        with_final=data.draw(st.booleans()),
        flush_every=data.draw(st.sampled_from([None, 1, 4])),
    )
    num_envs = data.draw(st.integers(1, len(lengths)))
    dataset = open_cpu(
        data_dir, num_envs, cache=cache, random_shuffle_traj_order=data.draw(st.booleans())
    )
    delivered = {}
    for batch in drain(dataset, data.draw(st.integers(1, 12))):
        check_transitions(batch, recorded)
        for *_, number, frame in frames_of(batch):
            delivered.setdefault(number, []).append(frame)
    assert delivered == {item.number: list(range(item.length)) for item in recorded}
    assert dataset.num_dataset_looped == 1


def test_the_last_frame_of_a_stream_is_followed_by_the_next_trajectory(tmp_path):
    record(tmp_path, [2, 3, 4])
    batch = open_cpu(tmp_path, 1).get_batch(9)
    assert batch.observation[:, 0, 0].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert batch.next_observation[:, 0, :2].tolist() == [
        [0, 1], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2], [2, 3], [2, 3],
    ]  # fmt: skip


def test_batches_without_steps_have_no_time_axis(tmp_path):
    record(tmp_path, [3, 3])
    dataset = open_cpu(tmp_path, 2)
    batch = dataset.get_batch()
    assert (
        batch.observation.shape == (2, 3)
        and batch.done.shape == (2,)
        and batch.reward.shape == (2,)
    )
    observation, action, reward, done, info = dataset.get_transition_batch()
    assert observation[:, 1].tolist() == [1, 1]
    transition = info["transition"]
    assert transition.observation is observation and transition.action is action
    assert transition.reward is reward and transition.done is done
    assert (
        sorted(info) == ["end_unknown", "time_outs", "transition"]
        and info["time_outs"] is transition.timeout
    )
    assert info["end_unknown"].dtype == torch.bool and info["end_unknown"].tolist() == [
        False,
        False,
    ]


def test_only_the_env_whose_trajectory_ends_changes_trajectory(tmp_path):
    record(tmp_path, [2, 9, 2, 2])
    batch = open_cpu(tmp_path, 2).get_batch(6)
    assert batch.observation[:, 0, 0].tolist() == [0, 0, 2, 2, 3, 3]
    assert batch.observation[:, 1, 1].tolist() == [0, 1, 2, 3, 4, 5]


def test_mark_first_frame_can_be_turned_off_and_is_first_stays(tmp_path):
    record(tmp_path, [3, 3])
    marked = open_cpu(tmp_path, 1).get_batch(6)
    plain = open_cpu(tmp_path, 1, mark_first_frame=False).get_batch(6)
    assert marked.done[:, 0].tolist() == [True, False, True, True, False, True]
    assert plain.done[:, 0].tolist() == [False, False, True, False, False, True]
    assert (
        plain.is_first[:, 0].tolist()
        == marked.is_first[:, 0].tolist()
        == [True, False, False, True, False, False]
    )


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_starting_frames_are_uniform_in_the_range_clipped_to_the_trajectory(tmp_path, num_steps):
    record(tmp_path, [10, 4, 1])
    seen = {0: [], 1: [], 2: []}
    dataset = open_cpu(tmp_path, 1, dataset_loops=400, starting_frame_range=(2, 6))
    for batch in drain(dataset, num_steps):
        for step, env in batch.is_first.nonzero().tolist():
            number, frame, _ = batch.observation[step, env].int().tolist()
            seen[number].append(frame)
    assert all(len(starts) == 400 for starts in seen.values())
    assert set(seen[0]) == {2, 3, 4, 5} and set(seen[1]) == {2, 3} and set(seen[2]) == {0}
    counts = np.bincount(seen[0], minlength=6)[2:]
    # The random name of the writer changes the draws. So the bound is exceeded once in 10^9 runs: 3
    # degrees.
    assert ((counts - 100) ** 2 / 100).sum() < 45


def test_a_random_start_delivers_the_rest_of_the_trajectory(tmp_path):
    recorded = record(tmp_path, [10, 10])
    batches = drain(open_cpu(tmp_path, 2, starting_frame_range=(4, 5)), 4)
    delivered = [(number, frame) for batch in batches for _, _, number, frame in frames_of(batch)]
    assert sorted(delivered) == [(number, frame) for number in (0, 1) for frame in range(4, 10)]
    check_transitions(batches[0], recorded)


def test_loops_repeat_the_trajectories_and_are_counted(tmp_path):
    record(tmp_path, [2, 3])
    dataset = open_cpu(tmp_path, 1, dataset_loops=3)
    numbers = [b.observation[:, 0, 0].int().tolist() for b in drain(dataset, 5)]
    assert numbers == [[0, 0, 1, 1, 1]] * 3
    assert dataset.num_dataset_looped == 3


def test_dataset_loops_below_one_never_ends(tmp_path):
    record(tmp_path, [2, 1])
    dataset = open_cpu(tmp_path, 4, dataset_loops=0)
    for _ in range(20):
        assert dataset.get_batch(3).valid.all()
    assert dataset.num_dataset_looped >= 20


def test_exhausted_envs_repeat_their_last_transition_as_not_valid(tmp_path):
    recorded = record(tmp_path, [2, 5], ends=["truncated", "terminated"], with_final=True)
    dataset = open_cpu(tmp_path, 2)
    batches = [dataset.get_batch(3), dataset.get_batch(3)]
    assert batches[0].valid[:, 0].tolist() == [True, True, False]
    assert batches[1].valid.tolist() == [[False, True], [False, True], [False, False]]
    assert batches[0].observation[:, 0, 1].tolist() == [0, 1, 1]
    for batch in batches:
        check_transitions(batch, recorded)
    for name in ("observation", "action", "reward", "done", "timeout", "next_observation"):
        repeated = getattr(batches[1], name)[:, 0]
        assert all(torch.equal(row, getattr(batches[0], name)[1, 0]) for row in repeated), name
    with pytest.raises(DatasetExhausted):
        dataset.get_batch(3)
    with pytest.raises(StopIteration):
        next(dataset)


def test_drop_last_stops_at_the_first_incomplete_batch_and_counts_the_rest(tmp_path):
    record(tmp_path, [4, 7, 2])
    dataset = open_cpu(tmp_path, 2, drop_last=True)
    batches = drain(dataset, 2)
    delivered = sum(len(frames_of(batch)) for batch in batches)
    assert all(batch.valid.all() for batch in batches)
    assert dataset.num_dropped_frames == 13 - delivered == 1
    with pytest.raises(DatasetExhausted, match=r"1 frames left .* do not fill a batch"):
        dataset.get_batch(2)


def test_shuffling_is_a_function_of_seed_and_pass(tmp_path):
    record(tmp_path, [1] * 12)

    def orders(seed):
        dataset = open_cpu(tmp_path, 1, dataset_loops=2, random_shuffle_traj_order=True, seed=seed)
        return [dataset.get_batch(12).observation[:, 0, 0].int().tolist() for _ in range(2)]

    first = orders(3)
    assert first == orders(3) != orders(4)
    assert first[0] != first[1]
    assert all(sorted(order) == list(range(12)) for order in first)


def test_each_epoch_has_another_order(tmp_path):
    record(tmp_path, [1] * 12)
    dataset = open_cpu(tmp_path, 1, random_shuffle_traj_order=True)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        dataset.reset()
        orders.append(dataset.get_batch(12).observation[:, 0, 0].tolist())
    assert orders[0] == orders[2] != orders[1]


def test_the_global_generators_are_not_touched(tmp_path):
    record(tmp_path, [4] * 3)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = np.random.rand(), torch.rand(1).item()
    np.random.seed(5)
    torch.manual_seed(5)
    drain(open_cpu(tmp_path, 2, random_shuffle_traj_order=True, starting_frame_range=(0, 3)), 3)
    assert (np.random.rand(), torch.rand(1).item()) == expected


def test_keep_latest_reads_only_the_newest_complete_trajectories(tmp_path):
    record(tmp_path, [2, 3, 4, 5], ends=["terminated", "truncated", "terminated", "open"])
    dataset = open_cpu(tmp_path, 1, keep_latest_n_trajs=2)
    assert sorted({number for b in drain(dataset, 3) for *_, number, _ in frames_of(b)}) == [2, 3]


def test_keep_latest_picks_up_newer_trajectories_at_the_next_pass(tmp_path):
    record(tmp_path, [2, 2])
    dataset = open_cpu(tmp_path, 1, dataset_loops=0, keep_latest_n_trajs=2)
    assert dataset.get_batch(3).observation[:, 0, 0].tolist() == [0, 0, 1]
    record(tmp_path, [2, 2], first_number=7)
    assert dataset.get_batch(5).observation[:, 0, 0].tolist() == [1, 7, 7, 8, 8]


def test_keep_latest_waits_at_most_wait_timeout_s(tmp_path):
    record(tmp_path, [2])
    with pytest.raises(
        WaitTimeoutError, match=r"has 1 complete trajectories, expected 3. The wait ended after 0 s"
    ):
        open_cpu(tmp_path, 1, keep_latest_n_trajs=3, wait_timeout_s=0).reset()


def test_fewer_trajectories_than_envs_is_an_error_at_reset(tmp_path):
    record(tmp_path, [2, 2, 2])
    with pytest.raises(UsageError, match=r"has 3 trajectories for 4 envs"):
        open_cpu(tmp_path, 4).reset()
    assert open_cpu(tmp_path, 4, dataset_loops=2).get_batch(1).valid.all()


def test_an_empty_folder_is_an_error_at_reset(tmp_path):
    with pytest.raises(UsageError, match="0 trajectories for 1 envs"):
        open_cpu(tmp_path, 1, dataset_loops=0).reset()
    with pytest.raises(UsageError, match="does not exist"):
        open_cpu(tmp_path / "none", 1).reset()


def test_nothing_is_read_before_the_first_batch(tmp_path):
    dataset = open_cpu(tmp_path / "later", 1)
    record(tmp_path / "later", [2])
    assert dataset.get_batch(2).valid.all()


def test_reset_of_some_envs_gives_them_the_next_trajectories_and_disturbs_no_other(tmp_path):
    record(tmp_path, [6] * 5)
    dataset = open_cpu(tmp_path, 3)
    dataset.get_batch(2)
    dataset.reset([2, 0])
    batch = dataset.get_batch(2)
    assert batch.observation[:, :, 0].tolist() == [[3, 1, 4]] * 2
    assert batch.observation[:, :, 1].tolist() == [[0, 2, 0], [1, 3, 1]]
    assert batch.is_first[0].tolist() == [True, False, True]


@pytest.mark.parametrize("ids", [[0, 0], [3], [-1], [0.5], [True]])
def test_env_ids_must_be_unique_and_in_range(tmp_path, ids):
    record(tmp_path, [6] * 5)
    dataset = open_cpu(tmp_path, 3)
    dataset.get_batch(1)
    with pytest.raises(UsageError):
        dataset.reset(ids)


def test_batches_belong_to_the_caller(tmp_path):
    record(tmp_path, [40] * 4, with_final=True)
    dataset = open_cpu(tmp_path, 4)
    batches, copies = [], []
    while True:
        try:
            batches.append(dataset.get_batch(3))
        except StopIteration:
            break
        copies.append([t.clone() for t in batches[-1] if isinstance(t, torch.Tensor)])
    for batch, copied in zip(batches, copies, strict=True):
        kept = [t for t in batch if isinstance(t, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(kept, copied, strict=True))


def test_writing_into_a_batch_changes_neither_the_files_nor_later_batches(tmp_path):
    record(tmp_path, [40] * 4)
    dataset = open_cpu(tmp_path, 4, dataset_loops=0)
    first = dataset.get_batch(40)
    copies = first.observation.clone()
    first.observation.fill_(-1)
    assert torch.equal(dataset.get_batch(40).observation, copies)


def test_contiguous_batches_have_the_same_values(tmp_path):
    record(tmp_path, [9, 4, 6], with_final=True)
    views, copies = (
        open_cpu(tmp_path, 2).get_batch(5),
        open_cpu(tmp_path, 2, contiguous=True).get_batch(5),
    )
    for view, copied in zip(views, copies, strict=True):
        if isinstance(view, torch.Tensor):
            assert torch.equal(view, copied) and copied.is_contiguous()


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("cache", ["none", "ram"])
@pytest.mark.parametrize("with_final", [False, True])
def test_steps_and_envs_flatten_to_a_view(tmp_path, with_final, cache, contiguous):
    record(tmp_path, [9, 4, 6, 5], with_final=with_final, flush_every=3)
    dataset = open_cpu(tmp_path, 3, cache=cache, contiguous=contiguous)
    for num_steps in (1, 2, 5):
        batch = dataset.get_batch(num_steps)
        for tensor in (value for value in batch if isinstance(value, torch.Tensor)):
            assert tensor.flatten(0, 1).data_ptr() == tensor.data_ptr()


def test_contiguous_fields_share_no_memory(tmp_path):
    record(tmp_path, [9, 4, 6])
    batch = open_cpu(tmp_path, 2, contiguous=True).get_batch(5)
    tensors = [value for value in batch if isinstance(value, torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_a_failed_read_moves_no_cursor(tmp_path):
    with RolloutWriter(
        tmp_path, 2, obs_disassemble_mapping={"depth": "lz4"}, frames_per_chunk=2, durable=False
    ) as writer:
        for frame in range(12):
            depth = np.random.default_rng(frame).random((2, 16, 16), np.float32)  # stored raw
            depth[:, 0, :2] = frame, 777
            writer.add(
                observation={"depth": depth}, action=np.full((2, 1), frame), done=[frame == 11] * 2
            )
    dataset, twin = (
        RolloutDataset(tmp_path, 2, device="cpu", chunk_cache_bytes=0) for _ in range(2)
    )
    (path,) = tmp_path.glob("*.h5")
    place = path.read_bytes().index(np.array([4, 777], np.float32).tobytes()) + 100

    def flip():
        with open(path, "r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    dataset.get_batch(3), twin.get_batch(3)
    flip()
    with pytest.raises(CorruptFileError):
        dataset.get_batch(3)
    flip()
    assert torch.equal(dataset.get_batch(3).observation, twin.get_batch(3).observation)
    assert dataset.state_dict() == twin.state_dict()


def test_buffers_are_filled_for_some_envs_only(tmp_path):
    record(tmp_path, [6] * 3)
    dataset = open_cpu(tmp_path, 3)
    buffer = dataset.get_buffer()
    assert buffer.observation.shape == (3, 3)
    dataset.fill_transition(buffer, torch.tensor([2, 1]))
    dataset.fill_transition(buffer, torch.tensor([1]))
    assert buffer.observation[:, :2].tolist() == [[0, 0], [1, 1], [2, 0]]
    assert dataset.get_batch().observation[:, 1].tolist() == [0, 2, 1]
    many = dataset.fill_rollout(dataset.get_buffer(3), 3)
    assert many.observation[:, 0, 1].tolist() == [1, 2, 3]


def test_several_folders_are_one_dataset(tmp_path):
    record(tmp_path / "a", [2, 2])
    record(tmp_path / "b", [3], first_number=5)
    dataset = open_cpu([tmp_path / "a", tmp_path / "b"], 1)
    assert [n for b in drain(dataset, 1) for *_, n, _ in frames_of(b)] == [0, 0, 1, 1, 5, 5, 5]


def test_iteration_resets_and_ends(tmp_path):
    record(tmp_path, [4, 4])
    dataset = open_cpu(tmp_path, 2, num_transitions_per_env=3)
    for _ in range(2):
        assert [batch.observation.shape for batch in dataset] == [(3, 2, 3)] * 2


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_deliver_disjoint_and_complete_shares(tmp_path, num_workers):
    recorded = record(tmp_path, [3, 4, 5, 6, 2, 7, 1])
    dataset = open_cpu(tmp_path, 2, num_transitions_per_env=4, random_shuffle_traj_order=True)
    delivered, streams = [], set()
    for batch in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers):
        check_transitions(batch, recorded)
        frames = [(number, frame) for _, _, number, frame in frames_of(batch)]
        delivered += frames
        streams.add(batch.stream_id)
    assert sorted(delivered) == [
        (item.number, f)
        for item in sorted(recorded, key=lambda r: r.number)
        for f in range(item.length)
    ]
    assert streams == {0}  # one stream for each rank; the workers of a rank read it in turn
