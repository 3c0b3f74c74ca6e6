"""What is told while a training runs: in every rank's report, in the first one's log."""

from __future__ import annotations

import logging
import tempfile

import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.engine import Session
from mindspeed_lite.patches._found_out import tell
from tests.platform.forked import forked, on_ranks


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def told() -> tuple[list[str], list[str]]:
    """Notices of a session, and lines of the log."""
    handler = Lines()
    logger = logging.getLogger("mindspeed_lite")
    logger.addHandler(handler)
    report = mindspeed_lite.enable()
    session = Session({}, None, report)  # type: ignore[arg-type]
    tell(session, "slower")
    logger.removeHandler(handler)
    return list(report.notices), [text for text in handler.texts if "slower" in text]


@forked("megatron")
def test_without_other_ranks_it_is_noted_and_logged() -> None:
    notices, lines = told()
    assert notices.count("slower") == 1 and lines == ["slower"]


@forked("megatron")
def test_every_rank_notes_it_and_the_first_one_logs_it() -> None:
    store = tempfile.mkdtemp() + "/store"

    def body(rank: int) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        notices, lines = told()
        assert notices.count("slower") == 1 and lines == ["slower"] * (rank == 0)

    on_ranks(2, body)
