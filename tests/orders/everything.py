"""The order of every loader, stream, sampler and buffer with exact resume, as numbers.

Each function below returns the delivered order as integers. Half of it is from an object that
resumes from the state of another object.

`python -m tests.orders.everything` prints all orders; with `--write` it replaces the stored ones.
Replace them only where a change of an order is intended, and name it in CHANGELOG.md: users' states
break.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch

import rollout_data
from rollout_data import (
    RolloutDataset,
    TrajectoryReplayBuffer,
    WindowDataset,
    WindowLoader,
    WindowMixture,
)
from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    BufferManager,
    DictBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PrefixSum,
    PrioritizedWindows,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    SumTree,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
    motion_priorities,
    sequence_priorities,
)
from storage.core.durable_files import crc32
from tests.files.recorded import drain, frames_of, record
from tests.storage.rollouts import make_storage, make_transition
from tests.trajectory_replay.recorded import trajectory

STORED = Path(__file__).parents[1] / "data" / "orders.json"
#: Numbers of an order that are stored as they are; a checksum stands for all.
NUM_SHOWN = 24
LENGTHS = [5, 17, 9, 30, 2, 8, 21, 13, 4, 26, 7, 11]

Order = list[int]
ORDERS: dict[str, Callable[[Path], Order]] = {}


def order(function: Callable[[Path], Order]) -> Callable[[Path], Order]:
    """Add a function to the orders that are compared."""
    ORDERS[function.__name__] = function
    return function


def record_all(folder: Path) -> None:
    """Record the data of the orders of files."""
    record(folder / "first", LENGTHS, 2, writer_name="first", flush_every=10)
    record(folder / "second", LENGTHS[::-1], 3, first_number=20, writer_name="second")
    record(folder / "large", [290] * 128, 128, first_number=100, writer_name="large")


def all_orders() -> dict[str, Any]:
    """Compute every order: name -> length, first numbers and checksum."""
    result = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        record_all(folder)
        for name, function in ORDERS.items():
            numbers = function(folder)
            checksum = crc32(np.array(numbers, "<i8").tobytes())
            result[name] = {"length": len(numbers), "first": numbers[:NUM_SHOWN], "crc32": checksum}
    return result


def resumed(
    make: Callable[[], Any], deliver: Callable[[Any], Iterator[Order]], num_before: int
) -> Order:
    """Return the items of one object, after a check that another object resumes from its state.

    Args:
        make: Makes an object with `state_dict` and `load_state_dict`.
        deliver: Yields what an object delivers, part by part.
        num_before: Parts before the state is taken.
    """
    expected = list(chain.from_iterable(deliver(make())))
    stopped = make()
    parts = deliver(stopped)
    before = list(chain.from_iterable(islice(parts, num_before)))
    state = stopped.state_dict()
    after = make()
    after.load_state_dict(state)
    rest = list(chain.from_iterable(deliver(after)))
    got = (before + rest)[: len(expected)]
    assert got == expected, "resuming gave another order"
    return expected


def global_states() -> list[Any]:
    """Return the states of the global generators of torch, numpy and Python."""
    name, keys, *place = np.random.get_state()
    return [
        torch.initial_seed(),
        torch.get_rng_state().tolist(),
        name,
        keys.tolist(),
        place,
        random.getstate(),
    ]


def column(values: Any) -> Order:
    """Return the values of a tensor as integers."""
    return torch.as_tensor(values).flatten().long().tolist()


# Streams


def frames(dataset: Any, num_steps: int = 4) -> Order:
    """Return trajectory and frame of all transitions that a stream delivers."""
    batches = drain(dataset, num_steps)
    return [number for batch in batches for _, _, *place in frames_of(batch) for number in place]


def stream_order(folder: Path, num_before: int = 3, **options: Any) -> Order:
    def make() -> RolloutDataset:
        return RolloutDataset([folder / "first", folder / "second"], 3, device="cpu", **options)

    expected = frames(make())
    stopped = make()
    batches = [stopped.get_batch(4) for _ in range(num_before)]
    state = json.loads(json.dumps(stopped.state_dict()))
    after = make()
    after.load_state_dict(state)
    before = [number for batch in batches for _, _, *place in frames_of(batch) for number in place]
    assert before + frames(after) == expected, "resuming gave another order"
    return expected


@order
def stream_in_recorded_order(folder: Path) -> Order:
    return stream_order(folder)


@order
def stream_shuffled_loops_and_starts(folder: Path) -> Order:
    return stream_order(
        folder,
        num_before=13,
        random_shuffle_traj_order=True,
        dataset_loops=3,
        starting_frame_range=(0, 7),
        seed=5,
    )


@order
def stream_of_the_latest(folder: Path) -> Order:
    return stream_order(folder, keep_latest_n_trajs=9, random_shuffle_traj_order=True, seed=6)


@order
def stream_of_ranks(folder: Path) -> Order:
    options = {"random_shuffle_traj_order": True, "seed": 7}
    return [x for rank in range(2) for x in stream_order(folder, shard=(rank, 2), **options)]


@order
def stream_of_a_loader(folder: Path) -> Order:
    dataset = RolloutDataset(
        folder / "first",
        2,
        random_shuffle_traj_order=True,
        seed=9,
        num_transitions_per_env=5,
        device="cpu",
    )
    batches = [list(rollout_data.loader(dataset)) for _ in range(2)]  # two epochs
    return [
        number for batch in chain(*batches) for _, _, *place in frames_of(batch) for number in place
    ]


@order
def stream_of_a_loader_with_workers(folder: Path) -> Order:
    dataset = RolloutDataset(
        folder / "second",
        3,
        random_shuffle_traj_order=True,
        seed=11,
        num_transitions_per_env=4,
        device="cpu",
    )
    batches = [list(rollout_data.loader(dataset, num_workers=2)) for _ in range(2)]  # two epochs
    return [
        number for batch in chain(*batches) for _, _, *place in frames_of(batch) for number in place
    ]


@order
def stream_drops_last(folder: Path) -> Order:
    return stream_order(
        folder, drop_last=True, random_shuffle_traj_order=True, dataset_loops=2, seed=10
    )


# Windows


def window_names(batch: Any) -> Order:
    return column(batch["observation"][:, 0, 2])


def window_order(make: Callable[[], Any], num_epochs: int = 2, **options: Any) -> Order:
    def deliver(loader: WindowLoader) -> Iterator[Order]:
        while loader.epoch < num_epochs:
            yield from map(window_names, loader)

    return resumed(lambda: WindowLoader(make(), 16, seed=3, **options), deliver, 2)


def mixture(folder: Path, weights: Any) -> WindowMixture:
    datasets = [
        WindowDataset(folder / name, 2, padding="repeat") for name in ("first", "second", "large")
    ]
    return WindowMixture(datasets, weights)


@order
def windows_shuffled(folder: Path) -> Order:
    return window_order(
        lambda: WindowDataset([folder / "first", folder / "second"], 2, padding="repeat")
    )


@order
def windows_in_order(folder: Path) -> Order:
    return window_order(lambda: WindowDataset(folder / "first", 3, stride=2), shuffle=False)


@order
def windows_of_many_frames(folder: Path) -> Order:
    return WindowLoader(WindowDataset(folder / "large", 1), 512, seed=4).order(1).tolist()


@order
def windows_of_ranks(folder: Path) -> Order:
    result = []
    for even in ("pad", "drop", "none"):
        for rank in range(3):
            options = {"even": even, "shard": (rank, 3)}
            result += window_order(lambda: WindowDataset(folder / "first", 1), **options)
    return result


@order
def windows_of_splits(folder: Path) -> Order:
    result = []
    for split in ("train", "validation"):
        dataset = WindowDataset(
            [folder / "first", folder / "second"], 1, split=split, validation_fraction=0.3, seed=2
        )
        result += window_order(lambda dataset=dataset: dataset)
    return result


@order
def windows_of_urls(folder: Path) -> Order:
    fsspec.filesystem("memory").put(str(folder / "first"), f"{folder}/first", recursive=True)
    remote = rollout_data.RemoteOptions(chunk_bytes=4096, num_chunks=3)
    return window_order(
        lambda: WindowDataset(f"memory://{folder}/first", 2, padding="repeat", remote=remote)
    )


@order
def mixture_by_whole_weights(folder: Path) -> Order:
    return WindowLoader(mixture(folder, [1, 2, 3]), 512, seed=3).order(0).tolist()


@order
def mixture_by_decimal_weights(folder: Path) -> Order:
    return WindowLoader(mixture(folder, [0.7, 0.2999, 0.0001]), 512, seed=3).order(1).tolist()


@order
def mixture_of_equal_windows(folder: Path) -> Order:
    return WindowLoader(mixture(folder, None), 512, seed=3).order(2).tolist()


@order
def mixture_resumed(folder: Path) -> Order:
    def make() -> WindowMixture:
        return WindowMixture(
            [WindowDataset(folder / name, 2, padding="repeat") for name in ("first", "second")],
            [1, 4],
        )

    actual = window_order(make)
    for rank in range(3):
        actual += window_order(make, shard=(rank, 3))
    return actual


@order
def mixture_with_a_heavy_window(folder: Path) -> Order:
    item = WindowDataset(folder / "second", 2, split="validation", validation_fraction=0.05, seed=1)
    many = WindowDataset(folder / "first", 2)
    return WindowLoader(WindowMixture([item, many], [1000, 1]), 8, seed=2).order(0).tolist()


@order
def mixture_sampler(folder: Path) -> Order:
    sampler = mixture(folder, [1, 2, 3]).sampler(700, seed=4)
    return [*sampler, *sampler]


@order
def episodes_of_a_split_recording(folder: Path) -> Order:
    parts = rollout_data.open(folder / "first").split({"a": 0.5, "b": 0.3, "c": 0.2}, seed=3)
    return [len(part) for part in parts.values()] + [
        int(episode.observation[0, 0]) for part in parts.values() for episode in part
    ]


# Buffers of rows


def rows(first: int, num: int, every: int = 7) -> dict[str, torch.Tensor]:
    number = torch.arange(first, first + num).unsqueeze(1)
    return {"observation": number.float(), "x": number, "done": number % every == every - 1}


def draws(make: Callable[[], Any], draw: Callable[[Any], Any], num: int = 6) -> Order:
    """Return the draws of some calls of a buffer, with a saved state in between."""

    def deliver(buffer: Any) -> Iterator[Order]:
        return (column(draw(buffer)) for _ in range(num))

    return resumed(make, deliver, num // 2)


def dict_buffer(num_rows: int = 90, capacity: int = 64, **options: Any) -> DictBuffer:
    buffer = DictBuffer(capacity=capacity, end_key="done", generator=1, **options)
    buffer.extend(rows(0, num_rows))
    return buffer


@order
def dict_buffer_rows(folder: Path) -> Order:
    return draws(dict_buffer, lambda buffer: buffer.sample(40)["x"])


@order
def dict_buffer_of_more_than_a_million_rows(folder: Path) -> Order:
    buffer = DictBuffer(capacity=1_200_000, generator=1)
    buffer.extend({"x": torch.arange(1_200_000).unsqueeze(1)})
    return column(buffer.sample(3000)["x"])


@order
def dict_buffer_transitions(folder: Path) -> Order:
    return draws(dict_buffer, lambda buffer: buffer.sample_transitions(40)["x"])


@order
def dict_buffer_transitions_of_several_steps(folder: Path) -> Order:
    return draws(
        dict_buffer,
        lambda buffer: buffer.sample_transitions(40, num_steps=3, reward_key="observation")["x"],
    )


def trajectories(start_mode: str, at_end: str = "exclude") -> TrajectoryDictBufferMultiDim:
    buffer = TrajectoryDictBufferMultiDim(
        capacity=64, n_dim=2, seq_length=3, start_mode=start_mode, at_end=at_end, generator=2
    )
    steps = rows(0, 60)
    buffer.extend(
        {
            name: torch.stack([leaf, leaf + (0 if name == "done" else 1000)], 1)
            for name, leaf in steps.items()
        }
    )
    return buffer


@order
def ring_windows(folder: Path) -> Order:
    return draws(lambda: trajectories("uniform"), lambda buffer: buffer.sample(60)["observation"])


@order
def ring_windows_by_trajectory(folder: Path) -> Order:
    return draws(
        lambda: trajectories("trajectory"), lambda buffer: buffer.sample(60)["observation"]
    )


@order
def ring_windows_up_to_ends(folder: Path) -> Order:
    return draws(
        lambda: trajectories("uniform", "mark"), lambda buffer: buffer.sample(60)["observation"]
    )


def expert(mode: str | None) -> TrajectoryDictBuffer:
    episodes = [
        {"observation": torch.arange(n).float().unsqueeze(1) + 100 * k}
        for k, n in enumerate(LENGTHS)
    ]
    buffer = TrajectoryDictBuffer(episodes, "cpu", 2, generator=3)
    scores = torch.arange(len(LENGTHS)) * 0.37 % 2
    buffer.update_priorities(motion_priorities(scores, mode))
    return buffer


@order
def expert_windows(folder: Path) -> Order:
    buffer = expert(None)
    buffer.update_priorities(torch.ones(len(LENGTHS)))
    return column(buffer.sample(3000)["observation"])


@order
def expert_windows_by_priority(folder: Path) -> Order:
    return draws(lambda: expert(None), lambda buffer: buffer.sample(600)["observation"])


@order
def expert_windows_by_bins(folder: Path) -> Order:
    return draws(
        lambda: expert("bin"), lambda buffer: buffer.sample(600, seq_length=3)["observation"]
    )


@order
def expert_priorities(folder: Path) -> Order:
    return (
        expert(None).priorities.view(torch.int32).tolist()
        + expert("bin").priorities.view(torch.int32).tolist()
    )


@order
def replay_pairs(folder: Path) -> Order:
    def make() -> ReplayBuffer:
        buffer = ReplayBuffer(1, 50, generator=4)
        number = torch.arange(70.0).unsqueeze(1)
        buffer.insert(number, number + 1)
        return buffer

    def draw(buffer: ReplayBuffer) -> torch.Tensor:
        return torch.cat(
            [buffer.sample(20)[0], *(batch[1] for batch in buffer.feed_forward_generator(2, 20))]
        )

    return draws(make, draw)


@order
def latents(folder: Path) -> Order:
    def make() -> ZBuffer:
        buffer = ZBuffer(50, 1, generator=5)
        buffer.add(torch.arange(70.0).unsqueeze(1))
        return buffer

    return draws(make, lambda buffer: buffer.sample(40))


# Managed and prioritized buffers


def items(first: int, num: int) -> list[dict[str, Any]]:
    return [{"x": torch.tensor([float(number)])} for number in range(first, first + num)]


def numbers_of(found: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([float(item["x"]) for item in found])


def priorities_of(ids: torch.Tensor, call: int) -> torch.Tensor:
    """Return priorities that have no short binary form."""
    return (ids.double() * 0.618033988749895 + call * 0.414213562373095) % 3.0 + 1e-3


@order
def naive_items(folder: Path) -> Order:
    def make() -> NaiveReplayBuffer:
        buffer = NaiveReplayBuffer(40, generator=6)
        buffer.push(items(0, 60))
        return buffer

    def draw(buffer: NaiveReplayBuffer) -> torch.Tensor:
        return torch.cat(
            [numbers_of(buffer.sample(15)), numbers_of(buffer.sample(50, replace=True))]
        )

    return draws(make, draw)


def advanced(num_rows: int) -> AdvancedReplayBuffer:
    buffer = AdvancedReplayBuffer(num_rows, generator=7, min_sample_ratio=0)
    number = torch.arange(num_rows)
    buffer.extend_tensors({"x": number}, priorities_of(number, 0))
    return buffer


def prioritized_draw(num: int) -> Callable[[AdvancedReplayBuffer], torch.Tensor]:
    def draw(buffer: AdvancedReplayBuffer) -> torch.Tensor:
        batch, _, ids = buffer.sample_tensors(num)
        buffer.update_priorities(ids, priorities_of(ids, 1))
        return batch["x"]

    return draw


@order
def prioritized_rows(folder: Path) -> Order:
    return draws(lambda: advanced(900), prioritized_draw(64))


@order
def prioritized_rows_of_a_deep_tree(folder: Path) -> Order:
    return draws(lambda: advanced(70_000), prioritized_draw(2500), num=4)


@order
def prioritized_items_of_some_ages(folder: Path) -> Order:
    return draws(
        lambda: advanced(900),
        lambda buffer: numbers_of(buffer.sample(30, sample_range=slice(100, 700))),
    )


@order
def prioritized_weights(folder: Path) -> Order:
    actual = advanced(5000).state_dict()["tensors"]["weights"]
    return actual.view(torch.int64).tolist()


@order
def prioritized_weights_of_other_exponents(folder: Path) -> Order:
    result: Order = []
    for alpha in (0.0, 0.3, 0.5, 0.9, 1.0, 1.7):
        buffer = AdvancedReplayBuffer(900, alpha=alpha, generator=7)
        buffer.extend_tensors({"x": torch.arange(900)}, priorities_of(torch.arange(900), 2))
        result += buffer.state_dict()["tensors"]["weights"].view(torch.int64).tolist()
    return result


@order
def sums_of_a_tree(folder: Path) -> Order:
    tree = SumTree(70_000)
    tree.write(torch.arange(70_000), priorities_of(torch.arange(70_000), 3))
    sums = [tree.reduce(), tree.reduce(17, 69_000)]
    generator = torch.Generator().manual_seed(8)
    drawn = [column(tree.draw(num, generator)) for num in (10, 3000)]
    return [*np.array(sums).view(np.int64).tolist(), *chain(*drawn)]


@order
def prioritized_windows(folder: Path) -> Order:
    def make() -> PrioritizedWindows:
        buffer = PrioritizedWindows(80, 4, stride=2, generator=9)
        steps = rows(0, 70, every=13)
        buffer.extend({name: torch.stack([leaf, leaf], 1) for name, leaf in steps.items()})
        return buffer

    def draw(buffer: PrioritizedWindows) -> torch.Tensor:
        batch, _, ids = buffer.sample(20)
        buffer.update_priorities(ids, priorities_of(ids, 4))
        return batch["x"][:, 0]

    return draws(make, draw)


@order
def priorities_of_sequences(folder: Path) -> Order:
    errors = (priorities_of(torch.arange(60 * 80), 5) - 1.5).float().reshape(60, 80)
    masked = sequence_priorities(errors, 0.5, torch.arange(80).expand(60, -1) >= 20)
    return torch.cat([sequence_priorities(errors), masked]).view(torch.int32).tolist()


def episode_buffer() -> EpisodeReplayBuffer:
    buffer = EpisodeReplayBuffer(200, generator=10)
    for number, length in enumerate(LENGTHS):
        buffer.append([{"x": torch.tensor([100.0 * number + step])} for step in range(length)])
    return buffer


@order
def episode_windows(folder: Path) -> Order:
    return draws(episode_buffer, lambda buffer: buffer.sample_windows(30, 3)["x"][:, 0])


@order
def whole_episodes(folder: Path) -> Order:
    return draws(
        episode_buffer, lambda buffer: torch.cat([numbers_of(item) for item in buffer.sample(5)])
    )


def manager() -> BufferManager:
    config = {
        "buffer_name": ["agent", "demo", "old"],
        "agent": {
            "type": "advanced",
            "replay_buffer_size": 60,
            "generator": 11,
            "min_sample_ratio": 0,
        },
        "demo": {"type": "naive", "replay_buffer_size": 60, "generator": 12},
        "old": {"type": "naive", "replay_buffer_size": 60, "generator": 13},
        "sample_ratio": {"agent": 0.7, "demo": 0.1, "old": 0.2},
    }
    made = BufferManager(config, generator=14)
    for number, name in enumerate(config["buffer_name"]):
        made.push(items(100 * number, 50), name)
    return made


@order
def managed_buffers(folder: Path) -> Order:
    return draws(manager, lambda buffers: numbers_of(buffers.sample(40)))


@order
def managed_buffers_by_another_ratio(folder: Path) -> Order:
    ratio = {"agent": 1 / 3, "demo": 1 / 3, "old": 1 / 3}
    return draws(manager, lambda buffers: numbers_of(buffers.sample(25, sample_ratio=ratio)))


# Rollouts


def rollout(kind: Any = RolloutStorage) -> Any:
    storage = make_storage(6, 8, kind, generator=15)
    for step in range(8):
        done = ((torch.arange(6) + step) % 5 == 0).float().unsqueeze(1)
        item = make_transition(step, 6, done=done)
        if kind is ActionLabelRollout:
            item.action_labels = torch.zeros(6, 2)
        if kind is SarsaRolloutStorage:
            item.next_observations, item.next_critic_observations = (
                item.observations + 1,
                item.critic_observations + 1,
            )
        storage.add_transitions(item)
    if kind is not ActionLabelRollout:
        storage.compute_returns(torch.zeros(6), 0.9, 0.9)
    return storage


def mini_batches(storage: Any, **options: Any) -> torch.Tensor:
    batches = storage.mini_batch_generator(3, 2, **options)
    return torch.cat([(batch.obs[:, 0] * 100).round() for batch in batches])


@order
def rollout_mini_batches(folder: Path) -> Order:
    return draws(rollout, mini_batches)


@order
def rollout_mini_batches_of_one_permutation(folder: Path) -> Order:
    return draws(rollout, lambda storage: mini_batches(storage, reshuffle="once", drop_last=False))


@order
def queue_mini_batches(folder: Path) -> Order:
    return draws(lambda: rollout(QueueRolloutStorage), mini_batches)


@order
def label_mini_batches(folder: Path) -> Order:
    return draws(lambda: rollout(ActionLabelRollout), mini_batches)


@order
def sarsa_mini_batches(folder: Path) -> Order:
    return draws(lambda: rollout(SarsaRolloutStorage), mini_batches)


@order
def recurrent_mini_batches(folder: Path) -> Order:
    result: Order = []
    for batch in rollout().recurrent_mini_batch_generator(3, 2):
        result += column((batch.obs[..., 0] * 100).round()) + column(batch.masks)
    return result


# Trajectories, and the sums that lookups go by


@order
def steps_of_trajectories(folder: Path) -> Order:
    def make() -> TrajectoryReplayBuffer:
        buffer = TrajectoryReplayBuffer(seed=16, sample_window_size=6)
        for number, length in enumerate(LENGTHS):
            buffer.add(trajectory(number, num_steps=length, without=("half",)))
        return buffer

    expected = make()
    before = [column(expected.sample(30, ["actions"])["actions"][:, 0]) for _ in range(2)]
    expected.save_checkpoint(folder / "trajectories")
    after = make()
    after.load_checkpoint(folder / "trajectories")
    rest = [column(buffer.sample(30, ["actions"])["actions"][:, 0]) for buffer in (expected, after)]
    assert rest[0] == rest[1], "resuming gave another order"
    return [*chain(*before), *rest[0]]


@order
def places_in_prefix_sums(folder: Path) -> Order:
    sums = PrefixSum(LENGTHS)
    episode, offset = sums.locate(np.arange(sums.total))
    return [*episode.tolist(), *offset.tolist()]


if __name__ == "__main__":
    text = json.dumps(all_orders(), indent=1)
    if "--write" in sys.argv:
        STORED.write_text(text + "\n")
    else:
        print(text)
