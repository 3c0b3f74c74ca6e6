"""Writes what the docs say of features, operators and defaults from their declarations.

python docs/generate.py            writes docs/support.md and the marked parts of README.md and of the pages in docs/
python docs/generate.py --check    writes nothing; exits with 1 if one of them is out of date

A marked part stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`; a feature's page gets one at its end.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from support_page import page_link, support, table, transformer_engine

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature, Option
    from mindspeed_lite.migration import FlagRow

THEMES = {
    "operators": "Fused operators",
    "experts": "Mixture of experts",
    "memory": "Memory",
    "communication": "Communication",
    "host": "Host",
}
# What a reader of README wants each group for.
PURPOSE = {
    "Fused operators": "The same mathematics in fewer passes over memory",
    "Mixture of experts": "Grouped GEMMs, fused routing and permutation, overlapped exchange, balanced load",
    "Memory": "Smaller, recomputed or offloaded optimizer states and activations",
    "Host": "Fewer synchronisations with the device",
    "Communication": "Collectives overlapped with GEMMs, context parallelism, pipeline schedules",
}


def _flag(option: Option) -> str:
    return f"`{option.flag}`" if option.is_switch else f"`{option.flag} {option.metavar or option.dest.upper()}`"


def by_theme() -> dict[str, list[Feature]]:
    """Every feature under the heading of its theme."""
    from mindspeed_lite import runtime

    found: dict[str, list[Feature]] = {heading: [] for heading in THEMES.values()}
    for feature in runtime.catalogue():
        found[THEMES[feature.theme]].append(feature)
    return found


def groups() -> list[str]:
    """README's table of features in groups, with what each group is for."""
    rows = [
        (heading, PURPOSE[heading], ", ".join(page_link(each, "docs/") for each in found))
        for heading, found in by_theme().items()
    ]
    return table(("Group", "What for", "Features"), rows)


def results() -> list[str]:
    """README's table of measured trainings, from the committed reports, and what was not run."""
    import picture

    rows = []
    for row in picture.results():
        name = str(row["name"])
        speed = f"{row['speed_ratio']:.2f}x ({row['speed_low']:.2f} to {row['speed_high']:.2f})"
        memory = _off_to_on(float(row["bytes_off"]), float(row["bytes_on"]))
        steps = f"{float(row['seconds_off']):.2f} s to {float(row['seconds_on']):.2f} s"
        link = f"[{name}](docs/benchmarks/cpu/{name}/report.md): {picture.TRAININGS[name]}"
        rows.append(("CPU", link, steps, speed, memory, str(row["loss"])))
    rows += _gpu_results() or [("CUDA", "not run yet", "", "", "", "")]
    rows.append(("Ascend NPU", "not run yet", "", "", "", ""))
    lines = table(
        ("Device", "Training", "Step, off to on", "Speed (95 % interval)", "Peak memory, off to on", "Loss"), rows
    )
    device = str(picture.results()[0]["device"])
    return [
        *lines,
        "",
        f"CPU: {device}, Megatron-core 0.19.2, bf16; every feature that `--mindspeed-lite-auto` takes.",
        "Commands and conditions: [docs/benchmarks/cpu.md](docs/benchmarks/cpu.md).",
    ]


def _off_to_on(off: float, on: float) -> str:
    return f"{off / 1e9:.2f} GB to {on / 1e9:.2f} GB"


def _gpu_results() -> list[tuple[str, ...]]:
    """A row for each training of each campaign in benchmarks/gpu."""
    rows = []
    for file in sorted((DOCS / "benchmarks" / "gpu").glob("*.json")):
        from benchmarks.gpu import page

        for name, step in json.loads(file.read_text(encoding="utf-8"))["steps"].items():
            if (found := page.compare(step)) is not None and name != page.LIGER:
                link = f"[{name}](docs/benchmarks/gpu/{file.stem}.md): {step['about']}"
                off, on = found.seconds
                rows.append(
                    (
                        file.stem.upper(),
                        link,
                        f"{off:.3f} s to {on:.3f} s",
                        found.speed.replace("(", "(pairs: "),
                        _off_to_on(*found.bytes),
                        found.loss,
                    )
                )
    return rows


def flags() -> list[str]:
    """The page of flags: our general flags, then those of the features, theme by theme."""
    from mindspeed_lite import runtime

    lines = ["## General", "", *(f"- {_flag(option)}: {option.help}" for option in runtime.GENERAL)]
    for heading, features in by_theme().items():
        lines += ["", f"## {heading}", ""]
        for feature in features:
            lines.append(f"- {', '.join(map(_flag, feature.options))} ({page_link(feature, '')}): {feature.summary}")
    return lines


