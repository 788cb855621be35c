"""`squinchcomm inspect`: its numbers, its advice, hostile files."""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import json
import math
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from squinchcomm.cli.app import app
from squinchcomm.errors import ConfigError
from squinchcomm.gradient_files import open_gradients
from squinchcomm.inspection import Advice, Limits, advise, examine, sample_spans
from squinchcomm.kernels import codec_names, get_codec
from squinchcomm.kernels.dtypes import BFLOAT16, from_float32
from tests.cli.command import squinchcomm

SQUINCH6, NONE, INT8 = (get_codec(name) for name in ("squinch6", "none", "int8"))
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
needs_safetensors = pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def inspect(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def inspected(tmp_path: Path, file: Path, *flags: str) -> dict[str, Any]:
    done = inspect(file, "-J", tmp_path / "raw.json", *flags)
    assert done.exit_code == 0, done.output
    written: dict[str, Any] = json.loads((tmp_path / "raw.json").read_text())
    return written


def gaussian(count: int, scale: float = 1e-3) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(count, dtype=np.float32) * np.float32(scale)


@needs_torch
@needs_safetensors
def test_gradients_of_the_demo_model(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from squinchcomm.demo.model import ByteTransformer

    model = ByteTransformer(width=64, layers=1, heads=2, length=16, seed=0)
    model(torch.randint(0, 256, (4, 17))).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    file = tmp_path / "gradients.safetensors"
    save_file(gradients | {"steps": torch.arange(3), "empty": torch.empty(0, 4)}, file)
    done = squinchcomm("inspect", file, "-J", tmp_path / "raw.json")
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads((tmp_path / "raw.json").read_text())
    assert {tensor["name"] for tensor in written["tensors"]} == set(gradients)
    assert {(each["name"], each["reason"]) for each in written["left_out"]} == {
        ("steps", "I64 is no type that codecs take"),
        ("empty", "empty"),
    }
    found = written["all"]
    assert list(found) == list(codec_names())
    assert found["none"]["exact"] and found["none"]["bits"] == 32
    assert 26 < found["squinch6"]["snr_db"] < 28 and abs(found["squinch6"]["bias"]) < 2e-3
    assert 55 < found["bf16"]["snr_db"] < 57
    lines = [line for line in done.stdout.splitlines() if line.startswith("embedding.weight ")]
    assert len(lines) == len(codec_names())  # each complete: nothing is left out in a pipe
    expected = gradients["embedding.weight"].abs()
    assert f"{expected.max():.1e}" in lines[0] and "16,384" in lines[0]


def test_numbers_are_those_of_the_codec() -> None:
    values = gaussian(700_001)
    values[:1000] = 0
    finding = examine("x", "float32", values.size, iter([values[:262_144], values[262_144:]]), [SQUINCH6, NONE])
    decoded = SQUINCH6.decode(SQUINCH6.encode(values), values.size).astype(np.float64)
    error = decoded - values
    loss = finding.losses[0]
    assert loss.snr_db == pytest.approx(10 * np.log10(np.square(values, dtype=np.float64).sum() / np.square(error).sum()))
    assert loss.bias == pytest.approx(np.abs(decoded).sum() / np.abs(values, dtype=np.float64).sum() - 1)
    assert loss.zeroed == np.count_nonzero((decoded == 0) & (values != 0)) > 0
    assert loss.bits == pytest.approx(6, rel=0.01)
    assert (finding.zeros, finding.nonfinite, finding.seen) == (np.count_nonzero(values == 0), 0, values.size)
    assert finding.largest == np.abs(values).max() and finding.smallest == np.abs(values[values != 0]).min()
    assert finding.losses[1].snr_db == math.inf


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f8"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_types_of_npz(tmp_path: Path, dtype: Any, save: Any) -> None:
    file = tmp_path / "gradients.npz"
    save(file, x=gaussian(5000, 1.0).astype(dtype).reshape(50, 100), f=np.asfortranarray(gaussian(600).reshape(20, 30)))
    first, second = inspected(tmp_path, file)["tensors"]
    assert first["dtype"] == np.dtype(dtype).newbyteorder("=").name
    assert first["codecs"]["none"]["exact"] and first["codecs"]["none"]["bits"] == 8 * np.dtype(dtype).itemsize
    assert 25.5 < first["codecs"]["squinch6"]["snr_db"] < 27.5
    assert first["largest"] == np.abs(gaussian(5000, 1.0).astype(dtype)).max()
    assert second["elements"] == 600


def test_bfloat16(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = gaussian(4096)
    np.savez(tmp_path / "a.npz", x=values.astype(ml_dtypes.bfloat16), y=from_float32(values, BFLOAT16))
    for tensor in inspected(tmp_path, tmp_path / "a.npz")["tensors"]:
        assert tensor["dtype"] == "bfloat16"
        assert tensor["codecs"]["bf16"]["exact"] and tensor["codecs"]["none"]["bits"] == 16
        assert tensor["largest"] == pytest.approx(np.abs(values).max(), rel=2**-8)


@needs_safetensors
def test_half_types_of_safetensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = torch.from_numpy(gaussian(4096, 1.0))
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    save_file({str(kind).removeprefix("torch."): values.to(kind) for kind in kinds}, tmp_path / "a.safetensors")
    found = inspected(tmp_path, tmp_path / "a.safetensors")["tensors"]
    assert sorted(tensor["dtype"] for tensor in found) == ["bfloat16", "float16", "float32", "float64"]
    for tensor in found:
        assert tensor["name"] == tensor["dtype"]
        assert tensor["largest"] == values.to(getattr(torch, tensor["dtype"])).abs().max().item()


def test_a_tensor_that_a_codec_does_not_suit_gets_another(tmp_path: Path) -> None:
    wide = np.float32(10) ** np.linspace(-30, 30, 100_000, dtype=np.float32)
    broken = np.array([np.nan, np.inf, 1, 2] * 300, np.float32)
    file = tmp_path / "a.npz"
    np.savez(file, plain=gaussian(60_000), wide=wide, few=gaussian(64), broken=broken, zero=np.zeros(9, np.float32))
    written = inspected(tmp_path, file)
    advice = {tensor["name"]: tensor["advice"] for tensor in written["tensors"]}
    assert advice["wide"]["codec"] == "int8" and "vanish" in advice["wide"]["reason"]
    assert {name for name, each in advice.items() if each["reason"] is not None} == {"wide"}  # `few` is biased by chance alone
    tensors = {tensor["name"]: tensor for tensor in written["tensors"]}
    assert tensors["broken"]["nonfinite"] == 600 and tensors["broken"]["codecs"]["int8"]["spoiled"] == 600
    assert tensors["zero"]["codecs"]["squinch6"] == tensors["zero"]["codecs"]["squinch6-sr"] | {
        "bits": pytest.approx(348.4, abs=1)
    }
    done = inspect(file)
    assert "NaN or infinity in broken" in done.output
    code = done.output[done.output.index("CODECS = {") : done.output.index("for name, parameter")]
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102  what users are told to paste has to be Python
    assert scope["CODECS"] == {"wide": "int8"}
    assert "SQUINCH_CODEC=squinch6" in inspect(file, "--filter", "plain").output


def test_where_no_lossy_codec_does_advice_is_lossless() -> None:
    spikes = np.zeros(1 << 14)
    spikes[::2] = 1e200  # no float32
    codecs = [SQUINCH6, INT8, NONE]
    finding = examine("x", "float64", spikes.size, [spikes], codecs)
    assert advise(finding, codecs, "squinch6", Limits()) == Advice("none", "8192 finite elements come back as NaN or infinity")
    noisy = examine("x", "float32", 60_000, [gaussian(60_000)], codecs)
    assert advise(noisy, codecs, "squinch6", Limits(min_snr_db=30)).codec == "int8"
    assert advise(noisy, codecs, "squinch6", Limits(min_snr_db=60)).codec == "none"
    assert advise(noisy, codecs, "squinch6", Limits()) == Advice("squinch6", None)


@pytest.mark.parametrize(("count", "most"), [(10**6, 0), (10**6, 10**6), (10**7, 50_000), (5000, 1), (10**6, 4096), (3, 1)])
def test_samples_lie_in_the_array_and_do_not_overlap(count: int, most: int) -> None:
    spans = sample_spans(count, most)
    assert all(0 <= start < stop <= count for start, stop in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    seen = sum(stop - start for start, stop in spans)
    assert seen == count if not most or count <= most else seen <= max(most, 4096)


def test_a_sample_is_said_to_be_one_and_memory_stays_bounded(tmp_path: Path) -> None:
    file = tmp_path / "large.npz"
    np.savez_compressed(file, large=np.zeros(30_000_000, np.float32), small=gaussian(5000))
    inspect(tmp_path / "none.npz")  # what a first call loads does not count
    tracemalloc.start()
    try:
        done = inspect(file, "--max-elements", "100000", "--codec", "squinch6", "-J", tmp_path / "raw.json")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "30,000,000*" in done.output and "looked at (--max-elements)" in done.output
    first, second = json.loads((tmp_path / "raw.json").read_text())["tensors"]
    assert (first["seen"], second["seen"]) == (24 * 4096, 5000)
    assert peak < 30 << 20  # the array has 120 MB


def test_sort_and_filter(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"b.x": gaussian(2000), "a.x": gaussian(9000, 7), "c.y": gaussian(5000, 1e-6)})

    def names(*flags: str) -> list[str]:
        return [tensor["name"] for tensor in inspected(tmp_path, tmp_path / "a.npz", *flags)["tensors"]]

    assert names() == ["b.x", "a.x", "c.y"]
    assert names("--sort", "name") == ["a.x", "b.x", "c.y"]
    assert names("--sort", "size") == ["a.x", "c.y", "b.x"]
    assert names("--sort", "largest") == ["a.x", "b.x", "c.y"]
    assert names("--filter", "*.x", "--filter", "c*", "--sort", "smallest")[0] == "c.y"
    assert names("--filter", "?.x") == ["b.x", "a.x"]


@needs_matplotlib
def test_a_plot(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{f"$x_{index}": gaussian(600) for index in range(3)}, zero=np.zeros(4, np.float32))
    picture = tmp_path / "a.png"
    assert inspect(tmp_path / "a.npz", "--plot", picture).exit_code == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sort", "colour"], "--sort colour: there are file, name"),
        (["--codec", "zip"], "--codec zip: unknown codec"),
        (["--wanted", "zip"], "--wanted zip: unknown codec"),
        (["--filter", "nothing*"], "fits none of 1 tensors, such as 'x'"),
        (["--max-elements", "-1"], "--max-elements -1"),
        (["--min-snr", "nan"], "--min-snr nan"),
        (["--plot", "a.pdf"], "ends in .png"),
        (["-J", "/nonexistent/a.json"], "-J /nonexistent/a.json"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    np.savez(tmp_path / "a.npz", x=gaussian(10))
    done = inspect(tmp_path / "a.npz", *flags)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


def hostile(folder: Path) -> dict[str, Path]:
    good = folder / "good.npz"
    np.savez(good, x=gaussian(100_000))
    data = good.read_bytes()
    flipped = bytearray(data)
    flipped[1000] ^= 1
    safe = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    pickled = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    files = {
        "no such file": folder / "none.npz",
        "not a file": folder,
        "empty": folder / "empty.npz",
        "text": folder / "text.safetensors",
        "cut off": folder / "cut.npz",
        "flipped bit": folder / "flipped.npz",
        "huge header": folder / "huge.safetensors",
        "cut safetensors": folder / "cut.safetensors",
        "larger than it is": npz(folder / "large.npz", x=header("{'descr': '<f4', 'fortran_order': False, 'shape': (99,)}")),
        "overflow": npz(folder / "overflow.npz", x=header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},)}}")),
        "negative": npz(folder / "negative.npz", x=header("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}")),
        "code": npz(folder / "code.npz", x=header("__import__('os').system('touch hacked')")),
        "deep": npz(folder / "deep.npz", x=header("-" * 9000 + "1")),
        "no array": npz(folder / "no.npz", x=b"hello"),
        "pickle only": npz(folder / "pickle.npz", x=header(str(pickled)) + b"cos\nsystem\n"),
        "no arrays": folder / "checkpoint.pt",
    }
    files["empty"].write_bytes(b"")
    files["text"].write_text("hello, this is no file of tensors at all")
    files["cut off"].write_bytes(data[: len(data) // 2])
    files["flipped bit"].write_bytes(flipped)
    files["huge header"].write_bytes(b"\xff" * 7 + b"\x00{}")
    files["cut safetensors"].write_bytes(struct.pack("<Q", len(safe)) + safe)
    with zipfile.ZipFile(files["no arrays"], "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n")
    return files


def test_hostile_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, file in hostile(tmp_path).items():
        if kind == "pickle only":
            done = inspect(file)
            assert done.exit_code == 0 and "left out: x (object" in done.output
            continue
        done = inspect(file)
        assert isinstance(done.exception, ConfigError), (kind, done.output, done.exception)
        message = str(done.exception)
        assert str(file) in message and "\n" not in message, kind
    assert not (tmp_path / "hacked").exists()
    done = squinchcomm("inspect", tmp_path / "cut.npz")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("squinchcomm: error: ") and done.stderr.count("\n") == 1


def test_names_cannot_command_a_terminal(tmp_path: Path) -> None:
    npz(
        tmp_path / "a.npz",
        **{"\x1b[2J\x1b]0;boo": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}") + b"\0\0\0\1")},
    )
    done = inspect(tmp_path / "a.npz")
    assert done.exit_code == 0
    assert "\x1b" not in done.output and "x1b[2J" in done.output


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "a.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install safetensors"), open_gradients(tmp_path / "a.safetensors"):
        pass
