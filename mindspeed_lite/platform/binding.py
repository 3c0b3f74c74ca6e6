"""Binds each rank's threads to cores near its device.

Linux places memory on the node of the core that first writes it, so memory follows. Topology comes from sysfs, devices
from /proc or `npu-smi`; CPU sets and quotas are respected. Imports no torch, whose threads come after `bind`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from . import choice

BIND_VARIABLE = "MINDSPEED_LITE_BIND"
AUTO = "auto"
NONE = "none"

SECONDS_BETWEEN_CHECKS = 10.0


class Core(NamedTuple):
    """A physical core: its node, and the logical CPUs that this process may use."""

    node: int
    cpus: tuple[int, ...]


class Placement(NamedTuple):
    """Logical CPUs by local rank. note: why devices were not considered, or what is shared."""

    cpus: list[frozenset[int]]
    note: str = ""

    def to_text(self) -> str:
        each = "; ".join(f"rank {number} to CPUs {format_cpus(cpus)}" for number, cpus in enumerate(self.cpus))
        return each + (f" ({self.note})" if self.note else "")


def wanted(given: str | None = None) -> str:
    return choice(BIND_VARIABLE, (NONE, AUTO), given, "--bind")


def parse_cpus(text: str) -> list[int]:
    """`0-2,8` as [0, 1, 2, 8]."""
    bounds = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for part in bounds for cpu in range(int(part[0]), int(part[-1]) + 1)]


def format_cpus(cpus: Set[int]) -> str:
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in parts)


def cores(root: Path, allowed: frozenset[int]) -> list[Core]:
    """Physical cores with an allowed CPU, ordered by node and number."""
    system = root / "sys/devices/system"
    nodes = {
        cpu: int(folder.name[4:])
        for folder in system.glob("node/node[0-9]*")
        for cpu in parse_cpus(_read(folder / "cpulist"))
    }
    found = set()
    for cpu in allowed:
        siblings = parse_cpus(_read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")) or [cpu]
        found.add(Core(nodes.get(cpu, 0), tuple(sorted(allowed.intersection(siblings)))))
    return sorted(found)


def quota(root: Path) -> float:
    """CPUs that this process's control group and those around it grant, or infinity."""
    groups, limits = root / "sys/fs/cgroup", []
    # As `0::/job/step`, or `4:cpu,cpuacct:/job` of version 1.
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    own = {"cpu" if "cpu" in names.split(",") else names: Path(path.lstrip("/")) for _, names, path in lines}
    for folder, path in ((groups, own.get("", Path())), (groups / "cpu", own.get("cpu", Path()))):
        for each in (folder / path, *(folder / above for above in path.parents)):
            words = _read(each / "cpu.max").split() or [
                _read(each / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
            ]
            if all(word.isdigit() for word in words):  # not "max", "-1" or no file
                limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=math.inf)


