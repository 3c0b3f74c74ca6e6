"""What the stand-in's functions must compute, from PyTorch's own or from the definition."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

CHECKS: dict[str, Callable[[Any], None]] = {}


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """A check of `transformer_engine.pytorch`, given as its argument."""

    def seeded(te: Any) -> None:
        torch.manual_seed(0)
        function(te)

    CHECKS[function.__name__] = seeded
    return function


def _of(te: Any, module: str) -> Any:
    return importlib.import_module(f"{te.__name__}.{module}")


def _near(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def _gradients(out: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    return torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True)


def _same(ours: torch.Tensor, theirs: torch.Tensor, *inputs: torch.Tensor) -> None:
    _near(ours, theirs)
    for one, other in zip(_gradients(ours, *inputs), _gradients(theirs, *inputs), strict=True):
        _near(one, other)


@check
def linear(te: Any) -> None:
    x, layer = _x(5, 2, 8), te.Linear(8, 6, device="cpu")
    torch.nn.init.normal_(layer.bias)
    _same(layer(x), F.linear(x, layer.weight, layer.bias), x, layer.weight, layer.bias)
    layer = te.Linear(8, 6, device="cpu", return_bias=True)
    torch.nn.init.normal_(layer.bias)
    out, bias = layer(x)
    _near(out, F.linear(x, layer.weight))
    _near(bias, layer.bias)
    assert layer.weight.tensor_model_parallel and layer.weight.partition_dim == 0


@check
def norm_and_linear(te: Any) -> None:
    for kind, is_centered in (("LayerNorm", False), ("RMSNorm", True)):
        x = _x(5, 2, 8)
        layer = te.LayerNormLinear(8, 6, normalization=kind, zero_centered_gamma=is_centered, device="cpu", bias=False)
        torch.nn.init.normal_(layer.layer_norm_weight)
        scale = layer.layer_norm_weight + is_centered
        if kind == "LayerNorm":
            torch.nn.init.normal_(layer.layer_norm_bias)
            expected = F.layer_norm(x, (8,), scale, layer.layer_norm_bias, 1e-5)
        else:
            expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
        _same(layer(x), F.linear(expected, layer.weight), x, layer.weight, layer.layer_norm_weight)
        norm = getattr(te, kind)(8, eps=1e-5, zero_centered_gamma=is_centered)
        with torch.no_grad():
            norm.weight.copy_(layer.layer_norm_weight)
            if kind == "LayerNorm":
                norm.bias.copy_(layer.layer_norm_bias)
        _near(norm(x), expected)


@check
def grouped_linear(te: Any) -> None:
    x, layer = _x(9, 8), te.GroupedLinear(3, 8, 6, device="cpu")
    splits, params = [4, 0, 5], dict(layer.named_parameters())
    for name, param in params.items():
        if "bias" in name:
            torch.nn.init.normal_(param)
    parts = [F.linear(part, params[f"weight{i}"], params[f"bias{i}"]) for i, part in enumerate(x.split(splits))]
    used = [params[f"{kind}{i}"] for i in (0, 2) for kind in ("weight", "bias")]
    _same(layer(x, torch.tensor(splits)), torch.cat(parts), x, *used)


@check
def delayed_gradients(te: Any) -> None:
    makes = (te.Linear, functools.partial(te.GroupedLinear, 2), functools.partial(te.LayerNormLinear))
    for make in makes:
        delayed, called = make(8, 6, device="cpu", delay_wgrad_compute=True), []
        at_once = make(8, 6, device="cpu")
        at_once.load_state_dict(delayed.state_dict())
        delayed.register_wgrad_accumulation_and_reduce_hooks(lambda called=called: called.append(1))
        x = torch.randn(5, 8)
        rest = (torch.tensor([2, 3]),) if hasattr(delayed, "num_gemms") else ()
        for layer in (delayed, at_once):
            layer(x, *rest).square().sum().backward()
        weight = "weight0" if rest else "weight"
        assert getattr(delayed, weight).grad is None and getattr(delayed, weight).skip_backward_post_hook
        delayed.backward_dw()
        assert called == [1]
        for name, param in at_once.named_parameters():
            _near(dict(delayed.named_parameters())[name].grad, param.grad)


@check
def accumulated_gradients(te: Any) -> None:
    x, layer = torch.randn(5, 8), te.Linear(8, 6, device="cpu", bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.ones(6, 8), False
    layer(x).square().sum().backward()
    weight = layer.weight.detach().clone().requires_grad_()
    F.linear(x, weight).square().sum().backward()
    assert weight.grad is not None and layer.weight.grad_added_to_main_grad
    _near(layer.weight.main_grad, weight.grad + 1)
    layer(x, is_first_microbatch=True).square().sum().backward()
    _near(layer.weight.main_grad, weight.grad)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """[s, b, h * d] from [s, b, h, d]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return out.permute(2, 0, 1, 3).flatten(-2)


