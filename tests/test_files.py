"""Files: a write that happens wholly or not at all, zstd that is whole or an error, lines split at line feeds only."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import UserError
from shardmill.files import (
    atomic_writer,
    canonical_json,
    iter_lines,
    iter_zstd_chunks,
    iter_zstd_lines,
    read_json,
    read_json_or_none,
    sha256_file,
    sha256_hex,
    write_bytes,
    write_json,
    zstd_writer,
)

SCRIPTS = Path(__file__).parent.parent / "scripts"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def frame(content: bytes, **settings: object) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True, **settings).compress(content)


# The atomic write


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path):
    target = tmp_path / "new" / "folder" / "file"
    write_bytes(target, b"one")
    write_bytes(target, b"two", mode=0o600)
    assert target.read_bytes() == b"two"
    assert target.stat().st_mode & 0o777 == 0o600
    assert names(target.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_fault_in_the_block_leaves_the_old_file(tmp_path: Path, error: type[BaseException]):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(error), atomic_writer(target) as handle:
        handle.write(b"new")
        handle.flush()
        raise error
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("written", [0, 1, 100_000])
def test_kill_9_in_mid_write_leaves_the_old_file(tmp_path: Path, written: int):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    code = (
        "import sys; from shardmill.files import atomic_writer\n"
        "with atomic_writer(sys.argv[1]) as handle:\n"
        "    handle.write(b'n' * int(sys.argv[2])); handle.flush()\n"
        "    print('written', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(target), str(written)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
    ) as child:
        assert child.stdout.readline() == b"written\n"
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    write_bytes(target, b"next")
    assert target.read_bytes() == b"next"


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path):
    target = tmp_path / "file"
    with atomic_writer(target) as first, atomic_writer(target) as second:
        first.write(b"a" * 10)
        second.write(b"b" * 5)
    assert target.read_bytes() == b"a" * 10, "the last to finish, and whole"
    assert names(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path):
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"a file where a folder should be")
    with pytest.raises(OSError, match="blocked"):
        write_bytes(blocked / "file", b"x")
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(OSError, match="taken"):
        write_bytes(taken, b"x")
    assert names(tmp_path) == ["blocked", "taken"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path):
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        write_bytes(tmp_path / "file", b"x")
    tmp_path.chmod(0o755)


def test_a_write_beyond_what_is_allowed_names_the_file_and_leaves_the_old_one(tmp_path: Path):
    """The kernel's limit on file sizes stands in for a full disk: the write fails in the same place."""
    target = tmp_path / "file"
    write_bytes(target, b"old")
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old_limit[1]))
    try:
        with pytest.raises(OSError, match=str(target)):
            write_bytes(target, b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


# JSON


def test_json_that_is_none_is_a_clear_line(tmp_path: Path):
    path = tmp_path / "x.json"
    for content in (b"", b'{"a": 1', b"\xff", b"nan"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.json: not valid JSON"):
            read_json(path)
        assert read_json_or_none(path) is None
    path.unlink()
    assert read_json_or_none(path) is None
    write_json(path, {"b": "é\u2028", "a": [1, None]})
    assert read_json(path) == read_json_or_none(path) == {"b": "é\u2028", "a": [1, None]}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def reordered(value: object) -> object:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=150, deadline=None)
@given(JSON, JSON)
def test_canonical_json_is_the_same_for_the_same_value_only(one: object, other: object):
    assert canonical_json(reordered(one)) == canonical_json(one)
    assert b"\n" not in canonical_json(one)
    assert orjson.loads(canonical_json(one)) == one
    if canonical_json(one) == canonical_json(other):
        assert one == other


def test_canonical_json_tells_types_apart():
    values = [1, 1.0, True, "1", None, [1], {"1": 1}, [], {}, "", 0, False, [None], {"1": None}]
    assert len({canonical_json(value) for value in values}) == len(values)


# Lines


@pytest.mark.parametrize(
    "line",
    ["a\u2028b\u2029c", "a\r", "\r\n".strip("\n"), "", "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g", "x" * 3_000_000, "\0", "é"],
    ids=["u2028", "cr", "crlf", "empty", "separators", "huge", "nul", "utf8"],
)
def test_lines_are_split_at_line_feeds_only(tmp_path: Path, line: str):
    lines = [b"first", line.encode(), b"", line.encode(), b"last"]
    path = tmp_path / "x.zst"
    with zstd_writer(path) as stream:
        stream.write(b"".join(item + b"\n" for item in lines))
    assert list(iter_zstd_lines(path)) == lines


def expected_lines(content: bytes) -> list[bytes]:
    """The definition: a line feed ends a line, and what follows the last one is a line if there is anything."""
    *whole, rest = content.split(b"\n")
    return [*whole, rest] if rest else whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\n", b"\n\n", b"a\nb", b"\r\n", b""]), max_size=12))
def test_lines_are_the_same_however_the_stream_is_cut(chunks: list[bytes]):
    assert list(iter_lines(chunks)) == expected_lines(b"".join(chunks))


# zstd


@pytest.fixture
def content() -> bytes:
    return b"".join(orjson.dumps({"id": i, "text": "é\u2028 " * (i % 5)}) + b"\n" for i in range(20))


def test_a_zstd_file_is_one_frame_with_a_checksum(tmp_path: Path, content: bytes):
    path = tmp_path / "x.zst"
    with zstd_writer(path, threads=-1) as stream:
        for at in range(0, len(content), 7):
            stream.write(content[at : at + 7])
    data = path.read_bytes()
    assert zstandard.get_frame_parameters(data).has_checksum
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    assert decompressor.decompress(data) == content
    assert decompressor.eof and not decompressor.unused_data
    assert sha256_file(path) == sha256_hex(data)


def test_a_fault_while_compressing_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError), zstd_writer(tmp_path / "x.zst") as stream:
        stream.write(b"x" * 1_000_000)
        raise ValueError
    assert names(tmp_path) == []


