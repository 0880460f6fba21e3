"""Recording of environments: `RecordingWrapper`, and the loop `record_demonstrations`.

`environments.py` parses the results of an env. This module decides which episodes to keep, and
`RolloutWriter` records them.
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
from .environments import Simulator, info_flags, joined, mapped
from .rollout_writer import RolloutWriter
from .step_infos import needed_infos

#: Methods of an env whose results are recorded.
_RECORDED = (
    "reset",
    "reset_async",
    "reset_wait",
    "get_observations",
    "step",
    "step_async",
    "step_wait",
)


@dataclass(frozen=True)
class EpisodeSummary:
    """Summary of an episode that has ended, which is passed to `keep`.

    Attributes:
        env_id: Index of the env.
        length: Number of steps of the episode.
        total_reward: Sum of the rewards; if there are several rewards, of the first.
        terminated, truncated: Whether the episode was terminated or truncated.
        success: Success flag in the infos of the last step; None if they have no such flag.
        success_once: Whether the success flag was true in the infos of any step.
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
    """Result of `record_demonstrations`: counts, mean return and duration.

    Attributes:
        data_dir: Data folder.
        num_frames, num_trajectories: Size of the dataset, including earlier recordings.
        num_new_frames, num_new_trajectories: Frames and trajectories that this call has recorded
            and kept.
        num_steps: Number of calls of `step()`, each for all envs.
        num_nonfinite_rewards: Number of NaN or infinite rewards in this call.
        mean_return: Mean sum of the (first) reward over all trajectories that ended, kept or
            dropped; NaN if none ended.
        duration_s: Wall-clock time in seconds.
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


#: Names of arguments that this module sets itself, so that users cannot pass them as options.
_NO_OPTIONS = ("simulator", "num_envs", "is_in_loop")


class RecordingWrapper(Owned):
    """An env whose resets and steps are recorded. The results of the env are returned unchanged.

    The wrapper has all other attributes and methods of the env, and `isinstance` treats the wrapper
    as the env. A reset in the middle of an episode leaves an open trajectory. Actions are recorded
    in the dtype of the env's action space. Recorded metadata of an episode are the `seed` of its
    reset, the first text `task` in its infos, and the `success` flag in the infos of its last step.
    `close()` closes the writer `rollout_writer`, then the env.

    Steps of a simulator on a GPU are copied asynchronously, so a later call raises errors of a
    step. See `RolloutWriter.add`.

    Args:
        env: As in `record_demonstrations`.
        data_dir: Data folder.
        autoreset: When the env resets itself after the end of an episode. "next_step": the next
            step only resets. "same_step": the last step resets, and its infos may contain the final
            observation. "disabled": the caller resets. None detects the mode from
            `metadata["autoreset_mode"]`, or from the results when an episode ends; the default for
            a single env is "disabled".
        options: Options of `RolloutWriter`, and the following.
            `success_only`: keep only episodes whose last infos have a true success flag.
            `keep`: keep only episodes for which `keep(EpisodeSummary)` is true.
            `success_key="success"`: key of the success flag in infos or `final_info`; `is_<key>` is
            also accepted. `max_dropped`: raise an error after this number of dropped episodes in a
            row. The default is 1000, or 10 per env if that is more. With the default, a
            `RecordingWrapper` only warns once, unless infos never had a success flag.

    Raises:
        UsageError: An argument is invalid, a step cannot be recorded, or `max_dropped` episodes
            were dropped.
    """

    __class__ = property(lambda self: type(self.env))

    def __init__(
        self,
        env: Any,
        data_dir: str | os.PathLike[str],
        *,
        autoreset: str | None = None,
        **options: Any,
    ) -> None:
        takers = (RecordingWrapper.__init__, _Recorder, RolloutWriter)
        arguments.options_of("RecordingWrapper", options, *takers, but=_NO_OPTIONS)
        recorder = _Recorder(
            Simulator(env, autoreset),
            data_dir,
            is_in_loop=True,
            **options,
        )
        self.__dict__.update(
            env=env, rollout_writer=recorder.writer, _recorder=recorder, _is_open=True
        )
        self.__dict__["_owner"] = Owner(f"a recording into {str(data_dir)!r}")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["env"], name)
        return partial(self._recorded_call, name) if name in _RECORDED else value

    def _recorded_call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env and record its result. Usage errors name the method."""
        try:
            return self._recorder.call(name, *args, **kwargs)
        except UsageError as error:
            error.call = f"RecordingWrapper.{name}"
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.env, name, value)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the writer, then the env. Idempotent."""
        self._owner.check()
        is_open = self._is_open
        self.__dict__["_is_open"] = False
        try:
            self.rollout_writer.close()
        finally:
            result = (
                self.env.close(*args, **kwargs) if is_open and hasattr(self.env, "close") else None
            )
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
    """Record a policy until a dataset has enough frames and trajectories.

    If the folder has data already, their frames and complete trajectories count. Parts of a
    `spaces.Tuple` are recorded with the names "0", "1", ...

    Args:
        env: A vectorized env of gymnasium (any autoreset mode), stable-baselines3, ManiSkill, Isaac
            Lab, rsl_rl or Isaac Gym, or a single `gymnasium.Env`. Other envs need `num_envs` and a
            `step(actions)` that returns gymnasium's five values, `obs, rewards, dones, infos` or
            `obs, privileged_obs, rewards, dones, infos`, as arrays or tensors. The groups `critic`
            and `privileged` of a dict observation are the privileged observation. If only a group
            `policy` remains, it is the observation. The policy of a single env gets an observation
            and returns an action without an axis for envs.
        policy: Function that maps an observation to actions, or an object with `act_inference` or
            `act`. A torch module gets tensors; another policy gets the observation as the env
            returns it.
        data_dir: Data folder.
        min_timesteps: Minimum number of frames of the dataset at the end.
        min_trajectories: Minimum number of complete trajectories of the dataset at the end.
        keep_unfinished: Keep the trajectories that are in progress at the end as open trajectories.
        metadata: Additional values for metadata.json.
        seed: Seed of the first reset. If the folder has trajectories, the seed is combined with
            their number, so that the same call records different episodes.
        show_progress: Show a progress bar.
        autoreset, options: As in `RecordingWrapper`. If `autoreset` is "disabled", this function
            resets the envs.

    Returns:
        A summary of the recording. After an error or a Ctrl-C, the recorded steps are published
        before the exception is raised.
    """
    takers = (record_demonstrations, _Recorder, RolloutWriter)
    arguments.options_of("record_demonstrations", options, *takers, but=_NO_OPTIONS)
    if metadata is not None:
        arguments.instance("metadata", metadata, "a mapping", Mapping)
    for name, value in (("min_timesteps", min_timesteps), ("min_trajectories", min_trajectories)):
        arguments.real(name, value, "a number", lambda _: True)
    seed = None if seed is None else arguments.seed("seed", seed)
    keep_unfinished = arguments.flag("keep_unfinished", keep_unfinished)
    data_dir = arguments.path("data_dir", data_dir)
    if min_timesteps <= 0 and min_trajectories <= 0:
        raise UsageError("min_timesteps or min_trajectories must be above 0.")
    simulator = Simulator(env, autoreset)
    act, policy_name = _policy(policy)
    start_s = time.monotonic()
    frames_before, trajectories_before, ended_before = _count(Path(data_dir))
    frames_goal = min_timesteps - frames_before
    trajectories_goal = min_trajectories - ended_before
    if frames_goal <= 0 and trajectories_goal <= 0:
        return RecordingSummary(
            data_dir=Path(data_dir),
            num_frames=frames_before,
            num_trajectories=trajectories_before,
            num_new_frames=0,
            num_new_trajectories=0,
            num_steps=0,
            num_nonfinite_rewards=0,
            mean_return=math.nan,
            duration_s=time.monotonic() - start_s,
        )
    if seed is not None and seed >= 0 and trajectories_before:
        seed = int(np.random.SeedSequence((seed, trajectories_before)).generate_state(1)[0] >> 1)
    observation = simulator.start(seed)
    context = {
        "policy": policy_name,
        "min_timesteps": min_timesteps,
        "min_episodes": min_trajectories,
    }
    context |= {"use_critic_obs": "privileged_observation" in simulator.seen, **(metadata or {})}
    recorder = _Recorder(simulator, data_dir, metadata=context, **options)
    recorder.start_episodes(seed, np.ones(simulator.num_envs, bool))
    num_steps = 0
    counts_trajectories = trajectories_goal > 0
    goal = trajectories_goal if counts_trajectories else frames_goal
    unit = " trajectories" if counts_trajectories else " frames"
    bar = tqdm(total=goal, desc="recording", unit=unit, disable=not show_progress)
    with recorder.writer as writer, bar:
        while True:
            num_frames = writer.num_frames if keep_unfinished else writer.num_finished_frames
            num_trajectories = writer.num_trajectories
            bar.update(min(num_trajectories if counts_trajectories else num_frames, goal) - bar.n)
            if num_frames >= frames_goal and num_trajectories >= trajectories_goal:
                break
            observation, *_ = recorder.call("step", simulator.executed(act(observation)))
            # Wait for values from a GPU, since the loop must know which episodes end in this step.
            writer.settle()
            reset_arguments = simulator.reset_arguments
            if reset_arguments is not None:
                observation, *_ = recorder.call("reset", **reset_arguments)
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
    """Caller of an env's methods that records the results of resets and steps."""

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
        if keep is not None and not callable(keep):
            raise UsageError(f"keep must be a callable of an EpisodeSummary or None, got {keep!r}.")
        num_envs = simulator.num_envs
        self._default_limit = max(1000, 10 * num_envs)
        self._limit = self._default_limit if max_dropped is None else max_dropped
        arguments.real(
            "max_dropped", self._limit, "a number >= 1 or None", lambda limit: limit >= 1
        )
        self._only_warns = is_in_loop and max_dropped is None
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
        #: Whether the infos of at least one step had a success flag.
        self._knows_success = False
        self._sum_of_rewards = 0.0
        self._num_ended = 0
        self._num_dropped_in_a_row = 0
        #: Number of steps so far whose tensors had to be copied from a GPU.
        self._num_late = 0
        #: Number of the last of these steps that is recorded, counted from 1.
        self._last_recorded_late = 0
        #: Observations before the next step to record; empty if they are unknown.
        self._before = simulator.seen
        #: Observations of the last reset, if no step has followed; otherwise empty.
        self._fresh = simulator.seen
        self._action: Any = None
        self._reset: Any = slice(None)
        self._seed: Any = None
        self._lacks_task = np.ones(num_envs, bool)
        #: Maps envs to episode metadata to record with the next frame of the env.
        self._metadata: dict[int, dict[str, Any]] = {}

    @property
    def mean_return(self) -> float:
        """Mean sum of rewards over all episodes that ended; NaN if none ended."""
        return self._sum_of_rewards / self._num_ended if self._num_ended else math.nan

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env, record its result and return it."""
        if name in ("step", "step_async"):
            actions = (*args, *kwargs.values())[0]
            # Copy the actions before the call, since a simulator may clip them in place.
            self._action = self.simulator.copied(self.simulator.executed(actions))
        elif name != "reset_wait":
            options = kwargs.get("options") or {}
            chosen = (options.get("reset_mask"), options.get("env_idx"), kwargs.get("env_ids"))
            self._reset = next(
                (on_host(envs).copy() for envs in chosen if envs is not None), slice(None)
            )
            self._seed = kwargs.get("seed")
        result = getattr(self.simulator.env, name)(*args, **kwargs)
        if name in ("step", "step_wait"):
            self._record_step(result)
        elif not name.endswith("_async"):
            try:
                self.writer.settle()
            finally:
                # The env was reset, so the reset is recorded even if `settle` raises an error
                # about an earlier step.
                self._record_reset(name, result)
        return result

    def _record_reset(self, name: str, result: Any) -> None:
        """Start new episodes after a reset. Trajectories that the reset cuts off are marked as open."""
        is_reset = np.zeros(len(self._lengths), bool)
        is_reset[self._reset] = name != "get_observations"
        is_interrupted = is_reset & (self._lengths > 0)
        if is_interrupted.any():
            self.writer.discard(np.flatnonzero(is_interrupted), leave_open=True)
            self._clear(is_interrupted)
        self.simulator.see(result, is_reset)
        self.start_episodes(self._seed, is_reset)
        self._fresh = self.simulator.seen

    def _record_step(self, result: Any) -> None:
        """Record the result of a step.

        A result with tensors on a GPU is recorded by a later call, after its copy to the host.
        """
        fresh = self._fresh
        self._fresh = {}
        *values, infos = result
        step = (
            fresh,
            self._action,
            (*values, needed_infos(infos, {*self._names, TASK, "observations"})),
        )
        if has_device_tensors(step):
            self._num_late += 1
            self.writer.record_late(step, partial(self._add_late, self._num_late))
            return
        try:
            self.writer.settle()
        finally:
            # The step is recorded even if `settle` raises an error about an earlier step.
            # Otherwise a frame would be missing.
            self._add(step)

    def _add_late(self, number: int, step: tuple[dict[str, Any], Any, Any]) -> None:
        """Record a step whose tensors were copied from a GPU.

        If a Ctrl-C interrupts this call, the writer calls it again with the same arguments.
        Therefore the attributes of the recorder and of the simulator are restored.

        Args:
            number: Number of the step among the steps with tensors on a GPU, counted from 1.
            step: Arguments of `_add`.
        """
        # An earlier call recorded this step completely before a Ctrl-C interrupted it.
        if number == self._last_recorded_late:
            return
        parts = (self, self.simulator)
        states = [{name: _copied(value) for name, value in vars(part).items()} for part in parts]
        try:
            self._add(step)
            self._last_recorded_late = number
        except Exception:
            # The step is invalid. The writer reports the error and does not repeat this call.
            raise
        except BaseException:
            for part, state in zip(parts, states, strict=True):
                vars(part).update(state)
            raise

    def start_episodes(self, seed: Any, is_reset: np.ndarray) -> None:
        """Store seeds and tasks of episodes that a reset started, until their first frame.

        Args:
            seed: Seed of the reset: one for all envs, one per env, or None.
            is_reset: Whether each env was reset, bool `[N]`.
        """
        for env in np.flatnonzero(is_reset).tolist():
            env_seed = seed[env] if isinstance(seed, (list, tuple, np.ndarray)) else seed
            self._metadata[env] = {} if env_seed is None else {"seed": env_seed}
        self._lacks_task |= is_reset
        self._keep_tasks(self.simulator.infos)

    def _keep_tasks(self, infos: Mapping[str, Any]) -> None:
        """Store the tasks from infos for all running episodes without a task."""
        tasks: Any = infos.get(TASK)
        is_listed = isinstance(tasks, (list, tuple, np.ndarray)) and len(tasks) == len(
            self._lacks_task
        )
        if not (is_listed or isinstance(tasks, str)):
            return
        for env in np.flatnonzero(self._lacks_task & ~self.simulator.is_over).tolist():
            task = tasks if isinstance(tasks, str) else tasks[env]
            if isinstance(task, str):
                self._metadata.setdefault(env, {})[TASK] = str(task)
                self._lacks_task[env] = False

    def _pop_metadata(self, present: Any) -> list[dict[str, Any] | None] | None:
        """Return the episode metadata to record with this step, and remove them from the store.

        Args:
            present: Whether each env has a frame, bool `[N]`, or True for all.

        Returns:
            A list with metadata or None for each env; None if no env has metadata.
        """
        is_present = np.broadcast_to(present, self._lengths.shape)
        envs = [env for env in self._metadata if is_present[env]]
        metadata = {env: self._metadata.pop(env) for env in envs}
        if not any(metadata.values()):
            return None
        return [metadata.get(env) for env in range(len(is_present))]

    def _add(self, step: tuple[dict[str, Any], Any, Any]) -> None:
        fresh, action, result = step
        if fresh:
            self._before = fresh
        before = self._before
        # If this step is invalid, later steps must raise an error until a reset. Otherwise a
        # trajectory would have a gap.
        self._before = {}
        if not before:
            raise UsageError("call reset() or get_observations() before step().")
        record, done, infos = self.simulator.read(result)
        present = record.get("env_mask", True)
        self._lengths += present
        self._rewards += np.where(
            present, on_host(record["reward"]).reshape(len(done), -1)[:, 0], 0
        )
        self._sum_of_rewards += float(self._rewards[done].sum())
        self._num_ended += int(done.sum())
        if self._is_choosing or done.any():
            success, has_flag = self._success_flags(done, infos)
            for env in np.flatnonzero(done & has_flag).tolist():
                self._metadata.setdefault(env, {})["success"] = bool(success[env])
        if self._is_choosing:
            record["success"] = self._kept_episodes(record, done, success, has_flag)
        self._clear(done)
        lacks_final = record.pop("lacks_final", None)
        # In a record, either all ending episodes have a final observation or none. So the envs
        # without a final observation are recorded first, and the other envs in a second record.
        if lacks_final is not None:
            without_finals = {
                name: value for name, value in record.items() if not name.startswith("final_")
            }
            self.writer.add(
                **before,
                action=action,
                **without_finals,
                env_mask=lacks_final,
                episode=self._pop_metadata(lacks_final),
            )
            record["env_mask"] = ~lacks_final
        metadata = self._pop_metadata(record.get("env_mask", True))
        self.writer.add(**before, action=action, **record, episode=metadata)
        self._keep_tasks(infos)
        self._before = self.simulator.seen
        if self._is_choosing and done.any():
            self._check_dropped(infos, 0 if record["success"].any() else int(done.sum()))

    def _success_flags(
        self, done: np.ndarray, infos: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read the success flag of each env from infos.

        Returns:
            Whether the flag of each env is true, and whether each env has the flag; bool `[N]`
            each.
        """
        success, has_flag = info_flags(infos, self._names, len(done))
        final_infos = infos.get("final_info")
        if final_infos is not None:
            # The flags of ended episodes are in `final_info`. Other infos belong to the next episode.
            final_success, has_final_flag = info_flags(joined(final_infos), self._names, len(done))
            success = np.where(done, final_success, success)
            has_flag = np.where(done, has_final_flag, has_flag)
        return success, has_flag

    def _kept_episodes(
        self, record: Mapping[str, Any], done: np.ndarray, success: np.ndarray, has_flag: np.ndarray
    ) -> np.ndarray:
        """Decide which episodes to keep: `[N]` bool, False for envs whose episode does not end.

        Args:
            record: Values of the step, as `Simulator.read` returns them.
            done: Whether the episode of each env ends in this step, bool `[N]`.
            success, has_flag: As returned by `_success_flags`.
        """
        self._has_succeeded |= success & record.get("env_mask", True)
        self._knows_success |= bool(has_flag.any())
        is_kept = np.zeros(len(done), bool)
        for env in np.flatnonzero(done).tolist():
            summary = EpisodeSummary(
                env_id=env,
                length=int(self._lengths[env]),
                total_reward=float(self._rewards[env]),
                terminated=bool(record["terminated"][env]),
                truncated=bool(record["truncated"][env]),
                success=bool(success[env]) if has_flag[env] else None,
                success_once=bool(self._has_succeeded[env]),
            )
            is_wanted = bool(summary.success) or not self._success_only
            is_kept[env] = is_wanted and (self._keep is None or self._keep(summary))
        return is_kept

    def _clear(self, is_over: np.ndarray) -> None:
        """Reset the counts of ended episodes. `is_over` selects their envs, bool `[N]`."""
        self._lengths[is_over] = 0
        self._rewards[is_over] = 0
        self._has_succeeded[is_over] = False
        self._lacks_task[is_over] = True

    def _check_dropped(self, infos: Mapping[str, Any], num_dropped: int) -> None:
        """Raise an error or warn if too many consecutive episodes were dropped.

        Args:
            infos: Infos of the step.
            num_dropped: Number of episodes that ended in the step; 0 if an episode is kept.
        """
        if num_dropped:
            self._num_dropped_in_a_row += num_dropped
        else:
            self._num_dropped_in_a_row = 0
        can_succeed = self._knows_success or not self._success_only
        limit = self._limit if can_succeed else min(self._limit, self._default_limit)
        if self._num_dropped_in_a_row < limit or (can_succeed and self._has_warned):
            return
        advice = "Change the policy or keep, or raise max_dropped."
        if not can_succeed:
            names = sorted(map(str, joined(infos.get("final_info", infos))))
            reason = f"infos have no {' or '.join(map(repr, self._names))}, only {names}"
            advice = "Pass success_key=..., the name of the success flag in infos."
        elif self._success_only:
            reason = "they ended without success" + (
                " or keep returned False" if self._keep else ""
            )
        else:
            reason = "keep returned False"
        problem = f"{self._num_dropped_in_a_row} episodes in a row were dropped: {reason}."
        if not (can_succeed and self._only_warns):
            raise UsageError(f"{problem} {advice}")
        self._has_warned = True
        warnings.warn(f"Nothing is recorded. {problem} {advice}", RolloutDataWarning, stacklevel=6)


