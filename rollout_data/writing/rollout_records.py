"""Checks of records, and their conversion to the stored form (`Rollout`).

A record of one step (`[N, ...]`) becomes a rollout of one step (`[1, N, ...]`). All values are
checked before any value is staged. If a record has the same names, dtypes and shapes as the
previous record, these are not checked again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from storage.codecs.codec_chains import check_codec, codec_of
from storage.codecs.codec_stages import image_error
from storage.core.fields import Field, Schema, check_same_names, dtype_name, flatten
from storage.core.memory import as_given, on_host
from storage.core.records import dense
from storage.errors import FieldTypeError, MissingFieldError, SchemaError, UsageError, nearest

from ..blocks.block_header import DROPPED, FINAL_OBSERVATION_ONLY, TERMINATED, TRUNCATED
from .annotation_checks import (
    NO_NOTES,
    StepNotes,
    check_text_fields,
    episode_notes,
    is_texts,
    text_ids,
)
from .component_options import checked_codecs, checked_segments, split_components

OBSERVATION = "observation"
PRIVILEGED = "privileged_observation"
REWARD = "reward"
FINALS = {"final_observation": OBSERVATION, "final_privileged_observation": PRIVILEGED}
FLAGS = ("done", "timeout", "terminated", "truncated", "env_mask")
_NUMERIC = {OBSERVATION, PRIVILEGED, "action", REWARD, *FINALS, *FLAGS}
#: Bit of the marks of a frame: the frame exists. The marks are one uint8 per frame. Other bits are
#: flags, such as `TERMINATED`, which mark the end of a trajectory.
PRESENT = 128
#: Bit of the marks of a frame: the trajectory ends here and has a final observation.
HAS_FINAL = 1
#: A value of a record: an array, or a tensor if numpy does not support its memory or dtype.
Leaf = np.ndarray | torch.Tensor


@dataclass(eq=False)
class Rollout:
    """A checked record of T steps of N envs.

    Attributes:
        schema: Fields as users see them.
        fields: Maps fields to stored values `[T, N, *shape]`, which may share memory with the
            record.
        marks: uint8 `[T, N]`: `PRESENT` if the frame exists, and flags if its trajectory ends.
        policy_version: int64 `[T, N]`, or one number for all frames.
        finals: Maps fields of final observations to stored values `[k, *shape]`: a row for each
            frame with `HAS_FINAL`, in the order of time, then env. None without final observations.
        max_errors: Maps fields with a lossy codec to the largest absolute error that the encoding
            of this record has caused.
        notes: Metadata of episodes, and texts of frames.
    """

    schema: Schema
    fields: Mapping[str, np.ndarray]
    marks: np.ndarray
    policy_version: np.ndarray | int
    finals: Mapping[str, np.ndarray] | None
    max_errors: Mapping[str, float]
    notes: StepNotes = NO_NOTES

    def steps(self, start: int, stop: int) -> Rollout:
        """Return steps `start:stop` as views. The largest encoding errors of all steps are kept."""
        num_finals = np.append(0, ((self.marks & HAS_FINAL) > 0).sum(axis=1).cumsum())
        version = self.policy_version
        finals = self.finals
        return replace(
            self,
            fields={name: values[start:stop] for name, values in self.fields.items()},
            marks=self.marks[start:stop],
            policy_version=version[start:stop] if isinstance(version, np.ndarray) else version,
            finals=finals
            and {name: rows[num_finals[start] : num_finals[stop]] for name, rows in finals.items()},
            notes=self.notes.steps(start, stop),
        )


def ends_of(marks: np.ndarray) -> np.ndarray:
    """Return a bool array: whether a trajectory ends (terminated or truncated) at each frame."""
    is_end: np.ndarray = marks & (TERMINATED | TRUNCATED) > 0
    return is_end


def numbers(field: Field, values: np.ndarray) -> np.ndarray:
    """Convert stored values to numbers: bfloat16, which is stored as uint16, becomes float32."""
    if field.dtype != "bfloat16":
        return values
    return torch.from_numpy(values).view(torch.bfloat16).float().numpy()


def nonfinite_rewards(
    schema: Schema, values: Mapping[str, np.ndarray], marks: np.ndarray
) -> dict[str, int]:
    """Count the rewards of frames that are NaN or infinite.

    Args:
        schema: The fields.
        values: Maps reward fields to stored values `[T, N, ...]`.
        marks: Marks of the frames, uint8 `[T, N]`; 0 if an env has no frame in a step.

    Returns:
        Maps the reward fields that have such values to their number.
    """
    counts = {}
    for name, field in schema.below(REWARD).items():
        rewards = numbers(field, values[name])
        if rewards.dtype.kind != "f":
            continue
        is_finite = np.isfinite(rewards)
        if is_finite.all():
            continue
        count = int((~is_finite.reshape(*marks.shape, -1) & (marks > 0)[..., None]).sum())
        if count:
            counts[name] = count
    return counts


class RolloutReader:
    """Checks records and converts them to rollouts.

    Args:
        num_envs: Number of envs, N.
        obs_segments, obs_disassemble_mapping: As in `RolloutWriter`.
        success_only: Whether `success` in a record decides which ending trajectories to keep.
        needed: Names that every record must have, such as "observation". Components below this
            name, such as "observation/joint_pos", also count.

    Attributes:
        schema: Fields of all records; None until the writer sets it after the first record.
    """

    def __init__(
        self,
        num_envs: int,
        obs_segments: Mapping[str, Sequence[int]] | None,
        obs_disassemble_mapping: Mapping[str, str] | None,
        success_only: bool,
        needed: Sequence[str] = (OBSERVATION, "action"),
    ) -> None:
        self.schema: Schema | None = None
        self._num_envs = num_envs
        self._success_only = success_only
        self._needed = needed
        self._segments = checked_segments(obs_segments)
        self._codecs = checked_codecs(obs_disassemble_mapping, self._segments)
        #: Names, dtypes and shapes of the previous record, then the names of its flags and final
        #: values.
        self._form: object = None
        self._flags = list[str]()
        self._finals = list[str]()
        self._all_present = np.full((1, num_envs), PRESENT, np.uint8)

    def read(
        self,
        record: Mapping[str, Any],
        is_step: bool,
        has_final: np.ndarray | None = None,
    ) -> Rollout:
        """Check a record and convert it to a rollout.

        Args:
            record: Values by name, as `merged_values` returns them: `[N, ...]` for a single step,
                otherwise `[T, N, ...]`.
            is_step: Whether the record is a single step.
            has_final: Whether the trajectory that ends at a frame has a final observation, bool
                `[T, N]`; None means that all have one.

        Raises:
            SchemaError: The fields, a shape, a dtype or the leading size differ from the schema.
        """
        values = dict(record)
        version = values.pop("policy_version", None)
        success = values.pop("success", None) if self._success_only else None
        episode = values.pop("episode", None)
        texts = _pop_texts(values)
        fields = _leaves(values, texts)
        final_texts = {
            name: texts.pop(name) for name in [*texts] if name.partition("/")[0] in FINALS
        }
        # A record of the same form as the previous one needs no checks of names and shapes.
        form = (
            is_step,
            [(name, leaf.dtype, leaf.shape) for name, leaf in fields.items()],
            [*texts, *final_texts],
        )
        is_known = form == self._form
        self._form = None
        if not is_known:
            self._flags = [name for name in FLAGS if name in fields]
            self._finals = [name for name in fields if name.partition("/")[0] in FINALS]
        flag_leaves = [(name, fields.pop(name)) for name in self._flags]
        finals = {name: fields.pop(name) for name in self._finals}
        if not is_known:
            _check_whole(fields, self._needed)
        if self._segments:
            fields = split_components(fields, OBSERVATION, self._segments, 1 if is_step else 2)
        lead = (
            (self._num_envs,)
            if is_step
            else (*next(iter(fields.values())).shape[:1], self._num_envs)
        )
        texts_by_id: dict[int, bytes] = {}
        for name, value in texts.items():
            fields[name] = text_ids(name, value, lead, texts_by_id)
        for name, value in final_texts.items():
            finals[name] = text_ids(name, value, _shape_of(value, lead), texts_by_id)
        schema = self._declared(fields, len(lead), texts) if self.schema is None else self.schema
        if not is_known:
            _check_fields(schema, fields, lead)
            check_text_fields(schema, texts)
        flags = {name: _flag(name, leaf, lead) for name, leaf in flag_leaves}
        marks = self._all_present if is_step else np.full(lead, PRESENT, np.uint8)
        # In most steps no trajectory ends. With 64 envs, this check takes 1 us and `_marks` 7 us.
        is_plain = "env_mask" not in flags and not any(map(np.count_nonzero, flags.values()))
        if not is_plain:
            marks = _marks(flags, marks.shape)
            if self._success_only:
                marks |= ends_of(marks) * ~_kept(success, marks) * np.uint8(DROPPED)
        errors: dict[str, float] = {}
        stored = {}
        for name, leaf in fields.items():
            array = _stored(schema[name], leaf, errors)
            stored[name] = array[None] if is_step else array
        rows = None
        if finals and not (is_known and is_plain):
            is_end = ends_of(marks) if has_final is None else ends_of(marks) & has_final
            marks = marks | is_end * np.uint8(HAS_FINAL)
            picked = self._pick_ends(finals, schema, lead, is_end)
            rows = {name: _stored(schema[name], leaf, errors) for name, leaf in picked.items()}
            missing = [name for name in schema.below(PRIVILEGED) if name not in rows]
            if missing:
                # The privileged observation of the last frame is stored instead.
                rows |= {name: stored[name][is_end] for name in missing}
                marks |= is_end * np.uint8(FINAL_OBSERVATION_ONLY)
        episodes = () if episode is None else episode_notes(episode, marks, is_step)
        notes = StepNotes(episodes, texts_by_id) if episodes or texts_by_id else NO_NOTES
        rollout = Rollout(schema, stored, marks, _version(version, lead), rows, errors, notes)
        self._form = form
        return rollout

    def _declared(self, fields: Mapping[str, Leaf], num_lead: int, texts: Container[str]) -> Schema:
        """Build the schema from the first record.

        The order is observations, action, reward, then other fields.

        Args:
            fields: Values of the record.
            num_lead: Number of axes before the shape of a field.
            texts: Names of the text fields.
        """
        order = [OBSERVATION, PRIVILEGED, "action", REWARD]

        def rank(name: str) -> int:
            head = name.split("/")[0]
            return order.index(head) if head in order else len(order)

        names = sorted(fields, key=rank)
        components = [
            name.removeprefix(OBSERVATION + "/")
            for name in names
            if name.startswith(OBSERVATION + "/")
        ]
        for name in self._codecs:
            if name not in components:
                advice = "Pass a dict as the observation, or obs_segments."
                if components:
                    advice = f"Components: {nearest(name, components)}."
                raise SchemaError(
                    f"obs_disassemble_mapping has the unknown component {name!r}. {advice}"
                )
        codecs = {f"{OBSERVATION}/{name}": codec for name, codec in self._codecs.items()}
        dtypes = {name: dtype_name(fields[name].dtype, f"field {name!r}") for name in names}
        shapes = {name: tuple(fields[name].shape[num_lead:]) for name in names}
        schema = Schema(
            Field(n, shapes[n], dtypes[n], codecs.get(n, "raw"), is_text=n in texts) for n in names
        )
        for field in schema.values():
            check_codec(field)
        return schema

    def _pick_ends(
        self,
        leaves: dict[str, Leaf],
        schema: Schema,
        lead: tuple[int, ...],
        is_end: np.ndarray,
    ) -> dict[str, Leaf]:
        """Select the final observations of the k trajectories that end in a record.

        Args:
            leaves: Values of `final_observation` and `final_privileged_observation`.
            schema: Fields of the frames.
            lead: Leading shape of the record.
            is_end: Whether a trajectory ends with a final observation, bool `[T, N]`.

        Returns:
            Maps fields of the frames to their final values `[k, *shape]`.

        Raises:
            MissingFieldError: A final value belongs to no field of the frames, or the final value
                of an observation is missing.
            SchemaError: A shape is wrong.
        """
        if self._segments:
            is_whole_record = all(leaf.shape[: len(lead)] == lead for leaf in leaves.values())
            num_leads = (len(lead), 1) if is_whole_record else (1, len(lead))
            leaves = split_components(leaves, "final_observation", self._segments, *num_leads)
        rows = {}
        for name, leaf in leaves.items():
            head, slash, rest = name.partition("/")
            field_name = FINALS[head] + slash + rest
            if field_name not in schema:
                raise MissingFieldError(
                    f"{name!r} is the final value of the unknown field {field_name!r}, expected "
                    f"one of {nearest(field_name, schema)}."
                )
            rows[field_name] = _ended_rows(name, leaf, schema[field_name], lead, is_end)
        for name in schema.below(OBSERVATION):
            if name not in rows:
                raise MissingFieldError(
                    f"the final value of {name!r} is missing. Final values of all observations "
                    f"are needed, got {', '.join(leaves)}."
                )
        return rows


def _pop_texts(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the text fields from the values of a record; return them by name."""
    names = [name for name, value in values.items() if name not in _NUMERIC and is_texts(value)]
    return {name: values.pop(name) for name in names}


