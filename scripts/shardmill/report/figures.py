"""Drawing with matplotlib, as SVG that goes into a page and takes the page's colours, light or dark.

Colours are drawn as marks that cannot occur otherwise and replaced by CSS variables afterwards. Text stays text.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = 8
INK, DIM, GRID = "#010203", "#010204", "#010205"
_MARKS = {INK: "var(--ink)", DIM: "var(--dim)", GRID: "var(--line)", "#010206": "var(--warn)", "#010207": "var(--bad)"}
WARN, BAD = "#010206", "#010207"
_MARKS |= {f"#01030{n}": f"var(--s{n})" for n in range(SERIES)}
WIDTH = 9.2  # inches

_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": DIM,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def colour(index: int) -> str:
    """Mark of the n-th series' colour."""
    return f"#01030{index % SERIES}"


@contextmanager
def figure(height: float, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of the report's width, and its axes (as `Figure.subplots` gives them)."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        drawing = Figure(figsize=(WIDTH, height), layout="constrained")
        yield drawing, drawing.subplots(**options)


def svg(drawing: Figure, name: str, label: str) -> str:
    """The figure as an SVG element.

    Args:
        name: unique within the page; keeps the ids of several figures apart.
        label: what it shows, for those who cannot see it.
    """
    import html

    import matplotlib

    sink = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        drawing.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for mark, variable in _MARKS.items():
        text = text.replace(mark, variable)
    text = re.sub(r'\bid="(?!m|p|image|c)[a-zA-Z]+2?d?_?\d*"', "", text)
    head = f'<svg role="img" aria-label="{html.escape(label)}"'
    text = re.sub(
        r'<svg\b[^>]*?(viewBox="[^"]*")[^>]*>', rf'{head} \1 xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1
    )
    return re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--sans)", text)


def moments(seconds: Iterable[float]) -> list[datetime]:
    """Seconds since the epoch as local times, as matplotlib takes them."""
    return [datetime.fromtimestamp(value) for value in seconds]


def time_axis(axes: Axes, span: tuple[float, float]) -> None:
    """Local time along x, over the whole span."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=3, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    begin, end = span
    axes.set_xlim(*moments([begin, max(end, begin + 60)]))


def log_axis(axes: Axes, ticks: Sequence[float], low: float, high: float) -> None:
    """A logarithmic x axis with plain numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(shown, [f"{tick:,g}" for tick in shown])
    axes.set_xlim(low, high)


def thousands(axes: Axes) -> None:
    """Plain numbers with separators along y, from 0."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_ylim(bottom=0)
