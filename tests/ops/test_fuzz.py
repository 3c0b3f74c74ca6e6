"""The fuzz run: briefly over every operator, and over faults that it must find."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from mindspeed_lite.ops import discovery
from tests.harness import matrix
from tools.fuzz.__main__ import environments
from tools.fuzz.calls import Call, NoCall, inputs_of, problem
from tools.fuzz.judge import fake_finding, forked


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_a_short_run_finds_nothing() -> None:
    done = fuzz("--calls", "40", "--seconds", "400", "--seed", "0", "--environment", "as it is")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fuzz: seed 0" in done.stdout and re.search(r"fuzz: 4\d calls, 0 findings", done.stdout)


FAULTS = [
    ("odd_widths_without_gradient", r"FINDING rms_norm: gradient of input 1 is \S+ from the definition's"),
    ("bf16_ends_the_process", r"FINDING rms_norm: ended the process with SIGABRT"),
]


@pytest.mark.parametrize(("fault", "words"), matrix.only(FAULTS[:1], FAULTS))
def test_a_planted_fault_is_found_and_its_command_repeats_it(fault: str, words: str) -> None:
    given = ("--plant", f"tests.harness.planted:{fault}", "--environment", "as it is", "--only", "rms_norm")
    done = fuzz("--calls", "40", "--seconds", "400", "--seed", "1", *given)
    assert done.returncode == 1 and re.search(words, done.stdout), done.stdout + done.stderr
    again = shlex.split(re.findall(r"again: python -m tools.fuzz (.*)", done.stdout)[0])
    repeated = fuzz(*again)
    assert repeated.returncode == 1 and re.search(words, repeated.stdout), repeated.stdout + repeated.stderr


def test_a_call_is_its_own_text() -> None:
    call = Call("rms_norm", "7x5", "bf16", layouts=("sliced", "plain"), values="nan", threads=2)
    assert Call.of(call.json()) == call and "seed" not in call.json()
    x, weight, *_ = inputs_of(call, problem(call))
    assert x.shape == (7, 5) and x.stride() == (10, 1) and x.isnan().sum() == 1 and weight.is_contiguous()
    assert problem(Call("rms_norm", "7x5", "bf16", empty=0)).make()[0].shape == (0, 5)
    for wrong in (Call("rms_norm", "7", "bf16"), Call("rms_norm", "100000x5000", "bf16")):
        with pytest.raises(NoCall):
            problem(wrong)


def test_no_kernel_is_handed_the_address_of_a_tensor_that_has_none() -> None:
    """Which would end the process: all in one child, which says where it is."""

    def findings() -> str:
        calls = [Call(name, discovery.cases(name).correctness[0], "bf16", mode="fake") for name in discovery.OPERATORS]
        found = {call.operator: fake_finding(call) for call in calls}
        return "; ".join(f"{name}: {text}" for name, text in found.items() if text)

    assert forked(findings) == ""


def test_environments_that_a_processor_has() -> None:
    found = environments("/scratch")
    assert {"as it is", "no mkldnn", "no cache", "aten default"} <= found.keys()
    assert found["no compiler"] == {"CXX": "no-such-compiler", "MINDSPEED_LITE_CACHE": "/scratch"}
