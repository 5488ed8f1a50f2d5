"""Readiness: a server is ready once it has answered a real request, not when its port opens."""

from __future__ import annotations

import threading
import time

import requests

from .config import Config
from .engines.base import Answer, Engine, ServerPlace
from .engines.openai import post_chat

PROBE_TOKENS = 8
ATTEMPT_SECONDS = 300.0  # for one answer: the first may have kernels to compile, but requests do get lost
_INTERVAL = 0.2  # seconds between attempts
_FINAL_IN_A_ROW = 3  # refusals of the request itself, after which waiting longer is in vain


class Probe:
    """Asks a starting server for a short chat completion until it gives one, in a thread of its own.

    Args:
        config: sampling and thinking settings of the run are the ones that are asked for.
        engine: the adapter.
        place: the server.
        model: the `model` field, where the server wants one.
        timeout: seconds after which to stop asking.
    """

    def __init__(self, config: Config, engine: Engine, place: ServerPlace, model: str | None, timeout: float) -> None:
        self.answered = False
        self.refusal = ""  # why it will never answer
        self.last_fault = "nothing listens on its port"
        self._stopped = threading.Event()
        messages = [{"role": "user", "content": "Say hello."}]
        self._body = engine.request_body(config, messages, None, 1, {"max_tokens": PROBE_TOKENS})
        # So short an answer cannot have the least length that a run may ask for.
        self._body.pop("min_tokens", None)
        if model:
            self._body.setdefault("model", model)
        self._engine, self._place = engine, place
        self._deadline = time.monotonic() + timeout
        threading.Thread(target=self._ask, name="readiness-probe", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self) -> None:
        final_in_a_row = 0
        while not self._stopped.is_set() and (left := self._deadline - time.monotonic()) > 0:
            try:
                status, body = post_chat(self._place, self._body, timeout=min(left, ATTEMPT_SECONDS))
            except requests.Timeout:
                self.last_fault = "its port is open, but it does not answer"
            except requests.RequestException as error:
                self.last_fault = _in_words(error)
            else:
                result = self._engine.read_answer(status, body)
                if isinstance(result, Answer):
                    self.answered = True
                    return
                self.last_fault = f"{result.kind}: {result.message}"
                is_final = result.is_final or result.kind == "unauthorized"
                final_in_a_row = final_in_a_row + 1 if is_final else 0
                if final_in_a_row == _FINAL_IN_A_ROW:
                    self.refusal = self.last_fault
                    return
            self._stopped.wait(_INTERVAL)


def _in_words(error: requests.RequestException) -> str:
    return "nothing listens on its port" if "refused" in str(error).lower() else "it breaks the connection"