@check
def attention(te: Any) -> None:
    q, k, v = _x(7, 2, 4, 8), _x(7, 2, 2, 8), _x(7, 2, 2, 8)
    layer = te.DotProductAttention(4, 8, num_gqa_groups=2)
    _same(layer(q, k, v), _attention(q, k, v, is_causal=True), q, k, v)
    _near(layer(q, k, v, attn_mask_type="no_mask"), _attention(q, k, v))
    mask = torch.rand(2, 1, 7, 7) > 0.5
    mask[..., 0] = False
    _near(layer(q, k, v, mask, attn_mask_type="arbitrary"), _attention(q, k, v, attn_mask=~mask))
    distance = torch.arange(7)[:, None] - torch.arange(7)
    window = (distance >= 0) & (distance <= 2)
    _near(layer(q, k, v, window_size=(2, 0)), _attention(q, k, v, attn_mask=window))


@check
def attention_of_packs(te: Any) -> None:
    q, k, v = (_x(9, 4, 8) for _ in range(3))
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    layer = te.DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding_causal")
    ours = layer(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    parts = zip(*(x[:, None].split([4, 5]) for x in (q, k, v)), strict=True)
    _same(ours, torch.cat([_attention(*part, is_causal=True)[:, 0] for part in parts]), q, k, v)


@check
def rotary_embedding(te: Any) -> None:
    rope = _of(te, "attention.rope").apply_rotary_pos_emb
    t, angles = _x(5, 2, 3, 8), torch.randn(5, 1, 1, 2)
    freqs = torch.cat([angles, angles], -1)
    turned = torch.view_as_complex(torch.stack([t[..., :2], t[..., 2:4]], -1)) * torch.polar(
        torch.ones_like(angles), angles
    )
    expected = torch.cat([turned.real, turned.imag, t[..., 4:]], -1)
    _same(rope(t, freqs), expected, t)
    lengths = torch.tensor([0, 2, 5])
    packed = torch.cat([rope(t[:2, :1], freqs)[:, 0], rope(t[2:, :1], freqs)[:, 0]])
    _near(rope(t[:, 0], freqs, tensor_format="thd", cu_seqlens=lengths), packed)


@check
def adam(te: Any) -> None:
    fused = _of(te, "optimizers").FusedAdam
    for adam_w, torchs in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.9)}
        optimizers = fused([ours], adam_w_mode=adam_w, **options), torchs([theirs], **options)
        for step in range(3):
            ours.grad = theirs.grad = torch.linspace(0, step + 1, 7).cos()
            for each in optimizers:
                each.step()
        _near(ours, theirs)
        assert optimizers[0].param_groups[0]["step"] == 3


@check
def adam_with_remainders(te: Any) -> None:
    fused = _of(te, "optimizers").FusedAdam
    main = torch.nn.Parameter(torch.linspace(-1, 1, 7).bfloat16().float())
    half = torch.nn.Parameter(main.detach().bfloat16())
    with_main = fused([main], lr=0.01)
    with_halves = fused([half], lr=0.01, master_weights=True, store_param_remainders=True)
    for step in range(5):
        main.grad = torch.linspace(0, step + 1, 7).bfloat16().float()
        half.grad = main.grad.bfloat16()
        with_main.step()
        with_halves.step()
    low = with_halves.state[half]["master_param"]
    assert low.dtype == torch.int16
    joined = ((half.detach().view(torch.int16).int() << 16) + low.int()).view(torch.float32)
    assert torch.equal(joined, main.detach())


