"""`--mindspeed-lite-verify` finds a call that is misread: what a patch has read wrongly has no say in what is allowed.

Each feature that is compared runs as it is, and then with its reading of the call changed in one way after the other.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import runtime
from tests.harness.attention_modules import document_mask, inputs_of, module_of, pack_of
from tests.harness.checkouts import ROOT
from tests.harness.norms import HIDDEN, norm_of
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.patches import moe_experts


def draw(*shape, dtype=torch.bfloat16, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def replacing(module, name, change):
    """A plant: a function of a module that is called as `change` says, of it and the arguments."""

    @contextlib.contextmanager
    def plant():
        owner = importlib.import_module(module)
        original = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: change(original, *given, **named))
        try:
            yield
        finally:
            setattr(owner, name, original)

    return plant


def of(feature, name, change):
    return replacing(f"mindspeed_lite.patches.{feature}", name, change)


def read(**changed):
    """An attention that reads these of a call otherwise; a value may be a function of what is there."""

    def change(read_call, *given):
        call = read_call(*given)
        return call._replace(**{k: v(getattr(call, k)) if callable(v) else v for k, v in changed.items()})

    return of("use_flash_attn", "read_call", change)


def attention(mask=None, dtype=torch.bfloat16, packed=False, groups=4, **fields):
    def run():
        module = module_of(dtype, num_query_groups=groups, **fields)
        if module.softmax_offset is not None:
            with torch.no_grad():
                module.softmax_offset.fill_(1.0)
        qkv, _ = inputs_of(dtype, groups=groups)
        qkv = [(t[:, 0] if packed else t).detach().requires_grad_() for t in qkv]
        module(*qkv, mask() if mask else None, packed_seq_params=pack_of(9, 15) if packed else None)

    return run


@contextlib.contextmanager
def softcap():
    """A Megatron whose scores are capped."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax as cls

    forward = cls.forward
    cls.forward = lambda self, scores, *rest: forward(self, 2 * torch.tanh(scores / 2), *rest)
    try:
        yield
    finally:
        cls.forward = forward


HEADS_ROLLED = of(
    "use_flash_attn", "attend", lambda attend, q, k, v, *rest: attend(q, k.roll(1, 2), v.roll(1, 2), *rest)
)
SCALE, WINDOW = read(scale=lambda scale: scale * 1.05), read(window=lambda window: (window[0] - 1, window[1]))


def rotary(interleaved=False, packed=False):
    def run():
        from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

        config = SimpleNamespace(
            apply_rope_fusion=True, rotary_interleaved=interleaved, multi_latent_attention=False, mrope_section=None
        )
        freqs = torch.arange(24.0)[:, None] * 1e4 ** -(torch.arange(0, 16, 2) / 16)
        freqs = torch.stack((freqs, freqs), -1).flatten(-2) if interleaved else torch.cat((freqs, freqs), -1)
        ranks = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        t, more = draw(24, 4, 16) if packed else draw(24, 2, 4, 16), {}
        if packed:
            more["cu_seqlens"] = torch.tensor([0, 9, 24], dtype=torch.int32)
        apply_rotary_pos_emb(t, freqs[:, None, None], config, mscale=1.3, cp_group=ranks, **more)

    return run


def turned(change):
    """Rotary embedding with other tables (cos, sin) or another way to turn."""
    return of(
        "use_fused_rotary_pos_emb",
        "_turn",
        lambda turn, session, t, tables, how, *rest: turn(session, t, *change(tables, dict(how)), *rest),
    )


def norm(kind, **fields):
    def run():
        norm_of(normalization=kind, **fields)(draw(8, 2, HIDDEN, dtype=torch.float32) * 1e-2)

    return run


def other_eps(feature):
    """As if the norm's factory had read another epsilon."""
    name = {"use_fused_rmsnorm": "FusedRMSNorm", "use_fused_layernorm": "FusedLayerNorm"}[feature]

    @contextlib.contextmanager
    def plant():
        cls = getattr(importlib.import_module(f"mindspeed_lite.patches.{feature}"), name)
        original = cls.__init__
        cls.__init__ = lambda self, size, eps, *rest: original(self, size, 2 * eps, *rest)
        try:
            yield
        finally:
            cls.__init__ = original

    return plant


def l2norm():
    from megatron.core.transformer.torch_norm import L2Norm

    L2Norm(hidden_size=16, eps=1e-5)(draw(8, 2, 16) * 1e-2)


def activation():
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    bias_swiglu_impl(draw(5, 2, 24), draw(24, seed=2))


