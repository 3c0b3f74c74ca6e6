"""What is found out while a training runs, for its report and, since that has been printed by then, for its log."""

from __future__ import annotations

import logging

import torch

from mindspeed_lite.engine import Session

_log = logging.getLogger("mindspeed_lite")


def tell(session: Session, text: str) -> None:
    """Note it on every rank, and log it on the first one."""
    session.notice(text)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        _log.warning("%s", text)
