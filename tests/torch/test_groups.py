"""Groups: sub-groups, meshes, options, ends and new beginnings, ranks that do not come."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from squinchcomm.errors import CommunicatorAborted, MismatchError, PeerLost
from tests.torch.ranks import World, run_ranks, scratch_store

torch = pytest.importorskip("torch")
dist = torch.distributed


def subgroups(rank: int) -> None:
    odd = dist.new_group([1, 3])
    pair = dist.new_group([3, 0], group_desc="corners")
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=odd)
    assert tensor[0] == (4 if rank in (1, 3) else rank)
    if rank in (1, 3):
        assert dist.get_rank(odd) == (rank - 1) // 2 and dist.get_world_size(odd) == 2
        dist.broadcast(tensor, 3, group=odd)
        outputs = [torch.empty(1) for _ in range(2)]
        dist.all_gather(outputs, torch.tensor([float(rank)]), group=odd)
        assert [output.item() for output in outputs] == [1, 3]
        if rank == 1:
            dist.send(torch.ones(2), 3, group=odd)
        else:
            box = torch.empty(2)
            assert dist.recv(box, group=odd) == 1
        everything: list[Any] = [None, None]
        dist.all_gather_object(everything, rank, group=odd)
        assert everything == [1, 3]
    else:
        assert dist.get_rank(odd) == -1
    if rank in (0, 3):
        assert dist.get_process_group_ranks(pair) == [0, 3] and pair.group_desc == "corners"
        dist.destroy_process_group(pair)
        with pytest.raises(CommunicatorAborted):
            pair.allreduce([torch.ones(1)]).wait()
    dist.barrier()


def mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for name, expected in (("shard", 1 if rank < 2 else 5), ("replica", 2 if rank % 2 == 0 else 4)):
        group = grid.get_group(name)
        assert dist.get_backend(group) == "squinch"
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == expected


def again(rank: int, folder: str) -> None:
    """Destroyed and made anew, with a store of its own and with one that has seen groups before."""
    import squinchcomm.torch

    threads = threading.active_count()
    store = dist.FileStore(f"{folder}/shared", -1)  # -1: the file stays
    for turn in range(3):
        dist.init_process_group("squinch", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        group = dist.new_group()
        tensor = torch.full((2,), float(turn))
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
        assert tensor[0] == 4 * turn
        dist.barrier()
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            dist.all_reduce(tensor)
    time.sleep(0.2)
    assert threading.active_count() <= threads + 1, threading.enumerate()
    dist.init_process_group(
        "squinch",
        init_method=scratch_store(folder, "fresh"),
        rank=rank,
        world_size=2,
        pg_options=squinchcomm.torch.Options(scheme="tcp", security="curve"),
    )
    dist.all_reduce(tensor)
    assert dist.group.WORLD.communicator._transports[0].encrypted, "the key came through the store"
    dist.destroy_process_group()


def through_tcp_store(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("squinch", timeout=timedelta(seconds=20))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == 2
    dist.destroy_process_group()


def alone_too_long(rank: int, folder: str) -> str:
    """Rank 1 of three does not come."""
    if rank == 1:
        return ""
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 of 3 did not join the group within 1 s") as caught:
        dist.init_process_group(
            "squinch", init_method=scratch_store(folder, "lonely"), rank=rank, world_size=3, timeout=timedelta(seconds=1)
        )
    assert isinstance(caught.value, dist.DistError)
    assert time.monotonic() - started < 4
    return str(caught.value)


def aborted(rank: int) -> None:
    group = dist.new_group()
    if rank == 0:
        timer = threading.Timer(0.3, group.abort)
        timer.start()
        started = time.monotonic()
        with pytest.raises(CommunicatorAborted, match="process group was aborted"):
            dist.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - started < 1.0
    else:
        if rank == 1:
            time.sleep(0.5)
        # Rank 1 may have got all it needs for the first call before the end.
        with pytest.raises(CommunicatorAborted, match=r"process group was aborted"):
            any(dist.all_reduce(torch.ones(3), group=group) for _ in range(2))
    dist.barrier()


def different_members(rank: int) -> None:
    """Ranks that do not agree on who is in a group: an error that names both, at once, on all that are concerned."""
    ideas: list[list[list[int]]] = [[[0, 1], [0, 1, 2], [0, 1, 2]], [[0, 1, 2], [1, 2], [0, 1, 2]], [[0, 2], [1, 2], [1, 2]]]
    for idea in ideas:
        members = idea[rank] if rank < 3 else [3]
        started = time.monotonic()
        if members == [3] or (members == [1, 2] and idea.count(members) == 2):
            group = dist.new_group(members)
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == len(members)
        else:
            with pytest.raises(MismatchError, match=r"ranks make different groups: rank \d one of \d ranks \(.*rank \d one of"):
                dist.new_group(members, timeout=timedelta(seconds=10))
        assert time.monotonic() - started < 5
        dist.barrier()


def side_by_side(rank: int) -> None:
    """Each rank makes just the group that it belongs to."""
    members = [0, 2] if rank % 2 == 0 else [1, 3]
    group = dist.new_group(members)
    tensor = torch.full((100,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == sum(members)


def in_a_fork(rank: int) -> None:
    pid = os.fork()
    if not pid:
        try:
            dist.all_reduce(torch.ones(1))
        except CommunicatorAborted as error:
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def four_ranks(rank: int) -> None:
    subgroups(rank)
    mesh(rank)
    in_a_fork(rank)
    different_members(rank)
    side_by_side(rank)


def test_subgroups_and_meshes() -> None:
    run_ranks(4, four_ranks, compress="off")


def test_groups_are_made_again(tmp_path: Path) -> None:
    for result in World(2, again, str(tmp_path), bare=True).outcomes():
        assert not isinstance(result, BaseException), result


def test_groups_meet_through_a_tcp_store() -> None:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for result in World(2, through_tcp_store, port, bare=True).outcomes():
        assert not isinstance(result, BaseException), result


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    for result in World(3, alone_too_long, str(tmp_path), bare=True).outcomes():
        assert isinstance(result, str), result


def test_abort_frees_every_rank() -> None:
    run_ranks(3, aborted)
