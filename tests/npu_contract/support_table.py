"""Which torch_npu release has the operators we call, as we call them: read from the wheels, written into docs/npu.md.

    python -m tests.npu_contract.support_table             reads the wheels, downloading those the cache lacks
    python -m tests.npu_contract.support_table --render    only renews the table from docs/npu_support.json
    python -m tests.npu_contract.support_table --check     writes nothing; exits with 1 if the table is out of date

What a wheel has is read by wheels.py, what we call by call_sites.py. A wheel that cannot be fetched is said to be not
read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.npu_contract.call_sites import ROOT, Call, our_calls
from tests.npu_contract.wheels import arguments, fetch, read

PAGE = ROOT / "docs" / "npu.md"
DATA = ROOT / "docs" / "npu_support.json"
CACHE = ROOT / ".npu" / "wheels"
BEGIN, END = "<!-- torch_npu: begin -->", "<!-- torch_npu: end -->"

# Column -> what pip is asked for. Each line's newest release, and the oldest one, whose operators differ most.
COLUMNS = {
    "2.7.1": "torch-npu==2.7.1",
    **{line: f"torch-npu=={line}.*" for line in ("2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14")},
}


def verdict(call: Call, operators: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether a wheel with these operators can serve our call, in the words of the table."""
    operator = operators.get(call.operator)
    if operator is None:
        return "absent"
    positional, keyword_only = arguments(operator["schema"])
    reasons = [f"no argument `{name}`" for name in sorted(call.keywords - {*positional, *keyword_only})]
    if call.positional > len(positional):
        reasons.append(f"takes {len(positional)} arguments by position, we pass {call.positional}")
    if not operator["autograd"]:
        reasons.append("no autograd formula")
    if not operator["fake"]:
        reasons.append("no fake kernel")
    return "; ".join(reasons) or "yes"


def table(data: Mapping[str, Any], ours: Mapping[str, Call]) -> str:
    """The Markdown between the markers."""
    lines = ["| Operator | Called by | Arguments by name | Releases |", "| --- | --- | --- | --- |"]
    for name, call in sorted(ours.items()):
        columns: dict[str, list[str]] = {}
        for column, wheel in data["wheels"].items():
            is_read = "operators" in wheel and name in data["asked"]
            columns.setdefault(verdict(call, wheel["operators"]) if is_read else "not read", []).append(column)
        usual = max(columns, key=lambda each: len(columns[each]))
        exceptions = [f"{', '.join(found)}: {each}" for each, found in columns.items() if each != usual]
        releases = "; ".join([*exceptions, f"others: {usual}" if exceptions else usual])
        names = ", ".join(f"`{each}`" for each in sorted(call.keywords))
        lines.append(f"| `{name}` | {', '.join(f'`{path}`' for path in sorted(call.files))} | {names} | {releases} |")
    lines += ["", "Wheels:", ""]
    for column, wheel in data["wheels"].items():
        if "operators" in wheel:
            said = f"`{wheel['wheel']}`, {wheel['count']} operators; "
            said += f"wants {', '.join(wheel['requires']) or 'no particular torch'}; "
            said += f"names CANN {', '.join(wheel['cann'])}" if wheel["cann"] else "names no CANN for it"
        else:
            said = f"not read: {wheel['why']}"
        lines.append(f"- {column}: {said}")
    return "\n".join(lines)


def gather(cache: Path, ours: Mapping[str, Call]) -> dict[str, Any]:
    """Every wheel's answer about the operators we call and about their backward operators."""
    wheels: dict[str, Any] = {}
    for column, requirement in COLUMNS.items():
        try:
            found = read(fetch(requirement, cache))
        except (RuntimeError, ValueError, OSError, zipfile.BadZipFile) as error:
            wheels[column] = {"why": _without_hosts(str(error))}
        else:
            found["count"] = len(found["operators"])
            found["operators"] = {
                name: operator
                for name, operator in found["operators"].items()
                if name in ours or re.sub(r"_(backward|grad)$", "", name) in ours
            }
            wheels[column] = found
        print(f"{column}: {wheels[column].get('wheel') or wheels[column]['why']}", flush=True)
    return {"asked": sorted(ours), "wheels": wheels}


def _without_hosts(text: str) -> str:
    return re.sub(r"\w+://\S+", "the index", text)


def page(text: str, inside: str) -> str:
    """The page's text with what stands between the markers renewed."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has lost its markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{inside}\n{END}{after}"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    parser.add_argument("--render", action="store_true", help="renew the table from docs/npu_support.json alone")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where downloaded wheels are kept")
    chosen = parser.parse_args(given)
    ours = our_calls()
    if not (chosen.check or chosen.render):
        DATA.write_text(json.dumps(gather(chosen.cache, ours), indent=1) + "\n", encoding="utf-8")
    data = json.loads(DATA.read_text(encoding="utf-8"))
    now = PAGE.read_text(encoding="utf-8")
    wanted = page(now, table(data, ours))
    if now == wanted:
        return 0
    if chosen.check:
        print("docs/npu.md is out of date: run `python -m tests.npu_contract.support_table --render`", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print("docs/npu.md written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
