"""Did you mean: one line for each word that no parser knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from .table import flags


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()


def closest(flag: str, known: Iterable[str]) -> str:
    """The flag of the parser, or else of MindSpeed's, that `flag` resembles most; empty if none does."""
    # The parser's come last and so win where two are written alike.
    names = {_plain(each): each for each in (*flags(), *(each for each in known if each.startswith("--")))}
    found = difflib.get_close_matches(_plain(flag), names, n=1, cutoff=0.8)
    return names[found[0]] if found else ""


def unrecognized(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """One line for each flag among the words that the parser left over, and for each value that belongs to none."""
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