def quick_geglu():
    from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl

    weights = torch.rand(10, 1, generator=torch.Generator().manual_seed(2))
    weighted_bias_quick_geglu_impl(draw(10, 24), None, weights, linear_offset=1.0, clamp_value=0.5)


def activated(change):
    return of(
        "use_fused_swiglu",
        "_run",
        lambda run, session, wrapped, *given, **options: run(session, wrapped, *change(*given), **options),
    )


def without(option, value):
    return of("use_fused_swiglu", "_run", lambda run, *given, **options: run(*given, **{**options, option: value}))


def bias_dropout_add():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    get_bias_dropout_add(True, True)((draw(7, 2, 48), draw(48, seed=2)), draw(7, 2, 48, seed=3), 0.0)


def loss():
    from megatron.core import tensor_parallel

    target = torch.randint(0, 64, (6, 2), generator=torch.Generator().manual_seed(2))
    tensor_parallel.vocab_parallel_cross_entropy(draw(6, 2, 64), target)


def masked_softmax(mask=None):
    def run():
        from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.utils import attention_mask_func

        softmax = FusedScaleMaskSoftmax(
            False, True, AttnMaskType.causal, True, attention_mask_func, softmax_in_fp32=True, scale=3.0
        )
        softmax(draw(2, 4, 24, 24) * 1, mask() if mask else None)

    return run


def softmaxed(**changed):
    return of(
        "masked_softmax_fusion",
        "masked_softmax",
        lambda op, scores, mask, **how: op(scores, changed.get("mask", mask), **{**how, **changed.get("how", {})}),
    )


def adamw():
    from mindspeed_lite.optim.fused_adam import adopt
    from mindspeed_lite.patches import use_fused_adamw as patch

    parameter = torch.nn.Parameter(draw(40, dtype=torch.float32).detach())
    optimizer = adopt(torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5))
    optimizer.before_update = patch._verification(runtime.current().session)
    for seed in (2, 3):
        parameter.grad = draw(40, dtype=torch.float32, seed=seed).detach()
        optimizer.step()


def ruled(**changed):
    """The fused step, its rule read otherwise."""

    @contextlib.contextmanager
    def plant():
        from mindspeed_lite.patches import use_fused_adamw as patch

        original = patch._verification

        def verification(session):
            before = original(session)
            return lambda *given, **rule: before(*given, **{**rule, **changed})

        patch._verification = verification
        try:
            yield
        finally:
            patch._verification = original

    return plant


def experts():
    tokens = draw(sum(moe_experts.COUNTS), 32)
    moe_experts.experts_of()(tokens, torch.tensor(moe_experts.COUNTS), torch.rand(tokens.shape[0]))


def permuted():
    from megatron.core.transformer.moe import moe_utils

    chosen = torch.rand(24, 6, generator=torch.Generator().manual_seed(1)).topk(2, dim=1).indices
    routing = torch.zeros(24, 6, dtype=torch.bool).scatter(1, chosen, True)
    probs = torch.rand(24, 6, generator=torch.Generator().manual_seed(2)) * routing
    moe_utils.permute(draw(24, 16), routing, probs=probs.requires_grad_(), num_out_tokens=48, fused=True)


