"""Metrics: names and labels, values, several communicators, ports, files, forks."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from squinchcomm import metrics, roster
from squinchcomm.errors import CommunicatorAborted, ConfigError, PeerLost, SquinchError
from squinchcomm.kernels import get_codec
from squinchcomm.stats import Durations, Stats
from tests.cli.command import environment
from tests.worlds import ones, outcomes, run_world

# Name: type and labels, as documented.
TABLE: dict[str, tuple[str, set[str]]] = {
    "collectives": ("counter", {"op", "codec"}),
    "collective_failures": ("counter", {"op", "reason"}),
    "collective_duration_seconds": ("histogram", {"op"}),
    "raw_bytes": ("counter", {"op", "codec"}),
    "sent_wire_bytes": ("counter", {"op", "codec"}),
    "received_wire_bytes": ("counter", {"op", "codec"}),
    "encode_seconds": ("counter", {"codec"}),
    "decode_seconds": ("counter", {"codec"}),
    "wait_seconds": ("counter", set()),
    "uncompressed": ("counter", {"reason"}),
    "nonfinite_blocks": ("counter", set()),
    "sampled_blocks": ("counter", set()),
    "saturated_blocks": ("counter", set()),
    "underflow_blocks": ("counter", set()),
    "quantization_error_ratio": ("gauge", {"codec"}),
    "residual_norm": ("gauge", {"codec"}),
    "frames_corrupt": ("counter", set()),
    "peer_failures": ("counter", set()),
    "aborts": ("counter", set()),
    "shrinks": ("counter", set()),
    "rejected_peers": ("counter", set()),
    "unshared_payloads": ("counter", set()),
    "peers": ("gauge", set()),
    "inflight_collectives": ("gauge", set()),
    "last_collective_timestamp_seconds": ("gauge", set()),
    "build_info": ("gauge", {"version", "wire_version", "python"}),
    "rank_info": ("gauge", {"rank", "local_rank", "world_size", "transport", "node", "encrypted"}),
}
DOCUMENT = Path(__file__).parent.parent / "docs" / "observability.md"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    metrics.stop()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def value(name: str, **labels: str) -> float:
    return metrics.registry().get_sample_value(f"squinchcomm_{name}", labels) or 0.0


class Change:
    """How much a series has grown since this was made: other tests of this process have counted, too."""

    def __init__(self) -> None:
        self._before = {(s.name, *sorted(s.labels.items())): s.value for f in metrics.registry().collect() for s in f.samples}

    def of(self, name: str, **labels: str) -> float:
        return value(name, **labels) - self._before.get((f"squinchcomm_{name}", *sorted(labels.items())), 0.0)


def test_the_exporter_serves_what_is_documented() -> None:
    port = metrics.serve(0)
    assert port and metrics.serve(0) == port
    assert metrics.serve(port) == port

    def body(comm: Any) -> str:
        data = np.random.default_rng(comm.rank).standard_normal(40_000).astype(np.float32)
        comm.allreduce(data.copy(), "avg", codec="squinch6")
        comm.allreduce(data.copy(), "max")
        comm.reduce(data.copy())
        comm.all_gather(np.empty(120_000, np.float32), data)
        comm.barrier()
        text = scrape(port) if comm.rank == 0 else ""
        comm.barrier()
        return text

    text = run_world(3, body)[0]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {}
    for name, family in families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name.removeprefix("squinchcomm_")] = (family.type, labels)
        assert family.documentation
    assert set(found) == set(TABLE)
    sampled = {name: entry for name, entry in found.items() if families[f"squinchcomm_{name}"].samples}
    assert sampled == {name: TABLE[name] for name in sampled}
    assert set(TABLE) - set(sampled) <= {"residual_norm"}
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in series}) == len(series)
    if shutil.which("promtool"):  # Prometheus' own opinion on names, types and help
        judged = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
        )
        assert (judged.returncode, judged.stdout + judged.stderr) == (0, "")


def test_a_rank_has_at_most_250_series() -> None:
    """In a process of its own: here, other tests have used operations and codecs that no one job uses together."""
    program = """
import numpy as np
from prometheus_client import generate_latest
from squinchcomm import metrics
from tests.worlds import run_world

def body(comm):
    data = np.random.default_rng(comm.rank).standard_normal(40_000).astype(np.float32)
    for codec in ("squinch6", "none"):
        comm.allreduce(data.copy(), "avg", codec=codec)
        comm.reduce_scatter(np.empty(20_000, np.float32), data, codec=codec)
    comm.all_gather(np.empty(80_000, np.float32), data)
    comm.broadcast(data)
    comm.barrier()

