"""`--mindspeed-lite-verify`: original and replacement compared, judged by class, without a trace in the training."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mindspeed_lite
from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, Report, Session, Settings, VerifyError
from mindspeed_lite.verify import Verifier
from tests.harness import checkouts
from tests.harness.attention_modules import CASES, inputs_of, module_of
from tests.harness.norms import HIDDEN, norm_of
from tests.harness.processes import forked

EPS = torch.finfo(torch.float32).eps


def session_of(strict=False):
    settings = Settings({})
    return Session(settings, Context(settings, "cpu", {}), Report({}, "cpu"), strict=strict)


def verifier_of(calls=1, strict=False):
    session = session_of(strict)
    return Verifier(calls, session), session.report


def double(x):
    return x * 2


def inputs(dtype=torch.float32, wants=True):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    return {"x": x.requires_grad_(wants)}


def check(verifier, ours, original=double, numerics="ulp", given=None, **keywords):
    verifier.check("some_feature", "twice", numerics, ours, original, given or inputs(), against="torch", **keywords)


class Scaled(torch.autograd.Function):
    """x * 2 with a gradient of `slope`."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.slope = slope
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.slope, None


def missing(x):
    y = x * 2
    y = y.detach()
    y[0, 0] = float("nan")
    return y + x * 0


WRONG = {
    "scale": (lambda x: x * 2.02, r"(output|gradient of x) 1\.0e-02 from "),
    "gradient": (lambda x: Scaled.apply(x, 2.02), "gradient of x 1.0e-02 from "),
    "no_gradient": (lambda x: x.detach() * 2, "gradient of x 1.0e\\+00 from "),
    "nan": (missing, "output is not finite where the original's is"),
    "nan_gradient": (lambda x: Scaled.apply(x, float("inf")), "gradient of x is not finite where the original's is"),
    "shape": (lambda x: x[:3] * 2, r"output has shape \(3, 5\)"),
}


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_operator_is_caught_and_strict_says_what_to_do(fault, widened, caplog):
    ours, words = WRONG[fault]
    verifier, report = verifier_of(2)
    with caplog.at_level(logging.DEBUG, "mindspeed_lite"):
        check(verifier, ours, widened=widened)
        check(verifier, ours, widened=widened)
    (entry,) = report.verifications
    assert entry.verdict == "exceeds" and entry.calls == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "some_feature, twice float32 x[6,5]: exceeds" in record.message
    strict, report = verifier_of(strict=True)
    done = []
    strict.listeners.append(done.append)
    with pytest.raises(VerifyError, match=words) as caught:
        check(strict, ours, widened=widened)
    text = str(caught.value)
    parts = (
        "--mindspeed-lite-verify",
        "some_feature, ",
        "--some-feature ",
        "twice float32 x[6,5]: exceeds",
        "Run without",
    )
    assert all(part in text for part in parts) and "\n" not in text and done == report.verifications


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("widened", [False, True])
def test_a_right_operator_passes(dtype, widened):
    verifier, report = verifier_of(strict=True)
    check(verifier, lambda x: x + x, given=inputs(dtype), widened=widened)
    (entry,) = report.verifications
    assert (entry.verdict, entry.calls, entry.output_error, entry.gradient_error) == ("ok", 1, 0.0, 0.0)
    eps = torch.finfo(dtype).eps
    wider = "float64" if dtype == torch.float32 else "float32"
    slack = 8 * eps if dtype == torch.float32 else eps
    assert (entry.measured_from, entry.bound) == ((wider, slack) if widened else ("original", 8 * eps))


def test_ulp_allows_twice_the_originals_own_error_and_8_eps_of_float32():
    def far(share):
        return lambda x: x * 2 * (1 + (share if x.dtype == torch.float32 else 0))

    given = inputs()
    verifier, _ = verifier_of(9, strict=True)
    original = far(32 * EPS)  # of a sum in a bad order, say
    check(verifier, far(-62 * EPS), original, given=given)
    with pytest.raises(VerifyError, match=r"from float64, bound 8\.[5-7]e-06"):
        check(verifier, far(-80 * EPS), original, given=given)
    check(verifier, far(7 * EPS), given=given, widened=False)
    with pytest.raises(VerifyError, match=r"from original, bound 9\.5e-07"):
        check(verifier, far(10 * EPS), given=given, widened=False)


def narrowing(x):
    """Casts, makes and writes narrow tensors on its way."""
    out = torch.empty_like(x, dtype=torch.bfloat16)
    out.copy_(x.bfloat16().float().mul_(2))
    return (out.half() + torch.zeros(x.shape, dtype=torch.float16)).to(x.dtype)


def in_a_kernel(x):
    if x.dtype != torch.float32:
        raise TypeError("takes float32")
    return x * 2


