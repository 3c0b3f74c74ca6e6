"""Calls of Megatron's functions and modules with each operator feature: the values of those without it.

`--mindspeed-lite-verify` compares output and gradients, from float64, with what is replaced. Then the feature's reading
of the call is changed in one way after the other, and the comparison must say so.
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
from mindspeed_lite.engine import FallbackError
from tests.harness.attention_modules import CASES, document_mask, inputs_of, module_of, pack_of
from tests.harness.checkouts import ROOT
from tests.harness.errors import error
from tests.harness.norms import HIDDEN, norm_of
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.patches import moe_experts
from tests.patches.mlp import MODELS, WIDTH, mlp_of

BOTH = (torch.float32, torch.bfloat16)
# What the current call has drawn.
leaves = []


def leaf(x):
    leaves.append(x.detach().requires_grad_())
    return leaves[-1]


def draw(*shape, dtype=torch.bfloat16, seed=1, size=1.0):
    return leaf((size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype))


def results(run):
    """Output of a call and the gradients of what it has drawn."""
    leaves.clear()
    out = run()
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype))
    return [out.detach(), *(each.grad for each in leaves)]


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


def attention(mask=None, dtype=torch.bfloat16, packed=(), padded=None, shapes=(), **fields):
    def run():
        module = module_of(dtype, **fields)
        if module.softmax_offset is not None:
            with torch.no_grad():
                module.softmax_offset.fill_(1.0)
            leaves.extend(module.parameters())
        qkv, _ = inputs_of(dtype, **dict(shapes))
        qkv = [leaf(t[: sum(padded or packed), 0] if packed else t) for t in qkv]
        return module(
            *qkv, mask() if mask else None, packed_seq_params=pack_of(*packed, padded=padded) if packed else None
        )

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


PACK = (9, 15)
HEADS_ROLLED = of(
    "use_flash_attn", "attend", lambda attend, q, k, v, *rest: attend(q, k.roll(1, 2), v.roll(1, 2), *rest)
)
WRONG = of("use_flash_attn", "attend", lambda attend, *given: attend(*given) * 1.1)
PACK_WRONG = replacing("mindspeed_lite.ops.attention.packed", "attend", lambda attend, *given: attend(*given) * 1.1)
SCALE, WINDOW = read(scale=lambda scale: scale * 1.05), read(window=lambda window: (window[0] - 1, window[1]))


def rotary(pairs="half", width=16, rows=24, packed=(), batch=1, dtype=torch.bfloat16, scale=1.3, ranks=(1, 0)):
    def run():
        from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

        config = SimpleNamespace(
            apply_rope_fusion=False, rotary_interleaved=pairs == "interleaved",
            multi_latent_attention=pairs == "regrouped", mrope_section=None,
        )  # fmt: skip
        positions = torch.arange(rows).float()[:, None] + 7 * torch.arange(batch).float()
        freqs = positions[..., None] * 1e4 ** -(torch.arange(0, width, 2) / width)
        freqs = torch.stack((freqs, freqs), -1).flatten(-2) if pairs == "interleaved" else torch.cat((freqs, freqs), -1)
        size, rank = ranks
        more = {"cp_group": SimpleNamespace(size=lambda: size, rank=lambda: rank)}
        # As the queries of a fused projection.
        t = draw(24, 4, 48, dtype=dtype) if packed else draw(24, 2, 4, 48, dtype=dtype)
        if packed:
            more["cu_seqlens"] = torch.tensor([0, *packed]).cumsum(0).int()
        if pairs == "regrouped":
            more["mla_rotary_interleaved"] = True
        return apply_rotary_pos_emb(t[..., 16:32], freqs[:, :, None], config, mscale=scale, **more)

    return run


def turned(change):
    """Rotary embedding with other tables (cos, sin) or another way to turn."""
    return of(
        "use_fused_rotary_pos_emb",
        "_turn",
        lambda turn, session, t, tables, how, *rest: turn(session, t, *change(tables, dict(how)), *rest),
    )


def norm(kind, dtype=torch.float32, **fields):
    def run():
        made = norm_of(normalization=kind, **fields)
        names = [name for name, _ in made.named_parameters()]
        given = {name: draw(HIDDEN, dtype=dtype, seed=seed) for seed, name in enumerate(names, 2)}
        # Rows of very different size, so that eps counts in some.
        x = draw(8, 2, HIDDEN, dtype=dtype) * torch.logspace(-3, 2, 8, dtype=dtype).reshape(8, 1, 1)
        return torch.func.functional_call(made, given, (x,))

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


def l2norm(dtype=torch.bfloat16):
    def run():
        from megatron.core.transformer.torch_norm import L2Norm

        return L2Norm(hidden_size=64, eps=1e-5)(draw(9, 2, 4, 64, dtype=dtype, size=1e-2))

    return run


def activation():
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    return bias_swiglu_impl(draw(5, 2, 24), draw(24, seed=2))


def quick_geglu():
    from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl

    weights = torch.rand(10, 1, generator=torch.Generator().manual_seed(2))
    return weighted_bias_quick_geglu_impl(draw(10, 24), None, weights, linear_offset=1.0, clamp_value=0.5)


def mlp(model, dtype):
    """What Megatron's MLP makes of a first layer's output."""

    def run():
        fields, biased, weighted = MODELS[model]
        x = draw(*((10,) if weighted else (5, 2)), WIDTH, dtype=dtype, size=2.0)
        bias = draw(WIDTH, dtype=dtype, seed=2) if biased else None
        weights = leaf(torch.rand(10, generator=torch.Generator().manual_seed(3))) if weighted else None
        return mlp_of(dict(fields), bias)(x, weights)[0]

    return run


def activated(change):
    return of(
        "use_fused_swiglu",
        "_run",
        lambda run, session, wrapped, *given, **options: run(session, wrapped, *change(*given), **options),
    )


def without(option, value):
    return of("use_fused_swiglu", "_run", lambda run, *given, **options: run(*given, **{**options, option: value}))


def bias_dropout_add(has_bias=True, wide=False):
    def run():
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        x, residual = draw(7, 2, 48), draw(7, 2, 48, seed=3, dtype=torch.float32 if wide else torch.bfloat16)
        return get_bias_dropout_add(True, True)((x, draw(48, seed=2) if has_bias else None), residual, 0.0)

    return run


def loss(dtype=torch.bfloat16, fused=False, smoothing=0.0):
    def run():
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.common.language_module import language_module

        target = torch.randint(0, 64, (6, 2), generator=torch.Generator().manual_seed(2))
        target[2, 1] = 0 if smoothing else -100  # as of a padding
        # Of its own: Megatron's functions compute over logits that are in fp32 already.
        logits = draw(6, 2, 64, dtype=dtype, size=3.0).clone()
        if not fused:
            return tensor_parallel.vocab_parallel_cross_entropy(logits, target, smoothing)
        group = parallel_state.get_tensor_model_parallel_group()
        return language_module.fused_vocab_parallel_cross_entropy(logits, target, group)

    return run


def masked_softmax(mask=None, kind="causal", queries=24, dtype=torch.bfloat16, offset=False, **fields):
    def run():
        from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.utils import attention_mask_func

        # Without its extension Megatron's fused form cannot be called.
        fused = runtime.current() is not None
        given = {"mask_func": attention_mask_func, "scaled_masked_softmax_fusion": fused, "scale": 3.0, **fields}
        softmax = FusedScaleMaskSoftmax(
            False, dtype == torch.bfloat16, attn_mask_type=AttnMaskType[kind], softmax_in_fp32=True, **given
        )
        # Not the leaf itself, which Megatron could not mask in place.
        scores = draw(2, 4, queries, 24, size=4.0, dtype=dtype) * 1
        return softmax(scores, mask()[:, :, :queries] if mask else None, *([torch.zeros(4)] if offset else ()))

    return run


def softmaxed(**changed):
    return of(
        "masked_softmax_fusion",
        "masked_softmax",
        lambda op, scores, mask, **how: op(scores, changed.get("mask", mask), **{**how, **changed.get("how", {})}),
    )


def swiglu(name, *rest):
    def run():
        from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu

        module = fused_bias_geglu if "geglu" in name else fused_bias_swiglu
        return getattr(module, f"{name}_impl")(draw(3, 8), *rest)

    return run


def routed(chosen):
    def run():
        from megatron.core.transformer.moe import moe_utils

        fused = runtime.current() is not None
        logits = draw(40, 8, dtype=torch.float32)
        return moe_utils.topk_routing_with_score_function(logits, 2, fused=fused, precomputed_indices=chosen)[0]

    return run


def adamw():
    """Without gradients: an optimizer's step."""
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


