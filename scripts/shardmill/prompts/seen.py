"""Which ids were seen before, for millions of them in a few bytes each."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

# Bytes of an id's SHA-256 that stand for it in the table.
KEY_BYTES = 8

_INITIAL_SLOTS = 1 << 12


def key_of(digest: bytes) -> bytes:
    """What stands for an id in the table, given its `id_digest`."""
    return digest[:KEY_BYTES]


class SeenIds:
    """A hash table from the first `KEY_BYTES` of an id's SHA-256 to the line it was first seen on.

    Open addressing over plain arrays: 16 bytes per id for key and line, and 8 to 16 for slots of 4
    bytes that are at most half full: at most 32 bytes per id, plus what an array allocates ahead. A dict of
    the ids takes about 140.

    Equal keys make two ids *candidates* for being the same; whoever needs to be sure compares the ids,
    and names the keys of those that differ as `contested`: their ids are then held in full.
    """

    def __init__(self, contested: frozenset[bytes] = frozenset()) -> None:
        self._keys = array("Q")
        self._lines = array("Q")
        self._slots = array("I", bytes(4 * _INITIAL_SLOTS))
        self._mask = _INITIAL_SLOTS - 1
        self._contested = contested
        self._exact: dict[str, int] = {}

    def first_line(self, record_id: str, digest: bytes, line: int) -> int | None:
        """Remember an id unless its key is known, and return the line of the one that was there first.

        Args:
            digest: the id's `id_digest`.
            line: line number of the record, from 1.
        """
        key_bytes = key_of(digest)
        if self._contested and key_bytes in self._contested:
            first = self._exact.setdefault(record_id, line)
            return None if first == line else first
        key = int.from_bytes(key_bytes, "little")
        slots, keys, mask = self._slots, self._keys, self._mask
        at = key & mask
        while position := slots[at]:
            if keys[position - 1] == key:
                return self._lines[position - 1]
            at = (at + 1) & mask
        keys.append(key)
        self._lines.append(line)
        slots[at] = len(keys)
        if 2 * len(keys) > mask:
            self._grow()
        return None

    def _grow(self) -> None:
        mask = self._mask = 2 * self._mask + 1
        slots = self._slots = array("I", bytes(4 * (mask + 1)))
        for position, key in enumerate(self._keys, 1):
            at = key & mask
            while slots[at]:
                at = (at + 1) & mask
            slots[at] = position


@dataclass
class Candidates:
    """Records whose ids have the same key as an earlier one's: 48 bytes each.

    Args:
        first: line of the earlier record.
        later: line of the later record.
        digests: SHA-256 of the later record's id, 32 bytes after 32 bytes.
    """

    first: array[int] = field(default_factory=lambda: array("Q"))
    later: array[int] = field(default_factory=lambda: array("Q"))
    digests: bytearray = field(default_factory=bytearray)

    def add(self, first: int, later: int, digest: bytes) -> None:
        self.first.append(first)
        self.later.append(later)
        self.digests += digest

    def __len__(self) -> int:
        return len(self.first)

    def digest(self, at: int) -> bytes:
        return bytes(self.digests[32 * at : 32 * at + 32])

    def by_first_line(self) -> list[int]:
        """Positions in the order of the earlier records, in which one pass over the input meets them."""
        return sorted(range(len(self.first)), key=self.first.__getitem__)
