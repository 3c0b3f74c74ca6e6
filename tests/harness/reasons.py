"""Why a call of an operator would run on the reference: found from the call itself, without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

from mindspeed_lite.ops.dispatch import Case, Operator


class _FirstChoice(BaseException):
    """Ends a call where it chooses a backend."""


def why_not_of(call: Callable[..., Any]) -> Callable[..., list[str]]:
    """A function with the operator's arguments that returns the reasons; none if the call chooses no backend."""

    def why_not(*args: Any, **kwargs: Any) -> list[str]:
        reasons: list[str] = []

        def choose(self: Operator, case: Case, tensors: Any) -> NoReturn:
            reasons.extend(self.why_not(case))
            raise _FirstChoice

        with mock.patch.object(Operator, "_backend", choose), contextlib.suppress(_FirstChoice):
            call(*args, **kwargs)
        return reasons

    return why_not
