"""Parquet prompts, turned into the same raw JSON lines that the other formats hold."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import orjson

from ..errors import UserError

BATCH_ROWS = 512


def iter_rows(path: str) -> Iterator[list[bytes]]:
    """Rows as JSON objects in column order, in batches of at most `BATCH_ROWS`.

    Dates and times become ISO 8601 text, decimals text, bytes base64 text, a NaN null. A row with
    text that is not valid UTF-8 becomes a line that is not valid UTF-8 either, so that it is set
    aside with that reason, and not the whole file.

    Raises:
        UserError: if the file is damaged or uses what pyarrow cannot read.
        OSError: if it cannot be read.
    """
    # pyarrow takes a third of a second to import, which only those who use it should pay.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise UserError(f"two columns are named {twice[0]!r}", where=path)
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                if batch.num_rows:
                    yield _encode(batch)
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"cannot be read as Parquet ({_one_line(error)})", where=path) from None
    except OSError as error:
        # pyarrow reports a truncated or garbled file as an OSError without an errno.
        if error.errno is not None:
            raise
        raise UserError(f"damaged Parquet file ({_one_line(error)})", where=path) from None


def _encode(batch: Any) -> list[bytes]:
    try:
        return [orjson.dumps(row, default=_default) for row in batch.to_pylist()]
    except (UnicodeDecodeError, TypeError):
        return [_encode_row(batch.slice(position, 1)) for position in range(batch.num_rows)]


def _encode_row(row: Any) -> bytes:
    try:
        return orjson.dumps(row.to_pylist()[0], default=_default)
    except UnicodeDecodeError:
        # The hash makes the shard's digest follow the row's content all the same.
        return b'{"invalid": "\xff", "sha256": "%s"}' % hashlib.sha256(row.serialize()).hexdigest().encode()
    except TypeError as error:
        raise UserError(f"holds values that have no JSON form ({_one_line(error)})") from None


def _default(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    # Decimal, timedelta: exact as text, and never a number that was rounded on the way.
    return str(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
