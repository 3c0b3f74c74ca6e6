"""Moves a model and its optimizer to host memory or files between two phases of a program, and back.

Storages shrink to zero bytes under their tensors: views, hooks, buckets and optimizers keep theirs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from mindspeed_lite.memory import host
from mindspeed_lite.memory.copy_engine import Buffer, CopyEngine, PinnedPiece, as_bytes
from mindspeed_lite.memory.sleep_guard import SleepGuard, unreadable
from mindspeed_lite.memory.storages import GRADIENTS, OPTIMIZER, PARTS, WEIGHTS, drop_gradients, storages_by_part
from mindspeed_lite.platform.timer import synchronize
from mindspeed_lite.text_layout import table

# Bytes; a pinned allocator rounds a block up to a power of two.
_BLOCK = 1 << 28
_ALIGNMENT = 512
_FIXED_ADDRESSES = {
    "nccl_ub": "--use-nccl-ub registers buffers by address",
    "use_megatron_fsdp": "Megatron-FSDP allocates and frees parameters itself",
    "use_custom_fsdp": "Megatron-FSDP allocates and frees parameters itself",
    "enable_cuda_graph": "CUDA graphs record addresses",
    "external_cuda_graph": "CUDA graphs record addresses",
}


class SleepError(RuntimeError):
    """A call that the state of a model does not allow."""


@dataclass(frozen=True)
class SleepReport:
    """Rows of (part, bytes, where they are); as text a table."""

    rows: tuple[tuple[str, int, str], ...]

    def __str__(self) -> str:
        cells = [(part, f"{nbytes / 2**20:,.1f}", where) for part, nbytes, where in self.rows]
        return "\n".join(table(("part", "MiB", "where"), cells, 100))


class _DirectCopies:
    """`CopyEngine` of a CPU, which copies at once."""

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def d2h(self, source: Tensor, buffer: Buffer) -> None:
        buffer.write(source)

    def h2d(self, buffer: Buffer, target: Tensor) -> None:
        buffer.read(target)

    def wait(self, event: None) -> None:
        """Nothing: the copy is done."""


class _HostMemory:
    """Blocks of host memory that stay for the next time; a storage may extend over several."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self.blocks: list[Tensor] = []

    def reserve(self, nbytes: int) -> None:
        missing = nbytes - sum(map(len, self.blocks))
        while missing > 0:
            try:
                self.blocks.append(self._allocate(min(missing, _BLOCK)))
            except (MemoryError, OSError, RuntimeError) as error:
                raise SleepError(
                    f"sleep: no room for {nbytes:,} bytes: {error} (to=FOLDER moves them to files on a disk with room)"
                ) from error
            missing -= len(self.blocks[-1])

    def pieces(self, start: int, nbytes: int) -> Iterator[Tensor]:
        for block in self.blocks:
            if nbytes and start < len(block):
                yield block[start : start + nbytes]
                nbytes -= min(nbytes, len(block) - start)
            start = max(0, start - len(block))


class _SleepingPart:
    """Storages of one part with their sizes; memory: where their bytes go, None to drop them."""

    def __init__(self, storages: Sequence[UntypedStorage], memory: _HostMemory | None) -> None:
        self._storages = [(each, each.nbytes()) for each in storages]
        self._memory = memory
        self.nbytes = sum(size for _, size in self._storages)
        if memory is not None:
            memory.reserve(sum(_aligned(size) for _, size in self._storages))

    def copies(self) -> Iterator[tuple[Tensor, Buffer]]:
        """Pairs of bytes on the device and in host memory."""
        start = 0
        for storage, size in self._storages if self._memory is not None else ():
            rest = as_bytes(storage)
            for piece in self._memory.pieces(start, size) if self._memory is not None else ():
                yield rest[: len(piece)], Buffer([PinnedPiece(piece)])
                rest = rest[len(piece) :]
            start += _aligned(size)

    def keep_only(self, storages: Sequence[UntypedStorage]) -> None:
        """Free and forget the others, which nothing else refers to; they count in `nbytes`."""
        kept = {each._cdata for each in storages}
        for storage, _ in self._storages:
            if storage._cdata not in kept:
                storage.resize_(0)
        self._storages = [(each, size) for each, size in self._storages if each._cdata in kept]

    def free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
            if self._memory is None:
                as_bytes(storage).zero_()


