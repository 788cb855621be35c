"""`squinchcomm simulate`: the table, the files, the errors."""

from __future__ import annotations

import builtins
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from squinchcomm.cli.app import app
from squinchcomm.cli.simulate_plot import growing
from squinchcomm.cost import Layout
from squinchcomm.errors import ConfigError
from squinchcomm.machine import REPORTED_RATES
from tests.cli.command import squinchcomm

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


def simulate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def data(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if not line.startswith("#")]


def named(output: str) -> list[dict[str, str]]:
    heading = next(line for line in output.splitlines() if " algbw " in line and " ring " in line and "pairwise" in line)
    columns = heading.lstrip("#").split()
    return [dict(zip(columns, row, strict=True)) for row in data(output)]


def test_a_table_and_json(tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    flags = ["-g", "8,64", "--ranks-per-host", "8", "--link", "1Gbit,100Gbit", "-b", "4K", "-e", "256M", "-f", "256"]
    done = squinchcomm("simulate", *flags, "-J", raw)
    assert (done.returncode, done.stderr) == (0, "")
    shown = named(done.stdout)
    assert len(shown) == 2 * 2 * (1 + 2 + 2)  # 4K goes lossless whatever the codec
    written = json.loads(raw.read_text())
    assert written["machine"]["mtu"] == 1500
    assert [codec["name"] for codec in written["codecs"]] == ["none", "squinch6"]
    for row, found in zip(shown, written["rows"], strict=True):
        assert int(row["size"]) == found["size"]
        assert row["choice"] == found["choice"]
        chosen = found["predictions"][found["choice"]]
        assert float(row[row["choice"]]) == pytest.approx(chosen["time_s"] * 1e6, rel=0.01, abs=0.1)
        assert float(row["algbw"]) == pytest.approx(found["size"] / chosen["time_s"] / 1e9, abs=0.001)
    one_host, many_hosts = shown[:10], shown[10:]
    assert {row["wire"] for row in one_host} == {"0"}
    assert {row["hierarchical"] for row in one_host} == {"-"}
    assert many_hosts[4]["choice"] == "hierarchical"
    assert float(many_hosts[4]["speed"]) > 4  # 6 bits instead of 32, on a slow link


def test_constants_can_be_given() -> None:
    flags = ["-g", "4", "--link", "10Gbit", "--codec", "squinch6", "-b", "64M", "-e", "64M"]
    plain = simulate(*flags)
    assert plain.exit_code == 0
    times = {"plain": float(data(plain.stdout)[0][7])}
    for flag, value in {
        "--latency": "100000",
        "--frame": "100000",
        "--encoded-chunk": "100000",
        "--hop": "100000",
        "--sockets": "0.01",
        "--cores": "0.01",
        "--efficiency": "0.01",
        "--codec-rates": "0.1,0.1,0.1",
        "--memory": "0.1",
        "--mtu": "576",
    }.items():
        done = simulate(*flags, flag, value)
        assert done.exit_code == 0, done.output
        assert "or as given" in done.stdout
        times[flag] = float(data(done.stdout)[0][7])
    slow = {flag: took for flag, took in times.items() if took > 1.5 * times["plain"]}
    assert set(times) - set(slow) == {"plain", "--mtu"}


@pytest.mark.parametrize("flag", ["--local-frame", "--chunk"])
def test_constants_of_lossless_frames_inside_hosts_can_be_given(flag: str) -> None:
    flags = ["-g", "8", "--hosts", "2", "--link", "10Gbit", "--codec", "none", "-b", "1M", "-e", "1M"]
    times = [float(named(simulate(*flags, *more).stdout)[0]["hierarchical"]) for more in ([], [flag, "100000"])]
    assert times[1] > 2 * times[0]


def test_lossless_sums_of_two_bytes_are_never_hierarchical() -> None:
    done = simulate("-g", "8", "--hosts", "2", "--link", "1Gbit", "-b", "1M", "-e", "1M", "-d", "bfloat16")
    lossless, encoded = named(done.stdout)
    assert (lossless["codec"], lossless["hierarchical"], lossless["choice"]) == ("none", "-", "pairwise")
    assert (encoded["codec"], encoded["choice"]) == ("squinch6", "hierarchical")


def test_the_smallest_compressed_size_is_that_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUINCH_MIN_COMPRESS_BYTES", "1K")
    done = simulate("-b", "4K", "-e", "4K", "--link", "1Gbit")
    assert [row[5] for row in data(done.stdout)] == ["none", "squinch6"]


def test_measured_constants() -> None:
    done = simulate("-g", "2", "--measure", "-b", "1M", "-e", "1M")
    assert done.exit_code == 0, done.output
    assert "# constants measured here" in done.stdout
    assert len(data(done.stdout)) == 4


def test_100000_ranks_in_no_time() -> None:
    start = time.monotonic()
    done = simulate("-g", "100000", "--ranks-per-host", "8", "--link", "100Gbit", "-b", "1K", "-e", "64G")
    assert done.exit_code == 0, done.output
    assert (time.monotonic() - start) / len(data(done.stdout)) < 0.2


def test_codecs_of_unknown_speed_have_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REPORTED_RATES, "bf16")
    flags = ["--codec", "bf16", "-b", "1M", "-e", "1M"]
    assert "no report has its speed; add --measure" in str(simulate(*flags).exception)
    assert simulate(*flags, "--codec-rates", "20,30,50").exit_code == 0


