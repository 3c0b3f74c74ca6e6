"""Suggests corrections for words unknown to the parser."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from .table import flags


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()


def unrecognized(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """A line for each unknown word, with the most similar flag of the parser or of MindSpeed."""
    # The parser's come last, so they win on equal spelling.
    names = {_plain(each): each for each in (*flags(), *(each for each in known if each.startswith("--")))}
    lines, after_flag = [], False
    for word in words:
        if not re.match(r"--?[A-Za-z]", word):
            if not after_flag:
                lines.append(f"unrecognized argument {word!r}: it belongs to no flag")
            continue
        after_flag = True
        flag = word.partition("=")[0]
        close = difflib.get_close_matches(_plain(flag), names, n=1, cutoff=0.8)
        lines.append(f"unrecognized argument {flag}{f': did you mean {names[close[0]]}?' if close else ''}")
    return list(dict.fromkeys(lines))
