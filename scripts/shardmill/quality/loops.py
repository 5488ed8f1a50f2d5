"""Finding answers that run in circles.

A model that loops says the same thing until `max_tokens` stops it. Three gauges look for that, each for
one shape of loop, all of them linear in the text:

1. *Periodic run.* A stretch of text that is exactly periodic: a run of one character, a cycle of a few
   tokens, a paragraph again and again. If text[a:b] has period p, the ANCHOR characters before b stand
   again p characters earlier; so the distances at which they recur (found by CPython's linear string
   search over the reversed text) are the only candidates for p, and comparing the text with itself at that
   distance gives the run's extent. Ends of the text at 8/8, 7/8 ... 4/8 are tried, so that every run that
   fills half of the text is met, as is one that the model broke out of shortly before the end.
2. *Stale sentences.* Cycles whose sentences come in changing order, with slips, or with a counter in
   them. A sentence is stale if it stood at least three times before, apart from numbers that move by the
   same step as the time before ("Step 41: ... Step 42: ..."). The text loops if it ends in a stretch with
   at least FRESH_COST stale characters for each fresh one (the best-scoring suffix, Kadane's algorithm), or
   if half of it is stale. Only prose counts: sentences of words with few brackets, quotes and digits.
3. *Used-up words.* Variations on one theme, no sentence quite like another. In the last WORDS words there
   are few distinct word triples. Numbers count as words, so a list that counts is never caught by this.

Why the thresholds are where they are (the corpus in tests/test_loops.py holds both sides of each):

- Tables, logs, JSON, code, pi, DNA and verse repeat words, shapes and lines, but not for long without
  anything new: their exact runs stay below 1,500 bytes (the outro of a pop song reaches 800), and what
  repeats with counters in them is not prose. A real loop reaches tens of thousands.
- A unit without two different letters ("0, ", "=", " ", "142857") is what matrices, rules, padding and
  fractions are made of; such a run must be 4,000 bytes long.
- Four repetitions: a thought may well write its answer down three times.
- Stale sentences need 1,200 bytes and a tenth of the text: the first three rounds are not counted among them.
- Distinct word triples: 15 for each 100 words. Prose has 80 to 100, licenses and dull documentation 30 and more;
  sentences put together from a few parts have 10 to 12. Boilerplate code can go as low, hence the stricter
  demand that the whole stretch be prose.
- Lengths are UTF-8 bytes, because a token is about four bytes in English as in Chinese.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MIN_REPETITIONS = 4
MIN_RUN_BYTES = 1_500
MIN_BARE_RUN_BYTES = 4_000
MIN_STALE_BYTES = 1_200
MIN_STALE_SHARE = 0.1
DOMINATED = 0.5
ANCHOR = 256
MAX_CANDIDATES = 32
FRESH_COST = 5
MAX_STRUCTURE = 0.14
MAX_WINDOW_STRUCTURE = 0.06
WORDS = 1_000
MIN_WORDS = 500
WORD_WINDOW = 6_000
MIN_DISTINCT_WORDS = 12
MAX_DISTINCT_TRIPLES = 0.15

# A sentence has at least 16 characters, so that "Wait." joins what follows it, and at most 400.
_SENTENCE = re.compile(r"(?s:.{16})[^.!?;\n。！？；…]{0,384}[.!?;\n。！？；…\s]*")
_NUMBER = re.compile(r"[0-9]+")
_STRUCTURE = re.compile(r"[0-9\"()<>\[\]{}=|/\\_+&$%^~@`]|\B'|'\B")
# Scripts without spaces between words: each character is a word.
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\u0e00-\u0eff\U00020000-\U0003ffff]|\w+")


@dataclass(frozen=True)
class Loop:
    """Where and how a text runs in circles.

    Args:
        kind: `run` (exactly periodic), `sentences` (the same sentences in any order), `counter` (the same
            sentences with moving numbers) or `words` (variations on one theme).
        start, length: the stretch, in characters of the text.
        share: the stretch's part of the text, 0 to 1.
        unit: what is repeated: the first period, the last sentence that was, or the stretch's last words.
        repetitions: how often the unit stands in the text; for `words`, how often a triple of words does.
    """

    kind: Literal["run", "sentences", "counter", "words"]
    start: int
    length: int
    share: float
    unit: str
    repetitions: int

    def __str__(self) -> str:
        shown = self.unit.strip() or self.unit
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        if self.kind == "words":
            return f"few new words in its last {self.length} characters, which end in {shown!r}"
        return f"{shown!r} about {self.repetitions} times; {self.share:.0%} of the text, from character {self.start}"


def find_loop(text: str) -> Loop | None:
    """The loop that `text` ends in or is dominated by, or None.

    Linear in time and memory: under 1 ms for 10,000 characters.
    """
    if len(text) < MIN_RUN_BYTES // 4:
        return None
    return _periodic_run(text) or _stale_sentences(text) or _used_up_words(text)


def _weight(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _periodic_run(text: str) -> Loop | None:
    total, backward = len(text), text[::-1]
    for eighths in range(8, 3, -1):
        end = total * eighths // 8
        found = _run_around(text, backward, end)
        if found is None:
            continue
        start, stop, period = found
        length = stop - start
        unit = text[start : start + period]
        if total - stop > length // 10 and length < DOMINATED * total:
            continue
        if _weight(text[start:stop]) >= (MIN_BARE_RUN_BYTES if _is_bare(unit) else MIN_RUN_BYTES):
            return Loop("run", start, length, length / total, unit, length // period)
    return None


def _run_around(text: str, backward: str, end: int) -> tuple[int, int, int] | None:
    """The periodic run that holds the ANCHOR characters before `end`, as (start, stop, period)."""
    origin = len(text) - end
    anchor = backward[origin : origin + ANCHOR]
    at = origin
    for _ in range(MAX_CANDIDATES):
        at = backward.find(anchor, at + 1)
        if at < 0:
            return None
        period = at - origin
        before = period + _common_prefix(backward, origin, at)
        if before >= 2 * period:
            stop = end + _common_prefix(text, end - period, end)
            start = end - before
            if stop - start >= MIN_REPETITIONS * period:
                return start, stop, period
    return None


def _common_prefix(text: str, first: int, second: int) -> int:
    """Length of the longest common prefix of text[first:] and text[second:], for first < second."""
    most = len(text) - second
    done, step, growing = 0, 64, True
    while done < most:
        step = min(step, most - done)
        if text[first + done : first + done + step] == text[second + done : second + done + step]:
            done += step
        elif step == 1:
            break
        else:
            growing = False
        step = step * 2 if growing else max(1, step // 2)
    return done


def _is_bare(unit: str) -> bool:
    return len({character for character in unit.casefold() if character.isalpha()}) < 2


class _Sentence:
    """One sentence, apart from its numbers, and what is known of it so far."""

    __slots__ = ("count", "is_prose", "numbers", "step", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.count = 1
        self.numbers: list[int] | None = None
        self.step: list[int] | None = None
        self.is_prose: bool | None = None

    def comes_again(self, text: str) -> bool:
        """Note one more occurrence; whether it was stale."""
        self.count += 1
        foreseen = text == self.text
        if not foreseen:
            before = self.numbers or [int(digits) for digits in _NUMBER.findall(self.text)]
            self.numbers = [int(digits) for digits in _NUMBER.findall(text)]
            step = [b - a for a, b in zip(before, self.numbers, strict=False)]
            foreseen = step == self.step
            self.step, self.text = step, text
        if self.count < MIN_REPETITIONS or not foreseen:
            return False
        if self.is_prose is None:
            self.is_prose = _is_prose(text)
        return self.is_prose


def _is_prose(sentence: str) -> bool:
    words = sentence.split()
    length = sum(map(len, words))
    if len(_STRUCTURE.findall(sentence)) > MAX_STRUCTURE * length:
        return False
    return len(words) >= 3 or _weight(sentence) - len(sentence) >= len(sentence) // 2


def _stale_sentences(text: str) -> Loop | None:
    known: dict[str, _Sentence] = {}
    score = start = stale = 0
    last = ""
    for match in _SENTENCE.finditer(text):
        sentence = match[0]
        key = _NUMBER.sub("", sentence)
        if score <= 0:
            score, start = 0, match.start()
        entry = known.get(key)
        if entry is None:
            known[key] = _Sentence(sentence)
            score -= FRESH_COST * len(sentence)
        elif entry.comes_again(sentence):
            score += len(sentence)
            stale += len(sentence)
            last = sentence
        else:
            score -= FRESH_COST * len(sentence)
    length, total = len(text) - start, len(text)
    ends_in_it = score > 0 and length >= MIN_STALE_SHARE * total and _weight(text[start:]) >= MIN_STALE_BYTES
    if not ends_in_it:
        if stale < DOMINATED * total or stale < MIN_STALE_BYTES:
            return None
        start, length = 0, total
    sentences = set(_SENTENCE.findall(text, start))
    keys = {_NUMBER.sub("", sentence) for sentence in sentences}
    kind = "counter" if len(sentences) > 2 * len(keys) else "sentences"
    return Loop(kind, start, length, length / total, last, known[_NUMBER.sub("", last)].count)


def _used_up_words(text: str) -> Loop | None:
    window = text[-WORD_WINDOW:]
    words = _WORD.findall(window)[-WORDS:]
    if len(words) < MIN_WORDS or len(set(words)) < MIN_DISTINCT_WORDS:
        return None
    triples = set(zip(words, words[1:], words[2:], strict=False))
    if len(triples) > MAX_DISTINCT_TRIPLES * len(words):
        return None
    if len(_STRUCTURE.findall(window)) > MAX_WINDOW_STRUCTURE * len(window):
        return None
    if len(window.split()) < len(words) // 2 and _weight(window) < 3 * len(window) // 2:
        return None  # Cells of a table: words with commas or tabs between them, no spaces.
    start = len(text) - len(window)
    return Loop("words", start, len(window), len(window) / len(text), text[-60:], len(words) // len(triples))
