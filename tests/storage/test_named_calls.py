"""A wrong argument of a storage or buffer is named with the class and the call that the user wrote."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
import torch

import rollout_data
import storage
from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    AsyncCheckpointSaver,
    BufferManager,
    BufferPool,
    CompressedDataCollector,
    CompressedTensorDict,
    DictBuffer,
    EpisodeReplayBuffer,
    Field,
    MinTree,
    NaiveReplayBuffer,
    NaturalMonitor,
    PipelinedDataCollector,
    PrefixSum,
    PrioritizedWindows,
    QueueRolloutStorage,
    RateLimiter,
    ReplayBuffer,
    RingStore,
    RolloutStorage,
    SarsaRolloutStorage,
    Schema,
    SumSegmentTree,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    TransitionRequest,
    ZBuffer,
)
from storage.errors import UsageError
from tests.storage.rollouts import fill, make_storage


def manager():
    return BufferManager({"buffer_name": ["agent"], "agent": {"replay_buffer_size": 4}})


GENERATOR = "generator must be a torch.Generator, None or a seed"
CALLS = {
    f"DictBuffer: {GENERATOR}": lambda: DictBuffer(4, generator="x"),
    f"ReplayBuffer: {GENERATOR}": lambda: ReplayBuffer(3, 4, generator="x"),
    f"PrioritizedWindows: {GENERATOR}": lambda: PrioritizedWindows(4, 2, generator="x"),
    f"BufferManager: {GENERATOR}": lambda: BufferManager({"buffer_name": []}, generator="x"),
    f"NaiveReplayBuffer: {GENERATOR}": lambda: NaiveReplayBuffer(4, generator="x"),
    f"RolloutStorage: {GENERATOR}": lambda: RolloutStorage(2, 3, [3], None, [2], generator="x"),
    "RolloutStorage: policy_outputs must be a mapping of names to shapes, got 3": lambda: (
        RolloutStorage(2, 3, [3], None, [2], policy_outputs=3)
    ),
    "ZBuffer: dim must be >= 1, got 0": lambda: ZBuffer(4, 0, "cpu"),
    "ZBuffer.add: z has dtype torch.float32 and shape [2]": lambda: ZBuffer(4, 3, "cpu").add(
        torch.zeros(2)
    ),
    "ZBuffer.sample: num must be >= 1, got 0": lambda: ZBuffer(4, 3, "cpu").sample(0),
    "DictBuffer.sample_transitions: batch_size must be >= 1, got 0": lambda: DictBuffer(
        4
    ).sample_transitions(0),
    "ReplayBuffer.sample: size must be >= 1, got 0": lambda: ReplayBuffer(3, 4).sample(0),
    "ReplayBuffer.feed_forward_generator: mini_batch_size must be >= 1": lambda: ReplayBuffer(
        3, 4
    ).feed_forward_generator(1, 0),
    "NaiveReplayBuffer.sample: size must be >= 0, got -1": lambda: NaiveReplayBuffer(4).sample(-1),
    "AdvancedReplayBuffer.sample: cur_learner_iter must be an integer": lambda: (
        AdvancedReplayBuffer(4).sample(1, "x")
    ),
    "AdvancedReplayBuffer.update: info must be a mapping, got int": lambda: AdvancedReplayBuffer(
        4
    ).update(3),
    "AdvancedReplayBuffer.sample_tensors: batch_size must be >= 1": lambda: AdvancedReplayBuffer(
        4
    ).sample_tensors(0),
    "EpisodeReplayBuffer.sample_windows: length must be >= 1, got 0": lambda: EpisodeReplayBuffer(
        4
    ).sample_windows(1, 0),
    "EpisodeReplayBuffer.push: an episode must be a list of steps": lambda: EpisodeReplayBuffer(
        4
    ).push([3]),
    "BufferManager: cfg must be a mapping, got int": lambda: BufferManager(3),
    "BufferManager.sample: batch_size must be >= 0, got -1": lambda: manager().sample(-1),
    "BufferManager.sample: the shares of sample_ratio must add up to 1, got 0.5": lambda: (
        manager().sample(1, sample_ratio={"agent": 0.5})
    ),
    "BufferManager.update: info must be a mapping, got int": lambda: manager().update(3),
}


@pytest.mark.parametrize("text", CALLS)
def test_an_error_names_the_class_the_call_and_the_argument(text):
    with pytest.raises(UsageError) as caught:
        CALLS[text]()
    assert str(caught.value).startswith(text)


STORAGES = [RolloutStorage, QueueRolloutStorage, ActionLabelRollout, SarsaRolloutStorage]
BUFFERS = [DictBuffer, TrajectoryDictBufferMultiDim]
EPISODES = [{"observation": torch.zeros(5, 3)}]
COLUMN = torch.zeros(3, 2, 1)
IMAGES = np.zeros((2, 4, 4, 3), np.uint8)


def of(kind, method="", **arguments):
    """Make a wrong call of a constructor or of a method. The last argument is wrong."""
    makers = {
        DictBuffer: lambda: rows(DictBuffer(8, end_key="done")),
        TrajectoryDictBufferMultiDim: lambda: rows(TrajectoryDictBufferMultiDim(8, end_key="done")),
        TrajectoryDictBuffer: lambda: TrajectoryDictBuffer(EPISODES),
        RolloutStorage: lambda: fill(make_storage()),
        NaiveReplayBuffer: lambda: NaiveReplayBuffer(4),
        AdvancedReplayBuffer: lambda: AdvancedReplayBuffer(4),
        BufferManager: manager,
        SumSegmentTree: lambda: SumSegmentTree(4),
        ZBuffer: filled_with_vectors,
        RateLimiter: lambda: RateLimiter(1.0, 5.0),
        CompressedTensorDict: lambda: CompressedTensorDict({}),
    }
    *_, wrong = arguments
    make = makers.get(kind, kind)
    call = (lambda: getattr(make(), method)(**arguments)) if method else (lambda: kind(**arguments))
    return pytest.param(f"{kind.__name__}.{method}" if method else kind.__name__, wrong, call)


def by(function, **arguments):
    """Make a wrong call of a function. The last argument is wrong."""
    *_, wrong = arguments
    return pytest.param(function.__name__, wrong, lambda: function(**arguments))


def rows(buffer):
    buffer.extend({"observation": torch.zeros(6, 3), "done": torch.zeros(6, 1)})
    return buffer


def filled_with_vectors():
    buffer = ZBuffer(4, 3)
    buffer.add(torch.zeros(2, 3))
    return buffer


SHAPES = {
    "num_envs": 2,
    "num_transitions_per_env": 3,
    "obs_shape": [3],
    "critic_obs_shape": None,
    "actions_shape": [2],
}
RETURNS = {"last_values": torch.zeros(4, 1), "gamma": 0.9, "lam": 0.9}
WRONG = [
    *(of(kind, **SHAPES | {"obs_shape": [3]}, device="bad") for kind in STORAGES),
    *(
        of(kind, **{x: SHAPES[x] for x in SHAPES if x != "obs_shape"}, obs_shape="x")
        for kind in STORAGES
    ),
    *(
        of(kind, **{x: SHAPES[x] for x in SHAPES if x != "actions_shape"}, actions_shape=-1)
        for kind in STORAGES
    ),
    *(
        of(SarsaRolloutStorage, **SHAPES, **{name: 3})
        for name in ("validate", "strict_next", "emit_next_valid")
    ),
    of(RolloutStorage, "compute_returns", gamma=0.9, lam=0.9, last_values=torch.zeros(7)),
    of(RolloutStorage, "compute_returns", **RETURNS | {"gamma": 0.9}, normalize="x"),
    of(RolloutStorage, "compute_returns", last_values=torch.zeros(4, 1), lam=0.9, gamma="x"),
    of(RolloutStorage, "compute_returns", last_values=torch.zeros(4, 1), gamma=0.9, lam=3),
    of(RolloutStorage, "compute_returns", **RETURNS, allow_partial="x"),
    of(RolloutStorage, "mini_batch_generator", num_mini_batches=1, drop_last="x"),
    of(RolloutStorage, "mini_batch_generator", num_mini_batches=0),
    of(RolloutStorage, "recurrent_mini_batch_generator", num_mini_batches=1, num_epochs=0),
    *(of(kind, capacity=4, end_key=3) for kind in BUFFERS),
    *(of(kind, capacity=4, nested_key_separator=3) for kind in BUFFERS),
    *(
        of(kind, capacity=4, **{name: "x"})
        for kind in BUFFERS
        for name in ("narrow", "contiguous", "auto_unsqueeze")
    ),
    *(of(kind, "extend", data=3) for kind in BUFFERS),
    *(of(kind, "get_full_buffer", copy="x") for kind in BUFFERS),
    *(of(kind, "sample_transitions", batch_size=2, request=3) for kind in BUFFERS),
    *(of(kind, "sample_transitions", batch_size=2, gamma="x") for kind in BUFFERS),
    *(of(kind, "sample_transitions", batch_size=2, gamma=1.5) for kind in BUFFERS),
    *(of(kind, "sample_transitions", batch_size=2, next_keys=3) for kind in BUFFERS),
    *(
        of(TrajectoryDictBufferMultiDim, capacity=4, **{name: 3})
        for name in ("output_key_t", "output_key_tp1")
    ),
    *(
        of(TrajectoryDictBuffer, episodes=EPISODES, **{name: 3})
        for name in ("output_key_t", "end_key", "file_names")
    ),
    of(TrajectoryDictBuffer, episodes=3),
    of(TrajectoryDictBuffer, episodes=EPISODES, split_on_end="x"),
    of(TrajectoryDictBuffer, "update_priorities", priorities="x"),
    of(TrajectoryDictBuffer, "update_priorities", priorities=[1.0], idxs=[5]),
    of(PrioritizedWindows, capacity=4, seq_length=2, alpha=-1),
    of(AdvancedReplayBuffer, replay_buffer_size=4, max_use=-1),
    of(AdvancedReplayBuffer, replay_buffer_size=4, enable_track_used_data="x"),
    of(AdvancedReplayBuffer, replay_buffer_size=4, rate_limiter=3),
    of(AdvancedReplayBuffer, "update_priorities", priorities=[1.0], ids="x"),
    of(AdvancedReplayBuffer, "extend_tensors", batch={"a": torch.zeros(2)}, collect_iter="x"),
    of(NaiveReplayBuffer, "sample", size=1, replace="x"),
    of(NaiveReplayBuffer, "push", data=3),
    of(BufferManager, "push", data=[{"a": 1.0}], buffer_name=3),
    of(BufferManager, "count", buffer_name="agnet"),
    of(MinTree, capacity=0),
    of(SumSegmentTree, "find_prefixsum_idx", mass="x"),
    of(PrefixSum, "pop_oldest", num_episodes=1),
    of(RateLimiter, samples_per_insert=1.0, tolerance=2.0, blocking="x"),
    of(RingStore, num_slots=2, num_lanes=1, schema=3),
    of(BufferPool, max_buffers=-1),
    of(PipelinedDataCollector, base_collector=[], transform=3),
    of(PipelinedDataCollector, base_collector=[], pin="x"),
    of(CompressedTensorDict, tensordict=EPISODES[0], missing_ok="x"),
    of(CompressedDataCollector, base_collector=[], compress_keys=3),
    of(AsyncCheckpointSaver, monitor=3),
    of(AsyncCheckpointSaver, "save_async", checkpoint={}, path="x", compress="zzz"),
    of(AsyncCheckpointSaver, "wait", timeout="x"),
    of(AsyncCheckpointSaver, "close", wait="x"),
    of(RolloutStorage, "reccurent_mini_batch_generator", num_mini_batches=0),
    of(ZBuffer, "sample", num=1, device="x"),
    of(BufferManager, "extend", data=3),
    of(BufferManager, "count", buffer_name=[]),
    of(BufferManager, "load_state_dict", strict=False, state={}),
    of(NaturalMonitor, clock="x"),
    of(NaturalMonitor, "record", num_events=-1),
    of(RateLimiter, "insert", num_items=-1),
    of(RateLimiter, "sample", waits="x"),
    of(PrefixSum, "extend", lengths=3),
    of(BufferPool, "take", num_bytes="x"),
    of(BufferPool, "empty", shape=(2,), dtype="x"),
    of(Field, shape=(), name=3),
    of(Field, name="a", shape="x"),
    of(Field, name="a", shape=(), dtype=3),
    of(Schema, fields="x"),
    of(TransitionRequest, gamma=torch.zeros(2)),
    of(CompressedTensorDict, "to", device="cpu", non_blocking="x"),
    by(storage.load_buffer, path=3),
    by(storage.load_store, path=3),
    by(storage.compress_image_seq, images=IMAGES, codec=3),
    by(storage.split_and_pad_trajectories, x=COLUMN, dones="x"),
    by(storage.plot_snapshots, snapshots=[{"a": 1}], path="x", names=3),
    by(storage.plot_snapshots, snapshots=[{"a": 1}], path="x", x=3),
    by(storage.load_checkpoint, path="x", weights_only="x"),
    by(storage.compress_image_seq, images=IMAGES, level=99),
    by(storage.decompress_image, compressed_data=3),
    by(storage.decompress_many, image_shape=(4,), batch_size=1, dtype="uint8", blobs=3),
    by(storage.motion_priorities, scores="x"),
    by(storage.motion_priorities, scores=[1.0], scale="x"),
    by(storage.sequence_priorities, errors=3),
    by(storage.sequence_priorities, errors=torch.zeros(2, 3), eta=3),
    by(storage.split_and_pad_trajectories, dones=COLUMN, x=3),
    by(storage.discounted_sums, rewards=COLUMN, dones=COLUMN, gamma="x"),
    by(storage.plot_snapshots, path="x", snapshots=3),
    by(storage.plot_snapshots, snapshots=[{"a": 1}], path=3),
]


@pytest.mark.parametrize(("call", "argument", "make"), WRONG)
def test_every_error_of_a_wrong_call_has_the_class_the_call_and_the_argument(call, argument, make):
    with pytest.raises(UsageError) as caught:
        make()
    text = str(caught.value)
    assert all(part in text for part in call.split(".")) and argument in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_an_error_of_a_loaded_device_names_the_function_that_was_called(tmp_path):
    rows(DictBuffer(8)).save(tmp_path)
    for function in (storage.load_buffer, storage.load_store):
        with pytest.raises(UsageError, match=rf"^{function.__name__}: .*device is 'cuda:99'"):
            function(tmp_path, "cuda:99")


@pytest.mark.parametrize("package", [storage, rollout_data])
def test_every_public_call_has_a_function_of_its_own_name(package):
    """Errors read the name of a call from its function, so a second name of a function would be
    wrong in errors.
    """
    for name in package.__all__:
        public = getattr(package, name)
        if inspect.isfunction(public):
            assert public.__name__ == name
        if not inspect.isclass(public):
            continue
        for method, function in inspect.getmembers(public, inspect.isfunction):
            is_of_object = inspect.isfunction(inspect.getattr_static(public, method))
            is_ours = function.__module__.startswith(("storage.", "rollout_data."))
            if is_of_object and is_ours and not method.startswith("_"):
                assert function.__name__ == method, f"{name}.{method}"


OPTIONS = {
    "RecordingWrapper": lambda: rollout_data.RecordingWrapper(None, "x", bogus=1),
    "record_demonstrations": lambda: rollout_data.record_demonstrations(None, None, "x", bogus=1),
    "WindowMixture": lambda: rollout_data.WindowMixture("x", bogus=1),
    "EpisodeReplayBuffer": lambda: EpisodeReplayBuffer(4, bogus=1),
    "QueueRolloutStorage": lambda: QueueRolloutStorage(**SHAPES, bogus=1),
}


@pytest.mark.parametrize("call", OPTIONS)
def test_an_unknown_option_raises_with_the_call_of_the_user(call):
    with pytest.raises(
        TypeError, match=rf"^{call}\(\) got an unexpected argument 'bogus': expected '"
    ):
        OPTIONS[call]()


def test_an_error_names_the_subclass_of_the_user():
    class Mine(DictBuffer):
        pass

    with pytest.raises(UsageError, match=r"^Mine\.sample_transitions: "):
        rows(Mine(8, end_key="done")).sample_transitions(2, nope=1)
    with pytest.raises(UsageError) as caught:
        raise UsageError("the buffer is empty.")
    assert str(caught.value) == "the buffer is empty."
