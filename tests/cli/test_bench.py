"""The benchmark: its table, its arithmetic, and that it notices wrong results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squinchcomm.cli.bench_check import DTYPES, REDUCTIONS, Data, Segment, check, wide
from squinchcomm.cli.bench_ops import OPERATIONS
from squinchcomm.kernels import codec_names, get_codec
from squinchcomm.kernels.dtypes import canonical_dtype, dtype_name, from_float32, to_float32
from tests.cli.command import squinchcomm

COUNT = 300_000  # more than one chunk of the check


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("bench") / "out.json"
    done = squinchcomm(
        "bench", "-b", "8K", "-e", "512K", "-f", "8", "-n", "4", "-w", "1", "--codec", "none,squinch6", "--op", "allreduce",
        "--op", "reduce_scatter,broadcast", "-o", "avg", "-r", "1", "-g", "2", "-J", path, timeout=110
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def test_table(measured: tuple[str, dict[str, Any]]) -> None:
    text, report = measured
    assert text.isascii()
    rows = table(text)
    results = report["results"]
    assert len(rows) == len(results) == 3 * (2 + 2 + 1)
    for row, result in zip(rows, results, strict=True):
        size, count, dtype, redop, root, _, algbw, busbw, wrong, wire, ratio, _, relerr, codec = row
        assert int(size) == 4 * int(count) == result["size_bytes"]
        assert (dtype, wrong, codec) == ("float32", "0", result["codec"])
        assert (redop, root) == (("none", "1") if result["op"] == "broadcast" else ("avg", "-1"))
        assert float(busbw) == pytest.approx(float(algbw) * result["factor"], abs=2e-3)
        assert float(ratio) == pytest.approx(int(size) * result["factor"] / int(wire), rel=0.01)
        compressed = codec == "squinch6" and int(size) >= 65536
        assert float(ratio) == pytest.approx(32 / 6 if compressed else 1, rel=0.03)
        assert (1e-3 < float(relerr) < 0.2) if compressed else float(relerr) < 1e-6


def test_json_has_what_a_report_needs(measured: tuple[str, dict[str, Any]]) -> None:
    _, report = measured
    assert report["ok"] is True
    assert report["versions"]["squinchcomm"]
    assert report["machine"]["processor"]
    assert "--codec" in report["command"]
    for result in report["results"]:
        assert len(result["times_us"]) == 4
        assert result["time_us"] == pytest.approx(np.median(result["times_us"]))
        assert result["algbw_GBps"] == pytest.approx(result["size_bytes"] / result["time_us"] / 1e3)


def test_header_and_footer(measured: tuple[str, dict[str, Any]]) -> None:
    lines = measured[0].splitlines()
    assert any("busbw may exceed the link" in line for line in lines)
    assert any(line.startswith("# ranks: 2 on 1 host(s)") for line in lines)
    heads = [line for line in lines if "busbw" in line and "#wrong" in line]
    first_row = next(line for line in lines if not line.startswith("#"))
    assert all(len(head) == len(first_row) for head in heads)
    assert lines[-1] == "# Out of bounds values : 0 OK"
    assert lines[-3].startswith("# Avg bus bandwidth    : ")


def test_all_collectives_under_a_launcher() -> None:
    done = squinchcomm(
        "run", "-n", "3", "--no-prefix", "-m", "squinchcomm", "bench",
        "-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "--op", "all", "-d", "bfloat16", timeout=110
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(table(done.stdout)) == len(OPERATIONS)
    assert done.stdout.endswith("0 OK\n")


FAULT = """
import sys
from squinchcomm import cli
from squinchcomm.cli.bench_ops import Trial
call = Trial.call
def faulty(self, codec):
    call(self, codec)
    if self.comm.rank == 1:
        self.result[{index}] += 1
