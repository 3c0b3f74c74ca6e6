"""`mindspeed_lite.ops.native`: values as exact as promised, and one clear reason whenever there is no kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from mindspeed_lite.ops import native, traced
from mindspeed_lite.platform import cache

PROBE = Path(__file__).with_name("probe.cpp")
library = native.Library(PROBE)
compiled = pytest.mark.skipif(library.unusable() is not None, reason=str(library.unusable()))

EVERY = torch.cat(
    [
        torch.linspace(-90, 90, 1_000_003),
        torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 1e-3,
        torch.tensor([0.0, -0.0, 88.72, 88.73, -87.3, -87.34, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, 1e-45]),
    ]
)


@compiled
@pytest.mark.parametrize(
    ("name", "function", "units"),
    [
        ("exponential", torch.exp, 1.5),
        ("power", torch.exp2, 1.5),
    ],
)
def test_functions_are_exact_to_a_few_units_in_the_last_place(name, function, units):
    got = torch.empty_like(EVERY)
    getattr(library, name)(EVERY.data_ptr(), got.data_ptr(), EVERY.numel(), 2)
    exact = function(EVERY.double())
    expected = exact.float()
    normal = expected.isfinite() & (expected.abs() >= torch.finfo(torch.float32).tiny)
    unit = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
    assert float(((got.double() - exact).abs() / unit.double())[normal].max()) <= units
    # Infinities and NaN are the same; what would be subnormal may be zero.
    special = ~expected.isfinite()
    assert torch.equal(got[special].nan_to_num(7.0), expected[special].nan_to_num(7.0))
    assert float((got - expected)[~special & ~normal].abs().max()) <= torch.finfo(torch.float32).tiny


@compiled
def test_bfloat16_rounds_as_pytorch_does_for_every_kind_of_number():
    bits = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16) + 0x8000
    x = torch.cat([bits, ties, ties - 1, ties + 1]).view(torch.float32)
    got = torch.empty(x.shape, dtype=torch.bfloat16)
    library.narrow(x.data_ptr(), got.data_ptr(), x.numel())
    expected = x.bfloat16()
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(got[number].view(torch.int16), expected[number].view(torch.int16))

    back = torch.empty(x.shape)
    library.widen(got.data_ptr(), back.data_ptr(), x.numel())
    assert torch.equal(back[number], expected[number].float())


@compiled
def test_rows_and_pairs_of_rows_round_as_single_numbers_do():
    # Numbers in and around blocks of 16; none below the normal range, which AVX-512 BF16 takes as zero.
    for count in (1, 15, 16, 33, 64):
        first, second = torch.randn(2, count, generator=torch.Generator().manual_seed(count))
        first[0], second[-1] = torch.nan, torch.inf
        got, pairs = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, 2, dtype=torch.bfloat16)
        library.narrow_row(first.data_ptr(), got.data_ptr(), count)
        library.narrow_pairs(first.data_ptr(), second.data_ptr(), pairs.data_ptr(), count)
        torch.testing.assert_close(got, first.bfloat16(), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(pairs, torch.stack((first, second), 1).bfloat16(), rtol=0, atol=0, equal_nan=True)


@compiled
def test_powers_of_two_end_in_zero_and_infinity():
    x = torch.tensor([-126.0, -127.0, -127.4, -1e30, -torch.inf, 127.0, 127.6, 128.0, 1e30, torch.inf, 0.0, torch.nan])
    got = torch.empty_like(x)
    library.power(x.data_ptr(), got.data_ptr(), x.numel(), 1)
    zero, most = [0.0] * 4, [torch.inf] * 4
    assert got[:-1].tolist() == [2.0**-126, *zero, 2.0**127, *most, 1.0] and got[-1].isnan()


@compiled
def test_an_unknown_function_is_named():
    with pytest.raises(AttributeError, match="cpu_missing"):
        _ = library.cpu_missing


@pytest.fixture
def reason(monkeypatch, tmp_path):
    """What is said about a source, with this environment, where nothing has been asked before."""

    def ask(source, folder=None, **environment):
        with monkeypatch.context() as now:
            now.setenv("MINDSPEED_LITE_CACHE", str(tmp_path / "cache" if folder is None else folder))
            for name, value in environment.items():
                now.setenv(name, value)
            now.setattr(tempfile, "tempdir", environment.get("TMPDIR"))
            for each in (native._compiler, native._version, cache.folder):
                now.setattr(native if each is not cache.folder else cache, each.__name__, each.__wrapped__)
            return native.Library(source).unusable()

    return ask


@pytest.fixture
def source(tmp_path):
    """A kernel that is compiled in no time."""
    made = tmp_path / "op" / "cpu.cpp"
    made.parent.mkdir()
    made.write_text('extern "C" void narrow(const void*, char* out, long) { *out = 7; }')
    return made


def test_without_a_compiler_the_reason_says_what_was_looked_for(reason, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for nothing in ("", " "):
        assert "no C++ compiler (looked for g++, clang++ and c++" in reason(PROBE, PATH=str(empty), CXX=nothing)


@pytest.mark.parametrize(
    ("chosen", "program", "text"),
    [
        ("no-such-compiler", None, "CXX names no-such-compiler"),
        ("g++ 'x", None, 'CXX is "g++ \'x": No closing quotation'),
        ("{}", "not a program", "does not run"),
        (
            "{}",
            "#!/bin/sh\nprintf 'caf\\351: error \\377\\n' | tee /dev/stderr\nexit 1\n",
            r"does not compile ops/probe.cpp: caf\xe9: error \xff",
        ),
        ("{}", "#!/bin/sh\n", "reports success and has written no library"),
    ],
    ids=["missing", "quote", "no program", "not UTF-8", "does nothing"],
)
def test_what_a_compiler_may_be_is_a_reason(reason, tmp_path, chosen, program, text):
    compiler = tmp_path / "compiler"
    if program is not None:
        made_executable(compiler, program)
    assert text in reason(PROBE, CXX=chosen.format(compiler))


def made_executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@compiled
def test_a_source_that_does_not_compile_or_load_is_a_reason(reason, source):
    source.write_text("int main( {")
    assert "does not compile op/cpu.cpp" in reason(source)
    source.write_text('extern "C" void gone(); extern "C" void narrow() { gone(); }')
    # Never a crash at the first call: what is missing shows when the library is loaded.
    assert "does not load" in reason(source)
    # As clang does, where this PyTorch has GCC's runtime.
    source.write_text('extern "C" void __kmpc_none(); extern "C" void narrow() { __kmpc_none(); }')
    assert "install g++, or let the variable CXX name it" in reason(source)


@compiled
def test_a_library_that_others_may_have_written_is_not_loaded(monkeypatch, reason, source, tmp_path):
    assert reason(source) is None
    (path,) = (tmp_path / "cache").glob("*.so")
    path.chmod(0o770)
    assert reason(source) is None and path.stat().st_mode & 0o777 == 0o700
    me = os.getuid()
    monkeypatch.setattr(native.cache, "folder", lambda: path.parent)
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    reason_of_another = native.Library(source).unusable()
    assert f"{path} belongs to another user, whose code would be loaded" in reason_of_another


@compiled
@pytest.mark.parametrize("offset", [0, 8])
def test_a_tensor_without_memory_is_an_error_and_no_crash(offset):
    released = torch.zeros(16)
    x, got = released[offset:], torch.empty(16)
    released.untyped_storage().resize_(0)
    for given in (x, torch.empty(8, device="meta")):
        with pytest.raises(traced.NoMemoryError, match=r"shape \[\d+\] whose memory is released"):
            library.exponential(given, got, 8, 1)
    library.exponential(x[:0], got, 0, 1)
    with pytest.raises(traced.NoMemoryError):
        traced.address(x)


@compiled
def test_where_no_folder_can_be_written_is_a_reason(reason, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    # Temporary files lie in this folder: the one of this user's among them belongs to nobody else, but is a file.
    (tmp_path / f"mindspeed_lite-{os.getuid()}").write_text("")
    assert "MINDSPEED_LITE_CACHE may name one" in reason(PROBE, blocked / "below", TMPDIR=str(tmp_path))


@compiled
def test_a_folder_that_is_refused_gives_way_to_one_of_this_users_own(reason, source, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert reason(source, shared, TMPDIR=str(tmp_path)) is None
    assert not list(shared.iterdir()) and list((tmp_path / f"mindspeed_lite-{os.getuid()}").glob("*.so"))


@compiled
def test_another_pytorch_has_kernels_of_its_own(monkeypatch, reason, source, tmp_path):
    assert reason(source) is None
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert reason(source) is None
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


@compiled
def test_many_processes_compile_once_and_all_load_it(source, tmp_path):
    counter = tmp_path / "count"
    compiler = made_executable(
        tmp_path / "compiler", f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> {counter};; esac\nexec c++ "$@"\n'
    )
    if shutil.which("c++") is None:
        pytest.skip("the test's own compiler is a wrapper around c++")
    code = (
        "from pathlib import Path; from mindspeed_lite.ops import native; "
        f"assert native.Library(Path({str(source)!r})).unusable() is None"
    )
    environment = {**os.environ, "MINDSPEED_LITE_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [each.wait() for each in started] == [0, 0, 0]
    assert counter.read_text().count("x") == 1
