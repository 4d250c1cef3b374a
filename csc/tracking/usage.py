"""How busy the machine is while a task is trained: CPU, memory, disk, network and GPUs, by MLflow's own monitors.

MLflow could log them by itself, from a thread, at steps of its own. Here they go with the losses of an epoch, as means
over it: a training that resumes adds no point twice, and a server that is away is waited for by nobody.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Self

__all__ = ["Usage"]

SECONDS = 5.0  # between two samples


class Usage:
    """What the monitors see of this machine while it is entered."""

    def __init__(self) -> None:
        self._monitors = list(_monitors())
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="csc-usage")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SECONDS):
            with self._lock:
                self._collect()

    def _collect(self) -> None:
        for monitor in self._monitors:
            with contextlib.suppress(Exception):  # a driver that fails must not end a training
                monitor.collect_metrics()

    def means(self) -> dict[str, float]:
        """The mean of every number since it was asked last, by the name under which MLflow shows it."""
        with self._lock:
            self._collect()
            found = [monitor.aggregate_metrics() for monitor in self._monitors]
            for monitor in self._monitors:
                monitor.clear_metrics()
        return {f"system/{name}": float(value) for numbers in found for name, value in numbers.items()}


def _monitors() -> Iterator[Any]:
    """Those of MLflow's monitors that work here: few machines have a GPU, and a container may hide parts of one."""
    try:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    except ImportError:  # no psutil
        return
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        with contextlib.suppress(Exception):
            monitor = kind()
            monitor.collect_metrics()  # that of the CPU counts from its first sample on
            monitor.clear_metrics()
            yield monitor
