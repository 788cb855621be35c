"""The training example: ranks stay identical, resuming changes no bit, and 6 bits train like 32."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import environment
from tests.torch.ranks import Failed, World

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_lm.py"
# 0.11 M parameters, 440 KB: large enough to be compressed.
SMALL = ("--width", "64", "--layers", "2", "--context", "64", "--learning-rate", "3e-3", "--log-every", "1000")
# Ways to train that a checkpoint has to continue bit for bit.
RESUMABLE = {"squinch": ("--backend", "squinch"), "feedback": ("--hook", "squinch6", "--error-feedback")}
MORE_RESUMABLE = {
    "gloo": (),
    "random": ("--hook", "squinch6-sr", "--backend", "squinch"),
    "fsdp": ("--fsdp", "--hook", "squinch6"),
    "fsdp-squinch": ("--fsdp", "--backend", "squinch"),
}
Outcome = tuple[float, bytes]  # validation loss and a digest of all parameters


def trained(rank: int, world_size: int, port: int, runs: list[tuple[str, ...]]) -> list[Outcome]:
    """What the example returns for each of `runs`, one after the other in this process."""
    import train_lm

    save = train_lm.save
    # Each checkpoint gets a folder of its own, so that all are kept, and a run can be started from any.
    train_lm.save = lambda folder, step, state: save(folder / str(step), step, state)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    outcomes = []
    for number, arguments in enumerate(runs):
        os.environ["MASTER_PORT"] = str(port + number)
        outcomes.append(train_lm.main([*SMALL, *arguments]))
    return outcomes


def train(world_size: int, runs: list[tuple[str, ...]], timeout_s: float = 100.0) -> list[Outcome]:
    """Outcomes of the runs; fails unless all ranks have the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    of_ranks = World(world_size, trained, world_size, port, runs, bare=True).outcomes(timeout_s)
    failures = [outcomes for outcomes in of_ranks if isinstance(outcomes, Failed)]
    if failures:
        raise min(failures, key=lambda failure: failure.when)
    for outcomes in of_ranks:
        assert outcomes == of_ranks[0]
    return list(of_ranks[0])


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [(2, RESUMABLE), pytest.param(4, RESUMABLE | MORE_RESUMABLE, marks=[pytest.mark.slow, pytest.mark.timeout(400)])],
)
def test_ranks_are_identical_and_resuming_is_exact(world_size: int, kinds: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    runs = []
    for name, arguments in kinds.items():
        run = ("--steps", "20", "--evaluate-every", "12", *arguments)
        runs += [(*run, "--checkpoints", str(tmp_path / name)), (*run, "--checkpoints", str(tmp_path / name / "12"))]
    outcomes = train(world_size, runs, timeout_s=100.0 * world_size / 2)
    for name, whole, continued in zip(kinds, outcomes[::2], outcomes[1::2], strict=True):
        assert continued == whole, name
    assert len({digest for _, digest in outcomes}) > 1  # the digest sees how gradients were sent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_200_steps_with_4_ranks() -> None:
    """Losses within 0.5 % of float32 after 200 steps, and no rank off by a bit."""
    hooks = [
        (),
        ("--backend", "squinch"),
        ("--hook", "squinch6"),
        ("--hook", "squinch6", "--error-feedback"),
        ("--hook", "bf16"),
    ]
    runs = [("--steps", "200", "--evaluate-every", "200", *hook) for hook in hooks]
    (exact, _), *others = train(4, runs, timeout_s=560.0)
    assert exact < 2.6  # of 5.5 nats at the start: it has learnt something
    for run, (loss, _) in zip(runs[1:], others, strict=True):
        assert abs(loss / exact - 1) < 0.005, run


def commands() -> list[str]:
    """Those of the example's docstring."""
    found = re.findall(r"^    ((?:python|torchrun) .*?)(?:  +#.*)?$", SCRIPT.read_text(), re.MULTILINE)
    assert len(found) >= 5
    return found


def started(command: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """A command of the docstring, with the arguments of a smaller run."""
    words = shlex.split(command)
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "torch.distributed.run"]
    arguments = [str(SCRIPT) if word == "examples/train_lm.py" else word for word in words[1:]]
    return subprocess.Popen(
        [*program, *arguments, *SMALL, *more],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_docstring_work(command: str, tmp_path: Path) -> None:
    with started(command, tmp_path, "--steps", "3") as process:
        try:
            output = process.communicate(timeout=110)[0]
        finally:
            process.terminate()  # and with torchrun its ranks
    assert process.returncode == 0, output
    assert "step 3/3" in output
    assert "all ranks hold the same parameters" in output
    assert "from step 0" in output


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The same bits as without the kill, in one process."""
    arguments = ("--steps", "60", "--evaluate-every", "20", "--checkpoints")
    process = started("python examples/train_lm.py", tmp_path, *arguments, "killed")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("killed/step-????????")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    outputs = []
    for folder in ("killed", "whole", "whole"):
        process = started("python examples/train_lm.py", tmp_path, *arguments, folder)
        outputs.append(process.communicate(timeout=60)[0])
        assert process.returncode == 0, outputs[-1]
    assert re.search(r"from step [24]0", outputs[0])
    assert "from step 0" in outputs[1]
    assert "nothing left to do: the checkpoint has 60 of 60 steps" in outputs.pop()
    last = [output.splitlines()[-2] for output in outputs]
    assert last[0] == last[1]
    assert "validation loss" in last[0]
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["step-00000060"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--error-feedback"], "--error-feedback belongs to"),
        (["--hook", "powersgd", "--fsdp"], "PowerSGD is a hook of DDP"),
        (["--width", "100"], "not a multiple of 64"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    import train_lm

    with pytest.raises(SystemExit):
        train_lm.parse(arguments)
    assert word in capsys.readouterr().err
