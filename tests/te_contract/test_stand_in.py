"""The stand-in computes what its names promise, with the signatures of the real package; wrong ones are rejected."""

from __future__ import annotations

import importlib
import inspect
import operator
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.te_contract import checks, signatures
from tests.te_contract.conftest import STAND_IN

# By the check that must fail: what is changed, where, from and to.
MUTATIONS = {
    "attention": [
        ("a wrong scale", "1 / math.sqrt(key_size)", "1 / key_size"),
        ("a mask off by one", "is_hidden |= distance < 0", "is_hidden |= distance < 1"),
        ("heads in another order", "x.repeat_interleave(repeats, 2)", "x.repeat(1, 1, repeats, 1)"),
    ],
    "attention_of_packs": [("packs that see each other", "is_hidden | (sequence[0]", "is_hidden & (sequence[0]")],
    "linear": [("a missing bias gradient", "if has_bias else None)]", "if not has_bias else None)]")],
    "accumulated_gradients": [
        ("a gradient that replaces", "weight.main_grad.add_(", "weight.main_grad.copy_("),
        ("a first micro-batch that adds", "if is_first:", "if False:"),
    ],
    "norm_and_linear": [("a norm without its offset", "weight + 1 if zero_centered", "weight + 0 if zero_centered")],
    "delayed_gradients": [("a hook that is not called", "            hook()", "            pass")],
    "grouped_linear": [("experts in another order", "return torch.cat(parts)", "return torch.cat(parts[::-1])")],
    "rotary_embedding": [("a swapped rotation", "torch.cat([-second, first], -1)", "torch.cat([second, -first], -1)")],
    "adam": [("a late count of steps", 'group.get("step", 0) + 1', 'group.get("step", 1) + 1')],
    "adam_with_remainders": [("a lost low half", '["master_param"].copy_(low)', '["master_param"].zero_()')],
    "permutation": [("another expert's", "probs[token, expert])", "probs[token, expert.flip(0)])")],
    "cross_entropy": [("a target that weighs double", "-(1 - ctx.smoothing)", "-(2 - ctx.smoothing)")],
    "router": [
        ("another normalization", "values / (values.sum(-1", "values / (values.amax(-1"),
        ("other auxiliary scores", "scores / (scores.sum(-1", "scores / (scores.amax(-1"),
    ],
}


@pytest.mark.parametrize("name", checks.CHECKS)
def test_it_computes_what_is_promised_and_a_wrong_one_is_rejected(
    imported: Callable[[Path], Any], tmp_path: Path, name: str
) -> None:
    checks.CHECKS[name](imported(STAND_IN))
    for what, right, wrong in MUTATIONS.get(name, []):
        # Compiled files of what stays come with it.
        shutil.copytree(STAND_IN, tmp_path / what)
        (path,) = (path for path in (tmp_path / what).rglob("*.py") if right in path.read_text())
        path.write_text(path.read_text().replace(right, wrong))
        with pytest.raises((AssertionError, RuntimeError)):
            checks.CHECKS[name](imported(tmp_path / what))


def test_signatures_are_those_of_the_real_package(imported: Callable[[Path], Any]) -> None:
    imported(STAND_IN)
    recorded = importlib.import_module("transformer_engine.recorded")
    for name, own in signatures.modules().items():
        module = importlib.import_module(f"transformer_engine.pytorch.{name}")
        theirs = recorded.RECORD.get(module.__name__, {})
        assert {*own} - signatures.UNRECORDED == {*theirs}
        for function, text in theirs.items():
            found = operator.attrgetter(function)(module)
            assert _plain(found) == str(recorded.signature_of(text, vars(module))), function
    with pytest.raises(TypeError, match="in_feature"):
        importlib.import_module("transformer_engine.pytorch").Linear(in_feature=8, out_features=6)


def _plain(function: Any) -> str:
    """A signature without annotations."""
    found = inspect.signature(getattr(function, "__func__", function))
    given = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=given, return_annotation=inspect.Signature.empty))
