"""What tests of features share as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """Where the one rank of a test meets itself."""
    return tmp_path / "store"