def device_cpus(root: Path, kind: str, environment: Mapping[str, str]) -> list[frozenset[int]]:
    """CPUs near each visible device of `kind`, in the order of its number; empty where unknown."""
    if kind == "npu":
        names, near = ["NPU"], _near_npus()
    else:
        # The driver lists the devices of a container only; sysfs lists all of the machine.
        gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
        near = [parse_cpus(_read(root / "sys/bus/pci/devices" / each.name.lower() / "local_cpulist")) for each in gpus]
        names = [_read(each / "information") for each in gpus]
    visible = environment.get("ASCEND_RT_VISIBLE_DEVICES" if kind == "npu" else "CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [frozenset(each) for each in near]
    chosen = []
    for word in filter(None, (each.strip() for each in visible.split(","))):
        index = int(word) if word.isdigit() else next((i for i, each in enumerate(names) if word in each), len(near))
        if index >= len(near):
            return []
        chosen.append(frozenset(near[index]))
    return chosen


def _near_npus() -> list[list[int]]:
    if shutil.which("npu-smi") is None:
        return []
    command = ["npu-smi", "info", "-t", "topo"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [line.split() for line in text.splitlines() if re.match(r"\s*NPU\d+\s.*\bX\b", line)]
        if rows and all(re.fullmatch(r"[\d,-]+", row[-1]) for row in rows):
            return [parse_cpus(row[-1]) for row in rows]
    return []


def place(
    machine: Sequence[Core], ranks: int, devices: Sequence[frozenset[int]] | None, limit: float = math.inf
) -> Placement:
    """CPUs for each of `ranks` local ranks.

    Ranks near the same cores share them equally, in whole cores if there are enough.

    Args:
        devices: CPUs near each rank's device; unknown if fewer than ranks; None without devices.
        limit: CPUs of all ranks together.
    """
    everything = frozenset(cpu for core in machine for cpu in core.cpus)
    near = [each & everything for each in (devices or ())[:ranks]]
    note = ""
    if len(near) < ranks:
        near, note = [everything] * ranks, "" if devices is None else "which CPUs are near the devices is not known"
    elif far := [str(rank) for rank, each in enumerate(near) if not each]:
        rest = everything.difference(*near)
        near = [each or (rest if len(rest) >= len(far) else everything) for each in near]
        note = f"no allowed CPU near the devices of ranks {', '.join(far)}"
    most = max(1, math.ceil(limit / ranks)) if limit < len(everything) else len(everything)
    result: list[frozenset[int]] = [frozenset()] * ranks
    for group in set(near):
        members = [rank for rank in range(ranks) if near[rank] == group]
        units = [tuple(sorted(group.intersection(core.cpus))) for core in machine if group.intersection(core.cpus)]
        if len(units) < len(members):
            units = [(cpu,) for unit in units for cpu in unit]
        if len(units) < len(members):
            note = f"{len(members)} ranks share CPUs {format_cpus(group)}"
            result = [group if near[rank] == group else result[rank] for rank in range(ranks)]
            continue
        for position, rank in enumerate(members):
            mine = units[position * len(units) // len(members) : (position + 1) * len(units) // len(members)]
            if most < len(everything):
                # A thread for each core; its sibling would use up the limit twice as fast.
                mine = [unit[:1] for unit in mine[:most]]
            result[rank] = frozenset(cpu for unit in mine for cpu in unit)
    return Placement(result, note)


def bind(kind: str) -> str:
    """Bind all threads of this process, if MINDSPEED_LITE_BIND asks; returns a line for the user, or "".

    The first rank of all gets the line; that of another node only what is unusual. Repeated calls do nothing.
    """
    global _bound
    if wanted() == NONE or _bound is not None:
        return ""
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    line, note = "", why_not()
    if note:
        line = f"not bound: {note}"
    else:
        placement = current(kind, ranks)
        line, note = f"bound {placement.to_text()}", placement.note
        _bound = Binding(placement.cpus[rank])
    is_first = int(os.environ.get("RANK", rank)) == 0
    return line if is_first or (note and rank == 0) else ""


def unbind() -> None:
    global _bound
    if _bound is not None:
        _bound.end()
        _bound = None


def why_not() -> str:
    """Why this process is not bound, or ""."""
    if not hasattr(os, "sched_setaffinity"):
        return "this system binds no processes to CPUs"
    if os.environ.get("CPU_AFFINITY_CONF", "").split(",")[0].strip() not in ("", "0"):
        return "CPU_AFFINITY_CONF is set, so torch_npu binds"
    with contextlib.suppress(OSError):
        if os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid()):
            return f"the launcher has bound it to CPUs {format_cpus(os.sched_getaffinity(0))}"
    return ""


def near_devices(kind: str) -> list[frozenset[int]]:
    return device_cpus(Path("/"), kind, os.environ) if kind != "cpu" else []


def current(kind: str, ranks: int) -> Placement:
    """The placement of `ranks` on this machine, on the CPUs that this process may use."""
    root = Path("/")
    machine = cores(root, frozenset(os.sched_getaffinity(0)))
    return place(machine, ranks, None if kind == "cpu" else near_devices(kind), quota(root))


class Binding:
    """Binds this process; binds it again where a library changes that, as NCCL does when it makes a communicator."""

    def __init__(self, cpus: frozenset[int]) -> None:
        self._before, self._cpus = os.sched_getaffinity(0), cpus
        self._ended = threading.Event()
        _set_affinity(cpus)
        self._thread = threading.Thread(target=self._restore, daemon=True, name="cpu binding")
        self._thread.start()

    def _restore(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_CHECKS):
            if os.sched_getaffinity(os.getpid()) != self._cpus:
                # Threads of libraries keep their own.
                _set_affinity(self._cpus, ("pt_autograd",))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        _set_affinity(self._before)


_bound: Binding | None = None


def _set_affinity(cpus: Set[int], names: tuple[str, ...] = ("",)) -> None:
    """Of the main thread, and of threads whose name starts with one of `names`."""
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == os.getpid() or _read(task / "comm").startswith(names):
            with contextlib.suppress(OSError):  # a thread that has ended
                os.sched_setaffinity(int(task.name), cpus)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
