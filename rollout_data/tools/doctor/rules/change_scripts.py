"""Generate Python scripts by which users can correct measured values.

`repair` changes no measured value. Therefore, a finding contains a script that the user reads,
adapts and runs. The script examines the recording by one rule, corrects the affected episodes, and
writes all episodes to a new folder with `RolloutWriter`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....blocks.block_header import FORMAT_NAME
from ....sources.recordings.recording import Recording
from ..findings import Rule


@dataclass(frozen=True)
class Change:
    """Code in a script that corrects one episode.

    Attributes:
        body: Body of the function `change(fields, ends, finding, place)`. It changes `fields`, the
            rows of the episode by field, or `ends`, its flags. `place` is the index of the episode.
        is_of_all: Whether the script corrects all episodes, even if the finding names only some.
    """

    body: str
    is_of_all: bool = False


#: Code that corrects the defect of a rule, by rule code.
CHANGES: dict[str, Change] = {
    "END11": Change(
        """
ends["terminated"] = False
ends["truncated"] = True
"""
    ),
    "VAL09": Change(
        """
rows = fields[finding.field]
rows[np.abs(rows) < np.finfo(rows.dtype).tiny] = 0
"""
    ),
    "VAL10": Change(
        """
# Replace the measured factor by the exact one, such as 180 / np.pi or 1000.
factor = finding.evidence["factor"]
rows = fields[finding.field]
other = next(number for number in range(len(recording)) if number not in finding.places)
typical = np.nanmean(np.abs(recording[other].read(finding.field)))
if np.nanmean(np.abs(rows)) > typical:
    fields[finding.field] = rows / factor
else:
    fields[finding.field] = rows * factor
"""
    ),
    "VAL11": Change(
        """
rows = fields[finding.field]
parts = rows.reshape(len(rows), -1, 4)
norms = np.linalg.norm(parts, axis=-1, keepdims=True)
parts /= np.where(norms > 0, norms, 1)
"""
    ),
    "VAL12": Change(
        """
rows = fields[finding.field]
parts = rows.reshape(len(rows), -1, 4)
is_flip = (parts[1:] * parts[:-1]).sum(axis=-1) < 0
is_negated = np.cumsum(is_flip, axis=0) % 2 == 1
parts[1:][is_negated] *= -1
"""
    ),
    "VAL13": Change(
        """
rows = fields[finding.field]
parts = rows.reshape(len(rows), -1, 4)
number = finding.evidence["quaternion"]
is_xyzw = np.abs(parts[:, number]).mean(axis=0).argmax() == 3
parts[:, number] = np.roll(parts[:, number], 1 if is_xyzw else -1, axis=-1)
"""
    ),
    "VAL14": Change(
        """
rows = fields[finding.field]
columns = rows.reshape(len(rows), -1)
dimensions = finding.evidence["dimensions"]
turn = finding.evidence["turn"]
columns[:, dimensions] = np.unwrap(columns[:, dimensions], axis=0, period=turn)
"""
    ),
    "VAL15": Change(
        """
rows = fields[finding.field]
columns = rows.reshape(len(rows), -1)
dimensions = finding.evidence["dimensions"]
low = finding.evidence["low"]
high = finding.evidence["high"]
columns[:, dimensions] = np.clip(columns[:, dimensions], low, high)
"""
    ),
    "VAL17": Change(
        """
rows = fields[finding.field]
num_values = 2.0 ** (8 * rows.dtype.itemsize)
unwrapped = np.unwrap(rows.astype(np.float64), axis=0, period=num_values)
fields[finding.field] = np.rint(unwrapped).astype(np.int64)
""",
        is_of_all=True,
    ),
    "TIM04": Change(
        """
length = len(recording[place])
is_repeated = np.arange(length) > 0
for name, rows in fields.items():
    group = name.partition("/")[0]
    if group == "action" or (group == "observation" and rows.dtype.kind == "f"):
        columns = rows[:length].reshape(length, -1)
        is_repeated[1:] &= (columns[1:] == columns[:-1]).all(axis=1)
for name, rows in fields.items():
    fields[name] = np.delete(rows, np.flatnonzero(is_repeated), axis=0)
"""
    ),
    "TIM06": Change(
        """
rows = fields[finding.field]
other = next(number for number in range(len(recording)) if number not in finding.places)
typical = np.median(np.diff(recording[other].read(finding.field), axis=0))
ratio = np.median(np.diff(rows, axis=0)) / typical
unit = float(f"{ratio:.2g}")  # Two digits, as the steps of clocks vary a little.
fields[finding.field] = (rows / unit).astype(rows.dtype)
"""
    ),
    "TIM08": Change(
        """
lag = finding.evidence["lag_frames"]
for name, rows in fields.items():
    fields[name] = rows[lag:] if name == finding.field else rows[: max(0, len(rows) - lag)]
