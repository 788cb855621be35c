"""`squinchcomm doctor`: what is here, how fast it is, and what to do about problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

_MARKS = {"ok": "    ", "note": "note", "problem": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Heading under which it stands.
        name: What was looked at.
        value: What was found.
        level: "ok", "note" (works, but could be better) or "problem".
        next_step: What to do, if it is not ok.
    """

    section: str
    name: str
    value: str
    level: str = "ok"
    next_step: str = ""


Probe = Callable[[], Iterator[Finding]]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> None:
    """Looks at this machine and installation, measures codecs and loopback, and says what to do about problems.

    The exit status is 1 if there is a problem.
    """
    findings: list[Finding] = []
    for finding in _all_findings():
        if not as_json:
            _print(finding, findings[-1].section if findings else "")
        findings.append(finding)
    problems = [finding for finding in findings if finding.level == "problem"]
    if as_json:
        typer.echo(json.dumps({"ok": not problems, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        _print_verdict(problems)
    raise typer.Exit(1 if problems else 0)


def _all_findings() -> Iterator[Finding]:
    from squinchcomm.cli import doctor_probes, doctor_speed

    for section, probe in {**doctor_probes.PROBES, **doctor_speed.PROBES}.items():
        try:
            yield from probe()
        # A broken installation breaks in many ways; the report goes on and shows this one.
        except Exception as error:
            step = "reinstall with `pip install --force-reinstall .` in the checkout, or report this with SQUINCH_DEBUG=TRACE output"
            yield Finding(section, "check failed", f"{type(error).__name__}: {error}", "problem", step)


def _print(finding: Finding, last_section: str) -> None:
    if finding.section != last_section:
        typer.echo(f"{finding.section}")
    typer.echo(f"  {_MARKS[finding.level]} {finding.name:<22} {finding.value}")
    if finding.next_step:
        typer.echo(f"       {'':<22} -> {finding.next_step}")


def _print_verdict(problems: list[Finding]) -> None:
    if not problems:
        typer.echo("OK")
        return
    typer.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
    for number, finding in enumerate(problems, 1):
        typer.echo(f"  {number}. {finding.name}: {finding.value}")
        typer.echo(f"     {finding.next_step}")
