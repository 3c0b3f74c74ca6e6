"""`--gradient-accumulation-fusion`: wgrad GEMMs add into the main gradient, without Apex.

Reaches every trained local linear layer by providing the Apex extension that Megatron calls, and keeps Megatron's
default on without Apex. With Transformer Engine that is the output layer; its own layers accumulate by themselves.
Leaves an installed Apex alone. Falls back for `--no-gradient-accumulation-fusion` and FSDP, which has no main
gradients.
"""

from __future__ import annotations

import sys
import weakref
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Override, Provide, Session
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad, reference

from ._shared import linear_layers
from ._shared.conditions import every, fsdp_args, not_disabled, reenable_default
from ._shared.megatron_arguments import DEFAULTS
from ._shared.wrappers import after_init, config_field, is_set, verify

EXTENSION = "fused_weight_gradient_mlp_cuda"
ARGUMENT = "gradient_accumulation_fusion"
_LAYERS = "megatron.core.tensor_parallel.layers"
_is_there = is_set(f"{_LAYERS}:_grad_accum_fusion_available")


def _extension(session: Session) -> ModuleType:
    def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        if session.verifier is not None:
            given = {"main_grad": main_grad, "dy": grad_output, "x": total_input}
            against = "the product and the addition of Megatron's unfused path"
            ours, theirs = map(_on_copies, (accumulate_wgrad, reference.accumulate_wgrad))
            verify(session, FEATURE, "accumulate_wgrad", ours, theirs, given, against)
        accumulate_wgrad(main_grad, grad_output, total_input)

    module: Any = ModuleType(EXTENSION)
    module.__spec__ = ModuleSpec(EXTENSION, None)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    # `--defer-embedding-wgrad-compute` imports it in every step.
    sys.modules[EXTENSION] = module
    session.on_end(lambda: sys.modules.pop(EXTENSION, None))
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


def _fuse_if_asked(session: Session, layer: Any) -> bool:
    is_asked = bool(layer.gradient_accumulation_fusion)
    if is_asked:
        _fuse_while_enabled(session, layer)
    return is_asked


def _fuse_while_enabled(session: Session, layer: Any) -> None:
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


def _on_copies(operator: Function) -> Function:
    return lambda *copies: operator(*(each.detach() for each in copies))


def _apexs(context: Context) -> list[str]:
    """Unasked, a kernel of Apex stays."""
    kernel = next(each for each in DEFAULTS if each.module == EXTENSION)
    if FEATURE.is_enabled(context.settings) or kernel.is_missing(context.device):
        return []
    return ["Apex's kernel, which is installed, does the same: ask for ours with the flag"]


FEATURE = Feature(
    name="gradient_accumulation_fusion",
    summary="weight gradients added to the main gradient by the product that computes them, without Apex",
    # Megatron's flag of the plain name defaults to on, with or without Apex.
    options=(Option("--gradient-accumulation-fusion", name="use_gradient_accumulation_fusion"),),
    numerics="ulp",
    theme="operators",
    memory="not predicted: saves the 16-bit weight gradient of one layer at a time",
    condition=every(not_disabled(ARGUMENT, "--no-gradient-accumulation-fusion"), _apexs),
    conflicting_args=fsdp_args("has no main gradients that a layer could add to"),
    arguments=reenable_default(ARGUMENT),
    operators=("accumulate_wgrad",),
    patches=(
        Provide(f"{_LAYERS}:{EXTENSION}", _extension),
        Override(f"{_LAYERS}:_grad_accum_fusion_available", lambda wrapped, session: True),
        Around(
            f"{_LAYERS}:ColumnParallelLinear.__init__",
            after_init(_fuse_if_asked, _fuse_while_enabled),
            reads=("gradient_accumulation_fusion",),
        ),
        Around(
            f"{_LAYERS}:RowParallelLinear.__init__",
            after_init(_fuse_if_asked, _fuse_while_enabled),
            reads=("gradient_accumulation_fusion",),
        ),
        linear_layers.PLACEHOLDER_PATCH,
        config_field(ARGUMENT, _is_there),
    ),
)
