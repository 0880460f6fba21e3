"""Fakes of the interfaces of simulators. Their frames are functions of env, episode and step."""

from __future__ import annotations

import numpy as np
import torch

from storage.core.memory import sent

N = 3


class Sim:
    """A state is (env, episode, step). The privileged state is 0.5 higher. Odd episodes time out.

    Episode k of env n has n + k % 3 + 2 frames, and is a success where k % 3 is 1. Observations are
    written in place.
    """

    def __init__(self, library="numpy"):
        self.num_envs, self.library, self.made = N, library, []
        self.episode, self.t = np.zeros(N, int), np.zeros(N, int)
        self.memory, self.is_over = self.given(np.zeros((N, 3), np.float32)), np.zeros(N, bool)

    def given(self, array):
        return torch.from_numpy(np.array(array)) if self.library == "torch" else np.array(array)

    def state(self):
        return np.stack([np.arange(N), self.episode, self.t], -1).astype(np.float32)

    def observe(self):
        self.memory[:] = self.given(self.state())
        return self.memory

    def restart(self, envs):
        self.episode[envs] += 1
        self.t[envs] = 0
        self.is_over[envs] = False

    def advance(self, actions, envs=slice(None)):
        """Step. Return rewards, terminations, timeouts, successes, and the state before any
        reset.
        """
        assert isinstance(actions, torch.Tensor if self.library == "torch" else np.ndarray)
        assert tuple(actions.shape) == (N, 2)
        self.t[envs] += 1
        done = (self.t == np.arange(N) + self.episode % 3 + 2) & ~self.is_over
        is_late = self.episode % 2 == 1
        return (
            self.t.astype(np.float32),
            done & ~is_late,
            done & is_late,
            done & (self.episode % 3 == 1),
            self.state(),
        )


class GymForm(Sim):
    single_action_space = None

    def __init__(self, library="numpy", mode="same_step", says=None):
        super().__init__(library)
        self.single_action_space, self.mode = object(), mode
        self.metadata = {} if says is None else {"autoreset_mode": says}

    def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        mask = options.pop("reset_mask", np.ones(N, bool))
        assert not options and type(mask) is (
            torch.Tensor
            if self.library == "torch" and len(mask) and not self.is_first
            else np.ndarray
        )
        self.is_first = False
        self.restart(np.asarray(mask))
        return self.observe(), {}

    is_first = True

    def infos(self, done, success, last):
        return {}

    def step(self, actions):
        waiting = self.is_over.copy() if self.mode == "next_step" else np.zeros(N, bool)
        rewards, terminated, truncated, success, last = self.advance(actions, ~waiting)
        done, infos = terminated | truncated, {}
        if self.mode == "next_step":
            self.restart(waiting)
            rewards[waiting] = 0
            terminated, truncated, done = (
                flag & ~waiting for flag in (terminated, truncated, done)
            )
        if self.mode == "same_step":
            self.restart(done)
            infos = self.infos(done, success, last)
        self.is_over |= done if self.mode != "same_step" else False
        return (self.observe(), *map(self.given, (rewards, terminated, truncated)), infos)


class IsaacLab(GymForm):
    """Groups of torch tensors, a reset in the same step, no final observation."""

    def observe(self):
        return {"policy": super().observe(), "critic": super().observe() + 0.5}

    def infos(self, done, success, last):
        return {"log": {"reward": 0.0}}


class Privileged(IsaacLab):
    def observe(self):
        state = Sim.observe(self)
        return {"state": state, "rgb": state.to(torch.uint8)[:, None], "privileged": state + 0.5}

    def infos(self, done, success, last):
        state = self.given(last)
        final = {"state": state, "rgb": state.to(torch.uint8)[:, None], "privileged": state + 0.5}
        return {"final_obs": final, "_final_obs": self.given(done)}


class ManiSkill(GymForm):
    """Final observations of all envs with a mask. Infos are those after the reset."""

    def infos(self, done, success, last):
        if not done.any():
            return {"success": self.given(success)}
        final_info = {"success": self.given(success), "elapsed_steps": self.given(self.t)}
        actual = {"final_observation": self.given(last), "_final_observation": self.given(done)}
        return {
            "success": self.given(done),  # of the next episode
            "final_info": final_info,
            "_final_info": actual["_final_observation"],
            **actual,
        }