class Sleeper:
    """Sleeps and wakes one model with its optimizer; reuses host memory.

    Args:
        engine: copies between device and host; the device's own by default.
    """

    def __init__(self, model: torch.nn.Module, engine: Any = None) -> None:
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._engine = engine or (_DirectCopies() if self._device.type == "cpu" else CopyEngine(self._device))
        self._memory: dict[str, tuple[Path | None, _HostMemory]] = {}
        self._asleep: dict[str, tuple[_SleepingPart, str]] = {}
        self._guard: SleepGuard | None = None
        self._readable: Callable[[], None] | None = None  # makes weights readable again

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    @property
    def asleep(self) -> list[str]:
        """Names of the parts that are asleep."""
        return [*self._asleep]

    def sleep(self, chunks: Sequence[Any], optimizer: Any, keep: Sequence[str], to: Path | None) -> SleepReport:
        its = [name for name in PARTS if optimizer is not None or name != OPTIMIZER]
        wanted = [name for name in its if name not in keep and name not in self._asleep]
        if not wanted:
            raise SleepError(f"sleep: nothing is left to move: asleep {_list(self._asleep)}, kept {_list(keep)}")
        _refuse_fixed_addresses(chunks)
        is_first = not {WEIGHTS, GRADIENTS} & {*self._asleep} and {WEIGHTS, GRADIENTS} & {*wanted}
        for chunk in chunks if is_first else ():
            # A running gather would write after the weights are copied; some receive in the gradients' buffer.
            if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
                chunk.start_param_sync(force_sync=True)
        synchronize(self._device)
        found = storages_by_part(chunks, optimizer, self._device)
        memory = {name: None if name == GRADIENTS else self._memory_of(name, to) for name in wanted}
        try:
            parts = {name: _SleepingPart(found[name], memory[name]) for name in wanted}
        except SleepError:
            for name in wanted:
                self._memory.pop(name, None)
            raise
        for source, buffer in (pair for part in parts.values() for pair in part.copies()):
            self._engine.wait(self._engine.d2h(source, buffer))
        synchronize(self._device)
        if GRADIENTS in parts:
            drop_gradients(chunks, optimizer)
            parts[GRADIENTS].keep_only(storages_by_part(chunks, optimizer, self._device)[GRADIENTS])
        place = "host memory" if to is None else f"files in {to}"
        for name, part in parts.items():
            part.free()
            self._asleep[name] = part, "released" if name == GRADIENTS else place
        for each in memory.values():
            if each is not None and to is not None:
                host.release(each.blocks)
        if self._device.type != "cpu":
            # Other processes of the device need the memory.
            torch.get_device_module(self._device).empty_cache()
        check = _check_of(weakref.ref(self))
        if self._guard is not None and optimizer is not None:
            self._guard.remove()
            self._guard = None  # may have been made without the optimizer
        if self._guard is None:
            self._guard = SleepGuard(chunks, optimizer, check)
        if WEIGHTS in parts:
            self._readable = unreadable(chunks, check)
        stays = [(name, sum(each.nbytes() for each in its), f"stays on {self._device}") for name, its in found.items()]
        return SleepReport((*self._rows(), *(row for row in stays if row[1] and row[0] not in self._asleep)))

    def check_asleep(self, names: Sequence[str]) -> None:
        awake = [name for name in names if name not in self._asleep]
        if awake or not self._asleep:
            raise SleepError(f"wake: awake {_list(awake or PARTS)}, asleep {_list(self._asleep)}")

    def wake(self, names: Sequence[str]) -> SleepReport:
        self.check_asleep(names)
        woken = []
        for name in dict.fromkeys(names or [*self._asleep]):
            part, _ = self._asleep[name]
            try:
                part.allocate()
            except (MemoryError, RuntimeError) as error:
                part.free()
                raise SleepError(f"wake: no room for {part.nbytes:,} bytes of {name}: {error}") from error
            for target, buffer in part.copies():
                self._engine.wait(self._engine.h2d(buffer, target))
            del self._asleep[name]
            if name == WEIGHTS and self._readable is not None:
                self._readable()
            woken.append((name, part.nbytes, f"on {self._device}"))
        if self._guard is not None and not self._asleep:
            self._guard.remove()
            self._guard = None
        return SleepReport((*woken, *self._rows()))

    def check(self, call: str, parts: Iterable[str]) -> None:
        asleep = [name for name in parts if name in self._asleep]
        if asleep:
            raise SleepError(f"{call}: asleep {_list(asleep)}: call mindspeed_lite.wake() first")

    def _rows(self) -> list[tuple[str, int, str]]:
        return [(name, part.nbytes, place) for name, (part, place) in self._asleep.items()]

    def _memory_of(self, part: str, to: Path | None) -> _HostMemory:
        if part not in self._memory or self._memory[part][0] != to:
            self._memory.pop(part, None)
            self._memory[part] = to, _HostMemory(self._engine.allocate if to is None else functools.partial(_file, to))
        return self._memory[part][1]


