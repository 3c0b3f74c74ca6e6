"""The whole campaign on one GPU: operators and trainings, within a time: `python -m benchmarks.gpu`, `make bench-gpu`.

    python -m benchmarks.gpu [--minutes 19] [--only PART ...] [--wheels DIR] [--fresh]
    python -m benchmarks.gpu --tiny [--device cpu|cuda]

Every part is a command of `mindspeed-lite` in a process of its own, which is interrupted at its limit; what it has by
then stands on the page, with what was left out. Finished parts are kept in .bench/, and the next run goes on from
there, unless code, command or environment have changed since. Page and JSON are each replaced in one step, at the end.

Nothing is downloaded. --wheels names a folder of wheels (megatron-core, liger-kernel, ...) for a machine without a
network: they are unpacked into .bench/ and come before what is installed. --tiny is for testing the campaign itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import gpu_page
from benchmarks.gpu_parts import Part, parts
from mindspeed_lite.bench import output
from mindspeed_lite.child_process import child_process

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / ".bench"
SCHEMA_VERSION = 1
# A part that is interrupted ends its trainings and writes its report; after this it is killed.
GRACE_SECONDS = 45.0
# With less than this left no part is started.
LEAST_SECONDS = 20.0
COMMAND = (sys.executable, "-m", "mindspeed_lite")
_SOURCES = ("mindspeed_lite", "patches", "examples")
_TRAINING = ("megatron.training", "wrapt", "matplotlib", "jinja2")
_ASK = (
    "import json, sys; from mindspeed_lite import platform; from mindspeed_lite.bench import environment; "
    "print(json.dumps(environment.describe(platform.choose(sys.argv[1]))))"
)


class CampaignError(Exception):
    """What stands in the way of the campaign, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where a part failed or found a failure, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    # A shell that starts this in the background has SIGINT ignored, and parts are to be interrupted by it. SIGTERM
    # between two parts leaves a page too.
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.default_int_handler)
    try:
        return _run(options)
    except CampaignError as error:
        print(f"benchmarks.gpu: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks.gpu: interrupted before anything was measured", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: whether the campaign runs; page into .bench/")
    parser.add_argument("--minutes", type=float, default=19.0, metavar="N", help="for everything (default %(default)g)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts; the page has the others as they were")
    parser.add_argument("--wheels", metavar="DIR", help="wheels to use in place of what is installed")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has finished")
    parser.add_argument(
        "--out", metavar="DIR", help="for page and JSON (default docs/benchmarks; .bench/tiny with --tiny)"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.device == "cpu" and not options.tiny:
        raise CampaignError("--device cpu: give --tiny as well; a CPU's own benchmarks are `python -m benchmarks`")
    if not options.minutes > 0:
        raise CampaignError(f"--minutes: want a number above 0, not {options.minutes:g}")
    every = parts(options.device, options.tiny)
    unknown = set(options.only or ()) - {part.name for part in every}
    if unknown:
        raise CampaignError(
            f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in every)}"
        )
    deadline = time.monotonic() + 60 * options.minutes
    environment = child_environment(options.device, options.wheels)
    described = _describe(options.device, environment)
    name = page_name(described["device"], options.device)
    folder = Path(options.out) if options.out else SCRATCH / "tiny" if options.tiny else ROOT / "docs" / "benchmarks"
    try:
        output.check_writable(folder)
    except output.OutputError as error:
        raise CampaignError(error) from error
    kept = SCRATCH / f"{name}{'-tiny' if options.tiny else ''}"
    notes = missing_notes(every)
    for note in notes:
        print(f"note: {note}", flush=True)
    chosen = [part for part in every if not options.only or part.name in options.only]
    campaign = Campaign(kept, environment, described, deadline, options.fresh)
    interrupted = False
    try:
        campaign.run(chosen)
    except KeyboardInterrupt:
        interrupted = True
    found = {
        "schema_version": SCHEMA_VERSION,
        "kind": "campaign",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "tiny": options.tiny,
        "environment": described,
        "notes": notes,
        "parts": [campaign.record(part) for part in every],
    }
    page = gpu_page.render(output.finite(found), f"{name}.json")
    output.write_file(folder / f"{name}.json", output.dumps(found))
    output.write_file(folder / f"{name}.md", page)
    print(f"wrote {folder / name}.md and {name}.json", flush=True)
    if interrupted:
        return 130
    return int(any(_has_failed(campaign.record(part)) for part in chosen))


