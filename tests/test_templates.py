"""templates/, instantiated in a copy of the repository: their files alone make what all tools see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from tests.harness import matrix
from tests.harness.processes import forked

ROOT = Path(__file__).resolve().parents[1]
NAME = "quick_gelu"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# With a line in CHANGELOG.md that is the eighth.
MOST_FILES = 7

JUDGE = f"""
from mindspeed_lite.bench.selftest import numerics, perform
checks = [check for check in numerics.checks("cpu", True) if "{NAME}" in check.name]
assert [check.group for check in checks] == ["numerics"] * 5, checks
for line in map(perform, checks):
    assert line["status"] == "ok", line
# Its calls need torch_npu, and are proven by a test of the whole run.
from tests.npu_contract.operators import CALLS
assert any(each.startswith("{NAME}/") for each in CALLS), CALLS
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the template's operator in it."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("mindspeed_lite", "patches", "tests", "docs", "tools", "examples", "benchmarks", "lab"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "setup.py"):
        shutil.copy(ROOT / name, root / name)
    if (ROOT / ".npu").is_dir():
        (root / ".npu").symlink_to(ROOT / ".npu")
    made = python(ROOT, "templates/new.py", "operator", NAME, "--root", root).stdout.split()
    assert len(made) <= MOST_FILES
    return root


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "MINDSPEED_LITE_ALLOCATOR": "system"}


def python(root: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python in `root` with its package; an exit status other than 0 fails."""
    ran = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=root,
        env=environment(root),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran


def test_its_own_tests_and_those_that_walk_all_operators_pass(checkout: Path) -> None:
    files = ("tests/ops/test_operators.py", "tests/ops/test_npu.py")
    python(checkout, *PYTEST, f"tests/ops/test_{NAME}.py", *files, "-k", NAME)


def test_the_self_test_judges_it(checkout: Path) -> None:
    python(checkout, "-c", JUDGE)


@matrix.whole
def test_its_calls_of_torch_npu_keep_their_contract(checkout: Path) -> None:
    if os.environ.get("NPU_CONTRACT") not in ("1", "auto") or not (ROOT / ".npu").is_dir():
        pytest.skip("needs torch_npu in .npu: make test-npu")
    python(checkout, *PYTEST, "tests/npu_contract", "-k", NAME)


def test_it_is_not_written_over_and_its_name_is_a_name(checkout: Path) -> None:
    for name, word in ((NAME, "exists already"), ("Quick-GELU", "lower-case")):
        with pytest.raises(AssertionError, match=word):
            python(ROOT, "templates/new.py", "operator", name, "--root", checkout)


def test_a_fixture_that_a_forked_test_cannot_have_is_named() -> None:
    with pytest.raises(TypeError, match="`capsys` cannot be pickled"):
        forked()(lambda tmp_path, capsys: None)(tmp_path=Path(), capsys=sys)


FEATURE = "quick_divide"
# With a line in CHANGELOG.md that is the fourth.
MOST_FEATURE_FILES = 3


def test_a_feature_is_its_files_and_what_is_generated_from_them(checkout: Path) -> None:
    made = python(ROOT, "templates/new.py", "feature", FEATURE, "--root", checkout).stdout.split()
    assert len(made) <= MOST_FEATURE_FILES
    release, site = metadata.version("megatron-core"), sysconfig.get_path("purelib")
    python(checkout, "-m", "tools.fingerprints", "--root", f"{release}={site}")
    python(checkout, "docs/generate.py")
    walks = ("tests/patches/test_kinds.py", "tests/patches/test_reads.py", f"tests/patches/test_{FEATURE}.py")
    rules = f"{FEATURE} or one_name or public_surface or every_feature_says"
    files = (*walks, "tests/test_docs.py", "tests/test_architecture.py")
    walked = [sys.executable, *PYTEST, *files, "--update", "-k", f"{rules} or template"]
    ran = subprocess.run(walked, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
    failed = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("FAILED")]
    assert failed == ["tests/test_docs.py::test_what_a_template_leaves_to_write_is_written"], ran.stdout[-3000:]
    for page in ("tests/golden/surface.json", "docs/flags.md"):
        assert "--quick-divide" in (checkout / page).read_text()
    assert f"features/{FEATURE}.md" in (checkout / "README.md").read_text()
