"""`--use-fused-linear-log-prob`: log-probabilities of Megatron's reinforcement learning without logits.

Reaches `get_logprobs`, within which the output layer returns its operands, and `selective_log_softmax`, which
multiplies them in chunks: the two functions that read logits, gathered over the tensor-parallel ranks. Serves tied
weights, tensor, sequence, pipeline and context parallelism, and gradient accumulation fusion. Leaves training on labels
and generation alone. Falls back for other models and output layers, multi-token prediction and batch-invariant mode.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Feature, Function, Override, Session
from mindspeed_lite.ops.linear_log_prob import linear_log_prob
from mindspeed_lite.parallel.cross_entropy import vocab_parallel_linear_log_prob

from ._shared.conditions import holding, needs
from ._shared.wrappers import leave_out, verify
from .use_fused_linear_cross_entropy import CONFLICTING_ARGS, WIDENED, Deferred, layer_reasons

_RL = "megatron.rl.rl_utils"
_OUTPUT = "megatron.core.tensor_parallel.layers:ColumnParallelLinear"
_READS = tuple(
    f"{_OUTPUT}.{name}"
    for name in ("allreduce_dgrad", "bias", "gradient_accumulation_fusion", "sequence_parallel", "tp_group", "weight")
)
_IGNORED = -100


@dataclass(frozen=True)
class DeferredLogits:
    """Stands for logits [b, s, V] between the output layer and `selective_log_softmax`."""

    operands: Deferred
    has_grad: bool
    dropped: int = 0  # of the last tokens

    def transpose(self, first: int, second: int) -> DeferredLogits:
        return self

    def contiguous(self) -> DeferredLogits:
        return self

    def __getitem__(self, index: Any) -> DeferredLogits:
        if index != (slice(None), slice(None, -1), slice(None)):
            raise TypeError(f"--use-fused-linear-log-prob has no logits, and Megatron reads {index} of them: omit it")
        return replace(self, dropped=1)

    def log_prob(self, index: Tensor) -> Tensor:
        """[b, s - dropped] in the logits' dtype, as Megatron's; index alike."""
        target = torch.nn.functional.pad(index, (0, self.dropped), value=_IGNORED).t()  # [s, b]
        own = self.operands
        # Megatron leaves `torch.no_grad()` before it takes the logarithm.
        with torch.set_grad_enabled(self.has_grad and torch.is_grad_enabled()):
            found, _ = vocab_parallel_linear_log_prob(
                own.whole_hidden(), own.weight, target, own.group, ignore_index=_IGNORED, accumulate=own.accumulate()
            )
            return found.t()[:, : index.shape[1]].to(own.hidden.dtype).contiguous()


@contextlib.contextmanager
def _deferring(layer: Any, session: Session) -> Iterator[None]:
    original = layer.forward

    def forward(input_: Any, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        used = layer.weight if weight is None else weight
        if input_.dtype != used.dtype:
            session.fallback(FEATURE.name, "hidden states and weight differ in dtype")
            return original(input_, weight, runtime_gather_output)
        fusion, sums_gradient = layer.gradient_accumulation_fusion, layer.allreduce_dgrad
        operands = Deferred(input_, used, fusion, sums_gradient, layer.sequence_parallel, layer.tp_group)
        return DeferredLogits(operands, torch.is_grad_enabled()), None

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _get_logprobs(wrapped: Function, session: Session) -> Function:
    from megatron.core.utils import unwrap_model

    signature = inspect.signature(wrapped)

    def get_logprobs(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model = unwrap_model(given["model"])
        if not getattr(model, "post_process", True):
            return wrapped(*args, **kwargs)
        reasons = _call_reasons(model, given["tokens"].device.type)
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
        with contextlib.nullcontext() if reasons else _deferring(model.output_layer, session):
            return wrapped(*args, **kwargs)

    return get_logprobs


def _call_reasons(model: Any, device: str) -> list[str]:
    from megatron.core.models.gpt import GPTModel

    if not isinstance(model, GPTModel):
        return [f"the model is a {type(model).__name__}, not Megatron's GPTModel"]
    found = {
        "multi-token prediction multiplies by the output layer, too": model.config.mtp_num_layers,
        "--batch-invariant-mode has a kernel of its own": getattr(model.config, "batch_invariant_mode", False),
    }
    return layer_reasons(model, device) + holding(found)


def _selective_log_softmax(wrapped: Function, session: Session) -> Function:
    def selective_log_softmax(logits: Any, index: Any) -> Any:
        if not isinstance(logits, DeferredLogits):
            return wrapped(logits, index)
        _verify(session, wrapped, logits.operands, index)
        return logits.log_prob(index)

    return selective_log_softmax


def _verify(session: Session, original: Function, operands: Deferred, index: Tensor) -> None:
    if session.verifier is None:
        return
    if operands.group.size() > 1:
        leave_out(session, FEATURE, "linear_log_prob", "the ranks of a tensor-parallel group compute it")
        return
    target = index.t().contiguous()

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_log_prob(hidden, weight, target)[0].to(hidden.dtype)

    def megatrons(hidden: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = original(torch.matmul(hidden, weight.t()), target)
        return found

    inputs = {"hidden": operands.hidden[: target.shape[0]], "weight": operands.weight}
    widened = target.numel() * operands.weight.shape[0] <= WIDENED
    against = "Megatron's output layer and log_softmax"
    verify(session, FEATURE, "linear_log_prob", ours, megatrons, inputs, against, widened=widened)


FEATURE = Feature(
    name="use_fused_linear_log_prob",
    summary="Log-probabilities of Megatron's reinforcement learning, which keep at most 256 MiB of logits",
    numerics="ulp",
    theme="memory",
    condition=needs("perform_rl_step", "log-probabilities are read in reinforcement learning alone"),
    conflicting_args=CONFLICTING_ARGS,
    not_auto="it trades a fourth GEMM of the output layer for the logits' memory: enable it explicitly with its flag",
    unsupported={"<0.16": "before Megatron 0.16 get_logprobs has other arguments"},
    memory="not predicted: the planner has no reinforcement learning",
    operators=("linear_log_prob",),
    patches=(
        Around(f"{_RL}:get_logprobs", _get_logprobs),
        Override(f"{_RL}:selective_log_softmax", _selective_log_softmax, reads=_READS),
    ),
)
