import argparse

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_lite.engine import Collision, Option, Settings, add_arguments, given_options
from tests.harness.plans import feature


def parser_of(features=(), extra=(), version="1.0", host=()):
    parser = argparse.ArgumentParser()
    for flag, keywords in host:
        parser.add_argument(flag, **keywords)
    return parser, add_arguments(parser, features, extra, host_version=version)


def test_flags_appear_in_a_group_per_feature_with_types_and_defaults():
    options = [
        Option("--x", "turn on"),
        Option("--x-level", "100% of it, not %(default)s", default=3),
        Option("--x-mode", "h", default="a", choices=["a", "b"], metavar="MODE"),
        Option("--x-sizes", "h", default=None, type=int, nargs="+"),
    ]
    parser, collisions = parser_of([feature("x", options=options)], [Option("--extra", "h")])
    assert collisions == []
    defaults = parser.parse_args([])
    assert vars(defaults) == {"x": False, "x_level": 3, "x_mode": "a", "x_sizes": None, "extra": False}
    given = parser.parse_args(["--x", "--x-level", "5", "--x-mode", "b", "--x-sizes", "1", "2"])
    assert (given.x, given.x_level, given.x_mode, given.x_sizes) == (True, 5, "b", [1, 2])
    text = parser.format_help()
    for part in ("mindspeed_lite: x", "tests x", "100% of it, not 3"):
        assert part in text


def test_a_flag_the_host_has_with_the_same_meaning_is_reused():
    option = Option("--fuse", "h", upstream=">=1.0")
    host = [("--fuse", {"action": "store_true", "help": "the host's own"})]
    parser, collisions = parser_of([feature("x", options=[option])], host=host)
    assert collisions == [] and "the host's own" in parser.format_help()
    assert parser.parse_args(["--fuse"]).fuse


@pytest.mark.parametrize(
    ("option", "host"),
    [
        (Option("--fuse", "h"), ("--fuse", {})),
        (Option("--fuse", "h", upstream=">=2"), ("--fuse", {})),
        (Option("--fuse", "h", upstream=">=1"), ("--no-fuse", {"dest": "fuse", "action": "store_false"})),
    ],
)
def test_a_flag_or_dest_the_host_uses_otherwise_is_a_collision(option, host):
    _, collisions = parser_of([feature("x", options=[option])], host=[host])
    assert collisions == [Collision("--fuse", "x")]
    assert parser_of([], [option], host=[host])[1] == [Collision("--fuse", "")]


def test_a_flag_may_be_stored_under_another_name_than_the_hosts():
    option = Option("--fuse", "h", name="use_fuse")
    host = [("--no-fuse", {"dest": "fuse", "action": "store_false"})]
    parser, collisions = parser_of([feature("x", options=[option])], host=host)
    assert collisions == []
    assert vars(parser.parse_args([])) == {"fuse": True, "use_fuse": False}
    assert vars(parser.parse_args(["--fuse", "--no-fuse"])) == {"fuse": False, "use_fuse": True}
    assert Settings.of([option], parser.parse_args(["--fuse"])).use_fuse is True


def test_a_shared_flag_is_added_once_and_a_second_call_adds_nothing():
    shared = Option("--level", "h", default=1)
    features = [feature(name, options=[shared]) for name in "ab"]
    parser, collisions = parser_of(features)
    assert collisions == []
    assert add_arguments(parser, features, host_version="1.0") == []
    different = feature("c", options=[Option("--level", "h", default=2)])
    assert add_arguments(parser, [different], host_version="1.0") == [Collision("--level", "c")]


# Which options a command line names


