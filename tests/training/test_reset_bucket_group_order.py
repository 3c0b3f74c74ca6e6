"""`--reset-bucket-group-order` in real training: overlapped gathers in another order, the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness import checkouts, matrix
from tests.harness.training import Trainer

OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.ALL))
@pytest.mark.parametrize("layout", matrix.only(["tied"], ["tied", "experts"]))
def test_the_losses_are_the_same(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    options = {**OVERLAPPED, "steps": 4, **({"tied": True} if layout == "tied" else {"ep": 2, "experts": 4})}
    off = trainer(release).core("device", 2, options)
    on = trainer(release).core("features", 2, options, flags={"reset_bucket_group_order": True, "strict": True})
    assert on.history() == off.history()