run_world(2, body)
print(sum(1 for line in generate_latest(metrics.registry()).splitlines() if line and not line.startswith(b"#")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert 200 < int(done.stdout) <= 250


def test_documents_have_the_same_table() -> None:
    text = DOCUMENT.read_text()
    for name, (kind, labels) in TABLE.items():
        shown = f"squinchcomm_{name}_total" if kind == "counter" else f"squinchcomm_{name}"
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{shown}` |")]
        _, _, type_cell, label_cell, *_ = row.split("|")
        assert type_cell.strip() == kind
        assert {label.strip(" `") for label in label_cell.split(",")} - {"", "none"} == labels


def test_what_is_usual_exists_before_anything_happens() -> None:
    code = (
        "from squinchcomm import metrics; import prometheus_client as p; print(p.generate_latest(metrics.registry()).decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment(), check=True
    )
    lines = done.stdout.splitlines()
    for series in (
        'squinchcomm_collectives_total{codec="none",op="barrier"}',
        'squinchcomm_collectives_total{codec="squinch6",op="allreduce"}',
        'squinchcomm_collective_failures_total{op="allreduce",reason="peer_lost"}',
        'squinchcomm_uncompressed_total{reason="crossover"}',
        "squinchcomm_nonfinite_blocks_total",
        'squinchcomm_collective_duration_seconds_bucket{le="0.0001",op="reduce_scatter"}',
        "squinchcomm_peers",
    ):
        assert f"{series} 0.0" in lines


def test_bytes_seconds_and_calls_are_those_of_the_calls() -> None:
    change = Change()
    count = 64_000

    def body(comm: Any) -> Any:
        for _ in range(3):
            comm.allreduce(ones(count), "avg", codec="squinch6")
        comm.reduce_scatter(np.empty(count // 4, np.float32), ones(count))
        if comm.rank == 0:
            comm.send(ones(1000), 1)
        elif comm.rank == 1:
            comm.recv(ones(1000), 0)
        comm.allreduce(ones(100), codec="squinch6")
        return comm.stats.sent_wire_bytes, comm.stats.received_wire_bytes

    found = run_world(4, body)
    assert change.of("collectives_total", op="allreduce", codec="squinch6") == 12
    assert change.of("collectives_total", op="reduce_scatter", codec="none") == 4
    assert change.of("collectives_total", op="send", codec="none") == 2
    assert change.of("uncompressed_total", reason="small") == 4
    labels = {"op": "allreduce", "codec": "squinch6"}
    raw, sent = change.of("raw_bytes_total", **labels), change.of("sent_wire_bytes_total", **labels)
    assert raw == 3 * 4 * count * 2 * 3  # each of 4 ranks sends 2 (n-1)/n of its array
    assert 5.1 < raw / sent < 16 / 3
    assert change.of("received_wire_bytes_total", **labels) == sent
    assert change.of("raw_bytes_total", op="reduce_scatter", codec="none") == 4 * count * 3
    total = [
        sum(change.of(f"{way}_wire_bytes_total", op=op, codec=codec) for op, codec in known()) for way in ("sent", "received")
    ]
    assert total == [sum(each[way] for each in found) for way in (0, 1)]
    assert change.of("encode_seconds_total", codec="squinch6") > 0 < change.of("decode_seconds_total", codec="squinch6")
    assert change.of("wait_seconds_total") > 0
    assert change.of("collective_duration_seconds_count", op="allreduce") == 16
    assert change.of("collective_duration_seconds_bucket", op="allreduce", le="+Inf") == 16
    assert change.of("collective_duration_seconds_sum", op="allreduce") > 0


def known() -> list[tuple[str, str]]:
    family = next(each for each in metrics.registry().collect() if each.name == "squinchcomm_collectives")
    return [(sample.labels["op"], sample.labels["codec"]) for sample in family.samples]


def test_hierarchical_calls_count_what_goes_between_hosts_and_inside_them() -> None:
    change = Change()
    run_world(4, lambda comm: comm.allreduce(ones(100_000), codec="squinch6"), hosts="aabb", algorithm="hierarchical")
    labels = {"op": "allreduce", "codec": "squinch6"}
    raw, sent = change.of("raw_bytes_total", **labels), change.of("sent_wire_bytes_total", **labels)
    # A rank hands half of its array to its neighbour as it is; results and sums between hosts are encoded.
    inside = 4 * 4 * 100_000 // 2
    assert raw > 2 * inside
    assert inside + (raw - inside) * 6 / 32 <= sent <= (inside + (raw - inside) * 6 / 32) * 1.02


def test_communicators_add_up_and_counters_never_fall() -> None:
    change, seen = Change(), []

    def body(comm: Any) -> None:
        for _ in range(2):
            comm.allreduce(ones(10))
        half = comm.split(comm.rank % 2)
        half.allreduce(ones(10))
        comm.barrier()
        if comm.rank == 0:
            seen.append(change.of("collectives_total", op="allreduce", codec="none"))
        comm.barrier()
        half.close()
        half.close()
        if comm.rank == 0:
            seen.append(change.of("collectives_total", op="allreduce", codec="none"))

    for _ in range(2):
        run_world(2, body)
    seen.append(change.of("collectives_total", op="allreduce", codec="none"))
    assert seen == [6, 6, 12, 12, 12]


def test_failures_have_their_reasons() -> None:
    change = Change()

    def reason(comm: Any, kind: str) -> None:
        if kind == "timeout" and comm.rank == 0:
            threading.Event().wait(0.8)
        if kind == "aborted" and comm.rank == 0:
            comm.abort("enough")
        if kind == "peer_lost" and comm.rank == 0:
            return
        comm.allreduce(ones(100 + (comm.rank if kind == "mismatch" else 0)), timeout_s=0.4 if kind == "timeout" else 60.0)

    for kind in ("timeout", "aborted", "peer_lost", "mismatch"):
        assert any(isinstance(each, SquinchError) for each in outcomes(2, lambda comm, kind=kind: reason(comm, kind)))
        assert change.of("collective_failures_total", op="allreduce", reason=kind) > 0, kind
    assert change.of("peer_failures_total") == 1
    assert change.of("aborts_total") >= 1

    def survive(comm: Any) -> None:
        if comm.rank == 1:
            return
        with pytest.raises(PeerLost):
            comm.allreduce(ones(100))
        with comm.shrink() as smaller:
            smaller.barrier()

    aborts = change.of("aborts_total")
    run_world(2, survive)
    assert change.of("shrinks_total") == 1
    assert change.of("aborts_total") == aborts  # it had failed already


def test_numbers_that_a_codec_cannot_hold_are_seen() -> None:
    change = Change()

    def body(comm: Any) -> float:
        data = np.random.default_rng(comm.rank).standard_normal(65_536).astype(np.float32)
        data[::64] *= 1e-12
        for block in range(0, 512, 64):
            data[block] = 1e-12  # the first block of the first tile, below the smallest scale
        comm.allreduce(data.copy(), "avg", codec="squinch6")
        if comm.rank == 0:
            data[40_000] = np.nan  # in the other rank's shard
        comm.allreduce(data, "avg", codec="squinch6")
        return comm.stats.error_ratios["squinch6"]

    ratios = run_world(2, body)
    # Once on its way to the owner, and once in the sum.
    assert change.of("nonfinite_blocks_total") == 2
    assert change.of("sampled_blocks_total") == 2 * 32_768 / 8  # a chunk of each rank: the other one's shard
    assert change.of("underflow_blocks_total") >= 1
    assert change.of("saturated_blocks_total") == 0
    normal = np.random.default_rng(9).standard_normal(100_000).astype(np.float32)
    codec = get_codec("squinch6")
    usual = np.linalg.norm(codec.decode(codec.encode(normal), normal.size) - normal) / np.linalg.norm(normal)
    assert ratios == pytest.approx([usual] * 2, rel=0.2)
    assert value("quantization_error_ratio", codec="squinch6") in ratios


@pytest.mark.parametrize("codec", ["bf16", "int8", "squinch6-sr"])
def test_errors_of_other_codecs(codec: str) -> None:
    def body(comm: Any) -> float:
        data = np.random.default_rng(comm.rank).standard_normal(30_000).astype(np.float32)
        comm.allreduce(data, codec=codec)
        return comm.stats.error_ratios[codec]

    low, high = {"bf16": (1e-3, 3e-3), "int8": (3e-3, 1e-2), "squinch6-sr": (5e-2, 1.2e-1)}[codec]
    assert all(low < ratio < high for ratio in run_world(2, body))


def test_who_and_how_many() -> None:
    def body(comm: Any) -> Any:
        comm.barrier()
        info, peers = roster.rank_info(), roster.connected_peers()
        comm.barrier()
        return info, peers

    info, peers = run_world(3, body, hosts="aab")[0]
    assert (info.world_size, info.transport, info.encrypted, peers) == (3, "inproc", False, 2)
    assert info.local_rank == {0: 0, 1: 1, 2: 0}[info.rank]
    assert value("peers") == 0 and roster.rank_info().world_size == 3  # remembered
    assert value("last_collective_timestamp_seconds") > 1.7e9
    assert value("inflight_collectives") == 0


def test_residuals() -> None:
    torch = pytest.importorskip("torch")
    from squinchcomm.torch.error_feedback import ErrorFeedback

    feedback = ErrorFeedback(torch.nn.Linear(3, 1))
    bucket = feedback.open([parameter for _, parameter in feedback._parameters.values()])
    bucket.coming.fill_(2.0)
    feedback.close()
    feedback.settle()
    roster.hold_residuals(feedback, "squinch6")
    assert value("residual_norm", codec="squinch6") == pytest.approx(4.0)
    del feedback, bucket


def test_a_port_in_use_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "squinchcomm"):
            # Ranks of a test share a process, which serves once; ranks count from 0, so port + 0.
            run_world(1, lambda comm: comm.barrier(), metrics_port=port)
            run_world(1, lambda comm: comm.barrier(), metrics_port=port)
        (record,) = [record for record in caplog.records if "metrics" in record.message]
        assert str(port) in record.message and "SQUINCH_METRICS_PORT" in record.message
        assert metrics.serve(port) is None
    assert metrics.serve(port) == port
    with pytest.raises(ConfigError, match="70000"):
        metrics.serve(70_000)


def test_a_text_file_for_node_exporter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = tmp_path / "squinchcomm.prom"
    run_world(1, lambda comm: comm.barrier(), metrics_file=wanted)
    metrics.stop()
    (path,) = tmp_path.iterdir()
    assert path.name == "squinchcomm.0.prom"
    families = list(text_string_to_metric_families(path.read_text()))
    assert {f"squinchcomm_{name}" for name in TABLE} == {family.name for family in families}
    assert all(sample.labels["rank"] == "0" for family in families for sample in family.samples)
    with caplog.at_level(logging.WARNING, "squinchcomm"):
        run_world(1, lambda comm: comm.barrier(), metrics_file=tmp_path / "new" / "x.prom")
        metrics.stop()
        assert (tmp_path / "new" / "x.0.prom").is_file() and not caplog.records
        (tmp_path / "file").write_text("")
        run_world(1, lambda comm: comm.barrier(), metrics_file=tmp_path / "file" / "x.prom")
        metrics.stop()
    (message,) = [record.message for record in caplog.records]
    assert f"{tmp_path / 'file' / 'x.0.prom'}: " in message and ".tmp" not in message


FORK = """
import os, socket, sys, urllib.request
import numpy as np
import squinchcomm
from squinchcomm import metrics

port = int(os.environ["SQUINCH_METRICS_PORT"]) + 1
comm = squinchcomm.init()
comm.barrier()
def series(): return metrics.registry().get_sample_value("squinchcomm_collectives_total", {"op": "barrier", "codec": "none"})
text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
assert 'local_rank="1"' in text and series() == 1
child = os.fork()
if not child:
    assert series() == 0
    assert metrics._outlets.server is None
    os.read(0, 1)  # until the test is done with the parent
    os._exit(0)
print("ready", flush=True)
comm.close()
metrics.stop()
with socket.socket() as free:  # also although the child lives
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", port))
print("free", flush=True)
os.waitpid(child, 0)
with squinchcomm.init() as again:
    again.barrier()
    assert series() == 2
    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()
print("again", flush=True)
"""


def test_forks_and_new_beginnings_in_a_real_process() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = environment(SQUINCH_METRICS_PORT=str(port - 1), LOCAL_RANK="1")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        out, err = process.communicate("x", timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out.split()) == (0, ["ready", "free", "again"]), err


def test_sums_of_statistics() -> None:
    first, second = Stats(), Stats()
    second.uncompressed["small"] = 2
    second.failed["allreduce", "timeout"] = 1
    second.error_ratios["int8"], second.last_end_s = 0.5, 2.0
    first.error_ratios["int8"], first.last_end_s = 0.1, 1.0
    first.add(second)
    first.add(second)
    assert first.uncompressed == {"small": 4} and first.failures == 2
    assert first.error_ratios == {"int8": 0.5}
    durations = Durations()
    for seconds in (0.0, 1e-4, 1.5e-4, 1000.0):
        durations.observe(seconds)
    assert durations.counts[0] == 2 and durations.counts[1] == 1 and durations.counts[-1] == 1


def test_a_closed_communicator_is_forgotten_and_an_error_keeps_its_count() -> None:
    before = len(roster.live())

    def body(comm: Any) -> None:
        comm.close()
        with pytest.raises(CommunicatorAborted):
            comm.barrier()

    run_world(2, body)
    assert len(roster.live()) == before
