"""Width, colour and wrapping; a real pseudo-terminal where they matter."""

import os
import pty
import re
import struct
import sys

import pytest

from mindspeed_lite.cli import terminal
from tests.harness.commands import ESCAPE, command, environment, without


def in_a_terminal(*arguments, columns, path=(), **variables):
    """Exit code and output of the command under a pseudo-terminal of that width."""
    import fcntl
    import subprocess
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-m", "mindspeed_lite", *arguments],
        env=environment(path, TERM="xterm", **variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's way of saying that the other end is closed
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(ours)
    return child.wait(), b"".join(pieces).decode().replace("\r\n", "\n")


# Doctor without torch: instant, and it has all three colours.


def test_a_terminal_has_colour_and_its_own_width(tmp_path):
    code, out = in_a_terminal("doctor", columns=70, **without(tmp_path, "torch"))
    assert code == 1
    assert "\x1b[31mproblem\x1b[0m" in out and "\x1b[32mok\x1b[0m" in out
    plain = ESCAPE.sub("", out)
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 70
    wide = ESCAPE.sub("", in_a_terminal("doctor", columns=160, **without(tmp_path, "torch"))[1])
    assert len(wide.splitlines()) < len(plain.splitlines())
    assert re.sub(r"\s+", "", wide) == re.sub(r"\s+", "", plain)


def test_no_color_is_respected(tmp_path):
    _, out = in_a_terminal("doctor", columns=80, NO_COLOR="", **without(tmp_path, "torch"))
    assert "\x1b" not in out and "problem" in out


def test_piped_output_is_plain_and_stable(tmp_path):
    runs = [command("doctor", **without(tmp_path, "torch")) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert "\x1b" not in runs[0].stdout
    assert max(map(len, runs[0].stdout.splitlines())) <= 100


@pytest.mark.parametrize(("columns", "expected"), [("20", 60), ("60", 60), ("133", 133), ("999", 200)])
def test_width_has_bounds(monkeypatch, columns, expected):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.width() == expected


def test_a_long_word_breaks_at_its_punctuation():
    word = "package.module_of_some_length:Class.method"
    lines = terminal.wrap(word, 20)
    assert "".join(lines) == word
    assert all(len(line) <= 20 for line in lines) and lines[0].endswith((".", ":", "_"))


def test_a_table_that_does_not_fit_is_none():
    rows = [("a" * 30, "b c")]
    assert terminal.table(("one", "two"), rows, 20, False, (0, 0)) is None
    assert terminal.table(("one", "two"), rows, 40, False, (0, 0)) == [
        "one".ljust(30) + "  two",
        "a" * 30 + "  b c",
    ]


def test_a_table_shares_its_room_and_keeps_every_word():
    rows = [("name", "many words that have to be wrapped somewhere", "and some more of them here")]
    lines = terminal.table(("x", "y", "z"), rows, 50, False, (0, 10, 10))
    assert all(len(line) <= 50 for line in lines)
    assert set(" ".join(lines).split()) == set(" ".join(rows[0]).split()) | {"x", "y", "z"}
