"""Short spellings for what every test of the engine needs."""

from contextlib import contextmanager

from mindspeed_lite.engine import (
    Context,
    Feature,
    Option,
    Report,
    Session,
    Settings,
    Table,
    Transaction,
    make_plan,
)


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


def plan_of(*features, off=(), table=None, version="1.0", session=None, **keywords):
    context = context_of(features, off, **keywords.pop("host_args", {}))
    keywords.setdefault("allow_unverified", table is None)
    return make_plan(
        features,
        context,
        host_version=version,
        fingerprints=table or Table(),
        session=session or session_of(context),
        **keywords,
    )


def reasons_of(*features, **keywords):
    """The reasons of the first feature, which must be skipped."""
    outcome = plan_of(*features, **keywords).outcome(features[0].name)
    assert outcome.status == "skipped", outcome
    return outcome.reasons


def transaction_of(*features, **keywords):
    plan = plan_of(*features, **keywords)
    return Transaction(plan, session_of(context_of(features)))


@contextmanager
def applied(*features, **keywords):
    transaction = transaction_of(*features, **keywords)
    transaction.apply()
    try:
        yield transaction
    finally:
        transaction.undo()


def passing(wrapped, session):
    """The plainest wrapper: adds one to what comes back."""

    def plus_one(*args, **kwargs):
        return wrapped(*args, **kwargs) + 1

    return plus_one