def benchmarks() -> list[str]:
    """The index's list of what was measured, by the titles of the pages."""
    folder = DOCS / "benchmarks"
    found = sorted([*folder.glob("*.md"), *folder.glob("gpu/*.md")], key=_title)
    return [f"- [{_title(page)}]({page.relative_to(DOCS)})" for page in found]


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def defaults() -> list[str]:
    """The table of Megatron's defaults that are switched."""
    from mindspeed_lite.patches._shared.megatron_arguments import DEFAULTS

    when = (
        "on CPU, without the compiler that torch.compile looks for (`CXX`, else `g++`)",
        "not on CUDA, or not installed",
    )
    rows = {}
    for each in DEFAULTS:
        stand_in = each.stand_in.removeprefix("use_")
        beside = f"; not with [`--{stand_in.replace('_', '-')}`](features/{stand_in}.md)" if stand_in else ""
        rows[each.flag] = (f"`{each.flag}`", each.needs, when[bool(each.module)] + beside)
    return table(("As if you had written", "Megatron's default needs", "Switched when"), rows.values())


def mindspeed() -> list[str]:
    """What becomes of each flag of MindSpeed's, class by class."""
    from mindspeed_lite import runtime
    from mindspeed_lite.migration.table import CLASSES, flags

    ours = {option.flag for option in runtime.catalogue().options()}
    # As the page calls the outcomes.
    done = {
        "rename": "translated",
        "write": "translated",
        "drop": "left out",
        "launcher": "torchrun's",
        "skip": "skipped",
        "refuse": "refused",
        "keep": "as it is",
    }
    lines: list[str] = []
    found: dict[str, list[FlagRow]] = {kind: [] for kind in CLASSES}
    for row in flags().values():
        found["same" if row.flag in ours else row.kind].append(row)
    for kind, rows in found.items():
        lines += [f"### {kind.capitalize()}: {CLASSES[kind]} ({len(rows)})", ""]
        # Flags with the same outcome share a line.
        groups: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            outcome = done.get(row.outcome, "")
            text = {"": row.note, "as it is": "", "left out": ""}.get(outcome, row.instead)
            if row.kind == "model":
                text = row.note
            groups.setdefault((outcome, text), []).append(f"`{row.flag.replace('=', ' ')}`")
        # The page says that such flags are not listed.
        for outcome in sorted({each for each, _ in groups} - {"as it is"}):
            shared = [(text, names) for (each, text), names in sorted(groups.items()) if each == outcome]
            if outcome and len(shared) > 1:
                lines += [f"*{outcome}*", ""]
            label = f"{outcome}: " if outcome and len(shared) == 1 else ""
            for text, names in shared:
                lines.append(f"- {label}{', '.join(names)}" + (f": {text}" if text else ""))
            lines.append("")
    return lines[:-1]


