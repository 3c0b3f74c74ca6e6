"""`mindspeed-lite migrate`: translates a MindSpeed launch script and explains each flag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_lite.migration import Script, flags, read_script
from mindspeed_lite.migration.shim import write_shim

from . import terminal
from .terminal import CommandError, say, table

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

HEADINGS = {
    "refused": "refused: take them out",
    "skipped": "skipped: the training goes on without them",
    "unknown value": "left as they are: translated when the script runs",
    "translated": "translated",
    "not needed": "left out: nothing has to be asked for",
    "kept": "stay as they are",
}


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(list(arguments))
    if options.shim is not None:
        if options.script is not None or options.output is not None:
            raise CommandError("--shim takes a folder and nothing else")
        with terminal.writing("--shim", options.shim):
            package = write_shim(Path(options.shim))
        print(
            f"written: {package}\n"
            f"use it with PYTHONPATH={options.shim}; `import mindspeed.megatron_adaptor` is then ours"
        )
        return 0
    if options.script is None:
        parser.error("no script given")
    source = Path(options.script)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    script = read_script(text, is_python=source.suffix == ".py")
    if options.output is not None:
        output = Path(options.output)
        if output.exists() and not options.force:
            raise CommandError(f"-o {output}: it exists; give another name, or --force to write over it")
        with terminal.writing("-o", options.output):
            output.write_text(script.text, encoding="utf-8")
            output.chmod(source.stat().st_mode)
    if source.suffix == ".py":
        lines = "import line" if script.imports == 1 else "import lines"
        say(f"{source}: {script.imports} {lines} of mindspeed.megatron_adaptor changed")
    else:
        _show(script, source)
    if options.output is not None:
        print(f"\nwritten: {options.output}")
    return 1 if script.translation.refusals else 0


def _show(script: Script, source: Path) -> None:
    steps = script.translation.steps
    counts = [f"{sum(step.outcome == name for step in steps)} {name}" for name in HEADINGS]
    say(f"{source}: {len(steps)} flags of MindSpeed's table: {', '.join(counts)}")
    for outcome, heading in HEADINGS.items():
        chosen = [step for step in steps if step.outcome == outcome]
        if chosen and outcome == "kept":
            table([""], [[" ".join(step.use.flag for step in chosen)]], heading)
        elif chosen:
            table([""], [[step.line] for step in chosen], heading)
    if script.others:
        table([""], [[" ".join(script.others)]], "not in the table: Megatron's, the script's own or misspelt")


def _parser() -> terminal.Parser:
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