@needs_matplotlib
def test_a_picture(tmp_path: Path) -> None:
    target = tmp_path / "scaling.png"
    done = simulate("-g", "16", "--ranks-per-host", "4", "-b", "4K", "-e", "64M", "--plot", target)
    assert done.exit_code == 0, done.output
    assert target.read_bytes().startswith(b"\x89PNG")
    assert target.stat().st_size > 10_000


def test_curves_grow_by_hosts() -> None:
    assert growing(Layout.even(48, 12)) == [Layout.even(4 * hosts, hosts) for hosts in (1, 2, 4, 8, 12)]
    assert growing(Layout.even(3, 3)) == [Layout.even(2, 2), Layout.even(3, 3)]
    assert growing(Layout.even(8, 1)) == [Layout.even(8, 1)]


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    real_import = builtins.__import__

    def no_matplotlib(name: str, *rest: Any, **more: Any) -> Any:
        assert not name.startswith("matplotlib")
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    done = simulate("--plot", tmp_path / "x.png")
    assert isinstance(done.exception, ConfigError)
    assert "pip install" in str(done.exception)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-g", "1"], "-g 1: give world sizes of 2 or more"),
        (["-g", "x"], "-g x: give world sizes"),
        (["-g", "99999999999"], "-g 99999999999: 99999999999 ranks"),
        (["-g", ","], "-g ,: names nothing"),
        (["-g", "4", "--hosts", "5"], "5 hosts for 4 ranks"),
        (["--hosts", "2", "--ranks-per-host", "2"], "give one of them"),
        (["--ranks-per-host", "0"], "--ranks-per-host 0"),
        (["--link", "10GB"], "--link: '10GB' is not a rate"),
        (["--codec", "zip"], "--codec zip: unknown codec"),
        (["--codec-rates", "1,2"], "--codec-rates 1,2: give three numbers"),
        (["--codec-rates", "1,2,0"], "rates are above 0"),
        (["-d", "int32"], "-d int32"),
        (["-b", "2M", "-e", "1M"], "sizes must grow"),
        (["-b", "many"], "-b many"),
        (["--latency", "-1"], "--latency -1: latency_s"),
        (["--cores", "nan"], "--cores nan: cores"),
        (["--mtu", "20"], "--mtu 20: mtu"),
        (["-g", "4", "--hosts", "4", "--frame", "1e308"], "4096 bytes take for ever"),
        (["--efficiency", "2"], "--efficiency 2: link_efficiency"),
        (["--plot", "picture.svg"], "ends in .png"),
        (["-J", "/nowhere/at/all.json"], "-J /nowhere/at/all.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_an_error_in_one_line(flags: list[str], words: str) -> None:
    done = simulate(*flags)
    assert isinstance(done.exception, ConfigError), done.output
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)
    assert data(done.stdout) == []


def test_errors_end_with_status_2() -> None:
    done = squinchcomm("simulate", "-g", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("squinchcomm: error: -g 0: ")
    assert done.stderr.count("\n") == 1