@check
def norms_of_lists(te: Any) -> None:
    optimizers = _of(te, "optimizers")
    tensors, flag = [torch.randn(5), torch.randn(2, 3), torch.empty(0)], torch.zeros(1, dtype=torch.int)
    norm, each = optimizers.multi_tensor_applier(optimizers.multi_tensor_l2norm, flag, [tensors], True)
    _near(norm, torch.cat([tensor.flatten() for tensor in tensors]).norm()[None])
    _near(each, torch.stack([tensor.norm() for tensor in tensors[:2]]))
    targets = [torch.empty_like(tensor) for tensor in tensors]
    half = torch.tensor([0.5])
    optimizers.multi_tensor_applier(optimizers.multi_tensor_scale_tensor, flag, [tensors, targets], half)
    assert all(torch.equal(target, tensor * 0.5) for tensor, target in zip(tensors, targets, strict=True))
    optimizers.multi_tensor_applier(optimizers.multi_tensor_scale, flag, [tensors, targets], 0.5)
    _near(targets[1], tensors[1] * 0.5)


@check
def permutation(te: Any) -> None:
    x, probs = _x(6, 4), torch.rand(6, 3, requires_grad=True)
    routing = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1]]).bool()
    total = int(routing.sum())
    expert, token = routing.t().nonzero(as_tuple=True)
    rows, weights, back = te.moe_permute_with_probs(x, probs, routing, total)
    _same(rows, x[token], x)
    _same(weights, probs[token, expert], probs)
    plain, same_map = te.moe_permute(x, routing, total)
    _near(plain, rows)
    merged = te.moe_unpermute(rows, back, merging_probs=probs)
    _same(merged, x * (probs * routing).sum(1, keepdim=True), x, probs)
    _near(te.moe_unpermute(plain, same_map, restore_shape=x.shape), x * routing.sum(1, keepdim=True))


@check
def order_of_chunks(te: Any) -> None:
    x, probs = _x(6, 4), torch.rand(6)
    rows, weights = te.moe_sort_chunks_by_index_with_probs(x, probs, torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
    order = [3, 4, 5, 0, 1, 2]
    _same(rows, x[order], x)
    _near(weights, probs[order])


@check
def router(te: Any) -> None:
    module, logits = _of(te, "router"), _x(5, 8)
    choose = module.fused_topk_with_score_function
    probs, chosen = choose(logits, 2, True, None, None, None, "softmax", None)
    top = logits.softmax(-1).topk(2)
    _same(probs, torch.zeros_like(logits).scatter(1, top.indices, top.values), logits)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, top.indices, True))
    late, _ = choose(logits, 2, False, None, None, None, "softmax", None)
    top = logits.topk(2)
    _near(late, torch.zeros_like(logits).scatter(1, top.indices, top.values.softmax(-1)))
    bias = torch.linspace(1, -1, 8)
    biased, chosen = choose(logits, 2, False, 2, 1, 2.5, "sigmoid", bias)
    scores = logits.sigmoid()
    for row in range(5):
        ranked = scores[row] + bias
        group = ranked.view(2, 4).topk(2).values.sum(1).argmax()
        best = ranked.view(2, 4)[group].topk(2).indices + 4 * group
        assert set(chosen[row].nonzero().flatten().tolist()) == set(best.tolist())
        _near(biased[row, best], 2.5 * scores[row, best] / scores[row, best].sum())
    _, auxiliary = module.fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    _same(auxiliary, scores / scores.sum(-1, keepdim=True), logits)
    tokens = torch.tensor([3, 1, 0, 2, 1, 1, 1, 1])
    loss = module.fused_moe_aux_loss(scores, tokens, 5, 8, 2, 0.01)
    _near(loss, (scores.sum(0) * tokens).sum() * 8 * 0.01 / (2 * 25))


@check
def cross_entropy(te: Any) -> None:
    logits, target = _x(5, 2, 11), torch.randint(0, 11, (5, 2))
    target[0, 0] = -100
    for smoothing in (0.0, 0.1):
        ours = te.parallel_cross_entropy(logits, target, smoothing)
        theirs = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="none", ignore_index=-100
        )
        _same(ours, theirs.view(5, 2), logits)


@check
def recomputation(te: Any) -> None:
    x, weight = _x(5, 8), _x(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(x @ weight), 0.5)

    torch.manual_seed(1)
    ours = _gradients(te.checkpoint(function, x, use_reentrant=False), x, weight)
    torch.manual_seed(1)
    theirs = _gradients(function(x), x, weight)
    for one, other in zip(ours, theirs, strict=True):
        _near(one, other)


@check
def default_scale(te: Any) -> None:
    assert math.isclose(te.DotProductAttention(4, (16, 8)).softmax_scale, 0.25)
    assert te.DotProductAttention(4, 16, softmax_scale=0.3).softmax_scale == 0.3
