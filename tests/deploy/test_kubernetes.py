"""The kustomize overlays, rendered by kubectl (offline): schemas, what parts must agree on, and the commands they start, started."""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cli.command import environment, squinchcomm

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "kubernetes.json").read_text())
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which renders offline")


def render(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of deploy/kubernetes with a job key, made as its comment says."""
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns("*.key", "__pycache__"))
    made = squinchcomm("keygen", copy / "components" / "job-key" / "job.key")
    assert made.returncode == 0, made.stderr
    return copy


@pytest.fixture(scope="module")
def rendered(tree: Path) -> dict[str, dict[str, Any]]:
    """Objects of each overlay by kind."""
    found = {}
    for overlay in OVERLAYS:
        done = render(tree / "overlays" / overlay)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "kustomize warns, for example of what it no longer supports"
        found[overlay] = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    return found


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod template inside an object, wherever its kind keeps it."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for part in value.values():
            yield from pod_templates(part)
    elif isinstance(value, list):
        for part in value:
            yield from pod_templates(part)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_its_schema(rendered: dict[str, dict[str, Any]], overlay: str) -> None:
    for kind, each in rendered[overlay].items():
        schema = {"$ref": f"#/$defs/{kind}", "$defs": SCHEMAS["$defs"]}
        jsonschema.Draft202012Validator(schema).validate(each)


def test_the_schemas_see_mistakes(rendered: dict[str, dict[str, Any]]) -> None:
    validator = jsonschema.Draft202012Validator({"$ref": "#/$defs/podTemplate", "$defs": SCHEMAS["$defs"]})
    for mistake in (
        lambda spec: spec["containers"][0].pop("resources"),
        lambda spec: spec["containers"][0]["securityContext"].update(readOnlyRootFilesystem=False),
        lambda spec: spec["securityContext"].update(runAsUser=0),
        lambda spec: spec["containers"][0].update(imagePulPolicy="Always"),
        lambda spec: spec["containers"][0].update(image="squinchcomm"),
    ):
        (template,) = pod_templates(json.loads(json.dumps(rendered["trainjob"]["TrainingRuntime"])))
        validator.validate(template)
        mistake(template["spec"])
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(template)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_refer_to_what_is_there(rendered: dict[str, dict[str, Any]], overlay: str) -> None:
    objects = rendered[overlay]
    named = {(kind, each["metadata"]["name"]) for kind, each in objects.items()}
    assert {each["metadata"].get("namespace") for kind, each in objects.items() if kind != "Namespace"} == {"squinchcomm"}
    for template in pod_templates(list(objects.values())):
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in named
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in named
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        assert mounted == set(volumes), "every volume is mounted, and every mount has one"
    if "TrainJob" in objects:
        runtime = objects["TrainJob"]["spec"]["runtimeRef"]
        assert (runtime["kind"], runtime["name"]) in named


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "check"])
def test_prometheus_finds_a_port_for_each_rank(rendered: dict[str, dict[str, Any]], overlay: str) -> None:
    objects = rendered[overlay]
    monitor = objects["PodMonitor"]["spec"]
    endpoints = [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
    if "TrainJob" in objects:
        ranks = objects["TrainJob"]["spec"]["trainer"]["numProcPerNode"]
        assert objects["TrainingRuntime"]["spec"]["mlPolicy"]["torch"]["numProcPerNode"] == ranks
    else:
        ranks = objects["MPIJob"]["spec"]["slotsPerWorker"]
    assert endpoints == [f"metrics-{rank}" for rank in range(ranks)]
    selected = [
        template
        for template in pod_templates(list(objects.values()))
        if monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ]
    assert len(selected) == 1, "the pods that ranks live in, not the launcher"
    (container,) = selected[0]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    variables = {
        each["name"]: each["value"]
        for template in pod_templates(list(objects.values()))
        for each in template["spec"]["containers"][0].get("env", [])
    }
    first = int(variables["SQUINCH_METRICS_PORT"])
    assert [ports[name] for name in endpoints] == list(range(first, first + ranks))


def test_mpirun_hands_on_every_variable_of_the_launcher(rendered: dict[str, dict[str, Any]]) -> None:
    (launcher,) = rendered["mpijob"]["MPIJob"]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    arguments = launcher["args"]
    handed_on = {arguments[index + 1] for index, argument in enumerate(arguments) if argument == "-x"}
    assert handed_on == {variable["name"] for variable in launcher["env"]}


def test_without_a_key_nothing_is_rendered(tmp_path: Path) -> None:
    copy = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns("*.key"))
    done = render(copy / "overlays" / "trainjob")
    assert done.returncode != 0 and "job.key" in done.stderr


def private_key(objects: dict[str, Any], template: dict[str, Any], folder: Path) -> Path:
    """The key file of a rank, made from the Secret by the command of the pod's first container."""
    secret, private = folder / "secret", folder / "private"
    secret.mkdir()
    private.mkdir()
    for name, content in objects["Secret"]["data"].items():
        (secret / name).write_bytes(base64.b64decode(content))
        (secret / name).chmod(0o440)
    (init,) = template["spec"]["initContainers"]
    places = {"/etc/squinchcomm": str(secret), "/run/squinchcomm": str(private)}
    command = [part if "/" not in part else f"{places[str(Path(part).parent)]}/{Path(part).name}" for part in init["command"]]
    subprocess.run(command, check=True, timeout=20)
    key = private / "job.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    return key


@pytest.mark.slow
def test_torchrun_starts_what_the_trainjob_says(rendered: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Two nodes of one rank on this machine, with the variables that Kubeflow Trainer sets."""
    objects = rendered["trainjob"]
    (template,) = pod_templates(objects["TrainingRuntime"])
    trainer = objects["TrainJob"]["spec"]["trainer"]
    program = tmp_path / "train.py"
    program.write_text(objects["ConfigMap"]["data"]["train.py"])
    arguments = [str(program) if part == "/program/train.py" else part for part in trainer["args"]]
    assert str(program) in arguments
    variables = {each["name"]: each["value"] for each in template["spec"]["containers"][0]["env"]}
    variables |= {"SQUINCH_KEY_FILE": str(private_key(objects, template, tmp_path)), "TMPDIR": str(tmp_path)}
    for other in ("HOME", "SQUINCH_METRICS_PORT", "SQUINCH_METRICS_ADDRESS"):
        del variables[other]
    nodes = [
        subprocess.Popen(
            [str(BIN / trainer["command"][0]), *arguments, "--steps", "21", "--width", "256"],
            env=environment(
                **variables,
                PET_NNODES="2",
                PET_NPROC_PER_NODE="1",
                PET_NODE_RANK=str(node),
                PET_MASTER_ADDR="127.0.0.1",
                PET_MASTER_PORT="29517",
                PATH=f"{BIN}:{os.environ['PATH']}",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=90)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in outputs[0].splitlines() if line.startswith("step ")]
    assert len(losses) == 2 and losses[1] < losses[0], outputs
    assert "2 ranks" in outputs[0]


@pytest.mark.slow
def test_mpirun_starts_what_the_mpijob_says(rendered: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Two slots on this machine, where Kubeflow's MPI Operator would list the workers."""
    pytest.importorskip("mpi4py")
    objects = rendered["mpijob"]
    replicas = objects["MPIJob"]["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    hosts = tmp_path / "hostfile"
    hosts.write_text("localhost slots=2\n")
    arguments = [str(hosts) if part == "/etc/mpi/hostfile" else part for part in launcher["args"]]
    assert str(hosts) in arguments
    variables = {each["name"]: each["value"] for each in launcher["env"]}
    key = private_key(objects, replicas["Worker"]["template"], tmp_path)
    variables |= {"SQUINCH_KEY_FILE": str(key), "HOME": os.environ["HOME"], "TMPDIR": "/tmp"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [str(BIN / launcher["command"][0]), *arguments, "-b", "256K", "-e", "256K", "-n", "2"],
        env=environment(**variables, **root, PATH=f"{BIN}:{os.environ['PATH']}"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK" in done.stdout.splitlines()[-1], done.stdout
