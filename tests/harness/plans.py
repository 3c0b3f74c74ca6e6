"""Short spellings for what every test of the engine needs."""

from contextlib import contextmanager

from mindspeed_lite.engine import Context, Feature, Option, Report, Session, Settings, Swap, change, make_plan
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.engine.swaps import original_of


def feature(name, *patches, **keywords):
    keywords.setdefault("options", [Option(f"--{name}", "test")])
    keywords.setdefault("numerics", "bitwise")
    return Feature(name, f"tests {name}", patches=patches, **keywords)


def context_of(features, off=(), **host_args):
    options = [option for each in features for option in each.options]
    values = {option.dest: option.flag[2:] not in off or option.default for option in options if option.is_switch}
    return Context(Settings.of(options, values), "cpu", {}, host_args)


def session_of(context, **keywords):
    return Session(context.settings, context, Report({"host": "1.0"}, "cpu"), **keywords)


def plan_of(*features, off=(), table=None, version="1.0", **keywords):
    context = context_of(features, off, **keywords.pop("host_args", {}))
    keywords.setdefault("allow_unverified", table is None)
    return make_plan(features, context, host_version=version, fingerprints=table or Table(), **keywords)


def steps_of(plan):
    return [step for outcome in plan.outcomes for step in outcome.steps]


def reasons_of(*features, **keywords):
    """The reasons of the first feature, which must be skipped."""
    outcome = plan_of(*features, **keywords).outcome(features[0].name)
    assert outcome.status == "skipped", outcome
    return outcome.reasons


def swaps_of(*features, session=None, **keywords):
    """The swaps of a plan, each with its feature's view of one session, not in force yet."""
    session = session or session_of(context_of(features))
    views = {each.name: session.of(each.name) for each in features}
    applied = plan_of(*features, **keywords).applied
    return [Swap(each.feature.name, step.patch, views[each.feature.name]) for each in applied for step in each.steps]


@contextmanager
def applied(*features, **keywords):
    swaps = swaps_of(*features, **keywords)
    change(add=swaps)
    try:
        yield swaps
    finally:
        change(remove=swaps)


def passing(wrapped, session):
    """The plainest wrapper: adds one to what comes back."""

    def plus_one(*args, **kwargs):
        return wrapped(*args, **kwargs) + 1

    return plus_one


def calling(function):
    """`make` of an override that is a function already."""
    return lambda wrapped, session: function


def is_swapped(raw):
    """Whether a patch is in force on a raw attribute of the host."""
    return original_of(raw) is not raw
