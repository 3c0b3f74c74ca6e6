"""`--virtual-optimizer` in real Megatron: the same training to the last bit, moments elsewhere, and its budget."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import OptionError
from mindspeed_lite.memory import host, host_mapped_moments
from mindspeed_lite.patches import virtual_optimizer as patch
from tests.harness.optimizers import KINDS, gradients, inner, optimizer_of, saved, start, train
from tests.harness.processes import forked


def begin(groups: Path) -> None:
    """The models of these tests are small."""
    host_mapped_moments._SMALLEST = 64
    start(groups)


def on(*budget: str | float, **more: Any) -> dict[str, Any]:
    return {"virtual_optimizer": budget, "strict": True, **more}


@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed", "fp32"])
@forked("megatron")
def test_moments_are_in_files_for_as_long_as_it_is_on(kind: str, groups: Path) -> None:
    begin(groups)

    def places() -> set[int]:
        """Addresses of mapped files of ours."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {int(line.split("-")[0], 16) for line in lines if "mindspeed-lite-" in line}

    with mindspeed_lite.enabled(**on("all")):
        model, optimizer = optimizer_of(**KINDS[kind])
        gradients(model, 0)
        optimizer.step()
        states = list(inner(optimizer).state.values())
        large = [state for state in states if state["exp_avg"].nbytes >= 128]
        assert large and all(
            state[name].data_ptr() in places() for state in large for name in ("exp_avg", "exp_avg_sq")
        )
        saved(model, optimizer)
    assert not any(state["exp_avg"].data_ptr() in places() for state in states)
    gradients(model, 1)
    optimizer.step()


@forked("megatron")
def test_a_budget_in_gib_is_kept(groups: Path) -> None:
    begin(groups)
    for budget, moments in ((0, 0), (24 * 40 * 8 / 2**30, 24 * 40 * 8), ("all", 8 * (24 * 40 + 32 * 8 + 24 + 6 * 8))):
        with mindspeed_lite.enabled(**on(budget)):
            model, optimizer = optimizer_of(**KINDS["bf16"])
            gradients(model, 0)
            optimizer.step()
            held = inner(optimizer).placement.nbytes
            assert held <= moments and (held > 0) == (moments > 0)
        # The next block would give this one its budget.
        del model, optimizer
        gc.collect()


def test_a_budget_is_that_of_the_stage() -> None:
    assert patch._budget(("all",), 3, 4) is None and patch._budget((1.5,), 3, 4) == 3 * 2**29
    with pytest.raises(OptionError, match=r"--virtual-optimizer -1\.0: .* GiB from 0 on"):
        patch._budget((-1.0,), 0, 1)
    assert patch._budget((1.0, "all"), 0, 2) == 2**30 and patch._budget((1.0, "all"), 1, 2) is None


@forked("megatron")
def test_no_more_room_is_said_and_training_goes_on(groups: Path) -> None:
    begin(groups)

    def empty(*arguments: Any) -> torch.Tensor:
        raise MemoryError("no room")

    host.empty = empty
    with mindspeed_lite.enabled(virtual_optimizer=["all"]):
        train(KINDS["bf16"], 2)
        assert [each.reason for each in mindspeed_lite.report().fallbacks] == ["no room"]
