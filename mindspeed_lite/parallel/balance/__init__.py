"""Which expert and which rank has how many tokens: counted while training, kept in a file, judged."""

from __future__ import annotations
