"""From prompts, tokens and rates to hours and money. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Of the ideal, over a whole run: shard tails, the last answers, refills (docs/benchmarks.md).
WHOLE_RUN = 0.97


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from, in words."""

    value: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """What is left of a run on one node.

    Args:
        tokens: to be generated.
        rate: tokens per second of all servers together, in steady state.
        gpus: that are paid for.
        price_per_hour: of the whole node; None where it is not known.
    """

    tokens: float
    rate: float
    gpus: int
    price_per_hour: float | None

    @property
    def hours(self) -> float:
        return self.tokens / (self.rate * WHOLE_RUN) / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus

    @property
    def cost(self) -> float | None:
        return None if self.price_per_hour is None else self.hours * self.price_per_hour


def knee(levels: list[tuple[int, float]], share: float = 0.95) -> tuple[int, bool]:
    """Where more requests in flight stop paying.

    Args:
        levels: (requests in flight, tokens per second), growing.
        share: of the best rate that is good enough.

    Returns:
        the fewest requests that reach that share, and whether the rate still rises at the last level.

    Raises:
        ValueError: if nothing was generated.
    """
    best = max((rate for _, rate in levels), default=0.0)
    if best <= 0:
        raise ValueError("no tokens at any level")
    point = next(count for count, rate in levels if rate >= share * best)
    rises = len(levels) > 1 and levels[-1][1] > 1.05 * max(rate for _, rate in levels[:-1])
    return point, rises
