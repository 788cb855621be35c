"""What is compressed through torch, who says so, and where it is counted."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from squinchcomm.errors import ConfigError
from tests.torch.ranks import run_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

BIG = 100_000


def compressed_by(call: Any) -> int:
    """How many of the calls of the default group that `call` makes are compressed."""
    stats = dist.group.WORLD.communicator.stats
    before = stats.compressed
    call()
    return int(stats.compressed - before)


def gradient(dtype: Any = torch.float32) -> Any:
    return torch.randn(BIG).to(dtype)


def automatic(rank: int) -> dict[str, int]:
    """Sums and averages of large float tensors, and nothing else."""
    ranks = dist.get_world_size()
    op = dist.ReduceOp
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert compressed_by(lambda dtype=dtype: dist.all_reduce(gradient(dtype))) == 1
        assert compressed_by(lambda dtype=dtype: dist.all_reduce(gradient(dtype), op.AVG)) == 1
    assert compressed_by(lambda: dist.all_reduce(gradient(), dist._make_nccl_premul_sum(0.5))) == 1
    assert compressed_by(lambda: dist.reduce_scatter_tensor(torch.empty(BIG // ranks), gradient())) == 1
    assert compressed_by(lambda: dist.all_reduce(gradient(), async_op=True).wait()) == 1
    for call in (
        lambda: dist.all_reduce(gradient(), op.MAX),
        lambda: dist.all_reduce(gradient(torch.float64)),
        lambda: dist.all_reduce(torch.ones(BIG, dtype=torch.int64)),
        lambda: dist.all_reduce(torch.ones(BIG, dtype=torch.complex64)),
        lambda: dist.all_reduce_coalesced([torch.ones(BIG, dtype=torch.complex64)]),
        lambda: dist.all_reduce(torch.ones(100)),
        lambda: dist.broadcast(gradient(), 0),
        lambda: dist.reduce(gradient(), 0),
        lambda: dist.all_gather_into_tensor(torch.empty(BIG * ranks), gradient()),
    ):
        assert compressed_by(call) == 0
    real_and_complex = [gradient(), torch.ones(BIG, dtype=torch.complex64)]
    assert compressed_by(lambda: dist.all_reduce_coalesced(real_and_complex)) == 1
    assert torch.equal(real_and_complex[1], torch.full((BIG,), ranks + 0j))
    return dict(dist.group.WORLD.communicator.stats.uncompressed)


def guards(rank: int) -> None:
    from squinchcomm.torch import compressed, lossless

    with lossless():
        assert compressed_by(lambda: dist.all_reduce(gradient())) == 0
        with compressed():
            assert compressed_by(lambda: dist.all_reduce(gradient())) == 1
        assert compressed_by(lambda: dist.all_reduce(gradient())) == 0
        works = dist.all_reduce(gradient(), async_op=True)
    works.wait()
    assert dist.group.WORLD.communicator.stats.uncompressed["guard"] == 3
    assert compressed_by(lambda: dist.all_reduce(gradient())) == 1
    with compressed("bf16"):
        tensor = torch.full((BIG,), 1 + 2**-10)
        assert compressed_by(lambda: dist.all_reduce(tensor)) == 1
        assert tensor[0] == 2.0, "bf16 has no such fraction"
        assert compressed_by(lambda: dist.all_reduce(gradient(torch.float64))) == 1
        assert compressed_by(lambda: dist.all_reduce(torch.ones(BIG, dtype=torch.int32))) == 0
        assert compressed_by(lambda: dist.all_reduce(gradient(), dist.ReduceOp.MIN)) == 0
    with compressed(all_gather=True):
        assert compressed_by(lambda: dist.all_gather_into_tensor(torch.empty(2 * BIG), gradient())) == 1
        assert compressed_by(lambda: dist.all_gather([torch.empty(BIG) for _ in range(2)], gradient())) == 1
    with pytest.raises(ConfigError, match="squinch5"), compressed("squinch5"):
        pass
    guard_in_threads()


def guard_in_threads() -> None:
    """Autograd's own threads keep the guard of the backward pass; threads of the block's own making have none."""
    from squinchcomm.torch import lossless
    from squinchcomm.torch.guards import current_guard

    seen: list[Any] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, depth: int) -> Any:
            ctx.depth = depth
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.append((threading.get_ident(), current_guard()))
            if ctx.depth:  # deep enough, and autograd goes on in a thread of its pool
                with torch.enable_grad():
                    inner = torch.ones(1, requires_grad=True)
                    Look.apply(inner, ctx.depth - 1).sum().backward()
            return grad, None

    with lossless():
        Look.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
        thread = threading.Thread(target=lambda: seen.append((0, current_guard())))
        thread.start()
        thread.join()
    assert seen.pop() == (0, None)
    assert len({ident for ident, _ in seen}) > 1
    assert all(guard is not None and guard.lossless for _, guard in seen)
    assert current_guard() is None


def explicit(rank: int) -> None:
    from squinchcomm.torch import compressed

    assert compressed_by(lambda: dist.all_reduce(gradient())) == 0
    with compressed():
        assert compressed_by(lambda: dist.all_reduce(gradient())) == 1
    assert dist.group.WORLD.communicator.stats.uncompressed["explicit"] == 1


def off(rank: int) -> None:
    from squinchcomm.torch import compressed

    exact = torch.full((BIG,), 1 + 2**-20)
    with compressed():
        assert compressed_by(lambda: dist.all_reduce(exact)) == 0
    assert torch.all(exact == 2 * (1 + 2**-20))
    assert dist.group.WORLD.communicator.stats.uncompressed["off"] == 1


def inherited(rank: int) -> None:
    from squinchcomm.torch import Options

    config = dist.new_group().communicator.config
    assert (config.codec, config.min_compress_bytes, config.compress) == ("int8", 4096, "explicit")
    config = dist.new_group(pg_options=Options(codec="none"), timeout=timedelta(seconds=7)).communicator.config
    assert (config.codec, config.compress, config.timeout_s) == ("none", "auto", 7.0)
    with pytest.raises(ConfigError, match=r"must be squinchcomm.torch.Options, not dict"):
        dist.new_group(pg_options={"codec": "none"})


def logged(rank: int) -> list[str]:
    """One line for each signature that is compressed, when it is the first time."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("squinchcomm")
    logger.addHandler(handler)
    for _ in range(3):
        dist.all_reduce(gradient())
        dist.all_reduce(gradient(torch.bfloat16))
    return [line for line in lines if "squinch6" in line]


