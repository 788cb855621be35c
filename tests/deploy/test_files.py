"""Every other file of deploy/, read by the program it is for or by that program's own checker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from squinchcomm.config import LAUNCH_VARIABLES, settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SEARCH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
SHELL_FILES = [*sorted(DEPLOY.rglob("*.sh")), *sorted(DEPLOY.rglob("*.sbatch")), *sorted((ROOT / "tools").glob("*.sh"))]
WRITE_TARGETS = DEPLOY / "prometheus" / "write-targets.sh"
# Variables of the metrics exporter that are no settings of a communicator.
EXPORTER_VARIABLES = {"SQUINCH_METRICS_PORT", "SQUINCH_METRICS_ADDRESS"}


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which(str(command[0]), path=SEARCH)
    if program is None:
        pytest.skip(f"needs {command[0]}")
    return subprocess.run([program, *map(str, command[1:])], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_yaml_is_well_kept() -> None:
    done = run("yamllint", "--strict", "--config-file", DEPLOY / "yamllint.yml", DEPLOY)
    assert done.returncode == 0, done.stdout


def test_shell_is_well_kept() -> None:
    assert len(SHELL_FILES) >= 5
    done = run("shellcheck", *SHELL_FILES)
    assert done.returncode == 0, done.stdout
    for file in SHELL_FILES:
        assert re.search(r"^set -e?uo? ?(pipefail)?$", file.read_text(), re.M), f"{file} does not stop at errors"
    assert all("set -euo pipefail" in file.read_text() for file in DEPLOY.rglob("*.sbatch"))


def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    done = run("promtool", "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    # Debian builds Prometheus without Kubernetes: there everything but the discovery itself is read.
    kubernetes = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())
    (job,) = kubernetes["scrape_configs"]
    assert job["kubernetes_sd_configs"] == [
        {"role": "pod", "selectors": [{"role": "pod", "label": "app.kubernetes.io/name=squinchcomm"}]}
    ]
    job["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
    del job["kubernetes_sd_configs"]
    rest = tmp_path / "rest.yml"
    rest.write_text(yaml.safe_dump(kubernetes))
    done = run("promtool", "check", "config", rest)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_in_kubernetes_looks_for_the_label_and_ports_of_the_pods() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"]
    key, _, value = job["kubernetes_sd_configs"][0]["selectors"][0]["label"].partition("=")
    pattern = next(
        rule["regex"]
        for rule in job["relabel_configs"]
        if rule["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
    )
    for manifest in ("trainjob/runtime.yaml", "mpijob/mpijob.yaml"):
        text = (DEPLOY / "kubernetes" / "base" / manifest).read_text()
        assert f"{key}: {value}\n" in text
        ports = re.findall(r"\{name: ([a-z0-9-]+), containerPort: \d+\}", text)
        assert len([port for port in ports if re.fullmatch(pattern, port)]) == 4


def write_targets(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("sh", WRITE_TARGETS, *arguments)


def test_targets_are_written(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    done = write_targets(file, "9500", "2", "node1", "fe80::1")
    assert done.returncode == 0, done.stderr
    targets = [target for group in json.loads(file.read_text()) for target in group["targets"]]
    assert targets == ["node1:9500", "node1:9501", "[fe80::1]:9500", "[fe80::1]:9501"]
    local = json.loads((DEPLOY / "prometheus" / "targets" / "local.json").read_text())
    assert local == [{"targets": [f"127.0.0.1:{port}" for port in range(9500, 9504)]}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["job.json", "9500", "2"], "usage"),
        (["job.txt", "9500", "2", "node1"], ".json"),
        (["job.json", "95x0", "2", "node1"], "numbers"),
        (["job.json", "65535", "2", "node1"], "65535"),
        (["job.json", "9500", "0", "node1"], "ports"),
        (["job.json", "9500", "2", 'node"1'], "not the name of a host"),
    ],
)
def test_wrong_targets_change_nothing(tmp_path: Path, arguments: list[str], said: str) -> None:
    file = tmp_path / arguments[0]
    file.write_text("[]")
    done = write_targets(file, *arguments[1:])
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["[]"]


def test_the_unit_is_sound(tmp_path: Path) -> None:
    instance = tmp_path / "squinchcomm@train.service"
    shutil.copy(DEPLOY / "systemd" / "squinchcomm@.service", instance)
    done = run("systemd-analyze", "verify", "--man=no", instance)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=30", instance)
    assert done.returncode == 0, f"exposure above 3 of 10:\n{done.stdout[-200:]}"


def test_the_unit_gets_what_it_needs_from_its_example() -> None:
    unit = (DEPLOY / "systemd" / "squinchcomm@.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    example = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "systemd" / "train.env").read_text(), re.M))
    assert set(re.findall(r"\$\{?(\w+)", command)) <= set(example)


def test_compose_mounts_what_there_is() -> None:
    folder = DEPLOY / "compose"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    schema = json.loads((Path(__file__).parent / "schemas" / "compose.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(compose)
    targets = {}
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source, target, *_ = mount.split(":")
            targets[target] = source
            # dashboards/ is named by design; the rest has to be there.
            assert source in compose["volumes"] or source == "../../dashboards" or (folder / source).exists(), mount
    provider = yaml.safe_load((folder / "grafana" / "dashboards.yml").read_text())["providers"][0]
    assert targets[provider["options"]["path"]] == "../../dashboards"
    (source,) = yaml.safe_load((folder / "grafana" / "datasource.yml").read_text())["datasources"]
    listens = dict(part[2:].split("=", 1) for part in compose["services"]["prometheus"]["command"])
    assert source["url"] == f"http://{listens['web.listen-address']}"
    config = Path(listens["config.file"])
    assert (folder / targets[str(config.parent)] / config.name).exists()
    (rules,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["rule_files"]
    assert targets[os.path.normpath(config.parent / Path(rules).parent)] == "../../dashboards"


def test_the_container_file_is_sound() -> None:
    done = run("hadolint", "--ignore", "DL3013", DEPLOY / "container" / "Dockerfile")  # the wheel it installs is its own
    assert done.returncode == 0, done.stdout


def test_the_container_file_copies_what_its_builder_may_see() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", (DEPLOY / "container" / "Dockerfile").read_text(), re.M):
        copied |= set(line.split()[:-1])
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(name == entry or name.startswith(f"{entry}/") for entry in allowed), f"{name} is ignored"
    assert {"pyproject.toml", "squinchcomm", "kernels", "transport"} <= copied


def test_every_variable_is_one() -> None:
    """A misspelt SQUINCH_* variable would be a warning in the logs of a job and nothing else."""
    known = {setting.env for _, _, setting in settings()} | set(LAUNCH_VARIABLES) | EXPORTER_VARIABLES
    found = {
        variable
        for path in DEPLOY.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".key")
        for variable in re.findall(r"\bSQUINCH_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    assert found, "deploy/ sets none"
    assert found <= known
