"""`--use-fused-linear-cross-entropy`: output layer and loss in one, with few logits.

Reaches `GPTModel._postprocess`, where the output layer returns its operands, and `compute_language_model_loss`, which
multiplies them in chunks. Serves tied weights, tensor and sequence parallelism, gradient accumulation fusion, and
multi-token prediction until 0.18. Leaves other models alone. Falls back where code needs logits, replaces the loss, or
delays the output layer's weight gradient.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Feature, Function, Override, Session
from mindspeed_lite.ops.linear_cross_entropy import Accumulate
from mindspeed_lite.parallel.cross_entropy import vocab_parallel_linear_cross_entropy

from . import use_fused_cross_entropy
from ._shared import linear_layers
from ._shared.conditions import holding
from ._shared.wrappers import leave_out, verify

MODEL = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"
LOSS = "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss"
_OUTPUT = "megatron.core.tensor_parallel.layers:ColumnParallelLinear"
_READS = tuple(f"{_OUTPUT}.{name}" for name in ("_forward_impl", "bias", "gather_output", "weight"))
_RELIES_ON = (
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    use_fused_cross_entropy.UNFUSED,
    use_fused_cross_entropy.FUSED,
    use_fused_cross_entropy.LOSS,
)

# Maximum logits elements for verification in a wider type.
WIDENED = 1 << 23


@dataclass(frozen=True)
class Deferred:
    """Operands of the output layer, in place of logits."""

    hidden: Tensor  # [s, b, H], or [s / ranks, b, H] under sequence parallelism
    weight: Tensor  # [V / ranks, H]
    fused_accumulation: bool
    sums_gradient: bool
    sequence_parallel: bool
    group: Any

    def loss(self, target: Tensor) -> Tensor:
        return vocab_parallel_linear_cross_entropy(
            self.whole_hidden(), self.weight, target, self.group, accumulate=self.accumulate()
        )

    def whole_hidden(self) -> Tensor:
        """[s, b, H], whose gradient is summed over the ranks."""
        from megatron.core.tensor_parallel import mappings

        hidden = self.hidden
        if self.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=self.group)
        elif self.sums_gradient:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=self.group)
        return hidden

    def accumulate(self) -> Accumulate | None:
        main_grad = getattr(self.weight, "main_grad", None) if self.fused_accumulation else None
        return None if main_grad is None else _into(main_grad, self.weight)


def _into(main_grad: Tensor, weight: Tensor) -> Accumulate:
    def add(rows: slice, dlogits: Tensor, hidden: Tensor) -> None:
        linear_layers.add_wgrad(main_grad[rows], dlogits, hidden)

    return Accumulate(add, lambda: linear_layers.placeholder_grad(weight))


@contextlib.contextmanager
def _deferring(layer: Any) -> Iterator[None]:
    def forward_impl(
        input: Any,
        weight: Any,
        bias: Any,
        gradient_accumulation_fusion: Any,
        allreduce_dgrad: Any,
        sequence_parallel: Any,
        grad_output_buffer: Any = None,
        wgrad_deferral_limit: Any = None,
        tp_group: Any = None,
        gtp_remat_size: int = 1,
        output_dtype: Any = None,
    ) -> Deferred:
        return Deferred(input, weight, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group)

    layer._forward_impl = forward_impl
    try:
        yield
    finally:
        del layer._forward_impl


def _postprocess(wrapped: Function, session: Session) -> Function:
    signature = inspect.signature(wrapped)

    def _postprocess(
        self: Any, hidden_states: Any, input_ids: Any, position_ids: Any, labels: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if labels is None or not self.post_process:
            return wrapped(self, hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        given = signature.bind(self, hidden_states, input_ids, position_ids, labels, *args, **kwargs).arguments
        reasons = _call_reasons(self, given)
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
        with contextlib.nullcontext() if reasons else _deferring(self.output_layer):
            return wrapped(self, hidden_states, input_ids, position_ids, labels, *args, **kwargs)

    return _postprocess


def _call_reasons(model: Any, given: Mapping[str, Any]) -> list[str]:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer import multi_token_prediction

    reasons = layer_reasons(model, given["hidden_states"].device.type)
    if reasons:
        return reasons
    layer, config = model.output_layer, model.config
    gathers = given.get("runtime_gather_output")
    gathers = layer.gather_output if gathers is None else gathers
    own_loss = "compute_language_model_loss" in vars(model) or (
        type(model).compute_language_model_loss is not LanguageModule.compute_language_model_loss
    )
    found = {
        "the logits are to be gathered over the tensor-parallel ranks": bool(gathers),
        "the model has a loss of its own": own_loss,
        "multi-token prediction counts in its logits how many tokens are accepted": config.mtp_num_layers
        and hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts"),
        "an output processor takes the output layer": given.get("output_processor") is not None,
        "hidden states and weight differ in dtype": given["hidden_states"].dtype != _weight(model).dtype,
    }
    return holding(found)


def layer_reasons(model: Any, device: str) -> list[str]:
    """Why the output layer of a last stage has to multiply itself."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = model.output_layer
    if getattr(type(layer), "forward", None) is not ColumnParallelLinear.forward:
        return [f"the output layer is a {type(layer).__name__}, not Megatron's ColumnParallelLinear"]
    found = {
        "the output layer has a bias": layer.bias is not None,
        "the logits are to have another dtype": getattr(layer, "output_dtype", None) is not None,
        "a hook looks at the output layer's logits": bool(
            layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
        ),
        "autocast is on": torch.is_autocast_enabled(device),
        "the output layer's weight is distributed": getattr(layer, "gtp_remat_size", 1) > 1
        or hasattr(_weight(model), "__fsdp_param__"),
        **{why: getattr(model.config, name, False) for name, why in CONFLICTING_ARGS.items()},
    }
    return holding(found)


