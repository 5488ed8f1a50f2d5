"""Clients to compare with: the ideal closed loop, and one that pins requests to servers. Both cost as little as we can.

Their HTTP is written by hand over asyncio, so that what is measured is where they send, not what they cost.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import orjson

from benchmarks.node import Sample

# Beyond what a server runs, so that it never waits for its client.
LOOP_DEPTH = 48 + 24


def _body(number: int) -> bytes:
    text = f"Question {number}: " + "how does the mill at the river turn its stones " * 4
    return orjson.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 32768, "seed": number})


class _Line:
    """One keep-alive connection, used by one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, number: int) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        reader, writer = self._streams
        body = _body(number)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head[:80]
        length = next(
            int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()


def closed_loop(urls: Sequence[str], *, seconds: float) -> None:
    """Keep every server full, with a queue behind, for some time."""
    asyncio.run(_closed_loop(urls, seconds))


async def _closed_loop(urls: Sequence[str], seconds: float) -> None:
    numbers = itertools.count(1_000_000)
    until = time.monotonic() + seconds

    async def keep_asking(url: str) -> None:
        line = _Line(url)
        try:
            while time.monotonic() < until:
                await line.ask(next(numbers))
        finally:
            line.close()

    tasks = [asyncio.create_task(keep_asking(url)) for url in urls for _ in range(LOOP_DEPTH)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def loop_rate(samples: Sequence[Sample]) -> float:
    """Tokens per second over the middle of a closed loop, when all servers were surely full."""
    third = len(samples) // 3
    start, end = samples[third], samples[-2]
    return (sum(end.tokens) - sum(start.tokens)) / (end.at - start.at)


def pinned(urls: Sequence[str], requests: int, *, window: int) -> float:
    """One pass over all requests, dealt round-robin, `window` in flight per server; returns CPU seconds.

    A request waits for its own server's window, and all that follow wait behind it.
    """
    before = time.process_time()
    asyncio.run(_pinned(urls, requests, window))
    return time.process_time() - before


async def _pinned(urls: Sequence[str], requests: int, window: int) -> None:
    gates = [asyncio.Semaphore(window) for _ in urls]
    free: list[list[_Line]] = [[_Line(url) for _ in range(window)] for url in urls]

    async def one(server: int, number: int) -> None:
        line = free[server].pop()
        try:
            await line.ask(number)
        finally:
            free[server].append(line)
            gates[server].release()

    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            server = number % len(urls)
            await gates[server].acquire()
            group.create_task(one(server, number))
    for line in itertools.chain(*free):
        line.close()