def test_automatic() -> None:
    counts = run_ranks(2, automatic)
    assert counts == [{"op": 1, "dtype": 5, "small": 1}] * 2


def test_guards() -> None:
    run_ranks(2, guards)


def test_explicit_and_off() -> None:
    run_ranks(2, explicit, compress="explicit")
    run_ranks(2, off, compress="off")


def test_later_groups_take_the_options_of_the_default_group() -> None:
    run_ranks(2, inherited, compress="explicit", codec="int8", min_compress_bytes="4K")


def test_one_log_line_a_signature() -> None:
    for lines in run_ranks(2, logged, debug="INFO"):
        assert [line.split(" goes out")[0] for line in lines] == [
            "allreduce of 100000 float32 elements",
            "allreduce of 100000 bfloat16 elements",
        ]


def test_options_come_from_argument_environment_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from squinchcomm.torch import Options
    from squinchcomm.torch.registration import _timeout_s

    assert Options().config.codec == "squinch6"
    monkeypatch.setenv("SQUINCH_CODEC", "none")
    monkeypatch.setenv("SQUINCH_COMPRESS", "explicit")
    monkeypatch.setenv("SQUINCH_TIMEOUT", "9")
    assert Options().config.codec == "none"
    assert Options(codec="int8").config.codec == "int8"
    assert Options().config.compress == "explicit"
    assert _timeout_s(dist.constants.default_pg_timeout, Options()) == 9.0
    assert _timeout_s(timedelta(seconds=4), Options()) == 4.0
    with pytest.raises(ConfigError, match="compress='sometimes' is not allowed; give auto, explicit or off"):
        Options(compress="sometimes")
    with pytest.raises(ConfigError, match="min_compres_bytes: no such setting; did you mean min_compress_bytes"):
        Options(min_compres_bytes=1)


def test_the_entry_point_of_later_torch_leads_to_the_registrar() -> None:
    import tomllib

    import squinchcomm.torch

    project = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch.distributed.backends"]["squinch"].partition(":")
    assert module == squinchcomm.torch.__name__
    getattr(squinchcomm.torch, name)()  # a second registration does nothing
    assert dist.Backend.backend_list.count("squinch") == 1


def test_import_is_quick_and_compiles_nothing() -> None:
    import subprocess
    import sys

    code = (
        "import sys, time, torch.distributed; t = time.perf_counter(); import squinchcomm.torch;"
        "print(time.perf_counter() - t, 'numba' in sys.modules, 'squinch' in torch.distributed.Backend.backend_list)"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        took, numba, registered = done.stdout.split()
        assert (numba, registered) == ("False", "True")
        seconds.append(float(took))
        if seconds[-1] < 0.3:
            return
        time.sleep(0.5)
    raise AssertionError(f"import takes {seconds} s beyond torch")
