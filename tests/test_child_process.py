"""`mindspeed_lite.child_process`: no way out of its block leaves a process running."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.child_process import child_process, kill

SLEEP = ["sleep", "50"]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_every_way_out_ends_it(error: type[BaseException] | None) -> None:
    with pytest.raises(error) if error else contextlib.nullcontext(), child_process(SLEEP) as child:
        assert child.poll() is None
        if error is not None:
            raise error
    assert child.returncode == -signal.SIGKILL and _is_gone(child.pid)


def test_what_it_started_ends_with_it() -> None:
    code = f"import subprocess; print(subprocess.Popen({SLEEP}).pid, flush=True)"
    with child_process([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        helper = int(child.stdout.readline())
        child.wait()
    deadline = time.monotonic() + 120
    while not _is_gone(helper) and "Z" not in Path(f"/proc/{helper}/stat").read_text().split(")")[1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


ENDED = """
import sys, time
from mindspeed_lite.child_process import child_process, terminate
try:
    with child_process(["sleep", "50"]) as first, child_process(LAUNCHER, terminate) as second:
        print(first.pid, second.pid, flush=True)
        time.sleep(50)
except KeyboardInterrupt:
    print("left", flush=True)
"""
# Its worker has a session of its own, and ends with it where it is asked to end.
LAUNCHER = """
import signal, subprocess, sys
worker = subprocess.Popen(["sleep", "50"], start_new_session=True, stdout=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: (worker.kill(), worker.wait(), sys.exit(1)))
print(worker.pid, flush=True)
signal.pause()
"""


def test_sigterm_ends_what_was_started() -> None:
    """Python by itself would end at once: without its `finally`, and without processes of other sessions."""
    code = ENDED.replace("LAUNCHER", repr([sys.executable, "-c", LAUNCHER]))
    ended = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert ended.stdout is not None
    pids = [int(each) for _ in range(2) for each in ended.stdout.readline().split()]
    assert len(pids) == 3
    ended.terminate()
    assert ended.wait(30) == 0
    assert ended.stdout.read() == "left\n"
    assert all(_is_gone(pid) for pid in pids)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_is_ended_is_ignored(sign: signal.Signals) -> None:
    def end(child: subprocess.Popen[bytes]) -> None:
        signal.raise_signal(sign)
        kill(child)

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with child_process(SLEEP, end) as child:
        pass
    assert child.returncode == -signal.SIGKILL
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_starts_ends_it(sign: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            started.append(self)
            signal.raise_signal(sign)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), child_process(SLEEP):
            raise AssertionError("the block is not entered")
    finally:
        signal.signal(signal.SIGINT, before)
    assert started[0].returncode == -signal.SIGKILL


def test_a_handler_of_the_callers_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with child_process(SLEEP) as child:
            signal.raise_signal(signal.SIGTERM)
            assert child.poll() is None
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    with child_process(["true"]):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
