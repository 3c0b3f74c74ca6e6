"""`--use-fused-layernorm`: LayerNorm as one operator, also under sequence parallelism and with zero-centred gamma.

Reaches every LayerNorm of the local implementation where Apex is absent: layer inputs, before the MLP, QK-norm, the
final norm, BERT's head. `WrappedTorchNorm.__new__` is where all of them are made, whichever layer specification asks,
and it is the same in every supported release. Leaves RMSNorm, L2Norm, Apex's and Transformer Engine's norms alone.
Parameters have the names of `torch.nn.LayerNorm`, so checkpoints are interchangeable. Steps aside for a
memory-efficient norm, which Megatron refuses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option, Session, Wrap
from mindspeed_lite.ops.layer_norm import layer_norm, reference
from mindspeed_lite.verify import Exact


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension, computed by `mindspeed_lite.ops.layer_norm`.

    Args:
        hidden_size: length of the last dimension.
        eps: added to the variance.
        zero_centered: the stored weight is gamma - 1 and starts at zero (Megatron's layernorm_zero_centered_gamma).
        sequence_parallel: mark the parameters so that Megatron sums their gradients over the tensor-parallel group.
    """

    verifier: Any = None

    def __init__(
        self, hidden_size: int, eps: float, zero_centered: bool = False, sequence_parallel: bool = False
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        if zero_centered:
            torch.nn.init.zeros_(self.weight)
        # Set only when it holds: some of Megatron's code asks for the attribute, not its value.
        if sequence_parallel:
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.verifier is not None:
            self._verify(x)
        return layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered)

    def _verify(self, x: torch.Tensor) -> None:
        def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return layer_norm(x, weight, bias, self.eps, self.zero_centered)

        def torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

        def definition(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = reference.layer_norm(x, weight, bias, self.eps, self.zero_centered)
            return out

        against = "torch.nn.LayerNorm"
        if self.zero_centered:
            against = "the plain definition, since Megatron's local path has no LayerNorm with zero-centred gamma"
        elif getattr(self.weight, "sequence_parallel", False):
            against += ", which Megatron's local path refuses under sequence parallelism"
        self.verifier.check(
            FEATURE.name,
            "layer_norm",
            FEATURE.numerics,
            ours,
            definition if self.zero_centered else torchs,
            {"x": x, "weight": self.weight, "bias": self.bias},
            against=against,
            exact=[Exact(definition)],
            variant="zero-centred" if self.zero_centered else "",
        )


def _new(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def __new__(
        cls: Any,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> Any:
        # Megatron's own answer to a memory-efficient norm is a refusal that should stand.
        if config.normalization != "LayerNorm" or config.memory_efficient_layer_norm:
            return wrapped(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)
        norm = FusedLayerNorm(hidden_size, eps, config.layernorm_zero_centered_gamma, config.sequence_parallel)
        if session.verifier is not None:
            norm.verifier = session.verifier
        return norm

    return __new__


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine uses Transformer Engine's own fused norm")
    normalization = context.arg("normalization", "LayerNorm")
    if normalization != "LayerNorm":
        reasons.append(f"the model has --normalization {normalization}, not LayerNorm")
    if context.arg("memory_efficient_layer_norm", False):
        reasons.append("--memory-efficient-layer-norm is a property of Apex's norm")
    if importlib.util.find_spec("apex") is not None:
        reasons.append("Apex is installed, whose fused norm Megatron's local implementation takes for LayerNorm")
    return reasons


FEATURE = Feature(
    name="use_fused_layernorm",
    summary="LayerNorm as one operator; also under sequence parallelism and with zero-centred gamma",
    options=(Option("--use-fused-layernorm", help="Compute LayerNorm with one fused operator."),),
    numerics="ulp",
    condition=_why_not,
    operators=("layer_norm",),
    # Outside the device layer's wrap of the same symbol, so that sequence parallelism reaches this one.
    patches=(Wrap("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _new, order=10),),
)
