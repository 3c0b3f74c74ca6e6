"""--mindspeed-lite-verify N: compares first N calls of each operator (`comparison`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed_lite.comparison import EPS_WITHOUT_TRUTH, Finding, Function, compare
from mindspeed_lite.engine import EngineError, Session, Verification, VerifyError

FLAG = "--mindspeed-lite-verify"

_log = logging.getLogger("mindspeed_lite")
# Shared by all verifiers: operators inside a comparison are not compared again.
_inside = threading.local()


class Verifier:
    """Compares the first `calls` calls of each kind, then calls `listeners`."""

    def __init__(self, calls: int, session: Session) -> None:
        self.calls = calls
        self.listeners: list[Callable[[Verification], None]] = []
        self._session = session
        self._seen: dict[Any, int] = {}
        self._entries: dict[Any, Verification] = {}
        self._shares: dict[Any, float] = {}
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        # A copied or unpickled model belongs to no session.
        return type(None), ()

    @property
    def is_comparing(self) -> bool:
        return getattr(_inside, "active", False)

    def leave_out(self, feature: str, operator: str, reason: str) -> None:
        self._warn(f"{FLAG}: {operator} of `{feature}` is not compared: {reason}")

    def _warn(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._session.notice(text)
            _log.warning("%s", text)

    def check(
        self,
        feature: str,
        operator: str,
        numerics: str,
        ours: Function,
        original: Function,
        inputs: Mapping[str, torch.Tensor],
        *,
        against: str,
        widened: bool = True,
        variant: str = "",
        sizes_vary: bool = False,
    ) -> None:
        """Compare `ours` with `original` on one of the first calls; both map `inputs` to a tensor.

        Args:
            against: description of `original`.
            widened: False if rounding decides results, or for lack of memory.
            variant: distinguishes calls of equal shapes.
            sizes_vary: ignore the inputs' first dimension in the kind of call.

        Raises:
            VerifyError: strict, and a bound is exceeded or a call failed.
        """
        if torch.compiler.is_compiling() or self.is_comparing or _has_no_values(inputs):
            return
        first = 1 if sizes_vary else 0
        key = (feature, operator, variant, tuple((t.shape[first:], t.dtype) for t in inputs.values()))
        with self._lock:
            number = self._seen.get(key, 0)
            if number >= self.calls:
                return
            self._seen[key] = number + 1
        _inside.active = True
        try:
            findings, why_not = compare(numerics, ours, original, inputs, widened, number)
        except EngineError:
            raise
        except Exception as error:  # such as out of memory: training continues
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            if self._session.strict:
                raise VerifyError(f"{FLAG}: {operator} of `{feature}` cannot be compared: {reason}") from error
            self.leave_out(feature, operator, reason)
            return
        finally:
            _inside.active = False
        if why_not:
            self._warn(
                f"{FLAG}: the original of `{feature}`'s {operator} does not run in a wider type ({why_not}); the "
                f"bound is {EPS_WITHOUT_TRUTH} eps between the two"
            )
        entry = Verification(feature, operator, _shape_text(inputs, variant), numerics, against)
        self._record(key, entry, findings, is_last=number + 1 == self.calls)

    def _record(self, key: Any, new: Verification, findings: list[Finding], is_last: bool) -> None:
        worst = max(findings, key=lambda each: (each.share, each.apart or 0.0))
        exceeds = worst.share > 1
        with self._lock:
            entry = self._entries.setdefault(key, new)
            if entry is new:
                self._session.report.verifications.append(entry)
            entry.calls += 1
            for index, each in enumerate(findings):
                field = "gradient_error" if index else "output_error"
                if each.apart is not None:
                    setattr(entry, field, max(each.apart, getattr(entry, field) or 0.0))
            if worst.share > self._shares.get(key, -1.0):
                self._shares[key] = worst.share
                entry.worst, entry.error, entry.bound = worst.name, worst.error, worst.bound
                entry.measured_from, entry.problem = worst.measured_from, worst.problem
            is_new = exceeds and entry.verdict == "ok"
            entry.verdict = "exceeds" if exceeds else entry.verdict
        if is_new or (is_last and not exceeds):
            _log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", FLAG, entry.to_text())
        stops = exceeds and self._session.strict
        for listener in tuple(self.listeners) if is_last or stops else ():
            listener(entry)
        if stops:
            raise VerifyError(_refusal(entry))


def _refusal(entry: Verification) -> str:
    flag = f"--{entry.feature.replace('_', '-')}"
    return (
        f"{FLAG}: {entry.to_text()}. Run without {flag} and report this line; without --mindspeed-lite-strict it is a "
        "warning and the run goes on."
    )


def _has_no_values(inputs: Mapping[str, torch.Tensor]) -> bool:
    kinds = {t.device.type for t in inputs.values()}
    return "meta" in kinds or ("cuda" in kinds and torch.cuda.is_current_stream_capturing())


def _shape_text(inputs: Mapping[str, torch.Tensor], variant: str) -> str:
    dtypes = [str(t.dtype).removeprefix("torch.") for t in inputs.values()]
    is_one = len(set(dtypes)) == 1
    tensors = [
        f"{name}[{','.join(map(str, t.shape))}]" + ("" if is_one else f":{dtype}")
        for (name, t), dtype in zip(inputs.items(), dtypes, strict=True)
    ]
    return " ".join(filter(None, (*dtypes[:is_one], *tensors, variant)))
