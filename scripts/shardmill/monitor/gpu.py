"""GPU figures by NVML, where there is a driver; nothing anywhere else.

A driver that hangs must not hang the caller, so a thread of its own asks it. Function names, units and bits:
NVIDIA's NVML API reference (nvml.h).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# The columns of a row: name as in CUDA_VISIBLE_DEVICES, use in percent, memory used in GB, SM clock in MHz, power in
# W, temperature in Celsius, and the bits of NVML's clock event ("throttle") reasons. None where NVML does not say.
GPU_FIELDS = ("gpu", "use", "memory_gb", "sm_clock_mhz", "power_w", "temperature_c", "reasons")

# nvmlClocksEventReason*; an idle GPU (bit 0) and clocks that somebody set (1, 8) are no throttling.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}


def reason_names(bits: int | None) -> list[str]:
    """What slows a GPU's clocks, in words."""
    return [name for bit, name in REASONS.items() if (bits or 0) & bit]


class GpuReader:
    """The latest figures of some GPUs.

    Args:
        gpus: values of CUDA_VISIBLE_DEVICES, indices or UUIDs; empty: nothing is ever asked.
        interval: seconds between two looks.
    """

    def __init__(self, gpus: tuple[str, ...], interval: float) -> None:
        self._gpus, self._interval = gpus, interval
        self._rows: list[list[Any]] = []
        self._read_at = 0.0
        self._thread: threading.Thread | None = None

    def latest(self) -> list[list[Any]]:
        """Rows of `GPU_FIELDS`; empty before the first look, and where the driver stopped answering."""
        if not self._gpus:
            return []
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="nvml", daemon=True)
            self._thread.start()
            self._thread.join(timeout=0.2)
        is_fresh = time.monotonic() - self._read_at < 3 * self._interval
        return self._rows if is_fresh else []

    def _loop(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [(name, _handle(pynvml, name)) for name in self._gpus]
        except Exception:  # no driver, no such GPU: then there is nothing to see
            return
        while True:
            self._rows = [_row(pynvml, name, handle) for name, handle in handles]
            self._read_at = time.monotonic()
            time.sleep(self._interval)


def _handle(nvml: Any, name: str) -> Any:
    """NVML's handle of a device. Its indices are those of CUDA under CUDA_DEVICE_ORDER=PCI_BUS_ID, and the same as
    CUDA's own wherever all GPUs of a node are alike."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        # CUDA takes the beginning of a UUID as well.
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(name):
                return handle
        raise


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _row(nvml: Any, name: str, handle: Any) -> list[Any]:
    def ask(read: Callable[[], float]) -> Any:
        try:
            return round(read(), 1)
        except Exception:  # a figure that this GPU does not have
            return None

    return [
        name,
        ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9),
        ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
    ]
