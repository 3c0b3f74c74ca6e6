"""The three forms of a report: they say what it holds, plainly and without harm, whatever is missing."""

from __future__ import annotations

import copy
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.bench import plot_theme, plots, render_html, render_markdown, render_text, wording
from mindspeed_lite.bench.render_summary import findings, headline
from mindspeed_lite.bench.statistics import paired_ratio
from tests.harness import bench_reports, matrix

pytest.importorskip("rich")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

ANSI = re.compile(r"\x1b\[")
NAMES = pytest.mark.parametrize("name", sorted(bench_reports.EVERY))
# Those that draw every plot: a whole report and the one with least in it.
DRAWN = pytest.mark.parametrize("name", matrix.only(["broken", "full"], sorted(bench_reports.EVERY)))
BARE = {"loss": ("<svg></svg>", "<svg></svg>")}


class Page(HTMLParser):
    """The text of a page and the tags in it, outside of its style sheet."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self._style = False
        self.feed(source)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if not self._style:
            self.parts.append(data)


def html(report: dict[str, Any]) -> str:
    """The page without the time that real plots take."""
    return render_html.render(report, BARE)


def forms(report: dict[str, Any]) -> Iterator[str]:
    """The text of all three forms, blanks folded, the markup of Markdown undone."""
    yield " ".join(render_text.render(report, 200, False).split())
    markdown = render_markdown.render(report)
    markdown = markdown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    yield " ".join(re.sub(r"\\([^\w\s])", r"\1", markdown).replace("\\_", "_").split())
    yield Page(html(report)).text


def test_facts_of_a_full_report() -> None:
    for text in forms(bench_reports.full()):
        assert "all is 1.25x as fast as off (95 % interval 1.22 to 1.27, 3 pairs)" in text
        assert "smaller: 0.706x the peak memory of off" in text
        assert "1.007x, inside the noise" in text
        assert "largest difference 6.80e-05 at iteration 14; 0.756 times that of the rounding baseline" in text
        for fact in ("identical", "412.0 ms", "79,534 tokens/s", "21.4 GB", "gradient accumulation", "189.5 ms (46 %)"):
            assert fact in text
        assert "NVIDIA H100 80GB HBM3" in text and "OMP_NUM_THREADS=8" in text and "megatron-core 0.16.0" in text
        assert bench_reports.SCRIPT in text
        assert "The clock of the device fell by 4 % | during run 2 of `off`." in text
        assert "'a | b `c` <d>'" in text


def test_an_incomplete_report_says_so_and_why() -> None:
    for text in forms(bench_reports.broken()):
        assert wording.INCOMPLETE in text
        assert "runs 1, 2 and 3 crashed (exit code 1): out of memory <b>in</b> step 3" in text
        assert "run 2 hung: no step for 1800 s" in text
        assert "0 of 3 ok, 3 crashed" in text and "1 of 2 ok, 1 hung" in text
        assert "Not the same in all runs: OMP_NUM_THREADS: 8 in off, 4 in all" in text
        assert "RuntimeError: </pre><script>alert('log')</script> ``` out | of memory" in text
        assert "grows by 2.50 MB a step" in text


def test_one_pair_has_no_interval_and_no_praise() -> None:
    for text in forms(bench_reports.single()):
        assert wording.ONE_PAIR in text
        assert "1.22x as fast as off in its only pair: no interval, so this may be noise" in text
        assert "95 % interval 1." not in text
    assert headline(bench_reports.single()).tone == "neutral"


def test_an_interval_that_says_nothing_is_not_shown() -> None:
    report = bench_reports.full()
    report["comparisons"] = report["comparisons"][:1]
    speed = paired_ratio([1.0, 5.0], [1.1, 1.0])
    assert speed is not None and speed.low is not None and speed.high is not None and speed.low < 0.01
    report["comparisons"][0]["speed"] = {
        "ratio": speed.ratio, "low": speed.low, "high": speed.high, "pairs": list(speed.pairs),
        "verdict": speed.verdict("faster", "slower"),
    }  # fmt: skip
    for text in forms(report):
        assert "Too few runs to tell whether" in text and "0.91x to 5.00x in 2 pairs; raise --repeats" in text
        assert "does not differ" not in text and "2.13x" not in text and " to 2,1" not in text


def test_noise_is_called_noise() -> None:
    report = bench_reports.full()
    report["comparisons"] = [report["comparisons"][1]]
    for text in forms(report):
        assert "use_fused_rmsnorm does not differ in speed from off outside the noise" in text


def test_a_faster_arm_that_trains_differently_is_no_success() -> None:
    report = bench_reports.diverged()
    for text in forms(report):
        assert "Every arm that was compared trains differently from off." in text
        assert "largest difference nan at iteration 8" in text
    assert headline(report).tone == "bad"
    assert [each.arm for each in findings(report) if each.severity == "failure"] == ["use_flash_attn"]


def test_operators() -> None:
    for text in forms(bench_reports.operators()):
        assert "1 case is slower than in the earlier run. mindspeed_lite reaches 87.0 % of the ceiling" in text
        assert "ImportError: <b>liger</b> | not installed" in text
        assert "[2, 16, 2048, 64] bfloat16 causal | no <mask>" in text
        for fact in ("2.60 TB/s", "8.00 TFLOP/s", "29.9 %", "2.91x (2.79 to 3.05)", "did not run", "0.74x, regression"):
            assert fact in text


def test_findings_are_not_said_twice() -> None:
    report = bench_reports.broken()
    report["findings"] = [{"severity": "failure", "arm": "use_flash_attn", "text": "It crashed in every run."}]
    said = [each.text for each in findings(report) if each.arm == "use_flash_attn"]
    assert said == ["It crashed in every run."]


@NAMES
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_keep_to_the_width(name: str, columns: int) -> None:
    text = render_text.render(bench_reports.EVERY[name](), columns, False)
    assert not [line for line in text.splitlines() if len(line) > columns]
    assert not ANSI.search(text) and text.isascii()
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    painted = render_text.render(bench_reports.EVERY[name](), columns, True)
    assert ANSI.search(painted)
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", painted)
    assert [line.rstrip() for line in stripped.splitlines()] == text.splitlines()


def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render_text.render(bench_reports.full(), 80, False)
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    assert render_text.render(bench_reports.full(), 80, False) == before


@NAMES
def test_markdown_tables_are_whole(name: str) -> None:
    lines = render_markdown.render(bench_reports.EVERY[name]()).splitlines()
    fenced = False
    width: int | None = None
    for line in lines:
        fenced ^= line.startswith("```")
        if fenced or not line.startswith("|"):
            width = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        assert width in (None, cells), line
        width = cells
        assert "<" not in line
    assert not fenced


def test_markdown_fences_hold_backticks() -> None:
    report = bench_reports.broken()
    text = render_markdown.render(report)
    assert "````text\nTraceback" in text
    assert "![Loss of every arm, and its difference from off](loss.png)" in text


@DRAWN
def test_the_page_fetches_nothing_and_runs_nothing(name: str) -> None:
    report = bench_reports.EVERY[name]()
    source = render_html.render(report)
    page = Page(source)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not {"link", "iframe", "object", "img", "base", "form"} & {tag for tag, _ in page.tags}
    assert "http:" not in source and "https:" not in source and "@import" not in source and "http-equiv" not in source
    for _, attributes in page.tags:
        assert not [key for key in attributes if key.startswith("on")]
        for key in ("href", "src", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#")
    assert page.text.count("alert(") == str(report).count("alert(")


@matrix.whole
def test_plots_in_the_page_are_light_and_dark_and_keep_apart() -> None:
    report = bench_reports.full()
    source = render_html.render(report)
    tags = Page(source).tags
    assert sum(tag == "svg" for tag, _ in tags) == 8
    assert source.count('<div class="light"><svg') == source.count('<div class="dark"><svg') == 4
    ids = [attributes["id"] for _, attributes in tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    used = {*re.findall(r'href="#([^"]+)"', source), *re.findall(r"url\(#([^)]+)\)", source)}
    assert used and used <= set(ids)
    for light, dark in plots.svg(report).values():
        assert plot_theme.theme(report, True).text in dark and plots.theme(report, False).text in light
        assert "<metadata" not in light and "<style" not in light


@DRAWN
def test_png_files(name: str, tmp_path: Path) -> None:
    report = bench_reports.EVERY[name]()
    names = plots.draw(report, tmp_path / "plots")
    bench = ["step-time.png", "loss.png", "memory.png", "breakdown.png"]
    assert names == (["operators-rms_norm.png", "operators-attention.png"] if name == "operators" else bench)
    for each in names:
        data = (tmp_path / "plots" / each).read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and len(data) > 8000
        assert 1000 < width < 2000 and 200 < height < 3000


def test_many_cases_of_an_operator_are_pages(tmp_path: Path) -> None:
    report = bench_reports.operators()
    report["rows"] = [{**report["rows"][0], "case": f"case {at}"} for at in range(23)]
    names = plots.draw(report, tmp_path)
    assert names == ["operators-rms_norm.png", "operators-rms_norm-2.png", "operators-rms_norm-3.png"]
    for each in names:
        assert struct.unpack(">II", (tmp_path / each).read_bytes()[16:24])[1] < 2000


def test_nothing_is_drawn_from_nothing(tmp_path: Path) -> None:
    report = {"schema_version": 1, "kind": "bench", "complete": False}
    assert plots.draw(report, tmp_path) == [] and plots.svg(report) == {}
    for text in forms(report):
        assert "Nothing could be compared" in text and wording.INCOMPLETE in text


def test_colors_of_arms_are_their_own_and_off_is_neutral() -> None:
    look = plot_theme.theme(bench_reports.crowd(), dark=False)
    assert len(set(look.arms.values())) == len(look.arms) and look.arm("off") == look.off


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything below `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield (*path, key)
        yield from places(each, (*path, key))


def spoil(report: dict[str, Any], path: tuple[Any, ...], how: str) -> dict[str, Any]:
    """The report without what is at this path, or with null or a number that is none in its place."""
    changed = copy.deepcopy(report)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    if how == "drop":
        del holder[path[-1]]
    else:
        holder[path[-1]] = None if how == "null" else "nan"
    return changed


def slim(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A report with few steps: one of them stands for all."""
    report = make()
    for arm in report.get("arms", ()):
        for run in arm["runs"]:
            del run["steps"][3:]
    for comparison in report.get("comparisons", ()):
        del comparison["loss"]["series"][3:]
    return report


