"""Train a small GPT on real text with features off and on, and show both side by side.

    make demo                           with examples/pretrain_gpt.py and the installed megatron-core
    MEGATRON_LM=/path/to/it make demo   with the unmodified pretrain_gpt.py of a Megatron-LM checkout

The text is the source of Python's own library. Data, logs and results go to .demo/ in the repository's root.
Exits with 1 if a run fails, the loss does not fall, or off and on do not agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite.child_process import child_process

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / ".demo"
OLDEST_PYTHON = (3, 12)
FEATURES = ("--use-fused-rmsnorm", "--use-flash-attn")
MODEL = {"layers": 2, "hidden": 256, "heads": 4, "sequence": 2048}
SEED = 1234
SHORT = 20  # steps of the rounds after the first, which are there for their times
LONGEST_RUN = 1200.0  # seconds; beyond it something hangs
# What in the standard library's folder is tests, tables rather than text, or not of it.
NOT_TEXT = (
    "test*",
    "site-packages",
    "idlelib",
    "lib2to3",
    "encodings",
    "_sysconfigdata*",
    "entities.py",
    "locale.py",
    "stringprep.py",
    "_casefix.py",
)


class DemoError(Exception):
    """The demo cannot go on; the text says why, for a person."""


@dataclass(frozen=True)
class Script:
    """A training script and how it is started.

    Attributes:
        name: how it is called in the output.
        command: interpreter and script.
        path: folders that go before PYTHONPATH.
        version: of the Megatron-core it runs on.
    """

    name: str
    command: tuple[str, ...]
    path: tuple[str, ...]
    version: str


def find_script(checkout: str | None) -> Script:
    """The checkout's own script, or ours.

    Raises:
        DemoError: the checkout is not one, or Megatron-core is not installed.
    """
    # Both kinds of run and both scripts start alike, so that what differs is the features.
    launcher = (sys.executable, "-m", "mindspeed_lite", "run")
    if checkout:
        folder = Path(checkout).resolve()
        script = folder / "pretrain_gpt.py"
        info = folder / "megatron" / "core" / "package_info.py"
        for needed in (script, info):
            if not needed.is_file():
                raise DemoError(f"MEGATRON_LM={checkout} is no Megatron-LM checkout: no {needed.name}.")
        version = runpy.run_path(str(info))["__version__"]
        return Script(str(script), (*launcher, str(script)), (str(folder), str(ROOT)), version)
    from mindspeed_lite.platform import megatron

    found = megatron.version()
    if found is None or importlib.util.find_spec("megatron.training") is None:
        raise DemoError("megatron-core from 0.17 on is needed: `make demo` installs it; or set MEGATRON_LM.")
    script = ROOT / "examples" / "pretrain_gpt.py"
    return Script("examples/pretrain_gpt.py", (*launcher, str(script)), (str(ROOT),), found)


def prepare_data() -> tuple[Path, str]:
    """The indexed dataset's prefix, made once for each release of Python, and a line about it."""
    from demo import text_to_indexed

    prefix = OUTPUT / f"python-{sys.version.split()[0]}"
    described = prefix.with_suffix(f"{prefix.suffix}.json")
    if all(prefix.with_name(prefix.name + suffix).is_file() for suffix in (".bin", ".idx", ".json")):
        about = json.loads(described.read_text())
    else:
        try:
            files = text_to_indexed.find_files([Path(sysconfig.get_path("stdlib"))], (".py",), NOT_TEXT)
            written = text_to_indexed.convert(files, prefix)
            # Megatron keeps its index of samples by the dataset's name, not by what is in it.
            shutil.rmtree(OUTPUT / "cache", ignore_errors=True)
        except text_to_indexed.InputError as error:
            raise DemoError(str(error)) from error
        about = {"documents": written.documents, "tokens": written.tokens}
        described.write_text(json.dumps(about))
    size = f"{about['tokens'] / 1e6:.1f} million tokens, a token a byte"
    return prefix, f"{about['documents']} sources of Python's own library, {size}"