def test_truncated_anywhere_is_an_error(tmp_path: Path, content: bytes):
    for data in (frame(content), frame(content) + frame(content), frame(b""), frame(content[:1], level=1)):
        starts = {len(frame(content))} if data.startswith(frame(content)) else set()
        path = tmp_path / "x.zst"
        for length in range(len(data)):
            if length in starts:
                continue  # the end of the first frame: a whole file
            path.write_bytes(data[:length])
            with pytest.raises(UserError, match=r"x\.zst: (truncated|damaged) zstd file"):
                list(iter_zstd_lines(path))
        path.write_bytes(data)
        assert b"".join(iter_zstd_chunks(path)) in (content, content * 2, b"", content[:1])


def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path: Path, content: bytes):
    data, path = frame(content), tmp_path / "x.zst"
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            read = b"".join(iter_zstd_chunks(path))
        except UserError:
            continue
        assert read == content


@pytest.mark.parametrize("tail", [b"\0", b"junk", b"\x28\xb5\x2f", b"\x28\xb5\x2f\xfd", b"\n" * 1000])
def test_what_follows_the_last_frame_is_an_error(tmp_path: Path, content: bytes, tail: bytes):
    path = tmp_path / "x.zst"
    path.write_bytes(frame(content) + tail)
    with pytest.raises(UserError, match="zstd file"):
        list(iter_zstd_lines(path))


def test_many_frames_are_one_content(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch):
    """Frames end anywhere in what is read at once: at its first byte, in it, at its last one."""
    path = tmp_path / "x.zst"
    frames = [frame(content[at : at + 50]) for at in range(0, len(content), 50)]
    path.write_bytes(b"".join(frames) + frame(b""))
    for size in (1, 2, 3, 7, len(frames[0]), 1 << 20):
        monkeypatch.setattr("shardmill.files.ZSTD_CHUNK_BYTES", size)
        assert b"".join(iter_zstd_chunks(path)) == content


def test_no_file_and_an_empty_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        list(iter_zstd_lines(tmp_path / "none.zst"))
    (tmp_path / "empty.zst").touch()
    with pytest.raises(UserError, match="truncated zstd file"):
        list(iter_zstd_lines(tmp_path / "empty.zst"))
    with zstd_writer(tmp_path / "nothing.zst"):
        pass
    assert list(iter_zstd_lines(tmp_path / "nothing.zst")) == []


def peak_of(work: Callable[[], None]) -> int:
    """How far the most memory of a child that does `work` lies above that of one that does nothing, in bytes."""

    def run(task: Callable[[], None]) -> int:
        pid = os.fork()
        if not pid:
            task()
            os._exit(0)
        _, status, usage = os.wait4(pid, 0)
        assert status == 0
        return usage.ru_maxrss * 1024

    return run(work) - run(lambda: None)


def test_reading_takes_little_memory(tmp_path: Path):
    """64 MB that compress as text does are read in a small part of that."""
    path = tmp_path / "x.zst"
    with zstd_writer(path, level=1) as stream:
        for _ in range(64):
            stream.write(os.urandom(375_000).hex().encode() + b"\n" + b" " * 250_000)
    assert peak_of(lambda: sum(1 for _ in iter_zstd_lines(path))) < 32 << 20