#: First model chunk -> its sleeper.
_sleepers: weakref.WeakKeyDictionary[torch.nn.Module, Sleeper] = weakref.WeakKeyDictionary()


def sleep(model: Any, optimizer: Any, keep: Sequence[str], to: str | Path | None) -> SleepReport:
    chunks = _chunks("sleep", model)
    _check_parts("sleep", keep)
    folder = None if to is None else Path(to)
    if folder is not None and not folder.is_dir():
        raise SleepError(f"sleep: to={str(to)!r} is no folder: create it")
    if chunks[0] not in _sleepers:
        _sleepers[chunks[0]] = Sleeper(chunks[0])
    return _sleepers[chunks[0]].sleep(chunks, optimizer, keep, folder)


def wake(parts: Sequence[str], model: Any) -> SleepReport:
    _check_parts("wake", parts)
    chosen = {each: parts for each in _sleepers.values() if each.is_asleep}
    if model is not None:
        chosen = {_sleepers[each]: parts for each in _chunks("wake", model)[:1] if each in _sleepers}
    elif parts:
        # Of several models each wakes the parts that it has asleep.
        had, chosen = chosen, {each: [part for part in parts if part in each.asleep] for each in chosen}
        chosen = {each: its for each, its in chosen.items() if its} or had
    if not chosen:
        raise SleepError("wake: nothing sleeps: call mindspeed_lite.sleep(model, optimizer) first")
    for each, its in chosen.items():
        each.check_asleep(its)
    return SleepReport(tuple(row for each, its in chosen.items() for row in each.wake(its).rows))


def _check_of(sleeper: weakref.ref[Sleeper]) -> Callable[[str, Iterable[str]], None]:
    def check(call: str, parts: Iterable[str]) -> None:
        found = sleeper()
        if found is not None:
            found.check(call, parts)

    return check


def _refuse_fixed_addresses(chunks: Sequence[Any]) -> None:
    configs = [getattr(chunk, name, None) for chunk in chunks for name in ("ddp_config", "config")]
    found = [reason for name, reason in _FIXED_ADDRESSES.items() if any(getattr(each, name, False) for each in configs)]
    if any(getattr(each, "cuda_graph_impl", None) not in (None, "none") for each in configs):
        found.append(_FIXED_ADDRESSES["enable_cuda_graph"])
    if found:
        raise SleepError(f"sleep: {'; '.join(dict.fromkeys(found))}: turn it off to let the model sleep")


def _chunks(call: str, model: Any) -> list[Any]:
    found = list(model) if isinstance(model, (list, tuple)) else [model]
    if not found or not all(isinstance(each, torch.nn.Module) for each in found):
        raise SleepError(f"{call}: a {type(model).__name__} is no model: pass a module or the list of its chunks")
    return found


def _check_parts(call: str, parts: Sequence[str]) -> None:
    unknown = [each for each in parts if each not in PARTS]
    if unknown:
        raise SleepError(f"{call}: {_list(unknown)} unknown: parts are {_list(PARTS)}")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _file(folder: Path, nbytes: int) -> Tensor:
    return host.file(torch.Size([nbytes]), torch.uint8, folder)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
