"""The self-test: that it passes here, that it notices what is wrong, and that nothing takes its report away."""

import json
import os
import sys
import time
import types

import pytest
import torch

from mindspeed_lite import platform
from mindspeed_lite.bench import selftest
from mindspeed_lite.bench.selftest import FAILED, FALLBACK, OK, Check, CheckResult, device, numerics, perform
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import Contender, Problem, Work
from mindspeed_lite.ops.discovery import cases
from mindspeed_lite.platform import streams
from tests.harness import matrix
from tests.harness.commands import command, fails_in_one_line


@matrix.whole
def test_it_passes_here(tmp_path):
    out = tmp_path / "selftest.json"
    run = command("doctor", "--selftest", "--quick", "--out", out, MINDSPEED_LITE_DEVICE="cpu")
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(out.read_text())
    assert (report["schema_version"], report["kind"], report["device"]) == (3, "selftest", "cpu")
    assert report["passed"] and report["environment"]["device_type"] == "cpu"
    assert f"All {len(report['checks'])} checks passed on cpu" in run.stdout and f"written: {out}" in run.stdout
    by_group = {
        group: [check for check in report["checks"] if check["group"] == group] for group in ("device", "numerics")
    }
    assert [check["name"] for check in by_group["device"]] == [
        "device layer", "copies and arithmetic", "process group (gloo)",
    ]  # fmt: skip
    for name in dispatch.OPERATORS:
        has_gradient = cases(name).problem(cases(name).correctness[0], "cpu", torch.float32).both is not None
        numbers = [check for check in by_group["numerics"] if check["name"].startswith(f"{name} ")]
        assert {check["name"].rsplit(" ", 1)[1] for check in numbers} == {"fp32", "bf16"}
        for check in numbers:
            results = [figure["result"] for figure in check["figures"]]
            assert (
                results[:2] == (["output without gradients", "output"] if has_gradient else ["output"])
                or "main" in check["name"]
            )
            assert all(figure["error"] <= figure["bound"] for figure in check["figures"])


def test_a_report_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    run = command("doctor", "--selftest", "--out", tmp_path / "none" / "x.json", MINDSPEED_LITE_DEVICE="cpu")
    fails_in_one_line(run, "--out", "there is no such folder")


# Numbers


def problem(ours):
    def make():
        generator = torch.Generator().manual_seed(5)
        return tuple(torch.randn(8, 16, generator=generator).requires_grad_() for _ in range(2))

    return Problem(
        operator="rms_norm",
        name="8x16 fp32",
        device="cpu",
        dtype=torch.float32,
        make=make,
        forward=Work(0, 0),
        both=None,
        contenders=(Contender("mindspeed_lite", lambda: ours), Contender("torch", lambda: torch.mul)),
    )


def test_right_numbers_pass():
    outcome = numerics.judge(problem(lambda x, weight: weight * x), "cpu")
    assert outcome.status == OK, outcome.text
    assert [each["result"] for each in outcome.figures] == [
        "output without gradients", "output", "gradient of input 1", "gradient of input 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("planted", "where"),
    [
        (lambda x, weight: x * weight * (1 + 1e-5), "output"),
        (lambda x, weight: x * weight if x.requires_grad else 2 * x * weight, "output without gradients"),
        (lambda x, weight: x * weight.detach() + 0 * weight, "gradient of input 2"),
        (lambda x, weight: x * weight / 0, "output"),
        (lambda x, weight: x * weight * (1 + 10 * 2.0**-23), "bound 1e-06"),
    ],
)
def test_wrong_numbers_fail_and_say_where(planted, where):
    outcome = numerics.judge(problem(planted), "cpu")
    assert outcome.status == FAILED and where in outcome.text, outcome.text


@pytest.mark.parametrize(("name", "status"), [("cpu", FALLBACK), ("npu", FAILED)])
def test_what_the_backend_refuses_is_said(monkeypatch, name, status):
    def refuses(*args):
        if dispatch.operator("rms_norm")._forced == name:
            raise RuntimeError(f"rms_norm: {name} is forced and cannot serve this call: too wide")
        return args[0] * args[1]

    operator = dispatch.operator("rms_norm")
    monkeypatch.setattr(operator, "unusable", lambda backend: [])
    outcome = numerics.judge(problem(refuses), name)
    assert outcome.status == status and "computed by the reference" in outcome.text and "too wide" in outcome.text


def test_an_error_of_the_device_is_no_refusal():
    def breaks(x, weight):
        raise RuntimeError("aicore exception")

    line = perform(Check("numerics", "it", lambda: numerics.judge(problem(breaks), "cpu")))
    assert (line["status"], line["text"]) == (FAILED, "RuntimeError: aicore exception")


def test_a_backend_that_does_not_load_fails(monkeypatch):
    monkeypatch.setattr(dispatch, "selected", lambda name, device: dispatch.Selection("reference", ("no CANN",)))
    first = numerics.checks("cpu", quick=True)[0]
    assert perform(first)["status"] == FAILED and "no CANN" in perform(first)["text"]


def test_every_operator_and_every_dtype_is_looked_at():
    for quick, dtypes in ((True, {"fp32", "bf16"}), (False, {"fp32", "bf16", "fp16"})):
        problems = numerics.problems("cpu", quick)
        assert {each.operator for each in problems} == set(dispatch.OPERATORS)
        assert {each.name.rsplit(" ", 1)[1] for each in problems} == dtypes
        assert len({(each.operator, each.name) for each in problems}) == len(problems)


# The device