def _copied(state: Any) -> Any:
    """Copy an array or dict, since steps change them in place; return other values unchanged."""
    return state.copy() if isinstance(state, (np.ndarray, dict)) else state


def _count(data_dir: Path) -> tuple[int, int, int]:
    """Count frames, trajectories and complete trajectories in a folder; 0 if it is missing."""
    if not data_dir.is_dir():
        return 0, 0, 0
    index = BlockFolder.at(data_dir).index
    return index.num_frames, len(index), int(((index.flags & (TERMINATED | TRUNCATED)) != 0).sum())


def _policy(policy: Any) -> tuple[Callable[[Any], Any], str]:
    """Return a function that computes actions from observations, and the name of the policy.

    A `torch.nn.Module` gets tensors on its device and of its dtype; another policy gets the
    observation of the env. If the policy has a method `act_inference` or `act`, it is called.
    """
    methods = (getattr(policy, name, None) for name in ("act_inference", "act"))
    act = next((method for method in methods if callable(method)), policy)
    if not callable(act):
        raise UsageError(
            "policy must be a callable, or an object with act_inference or act, got "
            f"{type(policy).__name__}."
        )
    owner = getattr(policy, "__self__", policy)
    name = getattr(owner, "__name__", type(owner).__name__)
    if not isinstance(policy, torch.nn.Module):
        return torch.no_grad()(act), name

    def to_tensor(value: Any) -> torch.Tensor:
        tensor = as_given(value)
        parameter = next(policy.parameters(), torch.zeros((), device="cpu"))
        dtype = parameter.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(parameter.device, dtype)

    @torch.no_grad()
    def act_on_tensors(observation: Any) -> Any:
        return act(mapped(to_tensor, observation))

    return act_on_tensors, name
