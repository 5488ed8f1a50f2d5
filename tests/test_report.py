"""The report: of a real run, of an unfinished one, of hostile texts; and Snakemake's own report around it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.dom.minidom
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from shardmill.config import Config
from shardmill.files import zstd_writer
from shardmill.journal import encode_entry
from shardmill.monitor.samples import ServerSample
from shardmill.report.examples import cut
from shardmill.report.gather import without_passwords
from shardmill.report.page import write_report
from tests.histories import START, server_series, write_lines
from tests.pipeline import REPO, Workspace, prompts
from tests.test_monitor import EVIL, browse

PLOTS = ("throughput", "utilisation", "timeline", "lengths", "latency", "acceptance", "gpus", "progress")


class Page(HTMLParser):
    """What a page is made of: elements, the text of each section, and everything it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sections: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "section":
            self.sections.append(values.get("id") or "")
        for name in ("src", "href", "xlink:href", "data", "action"):
            if (value := values.get(name)) and not value.startswith(("#", "data:")):
                self.fetched.append(value)
        assert not [name for name in values if name.startswith("on")], values

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_page(path: Path) -> Page:
    """The page is whole, self-contained and free of code; returns it."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == [] and "script" not in page.tags and "iframe" not in page.tags
    assert "could not be made" not in text and "<!--" not in text.replace("<!--RUN-->", "")
    assert text.rstrip().endswith("</html>")
    for drawing in re.findall(r"<svg role=.*?</svg>", text, re.DOTALL):
        xml.dom.minidom.parseString(drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
        assert "#0102" not in drawing and "#0103" not in drawing  # every mark has become a colour of the page
    return page


@pytest.fixture
def synthetic(tmp_path: Path) -> Config:
    """An unfinished run of two hours with everything in it that a report can show, and hostile texts."""
    config = Config.model_validate(
        {
            "run": {"name": "t", "results": str(tmp_path / "results")},
            "prompts": {"path": f"{EVIL}.jsonl"},
            "model": {"source": "m"},
            "servers": {"gpus": [0, 1, 2]},
            "engine": {"kind": "external", "external": {"urls": [f"http://me:secret@10.0.0.{n}" for n in range(3)]}},
            "monitor": {"price_per_hour": 12.0},
        }
    )
    layout = config.layout
    for name, speed in (("0", 1.0), ("1", 0.8), ("2", 1.0)):
        series = server_series(7200, seed=int(name), gpu=name, speed=lambda at, f=speed: f)
        write_lines(layout.server_samples(name), (_with_a_crash(name, sample).to_json() for sample in series))
    line = {"k": 30, "n": 31, "r": 1, "j": 1, "v": {"ok": 30, EVIL: 1}, "w": {"13": 31}, "l": {"40": 20, "44": 11}}
    line |= {"h": {"38": 25}, "fr": {"stop": 30, "length": 1}, "x": {"0": [31, 40_000, 900, 1]}}
    write_lines(
        layout.shard_samples("00001"), ({"t": START + 10 * n, "d": n, "of": 900, **line} for n in range(1, 720))
    )
    forecast = {"s": START, "done": 100, "end": START + 9000, "low": START + 8500, "high": START + 9900, "free": 9e12}
    write_lines(layout.forecasts, ({"t": START + 60 * n, **forecast} for n in range(1, 120)))
    index = {"path": EVIL, "usable": 1900, "unusable": 0, "records": 1900, "digest": "d", "shards": []}
    stats = {"shard": "00000", "prompts": 1000, "accepted": 999, "rejected": 1, "usage": {"completion_tokens": 10**6}}
    stats |= {"verdicts": {"ok": 999, "looping": 1}, "finish_reasons": {"stop": 999}, "finished_at": START + 3000}
    for path, value in ((layout.prompt_index, index), (layout.stats("00000"), stats)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(value))
    reject = {"id": EVIL, "messages": [{"role": "user", "content": EVIL}], "reason": "looping", "detail": EVIL}
    reject["answer"] = {
        "content": "\x1b[31m" + EVIL,
        "reasoning_content": EVIL * 100,
        "usage": {"completion_tokens": 9},
    }
    good = {
        "id": "g",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<!--BODY-->$x$"}],
    }
    for path, record in ((layout.rejects("00000"), reject), (layout.completions("00000"), good)):
        with zstd_writer(path) as stream:
            stream.write(orjson.dumps(record) + b"\n")
    entry = {
        "id": "j",
        "kind": "answer",
        "fingerprint": "f",
        "verdict": "empty",
        "detail": EVIL,
        "answer": {"content": ""},
    }
    layout.journal("00001").parent.mkdir(parents=True)
    layout.journal("00001").write_bytes(encode_entry(entry) + b'{"crc":"torn')
    return config


def _with_a_crash(name: str, sample: ServerSample) -> ServerSample:
    if name == "2" and START + 3600 <= sample.at < START + 3700:
        sample.state, sample.message = "restarting", EVIL
    if name == "2" and sample.at >= START + 3700:
        sample.instance = 2
    return sample


def test_everything_that_a_run_can_show(synthetic: Config) -> None:
    path = write_report(synthetic)
    page, text = check_page(path), path.read_text(encoding="utf-8")
    assert page.sections == [
        "throughput",
        "utilisation",
        "time-line-and-alarms",
        "progress",
        "answer-lengths",
        "latency",
        "speculative-decoding",
        "gpus",
        "verdicts-and-finish-reasons",
        "examples",
        "cost",
        "provenance",
    ]
    assert page.tags.count("svg") >= len(PLOTS)
    shown = " ".join(page.text)
    for part in ("Not finished", "0.8", "of its peers' median", "went down", "24.00 USD", "looping", "empty", "6.00"):
        assert part in shown, part
    assert "secret" not in text and "http://***@10.0.0.0" in shown
    assert path.stat().st_size < 2 << 20


def test_texts_of_a_run_are_texts_in_the_page(synthetic: Config) -> None:
    page = check_page(write_report(synthetic))
    assert "img" not in page.tags
    shown = "".join(page.text)
    assert shown.count(EVIL) >= 5 and "\x1b" not in shown and "\\x1b[31m" in shown
    assert "<!--BODY-->$x$" in shown  # neither a place of the template nor mathematics


def test_the_report_in_a_real_browser(synthetic: Config, tmp_path: Path) -> None:
    from PIL import Image

    path = write_report(synthetic)
    for dark in (False, True):
        dom = browse(path.as_uri(), tmp_path, width=1000, dark=dark)
        assert "<title>t: report</title>" in dom
        image = Image.open(tmp_path / "shot.png").convert("L")
        corner = image.getpixel((2, 2))
        assert (corner < 60) if dark else (corner > 200)
        # The curves and their labels can be told from the ground.
        dots = image.histogram()
        assert sum(dots[:128] if not dark else dots[128:]) > 2000


def test_a_run_that_made_nothing(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"run": {"results": str(tmp_path)}, "prompts": {"path": "p"}, "model": {"source": "m"}}
    )
    page = check_page(write_report(config))
    assert "Nothing was made yet." in " ".join(page.text)


def test_a_fault_in_one_section_costs_that_section(synthetic: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Iterator[Any]:
        raise ZeroDivisionError(EVIL)

    monkeypatch.setattr("shardmill.report.page.cost_rows", broken)
    text = write_report(synthetic).read_text()
    assert "This section could not be made: ZeroDivisionError" in text and "Provenance" in text
    assert "script" not in Page(text).tags


def test_long_and_invisible_texts() -> None:
    assert cut("a" * 2000).startswith("a" * 400 + " [... 1,400 characters ...] a")
    assert cut("a\u202eb\ud800") == "a\\u202eb\\ud800"
    assert without_passwords({"a": ["https://u:p@h/x", 3, "a@b"]}) == {"a": ["https://***@h/x", 3, "a@b"]}


# In a pipeline


def test_a_run_ends_with_its_report(finished: Workspace) -> None:
    finished.configure(monitor={"report": True, "price_per_hour": 3.5})
    assert finished.finish().jobs == {"report": 1}
    page = check_page(finished.path("report.html"))
    shown = " ".join(page.text)
    assert "Finished and proven complete." in shown and "examples" in page.sections and "p0000" in shown
    assert finished.json("dataset", "manifest.json")["dataset"]["sha256"] in shown
    assert finished.run().did_nothing
    finished.path("dataset", "manifest.json").unlink()
    assert finished.finish().jobs == {"merge": 1, "report": 1}


def test_snakemakes_own_report(finished: Workspace) -> None:
    finished.configure(monitor={"report": True})
    finished.finish()
    finished.finish("--report", "snakemake.html")
    text = (finished.folder / "snakemake.html").read_text()
    assert "The run in one page" in text and "The proof of the dataset" in text
    assert '"Run"' in text and '"Proof"' in text


def test_an_unfinished_run_by_hand(workspace: Callable[..., Workspace]) -> None:
    work = workspace()
    work.write_prompts(prompts(40))
    command = work.start()
    work.await_journal(12, command)
    work.kill_everything()
    command.wait()
    code = [sys.executable, str(REPO / "scripts" / "report.py")]
    done = subprocess.run(code, cwd=work.folder, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "report: results/t/report.html" in done.stderr
    page = check_page(work.path("report.html"))
    assert "Not finished" in " ".join(page.text) and "throughput" in page.sections
    shutil.rmtree(work.path("samples"))  # as an old run has none
    assert subprocess.run(code, cwd=work.folder, capture_output=True, timeout=180, check=False).returncode == 0
    check_page(work.path("report.html"))
