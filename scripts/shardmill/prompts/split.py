"""Cutting the input into prompt shards, with every record accounted for.

Memory: one chunk of the input, one block of a shard, at most 32 bytes per prompt (`SeenIds`), 48 per
rejected duplicate (`Candidates`), and one index entry per shard. So 10 million prompts need about 330 MB. Where
shards are written side by side (`writers`), two shards of at most 8 MiB per process wait beside that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

import orjson

from ..config import Config, Prompts
from ..errors import UserError
from ..files import atomic_writer, fsync_folder, write_json
from ..ids import IdsDigest, id_digest
from ..logs import get_logger
from .hub import prompts_file
from .records import PromptRecord, Unusable, read_record
from .seen import Candidates, SeenIds, key_of
from .shards import Written, damaged_shards, make_durable, read_shard, sweep, write_shard, writing
from .source import WHERE, Source, check_unchanged, iter_batches, open_source
from .survey import ShardDigests, digest_of_all, no_records, shard_name
from .writers import SHARD_BYTES, WORTH_BYTES, Pending, Record, Submit, shard_writers, writers_wanted

__all__ = ["damaged_shards", "prompt_settings", "read_shard", "split"]

REJECTED_TEXT_CHARS = 500
SHOWN_REASONS = 3

logger = get_logger(__name__)


def prompt_settings(prompts: Prompts) -> dict[str, Any]:
    """The settings that decide what the shards hold; recorded in the index. The path is no part of them."""
    return prompts.model_dump(include={"field", "id_field", "turns", "system", "duplicates"})


def split(config: Config) -> dict[str, Any]:
    """Write the prompt shards, the rejects and, last of all, the index; return the index.

    A shard file that holds the right bytes already is left alone, its mtime included; files of shards
    that are no more are removed. While the shards are being replaced there is no index, so that an
    interrupted split is never taken for a finished one.

    Raises:
        UserError: if the input cannot be read, changes meanwhile, holds no usable record or (with
            `prompts.duplicates: refuse`) the same id twice; or if the disk refuses.
    """
    source = open_source(prompts_file(config))
    with writing(config.layout.prompt_index):
        config.layout.prompt_index.unlink(missing_ok=True)
    contested: frozenset[bytes] = frozenset()
    while True:
        try:
            return _Split(config, source, contested).run()
        except _Contested as error:
            contested |= error.keys


def _small_part(records: Iterator[Record], most: int) -> list[Record]:
    """The next records: `most` of them, unless the input ends or they grow beyond `SHARD_BYTES`."""
    part: list[Record] = []
    size = 0
    for record in records:
        part.append(record)
        size += len(record[0])
        if len(part) == most or size > SHARD_BYTES:
            break
    return part


class _Contested(Exception):
    """Different ids share a key (about once in 30 million runs of a million prompts): split again, minding those."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self.keys = keys
        super().__init__(f"{len(keys)} contested keys")