class Campaign:
    """Runs parts one after the other until the deadline, and keeps a record of each in `folder`."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], described: Mapping[str, Any], deadline: float, fresh: bool
    ) -> None:
        self.folder, self.environment, self.deadline, self.fresh = folder, environment, deadline, fresh
        self.clock: Callable[[], float] = time.monotonic
        self._state = _digest({"sources": _sources(), "versions": described["versions"]})

    def run(self, chosen: Sequence[Part]) -> None:
        """Measure every part that is not finished; Ctrl-C ends the one that runs and passes on."""
        left = [part for part in chosen if self.fresh or self.record(part)["state"] != "complete"]
        for part in chosen:
            if part not in left:
                print(f"== {part.name}: finished in an earlier run", flush=True)
        for number, part in enumerate(left):
            # What earlier parts have left is this one's, as long as later ones keep their own.
            later = sum(each.seconds for each in left[number + 1 :])
            remaining = self.deadline - self.clock()
            limit = min(remaining, max(part.seconds, remaining - later))
            if limit < LEAST_SECONDS:
                print(f"== {part.name}: not started, the time is used up; the same command goes on here", flush=True)
                self._keep(part, _blank(part, "not started", "the time was used up"))
                continue
            missing = _missing(part)
            if missing:
                self._keep(part, _blank(part, "skipped", f"not installed: {', '.join(missing)}"))
                continue
            self._measure(part, limit)

    def record(self, part: Part) -> dict[str, Any]:
        """What is known of the part, for this code, command and environment."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.folder / f"{part.name}.json").read_text(encoding="utf-8"))
            if found.get("key") == self._key(part):
                return found
        return {**_blank(part, "not started", "not asked for yet"), "key": self._key(part)}

    def _measure(self, part: Part, limit: float) -> None:
        scratch = self.folder / part.name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        command = [*COMMAND, *part.command, "--out", os.path.relpath(scratch / "out", ROOT)]
        if part.program:
            command += ["--", _python(), *part.program]
        began, ended = self.clock(), ""
        try:
            print(f"== {part.name}: {part.about}; at most {limit:.0f} s", flush=True)
            with (
                (scratch / "log.txt").open("w") as log,
                child_process(
                    command, _interrupt, cwd=ROOT, env=dict(self.environment), stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log,
                ) as process,
            ):  # fmt: skip
                process.wait(limit)
        except subprocess.TimeoutExpired:
            ended = "stopped at its limit"
        except KeyboardInterrupt:
            ended = "interrupted"
            raise
        finally:
            self._conclude(part, scratch, self.clock() - began, limit, ended)

    def _conclude(self, part: Part, scratch: Path, seconds: float, limit: float, ended: str) -> None:
        """Keep what the part has come to."""
        found = _blank(part, "failed", "")
        found |= {"seconds": round(seconds, 1), "limit_seconds": round(limit, 1)}
        try:
            report = json.loads((scratch / "out" / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found["reason"] = f"{ended or 'ended'} without a report: {_last_line(scratch / 'log.txt')}"
            found["state"] = "stopped" if ended else "failed"
        else:
            found |= {"left_out": left_out(part, report), "report": report}
            if report["complete"]:
                found["state"] = "complete"
            else:
                found["state"] = "stopped" if ended else "failed"
                found["reason"] = ended or _last_line(scratch / "log.txt")
        self._keep(part, found)
        said = ": ".join(filter(None, [found["state"], found["reason"]]))
        print(f"== {part.name}: {seconds:.0f} s, {said}", flush=True)

    def _keep(self, part: Part, record: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        output.write_file(self.folder / f"{part.name}.json", output.dumps({**record, "key": self._key(part)}))

    def _key(self, part: Part) -> str:
        return _digest({"state": self._state, "command": [*part.command, *part.program]})


def left_out(part: Part, report: Mapping[str, Any]) -> list[str]:
    """What of the part its report does not have."""
    if part.cases:
        rows = {f"{row['operator']} {row['case']}" for row in report["rows"]}
        return [case for case in part.cases if case not in rows]
    settings, arms = report["settings"], report["arms"]
    wanted = settings["repeats"]
    found = []
    for name in dict.fromkeys(["off", *(arm["name"] for arm in arms if arm["role"] == "on")]):
        have = sum(run["status"] == "ok" for arm in arms if arm["name"] == name for run in arm["runs"])
        if have < wanted:
            found.append(f"{wanted - have} of {wanted} runs of {name}")
    if not any(arm["role"] == "on" for arm in arms):
        found.append("every run with features on")
    judged = settings["rounding_baseline"] == "none" or any(arm["role"] == "rounding_baseline" for arm in arms)
    if not report["complete"] and not judged:
        found.append("the rounding baseline, by which losses are judged")
    return found


def page_name(device: str, kind: str) -> str:
    """`h100` of `1 x NVIDIA H100 80GB HBM3`; without such a word the whole name; the kind of what is no GPU."""
    if kind != "cuda":
        return kind
    model = re.search(r"\b[A-Z]{1,2}\d{2,4}[A-Z]?\b", device)
    return (model[0] if model else re.sub(r"\W+", "-", re.sub(r"^\d+ x ", "", device)).strip("-")).lower()


def missing_notes(every: Sequence[Part]) -> list[str]:
    """What is not measured for want of a package."""
    notes = []
    if importlib.util.find_spec("liger_kernel") is None:
        notes.append("Liger-Kernel is not installed and not compared with: pip install 'mindspeed-lite[compare]'")
    for part in every:
        missing = _missing(part)
        if missing:
            notes.append(f"{part.name} is skipped: not installed: {', '.join(missing)}")
    return notes


def _missing(part: Part) -> list[str]:
    return [name for name in (_TRAINING if part.program else ()) if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def child_environment(device: str, wheels: str | None) -> dict[str, str]:
    """This environment with the checkout and the unpacked wheels before everything, in this process too."""
    paths = [str(ROOT), *(str(path) for path in (unpack(Path(wheels)) if wheels else ()))]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    importlib.invalidate_caches()
    if not _is_there("rich"):
        raise CampaignError("rich is not installed: pip install 'mindspeed-lite[bench]', or its wheel in --wheels")
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [found.get("PYTHONPATH")])])
    # `python` of a training's command is this one; the command then names no folder of this machine.
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    found["MINDSPEED_LITE_DEVICE"] = device
    return found


def unpack(folder: Path) -> list[Path]:
    """Unpack every wheel of the folder, once; returns what to import from.

    Raises:
        CampaignError: there is none, or one is no wheel.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise CampaignError(f"--wheels: no *.whl in {folder}; give the folder that holds them")
    found = []
    for wheel in wheels:
        target = SCRATCH / "wheels" / f"{wheel.stem}-{wheel.stat().st_size}"
        if not target.is_dir():
            part = target.with_name(f"{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            try:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(part)
            except (OSError, zipfile.BadZipFile) as error:
                raise CampaignError(f"--wheels: cannot unpack {wheel.name}: {error}") from error
            part.replace(target)
        found += [target, *sorted(target.glob("*.data/*lib"))]
    return found


def _describe(device: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The device and the versions, asked in another process: this one takes no memory of the device."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK, device], cwd=ROOT, env=dict(environment), capture_output=True, text=True
    )
    if asked.returncode:
        lines = asked.stderr.strip().splitlines()
        raise CampaignError(f"--device {device}: {lines[-1] if lines else 'cannot be asked'}")
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


def _python() -> str:
    """Python's name beside this one's, which PATH has first."""
    return "python" if (Path(sys.executable).parent / "python").exists() else Path(sys.executable).name


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, so that it writes its report; after the grace it is killed."""
    if process.poll() is not None:
        return
    for sign, patience in ((signal.SIGINT, GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            # The part itself ends what it has started; only a part that does not is ended whole.
            (os.kill if sign == signal.SIGINT else os.killpg)(process.pid, sign)
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue


def _has_failed(record: Mapping[str, Any]) -> bool:
    findings = (record["report"] or {}).get("findings", [])
    return record["state"] == "failed" or any(each["severity"] == "failure" for each in findings)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


def _blank(part: Part, state: str, reason: str) -> dict[str, Any]:
    return {
        "name": part.name,
        "about": part.about,
        "state": state,
        "reason": reason,
        "seconds": None,
        "limit_seconds": part.seconds,
        "left_out": list(part.cases or ["the whole training"]),
        "command": ["mindspeed-lite", *part.command, *(["--", "python", *part.program] if part.program else [])],
        "report": None,
    }


def _sources() -> str:
    """A digest of all code that is measured."""
    found = hashlib.sha256()
    for path in sorted(
        path for room in _SOURCES for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".cpp", ".h")
    ):
        found.update(path.relative_to(ROOT).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