def experts(**fields):
    def run():
        made = moe_experts.experts_of(**fields)
        leaves.extend(made.parameters())
        tokens = draw(sum(moe_experts.COUNTS), 32)
        probs = leaf(torch.rand(tokens.shape[0], generator=torch.Generator().manual_seed(2)))
        return made(tokens, torch.tensor(moe_experts.COUNTS), probs)[0]

    return run


def permuted():
    from megatron.core.transformer.moe import moe_utils

    chosen = torch.rand(24, 6, generator=torch.Generator().manual_seed(1)).topk(2, dim=1).indices
    routing = torch.zeros(24, 6, dtype=torch.bool).scatter(1, chosen, True)
    probs = torch.rand(24, 6, generator=torch.Generator().manual_seed(2)) * routing
    return moe_utils.permute(draw(24, 16), routing, probs=leaf(probs), num_out_tokens=48, fused=True)[0]


# feature: calls, each with what may be misread of it. Megatron alone refuses some calls.
DRILL = {
    "use_flash_attn": [
        (attention(), {"causal": read(causal=False), "scale": SCALE, "heads": HEADS_ROLLED, "softcap": softcap}),
        (attention(dtype=torch.float32), {"causal": read(causal=False), "scale": SCALE, "softcap": softcap}),
        (attention(num_query_groups=2, shapes={"groups": 2}), {"heads": HEADS_ROLLED}),
        (attention(document_mask), {"mask": read(mask=None, causal=True), "inverted": read(mask=lambda mask: ~mask)}),
        (attention(window_size=(8, 0)), {"off by one": WINDOW, "dropped": read(window=None, causal=True)}),
        (attention(softmax_type="learnable"), {"sink": read(sink=None)}),
        (attention(packed=PACK, window_size=(4, 0)), {"scale": SCALE, "window": WINDOW}),
        (attention(packed=PACK, softmax_type="off-by-one"), {"sink": read(sink=None), "causal": read(causal=False)}),
        # Compared with the definition: Megatron takes no values of another size.
        (attention(packed=PACK, shapes={"value": 8}), {"values": PACK_WRONG}),
        (attention(shapes={"size": 24, "value": 8}), {"values": WRONG}),
        *(
            (attention(mask, dtype, shapes=shapes, **fields), {})
            for fields, shapes, mask in CASES.values()
            for dtype in BOTH
        ),
        *((attention(None, dtype, softmax_type="off-by-one"), {}) for dtype in BOTH),
        *(
            (attention(packed=(9, 8, 5), padded=padded, num_query_groups=2, shapes={"groups": 2}, mask_type=kind), {})
            for padded in (None, (10, 8, 6))
            for kind in ("causal", "padding_causal", "no_mask")
        ),
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
        (rotary("interleaved"), {"pairs": turned(lambda tables, how: (tables, {**how, "pairs": "half"}))}),
        (
            rotary(packed=PACK),
            {"positions": turned(lambda tables, how: (tables, {**how, "positions": how["positions"].roll(1)}))},
        ),
        *(
            (rotary(dtype=dtype, **how), {})
            for dtype in BOTH
            for how in (
                {"width": 6},
                {"pairs": "regrouped", "scale": 1.0},
                {"batch": 2},
                {"packed": (5, 0, 11, 8), "rows": 12},
                {"pairs": "interleaved", "packed": PACK, "rows": 30, "width": 8},
                {"packed": (8, 40), "rows": 50, "ranks": (2, 1)},
            )
        ),
    ],
    **{
        f"use_fused_{kind.lower()}": [
            (norm(kind), {"eps": other_eps(f"use_fused_{kind.lower()}")}),
            (norm(kind, torch.bfloat16), {}),
            (norm(kind, layernorm_zero_centered_gamma=True), {}),
        ]
        for kind in ("RMSNorm", "LayerNorm")
    },
    "use_fused_l2norm": [
        (l2norm(torch.float32), {}),
        (l2norm(), {"eps": of("use_fused_l2norm", "rms_norm", lambda op, x, weight, eps: op(x, weight, 2 * eps))}),
    ],
    "use_fused_swiglu": [
        (
            activation,
            {
                "kind": activated(lambda kind, *rest: ("geglu", *rest)),
                "bias": activated(lambda kind, x, bias, weights: (kind, x, None, weights)),
            },
        ),
        *((mlp(model, dtype), {}) for model in MODELS for dtype in BOTH),
        (quick_geglu, {"offset": without("linear_offset", 0.0), "clamp": without("clamp", None)}),
    ],
    "bias_dropout_fusion": [
        (
            bias_dropout_add(),
            {
                "bias": of(
                    "bias_dropout_fusion", "bias_dropout_add", lambda op, x, residual, bias, p: op(x, residual, None, p)
                )
            },
        ),
    ],
    "use_fused_cross_entropy": [
        *((loss(dtype, fused), {}) for dtype in BOTH for fused in (False, True)),
        (
            loss(),
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
        (masked_softmax(document_mask, "padding"), {}),
        (masked_softmax(None, "padding", scale=None), {}),
        (masked_softmax(queries=1), {}),
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
        (experts(bias_activation_fusion=True), {}),
        (experts(gated_linear_unit=False, activation_func=torch.nn.functional.gelu), {}),
        (experts(add_bias_linear=True), {}),
        (experts(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True), {}),
        (
            experts(),
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
def test_values_are_megatrons_and_a_misread_call_is_found(feature):
    start()
    asked = {FLAGS.get(feature, feature): True, "verify": 2, "allow_unverified": True}
    torch.compiler.set_stance("force_eager")
    for number, (run, plants) in enumerate(DRILL[feature]):
        off = None
        with contextlib.suppress(AssertionError, ImportError, RuntimeError, ValueError):
            off = results(run) if run is not adamw else None
        for name, plant in {"": contextlib.nullcontext, **plants}.items():
            # What Megatron is must be so before it is patched, and what a patch reads may be bound when it is made.
            with plant(), mindspeed_lite.enabled(**asked):
                on = results(run) if run is not adamw else run()
                report = mindspeed_lite.report()
            verdicts = {each.verdict for each in report.verifications}
            seen = number, name, [each.to_text() for each in report.verifications]
            assert verdicts == {"ok"} and not report.fallbacks if not name else "exceeds" in verdicts, seen
            # What is returned is what was compared.
            for ours, theirs in zip(on, off, strict=True) if off and not name else ():
                assert ours.dtype == theirs.dtype and error(ours, theirs.double()) < 2**-5, seen


@forked("megatron")
def test_another_feature_in_megatrons_original_has_nothing_to_say_of_its_wider_type():
    start()
    flags = dict(use_flash_attn=True, use_masked_softmax_fusion=True, verify=1, strict=True)
    with mindspeed_lite.enabled(**flags):
        attention(document_mask, dtype=torch.float32, masked_softmax_fusion=True)()
        report = mindspeed_lite.report()
    (found,) = report.verifications
    assert (found.verdict, found.measured_from) == ("ok", "float64") and not (report.notices or report.fallbacks)


def masked_otherwise(scores, mask):
    return scores.masked_fill(mask, -1e4)


WEIGHTS = torch.rand(3, 1, generator=torch.Generator().manual_seed(2))
# feature: calls that are left to Megatron, with a word of the reason.
FALLBACKS = {
    "bias_dropout_fusion": [(bias_dropout_add(wide=True), "torch.float32")],
    "masked_softmax_fusion": [
        (masked_softmax(window_size=(4, 0)), "window"),
        (masked_softmax(dtype=torch.float64), "float64"),
        (masked_softmax(document_mask, "padding", mask_func=masked_otherwise), "masking function"),
        (masked_softmax(offset=True), "offset"),
    ],
    "moe_router_fusion": [(routed(torch.arange(80).view(40, 2) % 8), "outside the router")],
    "use_fused_cross_entropy": [(loss(smoothing=0.1), "label smoothing")],
    "use_fused_rotary_pos_emb": [(rotary(rows=1), "24 tokens with angles of 1")],
    "use_fused_swiglu": [
        (swiglu("bias_swiglu", None, True, False), "fp8"),
        (swiglu("weighted_bias_swiglu", None, WEIGHTS, True), "fp8"),
        (swiglu("bias_swiglu", None, False, True), "offloading"),
        (swiglu("weighted_bias_quick_geglu", torch.ones(8), WEIGHTS, False, 0.0, 0.5), "clamps before"),
    ],
}


@pytest.mark.parametrize("feature", FALLBACKS)
@forked("megatron")
def test_what_an_operator_does_not_do_is_megatrons_with_its_reason(feature):
    start()
    asked = {FLAGS.get(feature, feature): True}
    torch.compiler.set_stance("force_eager")
    for number, (run, word) in enumerate(FALLBACKS[feature]):
        off = results(run)
        with mindspeed_lite.enabled(**asked):
            on = results(run)
            results(run)
            (said,) = mindspeed_lite.report().fallbacks
        assert word in said.reason and all(map(torch.equal, on, off)), (number, said)
        with mindspeed_lite.enabled(**asked, strict=True), pytest.raises(FallbackError, match=feature):
            run()


# Compared with the definition that they are, or drilled in their own test.
ELSEWHERE = {
    "gradient_accumulation_fusion",
    "moe_router_fusion",
    "use_fused_linear_cross_entropy",
    "use_fused_linear_log_prob",
}


def test_every_feature_that_is_compared_is_drilled():
    compares = re.compile(r"\bverify\(|\bcheck\(\s*session,|\(FusedNorm,")
    compared = {each.stem for each in (ROOT / "patches").glob("*.py") if compares.search(each.read_text())}
    assert compared == {*DRILL, *ELSEWHERE}
