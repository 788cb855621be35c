"""A report as one HTML page that needs nothing else: no scripts, no fonts, no pictures from elsewhere."""

from __future__ import annotations

import time
from html import escape

from squinchcomm import __version__
from squinchcomm.cli import report_svg
from squinchcomm.cli.report_model import Chart, HeatMap, Report, Section, Table, span

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --rule: #d5dae0;
  --bad: #b42318; --c0: #0b62a8; --c1: #b3450a; --c2: #1c7a4a; --c3: #7b3fa3; --c4: #8a6a00; --c5: #b0246b; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1d2127; --ink: #e8eaed; --soft: #a3abb5;
  --rule: #363c45; --bad: #ff8a7a; --c0: #6bb3f2; --c1: #f29a61; --c2: #62c792; --c3: #c79af0; --c4: #dcbb4e; --c5: #f28abb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1400px; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 32px 0 8px; } h3 { font-size: 15px; margin: 0 0 2px; }
p { margin: 4px 0; } .soft, .note, .legend, .empty { color: var(--soft); font-size: 13px; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; margin: 12px 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; min-width: 0; }
.whole { grid-column: 1 / -1; overflow-x: auto; }
dl { display: flex; flex-wrap: wrap; gap: 6px 28px; margin: 8px 0; } dt { color: var(--soft); font-size: 13px; } dd { margin: 0; }
dl div { min-width: 90px; overflow-wrap: anywhere; }
ul.findings { margin: 8px 0; padding-left: 20px; color: var(--bad); overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } th.text, td.text { text-align: left; overflow-wrap: anywhere; }
tr.bad td { color: var(--bad); }
svg { display: block; width: 100%; height: auto; margin-top: 6px; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--rule); } svg .level { stroke: var(--soft); stroke-dasharray: 5 4; }
svg .line path { fill: none; stroke: currentColor; stroke-width: 1.6; } svg .line circle { fill: currentColor; }
svg .band { fill: var(--c0); fill-opacity: .18; } svg .cell { fill: var(--c1); }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.key { display: inline-block; width: 14px; height: 3px; margin: 0 5px 3px 10px; background: currentColor; }
.key.wide { height: 10px; margin-bottom: 0; background: var(--c0); opacity: .25; }
.scale { display: inline-block; width: 80px; height: 10px; background: linear-gradient(to right, transparent, var(--c1)); }
"""


def page(report: Report) -> str:
    """The whole document."""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime())
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head>"
    )
    opening = (
        f"<h1>{escape(report.title)}</h1>"
        f'<p class="soft">From {escape(report.source)}, made {escape(made)} by squinchcomm {escape(__version__)}.</p>'
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    return f"{head}<body><main>{opening}{notes}{''.join(map(_section, report.sections))}</main></body></html>\n"


def _section(section: Section) -> str:
    begin, end = span(section.parts)
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in section.facts.items())
    findings = "".join(f"<li>{escape(finding)}</li>" for finding in section.findings)
    listed = f'<ul class="findings">{findings}</ul>' if findings else ""
    cards = "".join(_card(part, begin, end) for part in section.parts)
    return f'<section><h2>{escape(section.title)}</h2><dl>{facts}</dl>{listed}<div class="grid2">{cards}</div></section>'


def _card(part: Chart | HeatMap | Table, begin: float, end: float) -> str:
    note = f'<p class="note">{escape(part.note)}</p>' if part.note else ""
    if isinstance(part, Table):
        drawn, kind = _table(part), "card whole"
    elif isinstance(part, Chart):
        drawn, kind = report_svg.chart(part, begin, end), "card"
    else:
        drawn, kind = report_svg.heat_map(part, begin, end), "card"
    return f'<article class="{kind}"><h3>{escape(part.title)}</h3>{note}{drawn}</article>'


def _table(table: Table) -> str:
    if not table.rows:
        return f'<p class="empty">{escape(table.nothing)}</p>'
    kinds = [' class="text"' if column in table.texts else "" for column in table.columns]
    head = "".join(f"<th{kind}>{escape(column)}</th>" for kind, column in zip(kinds, table.columns, strict=True))
    body = "".join(
        ('<tr class="bad">' if place in table.bad else "<tr>")
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for place, row in enumerate(table.rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
