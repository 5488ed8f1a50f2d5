"""The report's page. Everything that comes from a run passes `esc` on its way into it."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from ..config import Config
from ..files import write_bytes
from ..logs import get_logger
from ..monitor.alarm import Alarm
from ..monitor.observer import alarm_title
from ..redaction import public_settings
from ..run_state import human_time
from . import plots
from .examples import Example
from .gather import RunData, gather
from .tables import cost_rows, facts, provenance, server_rows

log = get_logger(__name__)

Section = Callable[[RunData], str]


def write_report(config: Config) -> Path:
    """Make the report of a run, finished or not; returns its path.

    Raises:
        OSError: if it cannot be written.
    """
    data = gather(config)
    path = config.layout.report
    write_bytes(path, render(data).encode("utf-8", "replace"))
    return path


def render(data: RunData) -> str:
    """The page as HTML."""
    parts = [_part(title, section, data) for title, section in _SECTIONS]
    rest = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    page = []
    for name, value in (
        ("TITLE", esc(f"{data.config.run.name}: report")),
        ("RUN", esc(data.config.run.name)),
        ("LEAD", _lead(data)),
        ("BODY", "\n".join(part for part in parts if part)),
        ("MADE", esc(f"Made {moment(data.at)} from {data.config.layout.root}.")),
    ):
        # Never over what was put in before: texts of a run may hold such marks too.
        head, mark, rest = rest.partition(f"<!--{name}-->")
        assert mark, name
        page += [head, value]
    return "".join([*page, rest])


def _part(title: str, section: Section, data: RunData) -> str:
    """One section; a fault in it costs that section, not the report."""
    try:
        body = section(data)
    except Exception as error:
        log.exception("report: the section %r failed", title)
        body = f'<p class="bad">This section could not be made: {esc(type(error).__name__)}: {esc(error)}</p>'
    anchor = title.lower().replace(" ", "-").replace(",", "")
    return f'<section id="{anchor}"><h2>{esc(title)}</h2>\n{body}\n</section>' if body else ""


def esc(value: Any) -> str:
    """Text of the run as HTML text."""
    return html.escape(str(value), quote=True)


def moment(at: float) -> str:
    """A moment in local time, with its zone."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], *, left: int = 1) -> str:
    """A table; the first `left` columns hold text, the others figures. Cells are escaped."""
    columns = "".join(f'<th class="{"text" if n < left else "figure"}">{esc(name)}</th>' for n, name in enumerate(head))
    lines = [
        "<tr>"
        + "".join(f'<td class="{"text" if n < left else "figure"}">{esc(cell)}</td>' for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    ]
    if not lines:
        return ""
    top = f"<thead><tr>{columns}</tr></thead>" if columns else ""
    return f'<div class="scroll"><table>{top}<tbody>{"".join(lines)}</tbody></table></div>'


def bars(counts: dict[str, int]) -> str:
    """Counts as a table with bars."""
    total, most = sum(counts.values()), max(counts.values(), default=0)
    if not total:
        return ""
    rows = [
        f'<tr><td class="text">{esc(name)}</td><td class="figure">{count:,}</td>'
        f'<td class="figure">{count / total:.2%}</td>'
        f'<td class="wide"><svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{max(0.4, 100 * count / most):.2f}" height="8" rx="1"/></svg></td></tr>'
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    return f'<div class="scroll"><table class="bars"><tbody>{"".join(rows)}</tbody></table></div>'


def _lead(data: RunData) -> str:
    prompts, state = data.snapshot["prompts"], data.snapshot["state"]
    said = {
        "finished": "Finished and proven complete.",
        "running": "Still running; this is how far it is.",
        "stopped": "Not finished; this is how far it came.",
    }.get(state, "Nothing was made yet.")
    figures = [(f"{value}", label) for label, value in facts(data)]
    cards = "".join(f"<div><b>{esc(value)}</b><span>{esc(label)}</span></div>" for value, label in figures)
    share = prompts["done"] / prompts["total"] if prompts["total"] else 0.0
    state_class = "good" if state in ("finished", "running") else "warn"
    meter = f'<progress max="1" value="{share:.4f}">{share:.1%}</progress>'
    return f'<p><strong class="{state_class}">{esc(said)}</strong></p>{meter}<div class="cards">{cards}</div>'


def _throughput(data: RunData) -> str:
    names, rows = server_rows(data)
    return plots.throughput(data) + table(names, rows)


def _timeline(data: RunData) -> str:
    return plots.timeline(data) + _alarm_table(data.alarms)


def _alarm_table(alarms: list[Alarm]) -> str:
    if not alarms:
        return '<p class="dim">No alarms.</p>'
    rows = [
        (
            moment(a.since),
            "" if a.kind == "down" else human_time(a.until - a.since) if a.until else "to the end",
            a.level,
            alarm_title(a),
        )
        for a in alarms[:200]
    ]
    more = f'<p class="dim">{len(alarms) - 200:,} more are left out.</p>' if len(alarms) > 200 else ""
    return table(("since", "for", "level", "alarm"), rows, left=4) + more


def _verdicts(data: RunData) -> str:
    jobs, progress = data.history.jobs, data.progress
    # The statistics tell the verdict of every prompt's last answer; the samples, of every answer.
    parts = []
    if progress.verdicts:
        parts.append(f"<h3>Prompts of finished shards, by their last verdict</h3>{bars(dict(progress.verdicts))}")
    if jobs.verdicts:
        parts.append(f"<h3>All answers, retried ones included</h3>{bars(dict(jobs.verdicts))}")
    if reasons := dict(progress.finish_reasons or jobs.finish_reasons):
        parts.append(f"<h3>Finish reasons</h3>{bars(reasons)}")
    return "".join(parts)


def _examples(data: RunData) -> str:
    order = sorted(data.examples, key=lambda verdict: (verdict == "ok", verdict))
    return "".join(
        f"<h3>{esc(verdict)}</h3>" + "".join(_example(example) for example in data.examples[verdict])
        for verdict in order
    )


def _example(example: Example) -> str:
    tokens = f", {example.tokens:,} tokens" if example.tokens is not None else ""
    head = f"{esc(example.prompt_id)} <span class=dim>{esc(example.outcome)}{tokens}</span>"
    texts = (
        ("why", example.detail),
        ("prompt", example.prompt),
        ("thought", example.thought),
        ("answer", example.answer or "(no text)"),
    )
    body = "".join(f"<dt>{name}</dt><dd><pre>{esc(text)}</pre></dd>" for name, text in texts if text)
    return f"<details><summary>{head}</summary><dl>{body}</dl></details>"


def _cost(data: RunData) -> str:
    return table((), cost_rows(data))


def _provenance(data: RunData) -> str:
    rows = table((), provenance(data))
    settings = orjson.dumps(public_settings(data.config), option=orjson.OPT_INDENT_2).decode()
    return f"{rows}<details><summary>all settings</summary><pre>{esc(settings)}</pre></details>"


_SECTIONS: tuple[tuple[str, Section], ...] = (
    ("Throughput", _throughput),
    ("Utilisation", plots.utilisation),
    ("Time line and alarms", _timeline),
    ("Progress", plots.progress),
    ("Answer lengths", plots.lengths),
    ("Latency", plots.latency),
    ("Speculative decoding", plots.acceptance),
    ("GPUs", plots.gpus),
    ("Verdicts and finish reasons", _verdicts),
    ("Examples", _examples),
    ("Cost", _cost),
    ("Provenance", _provenance),
)
