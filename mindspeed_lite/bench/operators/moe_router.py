"""moe_router: against the same steps one by one, as Megatron computes them without Transformer Engine.

The output is the probabilities [T, E]; the map is computed beside them. The logits of a token differ from each other:
among equal ones, and among those that only float64 tells apart, devices may choose differently.

Counted as bytes: forward reads the logits and writes probabilities and map; backward reads the chosen gradients and
writes that of the logits. Counted as operations on each logit: 8 for its score, and one comparison for each expert that
is looked for and each group; backward as many for a score as forward. None of them is a matmul's.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.moe_router import SCORE_FUNCTIONS, topk_routing

_PATTERN = re.compile(
    r"([1-9]\d*)[xX]([1-9]\d*),k=([1-9]\d*)(?:,scores=(\w+))?(,pre=1)?(?:,groups=([1-9]\d*)/([1-9]\d*))?(,bias=1)?"
)


def shapes(device: str, quick: bool) -> list[str]:
    """Mixtral, a model of 64 experts in both ways, and DeepSeek-V3."""
    if quick:
        return ["512x64,k=6"]
    deepseek = ",k=8,scores=sigmoid,groups=8/4,bias=1"
    small = ["2048x8,k=2", "4096x64,k=6", "4096x64,k=6,pre=1", f"8192x256{deepseek}"]
    return small + ([] if device == "cpu" else [f"32768x256{deepseek}"])


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `TOKENSxEXPERTS,k=TOPK[,scores=FUNCTION][,pre=1][,groups=NUMBER/CHOSEN][,bias=1]`."""
    match = _PATTERN.fullmatch(text)
    function = (match[4] or "softmax") if match else ""
    if match is None or function not in SCORE_FUNCTIONS:
        raise ValueError(
            "want TOKENSxEXPERTS,k=TOPK and, if wanted in this order, "
            f"scores={'|'.join(SCORE_FUNCTIONS)}, pre=1, groups=NUMBER/CHOSEN, bias=1; for example 4096x64,k=6"
        )
    tokens, experts, topk = (int(match[each]) for each in (1, 2, 3))
    pre, biased = bool(match[5]), bool(match[8])
    number, chosen = (int(match[6]), int(match[7])) if match[6] else (0, 0)
    if topk > experts or (number and (experts % number or not chosen <= number or topk < chosen)):
        raise ValueError(f"{topk} of {experts} experts in {chosen} of {number} groups")
    bias = torch.linspace(-0.1, 0.1, experts)[torch.randperm(experts, generator=torch.Generator().manual_seed(3))]

    def make() -> tuple[torch.Tensor, ...]:
        places = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)).argsort(dim=1)
        # Steps of a power of two through about [-2, 2], exact in any dtype up to 512 experts.
        logits = (places - experts // 2) * (4.0 / (1 << (experts - 1).bit_length()))
        return (logits.to(device, dtype).requires_grad_(),)

    def expert_bias(logits: torch.Tensor) -> torch.Tensor | None:
        nonlocal bias
        if bias.device != logits.device:
            bias = bias.to(logits.device)
        return bias if biased else None

    def ours(logits: torch.Tensor) -> torch.Tensor:
        probs, _ = topk_routing(
            logits,
            topk,
            use_pre_softmax=pre,
            num_groups=number or None,
            group_topk=chosen or None,
            score_function=function,
            expert_bias=expert_bias(logits),
        )
        return probs

    def choose(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if number:
            worth = scores.view(tokens, number, -1).topk(topk // chosen, dim=-1)[0].sum(dim=-1)
            mask = torch.zeros_like(worth).scatter_(1, worth.topk(chosen, dim=-1, sorted=False)[1], 1)
            wide = mask.unsqueeze(-1).expand(tokens, number, experts // number).reshape(tokens, -1)
            scores = scores.masked_fill(~wide.bool(), float("-inf"))
        return torch.topk(scores, topk, dim=1)

    def plain(logits: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if function == "softmax" and pre:
            probs, indices = choose(torch.softmax(logits, dim=-1, dtype=wide))
        elif function == "softmax":
            scores, indices = choose(logits)
            probs = torch.softmax(scores, dim=-1, dtype=wide)
        else:
            x = logits.to(wide)
            scores = torch.sigmoid(x) if function == "sigmoid" else torch.nn.functional.softplus(x).sqrt()
            added = expert_bias(logits)
            if added is None:
                probs, indices = choose(scores)
            else:
                indices = choose(scores + added)[1]
                probs = scores.gather(1, indices)
            if topk > 1:
                probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
        probs = probs.type_as(logits)
        # The map that is wanted with the probabilities.
        torch.zeros_like(logits).int().scatter(1, indices, 1).bool()
        return torch.zeros_like(logits).scatter(1, indices, probs)

    size, count = dtype.itemsize, tokens * experts
    forward = Work(count * (2 * size + 1), count * (8 + topk + number))
    backward = Work(count * size + tokens * topk * size, 8 * count)
    details = "".join([" pre-softmax" * pre, f" groups {number}/{chosen}" if number else "", " bias" * biased])
    return Case(
        operator="moe_router",
        name=f"{tokens}x{experts} top {topk} {function}{details} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(Contender(OURS, lambda: ours), Contender(TORCH, lambda: plain), compiled(lambda: plain)),
    )
