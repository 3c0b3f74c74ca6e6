"""The stand-in computes what its names promise, with the signatures of the real package; wrong ones are rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.te_contract import checks, signatures
from tests.te_contract.conftest import STAND_IN

ATTENTION = "attention/dot_product_attention.py"
MUTATIONS = {
    "a wrong scale": (ATTENTION, "1 / math.sqrt(key_size)", "1 / key_size"),
    "a mask off by one": (ATTENTION, "is_hidden |= distance < 0", "is_hidden |= distance < 1"),
    "heads in another order": (ATTENTION, "x.repeat_interleave(repeats, 2)", "x.repeat(1, 1, repeats, 1)"),
    "packs that see each other": (ATTENTION, "is_hidden | (sequence[0]", "is_hidden & (sequence[0]"),
    "a missing bias gradient": ("module/linear.py", "if has_bias else None)", "if not has_bias else None)"),
    "a gradient that replaces": ("module/base.py", "weight.main_grad.add_(", "weight.main_grad.copy_("),
    "a first micro-batch that adds": ("module/base.py", "if is_first:", "if False:"),
    "a norm without its offset": ("module/norm.py", "weight + 1 if zero_centered", "weight + 0 if zero_centered"),
    "a hook that is not called": ("module/base.py", "            hook()", "            pass"),
    "experts in another order": (
        "module/grouped_linear.py",
        "return torch.cat(parts)",
        "return torch.cat(parts[::-1])",
    ),
    "a swapped rotation": ("attention/rope.py", "torch.cat([-second, first], -1)", "torch.cat([second, -first], -1)"),
    "a late count of steps": ("optimizers.py", 'group.get("step", 0) + 1', 'group.get("step", 1) + 1'),
    "a low half that is lost": ("optimizers.py", '["master_param"].copy_(low)', '["master_param"].zero_()'),
    "probabilities of another expert": ("permutation.py", "probs[token, expert])", "probs[token, expert.flip(0)])"),
    "a target that weighs double": (
        "cross_entropy.py",
        "-(1 - ctx.smoothing) * is_here",
        "-(2 - ctx.smoothing) * is_here",
    ),
    "another normalization": ("router.py", "values.sum(-1, keepdim=True)", "values.amax(-1, keepdim=True)"),
}


@pytest.mark.parametrize("name", [each.__name__ for each in checks.CHECKS])
def test_it_computes_what_is_promised(imported: Callable[[Path], Any], name: str) -> None:
    (found,) = (each for each in checks.CHECKS if each.__name__ == name)
    checks.torch.manual_seed(0)
    found(imported(STAND_IN))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_stand_in_is_rejected(imported: Callable[[Path], Any], tmp_path: Path, name: str) -> None:
    file, right, wrong = MUTATIONS[name]
    shutil.copytree(STAND_IN, tmp_path / "wrong")
    path = tmp_path / "wrong" / "transformer_engine" / "pytorch" / file
    text = path.read_text()
    assert text.count(right) == 1, f"{file} has {text.count(right)} of {right!r}"
    path.write_text(text.replace(right, wrong))
    assert checks.run_all(imported(tmp_path / "wrong")), "no check fails"


def test_signatures_are_those_of_the_real_package() -> None:
    recorded = json.loads(signatures.RECORDED.read_text())
    assert signatures.differences(recorded, STAND_IN) == []
    recorded["transformer_engine/pytorch/cross_entropy.py"]["parallel_cross_entropy"] += ", more"
    assert signatures.differences(recorded, STAND_IN) != []