def mindspeed_scripts() -> list[str]:
    """The launch scripts of MindSpeed-LLM, by the flags that each has, and whether they start."""
    from mindspeed_lite.migration import translate

    # Left out of every script, in the way that the page says above the table.
    common = {"--handler-name", "--enable-hf2mg-convert", "--no-shared-storage", "--mla-mm-split"}
    groups: dict[tuple[str, str], list[str]] = {}
    lines = (DOCS / "mindspeed_llm_scripts.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for script, flags in (line.split("\t") for line in lines):
        found = translate(flags.split())
        skipped = [each.use.flag for each in found.steps if each.outcome == "skipped" and each.use.flag not in common]
        starts = "with Transformer Engine" if "--experimental-attention-variant" in found.accepted else "yes"
        # The flags of such a model are in the list of all flags.
        refused = " ".join(each.partition(" (")[0] for each in found.refusals)
        key = ("no", refused) if refused else (starts, ", ".join(f"`{flag}`" for flag in dict.fromkeys(skipped)))
        groups.setdefault(key, []).append(f"`{script}`")
    count = {starts: sum(len(names) for key, names in groups.items() if key[0] == starts) for starts, _ in groups}
    engine = count["with Transformer Engine"]
    first = f"{count['yes'] + engine} of {len(lines)} start, {engine} of them with Transformer Engine."
    rows = [(", ".join(names), *key) for key, names in groups.items()]
    return [first, "", *table(("Scripts", "Starts", "Without, or why not"), rows)]


def with_transformer_engine() -> list[str]:
    """What each feature does with Transformer Engine's layers, and with quantized ones."""
    from mindspeed_lite import runtime
    from tests.te_contract.table import quantized

    found = transformer_engine()
    rows = []
    for each in runtime.catalogue():
        trains, why = found[each.name]
        refused = ", ".join(f"`{reason.split()[0]}`" for reason in quantized(each))
        rows.append((page_link(each, "../"), "yes" if trains else "no", why, refused))
    return table(("Feature", "Trained", "Why not, or what is left to Transformer Engine", "Not with"), rows)


EXAMPLES = {
    "llama3_8b.sh": "Llama-3-8B",
    "qwen2_5_7b.sh": "Qwen2.5-7B",
    "qwen3_30b_a3b.sh": "Qwen3-30B-A3B",
    "mixtral_8x7b.sh": "Mixtral-8x7B",
    "deepseek_v3.sh": "DeepSeek-V3",
}


def _command(script: str) -> list[str]:
    """The words that a launch script of examples/ would run."""
    command = ["bash", str(ROOT / "examples" / script), "--print"]
    return shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def memory_of_examples() -> list[str]:
    """What each launch script takes on the rank that takes most, as `mindspeed-lite plan --this` predicts it."""
    from mindspeed_lite import planner
    from mindspeed_lite.bench.wording import size

    rows = []
    for name, model in EXAMPLES.items():
        words = _command(name)
        devices = int(words[words.index("--nnodes") + 1]) * int(words[words.index("--nproc-per-node") + 1])
        first = (f"[{name}]({name})", model, str(devices))
        try:
            fullest = max(planner.ranks(planner.read(words, devices, "npu")), key=lambda rank: rank.total)
        except planner.ArgumentError as error:
            rows.append((*first, *[""] * 4, f"not predicted yet: {error}"))
            continue
        states = fullest.states
        parts = (states.weights, states.gradients, states.optimizer, fullest.activations)
        host = f" ({size(states.host)} in host memory)" if states.host else ""
        rows.append((*first, *(size(part) for part in parts), size(fullest.total) + host))
    headers = ("Script", "Model", "Devices", "Weights", "Gradients", "Optimizer", "Activations", "Total")
    return table(headers, rows)


def memory_of_stages() -> list[str]:
    """What ranks of DeepSeek-V3's launch script take, as predicted: where MTP is, and where most is taken."""
    from mindspeed_lite import planner
    from mindspeed_lite.bench.wording import size

    training = planner.read(_command("deepseek_v3.sh"), 1024, "npu")
    whole = training.replace(recompute_granularity="", recompute_method="", recompute_num_layers=0)
    rows = []
    for again, kept in zip(planner.ranks(training), planner.ranks(whole), strict=True):
        if again.stage not in (0, 1, training.pp - 2, training.pp - 1):
            continue
        first = (str(again.stage), str(again.layers), f"{again.parameters.total / 1e6:.4g} M")
        states = (size(again.states.weights + again.states.gradients), size(again.states.host))
        rows.append((*first, *states, size(kept.activations), size(again.activations), size(again.total)))
    headers = ("Stage", "Layers", "Parameters", "Weights and gradients", "States in host memory", "Activations")
    return table((*headers, "recomputed", "Total, recomputed"), rows)


def memory_of_contexts() -> list[str]:
    """What the launch script of Llama-3-8B takes with long sequences over more and more ranks, as predicted."""
    from mindspeed_lite import planner
    from mindspeed_lite.bench.wording import size

    words = _command("llama3_8b.sh")
    words += "--micro-batch-size 1 --context-parallel-algo megatron_cp_algo".split()
    whole = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    rows = []
    for length, name in ((1 << 17, "128k"), (1 << 20, "1M")):
        for ranks in (1, 8, 32):
            own = [*words, "--seq-length", str(length), "--context-parallel-size", str(ranks)]
            kept, again = (
                planner.ranks(planner.read([*own, *more], 8 * ranks, "npu"))[0] for more in ((), tuple(whole))
            )
            states = kept.total - kept.activations
            activations = (size(kept.activations), size(again.activations))
            rows.append((name, str(ranks), str(8 * ranks), size(states), *activations, size(kept.total)))
            rows[-1] += (size(again.total),)
    headers = ("Tokens", "CP", "Devices", "States", "Activations", "recomputed", "Total", "recomputed")
    return table(headers, rows)


def _conflicting_args(feature: Feature) -> list[tuple[str, str]]:
    """Megatron's arguments that skip a feature; those with the same reason share a line."""
    found: dict[str, list[str]] = {}
    for name, why in feature.conflicting_args.items():
        if name in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"):
            found.setdefault("[why](../support.md#cuda-graphs)", ["CUDA graphs"])
            continue
        # Most reasons start with the flag: "--cuda-graph-impl records a layer once".
        first, _, rest = why.partition(" ")
        flag, reason = (first.rstrip(":"), rest) if first.startswith("--") else (name, why)
        found.setdefault(reason, []).append(f"`{flag}`")
    return [(f"Skipped with {', '.join(dict.fromkeys(flags))}", reason) for reason, flags in found.items()]


def declaration(feature: Feature) -> list[str]:
    """What a feature's page says of its flags, targets and relations."""
    flags = []
    for option in feature.options:
        is_said = option.default in (False, None) or "(default" in option.help
        default = "" if is_said else f" (`{option.default}` unless given)"
        # The page's first sentence says what a switch alone does.
        text = "" if option.help == feature.summary else f": {option.help}"
        flags.append(f"{_flag(option)}{default}{text}")
    found: dict[tuple[str, str], list[str]] = {}
    for patch in feature.patches:
        found.setdefault((patch.kind, patch.versions), []).append(f"`{patch.target}`")
    swaps = [
        f"{kind}{f', Megatron-core {versions}' * bool(versions)}: {', '.join(targets)}"
        for (kind, versions), targets in found.items()
    ]
    facts = [("[Operators](../bench.md#operators)", ", ".join(f"`{each}`" for each in feature.operators))]
    facts += [(f"Requires [{each.feature}]({each.feature}.md)", each.reason) for each in feature.requires]
    facts += [(f"Conflicts with [{each.feature}]({each.feature}.md)", each.reason) for each in feature.conflicts]
    facts += _conflicting_args(feature)
    facts += [(f"Not in {releases}", why) for releases, why in feature.unsupported.items()]
    facts += [("Left off by auto", feature.not_auto), ("Memory", feature.memory)]
    lists = (("Flags", flags), ("Swaps", swaps), ("Notes", [f"{name}: {text}" for name, text in facts if text]))
    lines = ["## Declaration"]
    for title, entries in lists:
        if entries:
            lines += ["", f"{title}:", "", *(f"- {each}" for each in entries)]
    return lines


def renewed(path: Path, parts: dict[str, list[str]]) -> str:
    """A page's text with the parts between its markers renewed; a declaration is made at the end."""
    text = path.read_text(encoding="utf-8")
    for name, lines in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if name == "declaration" and begin not in text:
            text = f"{text.rstrip()}\n\n{begin}\n{end}\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{path.relative_to(ROOT)} has lost its markers {begin} and {end}")
        text = "\n".join([before + begin, *lines, end + after])
    return text


