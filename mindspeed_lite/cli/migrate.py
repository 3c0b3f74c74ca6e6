"""Says what becomes of each flag of a MindSpeed or MindSpeed-LLM launch script.
With -o it writes a script for the Megatron that Python finds here: flags are
translated, `torchrun pretrain_gpt.py` becomes
`torchrun -m mindspeed_lite run pretrain_gpt.py`, and the rest stays. Start it
in a checkout of Megatron-LM. In a Python script the line that imports
megatron_adaptor is changed.

examples:
  mindspeed-lite migrate pretrain_qwen3.sh
  mindspeed-lite migrate pretrain_qwen3.sh -o translated.sh
  mindspeed-lite migrate --shim DIR    packages in DIR that answer the import of
                                       megatron_adaptor, with PYTHONPATH=DIR

exit code: 0; 1 where something is left that will be refused; 2 for bad input.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from mindspeed_lite.migration import Script, read_script, unrecognized
from mindspeed_lite.migration.shim import write_shim

from .terminal import CommandError, Parser, progress, say, table, writing

HEADINGS = {
    "refused": "refused: take them out",
    "skipped": "skipped: the training goes on without them",
    "unknown value": "left as they are: translated when the script runs",
    "translated": "translated",
    "not needed": "left out: not needed",
    "kept": "stay as they are",
}


def add_options(parser: Parser) -> None:
    parser.usage = "%(prog)s SCRIPT [-o OUT [--force]]\n       %(prog)s --shim DIR"
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a launch script, or a Python training script")
    parser.add_argument("-o", "--output", metavar="OUT", help="where to write the translated script")
    parser.add_argument("--force", action="store_true", help="write over OUT, which may be SCRIPT itself")
    parser.add_argument("--shim", metavar="DIR", help="write packages that answer the import of megatron_adaptor")


def main(options: argparse.Namespace) -> int:
    if options.shim is not None:
        if options.script is not None or options.output is not None:
            raise CommandError("--shim takes a folder and nothing else")
        with writing("--shim", options.shim):
            packages = write_shim(Path(options.shim))
        print(f"written: {', '.join(map(str, packages))}\nPYTHONPATH={options.shim} lets Python find them")
        return 0
    if options.script is None:
        raise CommandError("no script given (see mindspeed-lite migrate --help)")
    source = Path(options.script)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    is_python = source.suffix == ".py"
    if options.output is not None and Path(options.output).exists() and not options.force:
        raise CommandError(f"-o {options.output}: it exists; give another name, or --force to write over it")
    known = None if is_python else _flags_of_megatron()
    script = read_script(text, is_python, known)
    if options.output is not None:
        with writing("-o", options.output):
            Path(options.output).write_text(script.text, encoding="utf-8")
            Path(options.output).chmod(source.stat().st_mode)
    if is_python:
        lines = "import line" if script.changed == 1 else "import lines"
        say(f"{source}: {script.changed} {lines} of megatron_adaptor changed")
        if script.others:
            say(f"It imports more of MindSpeed ({', '.join(script.others)}): start Megatron-LM's own script instead.")
    else:
        _show(script, source, known)
    if options.output is not None:
        print(f"\nwritten: {options.output}")
    return 1 if script.translation.refusals or (is_python and script.others) else 0


def _flags_of_megatron() -> list[str] | None:
    """Flags, with ours, that the parser of the Megatron that Python finds here has; None without Megatron."""
    code = (
        "import argparse, mindspeed_lite.megatron_adaptor, megatron.training.arguments as arguments\n"
        "parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))\n"
        "print(*parser._option_string_actions)"
    )
    with progress("comparing flags") as show:
        show(0, 1, "reading the flags of Megatron's parser")
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.splitlines()[-1].split() if found.returncode == 0 else None


def _show(script: Script, source: Path, known: list[str] | None) -> None:
    steps = script.translation.steps
    found = {name: [step for step in steps if step.outcome == name] for name in HEADINGS}
    counts = ", ".join(f"{len(each)} {name}" for name, each in found.items())
    say(f"{source}: {len(steps)} flags of MindSpeed's table: {counts}")
    for outcome, chosen in found.items():
        kept = [" ".join(step.use.flag for step in chosen)]
        if chosen:
            lines = kept if outcome == "kept" else [step.line for step in chosen]
            table([""], [[line] for line in lines], HEADINGS[outcome])
    if script.others:
        lines = unrecognized(script.others, known) if known else [" ".join(script.others)]
        title = "neither MindSpeed's nor Megatron's: refused, unless torchrun or the training script has them"
        table([""], [[line] for line in lines], title if known else "not in the table: there is no Megatron to ask")
    if "mindspeed_lite run" not in script.text:
        say("\nNo command starts a training script. Start yours with `python -m mindspeed_lite run SCRIPT`.")
