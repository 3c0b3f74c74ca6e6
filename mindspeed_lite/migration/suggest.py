"""Suggests corrections for words unknown to the parser."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from .table import flags


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()


def closest(flag: str, known: Iterable[str]) -> str:
    """Most similar flag of the parser, else of MindSpeed; empty if none."""
    # The parser's come last, so they win on equal spelling.
    names = {_plain(each): each for each in (*flags(), *(each for each in known if each.startswith("--")))}
    found = difflib.get_close_matches(_plain(flag), names, n=1, cutoff=0.8)
    return names[found[0]] if found else ""


def unrecognized(words: Sequence[str], known: Iterable[str]) -> list[str]:
    names, lines, after_flag = tuple(known), [], False
    for word in words:
        if not word.startswith("-") or _is_number(word):
            if not after_flag:
                lines.append(f"unrecognized argument {word!r}: it belongs to no flag")
            continue
        after_flag = True
        flag = word.partition("=")[0]
        close = closest(flag, names)
        lines.append(f"unrecognized argument {flag}{f': did you mean {close}?' if close else ''}")
    return list(dict.fromkeys(lines))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
