"""Pages of the site that stand elsewhere: README, the guides that ship with the packages, and the reference.

One rule: nothing is written twice. A guide is a file of a package, the reference what `__all__` of a package lists.
"""

from __future__ import annotations

import importlib
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

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
#: Page -> its title, and the packages and modules whose names it documents.
REFERENCE = {
    "reference/rollout_data.md": ("rollout_data", ["rollout_data"]),
    "reference/storage.md": ("storage", ["storage"]),
    "reference/others.md": (
        "Errors and optional parts",
        ["storage.errors", "storage.remote", "rollout_data.ray"],
    ),
}
#: Public names that `from PACKAGE import *` leaves out, because Python has functions of these names.
NOT_IN_STAR_IMPORTS = {"rollout_data": ["open"]}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def moved(source: str, own_page: str, match: re.Match[str]) -> str:
    """Let a link of a file lead to the page of its target; what has no page is named by its path."""
    target = os.path.normpath(os.path.join(os.path.dirname(source), match[2]))
    page = (PAGES | PICTURES).get(target)
    if page is None:
        return match[1] if match[1].strip("`") == target else f"{match[1]} (`{target}`)"
    link = os.path.relpath(page, os.path.dirname(own_page) or ".")
    return f"[{match[1]}]({link}{match[3] or ''})"


def reference(title: str, modules: list[str]) -> str:
    """Write the page of some modules: an entry for each public name."""
    parts = [f"# {title}"]
    for module in modules:
        if len(modules) > 1:
            parts.append(f"::: {module}\n    options: {{members: true, show_root_full_path: true}}")
        else:
            names = {*importlib.import_module(module).__all__, *NOT_IN_STAR_IMPORTS.get(module, ())}
            parts += [f"::: {module}.{name}" for name in sorted(names)]
    return "\n\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        text = LINK.sub(partial(moved, source, page), (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for source, page in PICTURES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_bytes()))
    for page, about in REFERENCE.items():
        files.append(File.generated(config, page, content=reference(*about)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Move the links of the pages that stand in `docs/`, which lead to files of the repository there."""
    name = page.file.src_uri
    return (
        markdown
        if page.file.generated_by
        else LINK.sub(partial(moved, f"docs/{name}", name), markdown)
    )
