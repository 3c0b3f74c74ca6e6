"""Says what becomes of each flag of a MindSpeed or MindSpeed-LLM launch script, and with -o writes the script
with flags that mindspeed_lite and Megatron understand: comments, order and variables stay. In a Python script
it changes the line that imports mindspeed.megatron_adaptor. The same flags are translated at the start of a
training too, with a notice each, so a script runs without being migrated. The table has 434 flags.

examples:
  mindspeed-lite migrate pretrain_qwen3.sh
  mindspeed-lite migrate pretrain_qwen3.sh -o translated.sh
  mindspeed-lite migrate --shim DIR

With --shim the Python script stays as it is: PYTHONPATH=DIR answers its import line.

exit code: 0; 1 where a flag is left that will be refused; 2 for bad input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_lite.migration import Script, read_script
from mindspeed_lite.migration.shim import write_shim

from .terminal import CommandError, Parser, say, table, writing

HEADINGS = {
    "refused": "refused: take them out",
    "skipped": "skipped: the training goes on without them",
    "unknown value": "left as they are: translated when the script runs",
    "translated": "translated",
    "not needed": "left out: nothing has to be asked for",
    "kept": "stay as they are",
}


def add_options(parser: Parser) -> None:
    parser.usage = "%(prog)s SCRIPT [-o OUT [--force]]\n       %(prog)s --shim DIR"
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a launch script, or a Python training script")
    parser.add_argument("-o", "--output", metavar="OUT", help="where to write the translated script")
    parser.add_argument("--force", action="store_true", help="write over OUT, which may be SCRIPT itself")
    parser.add_argument("--shim", metavar="DIR", help="write a package `mindspeed` that answers the import line")


def main(options: argparse.Namespace) -> int:
    if options.shim is not None:
        if options.script is not None or options.output is not None:
            raise CommandError("--shim takes a folder and nothing else")
        with writing("--shim", options.shim):
            package = write_shim(Path(options.shim))
        print(
            f"written: {package}\n"
            f"use it with PYTHONPATH={options.shim}; `import mindspeed.megatron_adaptor` is then ours"
        )
        return 0
    if options.script is None:
        raise CommandError("no script given (see mindspeed-lite migrate --help)")
    source = Path(options.script)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    is_python = source.suffix == ".py"
    script = read_script(text, is_python)
    if options.output is not None:
        output = Path(options.output)
        if output.exists() and not options.force:
            raise CommandError(f"-o {output}: it exists; give another name, or --force to write over it")
        with writing("-o", options.output):
            output.write_text(script.text, encoding="utf-8")
            output.chmod(source.stat().st_mode)
    if is_python:
        lines = "import line" if script.imports == 1 else "import lines"
        say(f"{source}: {script.imports} {lines} of mindspeed.megatron_adaptor changed")
    else:
        _show(script, source)
    if options.output is not None:
        print(f"\nwritten: {options.output}")
    return 1 if script.translation.refusals else 0


def _show(script: Script, source: Path) -> None:
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
        table([""], [[" ".join(script.others)]], "not in the table: Megatron's, the script's own or misspelt")
