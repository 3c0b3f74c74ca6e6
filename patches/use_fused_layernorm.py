"""`--use-fused-layernorm`: LayerNorm as one operator.

Reaches `WrappedTorchNorm.__new__`, which makes every LayerNorm of the local implementation without Apex. Parameters
have the names of `torch.nn.LayerNorm`, so checkpoints interchange. Leaves RMSNorm, L2Norm, Apex's and Transformer
Engine's norms alone. Falls back for a memory-efficient norm, which Megatron refuses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option
from mindspeed_lite.ops.layer_norm import layer_norm, reference

from ._shared import local_norms


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
            return local_norms.torchs(self, x, weight=weight, bias=bias)

        def definition(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = reference.layer_norm(x, weight, bias, self.eps, self.zero_centered)
            return out

        self.verifier.check(
            FEATURE.name,
            "layer_norm",
            FEATURE.numerics,
            ours,
            definition if self.zero_centered else torchs,
            {"x": x, "weight": self.weight, "bias": self.bias},
            against=local_norms.compared_with("LayerNorm", self),
            variant="zero-centred" if self.zero_centered else "",
        )


def _why_not(context: Context) -> Sequence[str]:
    reasons = local_norms.why_not(context, "LayerNorm")
    if importlib.util.find_spec("apex") is not None:
        reasons.append("Apex is installed, whose fused norm Megatron's local implementation takes for LayerNorm")
    return reasons


FEATURE = Feature(
    name="use_fused_layernorm",
    summary="LayerNorm as one operator; also under sequence parallelism and with zero-centred gamma",
    options=(Option("--use-fused-layernorm", help="Compute LayerNorm with one fused operator."),),
    numerics="ulp",
    theme="operators",
    condition=_why_not,
    operators=("layer_norm",),
    patches=(local_norms.instead_of("LayerNorm", FusedLayerNorm),),
)
