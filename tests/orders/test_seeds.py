"""Objects without a generator: a program repeats its draws, two objects differ, and no global
generator is used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rollout_data
from rollout_data import (
    Normalizer,
    RolloutDataset,
    TrajectoryReplayBuffer,
    WindowDataset,
    WindowLoader,
)
from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    AsyncCheckpointSaver,
    BufferManager,
    CompressedDataCollector,
    DictBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PipelinedDataCollector,
    PrioritizedWindows,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
    load_checkpoint,
    load_store,
)
from storage.adapters.rsl_rl import RslRlStorage
from storage.core.random_indices import generator_on, seeds_from
from tests.files.recorded import record
from tests.orders.everything import global_states
from tests.storage.rollouts import make_storage

ROOT = Path(__file__).parents[2]


def rollout(kind):
    return make_storage(2, 3, kind, generator=None)


def manager():
    return BufferManager({"buffer_name": ["a"], "a": {"replay_buffer_size": 4}})


MAKERS = {
    "DictBuffer": lambda: DictBuffer(capacity=4),
    "TrajectoryDictBufferMultiDim": lambda: TrajectoryDictBufferMultiDim(capacity=4),
    "TrajectoryDictBuffer": lambda: TrajectoryDictBuffer(
        [{"observation": torch.ones(3, 1)}], "cpu", 2
    ),
    "ReplayBuffer": lambda: ReplayBuffer(3, 4),
    "ZBuffer": lambda: ZBuffer(4, 2),
    "NaiveReplayBuffer": lambda: NaiveReplayBuffer(4),
    "AdvancedReplayBuffer": lambda: AdvancedReplayBuffer(4),
    "EpisodeReplayBuffer": lambda: EpisodeReplayBuffer(4),
    "PrioritizedWindows": lambda: PrioritizedWindows(8, 2),
    "BufferManager": manager,
    "RolloutStorage": lambda: rollout(RolloutStorage),
    "QueueRolloutStorage": lambda: rollout(QueueRolloutStorage),
    "ActionLabelRollout": lambda: rollout(ActionLabelRollout),
    "SarsaRolloutStorage": lambda: rollout(SarsaRolloutStorage),
    "RslRlStorage": lambda: RslRlStorage("rl", 2, 3, {"policy": torch.zeros(2, 3)}, (2,)),
}


def seed_of(made):
    return made.rng.initial_seed()


def begin(seed):
    """Seed torch as at the start of a program, before any object is created."""
    torch.manual_seed(seed + 1)
    generator_on(None)
    torch.manual_seed(seed)


@pytest.mark.parametrize("name", MAKERS)
def test_objects_repeat_with_the_seed_of_the_program_and_differ_from_each_other(name):
    make = MAKERS[name]
    begin(101)
    first = [seed_of(make()) for _ in range(3)]
    begin(201)
    other = [seed_of(make()) for _ in range(3)]
    begin(101)
    again = [seed_of(make()) for _ in range(3)]
    assert first == again
    assert len({*first, *other}) == 6


def test_objects_of_different_classes_differ():
    begin(103)
    assert len({seed_of(make()) for make in MAKERS.values()}) == len(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_no_global_generator_is_used(name, tmp_path):
    before = global_states()
    made = MAKERS[name]()
    if name not in ("BufferManager", "TrajectoryDictBuffer") and hasattr(made, "save"):
        made.save(tmp_path / "saved")
        load_store(tmp_path / "saved")
    assert global_states() == before


def test_loading_a_store_counts_no_object(tmp_path):
    RolloutStorage(2, 3, (3,), None, (2,), generator=0).save(tmp_path / "saved")
    begin(104)
    first = [seed_of(NaiveReplayBuffer(4)) for _ in range(2)]
    begin(104)
    load_store(tmp_path / "saved")
    assert [seed_of(NaiveReplayBuffer(4)) for _ in range(2)] == first


def test_a_loader_with_workers_uses_no_global_generator(tmp_path):
    record(tmp_path, [5, 9, 7], 2)
    dataset = RolloutDataset(tmp_path, 2, num_transitions_per_env=4, device="cpu")
    before = global_states()
    for num_workers in (0, 1):
        assert list(rollout_data.loader(dataset, num_workers=num_workers))
    assert global_states() == before


def test_files_checkpoints_and_collectors_use_no_global_generator(tmp_path):
    before = global_states()
    record(tmp_path / "recorded", [5, 9, 7, 4], 2)
    recording = rollout_data.open(tmp_path / "recorded")
    recording.split({"a": 0.5, "b": 0.5}, seed=3)
    normalizer = Normalizer(recording.statistics())
    for batch in WindowLoader(WindowDataset(tmp_path / "recorded", 2), 4, seed=1):
        normalizer.normalize(batch)
    rollout_data.convert(recording, tmp_path / "copy", to="robomimic", progress=False)
    rollout_data.merge([tmp_path / "recorded"], tmp_path / "merged")
    rollout_data.split(tmp_path / "merged", {"a": 1.0}, tmp_path / "parts", seed=5)
    rollout_data.doctor(tmp_path / "merged")
    rollout_data.repair(tmp_path / "recorded", tmp_path / "repaired")
    rollout_data.prune(tmp_path / "merged", trajectories=2)
    disk = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "disk")
    disk.add_trajectories([{"observation": torch.zeros(3, 2, 3)}])
    disk.sample(2)
    disk.close()
    checkpoint = {"weights": torch.ones(3), "rng": torch.get_rng_state()}
    with AsyncCheckpointSaver() as saver:
        saver.save_async(checkpoint, tmp_path / "saved.pt", compress=True)
    load_checkpoint(tmp_path / "saved.pt")
    collector = CompressedDataCollector([{"images": torch.zeros(2, 8, 8, 3, dtype=torch.uint8)}])
    assert [step["images"].shape for step in PipelinedDataCollector(collector, "cpu", 2)] == [
        (2, 8, 8, 3)
    ]
    assert global_states() == before


PROGRAM = """
import torch
from storage import DictBuffer, NaiveReplayBuffer
torch.manual_seed(106)
torch.rand(3)
buffer = NaiveReplayBuffer(50)
buffer.push([{"x": torch.tensor([float(number)])} for number in range(50)])
other = DictBuffer(capacity=50)
other.extend({"x": torch.arange(50.0).unsqueeze(1)})
print([float(item["x"]) for item in buffer.sample(10)], other.sample(10)["x"].flatten().tolist())
"""


def test_a_program_that_seeds_torch_repeats_from_run_to_run():
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            check=True,
        )
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout) > 50


def test_seeds_inside_a_block_do_not_change_seeds_of_the_program():
    begin(107)
    first = [generator_on(None).initial_seed() for _ in range(2)]
    begin(107)
    again = [generator_on(None).initial_seed()]
    with seeds_from(3):
        inside = [generator_on(None).initial_seed() for _ in range(2)]
    again.append(generator_on(None).initial_seed())
    with seeds_from(3):
        assert [generator_on(None).initial_seed() for _ in range(2)] == inside
    assert again == first