@DRAWN
def test_what_is_not_known_breaks_nothing(name: str) -> None:
    report = slim(bench_reports.EVERY[name])
    every = sorted(places(report), key=str)
    chosen = random.Random(name).sample(every, min(30, len(every)))
    fields = [path for path in every if len(path) < 3 or path[0] in ("comparisons", "rows", "ceiling")]
    for at, path in enumerate([*chosen, *random.Random(name).sample(fields, min(30, len(fields)))]):
        changed = spoil(report, path, ("drop", "null", "nan")[at % 3])
        render_text.render(changed, 80, False)
        render_markdown.render(changed)
        html(changed)


@DRAWN
def test_plots_stand_what_is_not_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    # Building the figures is what may fail; to put them into files takes most of the time.
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    report = slim(bench_reports.EVERY[name])
    wanted = ("arms", "comparisons", "rows")
    every = [path for path in sorted(places(report), key=str) if path[0] in wanted]
    for at, path in enumerate(random.Random(name).sample(every, 12)):
        plots.draw(spoil(report, path, ("drop", "null", "nan")[at % 3]), tmp_path)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (wording.seconds(1.2344), "1.234 s"),
        (wording.seconds(0.0123456), "12.35 ms"),
        (wording.seconds(9.9999e-4), "1.000 ms"),
        (wording.seconds(4.2e-7), "420.0 ns"),
        (wording.seconds(0), "0 s"),
        (wording.seconds("nan"), "nan"),
        (wording.seconds(None), "-"),
        (wording.size(812e6), "812 MB"),
        (wording.size(1.523e9), "1.52 GB"),
        (wording.size(999.9e6), "1.00 GB"),
        (wording.size(0), "0 B"),
        (wording.rate(3.35e12, "B"), "3.35 TB/s"),
        (wording.rate(812e12, "FLOP"), "812 TFLOP/s"),
        (wording.tokens(12345.6), "12,346 tokens/s"),
        (wording.tokens(3.21), "3.21 tokens/s"),
        (wording.percent(0.4123), "41.2 %"),
        (wording.between(0.4058, 0.4202), "405.8 to 420.2 ms"),
        (wording.between(0.999, 1.2), "999.0 ms to 1.200 s"),
        (wording.times({"ratio": 1.243}), "1.24x"),
        (wording.times({"ratio": 1.004}), "1.004x"),
        (wording.plain("\x1b[31mred\x1b[0m\x07 [bold]"), "red [bold]"),
        (wording.list_words(["a", "b", "c"]), "a, b and c"),
        (wording.list_words([]), ""),
    ],
)
def test_words(said: str, expected: str) -> None:
    assert said == expected


