"""`--optimize-send-recv-comm`: a process group per direction of pipeline messages.

Gradients get a second group, so that they do not queue after activations. Reaches `_batched_p2p_ops` and `_p2p_ops`,
which issue all messages, and the collective `P2PCommunicator.__init__`, where groups are made. Leaves shape exchange,
waiting and order alone.
"""

from __future__ import annotations

from typing import Any

from mindspeed_lite.engine import Around, Feature, Function, Override, Session
from mindspeed_lite.parallel.groups import new_groups

from ._shared.conditions import several_stages
from ._shared.wrappers import after

NAME = "optimize_send_recv_comm"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"


def _make_second_group(session: Session, communicator: Any) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = communicator.pp_group
    if group is not parallel_state.get_pipeline_model_parallel_group(check_initialized=False):
        session.fallback(NAME, "a communicator of other ranks than Megatron's pipeline group: it keeps one group")
    elif group.size() > 1 and group not in _second_groups(session):
        (_second_groups(session)[group],) = new_groups(group, dist.get_process_group_ranks(group))


def _second_groups(session: Session) -> dict[Any, Any]:
    made: dict[Any, Any] = session.state(NAME, dict)
    return made


def _in_two_groups(wrapped: Function, session: Session) -> Function:
    def p2p_ops(
        *,
        tensor_send_prev: Any,
        tensor_recv_prev: Any,
        tensor_send_next: Any,
        tensor_recv_next: Any,
        group: Any,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> Any:
        def issue(group: Any, **tensors: Any) -> Any:
            none = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"))
            ranks = {"prev_pipeline_rank": prev_pipeline_rank, "next_pipeline_rank": next_pipeline_rank}
            return wrapped(**{**none, **tensors}, group=group, **ranks)

        second = _second_groups(session).get(group, group)
        down = issue(group, tensor_recv_prev=tensor_recv_prev, tensor_send_next=tensor_send_next)
        if tensor_send_prev is None and tensor_recv_next is None:
            return down
        up = issue(second, tensor_send_prev=tensor_send_prev, tensor_recv_next=tensor_recv_next)
        return [*down, *up] if isinstance(down, list) else {**down, **up}

    return p2p_ops


FEATURE = Feature(
    name=NAME,
    summary="a process group for each direction of a pipeline's messages",
    numerics="bitwise",
    theme="communication",
    memory="not predicted: the buffers of a second communicator, on devices where one has buffers",
    unsupported={"<0.14": "before Megatron 0.14 ranks make no communicator together, and so no second group"},
    condition=several_stages("no messages between stages"),
    conflicting_args={"use_ring_exchange_p2p": "--use-ring-exchange-p2p exchanges both directions in one call"},
    not_auto="a second communicator takes device memory: enable it explicitly with its flag",
    patches=(
        Around(f"{_P2P}:P2PCommunicator.__init__", after(_make_second_group), reads=("pp_group",)),
        Override(f"{_P2P}:_batched_p2p_ops", _in_two_groups),
        Override(f"{_P2P}:_p2p_ops", _in_two_groups),
    ),
)