def test_the_originals_own_code_is_what_is_widened(caplog):
    verifier, report = verifier_of(9, strict=True)
    check(verifier, double, narrowing)
    check(verifier, double, torch.compile(narrowing, backend="eager"), variant="compiled")
    for entry in report.verifications:
        assert entry.measured_from == "float64" and entry.error == 0 and entry.bound > 1e-4, (
            "not from what it rounds to"
        )
    verifier, report = verifier_of(9)
    with caplog.at_level(logging.WARNING, "mindspeed_lite"):
        check(verifier, double, in_a_kernel)
        check(verifier, lambda x: x * 2.1, in_a_kernel)
    assert [entry.measured_from for entry in report.verifications] == ["original"]
    assert report.verifications[0].verdict == "exceeds"
    (notice,) = report.notices
    assert "does not run in a wider type (TypeError: takes float32); the bound is 8 eps" in notice


def test_bitwise_allows_nothing_and_deviation_whatever_is_finite():
    verifier, report = verifier_of(9, strict=True)
    check(verifier, lambda x: x + x, numerics="bitwise")
    with pytest.raises(VerifyError, match=r"from original, bound 0\.0e\+00"):
        check(verifier, lambda x: x * (2 + 2 * EPS), numerics="bitwise")
    report.verifications.clear()
    verifier, report = verifier_of(9, strict=True)
    check(verifier, lambda x: x * 3, numerics="deviation")
    (entry,) = report.verifications
    assert (entry.verdict, entry.bound) == ("ok", None) and entry.output_error == pytest.approx(0.5)
    with pytest.raises(VerifyError, match="not finite"):
        check(verifier, missing, numerics="deviation")


def test_only_the_first_calls_of_each_kind_are_compared():
    ran, done = [], []
    verifier, report = verifier_of(2)
    verifier.listeners.append(lambda entry: done.append((entry.shape, entry.calls)))
    kinds = [{}, {"given": {"x": torch.ones(3)}}, {"variant": "other"}, {"given": inputs(torch.bfloat16)}]
    for _ in range(4):
        for kind in kinds:
            check(verifier, lambda x: (ran.append(1), x * 2)[1], **kind)
    shapes = ["float32 x[6,5]", "float32 x[3]", "float32 x[6,5] other", "bfloat16 x[6,5]"]
    assert len(ran) == 8 and [entry.shape for entry in report.verifications] == shapes
    assert done == [(shape, 2) for shape in shapes]


def test_neither_inputs_nor_gradients_nor_random_states_notice():
    given = inputs()
    before, x = given["x"].clone(), given["x"]
    x.grad = torch.ones_like(x)

    def careless(x):
        y = torch.nn.functional.dropout(x, 0.5) * 2
        with torch.no_grad():
            x.zero_()
        return y

    state = torch.get_rng_state()
    verifier, report = verifier_of(strict=True)
    check(verifier, careless, careless, numerics="bitwise", given=given)
    assert torch.equal(torch.get_rng_state(), state), "both drew the same, and nobody else notices"
    assert torch.equal(x, before) and torch.equal(x.grad, torch.ones_like(x))
    assert report.verifications[0].verdict == "ok"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_keeps_its_count_and_its_gradients(reentrant):
    verifier, report = verifier_of(1, strict=True)

    def layer(x):
        check(verifier, lambda x: x + x, given={"x": x * 1})
        return (x * 2).sin()

    x = inputs()["x"]
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.allclose(x.grad, 2 * (x * 2).cos())
    assert report.verifications[0].gradient_error == 0.0, "also where the first pass has gradients off"


def test_inference_frozen_inputs_compilation_and_nesting():
    verifier, report = verifier_of(9, strict=True)
    with torch.inference_mode():
        check(verifier, lambda x: x + x, given={"x": torch.ones(2)})
    check(verifier, lambda x: x + x, given={"x": torch.ones(3)})
    first, second = report.verifications
    assert first.gradient_error == 0.0 and second.gradient_error is None
    check(verifier, lambda x: (check(verifier, lambda x: x * 3), x * 2)[1], variant="outer")
    assert len(report.verifications) == 3, "a call inside a comparison is part of it"
    check(verifier, lambda x: x + x, given={"x": torch.ones(3, device="meta")})

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        check(verifier, double, given={"x": x})
        return x * 2

    compiled(torch.ones(7))
    assert len(report.verifications) == 3


def test_an_original_that_cannot_run_is_left_out_or_refused_if_strict():
    def too_large(x):
        raise torch.OutOfMemoryError("no room")

    verifier, report = verifier_of(3)
    for _ in range(2):
        check(verifier, double, too_large)
    (notice,) = report.notices
    assert report.verifications == [], "nothing was compared, so nothing is said to be right"
    assert "twice of `some_feature` is not compared: OutOfMemoryError: no room" in notice
    with pytest.raises(VerifyError, match="cannot be compared: OutOfMemoryError"):
        check(verifier_of(strict=True)[0], double, too_large)


def run_attention(dtype, case="causal"):
    fields, shapes, mask = CASES[case]
    qkv, _ = inputs_of(dtype, **shapes)
    return module_of(dtype, **fields)(*(t.requires_grad_() for t in qkv), None if mask is None else mask())


