"""Minari's HDF5 files: `episode_<id>` in `main_data.hdf5`.

One rule: observations and infos have T + 1 rows; the last one follows the last action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from storage.errors import CorruptFileError

from ..hdf5.episodes import Hdf5Reader, Layout, LayoutMaker, is_encoded
from ..hdf5.files import Found, OpenFile, matches, numbered
from ..pictures import picture_format
from ..reader import EpisodeInfo
from .description import ENDS, INFOS, MAIN_FILE, STEP_FIELDS, Description, check_totals, data_folder, describe

EPISODE, STEPS = "episode_", "total_steps"


def has_episodes(file: OpenFile) -> bool:
    """Tell whether a file has groups `episode_<id>` that tell their steps."""
    root = file.open("")
    names = numbered(list(file.links(root)), EPISODE)
    return bool(names) and file.attribute(file.open(names[0]), STEPS) is not None


class GroupReader(Hdf5Reader):
    """Reads a dataset whose data are in groups of a file."""

    format = "minari"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}
    GROUPS = ("observations",)

    @classmethod
    def detect(cls, path: Path) -> bool:
        folder = data_folder(path) if path.is_dir() else None
        return matches(path if folder is None else folder / MAIN_FILE, has_episodes)

    def scan(self) -> Sequence[EpisodeInfo]:
        folder = data_folder(self.path) if self.path.is_dir() else None
        self._about = Description(self.path) if folder is None else describe(folder)
        path = self.path if folder is None else folder / MAIN_FILE
        with self.files.use(path) as file:
            root = file.open("")
            self.metadata.update({**file.attributes(root), **self._about.metadata})
            names = numbered(list(file.links(root)), EPISODE)
        episodes = self.checked_some(self.collect(path, "", names), "an episode")
        if not self.problems:
            check_totals(self, self.metadata, len(episodes), sum(one.length for one in episodes))
        return episodes

    def length(self, file: OpenFile, node: Any) -> int:
        rows, stated = self.num_actions(file, node), file.attribute(node, STEPS)
        if stated is not None and stated != rows:
            expected = f"{rows} steps, as it has actions"
            raise CorruptFileError("read", file.place(node), expected, f"{STEPS} {stated}").of("counts")
        return rows

    def layout(self, file: OpenFile, group: str, found: Mapping[str, Found]) -> tuple[int, Layout]:
        node = file.group(group)
        maker = LayoutMaker(self, found, self.length(file, node), file.place(node))
        for path, one in found.items():
            head, _, rest = path.partition("/")
            name = f"{STEP_FIELDS.get(head, '')}/{rest}".rstrip("/")
            if head == "observations" and self._is_jpeg(file, f"{group}/{path}", name, one):
                maker.add_pictures(file, group, name, path, rows=1)
                maker.layout.final[name] = maker.layout.columns[name]
            elif head == "observations":
                maker.add_after(name, path)
            elif head in STEP_FIELDS:
                maker.add(name, path)
            elif head == INFOS:
                maker.add_with_last(path)
            elif head not in ENDS:
                maker.add_other(path)
        return maker.length, maker.layout

    def _is_jpeg(self, file: OpenFile, path: str, name: str, found: Found) -> bool:
        """Tell whether the rows of a dataset are JPEG files: raw pictures have more axes."""
        if not (is_encoded(found) and found.shape[0] and self._about.is_jpeg and self._about.is_picture(name)):
            return False
        return found.kind == "bytes" or picture_format(bytes(file.rows(path, found, 0, 1)[0][:16])) == "JPEG"

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        return {ours: self.flag(file, node, name, length) for name, ours in ENDS.items()}
