"""Recording: `RecordingWrapper` around an env in any loop, and `record_demonstrations`, which is such a loop.

One rule: what an env's step means is `environments.py`'s; here is decided which episodes are kept; the rest is the
writer's.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from storage.core import arguments
from storage.core.late_copies import has_device_tensors
from storage.core.memory import as_given, on_host
from storage.core.threads import Owned, Owner
from storage.errors import RolloutDataWarning, UsageError

from ..blocks.annotation_table import TASK
from ..blocks.block_folder import BlockFolder
from ..blocks.block_header import TERMINATED, TRUNCATED
from .environments import Simulator, joined, mapped, told
from .rollout_writer import RolloutWriter
from .step_infos import needed_infos

_RECORD = "call rollout_data.record_demonstrations"
#: Methods of an env that are recorded.
_RECORDED = ("reset", "reset_async", "reset_wait", "get_observations", "step", "step_async", "step_wait")


@dataclass(frozen=True)
class EpisodeSummary:
    """An episode that has ended, as `keep` is asked about it.

    Attributes:
        total_reward: The sum of its rewards (of the first reward).
        success: What infos told of its last step; None if nothing.
        success_once: Whether they told a success of any of its steps.
    """

    env_id: int
    length: int
    total_reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    success_once: bool


@dataclass(frozen=True)
class RecordingSummary:
    """What a call of `record_demonstrations` did.

    Attributes:
        data_dir: Where the data are.
        num_frames, num_trajectories: In the dataset now, what was there before included.
        num_new_frames, num_new_trajectories: Recorded and kept by this call.
        num_steps: Steps of all envs that it took.
        num_nonfinite_rewards: NaN or infinite rewards among them.
        mean_return: Mean sum of rewards (of the first reward) over all trajectories that ended, kept
            or not; NaN if none did.
        duration_s: Wall-clock time.
    """

    data_dir: Path
    num_frames: int
    num_trajectories: int
    num_new_frames: int
    num_new_trajectories: int
    num_steps: int
    num_nonfinite_rewards: int
    mean_return: float
    duration_s: float


#: Arguments of the writer and its recorder that are not options.
_NO_OPTIONS = ("simulator", "num_envs", "is_in_loop")


class RecordingWrapper(Owned):
    """An env whose resets and steps are recorded, for any loop, which sees exactly what the env returns.

    All other attributes and methods are the env's, and `isinstance` takes it for the env. A reset in the middle of an
    episode leaves an open trajectory. Actions are recorded in the dtype of the env's space. Noted of an episode are the
    `seed` of its reset, as it was given, the first text that infos have as `task` beside one of its observations, and
    the `success` that they tell of its last step. `close()` closes `rollout_writer`, the writer, then the env.

    Steps of a simulator on a GPU are recorded without waiting for it, see `RolloutWriter.add`: a later call raises
    their errors.

    Args:
        env: As for `record_demonstrations`.
        data_dir: The data folder.
        autoreset: When an env is reset whose episode has ended: "next_step" (its next step only resets it),
            "same_step" (infos have the final observation, or none is recorded) or "disabled" (the loop resets it).
            None reads it from `metadata["autoreset_mode"]`, or from what is returned when an episode ends; a single
            env is "disabled" then.
        options: Of `RolloutWriter`, and these:
            `success_only`: keep only episodes of whose last step infos tell a success.
            `keep`: keep only episodes of whose `EpisodeSummary` this is true.
            `success_key="success"`: what tells success in infos, or `is_<key>`; in `final_info`, where that is.
            `max_dropped`: raise when this many episodes in a row were dropped. Left out, it is 1000, or 10 per env if
            that is more; a `RecordingWrapper` then warns once and goes on, unless infos never told a success.

    Raises:
        UsageError: An argument is wrong; from a step: it cannot be recorded, or `max_dropped` episodes were dropped.
    """

    __class__ = property(lambda self: type(self.env))

    def __init__(
        self, env: Any, data_dir: str | os.PathLike[str], *, autoreset: str | None = None, **options: Any
    ) -> None:
        takers = (RecordingWrapper.__init__, _Recorder, RolloutWriter)
        arguments.options_of("RecordingWrapper", options, *takers, but=_NO_OPTIONS)
        recorder = _Recorder(
            Simulator("create a RecordingWrapper", env, autoreset), data_dir, is_in_loop=True, **options
        )
        self.__dict__.update(env=env, rollout_writer=recorder.writer, _recorder=recorder, _is_open=True)
        self.__dict__["_owner"] = Owner(f"a recording into {str(data_dir)!r}")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["env"], name)
        return partial(self._recorded_call, name) if name in _RECORDED else value

    def _recorded_call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env and record what it does; errors name this method."""
        try:
            return self._recorder.call(name, *args, **kwargs)
        except UsageError as error:
            error.call = f"RecordingWrapper.{name}"
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.env, name, value)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the writer, then the env. May be called twice."""
        self._owner.check()
        is_open, self.__dict__["_is_open"] = self._is_open, False
        try:
            self.rollout_writer.close()
        finally:
            result = self.env.close(*args, **kwargs) if is_open and hasattr(self.env, "close") else None
        return result


def record_demonstrations(
    env: Any,
    policy: Any,
    data_dir: str | os.PathLike[str],
    *,
    min_timesteps: int = 0,
    min_trajectories: int = 0,
    keep_unfinished: bool = True,
    metadata: Mapping[str, Any] | None = None,
    seed: int | None = None,
    show_progress: bool = True,
    autoreset: str | None = None,
    **options: Any,
) -> RecordingSummary:
    """Record a policy until a dataset holds a number of frames and trajectories.

    A folder that holds data already is continued: its frames and the trajectories that ended count. The parts of a
    `spaces.Tuple` are recorded under the names "0", "1", ...

    Args:
        env: A vectorized env of gymnasium (any autoreset mode), stable-baselines3, ManiSkill, Isaac Lab, rsl_rl or
            Isaac Gym, or of such an interface: `num_envs`, and `step(actions)` that returns gymnasium's five values,
            `obs, rewards, dones, infos` or `obs, privileged_obs, rewards, dones, infos`, as arrays or tensors. The
            groups `critic` and `privileged` of a dict observation are the privileged observation; a group `policy`
            that is alone beside them is the observation. Or a single `gymnasium.Env`, recorded as one env: the policy
            gets its observation and gives its action, both without an axis for envs.
        policy: Observation -> actions; or an object with `act_inference` or `act`. A torch module gets
            tensors, anything else the observation as the environment gives it.
        data_dir: The data folder.
        min_timesteps: Frames that the dataset holds at least when this returns.
        min_trajectories: Trajectories that it holds at least, those in progress not counted.
        keep_unfinished: Keep the trajectories in progress at the end as open ones.
        metadata: More context for metadata.json.
        seed: Of the environments' first reset. A folder that is continued makes another seed of it and of the
            number of trajectories that it holds, so that the same call does not record the same episodes again.
        show_progress: Draw a progress bar.
        autoreset, options: As of `RecordingWrapper`. Where `autoreset` is "disabled", this function resets the envs.

    Returns:
        A summary. `Ctrl-C` publishes what was recorded and then raises `KeyboardInterrupt` as usual; so does an error.
    """
    takers = (record_demonstrations, _Recorder, RolloutWriter)
    arguments.options_of("record_demonstrations", options, *takers, but=_NO_OPTIONS)
    if metadata is not None:
        arguments.instance(_RECORD, "metadata", metadata, "as a mapping", Mapping)
    for name, value in (("min_timesteps", min_timesteps), ("min_trajectories", min_trajectories)):
        arguments.real(_RECORD, name, value, "as a number", lambda _: True)
    seed = None if seed is None else arguments.seed(_RECORD, "seed", seed)
    keep_unfinished = arguments.flag(_RECORD, "keep_unfinished", keep_unfinished)
    data_dir = arguments.path(_RECORD, "data_dir", data_dir)
    if min_timesteps <= 0 and min_trajectories <= 0:
        raise UsageError(_RECORD, "", "min_timesteps or min_trajectories above 0", "neither")
    simulator, (act, policy_name) = Simulator(_RECORD, env, autoreset), _policy(policy)
    start_s = time.monotonic()
    frames_before, trajectories_before, ended_before = _count(Path(data_dir))
    goals = (min_timesteps - frames_before, min_trajectories - ended_before)
    if max(goals) <= 0:
        before = Path(data_dir), frames_before, trajectories_before
        return RecordingSummary(*before, 0, 0, 0, 0, math.nan, time.monotonic() - start_s)
    if seed is not None and seed >= 0 and trajectories_before:
        seed = int(np.random.SeedSequence((seed, trajectories_before)).generate_state(1)[0] >> 1)
    observation = simulator.start(seed)
    context = {"policy": policy_name, "min_timesteps": min_timesteps, "min_episodes": min_trajectories}
    context |= {"use_critic_obs": "privileged_observation" in simulator.seen, **(metadata or {})}
    recorder = _Recorder(simulator, data_dir, metadata=context, **options)
    recorder.hear(seed, np.ones(simulator.num_envs, bool))
    num_steps, shown, unit = (0, 1, " trajectories") if goals[1] > 0 else (0, 0, " frames")
    bar = tqdm(total=goals[shown], desc="recording", unit=unit, disable=not show_progress)
    with recorder.writer as writer, bar:
        while True:
            have = writer.num_frames if keep_unfinished else writer.num_finished_frames, writer.num_trajectories
            bar.update(min(have[shown], goals[shown]) - bar.n)
            if have[0] >= goals[0] and have[1] >= goals[1]:
                break
            observation, *_ = recorder.call("step", simulator.executed(act(observation)))
            writer.settle()  # the loop asks what has ended and how much there is
            if (waiting := simulator.reset_arguments) is not None:
                observation, *_ = recorder.call("reset", **waiting)
            num_steps += 1
        if not keep_unfinished:
            writer.discard(np.arange(simulator.num_envs))
    return RecordingSummary(
        data_dir=Path(data_dir),
        num_frames=frames_before + writer.num_frames,
        num_trajectories=trajectories_before + writer.num_trajectories,
        num_new_frames=writer.num_frames,
        num_new_trajectories=writer.num_trajectories,
        num_steps=num_steps,
        num_nonfinite_rewards=writer.num_nonfinite_rewards,
        mean_return=recorder.mean_return,
        duration_s=time.monotonic() - start_s,
    )


class _Recorder:
    """Write what an env shows between resets and steps. Arguments are those of `RecordingWrapper`."""

    def __init__(
        self,
        simulator: Simulator,
        data_dir: str | os.PathLike[str],
        *,
        success_only: bool = False,
        keep: Callable[[EpisodeSummary], Any] | None = None,
        success_key: str = "success",
        max_dropped: float | None = None,
        is_in_loop: bool = False,
        metadata: Mapping[str, Any] | None = None,
        **writer_options: Any,
    ) -> None:
        action = simulator.action
        if keep is not None and not callable(keep):
            raise UsageError(action, "", "keep a callable of an EpisodeSummary, or None", repr(keep))
        num_envs = simulator.num_envs
        self._default_limit = max(1000, 10 * num_envs)
        self._limit = self._default_limit if max_dropped is None else max_dropped
        arguments.real(action, "max_dropped", self._limit, "a number >= 1 or None", lambda limit: limit >= 1)
        self._goes_on = is_in_loop and max_dropped is None
        self._has_warned = False
        self.simulator = simulator
        self._success_only = success_only
        self._keep = keep
        self._names = (success_key, f"is_{success_key}")
        self._is_choosing = success_only or keep is not None
        context = {"env": simulator.name, "success_traj_only": success_only, **(metadata or {})}
        self.writer = RolloutWriter(
            data_dir, num_envs, metadata=context, success_only=self._is_choosing, **writer_options
        )
        self._lengths = np.zeros(num_envs, np.int64)
        self._rewards = np.zeros(num_envs)
        self._has_succeeded = np.zeros(num_envs, bool)
        self._is_success_told = False
        self._sum_of_rewards = 0.0
        self._num_ended = 0
        self._num_dropped_in_a_row = 0
        #: Steps with tensors on a GPU that were taken, and the number of the last one that was recorded.
        self._num_late = 0
        self._last_recorded_late = 0
        #: What the env showed before the next step to be recorded, and the same of a step to come after a reset.
        self._before = simulator.seen
        self._fresh = simulator.seen
        self._action: Any = None
        self._reset: Any = slice(None)
        self._seed: Any = None
        self._lacks_task = np.ones(num_envs, bool)
        #: Env -> what is to be noted with its next frame.
        self._said: dict[int, dict[str, Any]] = {}

    @property
    def mean_return(self) -> float:
        return self._sum_of_rewards / self._num_ended if self._num_ended else math.nan

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of the env's methods in `_RECORDED` and record what it does."""
        if name in ("step", "step_async"):
            given = (*args, *kwargs.values())[0]
            self._action = self.simulator.copied(self.simulator.executed(given))  # a simulator may clip them in place
        elif name != "reset_wait":
            options = kwargs.get("options") or {}
            chosen = (options.get("reset_mask"), options.get("env_idx"), kwargs.get("env_ids"))
            self._reset = next((on_host(envs).copy() for envs in chosen if envs is not None), slice(None))
            self._seed = kwargs.get("seed")
        result = getattr(self.simulator.env, name)(*args, **kwargs)
        if name in ("step", "step_wait"):
            self._take(result)
        elif not name.endswith("_async"):
            try:
                self.writer.settle()
            finally:  # an error of an earlier step costs that step alone
                self._see(name, result)
        return result

    def _see(self, name: str, result: Any) -> None:
        """Take what a reset or `get_observations` returned."""
        is_reset = np.zeros(len(self._lengths), bool)
        is_reset[self._reset] = name != "get_observations"
        if (cut := is_reset & (self._lengths > 0)).any():
            self.writer.discard(np.flatnonzero(cut), leave_open=True)
            self._clear(cut)
        self.simulator.see(result, is_reset)
        self.hear(self._seed, is_reset)
        self._fresh = self.simulator.seen

    def _take(self, result: Any) -> None:
        """Record a step; one with tensors on a GPU when it has arrived on the host."""
        fresh = self._fresh
        self._fresh = {}
        *values, infos = result
        step = (fresh, self._action, (*values, needed_infos(infos, {*self._names, TASK, "observations"})))
        if has_device_tensors(step):
            self._num_late += 1
            self.writer.record_late(step, partial(self._add_late, self._num_late))
            return
        try:
            self.writer.settle()
        finally:  # an error of an earlier step costs that step alone
            self._add(step)

    def _add_late(self, number: int, step: tuple[dict[str, Any], Any, Any]) -> None:
        """Record a step from a GPU, which the writer gives again after a Ctrl-C: nothing is counted twice."""
        if number == self._last_recorded_late:  # the Ctrl-C came after it
            return
        parts = (self, self.simulator)
        states = [{name: _copied(value) for name, value in vars(part).items()} for part in parts]
        try:
            self._add(step)
            self._last_recorded_late = number
        except Exception:
            raise
        except BaseException:
            for part, state in zip(parts, states, strict=True):
                vars(part).update(state)
            raise

    def hear(self, seed: Any, is_reset: np.ndarray) -> None:
        """Keep what a reset of these envs, `[N]` bool, tells of the episodes that begin."""
        for env in np.flatnonzero(is_reset).tolist():
            own = seed[env] if isinstance(seed, (list, tuple, np.ndarray)) else seed
            self._said[env] = {} if own is None else {"seed": own}
        self._lacks_task |= is_reset
        self._hear_tasks(self.simulator.infos)

    def _hear_tasks(self, infos: Mapping[str, Any]) -> None:
        """Keep the tasks that infos tell beside observations of episodes of which none is known."""
        tasks: Any = infos.get(TASK)
        is_listed = isinstance(tasks, (list, tuple, np.ndarray)) and len(tasks) == len(self._lacks_task)
        if not (is_listed or isinstance(tasks, str)):
            return
        for env in np.flatnonzero(self._lacks_task & ~self.simulator.is_over).tolist():
            task = tasks if isinstance(tasks, str) else tasks[env]
            if isinstance(task, str):
                self._said.setdefault(env, {})[TASK] = str(task)
                self._lacks_task[env] = False

    def _taken(self, present: Any) -> list[dict[str, Any] | None] | None:
        """Return what is to be noted of the envs that have a frame now, `[N]` bool; None if nothing is."""
        is_present = np.broadcast_to(present, self._lengths.shape)
        taken = {env: self._said.pop(env) for env in [*self._said] if is_present[env]}
        return [taken.get(env) for env in range(len(is_present))] if any(taken.values()) else None

    def _add(self, step: tuple[dict[str, Any], Any, Any]) -> None:
        fresh, action, result = step
        if fresh:
            self._before = fresh
        before, self._before = self._before, {}  # so that after an error no frame is missing in the middle
        if not before:
            raise UsageError("record a step", "", "reset() or get_observations() before it", "neither")
        record, done, infos = self.simulator.read(result)
        present = record.get("env_mask", True)
        self._lengths += present
        self._rewards += np.where(present, on_host(record["reward"]).reshape(len(done), -1)[:, 0], 0)
        self._sum_of_rewards += float(self._rewards[done].sum())
        self._num_ended += int(done.sum())
        if self._is_choosing or done.any():
            success, is_told = self._told_success(done, infos)
            for env in np.flatnonzero(done & is_told).tolist():
                self._said.setdefault(env, {})["success"] = bool(success[env])
        if self._is_choosing:
            record["success"] = self._chosen(record, done, success, is_told)
        self._clear(done)
        if (lacking := record.pop("lacks_final", None)) is not None:  # a record has them of all its ends or of none
            without = {name: value for name, value in record.items() if not name.startswith("final_")}
            self.writer.add(**before, action=action, **without, env_mask=lacking, episode=self._taken(lacking))
            record["env_mask"] = ~lacking
        self.writer.add(**before, action=action, **record, episode=self._taken(record.get("env_mask", True)))
        self._hear_tasks(infos)
        self._before = self.simulator.seen
        if self._is_choosing and done.any():
            self._check_dropped(infos, 0 if record["success"].any() else int(done.sum()))

    def _told_success(self, done: np.ndarray, infos: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return where infos of a step have a success, and where they have that key: `[N]` bool both."""
        success, is_told = told(infos, self._names, len(done))
        if (final := infos.get("final_info")) is not None:
            last, is_last_told = told(joined(final), self._names, len(done))  # the rest is of the next episode
            success = np.where(done, last, success)
            is_told = np.where(done, is_last_told, is_told)
        return success, is_told

    def _chosen(
        self, record: Mapping[str, Any], done: np.ndarray, success: np.ndarray, is_told: np.ndarray
    ) -> np.ndarray:
        """Return which of the episodes that end in a step are kept: `[N]` bool."""
        self._has_succeeded |= success & record.get("env_mask", True)
        self._is_success_told |= bool(is_told.any())
        columns = (self._lengths, self._rewards, record["terminated"], record["truncated"])
        values = (np.arange(len(done)), *columns, np.where(is_told, success, np.array(None)), self._has_succeeded)
        kept = np.zeros(len(done), bool)
        for one in map(EpisodeSummary, *(column[done].tolist() for column in values)):
            kept[one.env_id] = (one.success or not self._success_only) and (self._keep is None or self._keep(one))
        return kept

    def _clear(self, envs: np.ndarray) -> None:
        for running in (self._lengths, self._rewards, self._has_succeeded):
            running[envs] = 0
        self._lacks_task[envs] = True

    def _check_dropped(self, infos: Mapping[str, Any], num_dropped: int) -> None:
        self._num_dropped_in_a_row = num_dropped and self._num_dropped_in_a_row + num_dropped
        is_told = self._is_success_told or not self._success_only
        limit = self._limit if is_told else min(self._limit, self._default_limit)
        if self._num_dropped_in_a_row < limit or (is_told and self._has_warned):
            return
        why = "keep is false of them"
        advice = "Change the policy or keep, or raise max_dropped"
        if self._success_only and is_told:
            why = "they ended without success" + (" or keep is false of them" if self._keep else "")
        elif not is_told:
            names = sorted(map(str, joined(infos.get("final_info", infos))))
            why = f"infos never have {' or '.join(map(repr, self._names))}, but {names}"
            advice = "Say with success_key what tells success"
        got = f"{self._num_dropped_in_a_row} in a row to drop: {why}"
        error = UsageError("go on recording", "", "episodes to keep", got, advice)
        if not (is_told and self._goes_on):
            raise error
        self._has_warned = True
        warnings.warn(f"nothing is recorded: {got}. {advice}", RolloutDataWarning, stacklevel=6)


def _copied(state: Any) -> Any:
    """Copy an attribute of which a step changes elements in place; return any other as it is."""
    return state.copy() if isinstance(state, (np.ndarray, dict)) else state


def _count(data_dir: Path) -> tuple[int, int, int]:
    """Count what a folder holds: frames, trajectories, and those of them that ended; nothing if it is not there."""
    if not data_dir.is_dir():
        return 0, 0, 0
    index = BlockFolder.at(data_dir).index
    return index.num_frames, len(index), int(((index.flags & (TERMINATED | TRUNCATED)) != 0).sum())


def _policy(policy: Any) -> tuple[Callable[[Any], Any], str]:
    """Return a policy as a function of the observation, and its name.

    A `torch.nn.Module` is given tensors on its device and of its dtype; anything else gets the observation as the
    environment gave it. Objects are asked for `act_inference`, then `act`.
    """
    methods = (getattr(policy, name, None) for name in ("act_inference", "act"))
    act = next((method for method in methods if callable(method)), policy)
    if not callable(act):
        expected = "a callable, or an object with act_inference or act"
        raise UsageError(_RECORD, "", f"policy as {expected}", type(policy).__name__)
    owner = getattr(policy, "__self__", policy)
    name = getattr(owner, "__name__", type(owner).__name__)
    if not isinstance(policy, torch.nn.Module):
        return torch.no_grad()(act), name

    def to_tensor(value: Any) -> torch.Tensor:
        tensor = as_given(value)
        parameter = next(policy.parameters(), torch.zeros((), device="cpu"))
        return tensor.to(parameter.device, parameter.dtype if tensor.is_floating_point() else tensor.dtype)

    return torch.no_grad()(lambda observation: act(mapped(to_tensor, observation))), name
