"""Runs parts until the deadline and keeps what each unit measured; page and JSON are written after every part."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu import page
from benchmarks.gpu.parts import PARTS, Part
from mindspeed_lite.bench import output
from mindspeed_lite.child_process import child_process, terminate

ROOT = Path(__file__).resolve().parents[2]
SCHEMA_VERSION = 2
_POLL_SECONDS = 0.1

Record = dict[str, Any]


@dataclass
class _Worker:
    """A process that runs a share of a part's units."""

    process: subprocess.Popen[bytes]
    lines: Path
    log: Path
    share: str
    read: int = 0
    running: str = ""
    since: float = field(default_factory=time.monotonic)


class Campaign:
    """The records of one device, in `out` and, for a next call, in `scratch`."""

    def __init__(
        self, name: str, device: str, tiny: bool, scratch: Path, out: Path, environment: Mapping[str, str]
    ) -> None:
        self.name, self.device, self.tiny = name, device, tiny
        self.scratch, self.out, self.environment = scratch, out, environment
        self.notes: list[str] = []
        self.records: dict[str, Record] = {part.name: _blank(part) for part in PARTS}
        for folder in (scratch, out):
            output.check_writable(folder)

    def resume(self, folders: Sequence[Path]) -> None:
        """Take what the newest JSON of this device in `folders` has finished."""
        found = [each for each in (_read(folder / f"{self.name}.json") for folder in folders) if each]
        found = [each for each in found if each["tiny"] == self.tiny]
        for each in sorted(found, key=lambda each: str(each["created"]))[-1:]:
            for part in each["parts"]:
                if part["name"] in self.records:
                    self.records[part["name"]] |= {key: part[key] for key in part if key != "about"}

    def run(self, parts: Sequence[Part], deadline: float) -> int:
        """Measure what is missing; 1 where a unit of these parts failed."""
        self.write()
        for number, part in enumerate(parts):
            later = sum(each.seconds for each in parts[number + 1 :])
            left = deadline - time.monotonic()
            limit = min(left, max(part.seconds, left - later))
            record = self.records[part.name]
            if part.repeats:
                record["units"] = {}
            elif record["state"] == "complete" and all(each["state"] == "ok" for each in record["units"].values()):
                print(f"== {part.name}: finished in an earlier call", flush=True)
                continue
            if limit < part.least:
                reason = f"{left:.0f} s were left, and it needs {part.least:.0f}; the same command goes on here"
                if not record["units"]:
                    record |= {"state": "not started", "reason": reason}
                print(f"== {part.name}: not started: {reason}", flush=True)
                self.write()
                continue
            print(f"== {part.name}: {part.about}; at most {limit:.0f} s", flush=True)
            # What failed or was skipped is measured again.
            record["units"] = {name: unit for name, unit in record["units"].items() if unit["state"] == "ok"}
            self._measure(part, record, limit)
            self.write()
        print(f"wrote {self.name}.md and {self.name}.json", flush=True)
        states = [unit["state"] for part in parts for unit in self.records[part.name]["units"].values()]
        return int("failed" in states)

    def write(self) -> None:
        """Replace page and JSON, each in one step."""
        found = {
            "schema_version": SCHEMA_VERSION,
            "kind": "campaign",
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "tiny": self.tiny,
            "notes": self.notes,
            "parts": [*self.records.values()],
        }
        text = output.dumps(found)
        for folder in {self.scratch, self.out}:
            output.write_file(folder / f"{self.name}.json", text)
        try:
            text = page.render(output.finite(found), f"{self.name}.json")
        except Exception as error:  # the JSON has every figure, and what is not measured yet is worth more than a page
            text = f"# {self.name}\n\nThe page could not be rendered: {type(error).__name__}: {error}. See the JSON.\n"
        output.write_file(self.out / f"{self.name}.md", text)

    def _measure(self, part: Part, record: Record, limit: float) -> None:
        began = time.monotonic()
        record |= {"state": "stopped", "reason": "", "limit_seconds": round(limit, 1)}
        try:
            with contextlib.ExitStack() as stack:
                shares = [f"{number}/{part.workers}" for number in range(part.workers)]
                workers = [self._start(stack, part, record, share) for share in shares]
                while workers and time.monotonic() - began < limit:
                    workers = [each for each in map(lambda w: self._look(stack, part, record, w), workers) if each]
                    time.sleep(_POLL_SECONDS)
                record |= {"state": "stopped", "reason": "its time was up"} if workers else {"state": "complete"}
        except KeyboardInterrupt:
            record["reason"] = "interrupted"
            raise
        finally:
            record["seconds"] = round(time.monotonic() - began, 1)
            for unit in record["units"].values():
                if unit["state"] == "running":
                    unit |= {"state": "stopped", "reason": record["reason"]}
            print(f"== {part.name}: {record['seconds']:.0f} s, {record['state']} {record['reason']}", flush=True)

    def _start(self, stack: contextlib.ExitStack, part: Part, record: Record, share: str) -> _Worker:
        folder = self.scratch / part.name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        number = share.partition("/")[0]
        lines, log = folder / f"{number}.jsonl", folder / f"{number}.log"
        lines.write_text("")
        command = [sys.executable, "-m", "benchmarks.gpu.units", part.module, part.name, "--device", self.device]
        command += ["--lines", str(lines), "--share", share, *(["--tiny"] if self.tiny else [])]
        command += ["--done", *(name for name, unit in record["units"].items() if unit["state"] != "running")]
        with log.open("w") as file:
            process = stack.enter_context(
                # Asked to end, it ends the training that it has started, whose session is another.
                child_process(
                    command,
                    terminate,
                    cwd=ROOT,
                    env=dict(self.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            )
        return _Worker(process, lines, log, share)

    def _look(self, stack: contextlib.ExitStack, part: Part, record: Record, worker: _Worker) -> _Worker | None:
        """Read what the worker has written; None when it is done, another worker when it had to be replaced."""
        ended = worker.process.poll() is not None
        for entry in _new_lines(worker):
            name = entry.pop("unit")
            record["units"][name] = entry
            worker.running = name if entry["state"] == "running" else ""
            worker.since = time.monotonic()
            if not worker.running:
                reason = f": {entry['reason']}" if entry["reason"] else ""
                print(f"   {name}: {entry['state']}, {entry['seconds']:.1f} s{reason}", flush=True)
        hung = time.monotonic() - worker.since > part.unit_seconds
        if not ended and not hung:
            return worker
        if ended and worker.process.returncode == 0:
            return None
        terminate(worker.process)
        how = f"took more than {part.unit_seconds:.0f} s" if hung else f"exit code {worker.process.returncode}"
        reason = f"{how}: {_last_line(worker.log)}"
        if not worker.running:
            # It does not even start: nothing can be learnt from starting it again.
            record["reason"] = reason
            record["units"]["start"] = {"state": "failed", "reason": reason, "seconds": 0.0, "figures": {}}
            return None
        record["units"][worker.running] |= {"state": "failed", "reason": reason}
        print(f"   {worker.running}: failed: {reason}", flush=True)
        return self._start(stack, part, record, worker.share)


def _new_lines(worker: _Worker) -> Iterator[Record]:
    with worker.lines.open("rb") as file:
        file.seek(worker.read)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            worker.read += len(line)
            yield json.loads(line)


def _blank(part: Part) -> Record:
    return {
        "name": part.name,
        "about": part.about,
        "state": "not started",
        "reason": "not asked for yet",
        "seconds": None,
        "limit_seconds": part.seconds,
        "units": {},
    }


def _read(path: Path) -> Record | None:
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("schema_version") == SCHEMA_VERSION else None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")