class _Split:
    """One pass over the input."""

    def __init__(self, config: Config, source: Source, contested: frozenset[bytes]) -> None:
        self.config = config
        self.settings = config.prompts
        self.layout = config.layout
        self.source = source
        self.digests = ShardDigests(config.shards.size)
        self.seen = SeenIds(contested)
        self.candidates = Candidates()
        self.reasons: Counter[str] = Counter()
        self.first_rejects: list[str] = []
        self.ids = IdsDigest()
        self.shard_ids = IdsDigest()
        self.kept = 0
        self.contested = contested
        self.bytes_read = 0
        self.is_read = False

    def run(self) -> dict[str, Any]:
        rejects_path = self.layout.prompt_rejects
        with writing(rejects_path), atomic_writer(rejects_path) as rejects:
            shards = self._write_shards(rejects)
            if keys := self._differing(self.candidates):
                raise _Contested(keys)
            check_unchanged(self.source)
        if not shards:
            raise no_records(self.source.path)
        if not self.ids.count:
            raise self._nothing_usable()
        return self._finish(shards)

    def _write_shards(self, rejects: IO[bytes]) -> list[dict[str, Any]]:
        shards = list(self._shards(rejects))
        for entry, digest in zip(shards, self.digests.finish(), strict=True):
            entry["digest"] = digest
        return shards

    def _shards(self, rejects: IO[bytes]) -> Iterator[dict[str, Any]]:
        """Write every shard; yields their index entries in order.

        Small shards of a large input go to processes of their own, at most two waiting per process.
        """
        pending: deque[Pending] = deque()
        size, most = self.config.shards.size, writers_wanted()
        records = self._records()
        with ExitStack() as stack:
            submit: Submit | None = None
            for number in count():
                head = _small_part(records, size)
                if not head:
                    break
                path = self.layout.prompt_shard(shard_name(number))
                if submit is None and most and not self.contested and self.bytes_read >= WORTH_BYTES:
                    submit = stack.enter_context(shard_writers(self.settings, most))
                is_whole = len(head) == size or self.is_read
                if submit and is_whole:
                    pending.append(submit(path, head))
                    if len(pending) >= 2 * most:
                        yield self._accept(pending.popleft(), rejects)
                    continue
                while pending:
                    yield self._accept(pending.popleft(), rejects)
                yield self._write(path, chain(head, islice(records, size - len(head))), head[0][1], rejects)
            while pending:
                yield self._accept(pending.popleft(), rejects)

    def _write(self, path: Path, records: Iterable[Record], first_line: int, rejects: IO[bytes]) -> dict[str, Any]:
        """Write one shard; returns its index entry."""
        self.shard_ids = IdsDigest()
        rejected_before = self.reasons.total()
        written = write_shard(path, self._usable(records, rejects))
        return self._entry(path, first_line, written, self.reasons.total() - rejected_before)

    def _accept(self, pending: Pending, rejects: IO[bytes]) -> dict[str, Any]:
        """Take a shard that another process wrote; one with an id that was seen before is written again here."""
        part, first_line = pending.result(), pending.records[0][1]
        for at, line in enumerate(part.lines):
            if self.seen.first_line("", part.digests[32 * at : 32 * at + 32], line) is not None:
                pending.discard()
                return self._write(pending.path, pending.records, first_line, rejects)
        for raw, record in part.unusable:
            self._reject(rejects, raw, record)
        with writing(pending.path):
            pending.accept(part)
        self.shard_ids = part.ids
        return self._entry(pending.path, first_line, part.written, len(part.unusable))

    def _entry(self, path: Path, first_line: int, written: Written, unusable: int) -> dict[str, Any]:
        self.kept += written.kept
        self.ids.merge(self.shard_ids)
        return {
            "name": path.name.partition(".")[0],
            "first_line": first_line,
            "records": self.shard_ids.count + unusable,
            "prompts": self.shard_ids.count,
            "unusable": unusable,
            "ids_digest": self.shard_ids.hexdigest(),
            "bytes": written.bytes,
            "sha256": written.sha256,
        }

    def _records(self) -> Iterator[Record]:
        for batch in iter_batches(self.source):
            self.digests.update(batch)
            self.bytes_read += len(batch.text)
            yield from zip(batch.lines, batch.numbers, strict=True)
        self.is_read = True

    def _usable(self, records: Iterable[Record], rejects: IO[bytes]) -> Iterator[bytes]:
        """JSON lines of the usable records; the others go to `rejects`."""
        settings, seen, add_digest = self.settings, self.seen, self.shard_ids.add_digest
        for raw, line in records:
            record = read_record(raw, line, settings)
            if isinstance(record, Unusable):
                self._reject(rejects, raw, record)
                continue
            digest = id_digest(record.id)
            first = seen.first_line(record.id, digest, line)
            if first is None or first == line:  # a shard that is written again meets its own ids
                add_digest(digest)
                yield record.encoded
            else:
                self._reject(rejects, raw, self._duplicate(record, digest, first))

    def _duplicate(self, record: PromptRecord, digest: bytes, first: int) -> Unusable:
        """Take a record whose id's key was seen before for a duplicate; `reject` is sure of it at the end only.

        Raises:
            UserError: with `duplicates: refuse`, where it is one.
        """
        if self.settings.duplicates == "reject":
            self.candidates.add(first, record.line, digest)
            return Unusable(record.line, "duplicate_id", f"the id {record.id!r} is that of line {first}")
        one = Candidates()
        one.add(first, record.line, digest)
        if keys := self._differing(one):
            raise _Contested(keys)
        # The change that made two lines alike may have happened only now, under our hands.
        check_unchanged(self.source)
        what = "hold the same prompt and no id of their own" if record.id_is_made else "have the same id"
        raise UserError(
            f"lines {first} and {record.line} of {self.source.path} {what} ({record.id!r})",
            where=WHERE,
            hint="make the ids unique, or set `prompts.duplicates: reject` to set the later ones aside",
        )

    def _differing(self, candidates: Candidates) -> frozenset[bytes]:
        """Keys of candidates that are no duplicates after all, by reading the earlier records once more."""
        keys: set[bytes] = set()
        order = candidates.by_first_line()
        position = 0
        for batch in iter_batches(self.source) if order else ():
            while position < len(order) and (line := candidates.first[order[position]]) <= batch.numbers[-1]:
                at = bisect_left(batch.numbers, line)
                known: bytes | None = None
                if batch.numbers[at] == line:
                    record = read_record(batch.lines[at], line, self.settings)
                    known = id_digest(record.id) if isinstance(record, PromptRecord) else None
                if known is None:
                    check_unchanged(self.source)
                    raise RuntimeError(f"line {line} of {self.source.path} was usable and is no more")
                while position < len(order) and candidates.first[order[position]] == line:
                    if candidates.digest(order[position]) != known:
                        keys.add(key_of(known))
                    position += 1
            if position == len(order):
                break
        return frozenset(keys)

    def _reject(self, rejects: IO[bytes], raw: bytes, record: Unusable) -> None:
        self.reasons[record.reason] += 1
        if len(self.first_rejects) < SHOWN_REASONS:
            self.first_rejects.append(f"line {record.line}: {record.reason}, {record.detail}")
        # Four bytes a character at most, so the rest of a huge line need not be decoded.
        text = raw[: 4 * REJECTED_TEXT_CHARS].decode(errors="replace")[:REJECTED_TEXT_CHARS]
        entry = {"line": record.line, "reason": record.reason, "detail": record.detail, "text": text}
        rejects.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))

    def _nothing_usable(self) -> UserError:
        return UserError(
            f"none of the {self.digests.records} records of {self.source.path} can be used "
            f"({'; '.join(self.first_rejects)})",
            where=WHERE,
            hint=f"see `prompts.field`, and {self.layout.prompt_rejects} for all of them",
        )

    def _finish(self, shards: list[dict[str, Any]]) -> dict[str, Any]:
        records, usable, unusable = self.digests.records, self.ids.count, self.reasons.total()
        if records != usable + unusable or records != sum(entry["records"] for entry in shards):
            raise AssertionError(f"{records} records read, but {usable} usable and {unusable} unusable written")
        names = [entry["name"] for entry in shards]
        index_path = self.layout.prompt_index
        with writing(index_path):
            make_durable(self.layout.prompt_shard(name) for name in names)
            removed = sweep(self.layout, names)
            fsync_folder(self.layout.prompt_shard(names[0]).parent)
            index = {
                "path": self.source.path,
                "size_bytes": self.source.size_bytes,
                "mtime_ns": self.source.mtime_ns,
                "shard_size": self.config.shards.size,
                "records": records,
                "usable": usable,
                "unusable": unusable,
                "digest": digest_of_all([entry["digest"] for entry in shards]),
                "settings": prompt_settings(self.settings),
                "ids_digest": self.ids.hexdigest(),
                "shards": shards,
            }
            write_json(index_path, index, sealed=True)
        self._report(usable, len(shards), removed)
        return index

    def _report(self, usable: int, shards: int, removed: int) -> None:
        logger.info(
            "%s prompts in %s shards (%s of them unchanged, %s old files removed)",
            f"{usable:,}",
            f"{shards:,}",
            f"{self.kept:,}",
            f"{removed:,}",
        )
        if self.reasons:
            kinds = ", ".join(f"{reason} {number:,}" for reason, number in self.reasons.most_common())
            logger.warning(
                "%s records cannot be used (%s); see %s",
                f"{self.reasons.total():,}",
                kinds,
                self.layout.prompt_rejects,
            )
