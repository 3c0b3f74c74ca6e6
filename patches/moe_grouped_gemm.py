"""`--moe-grouped-gemm`: all experts of a rank in one grouped product per layer, without Transformer Engine.

Megatron's local implementation has one MLP per expert and a Python loop over them (since 0.17 whatever the flag says;
0.16 asks for an extension). The module stays what it is: one parameter per expert, so that initialisation, gradient
buffers, optimizer and checkpoints are those of the loop. Its forward is still Megatron's, called for one expert that
stands for all: its two linear layers are grouped products over the experts' weights, and what lies between them is
run by Megatron's own MLP, so that activation, per-token probabilities and what other features change there hold.

Beyond the loop it has `moe_act` in `--recompute-modules`. Weight gradients are added to the main gradient where the
layers do that (`--gradient-accumulation-fusion`) and delayed where the layers are (`--delay-wgrad-compute`). Steps
aside, with a reason, for fp8 and fp4, frozen or further distributed weights, offloading, and experts that are not
Megatron's MLP of its own linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option, Session, Wrap
from mindspeed_lite.ops.grouped_matmul import Counts, accumulate_weight_gradients, weight_gradients
from mindspeed_lite.ops.grouped_matmul.linear import TakeGradients, grouped_linear

from . import delay_wgrad_compute

ARGUMENT = "moe_grouped_gemm"
_PROVIDER = "megatron.core.models.backends:LocalSpecProvider"
_REASONS = "grouped_gemm_why_not"


class _Through(torch.nn.Module):
    """A function where Megatron asks for a module; it is called often and holds nothing, so nothing is set up."""

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _InPlaceOf:
    """`original`, but for the attributes given."""

    def __init__(self, original: Any, **others: Any) -> None:
        self._original = original
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _forward(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def forward(
        self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any, permuted_probs: Any
    ) -> tuple[Any, Any]:
        reasons = getattr(self, _REASONS, None)
        if reasons is None:
            reasons = _cannot(self)
            setattr(self, _REASONS, reasons)
            if reasons:
                session.fallback(FEATURE.name, "; ".join(reasons))
        if reasons:
            return wrapped(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)  # type: ignore[no-any-return]
        together = _Through(lambda hidden, probs: (_experts(self, hidden, tokens_per_expert, probs), None))
        # With one expert Megatron hands it everything; it has no tokens to split and no outputs to join.
        one = _InPlaceOf(self, num_local_experts=1, local_experts=[together])
        return wrapped(one, permuted_local_hidden_states, tokens_per_expert, permuted_probs)  # type: ignore[no-any-return]

    return forward


def _experts(module: Any, hidden: torch.Tensor, counts: Counts, probs: torch.Tensor) -> torch.Tensor:
    experts = module.local_experts
    first = experts[0]
    fc1 = [expert.linear_fc1 for expert in experts]
    fc2 = [expert.linear_fc2 for expert in experts]

    def activation(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        # What Megatron's MLP does between its two linear layers.
        middle = _InPlaceOf(first, linear_fc1=_Through(lambda _: (x, None)), linear_fc2=_Through(lambda y: (y, None)))
        found: torch.Tensor = type(first).forward(middle, x, probs)[0]
        return found

    x = _linear(fc1, hidden, counts)
    x = _add_biases(fc1, x, counts)
    if not _recomputes(module.config):
        y = activation(x, probs)
        return _add_biases(fc2, _linear(fc2, y, counts), counts, probs)
    from megatron.core import tensor_parallel

    checkpoint = tensor_parallel.CheckpointWithoutOutput(module.config.fp8)
    y = checkpoint.checkpoint(activation, x, probs)
    out = _linear(fc2, y, counts)
    checkpoint.discard_output_and_register_recompute(out)
    return _add_biases(fc2, out, counts, probs)


def _recomputes(config: Any) -> bool:
    return config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ())


def _linear(layers: Sequence[Any], x: torch.Tensor, counts: Counts) -> torch.Tensor:
    return grouped_linear(x, [layer.weight for layer in layers], counts, _gradients(layers))


def _add_biases(
    layers: Sequence[Any], x: torch.Tensor, counts: Counts, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Each expert's bias on its rows, times the rows' probabilities for the layer whose bias Megatron adds itself."""
    if layers[0].bias is None:
        return x
    # One row per token of a small matrix: index_select has a gradient that sums over the rows of an expert.
    counts = torch.as_tensor(counts, device=x.device)
    expert = torch.repeat_interleave(torch.arange(len(layers), device=x.device), counts, output_size=x.shape[0])
    biases = torch.stack([layer.bias for layer in layers]).index_select(0, expert)
    return x + biases if scale is None else (x + biases * scale.unsqueeze(-1)).to(x.dtype)


