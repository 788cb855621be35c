"""keygen, env, doctor and the frame around all commands."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from squinchcomm import __version__
from squinchcomm.cli import doctor_probes
from squinchcomm.transport.security import read_key_file
from tests.cli.command import CLI, environment, squinchcomm


def test_help_is_quick_and_lists_the_commands() -> None:
    times = []
    for _ in range(3):
        start = time.monotonic()
        done = squinchcomm("--help")
        times.append(time.monotonic() - start)
        assert done.returncode == 0
    for command in ("run", "bench", "doctor", "env", "keygen", "demo"):
        assert f" {command} " in done.stdout
    assert min(times) < 0.8  # 0.15 s on an idle machine


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, squinchcomm.cli.app; print(*sys.modules)"
    done = squinchcomm("run", "-n", "1", "--no-prefix", sys.executable, "-c", code)
    assert not {"torch", "numba", "zmq", "numpy", "matplotlib"} & set(done.stdout.split())


def test_errors_have_no_traceback_unless_traced() -> None:
    plain = squinchcomm("env", env={"SQUINCH_TIMEOUT": "never"})
    assert (plain.returncode, plain.stdout) == (2, "")
    assert plain.stderr.startswith("squinchcomm: error: SQUINCH_TIMEOUT=never is not allowed; give seconds above 0")
    traced = squinchcomm("env", env={"SQUINCH_TIMEOUT": "never", "SQUINCH_DEBUG": "TRACE"})
    assert traced.returncode != 0
    assert "Traceback" in traced.stderr


def test_warnings_are_plain() -> None:
    done = squinchcomm("env", env={"SQUINCH_CODECS": "bf16"})
    assert done.returncode == 0
    assert (
        done.stderr
        == "squinchcomm: warning: SQUINCH_CODECS is set but is no setting of squinchcomm; did you mean SQUINCH_CODEC?\n"
    )


def test_version() -> None:
    assert squinchcomm("--version").stdout == f"squinchcomm {__version__}\n"


def test_keygen(tmp_path: Path) -> None:
    path = tmp_path / "new" / "job.key"
    done = squinchcomm("keygen", path)
    assert done.returncode == 0, done.stderr
    assert f"SQUINCH_KEY_FILE={path}" in done.stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    first = path.read_bytes()
    assert read_key_file(path).secret not in done.stdout + done.stderr

    refused = squinchcomm("keygen", path)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert path.read_bytes() == first

    assert squinchcomm("keygen", path, "--force").returncode == 0
    assert path.read_bytes() != first
    assert [entry.name for entry in path.parent.iterdir()] == ["job.key"]


def test_keygen_default_path(tmp_path: Path) -> None:
    assert squinchcomm("keygen", env={"HOME": str(tmp_path)}).returncode == 0
    assert (tmp_path / ".config" / "squinchcomm" / "job.key").exists()


def test_keygen_where_it_may_not_write() -> None:
    done = squinchcomm("keygen", "/proc/job.key")
    assert done.returncode == 2
    assert "cannot write /proc/job.key" in done.stderr


def test_keygen_leaves_no_half_made_key(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert squinchcomm("keygen", "--force", tmp_path / "folder").returncode == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["env"], {"SQUINCH_KEY_FILE": "~nosuchuser/x"}, "SQUINCH_KEY_FILE=~nosuchuser/x: the home folder"),
        (["keygen", "~nosuchuser/x"], {}, "the home folder in ~nosuchuser/x is not known"),
        (["env"], {"SQUINCH_CHUNK_BYTES": "9" * 400}, "SQUINCH_CHUNK_BYTES=999"),
        (["env", "--json", "--markdown"], {}, "give one of them"),
        (["demo", "--out", "/dev/null/x"], {}, "--out /dev/null/x: Not a directory"),
    ],
)
def test_mistakes(arguments: list[str], variables: dict[str, str], message: str) -> None:
    done = squinchcomm(*arguments, env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("squinchcomm: error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*CLI, "env"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "squinchcomm: error: [Errno 28] No space left on device\n"


def test_env_shows_values_and_sources() -> None:
    setting = {"SQUINCH_CODEC": "squinch6", "SQUINCH_JOB_TOKEN": "do-not-show"}
    done = squinchcomm("env", "--json", env=setting)
    rows = {row["variable"]: row for row in json.loads(done.stdout)}
    assert rows["SQUINCH_CODEC"]["value"] == "squinch6"
    assert rows["SQUINCH_CODEC"]["source"] == "environment"
    assert rows["SQUINCH_TIMEOUT"] | {"meaning": ""} == {
        "variable": "SQUINCH_TIMEOUT",
        "value": "60",
        "source": "default",
        "default": "60",
        "allowed": "seconds above 0",
        "meaning": "",
    }
    table = squinchcomm("env", env=setting).stdout
    assert any(line.split()[:4] == ["SQUINCH_CODEC", "squinch6", "environment", "none"] for line in table.splitlines())
    assert "do-not-show" not in table + done.stdout
    assert len(table.splitlines()) == len(rows) + 1


@pytest.fixture(scope="module")
def healthy() -> dict[str, dict[str, str]]:
    start = time.monotonic()
    done = squinchcomm("doctor", "--json", timeout=110)
    assert time.monotonic() - start < 60  # 20 s on an idle machine
    report = json.loads(done.stdout)
    problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert (done.returncode, report["ok"], problems) == (0, True, [])
    return {finding["name"]: finding for finding in report["findings"]}


def test_doctor_looks_at_everything(healthy: dict[str, dict[str, str]]) -> None:
    for name in (
        "python",
        "numba",
        "libzmq",
        "CURVE encryption",
        "cores",
        "host identity",
        "interface lo",
        "clock",
        "launcher",
    ):
        assert healthy[name]["value"]
    assert "none: init() makes a world of one" in healthy["launcher"]["value"]


def test_doctor_measures(healthy: dict[str, dict[str, str]]) -> None:
    from squinchcomm.kernels import codec_names

    for name in codec_names():
        assert "encode" in healthy[name]["value"]
    for scheme in ("ipc", "tcp"):
        assert float(healthy[scheme]["value"].split()[0]) > 0.01


def test_doctor_reports_problems_with_a_next_step(tmp_path: Path) -> None:
    key = tmp_path / "job.key"
    key.write_text("x")
    key.chmod(0o644)
    broken = {"SQUINCH_KEY_FILE": str(key), "RANK": "3"}
    done = squinchcomm("doctor", timeout=110, env=broken)
    assert done.returncode == 1
    assert "RANK is set but WORLD_SIZE is not" in done.stdout
    assert "others can read the job key file" in done.stdout
    assert "problem" in done.stdout.splitlines()[-1] or "->" in done.stdout
    assert "keygen" not in done.stdout  # the key is there; making another would not help
    assert "cupy" not in done.stdout.split()


@pytest.mark.parametrize(("variable", "known"), [("SQUINCH_CODEC", "squinch6"), ("SQUINCH_TRANSPORT", "zmq")])
def test_unknown_names_are_found_early(variable: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = squinchcomm("env", env={variable: "nonesuch"})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{variable}=nonesuch: unknown; there are" in done.stderr
    assert known in done.stderr
    monkeypatch.setenv(variable, "nonesuch")
    (finding,) = doctor_probes.launch()
    assert (finding.level, variable in finding.value) == ("problem", True)


def test_doctor_says_what_inproc_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "SQUINCH_ADDRESS": "ipc://@x", "SQUINCH_TRANSPORT": "inproc"}.items():
        monkeypatch.setenv(name, value)
    finding = list(doctor_probes.launch())[-1]
    assert (finding.name, finding.level) == ("transport", "problem")
    assert "threads of one process" in finding.value