class Reads(argparse.Action):
    """Looks at what is there before it sets anything, as a user's may."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        assert before is None or isinstance(before, list)
        setattr(namespace, self.dest, [*(before or []), values])


def chatty(**keywords):
    parser = argparse.ArgumentParser(exit_on_error=False, **keywords)
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-q", action="count")
    parser.add_argument("-n", "--number", type=int)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("-foo", dest="foo")
    parser.add_argument("--no-bar", dest="bar", action="store_false")
    parser.add_argument("--bar", action="store_true")
    parser.add_argument("--some", nargs="*")
    parser.add_argument("--maybe", nargs="?", const=3)
    parser.add_argument("--reads", action=Reads)
    return parser


@pytest.mark.parametrize(
    ("line", "dests"),
    [
        ("", set()),
        ("-v", {"verbose"}),
        ("--verb", {"verbose"}),
        ("--num 3", set()),  # ambiguous, argparse refuses it
        ("--num-l=3", {"num_layers"}),
        ("--number=-3", {"number"}),
        ("-n3 -n -4", {"number"}),
        ("-vqn3", {"verbose", "q", "number"}),
        ("-qqv", {"q", "verbose"}),
        ("-fo x", {"foo"}),
        ("--no-bar", {"bar"}),
        ("--some a -1 --maybe", {"some", "maybe"}),
        ("--some -- --verbose", {"some"}),
        ("--unknown --verbose=", {"verbose"}),
        ("--reads a --reads b - -5", {"reads"}),
    ],
)
def test_options_are_told_from_the_words(line, dests):
    assert given_options(chatty(), line.split()) == dests


def test_without_abbreviations_only_whole_names_count():
    parser = chatty(allow_abbrev=False)
    assert given_options(parser, ["--verb", "--num-l=3"]) == set()
    assert given_options(parser, ["--verbose", "-n3"]) == {"verbose", "number"}


def test_other_prefixes_count():
    parser = argparse.ArgumentParser(prefix_chars="+-")
    parser.add_argument("+x")
    parser.add_argument("++long")
    assert given_options(parser, ["+x", "1", "++lo=2"]) == {"x", "long"}
    assert given_options(argparse.ArgumentParser(), ["+x"]) == set()


def test_words_in_a_file_count_and_no_action_runs(tmp_path):
    (tmp_path / "inner").write_text("--num-layers\n2\n")
    (tmp_path / "words").write_text(f"--verbose\n@{tmp_path / 'inner'}\n")
    ran = []

    class Runs(argparse.Action):
        def __call__(self, *args):
            ran.append(args)

    parser = chatty(fromfile_prefix_chars="@")
    parser.add_argument("--out", type=argparse.FileType("w"))
    parser.add_argument("--run", action=Runs, type=lambda text: ran.append(text))
    given_of = given_options(parser, [f"@{tmp_path / 'words'}", "--out", str(tmp_path / "out"), "--run", "1", "--help"])
    assert given_of == {"verbose", "num_layers", "out", "run", "help"}
    assert ran == [] and not (tmp_path / "out").exists()


def test_a_subcommand_keeps_its_own_options():
    parser = chatty()
    commands = parser.add_subparsers(dest="command")
    train = commands.add_parser("train")
    train.add_argument("--steps")
    words = ["-v", "train", "--steps", "3"]
    assert vars(parser.parse_args(words))["steps"] == "3" and given_options(parser, words) == {"verbose"}


FLAGS = ["--alpha", "--alpha-beta", "--be", "--beta", "--gamma", "-x", "-y", "-z", "-ab", "--no-alpha"]
KINDS = {
    "value": {},
    "int": {"type": int},
    "file": {"type": argparse.FileType("r")},
    "switch": {"action": "store_true"},
    "constant": {"action": "store_const", "const": 5},
    "append": {"action": "append"},
    "count": {"action": "count"},
    "reads": {"action": Reads},
    "maybe": {"nargs": "?"},
    "any": {"nargs": "*"},
    "some": {"nargs": "+"},
    "two": {"nargs": 2},
}
# Of these the value before the option counts, so that it cannot be a mark.
READING = {"append", "count", "reads"}


class Refuses(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def parsed_oracle(parser, kinds, words):
    """The dests of options whose mark in the namespace is gone after argparse itself has parsed."""
    marks = {dest: None if kind in READING else object() for dest, kind in kinds.items()}
    try:
        found, _ = parser.parse_known_args(words, argparse.Namespace(**marks))
    except (ValueError, argparse.ArgumentError, argparse.ArgumentTypeError):
        return None
    return {dest for dest, mark in marks.items() if getattr(found, dest) is not mark}


@settings(max_examples=400)
@given(st.data())
def test_what_is_given_is_what_argparse_takes_it_for(data):
    parser = Refuses(
        add_help=False,
        allow_abbrev=data.draw(st.booleans(), "allow_abbrev"),
        fromfile_prefix_chars=data.draw(st.sampled_from([None, "@"])),
    )
    kinds = {}
    for flag in data.draw(st.lists(st.sampled_from(FLAGS), min_size=1, max_size=7, unique=True)):
        kind = data.draw(st.sampled_from(sorted(KINDS)), flag)
        dest = "alpha" if flag == "--no-alpha" and "alpha" not in kinds else flag.strip("-").replace("-", "_")
        if dest in kinds:
            continue
        parser.add_argument(flag, dest=dest, default=None if kind in READING else 0, **KINDS[kind])
        kinds[dest] = kind
    if data.draw(st.booleans()):
        parser.add_argument("rest", nargs=data.draw(st.sampled_from(["?", "*"])))
    value = st.sampled_from(["1", "-1", "-2.5", "a", "-", "a b", "/dev/null", "", "x=1", "=", "--", "-q", "--unknown"])
    option = st.sampled_from(FLAGS).flatmap(lambda flag: st.integers(2, len(flag)).map(lambda end: flag[:end]))
    joined = st.tuples(option, value).map("=".join) | st.tuples(option, value).map("".join)
    together = st.lists(st.sampled_from("xyz"), min_size=1, max_size=3).map(lambda letters: "-" + "".join(letters))
    words = data.draw(st.lists(st.sampled_from(FLAGS) | option | value | joined | together, max_size=7), "words")
    # Releases of Python differ in whether this abbreviates -ab.
    assume(not any(word.startswith("-a=") for word in words))
    wanted = parsed_oracle(parser, kinds, words)
    assume(wanted is not None)
    assert given_options(parser, words) == wanted
