"""An S3 bucket's prefix: files put there whole and verified, and brought back verified.

Every object carries the SHA-256 and mtime of its file. A put is checked by the server (Content-MD5, which every
S3 endpoint knows, unlike the newer checksums), so a half-sent object never comes to be. Large files go up in parts;
an upload that was broken off is taken up again at the parts that are there already. Requests are tried again
by botocore, with growing pauses, after throttling, server errors and lost connections.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import CHUNK_BYTES, atomic_writer, sha256_file

PART_BYTES = 64 << 20  # S3 wants at least 5 MiB and at most 10,000 parts
ATTEMPTS = 6
READ_TIMEOUT = 120.0  # seconds
KEY = "output.mirror"


class Bucket:
    """What lies below `s3://bucket/prefix`.

    Args:
        url: with or without a slash at its end.
        part_bytes: files above this size go up in parts of it.

    Raises:
        UserError: from every method, if the storage cannot be used; it names the object.
    """

    def __init__(self, url: str, part_bytes: int = PART_BYTES) -> None:
        import boto3  # half a second, which only those pay who use it
        from botocore.config import Config as Settings

        self.name, _, prefix = url.removeprefix("s3://").partition("/")
        self.prefix = prefix.strip("/")
        self.part_bytes = part_bytes
        self.uploads: dict[str, dict[str, str]] = {}  # unfinished ones by object, for `save` to keep
        self.save: Callable[[], None] = lambda: None
        settings = Settings(
            retries={"mode": "adaptive", "total_max_attempts": ATTEMPTS},
            connect_timeout=20,
            read_timeout=READ_TIMEOUT,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        with self._in_words(""):
            self._client = boto3.client("s3", config=settings)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def list(self, under: str = "") -> dict[str, int]:
        """Size in bytes of every object, by its name below the prefix."""
        found: dict[str, int] = {}
        with self._in_words(under):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self.key(under))
            for page in pages:
                for entry in page.get("Contents", ()):
                    found[entry["Key"].removeprefix(self.key(""))] = entry["Size"]
        return found

    def put_bytes(self, name: str, data: bytes, metadata: dict[str, str] | None = None) -> None:
        """Put one object, checked by the server."""
        digests = {"sha256": hashlib.sha256(data).hexdigest(), **(metadata or {})}
        with self._in_words(name):
            self._client.put_object(
                Bucket=self.name, Key=self.key(name), Body=data, ContentMD5=_md5(data), Metadata=digests
            )

    def put_file(self, name: str, path: Path) -> None:
        """Put a file as it is now; FileNotFoundError if it is gone."""
        status = path.stat()
        metadata = {"mtime-ns": str(status.st_mtime_ns)}
        if status.st_size <= self.part_bytes:
            self.put_bytes(name, path.read_bytes(), metadata)
        else:
            self._put_parts(name, path, {**metadata, "sha256": sha256_file(path)})

    def _put_parts(self, name: str, path: Path, metadata: dict[str, str]) -> None:
        """Upload in parts, going on with a broken-off upload of the same content."""
        where = {"Bucket": self.name, "Key": self.key(name)}
        with self._in_words(name), open(path, "rb") as handle:
            there = self._parts_there(name, where, metadata["sha256"])
            if there is None:
                there = {}
                upload = self._client.create_multipart_upload(**where, Metadata=metadata)["UploadId"]
                self.uploads[name] = {"id": upload, "sha256": metadata["sha256"]}
                self.save()
            where["UploadId"] = self.uploads[name]["id"]
            parts = []
            for number, data in enumerate(iter(lambda: handle.read(self.part_bytes), b""), start=1):
                etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
                if there.get(number) != etag:
                    sent = self._client.upload_part(**where, PartNumber=number, Body=data, ContentMD5=_md5(data))
                    etag = sent["ETag"]  # with some encryptions it is no MD5
                parts.append({"PartNumber": number, "ETag": etag})
            self._client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})
        del self.uploads[name]
        self.save()

    def _parts_there(self, name: str, where: dict[str, str], sha256: str) -> dict[int, str] | None:
        """ETags of the parts of the upload to go on with; None if there is none, then what others left is removed."""
        from botocore.exceptions import ClientError

        known = self.uploads.get(name) or {}
        listed = self._client.list_multipart_uploads(Bucket=where["Bucket"], Prefix=where["Key"])
        for entry in listed.get("Uploads", ()):
            if entry["Key"] != where["Key"]:
                continue
            if known.get("sha256") == sha256 and entry["UploadId"] == known["id"]:
                pages = self._client.get_paginator("list_parts").paginate(**where, UploadId=known["id"])
                return {part["PartNumber"]: part["ETag"] for page in pages for part in page.get("Parts", ())}
            with contextlib.suppress(ClientError):
                self._client.abort_multipart_upload(**where, UploadId=entry["UploadId"])
        return None

    def get_bytes(self, name: str) -> tuple[bytes, dict[str, str]]:
        """A small object and its metadata, verified."""
        with self._in_words(name):
            for attempt in range(ATTEMPTS):
                answer = self._client.get_object(Bucket=self.name, Key=self.key(name))
                with contextlib.suppress(*_broken_reads()):
                    data, metadata = answer["Body"].read(), answer["Metadata"]
                    if hashlib.sha256(data).hexdigest() == metadata.get("sha256"):
                        return data, metadata
                time.sleep(min(2.0**attempt / 10, 5))
        raise UserError("its content is not what was put there", where=self._where(name), hint="remove that object")

    def get_file(self, name: str, path: Path) -> None:
        """Bring a file back with its old mtime; it takes its name only when its content is proven."""
        with self._in_words(name):
            for attempt in range(ATTEMPTS):
                answer = self._client.get_object(Bucket=self.name, Key=self.key(name))
                with contextlib.suppress(_Changed, *_broken_reads()):
                    self._receive(answer, path)
                    return
                time.sleep(min(2.0**attempt / 10, 5))
        raise UserError("its content is not what was put there", where=self._where(name), hint="remove that object")

    def _receive(self, answer: dict[str, Any], path: Path) -> None:
        digest, metadata = hashlib.sha256(), answer["Metadata"]
        with atomic_writer(path) as handle:
            for chunk in answer["Body"].iter_chunks(CHUNK_BYTES):
                handle.write(chunk)
                digest.update(chunk)
            if digest.hexdigest() != metadata.get("sha256"):
                raise _Changed
        mtime = int(metadata.get("mtime-ns", time.time_ns()))
        os.utime(path, ns=(mtime, mtime))

    def _where(self, name: str) -> str:
        return f"s3://{self.name}/{self.key(name)}"

    @contextlib.contextmanager
    def _in_words(self, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except NoCredentialsError:
            raise UserError(
                "no credentials", where=KEY, hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        except (BotoCoreError, ClientError) as error:
            hint = "see the endpoint (AWS_ENDPOINT_URL), the bucket and the credentials"
            raise UserError(f"object storage: {error}", where=self._where(name), hint=hint) from None


class _Changed(Exception):
    """What came is not what was put."""


def _broken_reads() -> tuple[type[Exception], ...]:
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from urllib3.exceptions import HTTPError

    return HTTPClientError, IncompleteReadError, HTTPError


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