# feature: calls, each with what may be misread of it
DRILL = {
    "use_flash_attn": [
        (attention(), {"causal": read(causal=False), "scale": SCALE, "heads": HEADS_ROLLED, "softcap": softcap}),
        (attention(dtype=torch.float32), {"causal": read(causal=False), "scale": SCALE, "softcap": softcap}),
        (attention(groups=2), {"heads": HEADS_ROLLED}),
        (attention(document_mask), {"mask": read(mask=None, causal=True), "inverted": read(mask=lambda mask: ~mask)}),
        (attention(window_size=(8, 0)), {"off by one": WINDOW, "dropped": read(window=None, causal=True)}),
        (attention(softmax_type="learnable"), {"sink": read(sink=None)}),
        (attention(packed=True, window_size=(4, 0)), {"scale": SCALE, "window": WINDOW}),
        (attention(packed=True, softmax_type="off-by-one"), {"sink": read(sink=None), "causal": read(causal=False)}),
    ],
    "use_fused_rotary_pos_emb": [
        (
            rotary(),
            {
                "positions": turned(lambda tables, how: ([each.roll(1, 0) for each in tables], how)),
                "scale": turned(lambda tables, how: (tables, {**how, "scale": 1.0})),
                "pairs": turned(lambda tables, how: (tables, {**how, "pairs": "interleaved"})),
            },
        ),
        (rotary(interleaved=True), {"pairs": turned(lambda tables, how: (tables, {**how, "pairs": "half"}))}),
        (
            rotary(packed=True),
            {"positions": turned(lambda tables, how: (tables, {**how, "positions": how["positions"].roll(1)}))},
        ),
    ],
    "use_fused_rmsnorm": [(norm("RMSNorm"), {"eps": other_eps("use_fused_rmsnorm")})],
    "use_fused_layernorm": [(norm("LayerNorm"), {"eps": other_eps("use_fused_layernorm")})],
    "use_fused_l2norm": [
        (l2norm, {"eps": of("use_fused_l2norm", "rms_norm", lambda op, x, weight, eps: op(x, weight, 2 * eps))}),
    ],
    "use_fused_swiglu": [
        (
            activation,
            {
                "kind": activated(lambda kind, *rest: ("geglu", *rest)),
                "bias": activated(lambda kind, x, bias, weights: (kind, x, None, weights)),
            },
        ),
        (quick_geglu, {"offset": without("linear_offset", 0.0), "clamp": without("clamp", None)}),
    ],
    "bias_dropout_fusion": [
        (
            bias_dropout_add,
            {
                "bias": of(
                    "bias_dropout_fusion", "bias_dropout_add", lambda op, x, residual, bias, p: op(x, residual, None, p)
                )
            },
        ),
    ],
    "use_fused_cross_entropy": [
        (
            loss,
            {
                "target": of(
                    "use_fused_cross_entropy",
                    "vocab_parallel",
                    lambda op, logits, target, group: op(logits, target.roll(1), group),
                )
            },
        ),
    ],
    "masked_softmax_fusion": [
        (masked_softmax(), {"causal": softmaxed(how={"causal": False}), "scale": softmaxed(how={"scale": 2.9})}),
        (masked_softmax(document_mask), {"mask": softmaxed(mask=None)}),
    ],
    "use_fused_adamw": [
        (
            adamw,
            {
                "lr": ruled(lr=0.11),
                "betas": ruled(betas=(0.9, 0.99)),
                "weight decay": ruled(weight_decay=0.0),
                "kind": ruled(decoupled=False),
            },
        ),
    ],
    "moe_grouped_gemm": [
        (
            experts,
            {
                "rows": of(
                    "moe_grouped_gemm",
                    "grouped_matmul",
                    lambda op, x, weights, counts, *rest, **how: op(x, weights, counts.flip(0), *rest, **how),
                )
            },
        ),
    ],
    "moe_permute_fusion": [
        (
            permuted,
            {
                "experts": replacing(
                    "mindspeed_lite.ops.permute",
                    "permute",
                    lambda op, tokens, routing, *rest, **how: op(tokens, routing.roll(1, 1), *rest, **how),
                )
            },
        ),
    ],
}
FLAGS = {
    "bias_dropout_fusion": "use_bias_dropout_fusion",
    "masked_softmax_fusion": "use_masked_softmax_fusion",
}


@pytest.mark.parametrize("feature", DRILL)
@forked("megatron")
def test_a_misread_call_is_found(feature):
    start()
    asked = {FLAGS.get(feature, feature): True, "verify": 2, "allow_unverified": True}
    for run, plants in DRILL[feature]:
        for name, plant in {"": contextlib.nullcontext, **plants}.items():
            # What Megatron is must be so before it is patched, and what a patch reads may be bound when it is made.
            with plant(), mindspeed_lite.enabled(**asked):
                run()
                found = mindspeed_lite.report().verifications
            verdicts = {each.verdict for each in found}
            assert verdicts == {"ok"} if not name else "exceeds" in verdicts, (name, [each.to_text() for each in found])


@forked("megatron")
def test_another_feature_in_megatrons_original_has_nothing_to_say_of_its_wider_type():
    start()
    flags = dict(use_flash_attn=True, use_masked_softmax_fusion=True, verify=1, strict=True)
    with mindspeed_lite.enabled(**flags):
        attention(document_mask, dtype=torch.float32, masked_softmax_fusion=True)()
        report = mindspeed_lite.report()
    (found,) = report.verifications
    assert (found.verdict, found.measured_from) == ("ok", "float64") and not (report.notices or report.fallbacks)


# Compared with the definition that they are, or drilled in their own test.
ELSEWHERE = {"gradient_accumulation_fusion", "moe_router_fusion", "use_fused_linear_cross_entropy"}


def test_every_feature_that_is_compared_is_drilled():
    compares = re.compile(r"\bverify\(|\bcheck\(\s*session,|\(FusedNorm,")
    compared = {each.stem for each in (ROOT / "patches").glob("*.py") if compares.search(each.read_text())}
    assert compared == {*DRILL, *ELSEWHERE}