class Module:
    """A device's module over the CPU, right in everything."""

    Event, Stream = streams.Event, streams.Stream
    current_stream, stream = staticmethod(streams.current_stream), streams.StreamContext
    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    held = (0, 64 << 20, 0)

    def __init__(self):
        self._held = iter(self.held)

    def synchronize(self):
        pass

    def reset_peak_memory_stats(self):
        pass

    def memory_allocated(self):
        return next(self._held)

    def max_memory_allocated(self):
        return 64 << 20


CHECKS = {"streams": device.streams, "random state": device.random_state, "memory": device.memory}


@pytest.mark.parametrize("name", CHECKS)
def test_a_device_that_does_it_right_passes(name):
    assert CHECKS[name](Module(), "cpu")


class SameTime(streams.Event):
    def elapsed_time(self, end_event):
        return 0.0


@pytest.mark.parametrize(
    ("name", "planted", "said"),
    [
        ("streams", {"Event": SameTime}, "took 0.0 ms"),
        ("random state", {"set_rng_state": lambda self, state: None}, "restored random state gives other values"),
        ("random state", {"manual_seed": lambda self, seed: None}, "same seed"),
        ("memory", {"held": (0, 0, 0)}, "memory_allocated moves by 0 MB"),
        ("memory", {"max_memory_allocated": lambda self: 0}, "max_memory_allocated moves by 0 MB"),
        ("memory", {"held": (0, 64 << 20, 64 << 20)}, "there remain 64 MB"),
    ],
)
def test_a_device_that_does_it_wrong_fails(name, planted, said):
    wrong = type("Wrong", (Module,), planted)
    line = perform(Check("device", name, lambda: CheckResult(CHECKS[name](wrong(), "cpu"))))
    assert line["status"] == FAILED and said in line["text"]


def test_arithmetic_that_is_off_fails(monkeypatch):
    assert device.arithmetic("cpu")
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a, b) + (a.dtype == torch.bfloat16) * 99)
    with pytest.raises(device.DeviceCheckError, match="bfloat16 matmul of integers is off by"):
        device.arithmetic("cpu")


def test_on_an_npu_all_of_it_is_asked(monkeypatch):
    monkeypatch.setattr(torch, "npu", Module(), raising=False)
    names = [check.name for check in device.checks("npu")]
    assert names == [
        "device layer", "copies and arithmetic", "streams and events", "random state", "memory statistics",
        "process group (hccl)",
    ]  # fmt: skip


def test_a_mapping_that_is_not_active_fails(monkeypatch):
    chosen = types.SimpleNamespace(describe=lambda: "1 x it")
    monkeypatch.setattr(platform, "activate", lambda name: chosen)
    monkeypatch.setattr(torch, "ones", lambda *args, device, own=torch.ones: own(*args))
    with pytest.raises(device.DeviceCheckError, match="transfer_to_npu is not active"):
        device.layer("npu")


# Processes that crash and hang


def aborts():
    print("bad kernel", file=sys.stderr, flush=True)
    os.abort()


def plan(device, quick):
    runs = {
        "one": lambda: CheckResult("fine"),
        "aborts": aborts,
        "exits": lambda: os._exit(3),
        "hangs": lambda: time.sleep(600),
        "last": lambda: CheckResult("fine"),
    }
    if os.environ["SELFTEST_NAMES"] == "":
        sys.exit("no device any more")
    return [Check("numerics", name, runs[name]) for name in os.environ["SELFTEST_NAMES"].split()]


def selftested(monkeypatch, names, tell=lambda *entry: None):
    monkeypatch.setenv("SELFTEST_NAMES", names)
    report = selftest.run("cpu", seconds=60.0, plan=plan, tell=tell)
    return report, {check["name"]: check["text"] for check in report["checks"]}


def test_a_check_that_takes_the_process_down_is_one_failure(monkeypatch):
    told = []
    report, texts = selftested(monkeypatch, "one aborts exits last", lambda *entry: told.append(entry))
    assert [check["status"] for check in report["checks"]] == ["ok", "failed", "failed", "ok"]
    assert "SIGABRT: bad kernel" in texts["aborts"] and "exit code 3" in texts["exits"] and not report["passed"]
    assert report["to_report"][0].startswith("numerics, aborts, on cpu: failed: ") and len(report["to_report"]) == 2
    assert told[:2] == [(0, 4, "one"), (1, 4, "aborts")] and told[-1] == (4, 4, "")
    assert report["environment"]["device_type"] == "cpu"


@matrix.whole
def test_a_check_that_hangs_is_one_failure(monkeypatch):
    _, texts = selftested(monkeypatch, "hangs last")
    assert texts == {"hangs": "did not end within 60 s", "last": "fine"}


def test_a_process_that_does_not_start_again_is_the_end(monkeypatch):
    report, texts = selftested(monkeypatch, "aborts last", lambda *entry: monkeypatch.setenv("SELFTEST_NAMES", ""))
    assert [check["status"] for check in report["checks"]] == ["failed", "failed"]
    assert "exit code 1: no device any more" in texts["start of the self-test"]


def test_the_table_has_a_line_for_what_is_right_and_one_for_each_failure():
    figure = {"result": "output", "error": 1.0, "bound": 4.0}

    def check(name, status, group="numerics"):
        text = f"text of {name}"
        return {"group": group, "name": name, "status": status, "text": text, "seconds": 1.0, "figures": [figure]}

    checks = [check("a layer", OK, "device"), check("norm a", OK), check("norm b", OK), check("norm c", FAILED)]
    assert selftest.lines({"checks": checks}) == [
        ("ok", "device: a layer", "text of a layer"),
        ("failed", "numerics: norm", "c: text of norm c"),
        ("ok", "numerics: norm", "2 cases, nearest to its bound: a, output at 25%"),
    ]
