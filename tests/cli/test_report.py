"""`squinchcomm report`: what a page says of real and made-up recordings, that it needs nothing else, and how a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from squinchcomm import recordings
from squinchcomm.cli.app import app
from squinchcomm.cli.report_model import quantity
from squinchcomm.cli.report_svg import chart
from squinchcomm.errors import ConfigError, SquinchError
from tests.cli.test_top import Ranks
from tests.cli.test_trace import call, save
from tests.dashboards.prometheus import Prometheus, configuration, free_ports, wait_for
from tests.worlds import ones, outcomes, run_world

CHROMIUM = shutil.which("chromium")
CHARTS = ["Bandwidth", "Compression ratio", "Quantisation error", "Skew", "Waiting, encoding, decoding"]


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """A page taken apart: cards by title, each with its texts, lines and cells; and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cards: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self._row: list[str] = []
        self.feed(text)
        self.close()

    def card(self, title: str) -> dict[str, Any]:
        (found,) = [card for card in self.cards if card["title"] == title]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.fetched += [f"{tag} {name}" for name in values if name in ("src", "href", "action", "srcset", "data")]
        if tag not in ("meta", "line", "rect", "circle", "path", "polygon"):
            self._open.append(tag)
        if tag == "article":
            self.cards.append({"title": "", "lines": {}, "values": [], "rows": [], "cells": 0, "text": ""})
        elif tag == "g" and "data-line" in values:
            self.cards[-1]["lines"][values["data-line"]] = 0
        elif tag == "circle":
            self.cards[-1]["lines"][list(self.cards[-1]["lines"])[-1]] += 1
        elif tag == "rect":
            self.cards[-1]["cells"] += 1
        elif tag == "tr":
            self._row = []
        elif tag == "td":
            self._row.append("")

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
        if tag == "tr" and self._row:
            self.cards[-1]["rows"].append(self._row)

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "h3":
            self.cards[-1]["title"] += data
        elif inside == "td":
            self._row[-1] += data
        elif inside == "li":
            self.findings.append(data)
        elif inside == "title" and self.cards:
            self.cards[-1]["values"].append(data)
        elif self.cards:
            self.cards[-1]["text"] += data


def page_of(folder: Path, *arguments: str | Path) -> tuple[Page, str]:
    target = folder.parent / "page.html"
    done = report(folder, "-o", target, *arguments)
    assert done.exit_code == 0, done.output
    text = target.read_text()
    page = Page(text)
    assert page.fetched == [] and "script" not in page.tags and "url(" not in text and "@import" not in text
    return page, text


def test_a_real_job(tmp_path: Path) -> None:
    def body(comm: Any) -> None:
        data = np.random.default_rng(comm.rank).standard_normal(60_000).astype(np.float32)
        for _ in range(60):
            if comm.rank == 2:
                threading.Event().wait(0.01)
            comm.allreduce(data.copy(), "avg", codec="squinch6")

    run_world(3, body, recorder_dir=tmp_path / "rec", seed=7)
    page, _ = page_of(tmp_path / "rec")
    assert [card["title"] for card in page.cards] == [
        *CHARTS, "Waits for each peer", "Ranks", "Slowest collectives", "Failures", "Settings",
    ]  # fmt: skip
    assert list(page.card("Bandwidth")["lines"]) == ["rank 0", "rank 1", "rank 2"]
    ratios = [float(each.rsplit(": ")[1]) for each in page.card("Compression ratio")["values"]]
    assert max(ratios) == pytest.approx(5.3, abs=0.1)
    errors = [float(each.rsplit(": ")[1]) for each in page.card("Quantisation error")["values"]]
    assert 3 <= len(errors) <= 6 and all(0.02 < error < 0.08 for error in errors)
    rows = {row[0]: row for row in page.card("Ranks")["rows"]}
    assert [row[2] for row in rows.values()] == ["61", "61", "61"]
    waited = {rank: row[9] for rank, row in rows.items()}
    assert waited["2"].endswith(" s") or waited["2"].endswith(" ms")
    assert page.card("Waits for each peer")["cells"] > 60
    slowest = page.card("Slowest collectives")["rows"]
    assert len(slowest) == 15 and all(
        row[1].startswith(("allreduce of 60000 float32 (avg, squinch6", "barrier")) for row in slowest
    )
    assert "No recorded call failed." in page.card("Failures")["text"] and page.findings == []
    assert ["SQUINCH_SEED", "7", "all"] in page.card("Settings")["rows"]


