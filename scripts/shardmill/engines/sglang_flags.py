"""Launch flags of SGLang: which ones a version knows, what values they take, how they were renamed."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ..errors import UserError

# As the argument parsers of these versions declare them: options, dest, kind, default, choices, versions.
FLAGS_FILE = Path(__file__).with_name("sglang_flags.tsv")
KNOWN_VERSIONS = ("0.5.11", "0.5.23")
# Old name, new name. Whichever of the two a version knows is used.
RENAMED = (
    ("mamba-scheduler-strategy", "mamba-radix-cache-strategy"),
    ("cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
    ("cuda-graph-bs", "cuda-graph-bs-decode"),
    ("nsa-decode-backend", "dsa-decode-backend"),
    ("nsa-prefill-backend", "dsa-prefill-backend"),
    ("speculative-dflash-draft-window-size", "speculative-draft-window-size"),
)
_FEWEST_FLAGS = 50  # that a readable --help must show
# An option's own line: two spaces, then its names; its description may follow after two more.
_OPTION_LINE = re.compile(r"^  (-\S.*?)(?:  .*)?$")
_ONE_NAME = re.compile(r"^(--[A-Za-z0-9][A-Za-z0-9-]*)(?: (.*))?$")


@dataclass(frozen=True)
class Flag:
    """One launch flag.

    Args:
        takes: "value", "values" (one or more) or "" for a switch.
        choices: the values that it takes; None if any.
    """

    name: str
    takes: str
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class FlagTable:
    """The flags of one version by name, without dashes."""

    version: str
    flags: dict[str, Flag]

    @classmethod
    def from_help(cls, version: str, text: str) -> FlagTable | None:
        """Read them off the output of `--help`; None if it does not look like SGLang's."""
        flags: dict[str, Flag] = {}
        for line in text.splitlines():
            found = _OPTION_LINE.match(line)
            for part in _split_names(found.group(1)) if found else []:
                one = _ONE_NAME.match(part)
                if one:
                    name, metavar = one.group(1).removeprefix("--"), one.group(2) or ""
                    flags[name] = Flag(name, _takes(metavar), _choices(metavar))
        return cls(version, flags) if len(flags) >= _FEWEST_FLAGS and "model-path" in flags else None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FlagTable | None:
        try:
            flags = {
                name: Flag(name, takes, tuple(choices) if choices else None)
                for name, (takes, choices) in value["flags"].items()
            }
            return cls(str(value["version"]), flags)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def to_json(self) -> dict[str, Any]:
        flags = {name: [flag.takes, flag.choices] for name, flag in sorted(self.flags.items())}
        return {"version": self.version, "flags": flags}

    def current_name(self, name: str) -> str:
        """The name that this version has for a flag, whichever of its names is given."""
        if name in self.flags:
            return name
        for old, new in RENAMED:
            if name in (old, new) and (other := new if name == old else old) in self.flags:
                return other
        return name

    def words(self, values: Iterable[tuple[str, Any, str]]) -> list[str]:
        """Command line words for (flag, value, config key) triples; a value of None or False is left out.

        Raises:
            UserError: naming every flag that this version does not know, with the nearest right name, and
                every value that it does not take.
        """
        words: list[str] = []
        problems: list[tuple[str, str]] = []
        for name, value, key in values:
            try:
                words += self._words_of(name, value)
            except ValueError as error:
                problems.append((key, str(error)))
        if problems:
            where = ", ".join(dict.fromkeys(key for key, _ in problems))
            raise UserError("; ".join(text for _, text in problems), where=where)
        return words

    def _words_of(self, asked: str, value: Any) -> list[str]:
        name = self.current_name(asked)
        flag = self.flags.get(name)
        if flag is None:
            raise ValueError(f"SGLang {self.version} has no flag --{asked}{self._nearest(asked)}")
        if value is None or (value is False and not flag.takes and f"no-{name}" not in self.flags):
            return []
        if not flag.takes:
            if not isinstance(value, bool):
                raise ValueError(f"--{name} is a switch; write `true`, not {value!r}")
            return [f"--{name}"] if value else [f"--no-{name}"]
        if isinstance(value, bool):
            raise ValueError(f"--{name} takes a value, not {str(value).lower()}")
        items = value if isinstance(value, list) else [value]
        if len(items) != 1 and flag.takes == "value":
            raise ValueError(f"--{name} takes one value, not {len(items)}")
        texts = [_text(item) for item in items]
        for text in texts:
            if flag.choices and text not in flag.choices:
                near = difflib.get_close_matches(text, flag.choices, n=1)
                hint = f", did you mean {near[0]}?" if near else f"; it takes {', '.join(flag.choices)}"
                raise ValueError(f"--{name} does not take {text!r} in SGLang {self.version}{hint}")
        # One word, so that a value that begins with a dash (-1) is not taken for a flag.
        return [f"--{name}={texts[0]}"] if len(texts) == 1 and texts[0].startswith("-") else [f"--{name}", *texts]

    def _nearest(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.flags, n=1, cutoff=0.6)
        return f", did you mean --{near[0]}?" if near else ""


@functools.cache
def recorded_flags(version: str) -> FlagTable:
    """The recorded flags of the version, or of the newest known one that is not newer than it."""
    base = version.partition("+")[0]
    known = base if base in KNOWN_VERSIONS else KNOWN_VERSIONS[-1]
    flags: dict[str, Flag] = {}
    for line in FLAGS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        options, _, kind, _, choices, versions = line.split("\t")
        if known not in versions.split():
            continue
        takes = "" if kind in ("flag", "switch") else "values" if kind[-1] in "+*" else "value"
        allowed = tuple(str(choice) for choice in json.loads(choices)) if choices else None
        for option in options.split(","):
            name = option.removeprefix("--")
            flags[name] = Flag(name, takes, allowed)
            if kind == "switch":
                flags[f"no-{name}"] = Flag(f"no-{name}", "")
    return FlagTable(version, flags)


def _text(value: Any) -> str:
    """A value as a word of the command line; flags for whole numbers take no 300.0."""
    if isinstance(value, dict):
        return orjson.dumps(value).decode()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _split_names(text: str) -> list[str]:
    """ "--a {x, y}, --b B" as its parts; a comma inside braces does not part."""
    return [part.strip() for part in re.split(r", (?=-)", text)]


def _takes(metavar: str) -> str:
    if not metavar:
        return ""
    return "values" if metavar.endswith("...]") else "value"


def _choices(metavar: str) -> tuple[str, ...] | None:
    """The `{a,b}` of a metavar."""
    found = re.match(r"^\{([^}]*)\}", metavar)
    return tuple(found.group(1).split(",")) if found else None
