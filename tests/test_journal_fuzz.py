"""The journal against a model: any sequence of appends, deaths, damage and restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardmill.journal import Journal, encode_entry, iter_entries

IDS = st.sampled_from(["a", "b", "é\u2028", "", "\n"])
FINGERPRINTS = st.sampled_from(["f", "g"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


class JournalMachine(RuleBasedStateMachine):
    """`lines` is what must be in the file, in order: (bytes, entry); an entry of None is damage, and never found."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="journal-fuzz-"))
        self.path = self.folder / "j.jsonl"
        self.lines: list[tuple[bytes, dict[str, Any] | None]] = []
        self.serial = 0
        self.journal = Journal(self.path)

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder)

    @rule(prompt=IDS, fingerprint=FINGERPRINTS, kind=st.sampled_from(["answer", "crash", "fault"]), value=VALUES)
    def append(self, prompt: str, fingerprint: str, kind: str, value: Any) -> None:
        self.serial += 1
        entry = {"id": prompt, "fingerprint": fingerprint, "kind": kind, "value": value, "serial": self.serial}
        assert self.journal.read(self.journal.append(entry)) == entry
        self.lines.append((encode_entry(entry), entry))

    @rule()
    def restart(self) -> None:
        self.reopen(b"".join(line for line, _ in self.lines))

    @rule(value=VALUES, cut=st.integers(1, 60))
    def die_in_mid_write(self, value: Any, cut: int) -> None:
        torn = encode_entry({"id": "a", "fingerprint": "f", "kind": "answer", "value": value})
        self.reopen(b"".join(line for line, _ in self.lines) + torn[: max(0, len(torn) - cut)])

    @rule(tail=st.binary(max_size=40).filter(lambda tail: b"\n" not in tail))
    def die_with_garbage(self, tail: bytes) -> None:
        self.reopen(b"".join(line for line, _ in self.lines) + tail)

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Change one byte of one line; its end stays, or two lines would be one."""
        at = data.draw(st.integers(0, len(self.lines) - 1))
        line, entry = self.lines[at]
        place = data.draw(st.integers(0, max(0, len(line) - 2)))
        byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != 10))
        changed = line[:place] + bytes([byte]) + line[place + 1 :]
        if changed == line or not changed.endswith(b"\n"):
            return
        self.lines[at] = (changed, None)
        self.reopen(b"".join(line for line, _ in self.lines), spared=entry)

    @rule(junk=st.binary(max_size=30).filter(lambda junk: b"\n" not in junk), data=st.data())
    def insert_junk(self, junk: bytes, data: st.DataObject) -> None:
        self.lines.insert(data.draw(st.integers(0, len(self.lines))), (junk + b"\n", None))
        self.reopen(b"".join(line for line, _ in self.lines))

    def reopen(self, content: bytes, spared: dict[str, Any] | None = None) -> None:
        """Start anew on this content. Damage beside an entry (in the text that frames it) may spare it, or not."""
        self.journal.close()
        self.path.write_bytes(content)
        self.journal = Journal(self.path)
        if spared is not None and spared in self.journal.entries(spared["id"], spared["fingerprint"]):
            at = next(i for i, (_, entry) in enumerate(self.lines) if entry is None and self.holds(i, spared))
            self.lines[at] = (self.lines[at][0], spared)
        assert self.path.read_bytes() == b"".join(line for line, _ in self.lines)
        assert self.journal.damaged_lines == sum(entry is None for _, entry in self.lines)

    def holds(self, at: int, entry: dict[str, Any]) -> bool:
        """Whether the damaged line still holds the bytes of this entry."""
        return encode_entry(entry)[len(b'{"crc":"00000000","entry":') :] in self.lines[at][0]

    @invariant()
    def what_is_found_is_what_was_written(self) -> None:
        whole = [entry for _, entry in self.lines if entry is not None]
        assert len(self.journal) == len(whole)
        for key in {(entry["id"], entry["fingerprint"]) for entry in whole} | {("nobody", "f")}:
            expected = [entry for entry in whole if (entry["id"], entry["fingerprint"]) == key]
            assert self.journal.entries(*key) == expected
        assert list(iter_entries(self.path)) == whole


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
