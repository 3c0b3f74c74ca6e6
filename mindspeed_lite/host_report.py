"""`--mindspeed-lite-host-report`: prints what two of Megatron's training steps cost the host.

One step counts synchronisations, by call and place, and launches, by module; the next, which counting does not slow
down, times modules. A loop that does not call Megatron's `train_step` uses `StepWatch` itself.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Around, Session
from mindspeed_lite.platform import megatron
from mindspeed_lite.text_layout import columns
from mindspeed_lite.tuning.host import StepWatch

# Earlier steps compile, allocate and make communicators.
COUNTED_STEP = 3


class HostReport:
    """Hooked into `train_step` until `end`. prints: this process is the first rank."""

    def __init__(self, host_is_device: bool, prints: bool) -> None:
        self._watch = StepWatch(host_is_device)
        self._prints = prints
        self._step = 0
        self._counting = contextlib.ExitStack()
        steps = Around("megatron.training.training:train_step", self._around)
        self._hook = megatron.ImportHook(megatron.without_flag("host_report", "steps are watched", steps))
        atexit.register(self._show)

    def end(self) -> None:
        self._hook.remove()
        self._show()

    def _around(self, wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        signature = inspect.signature(wrapped)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            model = signature.bind(*args, **kwargs).arguments["model"]
            return self._run(model, lambda: wrapped(*args, **kwargs))

        return train_step

    def _run(self, model: Any, run: Callable[[], Any]) -> Any:
        self._step += 1
        if self._step == COUNTED_STEP:
            # Until the next step begins: the loop synchronises too.
            self._counting.enter_context(self._watch.counting(model))
        if self._step != COUNTED_STEP + 1:
            return run()
        self._counting.close()
        with self._watch.timing(model):
            result = run()
        self._show()
        return result

    def _show(self) -> None:
        """Once, also where the training ends after the counted step."""
        self._counting.close()
        atexit.unregister(self._show)
        if self._prints and self._step >= COUNTED_STEP:
            self._prints = False
            text = self._watch.to_text(columns(sys.stdout))
            print(f"mindspeed_lite: the host in steps {COUNTED_STEP} and {COUNTED_STEP + 1}\n{text}", flush=True)
