"""A claimed rank of a world: process groups without peers, whose messages are recorded and not sent."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .calls import PIPELINE, RECEIVES, SENDS, GroupCall
from .fake_tensors import KNOWN, keep_share, know, known, share_of, with_storage
from .passed_values import PassedValues

# Arguments whose size is the message's, by collective.
COLLECTIVES = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "_all_gather_base": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "_reduce_scatter_base": "output",
    "all_to_all_single": "input",
    "all_to_all": "input_tensor_list",
    "gather": "tensor",
    "scatter": "tensor",
}
# Calls whose messages are Python objects or nothing: they only have an order.
_OBJECTS = ("barrier", "all_gather_object", "gather_object", "broadcast_object_list", "send_object_list",
            "recv_object_list")  # fmt: skip
_OWN_INIT, _OWN_NEW = dist.init_process_group, dist.new_group


@dataclass
class World:
    """The world that this process claims to be a rank of.

    groups: ranks of this rank's group by its name in Megatron. values: what ranks read from each other's messages.
    on_pipeline: called once with the ranks of the pipeline. on_message: called with each collective; its result,
    without arguments, when this rank waits for an asynchronous one.
    """

    size: int
    rank: int = 0
    messages: list[GroupCall] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: PassedValues | None = None
    on_pipeline: Callable[[tuple[int, ...]], None] | None = None
    on_message: Callable[[GroupCall], Callable[[], None]] | None = None
    _sent: dict[str, list[Any]] = field(default_factory=dict)
    _coalesced: list[_Request] | None = None

    def claim(self, rank: int, local_size: int, values: PassedValues) -> None:
        self.rank, self.values = rank, values
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(rank % local_size),
            LOCAL_WORLD_SIZE=str(min(local_size, self.size)),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
        )

    def install(self) -> None:
        """Replace torch.distributed's functions, before any module imports them by name."""
        self._replace({
            "init_process_group": self._init_process_group,
            "batch_isend_irecv": self._batch,
            "_coalescing_manager": self._coalescing,
        })  # fmt: skip
        self.replace_groups()
        self.record()

    def replace_groups(self) -> None:
        """Let groups, of which a large world has thousands, have no backend of a device layer's."""
        self._replace({"new_group": self._new_group})

    def record(self) -> None:
        self._replace({
            kind: self._recorded(getattr(dist, kind)) for kind in (*SENDS[:2], *RECEIVES[:2], *COLLECTIVES, *_OBJECTS)
        })  # fmt: skip

    @staticmethod
    def _replace(replacements: dict[str, Callable[..., Any]]) -> None:
        for name, replacement in replacements.items():
            for module in (dist, distributed_c10d):
                if hasattr(module, name):
                    setattr(module, name, replacement)

    def _init_process_group(self, *args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        _OWN_INIT("fake", store=FakeStore(), rank=self.rank, world_size=self.size)

    def _new_group(self, ranks: Sequence[int] | None = None, *args: Any, group_desc: Any = None, **kwargs: Any) -> Any:
        if ranks is not None and self.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        if ranks is not None and group_desc:
            self.groups[str(group_desc)] = tuple(ranks)
            if group_desc == PIPELINE and self.on_pipeline is not None:
                self.on_pipeline(tuple(ranks))
                self.on_pipeline = None
        return _OWN_NEW(ranks, group_desc=group_desc)

    def _batch(self, operations: Sequence[Any]) -> list[Any]:
        for each in operations:
            if each.op.__name__ in SENDS:
                self._sending("send", each.tensor)
        return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]

    @contextmanager
    def _coalescing(self, group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[_Coalesced]:
        requests: list[_Request] = []
        self._coalesced = requests
        try:
            yield _Coalesced(requests)
        finally:
            self._coalesced = None
        for each in () if async_ops else requests:
            each.wait()

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature, kind = inspect.signature(original), original.__name__

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            tensor = None if kind in _OBJECTS else given[COLLECTIVES.get(kind, "tensor")]
            first = tensor[0] if isinstance(tensor, (list, tuple)) else tensor
            is_async = kind.startswith("i") or bool(given.get("async_op"))
            self._note(given, kind, first, _peer(given), is_async, *_parts(kind, given))
            arrive = self.on_message(self.messages[-1]) if self.on_message and kind in COLLECTIVES else _nothing
            request = self._perform(original, kind, given)
            if isinstance(request, _Request) and kind in COLLECTIVES:
                request.complete = arrive
                if self._coalesced is not None:
                    self._coalesced.append(request)
            return request

        return call

    def _perform(self, original: Callable[..., Any], kind: str, given: dict[str, Any]) -> Any:
        """Let arrive what is read later, as if every rank sent the same."""
        group = given.get("group")
        if kind in ("all_gather_object", "gather_object"):
            objects = self._gather(given["obj"], tuple(dist.get_process_group_ranks(group)))
            results = given.get("object_list" if kind == "all_gather_object" else "object_gather_list")
            if results is not None:
                results[:] = objects
        elif kind.endswith("_object_list") and self.values is not None:
            peer = self.messages[-1].peer
            is_broadcast = kind == "broadcast_object_list"
            is_sender = kind in SENDS or peer == self.rank
            pair = (self.rank, peer) if is_sender else (peer, self.rank)
            between = tuple(dist.get_process_group_ranks(group)) if is_broadcast else pair
            if is_sender:
                self.values.put(("objects", *between), given["object_list"])
            elif (objects := self.values.get(self.values.next(("objects", *between)), peer)) is not None:
                given["object_list"][:] = objects
        elif kind in ("all_gather_into_tensor", "_all_gather_base"):
            output, values = given["output_tensor"], known(given["input_tensor"])
            if (share := share_of(given["input_tensor"])) is not None:
                keep_share(output, share)
            if values is not None:
                with with_storage():
                    gathered = values.reshape(-1).repeat(dist.get_world_size(group)).view(output.shape)
                know(output, gathered)
        elif kind == "all_gather" and (values := known(given["tensor"])) is not None:
            for each in given["tensor_list"]:
                with with_storage():
                    copy = values.clone()
                know(each, copy)
        elif kind == "broadcast":
            members = tuple(dist.get_process_group_ranks(group))
            self._pass_on("broadcast", given["tensor"], members, self.messages[-1].peer)()
        elif kind in SENDS or kind in RECEIVES:
            peer = self.messages[-1].peer
            between = (self.rank, peer) if kind in SENDS else (peer, self.rank)
            read = self._pass_on("send", given["tensor"], between, between[0])
            if kind == "irecv":
                return _Request(read)
            read()
        return _Request() if given.get("async_op") or kind == "isend" else None

    def _gather(self, own: Any, group: tuple[int, ...]) -> list[Any]:
        """An object of each rank; of a rank that does not run, this rank's."""
        if self.values is None:
            return [own] * len(group)
        values = self.values
        values.put(("gathered from", self.rank, *group), own)
        others = values.running & {*group} - {self.rank}
        found = {each: values.get(values.next(("gathered from", each, *group)), each) for each in others}
        return [own if found.get(each) is None else found[each] for each in group]

    def _pass_on(self, kind: str, tensor: torch.Tensor, between: tuple[int, ...], sender: int) -> Callable[[], None]:
        """Pass on flags and shapes; what is received is known after a call of the result.

        From a rank that does not run come the values last sent in as many, such as the shape of a stage's output, else
        those of another rank, else 1.
        """
        if not _is_read(tensor) or self.values is None:
            return _nothing
        if sender == self.rank:
            self.values.put(between, self._sending(kind, tensor))
            return _nothing
        return functools.partial(self._receive, _like(kind, tensor), tensor, self.values.next(between), sender)

    def _sending(self, kind: str, tensor: torch.Tensor) -> list[Any]:
        if not _is_read(tensor) or self.values is None:
            return []
        values, like = known(tensor), _like(kind, tensor)
        self._sent[like] = [1] * tensor.numel() if values is None else values.reshape(-1).tolist()
        self.values.put_example(like, self._sent[like])
        return self._sent[like]

    def _receive(self, like: str, tensor: torch.Tensor, path: Path, sender: int) -> None:
        assert self.values is not None
        size, found = tensor.numel(), self.values.get(path, sender)
        if found is None or len(found) != size:
            found = self._sent.get(like) or self.values.example(like) or [1] * size
        with with_storage():
            values = torch.tensor(found).reshape(tensor.shape).to(tensor.dtype)
        know(tensor, values)

    def _note(
        self, given: dict[str, Any], kind: str, tensor: torch.Tensor | None, peer: int, is_async: bool,
        sent: tuple[int, ...] = (), received: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        group = tuple(dist.get_process_group_ranks(given.get("group")))
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        size = 0 if tensor is None else tensor.numel()
        self.messages.append(GroupCall(group, kind, dtype, size, peer, is_async, sent, received, _caller()))


def _is_read(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= KNOWN and not tensor.dtype.is_floating_point


def _like(kind: str, tensor: torch.Tensor) -> str:
    return f"{kind}-{tensor.numel()}"


def _nothing() -> None:
    pass


@dataclass
class _Coalesced:
    requests: Sequence[_Request]

    def wait(self) -> None:
        for each in self.requests:
            each.wait()


@dataclass
class _Request:
    """A request that completes when it is waited for."""

    complete: Callable[[], None] = _nothing

    def wait(self, timeout: Any = None) -> bool:
        self.complete()
        self.complete = _nothing
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


def _peer(given: dict[str, Any]) -> int:
    """Global rank of a send, a receive or a root; -1 for other calls."""
    for name in ("src", "dst"):
        if given.get(name) is not None:
            return int(given[name])
        if given.get(f"group_{name}") is not None:
            return dist.get_global_rank(given.get("group") or dist.group.WORLD, given[f"group_{name}"])  # type: ignore[arg-type]
    return -1


def _parts(kind: str, given: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements that an all-to-all sends to and receives from each member."""
    if kind == "all_to_all":
        lists = (given["input_tensor_list"], given["output_tensor_list"])
        sent, received = (tuple(each.numel() for each in tensors) for tensors in lists)
        return sent, received
    if kind != "all_to_all_single":
        return (), ()
    members, found = dist.get_world_size(given.get("group")), []
    for name in ("input", "output"):
        tensor, splits = given[name], given.get(f"{name}_split_sizes")
        row = tensor.numel() // max(1, len(tensor))
        if splits is None or not len(splits):
            splits = [len(tensor) // members] * members
        found.append(tuple(int(each) * row for each in splits))
    return found[0], found[1]


def _caller() -> str:
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "mindspeed_lite.")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
