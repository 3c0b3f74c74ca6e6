"""`--moe-grouped-gemm`: one grouped GEMM per layer for all experts of a rank.

Reaches `SequentialMLP.forward`, which runs once, for an expert whose linear layers are grouped GEMMs. Module,
parameters, activation code and checkpoints stay. Supports `moe_act` recomputation, gradient accumulation fusion,
delayed weight gradients and `--moe-wgrad-side-stream`. Falls back for fp8, fp4, frozen or further sharded weights,
hooks on experts, offloading, and other experts or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Feature, Function, Option, Override, Session
from mindspeed_lite.ops.grouped_matmul import (
    Counts,
    TakeGradients,
    accumulate_weight_gradients,
    grouped_matmul,
    weight_gradients,
)
from mindspeed_lite.platform.megatron import CONFIG

from . import (
    delay_wgrad_compute,
    moe_alltoall_mc2,
    moe_wgrad_side_stream,
    moe_zero_memory,
    recompute_activation_function,
)
from ._shared import linear_layers, moe, recompute
from ._shared.conditions import holding, turn_on
from ._shared.proxies import AttributeOverride, FunctionModule, run_activation
from ._shared.wrappers import verify

_PROVIDER = "megatron.core.models.backends:LocalSpecProvider"
_REASONS = "grouped_gemm_why_not"
_LINEAR = "megatron.core.tensor_parallel.layers:ColumnParallelLinear"
_MLP = "megatron.core.transformer.mlp:MLP"
LINEAR_LAYERS = tuple(
    f"megatron.core.tensor_parallel.layers:{name}"
    for name in (
        "ColumnParallelLinear.forward",
        "RowParallelLinear.forward",
        "linear_with_grad_accumulation_and_async_allreduce",
    )
)
_READS = (
    *(f"{_MLP}.{name}" for name in ("linear_fc1", "linear_fc2")),
    *(f"{_LINEAR}.{name}" for name in ("bias", "gradient_accumulation_fusion", "weight")),
    *(f"{CONFIG}.{name}" for name in ("recompute_granularity", "recompute_modules")),
)


def _forward(wrapped: Function, session: Session) -> Function:
    def forward(
        self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any, permuted_probs: Any
    ) -> tuple[Any, Any]:
        released = moe_zero_memory.released_of(session, permuted_local_hidden_states)
        # Marked on an expert: `self` may be a proxy of one call.
        first = self.local_experts[0]
        reasons = getattr(first, _REASONS, None)
        if reasons is None:
            reasons = _layer_reasons(self)
            session.mark(first, _REASONS, reasons)
        reasons = [*reasons, *_call_reasons(self.local_experts)]
        if reasons:
            moe_alltoall_mc2.check_exchanged(session, reasons)
            session.fallback(FEATURE.name, "; ".join(reasons))
            return wrapped(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)  # type: ignore[no-any-return]
        together = FunctionModule(
            lambda hidden, probs: (_together(session, self, hidden, tokens_per_expert, probs, released), None)
        )
        # With one expert Megatron neither splits tokens nor joins outputs.
        one = AttributeOverride(self, num_local_experts=1, local_experts=[together])
        return wrapped(one, permuted_local_hidden_states, tokens_per_expert, permuted_probs)  # type: ignore[no-any-return]

    return forward


def _together(
    session: Session,
    module: Any,
    hidden: Tensor,
    counts: Counts,
    probs: Tensor,
    released: moe_zero_memory.ReleasedExperts | None,
) -> Tensor:
    experts = module.local_experts
    first = experts[0]
    fc1 = [expert.linear_fc1 for expert in experts]
    fc2 = [expert.linear_fc2 for expert in experts]
    for layer in (*fc1, *fc2):
        moe.before_call(layer)

    def activation(x: Tensor, probs: Tensor) -> Tensor:
        found: Tensor = run_activation(type(first).forward, first, x, probs)
        return found

    fc1_biases = None if first.linear_fc1.bias is None else [layer.bias for layer in fc1]
    x = _linear(session, fc1, hidden, counts, fc1_biases, released)
    recomputes = _has_moe_act(module.config) or recompute_activation_function.is_recomputed(first, session)
    if not (recomputes or released):
        y = recompute_activation_function.run_observed(first, activation, x, probs)
        return _finish(fc2, _linear(session, fc2, y, counts), counts, probs)
    checkpoint = recompute.checkpoint_without_output()
    out = _linear(session, fc2, checkpoint.checkpoint(activation, x, probs), counts)
    if released is not None:
        weights = [layer.weight for layer in fc1]
        released.release(hidden, x, out, lambda: grouped_matmul(hidden, weights, counts, fc1_biases))
    checkpoint.discard_output_and_register_recompute(out)
    return _finish(fc2, out, counts, probs)


def _has_moe_act(config: Any) -> bool:
    return config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ())


def _linear(
    session: Session,
    layers: Sequence[Any],
    x: Tensor,
    counts: Counts,
    biases: Sequence[Any] | None = None,
    released: moe_zero_memory.ReleasedExperts | None = None,
) -> Tensor:
    weights = [layer.weight for layer in layers]
    together = moe_alltoall_mc2.product_of(session)
    if together is not None:
        return together(x, weights, _gradients(session, layers, None))  # type: ignore[no-any-return]
    if session.verifier is not None:
        _verify(session, x, weights, counts, biases)
    return grouped_matmul(x, weights, counts, biases, take_gradients=_gradients(session, layers, released))


def _verify(session: Session, x: Tensor, weights: Sequence[Any], counts: Counts, biases: Sequence[Any] | None) -> None:
    number = len(weights)

    def split(tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any] | None]:
        return tensors[:number], tensors[number:] or None

    def ours(x: Tensor, *both: Any) -> Tensor:
        weights, biases = split(both)
        return grouped_matmul(x, weights, counts, biases)

    def loop(x: Tensor, *both: Any) -> Tensor:
        weights, biases = split(both)
        rows = torch.split(x, torch.as_tensor(counts).tolist())
        linear = torch.nn.functional.linear
        return torch.cat([linear(rows[e], weights[e], biases[e] if biases else None) for e in range(number)])

    inputs = {"x": x, **{f"weight {e}": each for e, each in enumerate(weights)}}
    inputs.update({f"bias {e}": each for e, each in enumerate(biases or ())})
    verify(session, FEATURE, "grouped_matmul", ours, loop, inputs, "one linear layer after the other", sizes_vary=True)


def _finish(layers: Sequence[Any], x: Tensor, counts: Counts, probs: Tensor) -> Tensor:
    if layers[0].bias is None:
        return x
    # The gradient of index_select sums over an expert's rows.
    counts = torch.as_tensor(counts, device=x.device)
    expert = torch.repeat_interleave(torch.arange(len(layers), device=x.device), counts, output_size=x.shape[0])
    biases = torch.stack([layer.bias for layer in layers]).index_select(0, expert)
    return (x + biases * probs.unsqueeze(-1)).to(x.dtype)


def _gradients(
    session: Session, layers: Sequence[Any], released: moe_zero_memory.ReleasedExperts | None
) -> TakeGradients:
    weights = [layer.weight for layer in layers]

    def accumulates() -> bool:
        return layers[0].gradient_accumulation_fusion and all(hasattr(weight, "main_grad") for weight in weights)

    if accumulates():
        for state in moe.message_states(session):
            state.messages.expect_jobs()

    def arrive() -> None:
        if released is not None:
            released.rows.arrive()

    def take(dy: Tensor, x: Tensor, counts: Counts) -> Sequence[Tensor | None]:
        if not accumulates():
            arrive()
            return weight_gradients(dy, x, counts)

        def accumulate() -> None:
            arrive()
            accumulate_weight_gradients([weight.main_grad for weight in weights], dy, x, counts)

        waiting = [accumulate]

        def compute() -> None:
            # The first call computes for all layers.
            if waiting:
                waiting.pop()()

        if not all([delay_wgrad_compute.put(layer, compute) for layer in layers]):
            waiting.clear()
            if not moe.put(session, accumulate):
                # The side stream waits for no message.
                arrive()
                if not moe_wgrad_side_stream.put(session, layers[0].config, accumulate):
                    accumulate()
        return [linear_layers.placeholder_grad(weight) for weight in weights]

    return take


def _layer_reasons(module: Any) -> list[str]:
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
        "cpu_offloading moves what the experts keep": bool(getattr(config, "cpu_offloading", False)),
    }
    return holding(reasons)


def _call_reasons(experts: Sequence[Any]) -> list[str]:
    linear = [layer for expert in experts for layer in (expert.linear_fc1, expert.linear_fc2)]
    reasons = {
        # A copy of another rank's weight is no Parameter (--balanced-moe-experts).
        "a frozen weight": any(
            isinstance(weight, torch.nn.Parameter) and not weight.requires_grad
            for weight in (getattr(layer, "weight", None) for layer in linear)
        ),
        moe.HOOKED: any(map(moe.has_hooks, (*experts, *linear))),
    }
    return holding(reasons)


def _modules(wrapped: Function, session: Session) -> Function:
    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: Any, moe_use_legacy_grouped_gemm: Any = False) -> Any:
        # For grouped experts a release may need an extension.
        return wrapped(self, False, moe_use_legacy_grouped_gemm)

    return grouped_mlp_modules


def _spec(wrapped: Function, session: Session) -> Function:
    """Patch for Megatron 0.12, which has no spec provider."""

    def get_moe_module_spec(
        use_te: Any = True,
        num_experts: Any = None,
        moe_grouped_gemm: Any = False,
        moe_use_legacy_grouped_gemm: Any = False,
    ) -> Any:
        return wrapped(use_te, num_experts, moe_grouped_gemm and use_te, moe_use_legacy_grouped_gemm)

    return get_moe_module_spec


FEATURE = Feature(
    name="moe_grouped_gemm",
    summary="all experts of a rank in one grouped product per layer",
    options=(Option("--moe-grouped-gemm", upstream=">=0.12"),),
    numerics="ulp",
    theme="experts",
    condition=moe.local_experts("has its own grouped experts, with this flag"),
    arguments=turn_on("moe_grouped_gemm"),
    operators=("grouped_matmul",),
    patches=(
        Override(
            "megatron.core.transformer.moe.experts:SequentialMLP.forward",
            _forward,
            reads=_READS,
            relies_on=LINEAR_LAYERS,
        ),
        Override(f"{_PROVIDER}.grouped_mlp_modules", _modules, versions=">=0.13", by_name=True),
        Override("megatron.core.models.gpt.moe_module_specs:get_moe_module_spec", _spec, versions="<0.13"),
    ),
)
