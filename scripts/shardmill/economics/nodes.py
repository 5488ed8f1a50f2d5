"""Kinds of GPU: what one of them can be expected to do and to cost.

The rate of the B200 was measured under load (1,914 to 2,448 tokens/s per GPU with 48 requests in flight; Qwen3.6-27B,
thinking on, EAGLE). Decoding is bound by memory bandwidth, so the others' are ESTIMATES: the B200's times the ratio of
bandwidths from the makers' data sheets. Prices are round figures for renting by the hour in 2026; put your own in.
"""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_RATE = 2300.0  # tokens per second, one B200
MEASURED_BANDWIDTH = 8.0  # TB/s
USUAL_TOKENS = 2306.0  # mean answer of the run in which that was measured


@dataclass(frozen=True)
class NodeKind:
    """A node that could be rented.

    Args:
        gpu: what its GPUs are called.
        gpus: how many it has.
        bandwidth: of one GPU's memory, TB/s.
        memory: of one GPU, GB.
        price: USD per GPU and hour.
    """

    gpu: str
    gpus: int
    bandwidth: float
    memory: int
    price: float

    @property
    def rate(self) -> float:
        """Tokens per second of one GPU under load."""
        return MEASURED_RATE * self.bandwidth / MEASURED_BANDWIDTH

    @property
    def is_measured(self) -> bool:
        return self.bandwidth == MEASURED_BANDWIDTH

    @property
    def name(self) -> str:
        return f"{self.gpus} x {self.gpu}"


NODES: tuple[NodeKind, ...] = (
    NodeKind("B200", 8, 8.0, 180, 5.0),
    NodeKind("B200", 7, 8.0, 180, 5.0),
    NodeKind("H200", 8, 4.8, 141, 3.5),
    NodeKind("H100", 8, 3.35, 80, 2.5),
    NodeKind("RTX PRO 6000", 4, 1.79, 96, 1.8),
    NodeKind("H100", 1, 3.35, 80, 2.5),
    NodeKind("RTX PRO 6000", 1, 1.79, 96, 1.8),
)
GPUS: dict[str, NodeKind] = {node.gpu: node for node in reversed(NODES)}