def _gradients(layers: Sequence[Any]) -> TakeGradients:
    """What the linear layers of the experts do with their weight gradients, for all of them at once."""
    weights = [layer.weight for layer in layers]

    def take(dy: torch.Tensor, x: torch.Tensor, counts: Counts) -> Sequence[torch.Tensor | None]:
        if not (layers[0].gradient_accumulation_fusion and all(hasattr(weight, "main_grad") for weight in weights)):
            return weight_gradients(dy, x, counts)
        waiting = [lambda: accumulate_weight_gradients([weight.main_grad for weight in weights], dy, x, counts)]

        def compute() -> None:
            # The first layer that is asked computes for all.
            if waiting:
                waiting.pop()()

        for layer in layers:
            if not delay_wgrad_compute.put(layer, compute):
                compute()
        return [_stand_in(weight) for weight in weights]

    return take


def _stand_in(weight: Any) -> torch.Tensor | None:
    """The gradient that autograd is given where the real one is in the main gradient: its hooks reduce it."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def _cannot(module: Any) -> list[str]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP

    config = module.config
    experts = list(module.local_experts)
    layers = [layer for expert in experts for layer in (expert.linear_fc1, expert.linear_fc2)]
    reasons = {
        "the experts compute in fp8 or fp4, which pads each expert's tokens": bool(config.fp8)
        or bool(getattr(config, "fp4", None)),
        "the experts are not Megatron's MLP of its own linear layers": any(
            type(expert) is not MLP for expert in experts
        )
        or any(type(layer) not in (ColumnParallelLinear, RowParallelLinear) for layer in layers),
        "experts whose weights are distributed further": any(getattr(each, "gtp_remat_size", 1) > 1 for each in layers),
        "a frozen weight": any(not layer.weight.requires_grad for layer in layers),
        "cpu_offloading moves what the experts keep": bool(getattr(config, "cpu_offloading", False)),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _modules(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: Any) -> Any:
        # Asked for grouped experts, a release may answer with a module that needs an extension.
        return wrapped(self, False)

    return grouped_mlp_modules


def _modules_or_legacy(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: Any, moe_use_legacy_grouped_gemm: Any) -> Any:
        return wrapped(self, False, moe_use_legacy_grouped_gemm)

    return grouped_mlp_modules


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine has grouped experts of its own")
    if context.host_args is not None and not context.arg("num_experts", None):
        reasons.append("--num-experts is not given: the model has no experts")
    return reasons


def _adjust(context: Context) -> Mapping[str, Any]:
    return {} if context.host_args is None else {ARGUMENT: True}


FEATURE = Feature(
    name="moe_grouped_gemm",
    summary="all experts of a rank in one grouped product per layer",
    options=(
        Option(
            "--moe-grouped-gemm",
            help="Compute the experts of a rank with grouped matrix products.",
            upstream=">=0.16,<0.20",
        ),
    ),
    numerics="ulp",
    condition=_why_not,
    adjust=_adjust,
    operators=("grouped_matmul",),
    patches=(
        Wrap("megatron.core.transformer.moe.experts:SequentialMLP.forward", _forward),
        Wrap(f"{_PROVIDER}.grouped_mlp_modules", _modules, versions=">=0.17"),
        Wrap(f"{_PROVIDER}.grouped_mlp_modules", _modules_or_legacy, versions="<0.17"),
    ),
)
