"""Opening recordings: which reader a path has."""

from __future__ import annotations

import os
from typing import Any

from storage.core import arguments

from ..foreign.formats import open_foreign
from .recording import Recording


def open(path: str | os.PathLike[str], format: str | None = None, **options: Any) -> Recording:
    """Open recorded experience of any format.

    Args:
        path: A file or folder.
        format: Its format; None finds it out from the content.
        **options: Of the format.

    Raises:
        DataFileError: It is of no known format, or cannot be read.
        UsageError: The format or an option is not known.
    """
    return Recording(open_foreign(arguments.path("open", "", path).absolute(), format, **options))
