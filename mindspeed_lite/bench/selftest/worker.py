"""Runs self-test checks in a process and writes a JSON line for each result.

`python -m mindspeed_lite.bench.selftest.worker DEVICE SKIP --lines FILE [--quick]` skips SKIP checks. The first check
without a line ended the process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any

from mindspeed_lite.bench import timing
from mindspeed_lite.bench.output import finite
from mindspeed_lite.bench.selftest import FAILED, Check, Outcome


def plan(device: str, quick: bool) -> list[Check]:
    from mindspeed_lite.bench.selftest import device as device_checks
    from mindspeed_lite.bench.selftest import numerics

    return [*device_checks.checks(device), *numerics.checks(device, quick)]


def run(check: Check) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        outcome = check.run()
    except Exception as error:
        outcome = Outcome(timing.format_error(error), FAILED)
    return {
        "group": check.group,
        "name": check.name,
        "status": outcome.status,
        "text": outcome.text,
        "seconds": round(time.perf_counter() - start, 3),
        "figures": outcome.figures,
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the rest of the plan; always 0."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_lite.bench.selftest.worker", description=main.__doc__)
    parser.add_argument("device", choices=("cpu", "cuda", "npu"))
    parser.add_argument("skip", type=int)
    parser.add_argument("--lines", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    from mindspeed_lite import platform
    from mindspeed_lite.bench import environment

    with open(options.lines, "a", encoding="utf-8") as file:

        def write(**entry: Any) -> None:
            file.write(json.dumps(finite(entry), allow_nan=False) + "\n")
            file.flush()

        chosen = platform.choose(options.device)
        checks = plan(chosen.name, options.quick)
        write(plan=[[check.group, check.name] for check in checks], environment=environment.describe(chosen))
        if options.skip:
            # Normally done by the first check, which reports errors.
            with contextlib.suppress(Exception):
                platform.activate(chosen.name)
        for check in checks[options.skip :]:
            write(check=run(check))
    return 0


if __name__ == "__main__":
    sys.exit(main())
