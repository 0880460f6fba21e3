"""Pages of the site that stand elsewhere: README, the guides that ship with the packages, and the reference.

One rule: nothing is written twice. A guide is a file of a package, the reference what `__all__` of a package lists.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).parents[1]
#: File of the repository -> page.
PAGES = {
    "README.md": "index.md",
    "rollout_data/RECORDING.md": "guides/record.md",
    "rollout_data/STREAMING.md": "guides/stream.md",
    "rollout_data/WINDOWS.md": "guides/windows.md",
    "storage/ONPOLICY.md": "guides/on-policy.md",
    "storage/BUFFERS.md": "guides/replay.md",
    "storage/MANAGED.md": "guides/prioritized.md",
    "storage/GPU.md": "guides/gpu.md",
    "rollout_data/TRAJECTORIES.md": "guides/trajectories.md",
    "storage/CHECKPOINTS.md": "guides/checkpoints.md",
    "rollout_data/CODECS.md": "guides/codecs.md",
    "rollout_data/FORMATS.md": "guides/formats.md",
    "rollout_data/EDITING.md": "guides/edit.md",
    "rollout_data/DOCTOR.md": "guides/doctor.md",
    "rollout_data/SCALING.md": "guides/scale.md",
    "rollout_data/COMMANDS.md": "guides/commands.md",
    "rollout_data/REPORT.md": "guides/report.md",
    "benchmarks/README.md": "performance.md",
    "rollout_data/FORMAT.md": "design/format.md",
    "ADDING.md": "design/adding.md",
    "CHANGELOG.md": "changes.md",
}
PICTURES = {"benchmarks/how_fast.png": "how_fast.png"}
#: Names of a page, by the module that users import them from.
Names = dict[str, str]
#: Page of the reference -> its title, its first sentence and its names.
REFERENCE: dict[str, tuple[str, str, Names]] = {
    "reference/record.md": (
        "Record",
        "Record experience into data folders, and delete old recordings.",
        {
            "rollout_data": "RolloutWriter record_demonstrations RecordingWrapper RecordingSummary "
            "EpisodeSummary prune"
        },
    ),
    "reference/stream.md": (
        "Stream",
        "Read recorded trajectories as batches of consecutive steps.",
        {
            "rollout_data": "RolloutDataset RolloutLoader Transition RolloutFileBase "
            "load_expert_trajectories load_expert_trajectories_from_motion_lib"
        },
    ),
    "reference/windows.md": (
        "Windows",
        "Read short sequences of recorded frames in random order, and normalize them.",
        {"rollout_data": "WindowDataset WindowLoader WindowMixture Normalizer FieldStatistics"},
    ),
    "reference/on-policy.md": (
        "On-policy",
        "Store the rollouts of on-policy learners, and compute returns and advantages.",
        {
            "storage": "RolloutStorage QueueRolloutStorage ActionLabelRollout SarsaRolloutStorage "
            "Transition MiniBatch ActionLabelMiniBatch SarsaMiniBatch HiddenStates Column "
            "generalized_advantage rollout_advantage discounted_sums n_step_returns "
            "split_and_pad_trajectories unpad_trajectories"
        },
    ),
    "reference/replay.md": (
        "Replay",
        "Keep the newest transitions in memory, and sample them uniformly.",
        {
            "storage": "DictBuffer TrajectoryDictBufferMultiDim TrajectoryDictBuffer ReplayBuffer "
            "ZBuffer motion_priorities load_buffer load_store"
        },
    ),
    "reference/prioritized.md": (
        "Prioritized and managed",
        "Sample by priority, share buffers between threads, and watch their rates.",
        {
            "storage": "AdvancedReplayBuffer NaiveReplayBuffer EpisodeReplayBuffer BufferManager "
            "PrioritizedWindows sequence_priorities RateLimiter BufferMonitor NaturalMonitor "
            "InTickMonitor OutTickMonitor PerformanceMonitor plot_snapshots"
        },
    ),
    "reference/parts.md": (
        "Parts of buffers",
        "Build buffers of your own from the parts of the buffers of this library.",
        {
            "storage": "Schema Field RingStore TransitionRequest PrefixSum SumTree MinTree MaxTree "
            "SegmentTree SumSegmentTree MinSegmentTree MaxSegmentTree BufferPool"
        },
    ),
    "reference/trajectories.md": (
        "Trajectories on disk",
        "Keep whole trajectories on disk, with the newest in memory.",
        {"rollout_data": "TrajectoryReplayBuffer TrajectoryCache"},
    ),
    "reference/checkpoints.md": (
        "Checkpoints",
        "Save checkpoints and prepare batches in the background while the learner runs.",
        {
            "storage": "AsyncCheckpointSaver load_checkpoint load_checkpoint_meta "
            "load_checkpoint_parallel PipelinedDataCollector"
        },
    ),
    "reference/codecs.md": (
        "Codecs",
        "Compress the images and tensors of records in memory.",
        {
            "storage": "CompressedTensorDict CompressedDataCollector compress_image "
            "compress_image_seq decompress_image decompress_image_seq decompress_many"
        },
    ),
    "reference/formats.md": (
        "Files of other systems",
        "Open a recording of any format, and convert it to another format.",
        {"rollout_data": "open Recording Episode convert Conversion"},
    ),
    "reference/edit.md": (
        "Edit and repair",
        "Drop, tag, merge, split and repair the episodes of recordings.",
        {
            "rollout_data": "drop undrop keep tag untag edits_of merge split NewFolder repair "
            "Repaired"
        },
    ),
    "reference/doctor.md": (
        "Doctor and report",
        "Find defects of a recording, and write a page about its content.",
        {"rollout_data": "doctor Diagnosis Finding report"},
    ),
    "reference/scale.md": (
        "Remote data and Ray",
        "Use recordings on object stores, buffers in Ray actors, and Ray Data.",
        {
            "rollout_data": "RemoteOptions push",
            "storage.remote": "RemoteBuffer RemoteOptions",
            "rollout_data.ray": "read_rollouts write_rollouts",
        },
    ),
    "reference/errors.md": (
        "Errors",
        "Catch an invalid call as `UsageError`, and invalid data as `DataFileError`.",
        {
            "storage.errors": "RolloutDataError UsageError SchemaError MissingFieldError "
            "FieldTypeError OutOfRangeError MissingFolderError BufferEmptyError ClosedError "
            "DataFileError CorruptFileError ForeignFileError UnsafeFileError UnansweredError "
            "RolloutOverflowError DatasetExhausted BackgroundError WaitTimeoutError WriteError "
            "TargetError RolloutDataWarning",
            "storage": "RateLimitedError UnknownBufferError",
            "storage.remote": "LostActorError",
        },
    ),
}
#: Public names that `from PACKAGE import *` leaves out, because Python has functions of these names.
NOT_IN_STAR_IMPORTS = {"rollout_data": ["open"]}
#: Modules whose public names the reference lists.
PUBLIC_MODULES = ("storage.errors", "rollout_data", "storage", "storage.remote", "rollout_data.ray")
#: Class -> its methods for other parts of the library; subclasses have them, too. The reference
#: leaves them out.
INTERNAL_MEMBERS = {
    "storage.errors.RolloutDataError": "of",
    "storage.saving.saved_store.Store": "check_form check_equal copy_state take_state "
    "unchanged_on_failure",
    "storage.managed.managed_buffer.ManagedBuffer": "as_list prepare_push prepare_sample "
    "prepare_update wait_until_admitted",
    "storage.managed.advanced_buffer.AdvancedReplayBuffer": "prepare_priorities",
    "storage.prioritized.sum_tree.BlockTree": "numbers",
    "storage.ring.transition_sampler.TransitionRequest": "of",
    "rollout_data.playback.rollout_stream.RolloutStream": "source new_source position plan_next "
    "read release commit next_position is_over follow wait_for_abandoned_reader",
    "rollout_data.windows.worker_batches.WindowBatches": "batch ahead",
    "rollout_data.windows.window_dataset.WindowDataset": "at form frames field_names conventions "
    "is_remote locate shuffled random_keys name num_upto",
    "rollout_data.windows.window_loader.WindowMixture": "at locate shuffled name num_upto",
    "rollout_data.sources.recordings.recording.Recording": "origin blocks removed check_present",
    "rollout_data.sources.recordings.episode.Episode": "rounded",
    "rollout_data.trajectories.trajectory_cache.TrajectoryCache": "find put_rows",
    "rollout_data.writing.rollout_writer.RolloutWriter": "record_late settle",
    "rollout_data.remote.locations.RemoteOptions": "kept_bytes",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def moved(source: str, own_page: str, match: re.Match[str]) -> str:
    """Let a link of a file lead to the page of its target; what has no page is named by its path."""
    target = os.path.normpath(os.path.join(os.path.dirname(source), match[2]))
    page = (PAGES | PICTURES).get(target)
    if page is None:
        return match[1] if match[1].strip("`") == target else f"{match[1]} (`{target}`)"
    link = os.path.relpath(page, os.path.dirname(own_page) or ".")
    return f"[{match[1]}]({link}{match[3] or ''})"


def public_names() -> dict[str, Any]:
    """Return the object of each public name, such as "storage.DictBuffer"."""
    objects = {}
    for package in PUBLIC_MODULES:
        module = importlib.import_module(package)
        for name in (*module.__all__, *NOT_IN_STAR_IMPORTS.get(package, ())):
            objects[f"{package}.{name}"] = getattr(module, name)
    return objects


def paths(names: Names) -> list[str]:
    """Return the names of a page with their modules."""
    return [f"{module}.{name}" for module, listed in names.items() for name in listed.split()]


def own_classes(cls: type) -> list[type]:
    """Return a class and its bases that this project defines, in the order of look-up."""
    packages = {package.partition(".")[0] for package in PUBLIC_MODULES}
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] in packages]


def members(cls: type) -> dict[str, type]:
    """Return the classes that define the documented members of a class, by member."""
    internal = set()
    for base in own_classes(cls):
        path = f"{base.__module__}.{base.__name__}"
        internal.update(INTERNAL_MEMBERS.get(path, "").split())
    owners: dict[str, type] = {}
    for base in reversed(own_classes(cls)):
        owners.update(dict.fromkeys(vars(base), base))
    return {
        name: owner
        for name, owner in owners.items()
        if name not in internal and is_documented(name, vars(owner)[name])
    }


def is_documented(name: str, value: Any) -> bool:
    """Return whether a value of a class is a public method or property with a docstring."""
    kinds = (FunctionType, classmethod, staticmethod, property, cached_property)
    return not name.startswith("_") and isinstance(value, kinds) and bool(value.__doc__)


def entry(thing: Any, entries: dict[Any, str]) -> str:
    """Return the text of an entry. Members that a public base has, too, become links to its entry.

    Args:
        thing: The class or function.
        entries: Name of the entry of each public object.
    """
    if not isinstance(thing, type):
        return f"::: {entries[thing]}"
    bases = [base for base in own_classes(thing) if base in entries]
    shown: dict[type, list[str]] = {base: [] for base in bases}
    for name, owner in members(thing).items():
        sources = [base for base in bases if members(base).get(name) is owner]
        shown[sources[-1]].append(name)
    # An empty list would show all inherited members.
    own = f"[{', '.join(shown[thing])}]" if shown[thing] else "false"
    private = set(own_classes(thing)) - entries.keys()
    show_bases = "false" if private.intersection(thing.__bases__) else "true"
    options = f"members: {own}, inherited_members: {own}, show_bases: {show_bases}"
    text = f"::: {entries[thing]}\n    options: {{{options}}}"
    for base in bases[1:]:
        links = [f"[`{name}`][{entries[base]}.{name}]" for name in shown[base]]
        if links:
            text += f"\n\nInherited from [`{base.__name__}`][{entries[base]}]: {', '.join(links)}."
    return text


def reference(page: str) -> str:
    """Return the text of a page of the reference: a table of its names, and an entry for each."""
    names = public_names()
    entries = {names[name]: name for _, _, listed in REFERENCE.values() for name in paths(listed)}
    title, sentence, listed = REFERENCE[page]
    guide = page.replace("reference/", "guides/")
    link = f" [Guide](../{guide})" if guide in PAGES.values() else ""
    table = ["| name | meaning |", "|---|---|"]
    for name in paths(listed):
        others = [
            f", `{other}`" for other in names if names[other] is names[name] and other != name
        ]
        meaning = inspect.getdoc(names[name]).splitlines()[0]
        table.append(f"| [`{name}`][{name}]{''.join(others)} | {meaning} |")
    texts = [entry(names[name], entries) for name in paths(listed)]
    return "\n\n".join([f"# {title}", sentence + link, "\n".join(table), *texts])


def on_files(files: Any, config: Any) -> Any:
    # Tests read the tables of this file without mkdocs.
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = LINK.sub(partial(moved, source, page), (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for source, page in PICTURES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_bytes()))
    for page in REFERENCE:
        files.append(File.generated(config, page, content=reference(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Move the links of the pages that stand in `docs/`, which lead to files of the repository there."""
    name = page.file.src_uri
    return (
        markdown
        if page.file.generated_by
        else LINK.sub(partial(moved, f"docs/{name}", name), markdown)
    )