def describe_device() -> tuple[str, str, str]:
    """The device's name, a line about it, and the precision in which it multiplies matrices faster."""
    import torch

    from mindspeed_lite import platform

    device = platform.activate()
    about = f"{device.name}: {device.describe()}"
    platform.deactivate()
    if device.name != "cpu":
        return device.name, about, "bf16"

    def seconds(dtype: torch.dtype) -> float:
        x, weight = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    # Processors without bf16 instructions emulate them, many times slower.
    return device.name, about, "bf16" if seconds(torch.bfloat16) < seconds(torch.float32) else "fp32"


def training_arguments(script: Script, data: Path, precision: str, steps: int, length: int) -> list[str]:
    """Megatron's flags for both kinds of run: the first `length` steps of a training planned for `steps`."""
    from demo.text_to_indexed import tokenizer_flags

    flags: dict[str, Any] = {
        "--num-layers": MODEL["layers"],
        "--hidden-size": MODEL["hidden"],
        "--ffn-hidden-size": 2 * MODEL["hidden"],
        "--num-attention-heads": MODEL["heads"],
        "--seq-length": MODEL["sequence"],
        "--max-position-embeddings": MODEL["sequence"],
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--micro-batch-size": 1,
        "--global-batch-size": 1,
        "--train-iters": length,
        "--lr-decay-iters": steps,
        "--lr": "2e-3",
        "--adam-beta2": 0.95,
        "--lr-warmup-iters": 5,
        "--weight-decay": 0,
        "--data-path": data,
        "--data-cache-path": OUTPUT / "cache",
        "--split": "100,0,0",
        "--eval-iters": 0,
        "--eval-interval": length,
        "--log-interval": 1,
        "--seed": SEED,
    }
    pairs = [str(part) for pair in flags.items() for part in pair]
    switches = [
        "--swiglu",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
        *(["--bf16"] if precision == "bf16" else []),
    ]
    return [*pairs, *switches, *tokenizer_flags(script.version)]


def environment(script: Script) -> dict[str, str]:
    """This process's environment, for a training run of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changed = dict(os.environ)
    changed.pop("MINDSPEED_LITE_DISABLE", None)

    def before(variable: str, *folders: str) -> str:
        return os.pathsep.join([*folders, *filter(None, [os.environ.get(variable)])])

    changed |= {
        # A checkout compiles its dataset index builder with the pybind11 and python3 that PATH finds.
        "PATH": before("PATH", str(Path(sys.executable).parent)),
        "PYTHONPATH": before("PYTHONPATH", *script.path),
        "TORCHINDUCTOR_CACHE_DIR": str(OUTPUT / "compiled"),
        # The log in the order of writing: what ends a run stands at its end, not before what was buffered.
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    return changed


def train(script: Script, arguments: Sequence[str], log: Path, title: str) -> float | None:
    """Run one training to its end, its output in `log`; returns its peak memory if that is known.

    Raises:
        DemoError: it failed, with the end of its log.
    """
    begin = time.monotonic()
    memory = None
    command = [*script.command, *arguments]
    with (
        log.open("w") as output,
        child_process(command, stdout=output, stderr=subprocess.STDOUT, cwd=OUTPUT, env=environment(script)) as process,
    ):
        while process.poll() is None:
            memory = peak_memory(process.pid) or memory
            if time.monotonic() - begin > LONGEST_RUN:
                raise DemoError(f"No end after {LONGEST_RUN:.0f} s; see {shown(log)}.")
            if sys.stdout.isatty():
                print(f"\r  {title}  {time.monotonic() - begin:4.0f} s", end="", flush=True)
            time.sleep(0.2)
    start_of_line = "\r" if sys.stdout.isatty() else ""
    print(f"{start_of_line}  {title}  {time.monotonic() - begin:4.0f} s  {shown(log)}", flush=True)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise DemoError(f"Training ended with code {process.returncode}. The end of {shown(log)}:\n\n{tail}")
    return memory


def peak_memory(pid: int) -> float | None:
    """Peak resident memory of a running process in MB, where /proc says it.

    What wait() reports instead is never below the resident memory of the process that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) / 1024 if peak else None


def shown(path: Path) -> str:
    return os.path.relpath(path)


