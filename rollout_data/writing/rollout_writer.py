"""RolloutWriter: record the experience of parallel environments into block files.

One rule: check the whole record, then copy it into staging memory; a background thread turns full staging memory into
blocks. What a record means is decided in `record.py`, which fragments come of it in `stage.py`, and how a block is
written in `blocks/write_block.py`.
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
from storage.errors import ClosedError, DataFileError, RolloutDataWarning, UsageError

from ..blocks.block_header import DATA, DROPPED, OPEN, layouts_of
from ..blocks.folder_metadata import Metadata, publish_metadata
from .annotation_checks import NoteCount
from .block_publisher import BlockPublisher, check_storable
from .record_inputs import given_values, keywords_of, unpack_storage, warn_of_misspellings
from .retention import checked_limits
from .rollout_records import RolloutReader, nonfinite_rewards
from .staged_frames import MAX_STAGED_BYTES, MAX_UNCOUNTED_STEPS, Staging, Tally
from .step_infos import InfoReader, needed_infos
from .writer_journal import DeadWriter, Journal, recover_dead_writers, remove_temporary_files

#: Ids of envs are stored as int32.
MAX_NUM_ENVS = 1 << 24
#: Most environments have time limits of 1,000 steps: where nothing has ended in twice as many, ends are not told.
MAX_STEPS_WITHOUT_END = 2000
_MAKE = "create a RolloutWriter"


class RolloutWriter(Shown, Owned):
    """Record `[num_envs, ...]` steps or `[T, num_envs, ...]` rollouts into a data folder.

    Args:
        data_dir: The folder; created if it is not there. Any number of writers may share it.
        num_envs: How many environments step together.
        obs_segments: Component -> shape, in order: cuts a flat observation into components that are
            stored as fields of their own. A dict observation has its components by itself.
        obs_disassemble_mapping: Component -> codec name, for components not to be stored raw.
        metadata: Context for metadata.json (env, policy, config, frame_rate_hz, ...); the first
            writer of a folder determines it.
        block_bytes: The most that is not yet on disk at any time, and so the most that a crash
            loses. Files hold `block_bytes / max_pending_blocks` at most, and no more than 4 GiB.
        block_age_s: A block is closed at the first `add` after this time since its first step.
        max_pending_blocks: How many blocks, the one being filled included, are in memory; `add`
            waits for the disk beyond that. 1 writes synchronously.
        durable: Flush blocks to the disk. Without, data survive a crash of the process only.
        writer_name: Letters, digits and "-"; left out, a free one is made up. A name that was used
            before continues its numbering.
        nonfinite_rewards: "accept" counts NaN and Inf rewards, "refuse" raises before writing.
        success_only: Keep only trajectories of which `success`, given to `add` for each env where they end, is
            true; one that does not end is dropped. `success` is then a flag and no field.
        frames_per_chunk: How many frames of a coded component are decoded together at most: fewer make short
            windows faster and files larger. None is what suits the codec, at most 8 frames and 64 MiB.
        retention: After every block, the folder is pruned to these limits, as in `{"bytes": 10**9}` (see `prune`).
        without_action: Records may lack an action, as those of motions do.
        without_observation: Records may lack an observation, as demonstrations of simulator states and actions do.

    Attributes:
        name: The writer's name, part of its file names.
        recovered: What writers that died in this folder had not published (`DeadWriter` records).

    Raises:
        UsageError: An argument is wrong, or a living writer has this name.
        DataFileError: The folder cannot be written.

    Not for use from several threads at once. A writer that was not closed is closed when the
    interpreter exits.
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
        self.data_dir = arguments.path(_MAKE, "data_dir", data_dir).absolute()  # whatever directory the process goes to
        self.name = secrets.token_hex(4) if writer_name is None else writer_name
        if not isinstance(self.name, str) or not re.fullmatch("[A-Za-z0-9-]{1,100}", self.name):
            raise UsageError(_MAKE, "", "writer_name of 1 to 100 letters, digits and '-'", repr(writer_name))
        if "\0" in str(self.data_dir):
            raise UsageError(_MAKE, "", "data_dir without NUL characters", repr(data_dir))
        self.num_envs = arguments.whole(_MAKE, "num_envs", num_envs, 1, MAX_NUM_ENVS)
        self.nonfinite_rewards = arguments.choice(_MAKE, "nonfinite_rewards", nonfinite_rewards, ("accept", "refuse"))
        self.success_only = arguments.flag(_MAKE, "success_only", success_only)
        durable = arguments.flag(_MAKE, "durable", durable)
        self._block_bytes = arguments.whole(_MAKE, "block_bytes", block_bytes, 1)
        self._block_age_s = arguments.real(_MAKE, "block_age_s", block_age_s, ">= 0 seconds", lambda age: age >= 0)
        self._max_pending = arguments.whole(_MAKE, "max_pending_blocks", max_pending_blocks, 1)
        chunk = None if frames_per_chunk is None else arguments.whole(_MAKE, "frames_per_chunk", frames_per_chunk, 1)
        limits = None if retention is None else checked_limits(f"{_MAKE} with retention", retention)
        self._context = {"success_traj_only": self.success_only, **_checked_metadata(metadata)}
        may_lack = {
            "observation": arguments.flag(_MAKE, "without_observation", without_observation),
            "action": arguments.flag(_MAKE, "without_action", without_action),
        }
        needed = [name for name, is_absent in may_lack.items() if not is_absent]
        self._reader = RolloutReader(self.num_envs, obs_segments, obs_disassemble_mapping, self.success_only, needed)
        self._infos = InfoReader(self.num_envs)
        self._late_steps = LateCopies()
        #: The time of the next record of the late step that is being recorded; None while none is.
        self._late_ns: int | None = None
        self._last_late_ns = 0  # when the last late step was added
        self._tally = Tally(self.num_envs)
        self._note_count = NoteCount(self.num_envs)
        self._num_accepted = self._max_steps = 0
        self._warn_at = MAX_STEPS_WITHOUT_END * self.num_envs
        self._staging: Staging | None = None
        self._started_s = 0.0  # when the first step of the staging was added
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
        except BaseException:  # Ctrl-C too: an open journal would keep the name taken
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
        """Record one step of all envs. Everything is copied.

        A step with tensors on a GPU travels in one asynchronous copy and is read when it has arrived, at a later `add`
        or at the next call of another method. Its errors are raised there, up to three steps late; the step of the
        call that raises is recorded all the same. `num_waits` counts the steps that had to be waited for.

        Args:
            transition: A mapping, named tuple or object with these names, instead of keywords. Names
                of other records are understood ("observations", "dones", "time_outs", ...).
            observation: `[N, ...]`, or a (nested) mapping of components.
            action: `[N, ...]`.
            reward: `[N]`, `[N, 1]` or `[N, R]`.
            done: `[N]` or `[N, 1]`: this frame is the last of its trajectory.
            timeout: The same: where done, it is a truncation. Without done, an end by itself.
            terminated, truncated: The two kinds of end, instead of done and timeout.
            privileged_observation: Like observation.
            final_observation: The true last observation of the envs that end here: `[N, ...]` (other
                rows are ignored) or `[k, ...]` for the k that end, in env order.
            final_privileged_observation: Its privileged part; without, it repeats the last frame's.
            policy_version: An integer, or `[N]`; kept per fragment.
            env_mask: `[N]` bool; False means that this env has no frame in this step.
            episode: What is to be known of whole episodes, such as `{"task": "open the door", "seed": 3, "success":
                True}`: a list with a mapping for each env whose episode this step belongs to, None for the others;
                for a single env the mapping itself. May be given in any step of an episode; what is given later is
                added, and replaces what has the same name. Values as JSON has them; `task` is a str, `success` a
                bool. At most 1 MiB of an episode.
            infos: As environments return them, a list with a mapping for each env or one mapping for all. `time_outs`
                and `TimeLimit.truncated` are time-outs, `final_obs` and `terminal_observation` final observations,
                unless they are given by keyword. A warning names other keys, once: they are not recorded. `extras` that
                hold one of these names are infos too.
            **extras: Any other field, `[N, ...]` or a mapping; not next observations nor `is_first`, which follow.
                A str, or a list or array of N, is a field of texts: each text is stored once, and its frames have its
                number.

        Raises:
            SchemaError: Another field, shape, dtype or leading size than the first record declared;
                nothing was written and the writer stays usable.
            BackgroundError: A block could not be written; the cause is the disk's error.
        """
        self._add(transition, keywords_of(locals()), is_step=True)

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
        """Record T steps of all envs: like `add` with `[T, N, ...]` everywhere.

        Args:
            transition: Also a `storage.RolloutStorage`, of which all filled steps are recorded (a queue's each time
                anew) with declared `policy_outputs`, or a batch of a `RolloutDataset` (see `Transition` for limits).
            final_observation: `[T, N, ...]`, or `[k, ...]` for the k ends in the order of time, then env.
            policy_version: An integer, `[T]` or `[T, N]`.
            episode, infos: A list of T values, each as in `add`.
            include: Fields of a `RolloutStorage` to record besides the usual ones: "values", "mu", "sigma", ...
        """
        transition = unpack_storage("call RolloutWriter.add_rollout", transition, include)
        self._add(transition, keywords_of(locals()), is_step=False)

    def discard(self, env_ids: Sequence[int] | np.ndarray | torch.Tensor, leave_open: bool = False) -> None:
        """Drop the trajectories in progress of these envs, also what is published; or leave them as open ones."""
        self._check_usable()
        self.settle()
        leave_open = arguments.flag("call RolloutWriter.discard", "leave_open", leave_open)
        envs = np.unique(arguments.env_ids("call RolloutWriter.discard", "env_ids", env_ids, self.num_envs))
        self._end(envs, OPEN if leave_open and not self.success_only else DROPPED)

    def flush(self) -> None:
        """Publish everything that was added and wait until it is on the disk."""
        self._check_usable()
        late_error = self._record_late_steps()
        self._hand_over()
        self._publisher.settle()
        self._publisher.check()
        if late_error is not None:
            raise late_error

    def close(self) -> None:
        """Publish everything, mark trajectories in progress as open, stop. May be called twice, also after a Ctrl-C.

        Raises:
            BackgroundError: A block could not be written; what was published before is intact.
        """
        if self not in _open_writers:
            return
        self._owner.check()
        has_to_end = not (self._is_ended or self._publisher.failure)
        late_error = self._record_late_steps() if has_to_end else None
        self._closed = True
        try:
            if has_to_end:
                self._end(np.arange(self.num_envs), DROPPED if self.success_only else OPEN)
                self._hand_over()
                self._is_ended = True
        except Exception:  # not a Ctrl-C, which leaves all steps to the next call
            self._leave_folder()
            raise
        self._leave_folder()
        self._publisher.check()
        if late_error is not None:
            raise late_error

    @property
    def num_frames(self) -> int:
        """Frames kept so far: of trajectories that were not dropped; with `success_only`, that have ended too."""
        tally = self._settled()
        return tally.num_finished_frames + (0 if self.success_only else tally.num_open_frames)

    @property
    def num_finished_frames(self) -> int:
        """Frames of the kept trajectories that have ended."""
        return self._settled().num_finished_frames

    @property
    def num_trajectories(self) -> int:
        """Kept trajectories that have ended."""
        return self._settled().num_trajectories

    @property
    def num_nonfinite_rewards(self) -> int:
        """Values among the accepted rewards that are NaN or infinite, in every field that is or is below `reward`."""
        return self._settled().num_nonfinite

    @property
    def num_waits(self) -> int:
        """Steps with tensors on a GPU that the host waited for."""
        return self._late_steps.num_waits

    @property
    def schema(self) -> Schema | None:
        """The fields, as the first record declared them; None before it."""
        self.settle()
        return self._reader.schema

    def _enter_folder(self) -> list[DeadWriter]:
        """Create the folder, clean up after dead writers, take the writer's name."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            recovered = recover_dead_writers(self.data_dir)
            self._journal.open()
        except OSError as cause:
            raise DataFileError("record into", repr(str(self.data_dir)), "a writable folder", str(cause)) from cause
        remove_temporary_files(self.data_dir, self.name)
        for dead in recovered:
            lost = f"{dead.num_lost_frames} frames that it had not published are lost; what it published is intact."
            text = f"writer {dead.writer!r} ended without close() in {str(self.data_dir)!r}: {lost}"
            warnings.warn(text, RolloutDataWarning, stacklevel=3)
        return recovered

    def _leave_folder(self) -> None:
        """Publish what was handed over, give the name back. May be done twice."""
        self._publisher.close()
        self._journal.close()
        self._staging = None
        _open_writers.discard(self)

    def _add(self, transition: Any, keywords: dict[str, Any], is_step: bool) -> None:
        self._check_usable()
        action = "call RolloutWriter.add" if is_step else "call RolloutWriter.add_rollout"
        values = given_values(action, transition, keywords)
        if is_step and "infos" in values:
            values["infos"] = needed_infos(values["infos"])
        is_late = self._late_ns is not None
        if is_step and not is_late and has_device_tensors(values):
            # A copy: after a Ctrl-C the step is recorded again.
            self.record_late(values, lambda arrived: self._record(action, dict(arrived), is_step=True))
            return
        try:
            self.settle()
        finally:  # an error of an earlier step costs that step alone
            self._record(action, values, is_step)

    def record_late(self, values: Any, record: Callable[[Any], None]) -> None:
        """Copy values from a GPU without waiting, and record them when they have arrived, before any later step.

        Args:
            values: Nested mappings, lists and tuples with tensors on a GPU.
            record: Called with these values, the tensors on the host, where a later call overwrites them. It may call
                `add` twice. After a Ctrl-C it is called again; what it had added is not added twice.
        """
        self._check_usable()
        try:
            while (late := self._late_steps.receive(wait=self._late_steps.is_full)) is not None:
                self._record_late_step(*late)
        finally:  # an error of an earlier step costs that step alone
            # Each step has times for two records of its own.
            self._last_late_ns = max(self._last_late_ns + 2, self._newest_ns() + 1, time.time_ns())
            self._late_steps.send(values, (record, self._last_late_ns))

    def _record_late_step(self, values: Any, about: tuple[Callable[[Any], None], int]) -> None:
        record, late_ns = about
        try:
            self._late_ns = late_ns
            record(values)
        except Exception:
            self._late_steps.release()
            raise
        else:  # a Ctrl-C leaves the step to the next call
            self._late_steps.release()
        finally:
            self._late_ns = None

    def settle(self) -> None:
        """Record all steps that are still on their way from a GPU; raise the error of one of them."""
        self._owner.check()
        if self._late_ns is not None:  # called by one of them
            return
        error = self._record_late_steps()
        if error is not None:
            raise error

    def _record_late_steps(self) -> Exception | None:
        """Record all steps that are still on their way from a GPU; return the error of the first that has one."""
        errors = []
        while (late := self._late_steps.receive(wait=True)) is not None:
            try:
                self._record_late_step(*late)
            except Exception as error:  # noqa: BLE001 - returned; the steps after it are recorded
                errors.append(error)
        return errors[0] if errors else None

    def _record(self, action: str, values: dict[str, Any], is_step: bool) -> None:
        """Check a record and stage it."""
        infos = values.pop("infos", None)
        has_final = None
        if infos is not None:
            found, has_final = self._infos.read(action, infos, values, is_step)
            values |= found
        rollout = self._reader.read(action, values, is_step, has_final)
        late_ns = self._late_ns
        if late_ns is not None:
            self._late_ns = late_ns + 1
            if self._newest_ns() >= late_ns:  # a Ctrl-C came after it
                return
        if self.nonfinite_rewards == "refuse":
            for name, count in nonfinite_rewards(rollout.schema, rollout.fields, rollout.marks).items():
                where = f"with the field {name!r}"
                got = f"{count} NaN or infinite ones"
                raise UsageError(action, where, "finite values", got)
        self._note_count.add(action, rollout.marks, rollout.notes)
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
            is_full = not staging.room or staging.num_note_bytes > self._block_bytes // self._max_pending
            if is_full or time.monotonic() - self._started_s > self._block_age_s:
                self._hand_over()
            elif staging.num_steps - staging.num_counted >= MAX_UNCOUNTED_STEPS:
                staging.count(self._tally)
        if self._num_accepted > self._warn_at:
            self._warn_at = np.iinfo(np.int64).max
            if self._counted().num_open_frames >= self._num_accepted:
                steps = f"more than {MAX_STEPS_WITHOUT_END} steps in {str(self.data_dir)!r}"
                text = f"no trajectory has ended in {steps}: say where they end"
                warnings.warn(f"{text}, by done= or by terminated= and truncated=", RolloutDataWarning, stacklevel=4)

    def _newest_ns(self) -> int:
        """Return when the newest step was taken."""
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
        """Freeze the schema: agree with the folder about it, then make room."""
        check_storable(schema)
        try:
            publish_metadata(self.data_dir, Metadata.of_schema(schema, self._context), self.name, durable=False)
        except OSError as cause:
            where = repr(str(self.data_dir))
            raise DataFileError("write the metadata of", where, "a writable folder", str(cause)) from cause
        step_bytes = self.num_envs * layouts_of(schema)[DATA].frame_bytes
        self._max_steps = max(1, min(self._block_bytes // self._max_pending, MAX_STAGED_BYTES) // step_bytes)
        self._pool = BufferPool(max_buffers=(self._max_pending + 2) * len(schema))
        self._reader.schema = schema

    def _staging_with_room(self) -> Staging:
        if self._staging is not None and self._staging.is_sealed:  # a Ctrl-C fell into handing it over
            self._hand_over()
        if self._staging is None:  # not made earlier: after a flush it takes the memory of the one before
            assert self._reader.schema is not None
            self._staging = Staging(self._reader.schema, self.num_envs, self._max_steps, self._pool)
            self._started_s = time.monotonic()
        return self._staging

    def _end(self, env_ids: np.ndarray, flag: int) -> None:
        """End the trajectories in progress of these envs, in the marks and in the counts."""
        if self._reader.schema is not None:
            staging = self._staging_with_room()
            self._counted().end(env_ids, flag != DROPPED)
            self._note_count.end(env_ids)
            staging.end(env_ids, flag)

    def _hand_over(self) -> None:
        """Submit the staged steps to the background thread; wait while too many blocks are pending."""
        if self._staging is not None and not self._staging.is_empty:
            self._staging.count(self._tally)
            self._handed_over_ns = self._newest_ns()
            self._publisher.submit(self._staging, self._num_accepted)
            self._staging = None

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("record into", repr(str(self.data_dir)), "an open writer", "a closed one")
        self._publisher.check()


_open_writers: set[RolloutWriter] = set()


def _close_open_writers() -> None:
    for writer in list(_open_writers):
        try:
            writer.__exit__()
        except Exception as error:  # noqa: BLE001 - told; the next one must still be closed
            warnings.warn(str(error), RolloutDataWarning)


atexit.register(_close_open_writers)


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    try:
        found = {} if metadata is None else dict(metadata)
        json.dumps(found, default=str)
    except (TypeError, ValueError, RecursionError) as cause:
        expected = "metadata as a mapping that JSON can hold"
        raise UsageError(_MAKE, "", expected, f"{metadata!r} ({cause})") from cause
    return found
