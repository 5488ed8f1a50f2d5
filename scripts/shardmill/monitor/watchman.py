"""Alarms in the log and on the console of a run, without a monitor open.

One of the shard jobs, that of the first open shard, looks once a minute over the whole run. It appends its forecast
and says every alarm once; those that others said before it are in `layout.alarms`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from ..logs import get_logger
from .samples import SampleLog, iter_values

if TYPE_CHECKING:
    from ..config import Config
    from .observer import Observer

log = get_logger(__name__)

LOOK_SECONDS = 60.0
TURN_SECONDS = 10.0  # between two looks at whose turn it is: a job may be over before its first minute is


class Watchman:
    """The part of a shard's job that watches over the run, in a thread of its own. Never raises."""

    def __init__(self, config: Config, shard: str, *, every: float = LOOK_SECONDS) -> None:
        self._config, self._layout, self._shard, self._every = config, config.layout, shard, every
        self._pause = min(TURN_SECONDS, every)
        self._observer: Observer | None = None
        self._forecasts = SampleLog(self._layout.forecasts)
        self._alarms = SampleLog(self._layout.alarms)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watchman", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _loop(self) -> None:
        while not self._stopped.wait(self._pause):
            try:
                if self._is_my_turn():
                    self.look()
            except Exception as error:  # figures must never end a shard
                log.debug("the watchman of shard %s: %r", self._shard, error)

    def _is_my_turn(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - self._layout.forecasts.stat().st_mtime < self._every - self._pause / 2:
                return False
        folder = self._layout.progress(self._shard).parent
        return min((path.stem for path in folder.glob("[0-9]*.json")), default="") == self._shard

    def look(self) -> None:
        """Look over the run once."""
        from .observer import Observer  # only the one that watches needs it

        if self._observer is None:
            self._observer = Observer(self._config)
        snapshot = self._observer.snapshot()
        self._forecasts.append(self._observer.forecast(snapshot))
        current = {f"{alarm['kind']}:{alarm['server']}": alarm for alarm in snapshot["alarms"]}
        said = self._said()
        for key, alarm in current.items():
            if key not in said:
                log.warning("alarm: %s", alarm["title"])
                line = {
                    "t": round(time.time(), 1),
                    "key": key,
                    "on": True,
                    "level": alarm["level"],
                    "text": alarm["title"],
                }
                self._alarms.append(line)
        for key in said - current.keys():
            log.info("no longer: %s", key)
            self._alarms.append({"t": round(time.time(), 1), "key": key, "on": False})

    def _said(self) -> set[str]:
        """Alarms that were raised and not cleared, by whichever job."""
        try:
            lines = self._layout.alarms.read_bytes().split(b"\n")
        except FileNotFoundError:
            return set()
        state: dict[str, bool] = {}
        for value in iter_values(lines):
            state[value.get("key", "")] = bool(value.get("on"))
        return {key for key, is_on in state.items() if is_on}
