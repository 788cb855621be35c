"""PyTorch's own distributed suite over squinch: whatever passes with gloo passes, and some that gloo skips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's tests import it")

ROOT = Path(__file__).resolve().parent.parent.parent
BEYOND = [
    (int(line.split()[0]), line.split()[1])
    for line in (Path(__file__).parent / "beyond_gloo.txt").read_text().splitlines()
    if not line.startswith("#")
]
# A tenth: one of each kind, and what has been difficult. Those of 4 ranks are offered as to MPI, which gloo's are not.
REPRESENTATIVES = {
    2: [
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_accumulate_gradients_no_sync",
        "test_all_gather_object_subgroup",
        "test_all_reduce_coalesced_sum",
        "test_barrier_timeout_global",
        "test_ddp_create_graph",
        "test_ddp_logging_data_cpu",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_sparse_all_reduce_sum",
        "test_static_graph_api_cpu",
    ],
    4: [
        "test_DistributedDataParallelCPU",
        "test_all_reduce_full_group_max",
        "test_all_to_all_single_unequal_split_group",
        "test_all_reduce_sum_complex",
        "test_broadcast_group",
        "test_reduce_sum_twice",
        "test_scatter_group",
        "test_send_recv_any_source",
    ],
}


def run_suite(
    folder: Path, backend: str, world_size: int, *names: str, like: str = "gloo", timeout_s: float = 110
) -> dict[str, str]:
    """State of each test: "passed", "skipped" or the end of what it said."""
    out = folder / f"{backend}-{like}-{world_size}.json"
    command = [sys.executable, "-m", "tests.torch.pytorch_suite", "--backend", backend, "--like", like]
    command += ["--world-size", str(world_size), "--out", str(out), *names]
    # Exact values are compared, so nothing may be compressed.
    environment = os.environ | {"SQUINCH_COMPRESS": "off"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert out.exists(), done.stderr[-3000:]
    table = json.loads(out.read_text())
    return {name: each["detail"] if each["state"] == "failed" else each["state"] for name, each in table.items()}


@pytest.mark.parametrize(("world_size", "like"), [(2, "gloo"), (4, "mpi")])
def test_representatives(tmp_path: Path, world_size: int, like: str) -> None:
    names = REPRESENTATIVES[world_size]
    assert run_suite(tmp_path, "squinch", world_size, *names, like=like) == dict.fromkeys(names, "passed")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_passes_with_gloo_passes(tmp_path: Path, world_size: int) -> None:
    gloo = run_suite(tmp_path, "gloo", world_size, timeout_s=600)
    due = [name for name, state in gloo.items() if state == "passed"]
    assert len(due) >= 90
    ours = run_suite(tmp_path, "squinch", world_size, *due, timeout_s=600)
    assert {name: state for name, state in ours.items() if state != "passed"} == {}
    beyond = [name for size, name in BEYOND if size == world_size]
    assert {gloo[name] for name in beyond} == {"skipped"}
    assert run_suite(tmp_path, "squinch", world_size, *beyond, like="mpi", timeout_s=300) == dict.fromkeys(beyond, "passed")
