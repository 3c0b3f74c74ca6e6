"""The drift drill: in copies of Megatron in which every target has changed in one way, nothing is applied silently.

Each copy is the installed release with the modules of the targets written anew; a process that has not yet imported
Megatron imports it from there and plans every patch by itself and every feature whole.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import types
from dataclasses import replace

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Around, Context, EngineError, Override, Provide, Settings, make_plan, resolve
from mindspeed_lite.engine.source import definitions, reader_of
from mindspeed_lite.engine.target import parse
from mindspeed_lite.platform import megatron
from tests.harness import checkouts
from tests.harness.processes import forked

GONE = "_drifted"
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
BY_NAME = {"setattr", "register_buffer", "register_parameter", "add_module", "__setattr__"}


def declared():
    """Every patch for the installed release with its feature and table of fingerprints."""
    version = megatron.version()
    for features, table in ((runtime.catalogue(), runtime.fingerprints()), (megatron.ASSUMPTIONS, megatron._known())):
        for feature in features:
            for patch in feature.patches_for(version)[0]:
                if checkouts.holds(megatron.root(), patch.target):
                    yield feature, patch, table


class Copy:
    """The installed Megatron with some modules changed, for this process, which must not have imported it."""

    def __init__(self, folder):
        assert "megatron" not in sys.modules
        self.folder = folder
        self.read = reader_of(megatron.root())
        self.changed = {}
        self.texts = {}
        self.changes = set()

    def definitions(self, target):
        for source, node in definitions(self.read, target):
            self.changed[source.module] = source
            yield source, node

    def once(self, *what):
        """Whether a definition has yet to be changed in this way; several targets may share one."""
        known = what in self.changes
        self.changes.add(what)
        return not known

    def use(self):
        for module, source in self.changed.items():
            self.texts[module] = ast.unparse(ast.fix_missing_locations(source.tree))
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name not in self.texts:
            return None
        file = self.folder / f"{name}.py"
        file.write_text(self.texts[name])
        place = megatron.root().joinpath(*name.split("."))
        return importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(place)] if place.is_dir() else None
        )


def judged(allow_unverified=False):
    """What becomes of each patch by itself: feature, patch, whether it is applied, and the verdict or the reasons."""
    found = []
    for feature, patch, table in declared():
        found.append((feature, patch, *planned(feature, [patch], table, allow_unverified)))
    return found


def planned(feature, patches, table, allow_unverified=False):
    """Whether a feature with these patches is applied on this Megatron, and the verdicts or the reasons."""
    alone = replace(
        feature,
        patches=patches,
        requires=(),
        conflicts=(),
        condition=None,
        conflicting_args={},
        enabled=lambda settings: True,
        arguments=None,
    )
    context = Context(Settings.of(runtime.catalogue().options(), {}), "cpu", {})
    version = megatron.version()
    try:
        plan = make_plan([alone], context, host_version=version, fingerprints=table, allow_unverified=allow_unverified)
    except EngineError as error:
        return False, str(error)
    outcome = plan.outcome(feature.name)
    if outcome.status == "applied":
        return True, "; ".join(step.verdict for step in outcome.steps)
    return False, "; ".join(outcome.reasons)


def assert_features_follow(results):
    """A feature is applied exactly if each of its patches would be."""
    refused = {feature.name for feature, _, applied, _ in results if not applied}
    features = {feature.name: (feature, table) for feature, _, table in declared()}
    for name, (feature, table) in features.items():
        patches, _ = feature.patches_for(megatron.version())
        assert planned(feature, patches, table)[0] == (name not in refused), name


def names_it(patch, clause, text):
    """Whether a reason says of which target and which kind of patch this is true."""
    return f"`{patch.target}`{clause}" in text and re.search(rf"\b{patch.kind}\b", text) is not None


def insert(function):
    function.body.insert(1 if ast.get_docstring(function) is not None else 0, ast.parse(f"{GONE} = None").body[0])


def change_body(node):
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, FUNCTION):
                insert(each)
    elif isinstance(node, FUNCTION):
        insert(node)
    else:  # a value: the same one, from other code
        node.value = ast.Call(ast.Lambda(ast.parse("lambda: 0", mode="eval").body.args, node.value), [], [])


@forked("features")
def test_every_override_is_refused_on_another_body_and_what_goes_around_it_is_unverified(tmp_path):
    copy = Copy(tmp_path)
    for _, patch, _ in declared():
        for _, node in () if isinstance(patch, Provide) else copy.definitions(patch.target):
            if copy.once(node):
                change_body(node)
    copy.use()
    results, changed = judged(), "has another body than in the verified releases"
    for _, patch, applied, text in results:
        if isinstance(patch, Override):
            assert not applied and names_it(patch, f" {changed}", text), patch.target
        elif isinstance(patch, Around):
            assert applied and text == f"unverified: {changed}", (patch.target, text)
    assert_features_follow(results)
    for _, patch, applied, text in judged(allow_unverified=True):
        assert applied, (patch.target, text)
        assert isinstance(patch, Provide) or text == f"unverified: {changed}"
    assert_the_flag_lets_it_through(changed)


def assert_the_flag_lets_it_through(changed):
    flags = {"use_fused_swiglu": True}
    plan, _ = runtime.plan_requests([runtime.FeatureRequest(flags)])
    outcome = plan.outcome("use_fused_swiglu")
    assert outcome.status == "skipped" and "--mindspeed-lite-allow-unverified" in "".join(outcome.reasons)
    plan, _ = runtime.plan_requests([runtime.FeatureRequest({**flags, "mindspeed_lite_allow_unverified": True})])
    outcome = plan.outcome("use_fused_swiglu")
    assert outcome.status == "applied" and {step.verdict for step in outcome.steps} == {f"unverified: {changed}"}


def add_parameter(node):
    if isinstance(node, FUNCTION):
        node.args.kwonlyargs.append(ast.arg(GONE))
        node.args.kw_defaults.append(None)
    else:  # a value: a function in its place
        node.value = ast.parse(f"lambda {GONE}: None", mode="eval").body


@forked("features")
def test_every_patch_is_refused_on_another_signature(tmp_path):
    copy = Copy(tmp_path)
    values = set()
    for _, patch, _ in declared():
        for _, node in () if isinstance(patch, Provide) else copy.definitions(patch.target):
            if not isinstance(node, FUNCTION):
                values.add(patch.target)
            if copy.once(node):
                add_parameter(node)
    copy.use()
    for _, patch, applied, text in judged():
        if isinstance(patch, Provide):
            continue
        # The signature of what is assigned is not in the source; its text is.
        how = "has another body" if patch.target in values else "has the signature ("
        assert not applied and names_it(patch, f" {how}", text), (patch.target, text)


def in_full(text, target):
    module, path = parse(target)
    if ":" in text:
        return text
    return f"{module}:{text}" if "." in text else f"{module}:{'.'.join([*path[:-1], text])}"


def rename_attribute(copy, cls, name):
    """Rename an attribute wherever a class or a base of it defines it; returns how often it did."""
    count = 0
    for source, node in copy.definitions(cls):
        if not isinstance(node, ast.ClassDef):
            continue
        if copy.once(node, name):
            count += sum(map(functools.partial(rename_in_class, name), node.body))
        for base in node.bases:
            if isinstance(base, ast.Name):
                with contextlib.suppress(EngineError):
                    count += rename_attribute(copy, f"{source.module}:{base.id}", name)
    return count


def rename_in_class(name, statement):
    count = 0
    if isinstance(statement, FUNCTION):
        if statement.name == name:
            statement.name += GONE
            count += 1
        first = [each.arg for each in statement.args.args][:1]
        for each in ast.walk(statement):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and each.attr == name:
                if isinstance(each.value, ast.Name) and [each.value.id] == first:
                    each.attr += GONE
                    count += 1
            elif isinstance(each, ast.Name) and each.id == name and each in statement.decorator_list:
                each.id += GONE
            elif isinstance(each, ast.Attribute) and each in statement.decorator_list:
                if isinstance(each.value, ast.Name) and each.value.id == name:  # @name.setter
                    each.value.id += GONE
            elif isinstance(each, ast.Call):
                function = getattr(each.func, "attr", getattr(each.func, "id", ""))
                for given in each.args if function in BY_NAME else ():
                    if isinstance(given, ast.Constant) and given.value == name:
                        given.value += GONE
                        count += 1
    else:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        for each in targets:
            if isinstance(each, ast.Name) and each.id == name:
                each.id += GONE
                count += 1
    return count


@pytest.mark.parametrize("are_targets", [False, True])
@forked("features")
def test_every_patch_is_refused_where_an_attribute_that_it_reads_has_another_name(tmp_path, are_targets):
    copy = Copy(tmp_path)
    targets = {patch.target for _, patch, _ in declared()}
    reads = {in_full(text, patch.target) for _, patch, _ in declared() for text in patch.reads}
    renamed = {each for each in reads if (each in targets) == are_targets}
    assert renamed
    for each in sorted(renamed):
        cls, _, name = each.rpartition(".")
        rename_attribute(copy, cls, name)
    copy.use()
    readers = 0
    for _, patch, applied, text in judged():
        if patch.target in renamed:
            assert not applied and f"`{patch.target}` does not exist" in text
            continue
        for each in renamed & {in_full(read, patch.target) for read in patch.reads}:
            missing = f"has no attribute `{each.rpartition('.')[2]}`, which the patch reads"
            assert not applied and missing in text and names_it(patch, ": `", text), (patch.target, each, text)
            readers += 1
    assert readers >= len(renamed) / 2


def helpers_of(source, node):
    """Functions of the same module that a definition calls, and classes of which it applies one."""
    top = {each.name: each for each in ast.walk(source.tree) if isinstance(each, (*FUNCTION, ast.ClassDef))}
    for each in ast.walk(node):
        called = each.func if isinstance(each, ast.Call) else getattr(node, "value", None)
        if isinstance(called, ast.Attribute) and called.attr == "apply":
            called = called.value
        found = top.get(called.id) if isinstance(called, ast.Name) else None
        applied = isinstance(found, ast.ClassDef) and any(getattr(b, "attr", "") == "Function" for b in found.bases)
        if applied or (isinstance(found, FUNCTION) and found in source.tree.body and found is not node):
            yield found


@forked("features")
def test_every_override_is_refused_where_a_function_that_it_calls_has_another_body(tmp_path):
    copy = Copy(tmp_path)
    affected, helpers = set(), []
    for _, patch, _ in declared():
        for source, node in () if isinstance(patch, Provide) else copy.definitions(patch.target):
            found = list(helpers_of(source, node))
            helpers += found
            affected |= {patch.target} if found else set()
    for node in helpers:
        if copy.once(node):
            change_body(node)
    copy.use()
    assert len([each for each in affected if ":" in each]) >= 10
    results, changed = judged(), "has another body than in the verified releases"
    for _, patch, applied, text in results:
        if patch.target in affected and isinstance(patch, Override):
            assert not applied and names_it(patch, f" {changed}", text), patch.target
        elif patch.target in affected:
            assert applied and text == f"unverified: {changed}", patch.target
        else:
            assert isinstance(patch, Provide) or "verified" in text or not applied, (patch.target, text)


@forked("features")
def test_every_patch_is_refused_where_what_it_relies_on_has_another_body(tmp_path):
    copy = Copy(tmp_path)
    relied_on = {text for _, patch, _ in declared() for text in patch.relies_on}
    assert len(relied_on) >= 10
    for text in relied_on:
        for _, node in copy.definitions(text):
            if copy.once(node):
                change_body(node)
    copy.use()
    for _, patch, applied, text in judged():
        assert not (applied and patch.relies_on), patch.target
        for each in patch.relies_on:
            assert f"`{each}` has another body than in the verified releases, and `{patch.target}` relies on it" in text
    for _, patch, applied, text in judged(allow_unverified=True):
        assert applied and (text.startswith("unverified: ") or not patch.relies_on), (patch.target, text)


@forked("features")
def test_a_symbol_that_nobody_looks_for_is_not_provided(tmp_path):
    copy = Copy(tmp_path)
    wanted = {}
    for _, patch, _ in declared():
        if isinstance(patch, Provide):
            module, path = parse(patch.target)
            wanted.setdefault(module, set()).add(path[-1])
    for module, names in wanted.items():
        text = copy.read(module).text
        copy.texts[module] = re.sub(rf"\b({'|'.join(names)})\b", rf"\1{GONE}", text)
    copy.use()
    for _, patch, applied, text in judged():
        if isinstance(patch, Provide):
            assert not applied and f"`{patch.target}`: nothing in `" in text, (patch.target, text)


def replaced(function):
    """Other code."""
    space = {"__name__": "somebody"}
    exec("def another(*args, **kwargs): return None", space)
    return space["another"]


def wrapped(function):
    space = {"__name__": "somebody", "functools": functools, "function": function}
    exec("@functools.wraps(function)\ndef around(*args, **kwargs): return function(*args, **kwargs)", space)
    return space["around"]


@forked("megatron")
def test_code_that_others_have_put_in_place_of_a_target_is_not_taken_for_megatrons():
    seen = 0
    for feature, patch, table in declared():
        if isinstance(patch, Provide):
            continue
        target = resolve(patch.target)
        function = target.raw.__func__ if isinstance(target.raw, staticmethod | classmethod) else target.raw
        if not callable(function):
            continue  # a value has no code
        plain = function if isinstance(function, types.FunctionType) else (lambda *args: None)
        for make, word in ((replaced, "replaced"), (wrapped, "wrapped")):
            new = make(plain)
            setattr(target.owner, target.name, type(target.raw)(new) if function is not target.raw else new)
            applied, text = planned(feature, [patch], table)
            setattr(target.owner, target.name, target.raw)
            if isinstance(patch, Override):
                assert not applied and f"`{patch.target}` " in text and "by somebody." in text, (patch.target, word)
            else:
                # Replaced, an `__init__` sets no attributes that a patch could read.
                assert applied or "has no attribute" in text, (patch.target, text)
                assert not applied or (text.startswith("unverified: ") and "by somebody." in text), (patch.target, text)
            seen += 1
        assert planned(feature, [patch], table) == (True, "verified")
    assert seen > 100
