"""Train a small GPT on real text with features off and on: `mindspeed-lite bench` with a model, a text and features.

    make demo                           with examples/pretrain_gpt.py and the installed megatron-core
    MEGATRON_LM=/path/to/it make demo   with the unmodified pretrain_gpt.py of a Megatron-LM checkout

The text is the source of Python's own library. Data, logs and the report go to .demo/ in the repository's root.
Exits with 1 if a run fails, the loss does not fall, or off and on do not agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import data

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / ".demo"
FEATURES = ("use_fused_rmsnorm", "use_flash_attn")
MODEL = {"layers": 2, "hidden": 256, "heads": 4, "sequence": 2048}
SEED = 1234
WARM_UP = 5  # steps whose times are left out: compilation, first touch of memory
FALL = 0.7  # the part of the first loss below which training must end


class DemoError(Exception):
    """The demo cannot go on; the text says why, for a person."""


@dataclass(frozen=True)
class Script:
    """A training script, the folders that go before PYTHONPATH, and the version of its Megatron-core."""

    file: Path
    path: tuple[str, ...]
    version: str


def find_script(checkout: str | None) -> Script:
    """The checkout's own script, or ours.

    Raises:
        DemoError: the checkout is not one, or Megatron-core is not installed.
    """
    if checkout:
        folder = Path(checkout).resolve()
        script = folder / "pretrain_gpt.py"
        info = folder / "megatron" / "core" / "package_info.py"
        for needed in (script, info):
            if not needed.is_file():
                raise DemoError(f"MEGATRON_LM={checkout} is no Megatron-LM checkout: no {needed.name}.")
        return Script(script, (str(folder), str(ROOT)), runpy.run_path(str(info))["__version__"])
    from mindspeed_lite.platform import megatron

    found = megatron.version()
    if found is None or importlib.util.find_spec("megatron.training") is None:
        raise DemoError("megatron-core from 0.17 on is needed: `make demo` installs it; or set MEGATRON_LM.")
    return Script(ROOT / "examples" / "pretrain_gpt.py", (str(ROOT),), found)


def prepare_data() -> Path:
    """The indexed dataset's prefix, made once for each release of Python."""
    prefix = OUTPUT / f"python-{sys.version.split()[0]}"
    if not all(prefix.with_name(prefix.name + suffix).is_file() for suffix in (".bin", ".idx")):
        data.convert(data.sources(), prefix)
        # Megatron keeps its index of samples by the dataset's name, not by what is in it.
        shutil.rmtree(OUTPUT / "cache", ignore_errors=True)
    return prefix


def fast_precision() -> str:
    """The precision in which the device multiplies matrices faster."""
    import torch

    from mindspeed_lite import platform

    device = platform.activate()
    platform.deactivate()
    if device.name != "cpu":
        return "bf16"

    def seconds(dtype: torch.dtype) -> float:
        x, weight = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    # Processors without bf16 instructions emulate them, many times slower.
    return "bf16" if seconds(torch.bfloat16) < seconds(torch.float32) else "fp32"


def training_arguments(script: Script, dataset: Path, precision: str, steps: int) -> list[str]:
    """Megatron's flags."""
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
        "--train-iters": steps,
        "--lr": "2e-3",
        "--adam-beta2": 0.95,
        "--lr-warmup-iters": 5,
        "--weight-decay": 0,
        "--data-path": dataset,
        "--data-cache-path": OUTPUT / "cache",
        "--split": "100,0,0",
        "--eval-iters": 0,
        "--eval-interval": steps,
        "--log-interval": 1,
        "--seed": SEED,
    }
    pairs = [str(part) for pair in flags.items() for part in pair]
    switches = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    return [*pairs, *switches, *["--bf16"] * (precision == "bf16"), *data.tokenizer_flags(script.version)]


def environment(script: Script) -> dict[str, str]:
    """This process's environment, for the benchmark."""

    def before(variable: str, *folders: str) -> str:
        return os.pathsep.join([*folders, *filter(None, [os.environ.get(variable)])])

    kept = {name: value for name, value in os.environ.items() if name != "MINDSPEED_LITE_DISABLE"}
    return kept | {
        # A checkout compiles its dataset index builder with the pybind11 and python3 that PATH finds.
        "PATH": before("PATH", str(Path(sys.executable).parent)),
        "PYTHONPATH": before("PYTHONPATH", *script.path),
        "TORCHINDUCTOR_CACHE_DIR": str(OUTPUT / "compiled"),
    }


def why_not_falling(losses: Sequence[float]) -> str | None:
    """The reason why these losses do not fall as training should make them, or None."""
    if not all(map(math.isfinite, losses)):
        return f"the loss of step {[math.isfinite(loss) for loss in losses].index(False) + 1} is not a number"
    first, last = losses[0], statistics.fmean(losses[-5:])
    if last > FALL * first:
        return f"the loss went from {first:.3f} to {last:.3f}, not below {FALL:.0%} of where it began"
    return None


def demonstrate(steps: int, rounds: int) -> int:
    """The whole demo; returns the exit code."""
    OUTPUT.mkdir(exist_ok=True)
    script, precision = find_script(os.environ.get("MEGATRON_LM")), fast_precision()
    report = OUTPUT / "report"
    training = training_arguments(script, prepare_data(), precision, WARM_UP + steps)
    command = [sys.executable, "-m", "mindspeed_lite", "bench", "--features", ",".join(FEATURES), "--out", str(report)]
    command += ["--allocator", "keep", "--repeats", str(rounds), "--warmup", str(WARM_UP), "--steps", str(steps)]
    command += ["--title", f"A small GPT on Python's own sources, {precision}, megatron-core {script.version}"]
    code = subprocess.run(
        [*command, "--", sys.executable, str(script.file), *training], env=environment(script)
    ).returncode
    if code:
        return code
    for arm in json.loads((report / "report.json").read_text())["arms"]:
        reason = why_not_falling([step["loss"]["lm loss"] for step in arm["runs"][0]["steps"]])
        if reason:
            print(f"FAILED: {arm['name']}: {reason}")
            return 1
    print("PASSED: the loss falls, and off and on agree.")
    print(
        f"Picture: {(report / 'time.png').relative_to(ROOT)}; all of it: {(report / 'report.html').relative_to(ROOT)}"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="Measured steps of each run (default: 30).")
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of runs, off and on (default: 3).")
    args = parser.parse_args(argv)
    if args.steps < 20 or args.rounds < 1:
        parser.error("at least 20 steps and one round are needed to say anything")
    try:
        return demonstrate(args.steps, args.rounds)
    except (DemoError, OSError) as error:
        print(f"The demo stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