CONFLICTING_ARGS = {
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute keeps the logits' gradient for later",
    "use_mup": "--use-mup scales the logits",
    "config_logger_dir": "--config-logger-dir writes the logits to a file",
}


def _weight(model: Any) -> Tensor:
    shared = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
    return weight


def _loss(wrapped: Function, session: Session) -> Function:
    def compute_language_model_loss(self: Any, labels: Any, logits: Any) -> Any:
        if not isinstance(logits, Deferred):
            return wrapped(self, labels, logits)
        _verify(session, lambda logits: wrapped(self, labels, logits), labels, logits)
        loss = logits.loss(labels.transpose(0, 1).contiguous())  # [b, s] -> [s, b]
        return loss.transpose(0, 1).contiguous()

    return compute_language_model_loss


def _verify(session: Session, original: Callable[[Tensor], Any], labels: Any, deferred: Deferred) -> None:
    group = deferred.group
    if group.size() > 1:
        leave_out(session, FEATURE, "linear_cross_entropy", "the ranks of a tensor-parallel group compute it")
        return
    target = labels.transpose(0, 1).contiguous()

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return vocab_parallel_linear_cross_entropy(hidden, weight, target, group).transpose(0, 1)

    def megatrons(hidden: Tensor, weight: Tensor) -> Tensor:
        loss: Tensor = original(torch.matmul(hidden, weight.t()))
        return loss

    inputs = {"hidden": deferred.hidden, "weight": deferred.weight}
    widened = target.numel() * deferred.weight.shape[0] <= WIDENED
    against = "Megatron's output layer and loss"
    verify(session, FEATURE, "linear_cross_entropy", ours, megatrons, inputs, against, widened=widened)


FEATURE = Feature(
    name="use_fused_linear_cross_entropy",
    summary="GPT's output layer and loss in one, keeping at most 256 MiB of logits, for up to a fourth matrix product",
    numerics="ulp",
    theme="memory",
    unsupported={"<0.14": "before Megatron 0.14 the output layer has no method that multiplies, to be replaced"},
    condition=use_fused_cross_entropy.not_transformer_engines,
    conflicting_args=CONFLICTING_ARGS,
    not_auto="it trades a fourth GEMM of the output layer for the logits' memory: enable it explicitly with its flag",
    operators=("linear_cross_entropy",),
    patches=(Override(MODEL, _postprocess, reads=_READS), Override(LOSS, _loss, relies_on=_RELIES_ON)),
)
