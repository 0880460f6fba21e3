"""Recording tensors that live on a GPU."""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy as np
import pytest
import torch

from rollout_data import RecordingWrapper, RolloutWriter
from rollout_data.writing import record_environments, rollout_writer
from rollout_data.writing.block_publisher import BlockPublisher
from rollout_data.writing.staged_frames import Staging
from storage.core import late_copies
from storage.errors import BackgroundError, SchemaError, UsageError
from tests.files.readback import trajectories_of
from tests.test_device_calls import no_waits

pytestmark = pytest.mark.gpu
NUM_ENVS = 5


def steps_of(num_steps, generator_seed=0):
    """Return steps with identifiable values, as returned by a simulator on a GPU, with the infos of
    rsl_rl.
    """
    generator = torch.Generator().manual_seed(generator_seed)
    steps = []
    for step in range(num_steps):
        number = torch.arange(NUM_ENVS, dtype=torch.float32) + 100 * step
        steps.append({
            "observation": {"policy": number[:, None] + torch.arange(3), "depth": number[:, None] / 3},
            "action": number[:, None].double() / 7,
            "reward": number,
            "done": torch.rand(NUM_ENVS, generator=generator) < 0.3,
            "count": number.to(torch.int64),
            "half": number.to(torch.bfloat16),
            "infos": {
                "time_outs": torch.rand(NUM_ENVS, generator=generator) < 0.5,
                "final_obs": {"policy": number[:, None] + torch.arange(3) + 0.5, "depth": number[:, None] + 1},
            },
        })  # fmt: skip
    return steps


