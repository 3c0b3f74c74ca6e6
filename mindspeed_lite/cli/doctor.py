"""What is there, what is missing and how to get it; with a self-test, whether the device computes
what it should. With COMMAND, for the Python, folder, PYTHONPATH and script that it starts; nothing
is trained.

examples:
  mindspeed-lite doctor
  mindspeed-lite doctor -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

exit codes: 0 training can start (self-test: every check passed), 1 it cannot (one failed),
2 bad options or no such device.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import npu_probe, terminal
from .doctor_checks import Machine, examine, examine_command, one_line
from .terminal import CommandError, Parser, option, say, table

_STYLES = {"ok": "green", "note": "yellow", "problem": "red", "fallback": "yellow", "failed": "red"}


def add_options(parser: Parser) -> None:
    parser.reads_command, parser.needs_command = True, False
    parser.usage = "%(prog)s [options] [-- COMMAND ...]"
    option(parser, "--json", "print one JSON document")
    tests = parser.add_mutually_exclusive_group()
    option(tests, "--selftest", "run every operator on the device that training would take, against float64 and plain "
           "PyTorch, and the device itself; a minute or two")  # fmt: skip
    option(tests, "--npu-selftest", "the same on an Ascend NPU, or why there is none")
    option(parser, "--out FILE", "write the self-test's report as JSON", terminal.output_file)
    option(parser, "--quick", "self-test: few and tiny cases")
    option(parser, "--timeout SECONDS", "how long torch_npu may take to answer",
           terminal.bounded(float, 0, above=True), npu_probe.SECONDS)  # fmt: skip


def main(options: argparse.Namespace) -> int:
    machine = Machine(options.timeout)
    if options.selftest or options.npu_selftest:
        if options.command:
            raise CommandError("a self-test takes no command")
        return _selftest(options, machine)
    if options.quick or options.out is not None:
        raise CommandError(f"{'--quick' if options.quick else '--out'} belongs to --selftest or --npu-selftest")
    with terminal.progress("starting") as tell:
        rows = examine_command(options.command, options.timeout) if options.command else examine(machine, tell)
    problems = sum(row.status == "problem" for row in rows)
    if options.json:
        document = {"schema_version": 1, "ready": not problems, "rows": [row._asdict() for row in rows]}
        print(json.dumps(document, indent=2))
        return 1 if problems else 0
    fixes = [(row.status, row.check, row.text + (f" -> {row.fix}" if row.fix else "")) for row in rows]
    table(("", "", ""), fixes, styles=_STYLES)
    cannot = f"\n{problems} problem{'s' * (problems > 1)}: training cannot start here yet."
    say(cannot if problems else "\nTraining can start.", "red" if problems else "green")
    return 1 if problems else 0


def _selftest(options: argparse.Namespace, machine: Machine) -> int:
    with terminal.progress("importing torch"):
        if not machine.has_torch:
            raise CommandError(f"a self-test needs torch: {one_line(machine.torch)}")
        device, error = machine.chosen
    if options.npu_selftest:
        device = "npu"
        if machine.npu.trouble is not None:
            raise CommandError(f"--npu-selftest: {machine.npu.trouble}")
    if not device:
        raise CommandError(f"--selftest: {error}")
    from mindspeed_lite.bench import output, selftest

    facts = machine.npu.facts if device == "npu" else {}
    with terminal.progress("starting a process on the device") as tell:
        report = selftest.run(device, quick=options.quick, facts=facts, tell=tell)
    if options.out is not None:
        with terminal.writing("--out", options.out):
            output.write_file(Path(options.out), output.dumps(report))
    if options.json:
        print(output.dumps(report), end="")
        return 0 if report["passed"] else 1
    checks = report["checks"]
    failed = sum(each["status"] == "failed" for each in checks)
    table(("", "", ""), selftest.lines(report), styles=_STYLES)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else f"All {len(checks)} checks passed"
    say(f"\n{verdict} on {device}, {sum(each['seconds'] for each in checks):.0f} s.", "red" if failed else "green")
    if report["to_report"]:
        print(f"\nTo report, with {options.out or '--out FILE'}:", *report["to_report"], sep="\n  ")
    if options.out is not None:
        print(f"written: {options.out}")
    return 0 if report["passed"] else 1
