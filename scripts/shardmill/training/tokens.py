"""Completions as token ids and loss masks, in batches."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..config_training import Training
from ..files import atomic_writer
from ..quality.verdicts import NATURAL_ENDS
from .compare import difference
from .masking import Rendering, Template, TokenRow, Unmaskable, prompt_text, render_row, texts_to_encode, tokens_of
from .report import Report
from .rows import Row, turn_rows, whole_row
from .tokenizer import encode

# What is rendered before it is tokenized at once, over all cores.
BATCH_ROWS = 256
BATCH_CHARACTERS = 4_000_000
# Of these completions with token ids all are compared with the template's rendering.
ALWAYS_CHECKED = 100
# A row group is written when it holds so many tokens: about 20 MB of memory.
GROUP_TOKENS = 1 << 22
GROUP_ROWS = 1 << 16

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("loss_mask", pa.list_(pa.field("element", pa.int8(), nullable=False)), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
    ]
)

Write = Callable[[Row, TokenRow], None]


class TokenWriter:
    """Rows to a Parquet file, a row group at a time."""

    def __init__(self, file: pq.ParquetWriter) -> None:
        self._file = file
        self.rows = 0
        self._start()

    def _start(self) -> None:
        self._names: list[str] = []
        self._turns, self._lengths = array("i"), array("i")
        self._ids, self._offsets, self._masks = array("i"), array("i", [0]), bytearray()

    def write(self, row: Row, tokens: TokenRow) -> None:
        self._names.append(row.id)
        self._turns.append(row.turn)
        self._lengths.append(len(tokens.ids))
        self._ids.extend(tokens.ids)
        self._masks += tokens.mask()
        self._offsets.append(len(self._ids))
        self.rows += 1
        if len(self._ids) >= GROUP_TOKENS or len(self._names) >= GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held as one row group."""
        if not self._names:
            return
        offsets = _int32(self._offsets)
        columns = [
            pa.array(self._names, pa.string()),
            _int32(self._turns),
            pa.ListArray.from_arrays(offsets, _int32(self._ids), type=SCHEMA.field("input_ids").type),
            pa.ListArray.from_arrays(
                offsets,
                pa.Array.from_buffers(pa.int8(), len(self._masks), [None, pa.py_buffer(self._masks)]),
                type=SCHEMA.field("loss_mask").type,
            ),
            _int32(self._lengths),
        ]
        self._file.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._start()


def _int32(values: array[int]) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])


@contextmanager
def token_writer(path: Path, facts: dict[str, str]) -> Iterator[TokenWriter]:
    """A writer of a Parquet file that takes its name only when the block ends without an error.

    Args:
        facts: go into the file's metadata.
    """
    schema = SCHEMA.with_metadata(facts)
    with (
        atomic_writer(path) as handle,
        pq.ParquetWriter(
            handle,
            schema,
            compression="zstd",
            use_dictionary=["turn", "loss_mask.list.element"],
            write_statistics=False,
        ) as file,
    ):
        writer = TokenWriter(file)
        yield writer
        writer.flush()


@dataclass(slots=True)
class _Pending:
    """A row that waits for its tokens: given, or to be made from its rendering."""

    row: Row
    record: dict[str, Any]
    rendering: Rendering | None = None
    tokens: TokenRow | None = None


