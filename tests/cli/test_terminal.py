"""Width, colour and tables; a real pseudo-terminal where they matter."""

import argparse
import io
import os
import pty
import re
import struct
import subprocess
import sys

import pytest

from mindspeed_lite.cli import terminal
from tests.harness.commands import ESCAPE, command, environment, without


def in_a_terminal(*arguments, columns, path=(), **variables):
    """Exit code and output of the command under a pseudo-terminal of that width."""
    import fcntl
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    given = environment(path, TERM="xterm", **variables)
    what = [sys.executable, "-m", "mindspeed_lite", *arguments]
    child = subprocess.Popen(what, env=given, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    pieces = [b"-"]
    while pieces[-1]:
        try:
            pieces.append(os.read(ours, 65536))
        except OSError:  # Linux's way of saying that the other end is closed
            break
    os.close(ours)
    return child.wait(), b"".join(pieces[1:]).decode().replace("\r\n", "\n")


def test_a_terminal_has_colour_and_its_own_width(tmp_path):
    # Doctor without torch: instant, and it has all three colours.
    code, out = in_a_terminal("doctor", columns=70, **without(tmp_path, "torch"))
    assert code == 1 and "\x1b[31mproblem\x1b[0m" in out and "\x1b[32mok\x1b[0m " in out
    plain = ESCAPE.sub("", out)
    assert max(map(len, plain.splitlines())) <= 70
    _, wide = in_a_terminal("doctor", columns=160, NO_COLOR="1", **without(tmp_path, "torch"))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", wide)
    wide = ESCAPE.sub("", wide)
    assert len(wide.splitlines()) < len(plain.splitlines())
    assert re.sub(r"\s+", "", wide) == re.sub(r"\s+", "", plain)


def test_piped_output_is_plain_and_one_line_a_row(tmp_path):
    out = command("doctor", **without(tmp_path, "torch")).stdout
    assert "\x1b" not in out
    (row,) = (line for line in out.splitlines() if re.match(r"problem\s+torch\s", line))
    assert "pip install" in row


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_for_a_terminal(monkeypatch, is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.progress("reading the command") as tell:
        tell(3, 12, "layouts")
    shown = ESCAPE.sub("", stream.getvalue())
    assert ("3/12" in shown and "layouts" in shown) if is_terminal else not shown


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (terminal.bounded(int, 1), "3", ["0", "x", "1.5", "9" * 5000 + "x"]),
        (terminal.bounded(float, 0, 8, above=True), "8", ["0", "8.1", "nan", "inf", ""]),
    ],
)
def test_a_bounded_number(read, good, bad):
    assert read(good) == float(good)
    for each in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"not '{each[:40]}'"):
            read(each)


def test_a_file_that_cannot_be_written_is_known_before_any_work(tmp_path):
    assert terminal.output_file(str(tmp_path / "x")) == str(tmp_path / "x") and not (tmp_path / "x").exists()
    for name, word in ((tmp_path, "it is a folder"), (tmp_path / "no" / "x", "no such folder"), ("/proc/x", "cannot")):
        with pytest.raises(argparse.ArgumentTypeError, match=word):
            terminal.output_file(str(name))
