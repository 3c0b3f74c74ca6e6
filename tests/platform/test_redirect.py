"""The journal below the device layer: what it sets comes back, by identity, and torch itself is never fooled."""

from __future__ import annotations

import os
import sys
import types

import pytest

from mindspeed_lite.platform.redirect import Redirects, for_the_host


@pytest.fixture
def module(monkeypatch):
    """`module(name, source)` makes a loaded module."""

    def make(name, source="", **names):
        made = types.ModuleType(name)
        made.__dict__.update(names)
        exec(source, made.__dict__)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


# Made anew for each test: a module that holds the replacement by value counts as an importer.
@pytest.fixture
def functions():
    return (lambda: "original"), (lambda: "changed")


def test_an_inherited_attribute_is_removed_again_and_not_copied():
    class Base:
        def to(self):
            return "base"

    class Derived(Base):
        pass

    redirects = Redirects()
    redirects.set(Derived, "to", lambda self: "derived")
    assert Derived().to() == "derived"
    redirects.undo()
    assert "to" not in vars(Derived) and Derived().to() == "base"


def test_environment_defaults_leave_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv("REDIRECT_TEST_SET", "mine")
    monkeypatch.delenv("REDIRECT_TEST_UNSET", raising=False)
    redirects = Redirects()
    redirects.default_environment("REDIRECT_TEST_SET", "ours")
    redirects.default_environment("REDIRECT_TEST_UNSET", "ours")
    assert (os.environ["REDIRECT_TEST_SET"], os.environ["REDIRECT_TEST_UNSET"]) == ("mine", "ours")
    redirects.undo()
    assert os.environ["REDIRECT_TEST_SET"] == "mine" and "REDIRECT_TEST_UNSET" not in os.environ


def test_importers_by_value_follow_whenever_they_were_loaded(module, functions):
    original, changed = functions
    library = module("library", f=original)
    before = module("loaded_before", "from library import f as alias")
    redirects = Redirects()
    redirects.set(library, "f", changed)
    redirects.set(library, "g", changed)
    redirects.rebind_importers()
    after = module("loaded_after", "from library import f")
    assert before.alias is changed and after.f is changed
    redirects.undo()
    assert before.alias is original and after.f is original and library.f is original and "g" not in vars(library)


@pytest.mark.parametrize("machine", ["torch.something", "triton.runtime", "functorch.inner", "mindspeed_lite.ops.x"])
def test_packages_that_plan_by_the_machine_keep_the_original(module, functions, machine):
    original, changed = functions
    library = module("library", f=original)
    torch_like = module(machine, "from library import f")
    redirects = Redirects()
    redirects.set(library, "f", changed)
    redirects.rebind_importers()
    assert torch_like.f is original
    redirects.undo()


def test_one_replacement_under_two_names_goes_back_to_each_name(module, functions):
    original, changed = functions

    def other():
        return "other"

    library = module("library", f=original, g=other)
    redirects = Redirects()
    redirects.set(library, "f", changed)
    redirects.set(library, "g", changed)
    late = module("loaded_after", "from library import f, g")
    redirects.undo()
    assert late.f is original and late.g is other


def test_who_held_the_replacement_before_keeps_it(module, functions):
    original, changed = functions
    library = module("library", f=original, g=changed)
    holder = module("loaded_before", "from library import g")
    redirects = Redirects()
    redirects.set(library, "f", library.g, shared=True)
    redirects.undo()
    assert holder.g is changed


def asked_from(name, file):
    """What a module of this name and file gets to hear."""
    chosen = for_the_host(lambda: "original", lambda: "changed")
    scope = {"__name__": name, "chosen": chosen}
    exec(compile("def ask():\n    return chosen()\n", file, "exec"), scope)
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