class Tokenizing:
    """Turns completions into token rows.

    Args:
        template: the model's tokenizer and template.
        training: the settings.
        report: counts what happens.
        write: takes each row that is to be written, in order.
    """

    def __init__(self, template: Template, training: Training, report: Report, write: Write) -> None:
        self.template = template
        self.training = training
        self.report = report
        self._write = write
        self._pending: list[_Pending] = []
        self._characters = 0
        self._with_ids = 0

    def add(self, record: dict[str, Any]) -> None:
        """Take a completion; its rows are written with its batch."""
        if self.training.multi_turn == "per_turn":
            for row in turn_rows(record):
                self._add_row(row, record)
        else:
            self._add_whole(record)
        if len(self._pending) >= BATCH_ROWS or self._characters >= BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Tokenize and write what was taken."""
        pending, self._pending, self._characters = self._pending, [], 0
        texts = [texts_to_encode(entry.rendering) if entry.rendering else [] for entry in pending]
        flat = [text for group in texts for text in group]
        encoded = iter(self.template.backend.encode_batch_fast(flat, add_special_tokens=False))
        for entry, group in zip(pending, texts, strict=True):
            ids = [next(encoded).ids for _ in group]
            if entry.tokens is None:
                self._finish(entry, ids)
            else:
                self._deliver(entry.row, entry.tokens)

    def _add_whole(self, record: dict[str, Any]) -> None:
        row = whole_row(record, self.training.loss_on)
        if len(row.targets) == 1:
            self._add_row(row, record)
            return
        try:
            self._queue(_Pending(row, record, rendering=render_row(self.template, row)))
        except Unmaskable:
            self.report.notes["conversations_split_by_turn"] += 1
            for turn in turn_rows(record):
                self._add_row(turn, record)

    def _add_row(self, row: Row, record: dict[str, Any]) -> None:
        """Queue a row of one turn."""
        try:
            if row.token_ids:
                self._queue(_Pending(row, record, tokens=self._given(row)))
            else:
                self._queue(_Pending(row, record, rendering=render_row(self.template, row)))
        except Unmaskable as error:
            self.report.add_unmasked(row.id, error.reason, error.detail)

    def _queue(self, entry: _Pending) -> None:
        if entry.rendering:
            self._characters += len(entry.rendering.text)
            self.report.notes["prompt_changed_by_the_answer"] += entry.rendering.prefix_changed
        self._pending.append(entry)

    def _finish(self, entry: _Pending, encoded: list[list[int]]) -> None:
        assert entry.rendering is not None
        try:
            tokens = tokens_of(self.template, entry.rendering, encoded)
        except Unmaskable as error:
            if len(entry.row.targets) == 1:
                self.report.add_unmasked(entry.row.id, error.reason, error.detail)
            else:
                self._finish_by_turn(entry.record)
            return
        self.report.notes["rendered_by_the_template"] += 1
        self.report.notes["without_an_end_token"] += not tokens.has_end_token
        self._deliver(entry.row, tokens)

    def _finish_by_turn(self, record: dict[str, Any]) -> None:
        """One row after the other, for the rare conversation that shows only now that it must be split."""
        self.report.notes["conversations_split_by_turn"] += 1
        for row in turn_rows(record):
            try:
                if row.token_ids:
                    self._deliver(row, self._given(row))
                    continue
                rendering = render_row(self.template, row)
            except Unmaskable as error:
                self.report.add_unmasked(row.id, error.reason, error.detail)
                continue
            texts = texts_to_encode(rendering)
            self._finish(_Pending(row, record, rendering), [encode(self.template.tokenizer, text) for text in texts])

    def _given(self, row: Row) -> TokenRow:
        """The engine's own token ids; a sample of them is compared with the template's rendering.

        Raises:
            Unmaskable: if there are none in truth, or their prompt cannot be rendered where it is missing.
        """
        assert row.token_ids is not None
        completion, prompt = list(row.token_ids["completion"]), row.token_ids.get("prompt")
        if not completion:
            raise Unmaskable("no_tokens", "the engine returned an empty list of token ids")
        if prompt is None:
            self.report.notes["prompts_rendered_by_the_template"] += 1
            prompt = encode(self.template.tokenizer, prompt_text(self.template, row))
        ends = self.template.is_end_token(completion[-1])
        self.report.notes["token_ids_of_the_engine"] += 1
        if self._is_checked(row.id):
            self._compare(row, prompt, completion)
        if not ends and row.finish_reasons[0] in NATURAL_ENDS and self.template.end_token is not None:
            # Some engines leave out the token that ended the answer; a drafter must learn to stop, too.
            self.report.notes["end_tokens_added"] += 1
            completion.append(self.template.end_token)
        return TokenRow([*prompt, *completion], ((len(prompt), len(prompt) + len(completion)),))

    def _is_checked(self, name: str) -> bool:
        self._with_ids += 1
        if self._with_ids <= ALWAYS_CHECKED:
            return True
        digest = hashlib.sha256(name.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.training.check_share * 2**64

    def _compare(self, row: Row, prompt: list[int], completion: list[int]) -> None:
        try:
            found = difference(self.template, row, prompt, completion)
        except Unmaskable as error:
            self.report.add_checked(row.id, f"{error.reason}: {error.detail}")
            return
        if found.is_blank:
            self.report.notes["blanks_differ_from_the_template"] += 1
        self.report.add_checked(row.id, found.text)

    def _deliver(self, row: Row, tokens: TokenRow) -> None:
        limit = self.training.max_length
        if limit is not None and len(tokens.ids) > limit:
            if self.training.too_long == "drop":
                self.report.dropped += 1
                return
            tokens = tokens.truncated(limit)
            if not tokens.supervised:
                self.report.truncated_to_nothing += 1
                return
            self.report.truncated += 1
        self.report.add(tokens.supervised, len(tokens.ids), has_thought=row.has_thought)
        self._write(row, tokens)
