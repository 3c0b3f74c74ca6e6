"""The journal below the device layer: what it sets comes back, by identity, and torch itself is never fooled."""

from __future__ import annotations

import os
import types

import pytest

from mindspeed_lite.platform.redirect import Redirects, for_the_host


def test_an_inherited_attribute_is_removed_again_and_not_copied():
    class Base:
        def to(self):
            return "base"

    class Derived(Base):
        pass

    redirects = Redirects()
    redirects.set(Derived, "to", lambda self: "derived")
    assert Derived().to() == "derived"
    redirects.close()
    assert "to" not in vars(Derived) and Derived().to() == "base"


def test_environment_defaults_leave_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv("REDIRECT_TEST_SET", "mine")
    monkeypatch.delenv("REDIRECT_TEST_UNSET", raising=False)
    redirects = Redirects()
    redirects.default_environment("REDIRECT_TEST_SET", "ours")
    redirects.default_environment("REDIRECT_TEST_UNSET", "ours")
    assert (os.environ["REDIRECT_TEST_SET"], os.environ["REDIRECT_TEST_UNSET"]) == ("mine", "ours")
    redirects.close()
    assert os.environ["REDIRECT_TEST_SET"] == "mine" and "REDIRECT_TEST_UNSET" not in os.environ


def test_a_function_is_followed_by_its_importers_and_layers_come_off_in_turn():
    library = types.ModuleType("library")
    exec("def f(x, *, y=1):\n    return 'original', x, y", library.__dict__)
    imported, lower, upper = library.f, Redirects(), Redirects()
    lower.wrap(library, "f", lambda original: lambda x, y: ("lower", original(x, y=y)))
    assert imported(2) == library.f(2, y=1) == ("lower", ("original", 2, 1))
    upper.wrap(library, "f", lambda original: lambda x, y: ("upper", original(x, y=y)))
    assert imported(3) == ("upper", ("lower", ("original", 3, 1)))
    upper.close()
    assert imported(4) == ("lower", ("original", 4, 1))
    lower.close()
    assert imported(5) == ("original", 5, 1) and library.f is imported and not vars(imported)


def asked_from(name, file):
    """What a module of this name and file gets to hear."""

    def question():
        return "original"

    with Redirects() as redirects:
        redirects.wrap(types.SimpleNamespace(question=question), "question",
                       lambda original: for_the_host(original, lambda: "changed"))  # fmt: skip
        scope = {"__name__": name, "question": question}
        exec(compile("def ask():\n    return question()\n", file, "exec"), scope)
        first = scope["ask"]()
        assert scope["ask"]() == first
    return first


@pytest.mark.parametrize(
    ("name", "file", "heard"),
    [
        ("torch._dynamo.probe", "/x/torch/_dynamo/probe.py", "original"),
        ("triton.probe", "/anywhere/triton/probe.py", "original"),
        ("mindspeed_lite.probe", "/checkout/mindspeed_lite/probe.py", "original"),
        ("some_library.probe", "/x/site-packages/some_library/probe.py", "original"),
        ("other_library.probe", "/x/dist-packages/other_library/probe.py", "original"),
        ("json.probe", "/usr/lib/python3/json/probe.py", "original"),
        ("megatron.core.probe", "/x/site-packages/megatron/core/probe.py", "changed"),
        ("megatron.training.probe", "/checkout/megatron/training/probe.py", "changed"),
        ("__main__", "/home/someone/train.py", "changed"),
        ("my_project.probe", "/home/someone/my_project/probe.py", "changed"),
    ],
)
def test_libraries_hear_the_truth_and_scripts_the_device_layer(name, file, heard):
    assert asked_from(name, file) == heard
