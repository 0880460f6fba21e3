"""`RolloutWriter`: records the steps of parallel environments into block files.

A record is checked and then copied into staging memory. When the memory is full, a background
thread writes it as a block. `rollout_records.py` checks records, `staged_frames.py` divides frames
into fragments, and `blocks/write_block.py` writes blocks.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from storage.core import arguments
from storage.core.fields import Schema
from storage.core.late_copies import LateCopies, has_device_tensors
from storage.core.memory import BufferPool
from storage.core.object_summary import Shown
from storage.core.threads import Owned
from storage.errors import (
    ClosedError,
    DataFileError,
    RolloutDataError,
    RolloutDataWarning,
    UsageError,
)

from ..blocks.block_header import DATA, DROPPED, OPEN, layouts_of
from ..blocks.folder_metadata import Metadata, publish_metadata
from .annotation_checks import NoteCount
from .block_publisher import BlockPublisher, check_storable
from .record_inputs import merged_values, unpack_storage, warn_of_misspellings
from .retention import checked_limits
from .rollout_records import RolloutReader, nonfinite_rewards
from .staged_frames import MAX_STAGED_BYTES, MAX_UNCOUNTED_STEPS, Staging, Tally
from .step_infos import InfoReader, needed_infos
from .writer_journal import DeadWriter, Journal, recover_dead_writers, remove_temporary_files

#: Maximum of `num_envs`. Env ids are stored as int32.
MAX_NUM_ENVS = 1 << 24
#: Number of steps without the end of any trajectory after which the writer warns. Most
#: environments end an episode within 1,000 steps.
MAX_STEPS_WITHOUT_END = 2000


class RolloutWriter(Shown, Owned):
    """Records steps `[num_envs, ...]` or rollouts `[T, num_envs, ...]` into a data folder.

    Args:
        data_dir: Data folder, which is created if it is missing. Any number of writers may share
            it.
        num_envs: Number of environments that step together, N.
        obs_segments: Maps components to shapes, in order, to split a flat observation into
            components. Each component becomes a field. A dict observation already has components.
        obs_disassemble_mapping: Maps components to names of codecs. Other components are stored
            raw.
        metadata: Context for metadata.json (env, policy, config, frame_rate_hz, ...). Only the
            first writer of a folder stores it.
        block_bytes: Maximum bytes that are not yet on disk, and that a crash can lose. A block has
            at most `block_bytes / max_pending_blocks` bytes and at most 4 GiB.
        block_age_s: Maximum age of a block in seconds. The first `add` after this time closes the
            block.
        max_pending_blocks: Maximum number of blocks in memory, including the block that is being
            filled. `add` waits for the disk if there are more. 1 writes synchronously.
        durable: Flush blocks to the disk. Otherwise a power failure may lose published blocks.
        writer_name: Letters, digits and "-". None chooses a free name. If the folder has blocks of
            this writer, their numbering continues.
        nonfinite_rewards: "accept" counts NaN and Inf rewards; "refuse" raises an error before the
            record is written.
        success_only: Keep only trajectories that end with a true `success`, a flag for each env
            that `add` then expects. Trajectories without an end are dropped. `success` is not
            stored as a field.
        frames_per_chunk: Maximum number of frames of an encoded component that are decoded
            together. Fewer frames make short windows faster and files larger. None depends on the
            codec: at most 8 frames and 64 MiB.
        retention: Limits of `prune`, such as `{"bytes": 10**9}`. The folder is pruned after each
            block.
        without_action: Accept records without an action, as in recordings of motions.
        without_observation: Accept records without an observation, as in demonstrations that
            contain simulator states and actions.

    Attributes:
        name: Name of the writer, part of its file names.
        recovered: Writers in this folder that died before, with their lost frames (`DeadWriter`).

    Raises:
        UsageError: An argument is invalid, or a running writer has this name.
        DataFileError: The folder cannot be written.

    Not thread-safe. A writer that was not closed is closed when the interpreter exits.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        num_envs: int,
        *,
        obs_segments: Mapping[str, Sequence[int]] | None = None,
        obs_disassemble_mapping: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        block_bytes: int = 256 << 20,
        block_age_s: float = 30.0,
        max_pending_blocks: int = 2,
        durable: bool = True,
        writer_name: str | None = None,
        nonfinite_rewards: Literal["accept", "refuse"] = "accept",
        success_only: bool = False,
        frames_per_chunk: int | None = None,
        retention: Mapping[str, int] | None = None,
        without_action: bool = False,
        without_observation: bool = False,
    ) -> None:
        self._closed = True
        self._is_ended = False
        self.data_dir = arguments.path("data_dir", data_dir).absolute()
        self.name = secrets.token_hex(4) if writer_name is None else writer_name
        if not isinstance(self.name, str) or not re.fullmatch("[A-Za-z0-9-]{1,100}", self.name):
            raise UsageError(
                "writer_name must consist of 1 to 100 letters, digits and '-', got "
                f"{writer_name!r}."
            )
        if "\0" in str(self.data_dir):
            raise UsageError(f"data_dir contains a NUL character: {data_dir!r}.")
        self.num_envs = arguments.whole("num_envs", num_envs, 1, MAX_NUM_ENVS)
        self.nonfinite_rewards = arguments.choice(
            "nonfinite_rewards", nonfinite_rewards, ("accept", "refuse")
        )
        self.success_only = arguments.flag("success_only", success_only)
        durable = arguments.flag("durable", durable)
        self._block_bytes = arguments.whole("block_bytes", block_bytes, 1)
        self._block_age_s = arguments.real(
            "block_age_s", block_age_s, ">= 0 seconds", lambda age: age >= 0
        )
        self._max_pending = arguments.whole("max_pending_blocks", max_pending_blocks, 1)
        chunk = (
            None
            if frames_per_chunk is None
            else arguments.whole("frames_per_chunk", frames_per_chunk, 1)
        )
        limits = None if retention is None else checked_limits(retention)
        self._context = {"success_traj_only": self.success_only, **_checked_metadata(metadata)}
        is_optional = {
            "observation": arguments.flag("without_observation", without_observation),
            "action": arguments.flag("without_action", without_action),
        }
        needed = [name for name, can_be_missing in is_optional.items() if not can_be_missing]
        self._reader = RolloutReader(
            self.num_envs, obs_segments, obs_disassemble_mapping, self.success_only, needed
        )
        self._infos = InfoReader(self.num_envs)
        self._late_steps = LateCopies()
        #: Time stamp in ns for the next frames of a step that was copied from a GPU. None while no
        #: such step is being recorded.
        self._late_ns: int | None = None
        #: Time stamp in ns of the last step that was copied from a GPU.
        self._last_late_ns = 0
        #: Errors of recording steps that were copied from a GPU. A later call raises them.
        self._late_errors: list[Exception] = []
        self._tally = Tally(self.num_envs)
        self._note_count = NoteCount(self.num_envs)
        self._num_accepted = 0
        self._max_steps = 0
        self._warn_at = MAX_STEPS_WITHOUT_END * self.num_envs
        self._staging: Staging | None = None
        #: Monotonic time in s of the first staged step.
        self._started_s = 0.0
        self._pool = BufferPool()
        self._journal = Journal(self.data_dir, self.name)
        try:
            self.recovered = self._enter_folder()
            self._publisher = BlockPublisher(
                self._journal,
                self.num_envs,
                max_pending=self._max_pending,
                durable=durable,
                is_tentative=self.success_only,
                frames_per_chunk=chunk,
                retention=limits,
            )
        except BaseException:
            # An open journal would reserve the writer's name, so it is closed after a Ctrl-C too.
            self._journal.close()
            raise
        self._owner = self._publisher.owner
        self._handed_over_ns = self._publisher.last_ns
        self._closed = False
        _open_writers.add(self)

    def add(
        self,
        transition: Any = None,
        *,
        observation: Any = None,
        action: Any = None,
        reward: Any = None,
        done: Any = None,
        timeout: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        privileged_observation: Any = None,
        final_observation: Any = None,
        final_privileged_observation: Any = None,
        policy_version: Any = None,
        env_mask: Any = None,
        episode: Any = None,
        infos: Any = None,
        **extras: Any,
    ) -> None:
        """Record one step of all envs. All values are copied.

        A step with tensors on a GPU is copied asynchronously. A later `add`, or the next call of
        another method, checks and records it. Errors are therefore raised up to three steps late;
        the step that was passed to the raising call is still recorded. `num_waits` counts the steps
        for which the host waited.

        Args:
            transition: A mapping, named tuple or object with these names, instead of keywords.
                Names of other libraries are accepted ("observations", "dones", "time_outs", ...).
            observation: Observations on which the policy acts, `[N, ...]`, or a (nested) mapping
                of components.
            action: Actions, `[N, ...]`.
            reward: Rewards, `[N]`, `[N, 1]` or `[N, R]`.
            done: Whether this frame is the last of its trajectory, `[N]` or `[N, 1]`.
            timeout: Whether the end of the trajectory is a truncation, `[N]` or `[N, 1]`. Without
                `done`, whether the trajectory is truncated here.
            terminated, truncated: The two kinds of end, instead of `done` and `timeout`.
            privileged_observation: Observations for the critic, in the forms of `observation`.
            final_observation: Observation after the last frame, for the envs whose trajectory ends
                in this step: `[N, ...]` (other rows are ignored), or `[k, ...]` for the k envs
                whose trajectory ends, in env order.
            final_privileged_observation: Privileged part of the final observation. None repeats
                the privileged observation of the last frame.
            policy_version: Version of the policy, an integer or `[N]`. Stored per fragment.
            env_mask: Whether each env has a frame in this step, bool `[N]`.
            episode: Metadata of episodes, such as `{"task": "open the door", "seed": 3, "success":
                True}`: a list with a mapping or None for each env; for a single env the mapping
                itself. Any step of an episode may have metadata. A later value of a key replaces
                the earlier value. Values are JSON; `task` is a str, `success` a bool. At most 1 MiB
                per episode.
            infos: Infos of the environment: a list with a mapping for each env, or one mapping for
                all. `time_outs` and `TimeLimit.truncated` are read as time-outs, `final_obs` and
                `terminal_observation` as final observations; keyword arguments take precedence.
                Other keys are not recorded, and each is named once in a warning. `extras` with one
                of these keys are treated as infos.
            **extras: Any other field, `[N, ...]` or a mapping. Next observations and `is_first` are
                not recorded, since they follow from the frames. A str, or a list or array of N
                texts, is a text field: each text is stored once, and frames refer to it.

        Raises:
            SchemaError: A field, shape, dtype or leading size differs from the first record.
                Nothing is written, and the writer stays usable.
            BackgroundError: A block could not be written. The cause is the error of the disk.
        """
        keywords = {
            "observation": observation,
            "action": action,
            "reward": reward,
            "done": done,
            "timeout": timeout,
            "terminated": terminated,
            "truncated": truncated,
            "privileged_observation": privileged_observation,
            "final_observation": final_observation,
            "final_privileged_observation": final_privileged_observation,
            "policy_version": policy_version,
            "env_mask": env_mask,
            "episode": episode,
            "infos": infos,
            **extras,
        }
        self._add(transition, keywords, is_step=True)

    def add_rollout(
        self,
        transition: Any = None,
        *,
        observation: Any = None,
        action: Any = None,
        reward: Any = None,
        done: Any = None,
        timeout: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        privileged_observation: Any = None,
        final_observation: Any = None,
        final_privileged_observation: Any = None,
        policy_version: Any = None,
        env_mask: Any = None,
        episode: Any = None,
        infos: Any = None,
        include: Sequence[str] = (),
        **extras: Any,
    ) -> None:
        """Record T steps of all envs. Arguments are as in `add`, with shape `[T, N, ...]`.

        Args:
            transition: As in `add`, or a `storage.RolloutStorage` or a batch of a `RolloutDataset`
                (see `Transition` for limits). All filled steps of a storage are recorded, with
                declared `policy_outputs`. A second call records the same steps again.
            final_observation: `[T, N, ...]`, or `[k, ...]` for the k trajectories that end, in the
                order of time, then env.
            policy_version: An integer, `[T]` or `[T, N]`.
            episode, infos: A list of T values, each as in `add`.
            include: Additional fields of a `RolloutStorage` to record: "values", "mu", "sigma", ...
        """
        keywords = {
            "observation": observation,
            "action": action,
            "reward": reward,
            "done": done,
            "timeout": timeout,
            "terminated": terminated,
            "truncated": truncated,
            "privileged_observation": privileged_observation,
            "final_observation": final_observation,
            "final_privileged_observation": final_privileged_observation,
            "policy_version": policy_version,
            "env_mask": env_mask,
            "episode": episode,
            "infos": infos,
            **extras,
        }
        self._add(unpack_storage(transition, include), keywords, is_step=False)

    def discard(
        self, env_ids: Sequence[int] | np.ndarray | torch.Tensor, leave_open: bool = False
    ) -> None:
        """Drop the unfinished trajectories of some envs, including their published frames.

        Args:
            env_ids: Indices of the envs.
            leave_open: Keep the frames, and end the trajectories as open. Ignored with
                `success_only`.
        """
        self._check_usable()
        self.settle()
        leave_open = arguments.flag("leave_open", leave_open)
        envs = np.unique(arguments.env_ids("env_ids", env_ids, self.num_envs))
        self._end(envs, OPEN if leave_open and not self.success_only else DROPPED)

    def flush(self) -> None:
        """Publish all added steps; wait until the blocks are written."""
        self._check_usable()
        self._record_late_steps(wait=True)
        self._hand_over()
        self._publisher.settle()
        self._publisher.check()
        self._raise_late_errors()

    def close(self) -> None:
        """Publish all steps, mark unfinished trajectories as open, and stop.

        Idempotent. After a Ctrl-C in `close()`, the next call completes it.

        Raises:
            BackgroundError: A block could not be written. Blocks that were published before are
                intact.
        """
        if self not in _open_writers:
            return
        self._owner.check()
        has_to_end = not (self._is_ended or self._publisher.failure)
        if has_to_end:
            self._record_late_steps(wait=True)
        self._closed = True
        try:
            try:
                if has_to_end:
                    self._end(np.arange(self.num_envs), DROPPED if self.success_only else OPEN)
                    self._hand_over()
                    self._is_ended = True
            except Exception:
                # Do not release the name after a Ctrl-C, so that `close` can be called again.
                self._leave_folder()
                raise
            self._leave_folder()
            self._publisher.check()
        except RolloutDataError as error:
            # This is the last call, so it also reports the errors of steps from a GPU.
            error.message += "".join(f" {late_error}" for late_error in self._late_errors)
            raise
        self._raise_late_errors()

    @property
    def num_frames(self) -> int:
        """Number of frames of trajectories that were not dropped.

        With `success_only`, only trajectories that have ended count.
        """
        tally = self._settled()
        return tally.num_finished_frames + (0 if self.success_only else tally.num_open_frames)

    @property
    def num_finished_frames(self) -> int:
        """Number of frames of trajectories that have ended and were kept."""
        return self._settled().num_finished_frames

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories that have ended and were kept."""
        return self._settled().num_trajectories

    @property
    def num_nonfinite_rewards(self) -> int:
        """Number of NaN or infinite rewards that were recorded, over all reward fields."""
        return self._settled().num_nonfinite

    @property
    def num_waits(self) -> int:
        """Number of steps for which the host waited until their tensors arrived from a GPU."""
        return self._late_steps.num_waits

    @property
    def schema(self) -> Schema | None:
        """Fields of the first record, which all records must have; None before the first record."""
        self.settle()
        return self._reader.schema

    def _enter_folder(self) -> list[DeadWriter]:
        """Create the folder, clean up after dead writers and reserve this writer's name."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            recovered = recover_dead_writers(self.data_dir)
            self._journal.open()
        except OSError as cause:
            raise DataFileError(
                f"The data folder {str(self.data_dir)!r} is not writable: {cause}."
            ) from cause
        remove_temporary_files(self.data_dir, self.name)
        for dead in recovered:
            text = (
                f"Writer {dead.writer!r} of {str(self.data_dir)!r} ended without close(). Its last "
                f"{dead.num_lost_frames} frames are lost. Its published blocks are intact."
            )
            warnings.warn(text, RolloutDataWarning, stacklevel=3)
        return recovered

    def _leave_folder(self) -> None:
        """Wait until the submitted steps are published; release this writer's name. Idempotent."""
        self._publisher.close()
        self._journal.close()
        self._staging = None
        _open_writers.discard(self)

    def _add(self, transition: Any, keywords: dict[str, Any], is_step: bool) -> None:
        self._check_usable()
        values = merged_values(transition, keywords)
        if is_step and "infos" in values:
            values["infos"] = needed_infos(values["infos"])
        is_late = self._late_ns is not None
        if is_step and not is_late and has_device_tensors(values):
            self.record_late(values, self._record_arrived)
            return
        try:
            self.settle()
        finally:
            # The record is stored even if `settle` raises an error about an earlier step.
            # Otherwise a frame would be missing.
            self._record(values, is_step)

    def _record_arrived(self, values: Mapping[str, Any]) -> None:
        # Recording changes the mapping, but after a Ctrl-C the values are recorded again.
        self._record(dict(values), is_step=True)

    def record_late(self, values: Any, record: Callable[[Any], None]) -> None:
        """Start to copy the values of a step from a GPU to the host, without waiting.

        A later call of `add` or of another method calls `record` with the copied values. Steps are
        recorded in the order of these calls.

        Args:
            values: Nested mappings, lists and tuples with tensors on a GPU.
            record: Function that gets the values on the host and calls `add` at most twice. It must
                copy tensors that it keeps. If a Ctrl-C interrupts it, it is called again; records
                that it has added are not added twice.
        """
        self._check_usable()
        try:
            self._record_late_steps(wait=False)
            self._raise_late_errors()
        finally:
            # The step is copied even if an error about an earlier step is raised. Otherwise a frame
            # would be missing. It reserves two time stamps, since `record` may add two records.
            self._last_late_ns = max(self._last_late_ns + 2, self._newest_ns() + 1, time.time_ns())
            self._late_steps.send(values, (record, self._last_late_ns))

    def _record_late_step(self, values: Any, about: tuple[Callable[[Any], None], int]) -> None:
        record, late_ns = about
        try:
            self._late_ns = late_ns
            record(values)
        except Exception as error:
            self._late_steps.release()
            if isinstance(error, RolloutDataError):
                error.message += " The step was passed to an earlier call."
            raise
        else:
            # After a Ctrl-C this line is not reached, so the next call records the step.
            self._late_steps.release()
        finally:
            self._late_ns = None

    def settle(self) -> None:
        """Wait for all pending copies from a GPU and record these steps; raise their errors."""
        self._owner.check()
        # `record` of `record_late` has called this method. The outer call records the other steps.
        if self._late_ns is not None:
            return
        self._record_late_steps(wait=True)
        self._raise_late_errors()

    def _record_late_steps(self, wait: bool) -> None:
        """Record the steps that were copied from a GPU; collect their errors without raising them.

        Args:
            wait: Whether to wait for all steps. Otherwise only those that have arrived are
                recorded, and at least one if the queue is full.
        """
        while True:
            late = self._late_steps.receive(wait=wait or self._late_steps.is_full)
            if late is None:
                return
            try:
                self._record_late_step(*late)
            except Exception as error:  # noqa: BLE001 - raised after the later steps are recorded
                self._late_errors.append(error)

    def _raise_late_errors(self) -> None:
        """Raise the first error of recording steps from a GPU. Its text names the other errors."""
        if not self._late_errors:
            return
        first, *others = self._late_errors
        self._late_errors = []
        if others and isinstance(first, RolloutDataError):
            steps = "Another step was" if len(others) == 1 else f"{len(others)} other steps were"
            texts = " ".join(getattr(other, "message", str(other)) for other in others)
            first.message += f" {steps} refused too: {texts}"
        elif others:
            # `first` is an error of the caller's function, to which no text is added. Later calls
            # raise the other errors.
            self._late_errors = others
        raise first

    def _record(self, values: dict[str, Any], is_step: bool) -> None:
        """Check a record and copy it into the staging memory."""
        infos = values.pop("infos", None)
        has_final = None
        if infos is not None:
            info_values, has_final = self._infos.read(infos, values, is_step)
            values |= info_values
        rollout = self._reader.read(values, is_step, has_final)
        late_ns = self._late_ns
        if late_ns is not None:
            self._late_ns = late_ns + 1
            # An earlier attempt staged this record before a Ctrl-C interrupted it.
            if self._newest_ns() >= late_ns:
                return
        if self.nonfinite_rewards == "refuse":
            for name, count in nonfinite_rewards(
                rollout.schema, rollout.fields, rollout.marks
            ).items():
                noun = "value" if count == 1 else "values"
                raise UsageError(f"field {name!r} has {count} NaN or infinite {noun}.")
        self._note_count.add(rollout.marks, rollout.notes)
        if self._reader.schema is None:
            self._declare(rollout.schema)
            warn_of_misspellings(values)
        start = 0
        num_steps = len(rollout.marks)
        while start < num_steps:
            staging = self._staging_with_room()
            stop = min(num_steps, start + staging.room)
            part = rollout if stop - start == num_steps else rollout.steps(start, stop)
            staging.put(part, max(self._newest_ns() + 1, late_ns or time.time_ns()))
            self._num_accepted += int(np.count_nonzero(part.marks))
            self._journal.accept(self._num_accepted, self._newest_ns())
            start = stop
            is_full = (
                not staging.room or staging.num_note_bytes > self._block_bytes // self._max_pending
            )
            if is_full or time.monotonic() - self._started_s > self._block_age_s:
                self._hand_over()
            elif staging.num_steps - staging.num_counted >= MAX_UNCOUNTED_STEPS:
                staging.count(self._tally)
        if self._num_accepted > self._warn_at:
            self._warn_at = np.iinfo(np.int64).max
            if self._counted().num_open_frames >= self._num_accepted:
                warnings.warn(
                    f"More than {MAX_STEPS_WITHOUT_END} steps were recorded in "
                    f"{str(self.data_dir)!r}, and no trajectory has ended. Pass done=..., or "
                    "terminated=... and truncated=...",
                    RolloutDataWarning,
                    stacklevel=4,
                )

    def _newest_ns(self) -> int:
        """Return the time of the newest step in ns since the epoch."""
        staged_ns = None if self._staging is None else self._staging.newest_ns
        return self._handed_over_ns if staged_ns is None else staged_ns

    def _settled(self) -> Tally:
        self.settle()
        return self._counted()

    def _counted(self) -> Tally:
        self._owner.check()
        if self._staging is not None:
            self._staging.count(self._tally)
        return self._tally

    def _declare(self, schema: Schema) -> None:
        """Prepare the folder and the staging memory for records with this schema.

        The schema is written to metadata.json, or compared with an existing metadata.json.
        """
        check_storable(schema)
        try:
            publish_metadata(
                self.data_dir, Metadata.of_schema(schema, self._context), self.name, durable=False
            )
        except OSError as cause:
            raise DataFileError(
                f"The metadata of {str(self.data_dir)!r} could not be written: {cause}."
            ) from cause
        step_bytes = self.num_envs * layouts_of(schema)[DATA].frame_bytes
        self._max_steps = max(
            1, min(self._block_bytes // self._max_pending, MAX_STAGED_BYTES) // step_bytes
        )
        self._pool = BufferPool(max_buffers=(self._max_pending + 2) * len(schema))
        self._reader.schema = schema

    def _staging_with_room(self) -> Staging:
        # A Ctrl-C interrupted the submission of this block, so submit it again.
        if self._staging is not None and self._staging.is_sealed:
            self._hand_over()
        # Allocate memory only when it is needed, so that memory of published blocks is reused.
        if self._staging is None:
            assert self._reader.schema is not None
            self._staging = Staging(self._reader.schema, self.num_envs, self._max_steps, self._pool)
            self._started_s = time.monotonic()
        return self._staging

    def _end(self, env_ids: np.ndarray, flag: int) -> None:
        """End the unfinished trajectories of some envs, and update the counts of this writer.

        `flag` states how they end, such as `OPEN` or `DROPPED`.
        """
        if self._reader.schema is not None:
            staging = self._staging_with_room()
            self._counted().end(env_ids, flag != DROPPED)
            self._note_count.end(env_ids)
            staging.end(env_ids, flag)

    def _hand_over(self) -> None:
        """Submit the staged steps as a block; wait while too many blocks are pending."""
        if self._staging is not None and not self._staging.is_empty:
            self._staging.count(self._tally)
            self._handed_over_ns = self._newest_ns()
            self._publisher.submit(self._staging, self._num_accepted)
            self._staging = None

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the writer of {str(self.data_dir)!r} is closed.")
        self._publisher.check()


_open_writers: set[RolloutWriter] = set()


def _close_open_writers() -> None:
    for writer in list(_open_writers):
        try:
            writer.__exit__()
        except Exception as error:  # noqa: BLE001 - a warning, as the other writers must be closed
            warnings.warn(str(error), RolloutDataWarning)


atexit.register(_close_open_writers)


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    try:
        context = {} if metadata is None else dict(metadata)
        json.dumps(context, default=str)
    except (TypeError, ValueError, RecursionError) as cause:
        raise UsageError(
            f"metadata must be a mapping of JSON values, got {metadata!r}: {cause}."
        ) from cause
    return context