def test_importing_costs_no_matplotlib() -> None:
    # What mindspeed_lite itself brings along does not count.
    code = (
        "import sys, mindspeed_lite; before = set(sys.modules);"
        "from mindspeed_lite.bench import plots, render_html, render_markdown, render_text;"
        "sys.exit(bool({'matplotlib', 'rich', 'jinja2'} & (set(sys.modules) - before)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("matplotlib", lambda report, folder: plots.draw(report, folder)),
        ("rich.console", lambda report, folder: render_text.render(report, 80, False)),
        ("jinja2", lambda report, folder: html(report)),
    ],
)
def test_a_missing_library_is_named(
    module: str, call: Callable[[Any, Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render_html._template.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'mindspeed-lite\[bench\]'"):
        call(bench_reports.single(), tmp_path)


def test_experts_exchange_is_a_table_in_every_form() -> None:
    from types import SimpleNamespace

    from mindspeed_lite.bench import compose
    from mindspeed_lite.bench.render_tables import experts_table

    told = [
        {
            "step_seconds": 2.0,
            "exposed_seconds": 0.5,
            "dispatch_seconds": 0.2,
            "combine_seconds": 0.4,
            "sent": {"1": 70},
        },
        {
            "step_seconds": 2.1,
            "exposed_seconds": 0.4,
            "dispatch_seconds": 0.4,
            "combine_seconds": 0.6,
            "sent": {"0": 90},
        },
    ]
    processes = [SimpleNamespace(rank=rank, experts=each) for rank, each in enumerate(told)]
    found = compose._experts([SimpleNamespace(processes=processes)])
    assert found is not None and found["bytes"] == [[0, 70], [90, 0]]
    assert (found["exposed_seconds"], found["exposed_share"]) == (0.5, 0.25)
    assert found["in_flight_seconds"] == pytest.approx({"dispatch": 0.3, "combine": 0.5})
    assert compose._experts([SimpleNamespace(processes=[SimpleNamespace(rank=0, experts=None)])]) is None
    report = {"kind": "bench", "arms": [{"name": "off", "experts": found}, {"name": "on", "experts": None}]}
    table = experts_table(report)
    assert table is not None
    assert table.rows == [["off", "500.0 ms", "25.0 %", "300.0 ms", "500.0 ms", "90.0 B", "90.0 B (1 to 0)"]]
    assert experts_table({"arms": [{"name": "off"}]}) is None
