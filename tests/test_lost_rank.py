"""The end of a process whose peer has ended or hangs: one line for all ranks that are left, and exit code 2."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest

from mindspeed_lite.error_exit import describe_lost_rank
from tests.harness.endings import Ending, endings
from tests.harness.processes import forked

RANKS, LOST = 3, 1


def _has_ended(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or " Z " in status.read_text()


def _ended(how: str, **variables: str) -> list[Ending]:
    """Ranks of which one is lost before a sum, in which the others are; if it hangs, they wait for it for a second."""

    def body(rank: int) -> None:
        import torch
        import torch.distributed as dist

        from mindspeed_lite import error_exit

        os.environ["RANK"] = str(rank)
        error_exit.install()
        store = dist.FileStore(str(folder.parent / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
        store.set(str(rank), str(os.getpid()))
        others = [int(store.get(str(each))) for each in range(RANKS) if each != LOST]
        dist.all_reduce(torch.ones(1))
        if rank == LOST:
            if how == "fails":
                raise KeyError("of the script")
            if how == "hangs":
                while not all(map(_has_ended, others)):
                    time.sleep(0.01)
                os._exit(9)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        if how == "waits":
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        dist.all_reduce(torch.ones(1))

    folder = Path(tempfile.mkdtemp()) / "run"
    return endings(body, folder, {"WORLD_SIZE": str(RANKS), **variables}, ranks=RANKS)


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("killed", ("all_reduce in tests.test_lost_rank:", "failed (", "Connection "), -9),
        ("waits", ("in tests.test_lost_rank:", "(body)"), -9),
        ("hangs", ("all_reduce in tests.test_lost_rank:", "failed (Timed out waiting"), 9),
        ("fails", ("all_reduce in tests.test_lost_rank:",), 1),
    ],
)
@forked("torch")
def test_those_who_are_left_say_it_once(how: str, words: tuple[str, ...], code: int) -> None:
    found = _ended(how)
    assert [each.code for each in found] == [2, code, 2]
    left = [line for each in (found[0], found[2]) for line in each.err if "gloo" not in line.lower()]
    (line,) = left
    assert line.startswith("mindspeed_lite: error on rank ") and ": another rank has ended or does not answer: " in line
    assert all(each in line for each in words) and "pair.cc" not in line, line
    assert any("KeyError: 'of the script'" in each for each in found[LOST].err) == (how == "fails")
    assert found[0].processes == [] and found[0].files == set()


@forked("torch")
def test_a_traceback_for_developers() -> None:
    found = _ended("killed", MINDSPEED_LITE_TRACEBACK="1")
    assert [each.code for each in found] == [2, -9, 2]
    assert all(any("Traceback (most recent call last):" in line for line in found[rank].err) for rank in (0, 2))


class DistNetworkError(RuntimeError):
    """As torch's."""


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:24413"), True),
        (RuntimeError("NCCL error in: c.cpp:3, remote process exited or there was a network error"), True),
        (RuntimeError("Rank 2 failed to pass monitoredBarrier in 3000 ms"), True),
        (DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("[../gloo/timeout.cc:81]"), True),
        (RuntimeError("NCCL error in: c.cpp:3, invalid usage"), False),
        (RuntimeError("Connection reset by peer"), False),
        (ConnectionResetError("gloo: connection reset by peer"), False),
        (ValueError("gloo: timed out"), False),
    ],
)
def test_what_is_taken_for_a_lost_rank(error: Exception, is_lost: bool) -> None:
    assert (describe_lost_rank(error) is not None) == is_lost


def test_an_error_before_it_is_seen() -> None:
    """As where a script's `finally` calls a barrier."""
    message = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:24413"
    for before, is_lost in ((KeyError("of the script"), False), (DistNetworkError("failed to recv"), True)):
        lost = RuntimeError(message)
        lost.__context__ = before
        assert (describe_lost_rank(lost) is not None) == is_lost
        lost.__suppress_context__ = True  # raised from None
        assert describe_lost_rank(lost) is not None