def pages() -> dict[Path, str]:
    """Every page that is generated, whole or in part."""
    from mindspeed_lite import runtime

    parts = {
        ROOT / "README.md": {"results": results(), "groups": groups()},
        ROOT / "examples" / "README.md": {"memory": memory_of_examples()},
        DOCS / "flags.md": {"flags": flags()},
        DOCS / "index.md": {"benchmarks": benchmarks()},
        DOCS / "defaults.md": {"defaults": defaults()},
        DOCS / "from-mindspeed.md": {"mindspeed": mindspeed(), "scripts": mindspeed_scripts()},
        DOCS / "guides" / "experts.md": {"deepseek": memory_of_stages()},
        DOCS / "guides" / "from-transformer-engine.md": {"table": with_transformer_engine()},
    }
    for feature in runtime.catalogue():
        page = DOCS / "features" / f"{feature.name}.md"
        if page.is_file():
            parts[page] = {"declaration": declaration(feature)}
    parts[DOCS / "features" / "context_parallel_algo.md"]["memory"] = memory_of_contexts()
    return {DOCS / "support.md": support(), **{page: renewed(page, its) for page, its in parts.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    check = parser.parse_args(arguments).check
    sys.path.insert(0, str(ROOT))
    written = pages()
    stale = [path for path, text in written.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} is out of date: run `python docs/generate.py`", file=sys.stderr)
        else:
            path.write_text(written[path], encoding="utf-8")
            print(f"{name} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
