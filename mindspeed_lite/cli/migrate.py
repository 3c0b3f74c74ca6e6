"""`mindspeed-lite migrate`: a MindSpeed launch script's flags by what becomes of them, and the script translated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindspeed_lite.migration import Script, flags, read_script
from mindspeed_lite.migration.shim import ShimError, write_shim

from . import terminal
from .terminal import fail

PROGRAM = "mindspeed-lite migrate"

DESCRIPTION = """\
Says what becomes of each flag of a MindSpeed or MindSpeed-LLM launch script, and with -o writes the script with flags
that mindspeed_lite and Megatron understand: comments, order and variables stay. In a Python script it changes the line
that imports mindspeed.megatron_adaptor. The same flags are translated at the start of a training too, with a notice
each, so a script runs without being migrated."""

EPILOG = """\
examples:
  mindspeed-lite migrate pretrain_qwen3.sh                  what becomes of each flag
  mindspeed-lite migrate pretrain_qwen3.sh -o translated.sh the same, and the translated script
  mindspeed-lite migrate --shim DIR                         a package `mindspeed` in DIR that answers the import line;
                                                            with PYTHONPATH=DIR the Python script stays as it is

exit code: 0; 1 where a flag is left that will be refused; 2 for bad input."""

# Outcomes in the order in which they are shown.
HEADINGS = {
    "refused": "refused: take them out",
    "skipped": "skipped: the training goes on without them",
    "unknown value": "left as they are: translated when the script runs",
    "translated": "translated",
    "not needed": "left out: nothing has to be asked for",
    "kept": "stay as they are",
}


def main(arguments: Sequence[str]) -> int:
    """Show and write; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    if options.shim is not None:
        return _shim(options)
    if options.script is None:
        return fail(PROGRAM, f"no script given (see {PROGRAM} --help)")
    source = Path(options.script)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return fail(PROGRAM, f"{source} cannot be read: {getattr(error, 'strerror', None) or error}")
    script = read_script(text, is_python=source.suffix == ".py")
    if options.output is not None:
        output = Path(options.output)
        if output.exists() and not options.force:
            return fail(PROGRAM, f"-o {output}: it exists; give another name, or --force to write over it")
        try:
            output.write_text(script.text, encoding="utf-8")
            output.chmod(source.stat().st_mode)
        except OSError as error:
            return fail(PROGRAM, f"-o {output} cannot be written: {error.strerror}")
    print("\n".join(_lines(script, source)))
    if options.output is not None:
        print(f"\nwritten: {options.output}")
    return 1 if script.translation.refusals else 0


def _shim(options: argparse.Namespace) -> int:
    if options.script is not None or options.output is not None:
        return fail(PROGRAM, "--shim takes a folder and nothing else")
    try:
        package = write_shim(Path(options.shim))
    except ShimError as error:
        return fail(PROGRAM, f"--shim {options.shim}: {error}")
    except OSError as error:
        return fail(PROGRAM, f"--shim {options.shim} cannot be written: {error.strerror}")
    print(
        f"written: {package}\nuse it with PYTHONPATH={options.shim}; `import mindspeed.megatron_adaptor` is then ours"
    )
    return 0


def _lines(script: Script, source: Path) -> list[str]:
    """The report: counts, then the flags by outcome."""
    width, color = terminal.width(), terminal.has_color()
    if source.suffix == ".py":
        found = f"{script.imports} import {'line' if script.imports == 1 else 'lines'} of mindspeed.megatron_adaptor"
        return [f"{source}: {found} changed"]
    steps = script.translation.steps
    counts = [f"{sum(step.outcome == name for step in steps)} {name}" for name in HEADINGS]
    lines = [f"{source}: {len(steps)} flags of MindSpeed's table: {', '.join(counts)}"]
    for outcome, heading in HEADINGS.items():
        chosen = [step for step in steps if step.outcome == outcome]
        if not chosen:
            continue
        lines += ["", terminal.paint(heading, "bold", color)]
        if outcome == "kept":
            lines += [f"  {line}" for line in terminal.wrap(" ".join(step.use.flag for step in chosen), width - 2)]
            continue
        for step in chosen:
            wrapped = terminal.wrap(step.line, width - 4)
            lines += [f"  {wrapped[0]}", *(f"    {line}" for line in wrapped[1:])]
    if script.others:
        lines += ["", terminal.paint("not in the table: Megatron's, the script's own or misspelt", "bold", color)]
        lines += [f"  {line}" for line in terminal.wrap(" ".join(script.others), width - 2)]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} SCRIPT [-o OUT [--force]]\n       {PROGRAM} --shim DIR",
        description=f"{DESCRIPTION}\n\nThe table has {len(flags())} flags.",
        epilog=EPILOG,
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a launch script, or a Python training script")
    parser.add_argument("-o", "--output", metavar="OUT", help="where to write the translated script")
    parser.add_argument("--force", action="store_true", help="write over OUT, which may be SCRIPT itself")
    parser.add_argument("--shim", metavar="DIR", help="write a package `mindspeed` that answers the import line")
    return parser
