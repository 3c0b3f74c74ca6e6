"""The wheel holds everything the checkout imports, under the same names."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_imports_from_anywhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in tracked:
        if name.startswith(("mindspeed_lite/", "patches/", "setup.py", "pyproject.toml", "README.md")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in names if name.startswith(("tests/", "demo/", "patches/", "examples/"))]
    for name in tracked:
        folder = name.partition("/")[0]
        if folder in ("mindspeed_lite", "patches") and name.endswith(
            (".py", ".json", ".j2", ".tsv", ".cpp", ".h", "py.typed")
        ):
            packed = name if folder == "mindspeed_lite" else f"mindspeed_lite/{name}"
            assert packed in names, packed
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    page = zipfile.ZipFile(wheel).read(metadata).decode().partition("\n\n")[2]
    assert page.startswith("# mindspeed_lite\n") and "import mindspeed_lite.megatron_adaptor" in page
    assert not re.findall(r"\]\((?![a-z]+:)|<!--", page), "an index page has no file of the repository"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mindspeed_lite, mindspeed_lite.patches as p;"
        "from mindspeed_lite.runtime import catalogue, fingerprints;"
        "assert mindspeed_lite.__file__.startswith(sys.argv[1]) and p.__file__.startswith(sys.argv[1]);"
        "print(len(catalogue()), len(fingerprints().entries))"
    )
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, str(site)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(len([n for n in tracked if _is_feature(n)])), "9"]


def _is_feature(name: str) -> bool:
    return name.startswith("patches/") and name.endswith(".py") and not name.startswith("patches/_")
