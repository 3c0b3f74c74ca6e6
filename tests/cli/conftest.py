"""Commands print as into a pipe, whatever the width that an earlier test or the shell has left in the environment."""

import pytest


@pytest.fixture(autouse=True)
def piped(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