def demonstrate(steps: int, rounds: int, budget: float) -> int:
    """The whole demo; `budget`: seconds within which another round must fit."""
    from demo import compare

    begin = time.monotonic()
    OUTPUT.mkdir(exist_ok=True)
    script = find_script(os.environ.get("MEGATRON_LM"))
    device, about_device, precision = describe_device()
    data, about_data = prepare_data()
    shape = ", ".join(f"{name} {size}" for name, size in MODEL.items())
    print("mindspeed_lite demo: the same training with features off and on")
    print(f"  device   {about_device}")
    print(f"  text     {about_data}")
    print(f"  model    GPT in {precision}: {shape}; {steps} steps, seed {SEED}")
    print(f"  script   {script.name} on megatron-core {script.version}")
    print(f"  on       {' '.join(FEATURES)}\n")

    report = OUTPUT / "report.txt"
    kinds = {"off": (), "on": (*FEATURES, "--mindspeed-lite-report", str(report))}
    runs: dict[str, list[compare.Run]] = {kind: [] for kind in kinds}
    for number in range(1, rounds + 1):
        started = time.monotonic()
        length = steps if number == 1 else min(steps, SHORT)
        arguments = training_arguments(script, data, precision, steps, length)
        for kind, extra in kinds.items():
            log = OUTPUT / f"{kind}-{number}.log"
            resident = train(script, [*arguments, *extra], log, f"round {number}  {kind:3}  {length:3} steps")
            try:
                run = compare.parse_log(log.read_text(errors="replace"), length, resident if device == "cpu" else None)
            except ValueError as error:
                raise DemoError(f"{shown(log)}: {error}.") from error
            runs[kind].append(run)
        now = time.monotonic()
        # A short round takes less than half of the first one's time.
        next_round = (now - started) / (2 if number == 1 and steps > 2 * SHORT else 1)
        if number < rounds and now - begin + next_round > budget:
            print(f"  (another round would not fit into {budget / 60:g} minutes)")
            break

    off, on = runs["off"], runs["on"]
    verdict = compare.judge(off, on, compare.TOLERANCE[precision])
    print("", *compare.loss_table(off[0], on[0]), sep="\n")
    print(f"\n  largest difference of the loss {verdict.difference:.2e}, at step {verdict.step}", end="")
    print(f" (allowed: {verdict.tolerance:g})")
    if len(off) > 1:
        again = len(off[1].losses)
        noise, _ = compare.largest_difference(off[0].losses[:again], off[1].losses)
        print(f"  off against off again          {noise:.2e}")
    print("", *compare.speed_table(off, on), sep="\n")
    print(f"({about_device}; without the first {compare.WARM_UP} steps of each run)\n")
    print(f"report of the last run with features on, {shown(report)}:")
    print(report.read_text())
    results = {
        "device": about_device,
        "precision": precision,
        "megatron_core": script.version,
        "verdict": asdict(verdict),
        "ratios": compare.ratios(off, on),
        "runs": {kind: [asdict(run) for run in each] for kind, each in runs.items()},
    }
    (OUTPUT / "results.json").write_text(json.dumps(results, indent=1))
    for problem in verdict.problems:
        print(f"FAILED: {problem}")
    if not verdict.problems:
        taken = f"{time.monotonic() - begin:.0f} s, results in {shown(OUTPUT)}/"
        print(f"PASSED: the loss falls, and off and on agree. {taken}")
    return 1 if verdict.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(
            f"The demo needs Python {'.'.join(map(str, OLDEST_PYTHON))} or later, as megatron-core from 0.17 "
            f"on; this is {sys.version.split()[0]}.",
            file=sys.stderr,
        )
        return 1
    parser = argparse.ArgumentParser(prog="python -m demo", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80, help="Steps of the first round (default: 80).")
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of runs, off and on (default: 3).")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="Begin no further round that would end later (default: 5)."
    )
    args = parser.parse_args(argv)
    if args.steps < 20 or args.rounds < 1:
        parser.error("at least 20 steps and one round are needed to say anything")
    # Also when this file is run by its path.
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        return demonstrate(args.steps, args.rounds, args.minutes * 60)
    except DemoError as error:
        print(f"\nThe demo stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
