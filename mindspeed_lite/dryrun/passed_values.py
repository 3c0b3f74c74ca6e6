"""Values that ranks read from each other's messages, such as flags, shapes and objects, passed in files."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_POLL = 0.005


class _Pickler(pickle.Pickler):
    """Writes tensors without storage by their shape."""

    def reducer_override(self, given: Any) -> Any:
        return (_empty, (tuple(given.shape), given.dtype)) if isinstance(given, FakeTensor) else NotImplemented


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


class PassedValues:
    """One rank's side. `running`: ranks that run; `folder`: shared by all of them; `awaited`: rank whose value is."""

    def __init__(self, folder: Path, rank: int, running: set[int]) -> None:
        self.folder, self.rank, self.running = folder, rank, running
        self.awaited: int | None = None
        # Values that were put or read.
        self.count = 0
        self._places: Counter[tuple[object, ...]] = Counter()

    def put(self, between: tuple[object, ...], value: Any) -> None:
        """Pass on the next value of `between`: a group, a sender and its receiver, or a kind of value and ranks."""
        self._write(self.next(between), value)

    def get(self, path: Path, sender: int) -> Any:
        """What `sender` puts at `path`; None if it does not run, has ended, or waits for this rank."""
        waits = self._waits(self.rank)
        self._write(waits, (sender, path.name))
        self.awaited = sender
        while not path.exists():
            is_in_vain = sender not in self.running or self._has_ended(sender) or self._is_circle(sender)
            if is_in_vain and not path.exists():
                waits.unlink()
                self.awaited = None
                return None
            time.sleep(_POLL)
        waits.unlink()
        self.awaited = None
        return pickle.loads(path.read_bytes())

    def put_example(self, kind: object, value: Any) -> None:
        """Let ranks have `value` whose own sender does not run; the first of a kind stays."""
        if not (path := self._example(kind)).exists():
            self._write(path, value)

    def example(self, kind: object) -> Any:
        """The value of `put_example`; None once all other ranks have ended or wait."""
        path, waits = self._example(kind), self._waits(self.rank)
        self._write(waits, (self.rank, path.name))
        while not path.exists() and not all(map(self._is_idle, self.running - {self.rank})):
            time.sleep(_POLL)
        waits.unlink()
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def end(self) -> None:
        self._write(self.folder / f"ended-{self.rank}", None)

    def next(self, between: tuple[object, ...]) -> Path:
        """Where the next value of `between` is put."""
        self.count += 1
        self._places[between] += 1
        name = hashlib.sha256(repr(between).encode()).hexdigest()[:16]
        return self.folder / f"{name}-{self._places[between]}"

    def _example(self, kind: object) -> Path:
        return self.folder / f"example-{kind}"

    def _is_idle(self, rank: int) -> bool:
        """Whether a rank has ended, or waits for what is not there."""
        if self._has_ended(rank):
            return True
        try:
            awaited = pickle.loads(self._waits(rank).read_bytes())[1]
        except FileNotFoundError:
            return False
        return not (self.folder / awaited).exists()

    def _waits(self, rank: int) -> Path:
        return self.folder / f"waits-{rank}"

    def _has_ended(self, rank: int) -> bool:
        return (self.folder / f"ended-{rank}").exists()

    def _is_circle(self, rank: int) -> bool:
        # Ranks go on while they are read: those that are found waiting for the same twice wait at the same time.
        first = self._circle(rank)
        return bool(first) and first == self._circle(rank)

    def _circle(self, rank: int) -> list[str]:
        """What ranks wait for, if `rank` waits, perhaps through others, for this rank; else nothing."""
        found: list[str] = []
        for _ in self.running:
            if rank == self.rank:
                return found
            try:
                rank, awaited = pickle.loads(self._waits(rank).read_bytes())
            except FileNotFoundError:
                return []
            if (self.folder / awaited).exists():
                return []
            found.append(awaited)
        return []

    def _write(self, path: Path, value: Any) -> None:
        part = self.folder / f"part-{self.rank}"
        with part.open("wb") as file:
            _Pickler(file).dump(value)
        part.rename(path)