def test_a_job_that_failed(tmp_path: Path) -> None:
    def body(comm: Any) -> None:
        comm.allreduce(ones(10 + comm.rank // 2))

    assert all(isinstance(each, SquinchError) for each in outcomes(3, body, recorder_dir=tmp_path / "rec"))
    page, _ = page_of(tmp_path / "rec")
    assert any("rank 2 differs in call #1" in finding for finding in page.findings)
    failures = page.card("Failures")["rows"]
    assert {row[0] for row in failures} == {"0", "1", "2"} and all(row[1] == "#1" for row in failures)
    assert "MismatchError" in {row[3] for row in failures}
    assert all(row[-1] == "failed" for row in page.card("Ranks")["rows"])


def test_numbers_of_known_recordings(tmp_path: Path) -> None:
    """Rank 1 makes each call 4 ms after rank 0; each sends 1 MB in 10 ms, 6 to 1, and waits for half of the 8 ms."""
    for rank in range(2):
        calls = [
            call(
                number,
                queued=100 + number * 0.01 + rank * 0.004,
                sent=1_000_000,
                raw=6_000_000,
                wait_s=0.004,
                waits={1 - rank: 0.004},
            )
            for number in range(500)
        ]
        save(tmp_path / "rec", rank, 2, calls, settings={"SQUINCH_CODEC": ("squinch6", "int8")[rank]})
    page, _ = page_of(tmp_path / "rec")

    def values(title: str, line: str) -> list[str]:
        return [each.rsplit(": ")[1] for each in page.card(title)["values"] if each.startswith(line)]

    assert np.median([float(each.removesuffix(" MB/s")) for each in values("Bandwidth", "rank 0")]) == pytest.approx(
        100, rel=0.1
    )
    assert set(values("Compression ratio", "all")) == {"6"}
    assert {float(each.removesuffix(" ms")) for each in values("Skew", "median")} == {4.0}
    assert {float(each.removesuffix(" %")) for each in values("Waiting, encoding, decoding", "wait")} == {50.0}
    assert ["SQUINCH_CODEC", "int8", "rank 1"] in page.card("Settings")["rows"]
    (first, _) = page.card("Ranks")["rows"]
    assert first[3:7] == ["500 MB", "0 B", "6.00", "50 %"] and first[9] == "2 s"


def test_many_ranks_share_a_band(tmp_path: Path) -> None:
    for rank in range(40):
        save(tmp_path / "rec", rank, 40, [call(number, sent=1000) for number in range(20)])
    page, text = page_of(tmp_path / "rec")
    assert list(page.card("Bandwidth")["lines"]) == ["median of 40 ranks"] and 'class="band"' in text
    assert len(page.card("Ranks")["rows"]) == 40


def test_what_recordings_say_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    save(
        tmp_path / "rec",
        0,
        2,
        [call(0, codec=evil, state="failed", error=evil, message=evil)],
        host=evil,
        settings={evil: evil},
        failure=evil,
    )
    page, text = page_of(tmp_path / "rec")
    assert "<script" not in text and evil in page.card("Failures")["rows"][0][3]


def test_damaged_and_empty_recordings(tmp_path: Path) -> None:
    folder = tmp_path / "rec"
    save(folder, 0, 2, [])
    path = save(folder, 1, 2, [call(number) for number in range(10)])
    path.write_bytes(path.read_bytes()[:-40])
    (folder / "other.jsonl").write_text("{")
    page, text = page_of(folder)
    assert "Damaged: other.jsonl: no header" in text and f"Damaged: {path.name}: line 11" in text
    assert len(page.card("Ranks")["rows"]) == 2


def test_several_communicators(tmp_path: Path) -> None:
    for place in range(10):
        save(tmp_path / "rec", 0, 1, [call(0, sent=1000 * place + 1)], group=f"{place:08x}")
    page, text = page_of(tmp_path / "rec")
    assert re.findall(r"<h2>Communicator (\w+)", text) == [f"{place:08x}" for place in range(9, 1, -1)]
    assert "left out; --group shows one of them: 00000001, 00000000" in text
    page, text = page_of(tmp_path / "rec", "--group", "00000000")
    assert len([card for card in page.cards if card["title"] == "Ranks"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either DIR"),
        (["DIR", "--prometheus", "http://h:1"], "give either DIR"),
        (["DIR"], "holds no recordings"),
        (["/nowhere"], "is no folder"),
        (["DIR", "-o", "page.txt"], "ends in .html"),
        (["DIR", "-o", "/nowhere/page.html"], "-o /nowhere/page.html"),
        (["--prometheus", "http://127.0.0.1:1"], "no answer"),
        (["--prometheus", "http://127.0.0.1:1", "--last", "soon"], "--last soon"),
        (["--prometheus", "http://127.0.0.1:1", "--group", "a"], "--group belongs to recordings"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_nothing_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    done = report(*(str(tmp_path / "empty") if each == "DIR" else each for each in arguments))
    assert isinstance(done.exception, ConfigError) and words in str(done.exception)
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B/s", "0 B/s"),
        (1.5e6, "B/s", "1.5 MB/s"),
        (0.012, "s", "12 ms"),
        (0, "s", "0 s"),
        (3e-7, "s", "0.3 µs"),
        (90, "s", "90 s"),
        (5.3333, "", "5.33"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


# What a browser makes of the page, written into it by a script that only the test adds.
MEASURE = """<script>
const boxes = [...document.querySelectorAll('svg')].map(svg => {
  const frame = svg.getBoundingClientRect();
  const out = [...svg.querySelectorAll('text, path, rect, circle')].filter(each => {
    const box = each.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  });
  return {title: svg.getAttribute('aria-label'), width: frame.width, height: frame.height, out: out.length,
          drawn: svg.querySelectorAll('path, rect').length};
});
const style = getComputedStyle(document.body);
document.body.innerHTML = '<pre id="found">' + JSON.stringify({boxes, ground: style.backgroundColor, ink: style.color,
  wide: document.documentElement.scrollWidth > innerWidth}) + '</pre>';
</script></body>"""


def chromium(folder: Path, page: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run([*command, *flags, page.as_uri()], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(folder: Path, text: str, *flags: str) -> dict[str, Any]:
    page = folder / "measured.html"
    page.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</body>", MEASURE))
    found = re.search(r'<pre id="found">(.*?)</pre>', chromium(folder, page, *flags, "--dump-dom"), re.DOTALL)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1])
    return result


def lightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / (3 * 255)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")
def test_a_browser_shows_it_in_light_and_dark_wide_and_narrow(tmp_path: Path) -> None:
    for rank in range(3):
        calls = [
            call(
                number,
                queued=100 + number * 0.01 + rank * 0.001,
                sent=10_000 + number,
                raw=60_000,
                wait_s=0.004,
                waits={(rank + 1) % 3: 0.004},
            )
            for number in range(300)
        ]
        for each in calls[::50]:
            each.error_ratio = 0.045
        save(tmp_path / "rec", rank, 3, calls)
    _, text = page_of(tmp_path / "rec")
    for width, dark in ((1300, False), (1300, True), (500, False)):
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        found = measured(tmp_path, text, f"--window-size={width},1000", scheme)
        assert [box["title"] for box in found["boxes"]] == [*CHARTS, "Waits for each peer"]
        assert all(box["width"] > 300 and box["height"] > 50 and box["drawn"] > 0 and box["out"] == 0 for box in found["boxes"])
        assert found["wide"] is False
        assert (lightness(found["ground"]) < 0.2 < 0.8 < lightness(found["ink"])) is dark
    picture = tmp_path / "page.png"
    chromium(
        tmp_path,
        tmp_path / "page.html",
        "--window-size=1300,2000",
        "--blink-settings=preferredColorScheme=1",
        f"--screenshot={picture}",
    )
    from matplotlib.image import imread

    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    for colour in ((0x0B, 0x62, 0xA8), (0xB3, 0x45, 0x0A), (0x1C, 0x7A, 0x4A)):  # lines of the three ranks
        assert np.count_nonzero((np.abs(pixels - colour).max(-1)) < 12) > 100


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian package prometheus)")
def test_a_real_prometheus(tmp_path: Path) -> None:
    """A job that runs, then fails: `top` and `report` from what a server has of it."""
    port = free_ports(4)
    (tmp_path / "job").mkdir()
    job = Ranks(tmp_path / "job", port)
    try:
        with Prometheus(configuration(tmp_path, port, 3), tmp_path / "data", port + 3) as server:
            url = f"http://{server.address}"

            def seen() -> str:
                shown = CliRunner().invoke(app, ["top", "--prometheus", url, "--once", "--interval", "1"])
                return shown.output if "behind: 1" in shown.output else ""

            shown = wait_for(seen, "late rank in Prometheus", 120)
            assert shown.count("allreduce squinch6") == 2 and "down: Prometheus cannot scrape it" in shown
            time.sleep(15)
            (job.folder / "fail").touch()
            wait_for((job.folder / "passed.0").exists, "failure")
            time.sleep(4)
            target = tmp_path / "page.html"
            done = report("--prometheus", url, "--last", "10m", "-o", target)
            assert done.exit_code == 0, done.output
            other = report("--prometheus", url, "--job", "other", "-o", target)
            assert isinstance(other.exception, ConfigError) and "it has squinchcomm" in str(other.exception)
    finally:
        job.end()
    page = Page(target.read_text())
    assert page.fetched == [] and "script" not in page.tags
    assert list(page.card("Bandwidth")["lines"]) == ["rank 0", "rank 1"]
    for title in CHARTS:
        card = page.card(title)
        assert card["lines"] and all(count >= 3 for count in card["lines"].values()), title
    assert page.card("Waits of each rank")["cells"] > 5
    compressed = next(row for row in page.card("Collectives")["rows"] if row[:2] == ["allreduce", "squinch6"])
    assert int(compressed[2]) > 50 and 5.2 < float(compressed[4]) < 5.4
    assert {row[0] for row in page.card("Failures")["rows"]} >= {"rank 0", "rank 1"}
    assert any("mismatch" in finding for finding in page.findings)
    found, _ = recordings.read_folder(job.folder / "rec")
    counted = sum(each.header.next_call for each in found)
    rows = page.card("Ranks")["rows"]
    assert sum(int(row[3]) for row in rows) == pytest.approx(counted, abs=4)  # the calls that failed are not among them


def test_an_empty_chart_says_so() -> None:
    from squinchcomm.cli.report_model import Chart

    assert "no values" in chart(Chart("x", "", ""), 0.0, 1.0)
