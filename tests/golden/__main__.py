"""``python -m tests.golden``: write the snapshots of this build anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.golden.snapshots import rewrite

with tempfile.TemporaryDirectory() as folder:
    rewrite(Path(folder))
