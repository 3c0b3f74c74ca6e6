"""For tests that measure time, on a machine that has more to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])


def once_of(tries: int) -> Callable[[Test], Test]:
    """Let a test pass if one of some tries passes: other load makes waits longer, never what is wrong right.

    Stands above `@forked`, so that each try has a process of its own.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            for left in reversed(range(tries)):
                try:
                    return test(*arguments, **named)
                except AssertionError:
                    if not left:
                        raise

        return run  # type: ignore[return-value]

    return decorate
