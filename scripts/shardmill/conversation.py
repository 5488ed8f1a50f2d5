"""One prompt on its way to an answer: pure state, fed by journal entries, whether old or new.

A live answer and a replayed one take the same path: the entry is appended to the journal, then
applied here. So a restart arrives at exactly the state that the run before it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .contract import request_fingerprint
from .quality.verdicts import Policy


@dataclass(frozen=True)
class TurnRequest:
    """What is to be asked next."""

    turn: int
    attempt: int
    fingerprint: str
    seed: int
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    overrides: dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """What all requests of a run have in common.

    Args:
        answers: the run's answer fingerprint.
        model_digest: content hash of the model.
        seed: the run's seed.
        all_turns: whether each user turn is answered on the regenerated history.
        policy: what to do with each verdict.
        poison_after: crashes with the prompt in flight until it is set aside.
    """

    answers: str
    model_digest: str
    seed: int
    all_turns: bool
    policy: Policy
    poison_after: int


@dataclass
class Conversation:
    """The state of one prompt. `prompt` is a record of the prompt shard."""

    prompt: dict[str, Any]
    terms: Terms
    outcome: str | None = None  # "accepted" or "rejected" once it is decided
    verdict: str | None = None
    detail: str = ""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)  # the accepted entry of each turn, without its text
    crashes: int = 0
    faults: int = 0
    server: int | None = None  # where its last turn was answered
    _turn: int = 0
    _attempt: int = 1
    _applied: int = 0  # entries about the current request that this state holds already
    _history: list[dict[str, Any]] = field(default_factory=list)
    _ahead: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._history = self.first_messages
        if self.terms.all_turns:
            self._ahead = list(self.prompt["messages"][len(self._history) :])

    @property
    def id(self) -> str:
        return self.prompt["id"]

    @property
    def first_messages(self) -> list[dict[str, Any]]:
        """What the first request holds."""
        messages = self.prompt["messages"]
        if not self.terms.all_turns:
            return list(messages)
        first_user = next(i for i, message in enumerate(messages) if message["role"] == "user")
        return list(messages[: first_user + 1])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, regenerated turns included."""
        return self._history

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Sampling settings that the prompt itself brings."""
        return self.prompt.get("sampling") or {}

    @property
    def current_fingerprint(self) -> str:
        """Fingerprint of the request for the current turn."""
        terms, tools = self.terms, self.prompt.get("tools")
        return request_fingerprint(terms.answers, terms.model_digest, self._history, tools, self.own_sampling)

    def next_request(self) -> TurnRequest | None:
        """The request to send now, or None once the outcome is decided."""
        if self.outcome:
            return None
        return TurnRequest(
            turn=self._turn,
            attempt=self._attempt,
            fingerprint=self.current_fingerprint,
            seed=derive_seed(self.terms.seed, self.id, self._turn, self._attempt),
            messages=self._history,
            tools=self.prompt.get("tools"),
            overrides={**self.terms.policy.attempt_overrides(self._attempt), **self.own_sampling},
        )

    def replay(self, entries: Sequence[dict[str, Any]]) -> bool:
        """Apply the journal's entries for the current request; says whether the state moved on to another."""
        turn = self._turn
        for entry in entries[self._applied :]:
            if self.outcome or self._turn != turn:
                break
            self.apply(entry)
        return self.outcome is not None or self._turn != turn

    def apply(self, entry: dict[str, Any]) -> None:
        """Take in one journal entry about the current request."""
        self._applied += 1
        match entry["kind"]:
            case "crash":
                self.crashes += 1
                if self.crashes >= self.terms.poison_after:
                    self._reject("poison", f"in flight at {self.crashes} server crashes")
            case "fault":
                self._note(entry)
                self._reject(entry["verdict"], entry["detail"])
            case "answer":
                self._note(entry)
                self._judge(entry)

    def _judge(self, entry: dict[str, Any]) -> None:
        # The entry's own number: an earlier one may have been lost to damage, and this one is not to be asked again.
        self._attempt = max(self._attempt, entry["attempt"])
        action = self.terms.policy.action(entry["verdict"], self._attempt)
        if action == "reject":
            self._reject(entry["verdict"], entry["detail"])
        elif action == "retry":
            self._attempt += 1
        else:
            self._accept(entry)

    def _accept(self, entry: dict[str, Any]) -> None:
        self.verdict = entry["verdict"]
        self._history = [*self._history, assistant_message(entry["answer"])]
        kept = {key: value for key, value in entry.items() if key not in ("answer", "kind", "id")}
        answer = entry["answer"]
        self.answers.append({**kept, **{key: answer[key] for key in ("finish_reason", "usage")}})
        self._turn += 1
        self._attempt = 1
        self._applied = 0
        next_user = next((at for at, message in enumerate(self._ahead) if message["role"] == "user"), None)
        if next_user is None:
            self.outcome = "accepted"
            return
        self._history += self._ahead[: next_user + 1]
        self._ahead = self._ahead[next_user + 1 :]

    def _reject(self, verdict: str, detail: str) -> None:
        self.outcome, self.verdict, self.detail = "rejected", verdict, detail

    def _note(self, entry: dict[str, Any]) -> None:
        answer = entry.get("answer") or {}
        self.attempts.append(
            {
                "turn": entry["turn"],
                "attempt": entry["attempt"],
                "seed": entry["seed"],
                "verdict": entry["verdict"],
                "detail": entry["detail"],
                "finish_reason": answer.get("finish_reason"),
                "completion_tokens": (answer.get("usage") or {}).get("completion_tokens"),
                "server": entry["server"],
                "seconds": entry["seconds"],
            }
        )


def assistant_message(answer: dict[str, Any]) -> dict[str, Any]:
    """The assistant turn of an answer, thought included. Absent parts are left out."""
    message = {"role": "assistant", "content": answer["content"]}
    for part in ("reasoning_content", "tool_calls"):
        if answer.get(part):
            message[part] = answer[part]
    return message


def without_thoughts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A history as a model should see it: the thoughts of earlier turns are not sent back."""
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


def derive_seed(run_seed: int, prompt_id: str, turn: int, attempt: int) -> int:
    """A request's own seed: 31 bits of SHA-256 over what names it, so that a rerun asks the very same."""
    digest = hashlib.sha256(f"{run_seed}\n{prompt_id}\n{turn}\n{attempt}".encode(errors="replace")).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
