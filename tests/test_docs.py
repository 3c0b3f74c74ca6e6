"""The documentation: links lead somewhere, tables are current, examples run, names exist."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_lite import runtime
from mindspeed_lite.cli import COMMANDS, REMOVED, doctor_checks
from mindspeed_lite.platform.megatron import ASSUMPTIONS
from tests.harness.plans import applied, context_of, session_of
from tests.harness.process_groups import start
from tests.harness.processes import forked

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FLAGS = DOCS / "flags.md"
# Flags in README that are not Megatron's parser's: torchrun's and those of our subcommands.
OTHERS = {"--nproc-per-node", "--tiny", "--selftest"}


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text(page), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text(page), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_what_a_template_leaves_to_write_is_written() -> None:
    for path in (*PAGES, *(ROOT / "patches").glob("*.py")):
        assert "EDIT:" not in text(path), f"{path}: write what templates/new.py marked EDIT:"


def test_a_training_that_exercises_nothing_is_not_called_one() -> None:
    mark = runpy.run_path(str(DOCS / "support_page.py"))["_mark"]
    feature = runtime.catalogue()["use_fused_embedding"]

    def marked(layout: str) -> tuple[str, str]:
        ran = {"0.19.2": {feature.name: {"layout": layout, "fault": ""}}}
        found: tuple[str, str] = mark(feature, "0.19.2", True, ran)
        return found

    assert marked("tensor") == ("trained", "")
    # One rank holds all of the vocabulary.
    assert marked("plain") == ("read", "trained in the layout `plain` alone, where it has nothing to do")


def test_every_feature_has_its_page_and_every_page_its_feature() -> None:
    names = {feature.name for feature in runtime.catalogue()}
    assert {page.stem for page in (DOCS / "features").glob("*.md")} == names
    for feature in runtime.catalogue():
        page = text(DOCS / "features" / f"{feature.name}.md")
        assert page.startswith(f"# {feature.name}\n")
        assert f"*{feature.numerics}*" in page
        assert all(patch.target in page for patch in feature.patches)
        assert all(option.flag in page for option in feature.options)
        assert f"(features/{feature.name}.md)" in text(FLAGS)


def test_every_page_is_in_the_index() -> None:
    index = text(DOCS / "index.md")
    for page in DOCS.rglob("*.md"):
        if DOCS / "benchmarks" / "cpu" in page.parents:
            # A single report; the page of its device leads to it.
            assert f"({page.relative_to(DOCS / 'benchmarks')})" in text(DOCS / "benchmarks" / "cpu.md"), page
            continue
        # The page of flags, which the index has, leads to the features.
        is_led_to = page.name == "index.md" or page.parent.name == "features"
        assert is_led_to or f"({page.relative_to(DOCS)})" in index, page


def flags_in(page: Path) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text(page).replace("<!--", "").replace("-->", "")))


def test_flags_in_the_readme_and_on_their_page_exist() -> None:
    ours = {option.flag for option in (*runtime.GENERAL, *runtime.catalogue().options())}
    assert flags_in(FLAGS) - {"--allocator", "--bind"} == ours
    assert flags_in(README) - OTHERS <= ours
    assert flags_in(README) >= OTHERS, "OTHERS has a flag that README does not name"


def test_the_site_has_every_page_in_its_navigation() -> None:
    site = text(ROOT / "mkdocs.yml")
    for page in DOCS.rglob("*.md"):
        path = page.relative_to(DOCS)
        # A folder in the navigation stands for all pages in it.
        listed = [f": {path}", *(f": {folder}/" for folder in path.parents)]
        assert any(each in site for each in listed), f"{path} is not in mkdocs.yml"


def test_variables_on_their_page_exist_and_doctor_knows_them() -> None:
    # `bench` sets the first for its processes.
    public = set(json.loads(text(ROOT / "tests" / "golden" / "surface.json"))["environment"]) - {"MINDSPEED_LITE_BENCH"}
    assert set(re.findall(r"\bMINDSPEED_LITE_\w+", text(FLAGS))) == public == set(doctor_checks.VARIABLES)


@EVERY_PAGE
def test_commands_exist(page: Path) -> None:
    # In code only: in prose a word that follows the name is no subcommand.
    code = re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", text(page), re.MULTILINE | re.DOTALL)
    for line in "\n".join(part for parts in code for part in parts).splitlines():
        for word in re.findall(r"(?<![\w-])(?:mindspeed-lite|-m mindspeed_lite) +([\w-]+)", line):
            is_known = word in COMMANDS or (word in REMOVED and page.name == "CHANGELOG.md")
            assert is_known, f"`{line.strip()}`: there is no command {word}"


@EVERY_PAGE
def test_examples_compile(page: Path) -> None:
    for number, block in enumerate(blocks(page, "python")):
        compile(block, f"{page.name}, example {number + 1}", "exec")


def test_every_assumption_of_the_device_layer_is_documented() -> None:
    page = text(DOCS / "device-layer.md")
    assert all(f"`{feature.name}`" in page for feature in ASSUMPTIONS)


@forked("megatron")
def test_the_example_patch_works_in_megatron(tmp_path: Path) -> None:
    from megatron.core import tensor_parallel as held_by_value

    (example,) = (block for block in blocks(DOCS / "writing-a-patch.md", "python") if "FEATURE = " in block)
    (tmp_path / "torch_cross_entropy.py").write_text(example, encoding="utf-8")
    sys.path.insert(0, str(tmp_path))
    feature = importlib.import_module("torch_cross_entropy").FEATURE
    start()
    logits, target = torch.randn(5, 2, 11), torch.randint(0, 11, (5, 2))

    def run(**arguments: float) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        losses = held_by_value.vocab_parallel_cross_entropy(leaf * 1, target, **arguments)
        losses.sum().backward()
        assert leaf.grad is not None
        return losses.detach(), leaf.grad

    original = held_by_value.vocab_parallel_cross_entropy
    code = original.__code__
    off, smoothed_off = run(), run(label_smoothing=0.1)
    session = session_of(context_of([feature]))
    with applied(feature, session=session):
        assert held_by_value.vocab_parallel_cross_entropy is original and original.__code__ is not code
        on = run()
        assert not session.report.fallbacks
        smoothed_on = run(label_smoothing=0.1)
        assert [each.feature for each in session.report.fallbacks] == ["torch_cross_entropy"]
    assert original.__code__ is code
    # A loss of about 3 from fp32 sums of 11 terms: a few units in the last place.
    torch.testing.assert_close(on, off, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(smoothed_on, smoothed_off, rtol=0, atol=0)
    two = context_of([feature], tensor_model_parallel_size=2, cross_entropy_loss_fusion=True)
    assert len(feature.condition(two)) == 2


@pytest.mark.parametrize("page", sorted((DOCS / "features").glob("*.md")), ids=lambda page: page.stem)
def test_a_features_page_says_each_thing_once(page: Path) -> None:
    text = re.sub(r"<!-- (\w+): begin -->.*<!-- \1: end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(text.split()) <= 250