class Gymnasium029(GymForm):
    """Arrays of objects, with None for envs without an end."""

    def infos(self, done, success, last):
        if not done.any():
            return {}
        final, info = np.full(N, None, object), np.full(N, None, object)
        for env in np.flatnonzero(done):
            final[env], info[env] = last[env], {"success": bool(success[env])}
        return {
            "final_observation": final,
            "_final_observation": done,
            "final_info": info,
            "_final_info": done,
        }


class SB3(Sim):
    """Four values and a list of infos. `action_space` is that of one env."""

    def reset(self):
        self.restart(slice(None))
        return self.observe()

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        rewards, terminated, truncated, success, last = self.advance(self.actions)
        infos = [
            {"TimeLimit.truncated": bool(late), "is_success": bool(good)}
            for late, good in zip(truncated, success, strict=True)
        ]
        for env in np.flatnonzero(terminated | truncated):
            infos[env]["terminal_observation"] = last[env].copy()
        self.restart(terminated | truncated)
        return self.observe().copy(), rewards, terminated | truncated, infos

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()


class TensorDict:
    """The used part of a TensorDict: items by name, no iteration over names."""

    def __init__(self, parts):
        self.parts = parts

    def __getitem__(self, name):
        return self.parts[name]

    def keys(self):
        return self.parts.keys()

    def values(self):
        return self.parts.values()

    def items(self):
        return self.parts.items()


class RslRl(Sim):
    """Four values, observations in groups of a TensorDict, `time_outs` with stale values."""

    num_actions, device = 2, "cpu"

    def __init__(self, library="torch"):
        super().__init__(library)
        self.episode_length_buf = torch.zeros(N)
        self.restart(slice(None))

    def get_observations(self):
        state = self.observe()
        return TensorDict({"policy": state, "critic": state + 0.5})

    def step(self, actions):
        actions.clip_(-0.5, 0.5)
        rewards, terminated, truncated, _, _ = self.advance(actions)
        extras = {"time_outs": torch.from_numpy(self.episode % 2 == 1), "log": {}}
        self.restart(terminated | truncated)
        done = self.given((terminated | truncated).astype(np.int64))
        return self.get_observations(), self.given(rewards), done, extras


class OldRslRl(RslRl):
    """The critic's observations in the extras."""

    def get_observations(self):
        state = self.observe()
        return state, {"observations": {"critic": state + 0.5}}

    def step(self, actions):
        _, rewards, done, extras = super().step(actions)
        state, beside = self.get_observations()
        return state, rewards, done, {**extras, **beside}


class IsaacGym(GymForm):
    """Four values, observations in a dict, `time_outs`.

    An env is reset in the step after its last step.
    """

    def __init__(self):
        super().__init__("torch", "next_step")

    def reset(self):
        return {"obs": super().reset()[0]}

    def step(self, actions):
        observation, rewards, terminated, truncated, infos = super().step(actions)
        return (
            {"obs": observation},
            rewards,
            terminated | truncated,
            {**infos, "time_outs": truncated},
        )


class LeggedGym(RslRl):
    """Five values. The second is the privileged observation."""

    def get_observations(self):
        return self.observe()

    def get_privileged_observations(self):
        return self.observe() + 0.5

    def step(self, actions):
        state, rewards, done, extras = super().step(actions)
        return state, self.get_privileged_observations(), rewards, done, extras


def on_a_gpu(make):
    """Return a fake whose tensors are on a GPU. It copies them to the GPU without waiting."""
    env = make()

    class OnDevice(type(env)):
        def given(self, array):
            return sent(torch.from_numpy(np.array(array)), torch.device("cuda"))

        def advance(self, actions, envs=slice(None)):
            assert actions.is_cuda
            return super().advance(actions, envs)

    env.__class__ = OnDevice
    env.memory = env.memory.cuda()
    return env
