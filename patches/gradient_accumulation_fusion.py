"""`--gradient-accumulation-fusion`: wgrad GEMMs add into the main gradient, without Apex.

Reaches every trained local linear layer by providing the Apex extension that Megatron calls, and keeps Megatron's
default on without Apex. Leaves Transformer Engine and an installed Apex alone. Falls back for
`--no-gradient-accumulation-fusion` and FSDP, which has no main gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, Override, Provide, Session
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad, reference

from ._shared import wgrad_accumulation
from ._shared.conditions import explicitly_disabled_reasons, fsdp_reasons, reenable_default, transformer_engine_reasons
from ._shared.config_restore import config_field
from ._shared.wrappers import after

EXTENSION = "fused_weight_gradient_mlp_cuda"
ARGUMENT = "gradient_accumulation_fusion"
_LAYERS = "megatron.core.tensor_parallel.layers"


def _extension(session: Session) -> ModuleType:
    verifier = session.verifier

    def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        if verifier is not None:
            _verify(verifier, main_grad, grad_output, total_input)
        accumulate_wgrad(main_grad, grad_output, total_input)

    module: Any = ModuleType(EXTENSION)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    return module  # type: ignore[no-any-return]


class _WhileEnabled:
    """True while the feature is enabled, also for a backward pass that began before its end."""

    on = True

    def __bool__(self) -> bool:
        return self.on

    def __deepcopy__(self, memo: Any) -> _WhileEnabled:
        return self

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        return bool, (self.on,)


def _is_there() -> bool:
    from megatron.core.tensor_parallel import layers

    return bool(layers._grad_accum_fusion_available)


def _fuse_while_enabled(session: Session, layer: Any) -> None:
    if not layer.gradient_accumulation_fusion:
        return
    layer.gradient_accumulation_fusion = enabled = session.state(ARGUMENT, _WhileEnabled)
    reference = weakref.ref(layer)

    def end() -> None:
        enabled.on = _is_there()
        found = reference()
        if found is None:
            return
        found.gradient_accumulation_fusion = enabled.on
        if not enabled.on and hasattr(found.weight, "grad_added_to_main_grad"):
            # The next gradient of this step comes from autograd and must be added.
            found.weight.grad_added_to_main_grad = False

    session.on_end(end)


def _verify(verifier: Any, main_grad: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    def ours(*copies: torch.Tensor) -> torch.Tensor:
        return accumulate_wgrad(*(each.detach() for each in copies))

    def unfused(*copies: torch.Tensor) -> torch.Tensor:
        return reference.accumulate_wgrad(*(each.detach() for each in copies))

    verifier.check(
        FEATURE.name,
        "accumulate_wgrad",
        FEATURE.numerics,
        ours,
        unfused,
        {"main_grad": main_grad, "dy": grad_output, "x": total_input},
        against="the product and the addition of Megatron's unfused path",
    )


def _why_not(context: Context) -> Sequence[str]:
    return [
        *transformer_engine_reasons(context, "accumulates weight gradients itself"),
        *explicitly_disabled_reasons(context, ARGUMENT, "--no-gradient-accumulation-fusion"),
        *fsdp_reasons(context, "has no main gradients that a layer could add to"),
    ]


FEATURE = Feature(
    name="gradient_accumulation_fusion",
    summary="weight gradients added to the main gradient by the product that computes them",
    options=(
        Option(
            "--gradient-accumulation-fusion",
            help="Accumulate weight gradients in the product that computes them, without Apex.",
            # Megatron's flag of the plain name defaults to on, with or without Apex.
            name="use_gradient_accumulation_fusion",
        ),
    ),
    numerics="ulp",
    theme="operators",
    memory="not predicted: saves the 16-bit weight gradient of one layer at a time",
    condition=_why_not,
    arguments=lambda context: reenable_default(context, ARGUMENT),
    operators=("accumulate_wgrad",),
    patches=(
        # Also by value: the layers have already tried the import.
        Provide(EXTENSION, _extension, wanted_by=_LAYERS),
        Provide(f"{_LAYERS}:{EXTENSION}", lambda session: sys.modules[EXTENSION]),
        Override(f"{_LAYERS}:_grad_accum_fusion_available", lambda wrapped, session: True),
        Around(
            f"{_LAYERS}:ColumnParallelLinear.__init__",
            after(_fuse_while_enabled),
            reads=("gradient_accumulation_fusion",),
        ),
        Around(
            f"{_LAYERS}:RowParallelLinear.__init__", after(_fuse_while_enabled), reads=("gradient_accumulation_fusion",)
        ),
        wgrad_accumulation.PATCH,
        config_field(ARGUMENT, _is_there),
    ),
)