Trial.call = faulty
sys.argv = ["squinchcomm", "bench", "-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "--op", "{op}"]
cli.main()
"""


@pytest.mark.parametrize(("op", "index"), [("allreduce", -1), ("allreduce", 0), ("sendrecv", 7), ("all_gather", 0)])
def test_wrong_data_fails(tmp_path: Path, op: str, index: int) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULT.format(op=op, index=index))
    done = squinchcomm("run", "-n", "2", "--no-prefix", script)
    assert done.returncode == 1
    assert int(table(done.stdout)[0][8]) >= 1
    assert done.stdout.rstrip().endswith("FAILED")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "alreduce"], "--op alreduce: unknown; there are allreduce"),
        (["--codec", "zip"], "--codec zip: unknown"),
        (["-o", "xor"], "-o xor"),
        (["-d", "float8"], "-d float8"),
        (["-b", "big"], "-b big: not a size"),
        (["-b", "2M", "-e", "1M"], "sizes must grow"),
        (["-f", "1"], "sizes must grow"),
        (["-f", "nan"], "-f nan: sizes must grow"),
        (["-f", "inf"], "-f inf: sizes must grow"),
        (["-b", "1", "-e", "1G", "-i", "1"], "more than 10000 sizes"),
        (["-e", "99999999G"], "do not fit this machine's memory"),
        (["--op", ","], "--op ,: names nothing"),
        (["--codec", ","], "--codec ,: names nothing"),
        (["-d", "int8", "-o", "avg"], "-o avg -d int8"),
        (["-J", "/nonexistent/x.json"], "-J /nonexistent/x.json: No such file or directory"),
        (["-J", "/"], "-J /: Is a directory"),
        (["-r", "5", "-g", "2"], "-r 5: there are 2 ranks"),
        (["--op", "sendrecv", "-g", "1"], "needs two ranks"),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    done = squinchcomm("bench", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("squinchcomm: error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not table(done.stdout)  # nothing was measured in vain


def test_steps() -> None:
    from squinchcomm.cli.bench import _sizes

    assert _sizes("1K", "8K", 2, None) == [1024, 2048, 4096, 8192]
    assert _sizes("1K", "3K", 2, "1K") == [1024, 2048, 3072]
    assert _sizes("1M", "1M", 4, None) == [1 << 20]
    assert _sizes("1K", "1M", 1e308, None) == [1024]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_data_can_be_made_from_anywhere(dtype: str, reduction: str) -> None:
    data = Data(canonical_dtype(dtype), reduction)
    whole = data.values(1, 0, COUNT)
    assert dtype_name(whole.dtype) == dtype
    assert (data.values(1, 262_000, 1000) == whole[262_000:263_000]).all()
    assert not (data.values(2, 0, 1000) == whole[:1000]).all()
    assert data.values(0, 0, 0).size == 0


def combined(data: Data, inputs: list[np.ndarray]) -> np.ndarray:
    """In the element type's own arithmetic, as a library would; halves in float32."""
    half = dtype_name(data.dtype) in ("float16", "bfloat16")
    parts = [to_float32(each) if half else each for each in inputs]
    ufunc = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(data.reduction, np.add)
    total = parts[0]
    for part in parts[1:]:
        total = ufunc(total, part)
    if data.reduction == "avg":
        total = total / total.dtype.type(len(parts))
    return from_float32(total, data.dtype) if half else total


@pytest.mark.parametrize(("dtype", "reduction"), [(d, r) for d in DTYPES for r in REDUCTIONS if "int" not in d or r != "avg"])
def test_the_oracle_accepts_right_results_and_counts_wrong_ones(dtype: str, reduction: str) -> None:
    data = Data(canonical_dtype(dtype), reduction)
    result = combined(data, [data.values(rank, 0, COUNT) for rank in range(3)])
    segment = Segment(0, COUNT, (0, 1, 2), 0)
    assert check(data, result, [segment], None, 2).wrong == 0
    places = [0, 5, COUNT - 1]
    result[places] = from_float32(to_float32(result[places]) * np.float32(1.02) + np.float32(1), data.dtype)
    assert check(data, result, [segment], None, 2).wrong == len(places)


def test_nan_is_wrong() -> None:
    data = Data(canonical_dtype("float32"), "sum")
    result = data.values(0, 0, 100)
    result[3] = np.nan
    assert check(data, result, [Segment(0, 100, (0,), 0)], None, 1).wrong == 1


@pytest.mark.parametrize("codec_name", [name for name in codec_names() if not get_codec(name).lossless])
@pytest.mark.parametrize("encodings", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounds_of_codecs_hold_and_notice_a_missing_rank(codec_name: str, encodings: int, dtype: str) -> None:
    codec, data = get_codec(codec_name), Data(canonical_dtype(dtype), "sum")
    segment = Segment(0, COUNT, (0, 1, 2), 0)
    inputs = [data.values(rank, 0, COUNT) for rank in range(3)]
    for contributions, right in ((inputs, True), (inputs[:2], False)):
        total = np.zeros(COUNT, np.float32)
        for index, each in enumerate(contributions):
            codec.decode_add(codec.encode(each, seed=index), total)
        if encodings == 2:
            codec.decode(codec.encode(total, seed=9), COUNT, total)
        verdict = check(data, from_float32(total, data.dtype), [segment], codec_name, encodings)
        assert (verdict.wrong == 0) is right
        assert wide(total).size == COUNT
