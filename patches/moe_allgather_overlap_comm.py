"""`--moe-allgather-overlap-comm`: overlap token collectives with shared expert and wgrads.

For the `allgather` dispatcher: the shared expert's layers overlap with gather and scatter, weight gradients of
`--moe-grouped-gemm` with the gather's gradient. Reaches `token_dispatch`, `token_combine` and their mappings (issue);
`dispatch_postprocess` and `permute` (wait); `MoELayer.shared_experts_compute` and `postprocess` (defer the shared
expert); `start_grad_sync` (first reader of main gradients). Falls back for gated or recomputed shared experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Override, Session
from mindspeed_lite.parallel.expert.exchange import AllGather, ReduceScatter, issue

from . import recompute_activation_function
from ._shared import moe
from ._shared.conditions import CUDA_GRAPH_ARGS, every, holding
from ._shared.linear_layers import is_column_parallel
from ._shared.proxies import RECOMPUTED, AttributeOverride, FunctionModule
from ._shared.wrappers import before

NAME = moe.ALLGATHER
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher"
_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_FIRST = torch.iinfo(torch.int).max


class _SharedExpert:
    def __init__(self, mlp: Any, hidden: Tensor) -> None:
        # A graph node as old as the whole expert's, so that gradients add up in the same order.
        self._mlp, self._hidden = mlp, hidden.view_as(hidden)
        self._middle: Tensor | None = None
        self._output: Tensor | None = None

    def first(self) -> Tensor:
        if self._middle is None:
            from megatron.core.transformer.mlp import MLP

            part = AttributeOverride(self._mlp, linear_fc2=FunctionModule(lambda y: (y, None)), **{RECOMPUTED: False})
            self._middle = MLP.forward(part, self._hidden)[0]
        return self._middle

    def second(self) -> Tensor:
        if self._output is None:
            self._output = self._mlp.linear_fc2(self.first())[0]
        return self._output


class _State(moe.MessageState):
    def __init__(self) -> None:
        super().__init__()
        self.shared: _SharedExpert | None = None


def _state(session: Session) -> _State:
    found: _State = moe.messages_of(session, NAME, _State)
    return found


def _gather(wrapped: Function, session: Session) -> Function:
    def gather_from_sequence_parallel_region(
        input_: Any,
        tensor_parallel_output_grad: Any = True,
        group: Any = None,
        output_split_sizes: Any = None,
        use_global_buffer: Any = False,
    ) -> Any:
        state = _state(session)
        if not state.is_dispatch or not input_.is_floating_point() or group.size() == 1:
            return wrapped(input_, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)
        out = issue(input_, AllGather(group), state.messages, True)
        if use_global_buffer and state.shared is not None:
            state.is_dispatch = None
            shared: Any = state.shared.first().grad_fn
            if shared is not None and out.grad_fn is not None:
                # After the gradients of both messages, which are sent first.
                shared._set_sequence_nr(max(0, out.grad_fn._sequence_nr() - 3))
        return out

    return gather_from_sequence_parallel_region


def _scatter(wrapped: Function, session: Session) -> Function:
    def reduce_scatter_to_sequence_parallel_region(
        input_: Any, group: Any = None, input_split_sizes: Any = None, use_global_buffer: Any = False
    ) -> Any:
        state = _state(session)
        if state.is_dispatch is not False or group.size() == 1:
            return wrapped(input_, group, input_split_sizes, use_global_buffer)
        out = issue(input_, ReduceScatter(group), state.messages, False)
        if state.shared is not None:
            node: Any = out.grad_fn
            if node is not None:
                node._set_sequence_nr(_FIRST)
            state.is_dispatch = None
            state.shared.second()
        # Megatron reads it at once, in another dtype.
        state.messages.wait()
        return out

    return reduce_scatter_to_sequence_parallel_region


def _wait_for_probs(session: Session, _: Any) -> None:
    # Probabilities are read first; the tokens' message is last.
    _state(session).messages.wait(leaving=1)


def _permute(wrapped: Function, session: Session) -> Function:
    def permute(*args: Any, **kwargs: Any) -> Any:
        _state(session).messages.wait()
        return wrapped(*args, **kwargs)

    return permute


def _shared_expert(wrapped: Function, session: Session) -> Function:
    def shared_experts_compute(self: Any, hidden_states: Any) -> Any:
        from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

        state = _state(session)
        state.shared = None
        if not self.use_shared_expert or type(self.token_dispatcher) is not MoEAllGatherTokenDispatcher:
            return wrapped(self, hidden_states)
        reasons = _layer_reasons(self, session)
        if reasons:
            session.fallback(NAME, "; ".join(reasons))
            return wrapped(self, hidden_states)
        state.shared = _SharedExpert(self.shared_experts, hidden_states)
        return state.shared

    return shared_experts_compute


def _layer_reasons(layer: Any, session: Session) -> list[str]:
    shared = layer.shared_experts
    reasons = {
        # LoRA may read its input more than once, which changes the order of gradient sums.
        "whose first linear layer is not Megatron's own (LoRA)": not is_column_parallel(shared.linear_fc1),
        "with a gate (--moe-shared-expert-gate)": shared.use_shared_expert_gate,
        "whose activation is recomputed": recompute_activation_function.is_recomputed(shared, session),
        "that is recomputed as a whole": layer.shared_experts_recompute,
    }
    return [f"a shared expert {which} runs before the router" for which in holding(reasons)]


def _postprocess(wrapped: Function, session: Session) -> Function:
    def postprocess(self: Any, output: Any, shared_expert_output: Any) -> Any:
        if isinstance(shared_expert_output, _SharedExpert):
            _state(session).shared = None
            shared_expert_output = shared_expert_output.second()
        return wrapped(self, output, shared_expert_output)

    return postprocess


def _why_not(context: Context) -> list[str]:
    if context.host_args is not None and context.arg("num_experts", None) and moe.expert_sizes(context) == (1, 1):
        return ["experts are not divided among ranks (--expert-model-parallel-size): tokens stay where they are"]
    return []


FEATURE = Feature(
    name=NAME,
    summary="token all-gather and reduce-scatter overlapped with the shared expert and weight gradients",
    numerics="bitwise",
    theme="experts",
    unsupported={"<0.16": "before Megatron 0.16 its layer of experts has no step after the combine"},
    memory="not predicted: what the weight gradients of one layer's experts read stays a message longer",
    condition=every(moe.has_experts, _why_not, moe.dispatchers("allgather")),
    conflicting_args=CUDA_GRAPH_ARGS,
    not_auto="what it gains has been measured on CPU alone: enable it explicitly with its flag",
    patches=(
        *moe.message_patches(NAME, _DISPATCHER),
        Override(f"{_MAPPINGS}:gather_from_sequence_parallel_region", _gather),
        Override(f"{_MAPPINGS}:reduce_scatter_to_sequence_parallel_region", _scatter),
        Around(f"{_DISPATCHER}.dispatch_postprocess", before(_wait_for_probs)),
        Around("megatron.core.transformer.moe.moe_utils:permute", _permute),
        Override(
            f"{_LAYER}.shared_experts_compute",
            _shared_expert,
            reads=("token_dispatcher",),
        ),
        Override(f"{_LAYER}.postprocess", _postprocess),
    ),
)