def _is_text_leaf(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and is_texts(value)


def _shape_of(texts: Any, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the ids of texts in final observations.

    Args:
        texts: One text, a text for each frame, or a text for each of the k ends of trajectories.
        lead: Leading shape of the record.

    Returns:
        `(k,)` for texts of k ends, otherwise `lead`.
    """
    shape = np.shape(np.array(texts, object))
    return shape if shape and shape != (*lead, 1) else lead


def _leaves(values: Mapping[str, Any], texts: dict[str, Any]) -> dict[str, Leaf]:
    """Flatten the values of a record and convert numeric values to arrays or tensors.

    Args:
        values: Values by name, which may be nested mappings.
        texts: Output mapping, to which text values are added by flat name.

    Returns:
        Numeric values by flat name. None values are left out.
    """
    result: dict[str, Leaf] = {}
    for name, value in values.items():
        if name in result:
            raise _duplicate_field(name)
        if type(value) is np.ndarray:
            result[name] = value
        elif (
            not isinstance(value, torch.Tensor) and isinstance(value, Mapping) and name not in FLAGS
        ):
            # Also accept flat names such as "a/b", since `rollout_data.open` returns such mappings.
            flat = flatten(value, f"{name}/", takes_flat=True)
            leaves = {leaf: item for leaf, item in flat.items() if item is not None}
            text_leaves = {leaf: item for leaf, item in leaves.items() if _is_text_leaf(item)}
            texts.update(text_leaves)
            below = {leaf: _leaf(leaf, leaves[leaf]) for leaf in leaves if leaf not in text_leaves}
            repeated = sorted(below.keys() & result.keys())
            if repeated:
                raise _duplicate_field(repeated[0])
            result.update(below)
        elif value is not None:
            result[name] = _leaf(name, value)
    return result


def _duplicate_field(name: str) -> SchemaError:
    return SchemaError(f"field {name!r} has two values. Pass it once.")


def _leaf(name: str, value: Any) -> Leaf:
    """Convert a value to an array, or to a detached tensor if numpy does not support it.

    The result is a view if possible.
    """
    if isinstance(value, torch.Tensor):
        try:
            array: np.ndarray = value.numpy()
            return array
        # numpy does not support tensors with a gradient, bfloat16, sparse tensors, or a GPU.
        except (TypeError, RuntimeError):
            return dense(value, f"field {name!r}")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise SchemaError(
            f"field {name!r} has masked values. Fill them, or mark environments without a frame "
            "with env_mask."
        )
    try:
        return np.asarray(value)
    except ValueError as cause:
        raise SchemaError(f"field {name!r} is no array: {cause}.") from cause


def _check_whole(fields: Mapping[str, Leaf], needed: Sequence[str]) -> None:
    """Check that a record has all required fields; raise `MissingFieldError` otherwise."""
    heads = {name.partition("/")[0] for name in fields}
    for name in needed:
        if name not in heads:
            raise MissingFieldError(
                f"field {name!r} is missing, got only {', '.join(fields) or 'no fields'}. Pass it "
                "as a keyword or in the record."
            )


def _check_fields(schema: Schema, fields: Mapping[str, Leaf], lead: tuple[int, ...]) -> None:
    for name, leaf in fields.items():
        if leaf.shape[: len(lead)] != lead:
            axes = "num_envs" if len(lead) == 1 else "time, num_envs"
            raise SchemaError(
                f"field {name!r} has shape {tuple(leaf.shape)}, expected the leading size {lead} "
                f"({axes})."
            )
    check_same_names(schema, fields)
    for name, field in schema.items():
        _check_row(name, field, fields[name], len(lead))


def _check_row(name: str, field: Field, leaf: Leaf, num_lead: int) -> None:
    got = dtype_name(leaf.dtype, f"field {name!r}")
    if leaf.shape[num_lead:] != field.shape:
        raise SchemaError(
            f"field {name!r} has rows of shape {tuple(leaf.shape[num_lead:])}, expected "
            f"{field.shape}."
        )
    if got != field.dtype:
        raise FieldTypeError(
            f"field {name!r} has dtype {got}, expected {field.dtype} as in the first record."
        )


def _flag(name: str, leaf: Leaf, lead: tuple[int, ...]) -> np.ndarray:
    """Check the shape of a flag; convert it to bool `[T, N]`."""
    if leaf.shape not in (lead, (*lead, 1)):
        raise SchemaError(
            f"flag {name!r} has shape {tuple(leaf.shape)}, expected {lead} or {(*lead, 1)}."
        )
    return _truth(name, leaf).reshape(-1, lead[-1])


def _truth(name: str, leaf: Leaf) -> np.ndarray:
    array = on_host(leaf)
    if array.dtype == bool:
        return array
    dtype_name(array.dtype, f"flag {name!r}")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise UsageError(f"flag {name!r} contains NaN, expected True and False.")
    is_true: np.ndarray = array != 0
    return is_true


def _marks(flags: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Combine the flags of a record, such as `done`, to one number per frame, uint8 `[T, N]`.

    Bits of this number state whether the frame exists, and whether and how a trajectory ends there.
    """
    done, timeout, terminated, truncated, mask = (flags.get(name) for name in FLAGS)
    has_frame = True if mask is None else mask
    if truncated is None:
        truncated = timeout
    elif timeout is not None and (timeout & has_frame != truncated & has_frame).any():
        raise UsageError("timeout and truncated have different values. Pass one of them.")
    if done is not None and terminated is None:
        # Ignore a timeout without done. Simulators may repeat the flag of an earlier episode.
        truncated = None if truncated is None else truncated & done
        terminated = done if truncated is None else done & ~truncated
    elif done is not None and terminated is not None:
        truncated = done & ~terminated if truncated is None else truncated
        if ((terminated | truncated) & has_frame != done & has_frame).any():
            raise UsageError("done differs from terminated | truncated.")
    marks = np.full(shape, PRESENT, np.uint8)
    for flag, mark in ((terminated, TERMINATED), (truncated, TRUNCATED)):
        if flag is not None:
            marks |= flag * np.uint8(mark)
    if mask is not None:
        marks *= mask
    return marks


def _kept(success: Any, marks: np.ndarray) -> np.ndarray:
    """Check the value `success` of a record and convert it to bool `[T, N]`.

    `success` may be None if no trajectory ends in the record.
    """
    if success is None and not ends_of(marks).any():
        return np.ones(marks.shape, bool)
    flags = np.zeros(0) if success is None else _truth("success", _leaf("success", success))
    if flags.size != marks.size:
        problem = f"success has shape {flags.shape}" if flags.size else "success is missing"
        raise SchemaError(
            f"{problem}. A writer with success_only expects a flag for each environment in each "
            f"step, shape {marks.shape[1:]}: True if the ending trajectory shall be kept."
        )
    return flags.reshape(marks.shape)


def _stored(field: Field, leaf: Leaf, errors: dict[str, float]) -> np.ndarray:
    """Convert the values of a field to the array that is stored, on the host.

    Args:
        field: The field.
        leaf: Its values.
        errors: Output mapping: the largest error that a lossy codec causes in each field.
    """
    if type(leaf) is np.ndarray and field.codec == "raw":
        return leaf
    codec = codec_of(field)
    if codec.stored_dtype is not None:
        leaf = as_given(leaf)
        errors[field.name] = max(errors.get(field.name, 0.0), image_error(leaf))
        leaf = codec.encode(leaf)
    if isinstance(leaf, torch.Tensor):
        if leaf.dtype == torch.bfloat16:  # numpy has no bfloat16, so it is stored as uint16.
            leaf = leaf.view(torch.uint16)
        leaf = leaf.cpu().numpy()
    return leaf


def _version(version: Any, lead: tuple[int, ...]) -> np.ndarray | int:
    """Convert policy versions to int64 `[T, N]`, or to one number; None becomes -1."""
    if version is None:
        return -1
    leaf = _leaf("policy_version", version)
    name = dtype_name(leaf.dtype, "policy_version")
    array = on_host(leaf)
    if array.dtype.kind not in "iu":
        raise FieldTypeError(f"policy_version must be integers, got {name}.")
    if array.dtype == np.uint64 and array.size and array.max() >= 1 << 63:
        raise FieldTypeError(f"policy_version must be below 2**63, got {array.max()}.")
    array = array.astype(np.int64)
    if array.ndim == 0:
        return int(array)
    if len(lead) == 2 and array.shape in (lead[:1], (lead[0], 1)):
        return np.broadcast_to(array.reshape(-1, 1), lead)
    if array.shape not in (lead, (*lead, 1)):
        raise SchemaError(
            f"policy_version has shape {array.shape}, expected one integer or shape {lead}."
        )
    return array.reshape(-1, lead[-1])


def _ended_rows(
    name: str, leaf: Leaf, field: Field, lead: tuple[int, ...], is_end: np.ndarray
) -> Leaf:
    """Return the final values of the k ending trajectories, `[k, *shape]`.

    Args:
        name: Name of the final value, for errors.
        leaf: Final values of all frames, `[*lead, *shape]`, or of the ends, `[k, *shape]`.
        field: Field of the frames.
        lead: Leading shape of the record.
        is_end: Whether a trajectory ends with a final observation, bool `[T, N]`.

    Raises:
        SchemaError: The shape or dtype is wrong.
    """
    num_ends = int(is_end.sum())
    num_lead = leaf.ndim - len(field.shape)
    if num_lead == len(lead) and leaf.shape[:num_lead] == lead:
        _check_row(name, field, leaf, num_lead)
        rows = leaf.reshape(-1, *field.shape)
        places = np.flatnonzero(is_end)
        if isinstance(rows, np.ndarray):
            return rows[places]
        return rows[torch.from_numpy(places).to(rows.device)]
    if num_lead == 1 and len(leaf) == num_ends:
        _check_row(name, field, leaf, 1)
        return leaf
    expected = str((*lead, *field.shape))
    if (num_ends,) != lead:
        expected += f", or {(num_ends, *field.shape)} for the ends of this record"
    raise SchemaError(f"{name!r} has shape {tuple(leaf.shape)}, expected {expected}.")