"""
    ),
    "LRN04": Change(
        """
rows = fields["reward"]
late = np.zeros_like(rows[:1])
if place + 1 < len(recording):
    late = recording[place + 1].read("reward", 0, 1)
fields["reward"] = np.concatenate([rows[1:], late])
""",
        is_of_all=True,
    ),
    "IMG04": Change(
        """
rows = fields[finding.field]
channels = rows if rows.shape[-1] in (3, 4) else np.moveaxis(rows, 1, -1)
channels[..., :3] = channels[..., 2::-1].copy()
"""
    ),
    "IMG05": Change(
        """
rows = fields[finding.field]
if rows.shape[-1] in (1, 3, 4):  # Channels are declared last and lie first.
    height, width, channels = rows.shape[1:]
    fields[finding.field] = np.moveaxis(rows.reshape(-1, channels, height, width), 1, -1)
else:
    channels, height, width = rows.shape[1:]
    fields[finding.field] = np.moveaxis(rows.reshape(-1, height, width, channels), -1, 1)
"""
    ),
    "IMG06": Change(
        """
rows = fields[finding.field]
if rows.max() > 1.5:
    fields[finding.field] = rows / 255
else:
    fields[finding.field] = rows * 255
"""
    ),
}

_CONVERT = """\
# Write the recording as block files first.
converted = target + "-converted"
rollout_data.convert(source, converted, progress=False)
source = converted
"""

_SCRIPT = """\
# {heading}
import os

import numpy as np
import rollout_data

source = {source!r}
target = {target!r}


def change(fields, ends, finding, place):
    {body}


{convert}recording = rollout_data.open(source)
findings = rollout_data.doctor(recording, only=[{code!r}]).findings
os.mkdir(target)  # Fails if the folder is there.
options = {{"metadata": recording.metadata{options}}}
with rollout_data.RolloutWriter(target, num_envs=1, **options) as writer:
    for place, episode in enumerate(recording):
        fields = {{name: np.array(episode.read(name)) for name in episode.keys()}}
        for name in episode.final:  # The final observation is one more row.
            final = episode.final_observation
            row = final if name == "observation" else final[name.removeprefix("observation/")]
            fields[name] = np.concatenate([fields[name], [row]])
        ends = {{"terminated": episode.terminated, "truncated": episode.truncated}}
        for finding in findings:
            if {condition}:
                change(fields, ends, finding, place)
        length = min(len(rows) - (name in episode.final) for name, rows in fields.items())
        if length == 0:
            continue
        notes = {{"ends": "unknown"}} if None in ends.values() else {{}}
        notes |= episode.metadata
        if episode.final and not any(ends.values()):
            ends["truncated"] = True  # The notes name the true end.
        is_last = np.arange(length)[:, None] == length - 1
        record = {{name: rows[:length, None] for name, rows in fields.items()}}
        record |= {{f"final_{{name}}": fields[name][length:] for name in episode.final}}
        record |= {{name: is_last & bool(is_end) for name, is_end in ends.items()}}
        writer.add_rollout(record, episode=[None] * (length - 1) + [notes])
        if not any(ends.values()):
            writer.discard([0], leave_open=True)
"""


def change_script(rule: Rule, recording: Recording, path: str) -> str:
    """Return a Python script that corrects the defect of a rule; "" for rules without a script.

    Args:
        rule: Rule of the finding.
        recording: Examined recording. If it has another format than block files, the script
            converts it first.
        path: Path of the recording. The script writes to a new folder with "-changed" appended to
            this path. For a URL, the folder is named after the last part of the URL.
    """
    if rule.code not in CHANGES:
        return ""
    change = CHANGES[rule.code]
    condition = "finding.field in (None, *fields)"
    if not change.is_of_all:
        condition += " and (place in finding.places or not finding.places)"
    target = path.rstrip("/")
    if "://" in target:
        target = target.rpartition("/")[2]
    return _SCRIPT.format(
        heading=f"{rule.code} {rule.name}: {rule.advice}",
        source=path,
        target=f"{target}-changed",
        body=change.body.strip().replace("\n", "\n    "),
        convert="" if recording.format == FORMAT_NAME else _CONVERT,
        code=rule.code,
        options=_writer_options(recording),
        condition=condition,
    )


def _writer_options(recording: Recording) -> str:
    """Return Python code with the options of the `RolloutWriter` that writes the copy.

    The code consists of dict items, each after a comma.
    """
    options = ""
    if recording.format != FORMAT_NAME or recording.metadata.get("obs_disassemble_mapping"):
        name = "obs_disassemble_mapping"
        options += f', "{name}": recording.metadata["{name}"]'
    for group in ("action", "observation"):
        if not recording.schema.below(group):
            options += f', "without_{group}": True'
    return options