def run_norm(dtype, **fields):
    norm = norm_of(**fields).to(dtype)
    torch.nn.init.uniform_(norm.weight)
    return norm, norm(torch.randn(64, 2, HIDDEN).to(dtype).requires_grad_())


@forked("megatron")
def test_large_attention_is_compared_without_a_wider_type():
    from mindspeed_lite.patches._shared import attention_core as patch

    mindspeed_lite.enable(use_flash_attn=True, verify=2, strict=True)
    run_attention(torch.float32, "mask_tensor")
    patch._SCORES = 0
    run_attention(torch.bfloat16, "mask_tensor")
    assert [each.measured_from for each in mindspeed_lite.report().verifications] == ["float64", "original"]


@forked("megatron")
def test_a_planted_fault_in_an_operator_stops_a_strict_run():
    from mindspeed_lite.patches import use_flash_attn
    from mindspeed_lite.patches.use_fused_rmsnorm import FusedRMSNorm

    attend, rms_norm = use_flash_attn.attend, FusedRMSNorm.operator
    use_flash_attn.attend = lambda *given: attend(*given) * 1.01
    FusedRMSNorm.operator = staticmethod(lambda *given: rms_norm(*given) * 1.01)
    with mindspeed_lite.enabled(use_flash_attn=True, use_fused_rmsnorm=True, verify=1, strict=True):
        with pytest.raises(VerifyError, match=r"use_flash_attn, attention float32 q\[24,2,4,16\].* causal: exceeds"):
            run_attention(torch.float32)
        with pytest.raises(VerifyError, match=r"use_fused_rmsnorm, rms_norm float32 x\[64,2,48\] weight\[48\]"):
            run_norm(torch.float32)


@forked("megatron")
def test_dropout_is_left_out_with_a_reason_and_megatrons_buffer_is_not_kept():
    from megatron.core import parallel_state

    from mindspeed_lite.patches import use_flash_attn as patch

    patch.attend = lambda q, k, v, spec: q
    mindspeed_lite.enable(use_flash_attn=True, verify=1)
    qkv, _ = inputs_of()
    for _ in range(2):
        module_of(attention_dropout=0.5)(*qkv, None)
    report = mindspeed_lite.report()
    assert report.verifications == [] and len(report.notices) == 1 and "dropout" in report.notices[0]
    run_attention(torch.float32)
    assert mindspeed_lite.report().verifications[0].verdict == "exceeds"
    assert parallel_state.get_global_memory_buffer().buffer == {}


@forked("megatron")
def test_without_the_flag_there_is_no_verifier_and_copies_of_a_model_have_none():
    mindspeed_lite.enable(use_flash_attn=True, use_fused_rmsnorm=True)
    Verifier.check = Verifier.leave_out = None
    norm, _ = run_norm(torch.float32)
    run_attention(torch.float32)
    assert runtime.current().session.verifier is None and "verifier" not in vars(norm)
    mindspeed_lite.disable()
    mindspeed_lite.enable(use_fused_rmsnorm=True, verify=1)
    norm = norm_of()
    assert isinstance(norm.verifier, Verifier)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert other.verifier is None
        other(torch.ones(2, HIDDEN))


def test_training_keeps_every_bit(trainer, tmp_path: Path):
    # The first layer is recomputed and the second is not, so one run has calls with gradients off and on. Dropout
    # of the hidden layers draws: a comparison that moved the stream would show in the losses.
    flags = "--hidden-dropout 0.1 --tensor-model-parallel-size 2 --sequence-parallel "
    flags += "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    features = "--use-fused-rmsnorm --use-flash-attn --attention-dropout 0 --mindspeed-lite-strict"

    def train(*more):
        return trainer(checkouts.installed()).script(2, [*features.split(), *flags.split(), *more], 4).check()

    def figures(result):
        norms = re.findall(r"grad norm: ([\d.]+)", result.log(-1))
        assert len(norms) == 4
        return result.history(), norms

    path = tmp_path / "report.json"
    more = ("--mindspeed-lite-verify", "3", "--mindspeed-lite-report", str(path), "--mindspeed-lite-host-report")
    off, on = train(), train(*more)
    assert figures(on) == figures(off)
    # The server ends its ranks without exit handlers: this was written when the last kind of call was done.
    found = json.loads(path.read_text())["verifications"]
    assert {(each["operator"], each["calls"], each["verdict"]) for each in found} == {
        ("attention", 3, "ok"),
        ("rms_norm", 3, "ok"),
    }
    assert all(each["gradient_error"] is not None for each in found)
    lines = [line for line in on.log(0).splitlines() if line.startswith("mindspeed_lite: use_")]
    assert len(lines) == len(found)
    assert "mindspeed_lite" not in on.log(1), "only rank 0 shows figures"
    shown = on.log(0).partition("mindspeed_lite: the host in steps 3 and 4\n")[2]
    # A table may be wrapped.
    assert "get_grad_norm_fp32" in re.sub(r"\s+", "", shown) and "decoder.layers.*" in shown and "launches" in shown
