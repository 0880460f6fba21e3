"""Notes of a recorded environment belong to the right episode, in every autoreset mode."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_data.writing.record_environments import RecordingWrapper, record_demonstrations
from tests.files.notes_there import notes_of
from tests.files.readback import end_of, trajectories_of

pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.files.test_recording import Counting, zeros


class Telling(Counting):
    """An environment that returns its task at a reset, and its success at an end."""

    def reset(self, *, seed=None, options=None):
        return super().reset()[0], {"task": f"{self.number} {self.episode}"}

    def step(self, action):
        *values, infos = super().step(action)
        return *values, {**infos, "solved": self.episode % 3 == 1} if values[2] or values[
            3
        ] else infos


@pytest.mark.parametrize("mode", [*AutoresetMode, "single"])
def test_task_success_and_seed_are_stored_with_their_episode(tmp_path, mode):
    envs = [lambda n=n: Telling(n) for n in range(3)]
    env = Telling(1) if mode == "single" else SyncVectorEnv(envs, autoreset_mode=mode)
    policy = (lambda _: np.zeros(2, np.float32)) if mode == "single" else zeros
    options = {"show_progress": False, "success_key": "solved", "durable": False}
    record_demonstrations(env, policy, tmp_path, min_trajectories=9, seed=7, **options)
    notes, store = notes_of(tmp_path)
    actual = [
        (notes.of(store, number), trajectory)
        for number, trajectory in enumerate(trajectories_of_index(store, tmp_path))
    ]
    assert len(actual) >= 9
    for message, item in actual:
        number, episode, _ = item.column("observation")[0].astype(int).tolist()
        expected = {"task": f"{number} {episode}"} | ({"seed": 7} if episode == 0 else {})
        if end_of(item) != "open":
            expected |= {"success": episode % 3 == 1}
        assert message == expected


def trajectories_of_index(store, folder):
    actual = {
        (trajectory.writer, trajectory.number): trajectory for trajectory in trajectories_of(folder)
    }
    return [actual[key] for key in store.index.keys(np.arange(len(store.index)))]


def test_a_task_of_all_envs_and_a_task_from_step_are_stored(tmp_path):
    env = Counting(2)
    wrapped = RecordingWrapper(env, tmp_path, durable=False)
    plain_step = env.step
    env.step = lambda action: (*plain_step(action)[:4], {"task": "told by step", "success": True})
    for _ in range(2):
        wrapped.reset(seed=[3])
        while not any(wrapped.step(np.zeros(2, np.float32))[2:4]):
            pass
    wrapped.reset()
    wrapped.close()
    notes, store = notes_of(tmp_path)
    assert [notes.of(store, n) for n in range(2)] == [
        {"seed": 3, "task": "told by step", "success": True}
    ] * 2
