"""Recording a policy: every autoreset mode and batched tensors produce the same true
trajectories.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rollout_data.writing.record_environments import RecordingWrapper, record_demonstrations
from storage.errors import UsageError
from tests.files.readback import end_of, trajectories_of

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402


class Counting(gymnasium.Env):
    """An environment that counts its steps.

    Episode k of env n has n + k % 3 + 2 steps; every second one is truncated.
    """

    def __init__(self, number=0, form="array", discrete=False):
        self.number, self.form, self.episode = number, form, -1
        box, count = spaces.Box(-1e6, 1e6, (3,), np.float32), spaces.Discrete(1000)
        forms = {
            "array": box,
            "dict": spaces.Dict(state=box, count=count),
            "tuple": spaces.Tuple((box, count, count)),
        }
        self.observation_space = forms[form]
        self.action_space = spaces.Discrete(7) if discrete else spaces.Box(-1, 1, (2,), np.float32)

    def observe(self):
        state = np.array([self.number, self.episode, self.t], np.float32)
        return {
            "array": state,
            "dict": {"state": state, "count": self.t},
            "tuple": (state, self.t, self.t),
        }[self.form]

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        is_end = self.t == self.number + self.episode % 3 + 2
        return (
            self.observe(),
            float(self.t),
            is_end and self.episode % 2 == 0,
            is_end and self.episode % 2 == 1,
            {},
        )


def make_envs(mode, num_envs=3, **options):
    makers = [lambda n=n: Counting(n, **options) for n in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def zeros(observation):
    return np.zeros((3, 2), np.float32)


#: Form of the observation -> names of the state and of the count.
NAMES = {
    "array": ("observation", None),
    "dict": ("observation/state", "observation/count"),
    "tuple": ("observation/0", "observation/1"),
}


def check_counting(folder, form="array"):
    actual = trajectories_of(folder)
    name, count = NAMES[form]
    for trajectory in actual:
        state = trajectory.column(name)
        episode = int(state[0, 1])
        assert (state[:, 0] == trajectory.env).all() and (state[:, 1] == episode).all()
        assert state[:, 2].tolist() == list(range(trajectory.length))
        assert trajectory.column("reward").tolist() == list(range(1, trajectory.length + 1))
        if end_of(trajectory) != "open":
            assert trajectory.length == trajectory.env + episode % 3 + 2
            assert end_of(trajectory) == ("terminated" if episode % 2 == 0 else "truncated")
            assert trajectory.finals[name].tolist() == [trajectory.env, episode, trajectory.length]
            assert count is None or trajectory.finals[count] == trajectory.length
    return actual


@pytest.mark.parametrize("form", ["array", "dict", "tuple"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_records_the_same_true_episodes(tmp_path, mode, form):
    summary = record_demonstrations(
        make_envs(mode, form=form), zeros, tmp_path, min_trajectories=12, show_progress=False
    )
    actual = check_counting(tmp_path, form)
    assert summary.num_trajectories == len(actual) >= 12
    assert summary.num_frames == sum(item.length for item in actual)
    for env in range(3):
        episodes = [item for item in actual if item.env == env]
        assert [int(episode.column(NAMES[form][0])[0, 1]) for episode in episodes] == list(
            range(len(episodes))
        )


def test_discrete_actions_are_recorded_as_executed(tmp_path):
    envs = make_envs(AutoresetMode.NEXT_STEP, discrete=True)
    record_demonstrations(
        envs, lambda obs: [[1], [2], [3]], tmp_path, min_timesteps=20, show_progress=False
    )
    for trajectory in trajectories_of(tmp_path):
        assert trajectory.column("action").dtype == np.int64
        assert (trajectory.column("action") == trajectory.env + 1).all()


@pytest.mark.parametrize("discrete", [True, False])
def test_actions_are_recorded_in_the_dtype_of_their_space(tmp_path, discrete):
    envs = make_envs(AutoresetMode.NEXT_STEP, discrete=discrete)
    rows = [1, 2, 3] if discrete else [[1.0, 0.5], [2.0, 0.5], [3.0, 0.5]]
    with RecordingWrapper(envs, tmp_path) as wrapper:
        wrapper.reset()
        for form in (
            tuple,
            list,
            np.array,
            torch.tensor,
            lambda actions: np.array(actions, np.float64),
        ):
            wrapper.step(form(rows))
    for trajectory in check_counting(tmp_path):
        action = trajectory.column("action")
        assert action.dtype == (np.int64 if discrete else np.float32)
        assert action.tolist() == [rows[trajectory.env]] * trajectory.length


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_reset_async_and_reset_wait_are_recorded(tmp_path, mode):
    envs = AsyncVectorEnv([lambda n=n: Counting(n) for n in range(3)], autoreset_mode=mode)
    with RecordingWrapper(envs, tmp_path) as wrapper:
        for number in range(12):
            over = np.array([True, number == 0, number == 0])
            if number in (0, 4):  # first all envs, then env 0 within an episode
                wrapper.reset_async(options={"reset_mask": over})
                wrapper.reset_wait()
            wrapper.step_async(np.zeros((3, 2), np.float32))
            *_, terminated, truncated, _ = wrapper.step_wait()
            if mode == AutoresetMode.DISABLED and (terminated | truncated).any():
                wrapper.reset_async(options={"reset_mask": terminated | truncated})
                wrapper.reset_wait()
    ends = {
        int(trajectory.column("observation")[0, 1]): end_of(trajectory)
        for trajectory in check_counting(tmp_path)
        if trajectory.env == 0
    }
    assert (
        sorted(ends) == list(range(len(ends)))
        and ends[1] == "open"
        and "open" not in (ends[0], ends[2])
    )


def test_actions_of_a_tuple_space_are_executed_as_a_tuple_and_recorded_by_number(tmp_path):
    class TwoHands(Counting):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Tuple(
                (spaces.Discrete(5), spaces.Box(-1, 1, (2,), np.float32))
            )

        def step(self, action):
            assert (
                isinstance(action, tuple) and int(action[0]) == 3 and action[1].dtype == np.float32
            )
            return super().step(action)

    envs = SyncVectorEnv([TwoHands] * 2)
    actions = ([3, 3], np.array([[0.25, -0.5]] * 2))
    record_demonstrations(
        envs, lambda observation: actions, tmp_path, min_timesteps=8, show_progress=False
    )
    for trajectory in trajectories_of(tmp_path):
        assert trajectory.column("action/0").tolist() == [3] * trajectory.length
        assert trajectory.column("action/1").tolist() == [[0.25, -0.5]] * trajectory.length


def test_a_torch_module_receives_a_tuple_of_tensors(tmp_path):
    class Policy(torch.nn.Module):
        def forward(self, observation):
            state, count, _ = observation
            assert state.shape == (3, 3) and count.shape == (3,)
            return torch.zeros(3, 2)

    envs = make_envs("SameStep", form="tuple")
    assert (
        record_demonstrations(
            envs, Policy(), tmp_path, min_timesteps=9, show_progress=False
        ).num_new_frames
        >= 9
    )


def test_a_torch_module_receives_tensors_of_its_dtype(tmp_path):
    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, 2)

        def act_inference(self, observation):
            return self.net(observation)

    policy = Policy()
    record_demonstrations(
        make_envs("NextStep"), policy, tmp_path, min_timesteps=9, show_progress=False
    )
    item = trajectories_of(tmp_path)[0]
    with torch.no_grad():
        expected = policy.net(torch.from_numpy(item.column("observation"))).numpy()
    np.testing.assert_allclose(item.column("action"), expected, rtol=1e-5)
    assert json.loads((tmp_path / "metadata.json").read_text())["policy"] == "Policy"


class TensorEnvs:
    """A batched simulator that writes observations, time-outs and clipped actions in place."""

    def __init__(self, num_envs=4, has_privileged=True, gives_finals=True):
        self.num_envs, self.has_privileged, self.gives_finals = (
            num_envs,
            has_privileged,
            gives_finals,
        )
        self.t = torch.zeros(num_envs)
        self.episode = torch.zeros(num_envs)
        self.obs = torch.zeros(num_envs, 3)

    def observe(self):
        self.obs[:] = torch.stack(
            [torch.arange(self.num_envs).float(), self.episode, self.t], dim=-1
        )
        return self.obs

    def reset(self):
        return self.observe(), self.get_privileged_observations()

    def get_observations(self):
        return self.observe()

    def get_privileged_observations(self):
        return self.obs.double() * 2 if self.has_privileged else None

    def step(self, actions):
        actions.clip_(-0.5, 0.5)
        self.t += 1
        infos = {}
        rewards = self.t[:, None].clone()
        done = self.t == torch.arange(self.num_envs) + self.episode % 3 + 2
        infos["time_outs"] = torch.ones(self.num_envs, dtype=torch.bool) & (self.episode % 2 == 1)
        if self.gives_finals:
            infos["final_observation"] = self.observe()[done].clone()
        self.t[done] = 0
        self.episode[done] += 1
        return (
            self.observe(),
            self.get_privileged_observations(),
            rewards,
            done.to(torch.uint8),
            infos,
        )


@pytest.mark.parametrize("has_privileged", [False, True])
def test_the_batched_tensor_convention_is_recorded(tmp_path, has_privileged):
    envs = TensorEnvs(has_privileged=has_privileged)
    summary = record_demonstrations(
        envs,
        lambda obs: torch.full((4, 2), 0.9),
        tmp_path,
        min_trajectories=15,
        show_progress=False,
    )
    actual = trajectories_of(tmp_path)
    assert len(actual) == summary.num_trajectories
    for trajectory in actual:
        state = trajectory.column("observation")
        assert state[:, 2].tolist() == list(range(trajectory.length))
        assert (trajectory.column("action") == np.float32(0.9)).all(), (
            "the policy's action, not the simulator's clipped one"
        )
        assert trajectory.column("reward").shape == (trajectory.length, 1)
        if has_privileged:
            np.testing.assert_array_equal(
                trajectory.column("privileged_observation"), state.astype(np.float64) * 2
            )
        if end_of(trajectory) != "open":
            assert end_of(trajectory) == ("truncated" if state[0, 1] % 2 else "terminated")
            assert trajectory.finals["observation"][2] == trajectory.length


def test_recording_continues_an_existing_folder(tmp_path):
    first = record_demonstrations(
        make_envs("NextStep"), zeros, tmp_path, min_trajectories=5, show_progress=False
    )
    again = record_demonstrations(
        make_envs("NextStep"), zeros, tmp_path, min_trajectories=20, show_progress=False
    )
    assert again.num_trajectories == first.num_trajectories + again.num_new_trajectories >= 20
    assert len(trajectories_of(tmp_path)) == again.num_trajectories
    enough = record_demonstrations(
        make_envs("NextStep"), zeros, tmp_path, min_trajectories=20, show_progress=False
    )
    assert enough.num_steps == 0 and enough.num_frames == again.num_frames


def test_a_simulator_without_infos_is_recorded(tmp_path):
    class Silent(TensorEnvs):
        def step(self, actions):
            return *super().step(actions)[:4], None

    record_demonstrations(
        Silent(),
        lambda observation: torch.zeros(4, 2),
        tmp_path,
        min_trajectories=4,
        show_progress=False,
    )
    assert {end_of(trajectory) for trajectory in trajectories_of(tmp_path)} <= {
        "terminated",
        "open",
    }


def test_unfinished_trajectories_do_not_count_for_the_goal_of_the_next_recording(tmp_path):
    def record(goal):
        return record_demonstrations(
            make_envs("NextStep"), zeros, tmp_path, min_trajectories=goal, show_progress=False
        )

    first = record(6)
    num_open = sum(end_of(trajectory) == "open" for trajectory in trajectories_of(tmp_path))
    assert num_open and record(first.num_trajectories).num_new_trajectories >= num_open
    assert (
        sum(end_of(trajectory) != "open" for trajectory in trajectories_of(tmp_path))
        >= first.num_trajectories
    )


def test_continuing_a_folder_with_the_same_seed_records_other_episodes(tmp_path):
    class Drawing(Counting):
        def reset(self, *, seed=None, options=None):
            gymnasium.Env.reset(self, seed=seed)
            self.drawn = self.np_random.random(3).astype(np.float32)
            return super().reset()

        def observe(self):
            return self.drawn

    def starts(folder):
        envs = SyncVectorEnv([Drawing] * 3)
        record_demonstrations(
            envs, zeros, folder, min_trajectories=starts.goal, seed=5, show_progress=False
        )
        starts.goal += 9
        return [
            tuple(trajectory.column("observation")[0]) for trajectory in trajectories_of(folder)
        ]

    starts.goal = 9
    once = starts(tmp_path / "a")
    twice = starts(tmp_path / "a")
    assert len(set(twice)) == len(twice) > len(once)
    starts.goal = 9
    assert starts(tmp_path / "b") == once


def test_min_timesteps_counts_no_unfinished_trajectories(tmp_path):
    summary = record_demonstrations(
        make_envs("SameStep"),
        zeros,
        tmp_path,
        min_timesteps=100,
        keep_unfinished=False,
        show_progress=False,
    )
    actual = check_counting(tmp_path)
    assert all(end_of(item) != "open" for item in actual)
    assert sum(item.length for item in actual) == summary.num_frames >= 100


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_success_only_keeps_the_episodes_with_success_in_infos(tmp_path, mode):
    class Told(Counting):
        def step(self, action):
            *values, terminated, truncated, _ = super().step(action)
            return *values, terminated, truncated, {"success": bool(terminated)}

    envs = SyncVectorEnv([lambda n=n: Told(n) for n in range(3)], autoreset_mode=mode)
    options = {
        "min_trajectories": 6,
        "success_only": True,
        "show_progress": False,
        "block_bytes": 200,
    }
    record_demonstrations(envs, zeros, tmp_path, **options)
    actual = check_counting(tmp_path)
    assert len(actual) >= 6 and {end_of(item) for item in actual} == {"terminated"}
    assert json.loads((tmp_path / "metadata.json").read_text())["success_traj_only"] is True


def test_ctrl_c_publishes_what_was_recorded(tmp_path):
    count = 0

    def policy(observation):
        nonlocal count
        count += 1
        if count == 30:
            raise KeyboardInterrupt
        return zeros(observation)

    with pytest.raises(KeyboardInterrupt):
        record_demonstrations(
            make_envs("SameStep"), policy, tmp_path, min_timesteps=10**6, show_progress=False
        )
    assert sum(trajectory.length for trajectory in check_counting(tmp_path)) == 29 * 3
    assert not list(tmp_path.glob(".rollout_*")) and not list(tmp_path.glob(".tmp_*"))


def test_segments_and_codecs_reach_the_files(tmp_path):
    record_demonstrations(
        TensorEnvs(has_privileged=False),
        lambda obs: torch.zeros(4, 2),
        tmp_path,
        min_timesteps=8,
        obs_segments={"where": (1,), "image": (1, 2)},
        obs_disassemble_mapping={"image": "normalized_image"},
        metadata={"frame_rate_hz": 50},
        show_progress=False,
    )
    document = json.loads((tmp_path / "metadata.json").read_text())
    assert document["obs_segments"] == {"where": [1], "image": [1, 2]}
    assert document["obs_disassemble_mapping"] == {"image": "normalized_image"}
    assert (document["env"], document["frame_rate_hz"], document["min_timesteps"]) == (
        "TensorEnvs",
        50,
        8,
    )
    assert trajectories_of(tmp_path)[0].column("observation/image").shape[1:] == (1, 2)


@pytest.mark.parametrize(
    ("env", "policy", "text"),
    [
        (object(), zeros, "a vectorized environment with num_envs and step()"),
        (
            TensorEnvs(),
            3,
            "policy must be a callable, or an object with act_inference or act, got int.",
        ),
    ],
)
def test_an_environment_that_cannot_be_recorded_raises_with_the_reason(tmp_path, env, policy, text):
    with pytest.raises(UsageError) as caught:
        record_demonstrations(env, policy, tmp_path / "x", min_timesteps=1)
    assert text in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_a_recording_needs_a_goal(tmp_path):
    with pytest.raises(UsageError, match="min_timesteps or min_trajectories must be above 0"):
        record_demonstrations(TensorEnvs(), zeros, tmp_path)


class Single(gymnasium.Env):
    """A single environment.

    Episode k has k % 3 + 2 frames; every second one times out. Observations are written in place.
    """

    def __init__(self, form="array"):
        self.inner = Counting(form=form)
        self.observation_space, self.action_space = self.inner.observation_space, spaces.Discrete(5)
        self.is_over, self.seeds = True, []

    def reset(self, *, seed=None, options=None):
        self.is_over = False
        self.seeds.append(seed)
        return self.inner.reset()

    def step(self, action):
        assert not self.is_over and self.action_space.contains(action)
        observation, reward, terminated, truncated, _ = self.inner.step(action)
        self.is_over = terminated or truncated
        return observation, reward, terminated, truncated, {"is_success": terminated}


@pytest.mark.parametrize("form", ["array", "dict", "tuple"])
def test_a_single_environment_is_recorded_as_a_batch_of_one(tmp_path, form):
    env = Single(form)
    summary = record_demonstrations(
        env, lambda observation: 3, tmp_path, min_trajectories=7, seed=5, show_progress=False
    )
    actual = check_counting(tmp_path, form)
    assert summary.num_trajectories == len(actual) == 7 and env.seeds == [5] + [None] * 7
    assert [int(trajectory.column(NAMES[form][0])[0, 1]) for trajectory in actual] == list(
        range(7)
    ), "each from its first frame on"
    for item in actual:
        assert (
            item.column("action").tolist() == [3] * item.length
            and item.column("action").dtype == np.int64
        )


def test_the_wrapper_of_a_single_environment_returns_its_values_unchanged(tmp_path):
    def play(env):
        seen = [env.reset(seed=1)]
        for number in range(20):
            seen.append(env.step(number % 2))
            if seen[-1][2] or seen[-1][3] or number == 12:
                seen.append(env.reset())
        return [
            [item.tolist() if isinstance(item, np.ndarray) else item for item in values]
            for values in seen
        ]

    with RecordingWrapper(
        gymnasium.wrappers.TimeLimit(Single(), 9), tmp_path / "a", success_only=True
    ) as wrapper:
        assert play(wrapper) == play(gymnasium.wrappers.TimeLimit(Single(), 9))
    assert {end_of(trajectory) for trajectory in check_counting(tmp_path / "a")} == {"terminated"}
    with RecordingWrapper(Single(), tmp_path / "b") as wrapper:
        play(wrapper)
    actual = check_counting(tmp_path / "b")
    assert sum(entry.length for entry in actual) == 20
    assert [end_of(entry) for entry in actual].count("open") == 2, (
        "the one that was cut, and the last"
    )


def test_real_single_environments_are_recorded(tmp_path):
    env = gymnasium.make("CartPole-v1")
    record_demonstrations(
        env,
        lambda state: int(state[2] > 0),
        tmp_path / "a",
        min_trajectories=3,
        seed=0,
        show_progress=False,
    )
    expected = gymnasium.make("CartPole-v1")
    state, _ = expected.reset(seed=0)
    first = trajectories_of(tmp_path / "a")[0]
    for t in range(first.length):
        assert first.column("observation")[t].tolist() == state.tolist()
        state, reward, *_ = expected.step(int(state[2] > 0))
        assert first.column("action")[t] == int(first.column("observation")[t][2] > 0)
        assert first.column("reward")[t] == reward
    assert first.finals["observation"].tolist() == state.tolist()
    policy = torch.nn.Linear(3, 1)
    record_demonstrations(
        gymnasium.make("Pendulum-v1"),
        policy,
        tmp_path / "b",
        min_timesteps=250,
        show_progress=False,
    )
    action = trajectories_of(tmp_path / "b")[0].column("action")
    assert action.shape == (200, 1) and action.dtype == np.float32


def test_a_single_environment_with_autoreset_needs_the_argument_autoreset(tmp_path):
    def play(env):
        env.reset()
        for _ in range(9):
            env.step(0)

    text = r"Call reset\(\) before step\(\), or pass autoreset='next_step' if"
    wrapper = RecordingWrapper(gymnasium.wrappers.Autoreset(Single()), tmp_path / "a")
    with wrapper, pytest.raises(UsageError, match=text):
        play(wrapper)
    with RecordingWrapper(
        gymnasium.wrappers.Autoreset(Single()), tmp_path / "b", autoreset="next_step"
    ) as wrapper:
        play(wrapper)
    assert [trajectory.length for trajectory in check_counting(tmp_path / "b")] == [2, 3, 2]