def on(device, value):
    if isinstance(value, dict):
        return {name: on(device, item) for name, item in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def equal_recordings(folder, other):
    pairs = list(zip(trajectories_of(folder), trajectories_of(other), strict=True))
    for expected, got in pairs:
        assert (got.env, got.flags, got.length) == (expected.env, expected.flags, expected.length)
        assert all((got.column(name) == expected.column(name)).all() for name in expected.fields)
        assert (got.finals is None) == (expected.finals is None)
        if expected.finals is not None:
            assert all(
                np.array_equal(got.finals[name], rows) for name, rows in expected.finals.items()
            )
    return len(pairs)


@pytest.mark.parametrize("lateness", [0, 6])
def test_recording_from_a_gpu_does_not_wait_and_equals_the_cpu(cuda_device, tmp_path, lateness):
    if cuda_device is not None:
        cuda_device.lateness = lateness
    steps = steps_of(40)
    with RolloutWriter(tmp_path / "cpu", NUM_ENVS, durable=False) as writer:
        for step in steps:
            writer.add(**step)
    with RolloutWriter(tmp_path / "gpu", NUM_ENVS, durable=False) as writer:
        for number, step in enumerate(steps):
            values = on("cuda", step)
            with no_waits():
                writer.add(**values)
            for leaf in (values["observation"]["policy"], values["reward"]):
                leaf.fill_(torch.nan)  # the simulator goes on in the same memory
            if number == 20:
                assert writer.num_frames == 21 * NUM_ENVS
    assert equal_recordings(tmp_path / "cpu", tmp_path / "gpu") > NUM_ENVS


def test_memory_on_the_host_may_change_after_a_step_with_tensors_on_a_gpu(any_device, tmp_path):
    steps = [
        {name: value for name, value in step.items() if name != "infos"} for step in steps_of(9)
    ]
    with RolloutWriter(tmp_path / "cpu", NUM_ENVS, durable=False) as writer:
        for step in steps:
            writer.add(**step, task=["walk"] * NUM_ENVS, policy_version=3)
    reward = np.zeros(NUM_ENVS, np.float32)
    tasks = ["walk"] * NUM_ENVS
    with RolloutWriter(tmp_path / "gpu", NUM_ENVS, durable=False) as writer:
        for step in steps:
            reward[:] = step["reward"].numpy()
            tasks[:] = ["walk"] * NUM_ENVS
            writer.add(**{**on("cuda", step), "reward": reward}, task=tasks, policy_version=3)
            reward[:] = np.nan
            tasks[:] = ["run"] * NUM_ENVS
    assert equal_recordings(tmp_path / "cpu", tmp_path / "gpu") >= NUM_ENVS


@pytest.mark.each_value
@pytest.mark.parametrize("end", ["add", "flush", "close", "num_frames", "add_rollout", "host step"])
def test_an_error_of_a_gpu_step_is_raised_later_and_loses_only_that_step(any_device, tmp_path, end):
    steps = [
        {name: value for name, value in step.items() if name != "infos"} for step in steps_of(6)
    ]
    good = [on("cuda", step) for step in steps]
    writer = RolloutWriter(tmp_path / "gpu", NUM_ENVS, durable=False)
    writer.add(**good[0])
    writer.add(**{**good[1], "reward": torch.zeros(NUM_ENVS + 1, device="cuda")})
    calls = {
        "add": lambda: [writer.add(**good[0]) for _ in range(200)],
        "flush": writer.flush,
        "close": writer.close,
        "num_frames": lambda: writer.num_frames,
        "add_rollout": lambda: writer.add_rollout(**{
            name: value[None] if isinstance(value, torch.Tensor) else {key: item[None] for key, item in value.items()}
            for name, value in steps[2].items()
        }),
        "host step": lambda: writer.add(**steps[2]),
    }  # fmt: skip
    with pytest.raises(
        SchemaError, match=r"field 'reward' has shape .* The step was passed to an earlier call\."
    ):
        calls[end]()
    if end != "close":
        writer.add(**good[3])
        writer.close()
    recorded = (
        sum(trajectory.length for trajectory in trajectories_of(tmp_path / "gpu")) // NUM_ENVS
    )
    assert recorded == 1 if end == "close" else recorded >= 2


@pytest.mark.parametrize("end", ["add", "flush", "close", "failed close"])
def test_the_error_of_a_late_step_has_the_errors_of_the_other_late_steps(
    cuda_device, tmp_path, monkeypatch, end
):
    if cuda_device is None:
        pytest.skip("a real device completes its copies when it does")
    cuda_device.lateness = 1 << 40
    steps = [
        {name: value for name, value in step.items() if name != "infos"} for step in steps_of(5)
    ]
    good = [on("cuda", step) for step in steps]
    writer = RolloutWriter(tmp_path / "gpu", NUM_ENVS, durable=False)
    writer.add(**good[0])
    writer.flush()
    for name in ("reward", "done"):
        writer.add(**{**good[1], name: torch.zeros(NUM_ENVS + 1, device="cuda")})
    writer.add(**good[2])
    calls = {
        "add": lambda: writer.add(**steps[3]),
        "flush": writer.flush,
        "close": writer.close,
        "failed close": writer.close,
    }
    error = SchemaError
    if end == "failed close":

        def check(publisher):
            raise BackgroundError("the disk is full.")

        monkeypatch.setattr(BlockPublisher, "check", check)
        error = BackgroundError
    with pytest.raises(error) as raised:
        calls[end]()
    text = str(raised.value)
    assert "field 'reward' has shape" in text and "'done' has shape" in text
    assert ("Another step was refused too: " in text) == (end != "failed close")
    writer.close()
    monkeypatch.undo()
    recorded = (
        sum(trajectory.length for trajectory in trajectories_of(tmp_path / "gpu")) // NUM_ENVS
    )
    assert recorded == {"add": 3, "failed close": 1}.get(end, 2)


def test_a_full_queue_of_steps_waits_for_the_oldest_and_counts_it(cuda_device, tmp_path):
    if cuda_device is None:
        pytest.skip("a real device completes its copies when it does")
    cuda_device.lateness = 1 << 40
    with RolloutWriter(tmp_path, NUM_ENVS, durable=False) as writer:
        for step in steps_of(5):
            writer.add(**on("cuda", step))
        assert writer.num_waits == 2  # three steps are on their way


def test_tensors_on_a_gpu_are_recorded_like_those_on_the_cpu(tmp_path):
    generator = torch.Generator().manual_seed(0)
    depth = torch.rand(7, 5, 8, 8, generator=generator)
    values = {
        "observation": {"state": torch.randn(7, 5, 3, generator=generator), "depth": depth},
        "action": torch.randn(7, 5, 2, generator=generator).to(torch.bfloat16),
        "reward": torch.randn(7, 5, 1, generator=generator),
        "done": torch.rand(7, 5, generator=generator) < 0.3,
    }
    values["final_observation"] = {name: value + 1 for name, value in values["observation"].items()}

    def on(device, value):
        return (
            {name: on(device, item) for name, item in value.items()}
            if isinstance(value, dict)
            else value.to(device)
        )

    def at(t, value):
        return (
            {name: at(t, item) for name, item in value.items()}
            if isinstance(value, dict)
            else value[t]
        )

    options = {"obs_disassemble_mapping": {"depth": "normalized_image"}, "durable": False}
    with RolloutWriter(tmp_path / "cpu", 5, **options) as writer:
        writer.add_rollout(**values)
    with RolloutWriter(tmp_path / "gpu", 5, **options) as writer:
        for t in range(3):
            writer.add(**at(t, on("cuda", values)))
        writer.add_rollout(**at(slice(3, None), on("cuda", values)))
    pairs = zip(trajectories_of(tmp_path / "cpu"), trajectories_of(tmp_path / "gpu"), strict=True)
    for expected, got in pairs:
        assert (got.env, got.flags, got.length) == (expected.env, expected.flags, expected.length)
        assert all((got.column(name) == expected.column(name)).all() for name in expected.fields)
        assert (got.finals is None) == (expected.finals is None)


@pytest.mark.each_value
@pytest.mark.parametrize("call", ["close", "flush", "add"])
def test_ctrl_c_neither_loses_nor_repeats_a_pending_step(any_device, tmp_path, monkeypatch, call):
    put = Staging.put
    for point in ("before", "after"):

        def interrupted(staging, *args, point=point):
            monkeypatch.setattr(Staging, "put", put)
            if point == "after":
                put(staging, *args)
            raise KeyboardInterrupt

        writer = RolloutWriter(tmp_path / point, NUM_ENVS, durable=False)
        steps = [
            {name: value for name, value in step.items() if name != "done"} for step in steps_of(4)
        ]
        for step in steps[:3]:
            writer.add(**on("cuda", step))
        monkeypatch.setattr(Staging, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.add(**on("cuda", steps[3])) if call == "add" else getattr(writer, call)()
        writer.close()
        expected = [0, 100, 200, 300] if call == "add" else [0, 100, 200]
        assert (
            trajectories_of(tmp_path / point)[0].column("reward").reshape(-1).tolist() == expected
        )


def test_a_host_step_that_raises_the_error_of_a_gpu_step_is_recorded(any_device, tmp_path):
    steps = [
        {name: value for name, value in step.items() if name not in ("infos", "done")}
        for step in steps_of(3)
    ]
    with RolloutWriter(tmp_path, NUM_ENVS, durable=False) as writer:
        writer.add(**on("cuda", steps[0]))
        writer.flush()
        writer.add(**{**on("cuda", steps[1]), "reward": torch.zeros(NUM_ENVS + 1, device="cuda")})
        with pytest.raises(SchemaError, match="reward"):
            writer.add(**steps[2])
    assert trajectories_of(tmp_path)[0].column("reward").reshape(-1).tolist() == [0, 200]


class GpuEnv:
    """An environment on a GPU."""

    num_envs = NUM_ENVS

    def reset(self):
        return torch.zeros(NUM_ENVS, 2, device="cuda"), {}

    def step(self, actions):
        flags = torch.zeros(NUM_ENVS, dtype=torch.bool, device="cuda")
        return (
            torch.zeros(NUM_ENVS, 2, device="cuda"),
            torch.zeros(NUM_ENVS, device="cuda"),
            flags,
            flags,
            {},
        )


@pytest.mark.parametrize("call", ["step", "reset", "close"])
def test_an_error_of_an_earlier_step_names_the_call_of_the_wrapper_that_raises_it(
    any_device, tmp_path, call
):
    wrapped = RecordingWrapper(GpuEnv(), tmp_path, durable=False)
    wrapped.reset()
    wrapped.step(torch.zeros(NUM_ENVS, 1, device="cuda"))
    wrapped.step(torch.zeros(NUM_ENVS - 1, 1, device="cuda"))
    with pytest.raises(SchemaError, match=rf"^RecordingWrapper\.{call}: .*'action'"):
        if call == "step":
            for _ in range(200):
                wrapped.step(torch.zeros(NUM_ENVS, 1, device="cuda"))
        else:
            getattr(wrapped, call)()
    with suppress(UsageError):  # of the steps after it, which lack a reset
        wrapped.close()


class CountedEnv:
    """Rewards of step t are t.

    Episodes of the first environment have two steps, of the second three.
    """

    num_envs = 2

    def __init__(self):
        self.metadata = {"autoreset_mode": "same_step"}
        self.num_steps = 0

    def reset(self):
        return torch.zeros(2, 2, device="cuda"), {}

    def step(self, actions):
        self.num_steps += 1
        values = torch.full((2, 1), float(self.num_steps), device="cuda")
        ends = torch.tensor([self.num_steps % 2 == 0, self.num_steps % 3 == 0]).to("cuda")
        return torch.zeros(2, 2, device="cuda"), values[:, 0], ends, torch.zeros_like(ends), {}


#: Functions in which a step from a GPU is recorded and then released.
LATE_FUNCTIONS = ("_add_late", "_record_late_step", "release")


def interrupted_at(place, call):
    """Make a call and interrupt it at the first execution of a line, or never for None.

    Return all lines that it executes.
    """
    files = [module.__file__ for module in (record_environments, rollout_writer, late_copies)]
    reached = {}

    def look(frame, event, _):
        if frame.f_code.co_filename not in files or frame.f_code.co_name not in LATE_FUNCTIONS:
            return None
        here = (frame.f_code, frame.f_lineno, event)
        reached[here] = True
        if here == place:
            sys.settrace(None)
            raise KeyboardInterrupt
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return list(reached)


def test_ctrl_c_in_any_line_counts_no_step_of_a_wrapped_environment_twice(cuda_device, tmp_path):
    def trial(folder, place):
        ended = []

        def keep(episode):
            ended.append(episode)
            return True

        wrapped = RecordingWrapper(CountedEnv(), folder, durable=False, keep=keep)
        wrapped.reset()
        actions = torch.zeros(2, 1, device="cuda")
        for _ in range(2):
            wrapped.step(actions)
        reached = interrupted_at(place, lambda: wrapped.step(actions))
        wrapped.step(actions)
        wrapped.rollout_writer.close()
        recorded = {
            (trajectory.env, trajectory.length, float(trajectory.column("reward").sum()))
            for trajectory in trajectories_of(folder)
        }
        assert {(item.env_id, item.length, item.total_reward) for item in ended} == recorded, place
        assert wrapped.rollout_writer.num_frames == sum(length for _, length, _ in recorded), place
        return reached

    places = trial(tmp_path / "none", None)
    assert {place[0].co_name for place in places} == {*LATE_FUNCTIONS}
    for number, place in enumerate(places):
        trial(tmp_path / str(number), place)
