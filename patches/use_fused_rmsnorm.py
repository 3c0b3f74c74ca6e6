"""`--use-fused-rmsnorm`: RMSNorm as one operator.

Reaches `WrappedTorchNorm.__new__`, which makes every RMSNorm of the local implementation. Parameters have the names of
`torch.nn.RMSNorm`, so checkpoints interchange. Leaves LayerNorm, L2Norm and Transformer Engine's norms alone. Falls
back for a memory-efficient norm, which Megatron refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option
from mindspeed_lite.ops.rms_norm import reference, rms_norm

from ._shared import local_norms


class FusedRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension, computed by `mindspeed_lite.ops.rms_norm`.

    Args:
        hidden_size: length of the last dimension.
        eps: added to the mean square.
        zero_centered: the stored weight is gamma - 1 and starts at zero (Megatron's layernorm_zero_centered_gamma).
        sequence_parallel: mark the weight so that Megatron sums its gradient over the tensor-parallel group.
    """

    weight: torch.nn.Parameter
    eps: float
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
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.verifier is not None:
            self._verify(x)
        return rms_norm(x, self.weight, self.eps, self.zero_centered)

    def _verify(self, x: torch.Tensor) -> None:
        def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rms_norm(x, weight, self.eps, self.zero_centered)

        def torchs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return local_norms.torchs(self, x, weight=weight)

        def definition(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = reference.rms_norm(x, weight, self.eps, self.zero_centered)
            return out

        self.verifier.check(
            FEATURE.name,
            "rms_norm",
            FEATURE.numerics,
            ours,
            definition if self.zero_centered else torchs,
            {"x": x, "weight": self.weight},
            against=local_norms.compared_with("RMSNorm", self),
            variant="zero-centred" if self.zero_centered else "",
        )


def _why_not(context: Context) -> Sequence[str]:
    return local_norms.why_not(context, "RMSNorm")


FEATURE = Feature(
    name="use_fused_rmsnorm",
    summary="RMSNorm as one fused operator; also under sequence parallelism",
    options=(Option("--use-fused-rmsnorm", help="Compute RMSNorm with one fused operator."),),
    numerics="ulp",
    theme="operators",
    condition=_why_not,
    operators=("rms_norm",),
    patches=(local_norms.instead_of("RMSNorm", FusedRMSNorm),),
)
