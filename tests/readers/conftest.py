"""Keep libraries that read our files from caching in the user's home folder and from network access."""

from __future__ import annotations

import os
import tempfile

#: Hugging Face's packages read these when they are imported; other folders follow from the first.
_CACHE = tempfile.TemporaryDirectory(prefix="readers-")
for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_LEROBOT_HOME"):
    os.environ.pop(name, None)
os.environ["HF_HOME"] = _CACHE.name
os.environ["HF_HUB_OFFLINE"] = "1"
