"""One number for a set of ids, so that two sets can be compared without holding either."""

from __future__ import annotations

import hashlib

MODULUS = 1 << 256


def id_digest(record_id: str) -> bytes:
    """SHA-256 of an id's UTF-8 form, 32 bytes."""
    return hashlib.sha256(record_id.encode()).digest()


class IdsDigest:
    """Sum of the SHA-256 of ids modulo 2**256: the same for the same ids in whatever order.

    A multiset hash (the additive "AdHash" of Bellare and Micciancio, 1997): an id that is missing,
    foreign or there twice changes the sum. Parts that were summed apart can be merged. It shows
    faults, not forgery: whoever may choose ids freely could make two sets agree.
    """

    __slots__ = ("count", "total")

    def __init__(self, total: int = 0, count: int = 0) -> None:
        self.total = total
        self.count = count

    @classmethod
    def of_hex(cls, hexdigest: str, count: int) -> IdsDigest:
        """The digest that `hexdigest()` of `count` ids was taken from.

        Raises:
            ValueError: if `hexdigest` is no hexadecimal number.
        """
        return cls(int(hexdigest, 16), count)

    def add(self, record_id: str) -> None:
        self.add_digest(id_digest(record_id))

    def add_digest(self, digest: bytes) -> None:
        """Add an id by its `id_digest`, where a caller needs that anyway."""
        self.total = (self.total + int.from_bytes(digest, "big")) % MODULUS
        self.count += 1

    def merge(self, other: IdsDigest) -> None:
        """Add all ids of `other`."""
        self.total = (self.total + other.total) % MODULUS
        self.count += other.count

    def hexdigest(self) -> str:
        """The sum as 64 hex digits; all zeros for no ids."""
        return f"{self.total:064x}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IdsDigest):
            return NotImplemented
        return (self.total, self.count) == (other.total, other.count)

    __hash__ = None  # type: ignore[assignment]
