"""Recording from the interfaces of simulators: the recording equals what each fake has played."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout_data import RecordingWrapper, RolloutDataset, WindowDataset, record_demonstrations
from storage.errors import RolloutDataWarning, UsageError
from tests.files.readback import end_of, trajectories_of
from tests.files.simulator_fakes import (
    SB3,
    GymForm,
    Gymnasium029,
    IsaacGym,
    IsaacLab,
    LeggedGym,
    ManiSkill,
    N,
    OldRslRl,
    Privileged,
    RslRl,
    on_a_gpu,
)
from tests.test_device_calls import no_waits

#: Name -> (env, field of the state, whether there are privileged and final observations, options).
FAKES = {
    "isaac lab": (lambda: IsaacLab("torch"), "observation", True, False, {}),
    "privileged": (lambda: Privileged("torch"), "observation/state", True, True, {}),
    "maniskill": (lambda: ManiSkill("torch"), "observation", False, True, {}),
    "gymnasium 0.29": (Gymnasium029, "observation", False, True, {}),
    "stable-baselines3": (SB3, "observation", False, True, {}),
    "rsl_rl": (RslRl, "observation", True, False, {}),
    "old rsl_rl": (OldRslRl, "observation", True, False, {}),
    "legged_gym": (LeggedGym, "observation", True, False, {}),
    "silent, same step": (GymForm, "observation", False, False, {"autoreset": "same_step"}),
    "silent, next step": (
        lambda: GymForm(mode="next_step"),
        "observation",
        False,
        True,
        {"autoreset": "next_step"},
    ),
    "isaac gym": (IsaacGym, "observation/obs", False, True, {"autoreset": "next_step"}),
    "tensors, next step": (
        lambda: GymForm("torch", "next_step", "NextStep"),
        "observation",
        False,
        True,
        {},
    ),
    "tensors, disabled": (
        lambda: GymForm("torch", "disabled", "Disabled"),
        "observation",
        False,
        True,
        {},
    ),
}
ALL = pytest.mark.parametrize("name", FAKES)


def policy_of(env):
    def policy(observation):
        state = observation
        while hasattr(state, "items"):
            state = next(
                state[name] for name in ("policy", "state", "obs") if name in list(state.keys())
            )
        assert isinstance(state, torch.Tensor if env.library == "torch" else np.ndarray)
        return state[:, 1:] + (torch.zeros(1) if env.library == "torch" else np.float32(0))

    return policy


def check(folder, name, has_all=True):
    """Compare the recording with the states of the fake, from the first episode on."""
    _, field, has_privileged, has_final, _ = FAKES[name]
    actual = trajectories_of(folder)
    for item in actual:
        state = item.column(field)
        episode = int(state[0, 1])
        assert state.tolist() == [[item.env, episode, t] for t in range(item.length)]
        assert item.column("reward").reshape(-1).tolist() == list(range(1, item.length + 1))
        assert item.column("action").tolist() == state[:, 1:].tolist()
        if has_privileged:
            assert item.column("privileged_observation").tolist() == (state + 0.5).tolist()
        if end_of(item) == "open":
            continue
        assert item.length == item.env + episode % 3 + 2
        assert end_of(item) == ("truncated" if episode % 2 else "terminated")
        assert (item.finals is not None) == has_final
        if has_final:
            assert item.finals[field].tolist() == [item.env, episode, item.length]
        if has_final and has_privileged:
            assert item.finals["privileged_observation"].tolist() == [
                item.env + 0.5,
                episode + 0.5,
                item.length + 0.5,
            ]
    for env in range(N if has_all else 0):
        episodes = sorted(
            int(trajectory.column(field)[0, 1]) for trajectory in actual if trajectory.env == env
        )
        assert episodes == list(range(1, len(episodes) + 1)), "each episode once"
    return actual


@ALL
def test_each_interface_is_recorded_as_it_was_played(tmp_path, name):
    make, _, has_privileged, _, options = FAKES[name]
    env = make()
    summary = record_demonstrations(
        env, policy_of(env), tmp_path, min_trajectories=14, show_progress=False, **options
    )
    assert len(check(tmp_path, name)) == summary.num_trajectories >= 14
    dataset = RolloutDataset(tmp_path, 1, num_transitions_per_env=1, device="cpu")
    batch = dataset.get_batch()
    assert (batch.privileged_observation is not None) == has_privileged
    state = batch.observation["state"] if isinstance(batch.observation, dict) else batch.observation
    assert state[0, 2] == 0, "no first frame is lost"
    assert WindowDataset(tmp_path, 2).num_trajectories == summary.num_trajectories


@ALL
def test_the_wrapper_returns_the_values_of_the_environment_unchanged(tmp_path, name):
    make, _, _, _, options = FAKES[name]
    alone, inner = make(), make()

    def play(env):
        policy, seen, waiting = policy_of(alone), [], np.zeros(N, bool)
        observation = env.get_observations() if hasattr(env, "get_observations") else env.reset()
        for _ in range(40):
            state = observation[0] if isinstance(observation, tuple) else observation
            actions = policy(state)
            if hasattr(env, "step_async"):
                env.step_async(actions)
                observation = env.step_wait()
            else:
                observation = env.step(actions)
            seen.append([_plain(item) for item in observation])
            if alone.__dict__.get("mode") == "disabled":
                waiting = observation[2] | observation[3]
                if waiting.any():
                    observation = env.reset(options={"reset_mask": waiting})
        return seen

    with RecordingWrapper(inner, tmp_path, **options) as wrapper:
        assert isinstance(wrapper, type(inner)) and wrapper.num_envs == N
        with pytest.raises(AttributeError):
            wrapper.not_there  # noqa: B018
        wrapper.episode_length_buf = 7
        assert inner.episode_length_buf == 7
        assert play(wrapper) == play(alone)
        wrapper.close()
    wrapper.close()
    assert (
        sum(trajectory.length for trajectory in check(tmp_path, name))
        == wrapper.rollout_writer.num_frames
        > 20 * N
    )


def _plain(value):
    if hasattr(value, "items"):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return ["tensor", value.dtype, value.tolist()]
    return (
        ["array", value.dtype, _plain(value.tolist())] if isinstance(value, np.ndarray) else value
    )


class FourValues(GymForm):
    def step(self, actions):
        observation, rewards, terminated, truncated, infos = super().step(actions)
        return observation, rewards, terminated | truncated, infos


@pytest.mark.parametrize("form", [GymForm, FourValues, IsaacGym])
def test_an_env_without_known_resets_raises_and_asks_for_autoreset(tmp_path, form):
    env = form()
    with pytest.raises(UsageError) as caught:
        record_demonstrations(env, policy_of(env), tmp_path, min_timesteps=100, show_progress=False)
    assert "autoreset='next_step', 'same_step' or 'disabled'" in str(caught.value)
    assert {end_of(trajectory) for trajectory in trajectories_of(tmp_path)} == {"open"}
    with pytest.raises(
        UsageError,
        match="autoreset must be one of 'next_step', 'disabled', 'same_step', got 'nextstep'",
    ):
        RecordingWrapper(env, tmp_path / "x", autoreset="nextstep")
    assert not (tmp_path / "x").exists()


def test_a_reset_in_mid_episode_leaves_an_open_trajectory(tmp_path):
    env, closed = SB3(), []
    env.close = lambda: closed.append("env")
    with RecordingWrapper(env, tmp_path) as wrapper:
        wrapper.reset()
        for number in range(9):
            wrapper.step(policy_of(env)(wrapper.reset() if number == 4 else env.memory.copy()))
    assert closed == ["env"]
    actual = check(tmp_path, "stable-baselines3", has_all=False)
    assert sum(item.length for item in actual) == 9 * N
    assert [item.length for item in actual if item.env == 2][:2] == [4, 5], (
        "4 of 5 frames, then the next episode"
    )


def test_a_step_before_the_first_reset_raises(tmp_path):
    with (
        RecordingWrapper(SB3(), tmp_path) as wrapper,
        pytest.raises(UsageError, match="reset\\(\\) or get_obs"),
    ):
        wrapper.step(np.zeros((N, 2)))


@pytest.mark.parametrize("form", ["group", "tensor"])
def test_a_final_observation_of_the_policy_group_alone_is_recorded(tmp_path, form):
    class Partly(IsaacLab):
        def infos(self, done, success, last):
            return {
                "final_obs": {"policy": self.given(last)} if form == "group" else self.given(last)
            }

    env = Partly("torch")
    record_demonstrations(env, policy_of(env), tmp_path, min_trajectories=8, show_progress=False)
    for trajectory in check_frames(tmp_path):
        assert trajectory.finals["observation"].tolist() == [
            *trajectory.column("observation")[0, :2].tolist(),
            trajectory.length,
        ]


@pytest.mark.parametrize("form", ["mask", "list"])
def test_only_ends_without_final_observation_have_no_final_row(tmp_path, form):
    class Partly(SB3 if form == "list" else ManiSkill):
        def advance(self, actions, envs=slice(None)):
            rewards, *_, last = super().advance(actions, envs)
            done = self.t == 3
            return rewards, done, done & False, done, last

        def infos(self, done, success, last):
            actual = super().infos(done, success, last)
            return actual | (
                {"_final_observation": self.given(done & (np.arange(N) != 1))} if done.any() else {}
            )

        def step_wait(self):
            *values, infos = super().step_wait()
            infos[1].pop("terminal_observation", None)
            return *values, infos

    env = Partly(*([] if form == "list" else ["torch"]))
    record_demonstrations(
        env, policy_of(env), tmp_path, min_trajectories=6, success_only=True, show_progress=False
    )
    actual = check_frames(tmp_path)
    assert len(actual) == 6
    for trajectory in actual:
        assert trajectory.length == 3 and end_of(trajectory) == "terminated"
        assert (trajectory.finals is None) == (trajectory.env == 1)
        if trajectory.finals:
            assert trajectory.finals["observation"].tolist() == [
                *trajectory.column("observation")[0, :2].tolist(),
                3,
            ]


def check_frames(folder):
    """Return the episodes that ended, after a check that all their frames exist."""
    actual = [trajectory for trajectory in trajectories_of(folder) if end_of(trajectory) != "open"]
    for item in actual:
        state = item.column("observation")
        assert state.tolist() == [[item.env, state[0, 1], t] for t in range(item.length)]
        assert item.column("action").tolist() == state[:, 1:].tolist()
    return actual


@pytest.mark.parametrize("name", ["maniskill", "gymnasium 0.29", "stable-baselines3"])
def test_success_is_read_from_every_form_of_infos(tmp_path, name):
    env = FAKES[name][0]()
    options = {"min_trajectories": 8, "show_progress": False}
    summary = record_demonstrations(
        env, policy_of(env), tmp_path / "a", success_only=True, **options
    )
    actual = check(tmp_path / "a", name, has_all=False)
    assert len(actual) == summary.num_trajectories >= 8
    assert {int(trajectory.column("observation")[0, 1]) % 3 for trajectory in actual} == {1}
    assert {end_of(item) for item in actual} == {"terminated", "truncated"}, (
        "a timeout is no success by itself"
    )


def test_keep_chooses_episodes_by_their_summary(tmp_path):
    env, seen = ManiSkill("torch"), []

    def is_good(episode):
        return episode.total_reward >= 6 and not episode.truncated

    def keep(episode):
        seen.append(episode)
        return is_good(episode)

    record_demonstrations(
        env, policy_of(env), tmp_path, min_trajectories=5, keep=keep, show_progress=False
    )
    for item in seen:
        assert (
            item.total_reward == item.length * (item.length + 1) / 2
            and item.terminated != item.truncated
        )
        assert item.success == item.success_once and isinstance(item.success, bool)
    kept = [(item.env_id, item.length) for item in seen if is_good(item)]
    actual = check(tmp_path, "maniskill", has_all=False)
    assert sorted((item.env, item.length) for item in actual) == sorted(kept[: len(actual)])
    assert {end_of(item) for item in actual} == {"terminated"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": lambda episode: False, "max_dropped": 7}, "keep returned False"),
        (
            {"success_only": True, "success_key": "solved"},
            "infos have no 'solved' or 'is_solved', only ['elapsed_steps', 'success']",
        ),
        (
            {"success_only": True, "keep": lambda one: not one.success, "max_dropped": 9},
            "they ended without success or keep",
        ),
    ],
)
def test_a_recording_that_drops_every_episode_stops_with_the_reason(tmp_path, options, text):
    env = ManiSkill("torch")
    with pytest.raises(UsageError) as caught:
        record_demonstrations(
            env, policy_of(env), tmp_path, min_trajectories=1, show_progress=False, **options
        )
    assert text in str(caught.value)
    assert not trajectories_of(tmp_path)


def test_a_wrapped_loop_continues_without_successful_episodes(tmp_path):
    class Failing(ManiSkill):
        def advance(self, actions, envs=slice(None)):
            *values, success, last = super().advance(actions, envs)
            return *values, success & False, last

    def play(**options):
        env = Failing("torch")
        with RecordingWrapper(env, tmp_path, success_only=True, **options) as wrapper:
            observation, _ = wrapper.reset()
            for _ in range(2000):
                observation, *_ = wrapper.step(policy_of(env)(observation))
        assert wrapper.rollout_writer.num_trajectories == 0

    with pytest.warns(
        RolloutDataWarning,
        match="Nothing is recorded. 100. episodes in a row were dropped: they ended without",
    ) as seen:
        play()
    assert len(seen) == 1, "once"
    with pytest.raises(UsageError, match="500 episodes in a row were dropped"):
        play(max_dropped=500)


class Failing150:
    """150 environments. Each episode fails in its first step."""

    num_envs = 150

    def __init__(self, **info):
        self.info = info

    def reset(self, **_):
        return np.zeros((150, 1), np.float32), {}

    def step(self, actions):
        is_end = np.ones(150, bool)
        return np.zeros((150, 1), np.float32), np.zeros(150, np.float32), is_end, ~is_end, self.info


def test_a_recording_may_drop_10_episodes_of_each_environment_in_a_row(tmp_path):
    env = Failing150(success=np.zeros(150, bool))
    with pytest.raises(UsageError, match="1500 episodes in a row were dropped"):
        record_demonstrations(
            env, lambda observation: observation, tmp_path, min_trajectories=1, success_only=True,
            autoreset="same_step", show_progress=False,
        )  # fmt: skip


def test_a_wrapped_loop_stops_if_infos_never_have_the_success_key(tmp_path):
    wrapper = RecordingWrapper(Failing150(), tmp_path, success_only=True, autoreset="same_step")
    with (
        wrapper,
        pytest.raises(
            UsageError, match="1500 episodes in a row were dropped: infos have no 'success'"
        ),
    ):
        wrapper.reset()
        for _ in range(10):
            wrapper.step(np.zeros((150, 1), np.float32))


#: Fakes that return tensors and reset their environments themselves.
ON_A_GPU = [
    "isaac lab",
    "privileged",
    "maniskill",
    "rsl_rl",
    "old rsl_rl",
    "legged_gym",
    "tensors, next step",
]


@pytest.mark.each_value
@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
@pytest.mark.parametrize("lateness", [0, 6])
def test_steps_on_a_gpu_are_recorded_without_waiting(cuda_device, tmp_path, name, lateness):
    if cuda_device is not None:
        cuda_device.lateness = lateness
    make, _, _, _, options = FAKES[name]
    env = on_a_gpu(make)
    with RecordingWrapper(env, tmp_path, **options) as wrapper:
        observation = (
            wrapper.get_observations() if hasattr(env, "get_observations") else wrapper.reset()
        )
        for number in range(40):
            state = observation[0] if isinstance(observation, tuple) else observation
            while hasattr(state, "items"):
                state = next(
                    state[name] for name in ("policy", "state", "obs") if name in list(state.keys())
                )
            with no_waits():
                observation = wrapper.step(state[:, 1:])
            if number in (0, 7):
                assert wrapper.rollout_writer.num_frames > 0
        num_frames = wrapper.rollout_writer.num_frames
    assert sum(trajectory.length for trajectory in check(tmp_path, name)) == num_frames > 20 * N


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_tensors_on_a_gpu_are_not_moved(tmp_path, name):
    make, _, _, _, options = FAKES[name]
    env = on_a_gpu(make)

    def policy(observation):
        while hasattr(observation, "items"):
            names = list(observation.keys())
            observation = next(
                observation[name] for name in ("policy", "state", "obs") if name in names
            )
        return observation[:, 1:].cpu()

    record_demonstrations(env, policy, tmp_path, min_trajectories=6, show_progress=False, **options)
    check(tmp_path, name)
