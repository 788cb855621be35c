"""The collectives that `squinchcomm bench` measures: their buffers, calls, expected results and bandwidth factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from squinchcomm.cli.bench_check import Data, Segment, Verdict, check
from squinchcomm.kernels.dtypes import canonical_dtype

if TYPE_CHECKING:
    from squinchcomm.communicator import Communicator


@dataclass(frozen=True)
class Operation:
    """What is fixed about a collective.

    Attributes:
        factor: busbw / algbw by world size: what each rank must at least send or receive, as a multiple of the whole array.
        reduces: It takes a reduction.
        rooted: It takes a root.
        to_root: All that is sent meets at the root.
        encodings: How often a codec is applied to an element; 0 if the collective is always lossless.
        split: "input", "output" or "both" hold one part for each rank while the other side holds a single part; "" if there are no parts.
    """

    factor: Callable[[int], float]
    reduces: bool = False
    rooted: bool = False
    to_root: bool = False
    encodings: int = 0
    split: str = ""


OPERATIONS = {
    "allreduce": Operation(lambda n: 2 * (n - 1) / n, reduces=True, encodings=2),
    "reduce_scatter": Operation(lambda n: (n - 1) / n, reduces=True, encodings=1, split="input"),
    "all_gather": Operation(lambda n: (n - 1) / n, encodings=1, split="output"),
    "broadcast": Operation(lambda n: 1.0, rooted=True),
    "reduce": Operation(lambda n: 1.0, reduces=True, rooted=True),
    "gather": Operation(lambda n: (n - 1) / n, rooted=True, to_root=True, split="output"),
    "scatter": Operation(lambda n: (n - 1) / n, rooted=True, split="input"),
    "all_to_all": Operation(lambda n: (n - 1) / n, split="both"),
    "sendrecv": Operation(lambda n: 1.0),
    "barrier": Operation(lambda n: 0.0),
}


class Trial:
    """One collective at one size on this rank, callable again and again on the same data."""

    def __init__(
        self,
        comm: Communicator,
        name: str,
        count: int,
        dtype: np.dtype | str,
        reduction: str = "sum",
        root: int = 0,
        seed: int = 0,
    ) -> None:
        self.comm, self.name, self.operation = comm, name, OPERATIONS[name]
        self.reduction = reduction if self.operation.reduces else ""
        self.root = root
        ranks = comm.world_size
        self.part = count // ranks if self.operation.split else count
        self.count = self.part * ranks if self.operation.split else count
        self.data = Data(canonical_dtype(dtype), reduction if self.operation.reduces else "sum", seed)
        self.nbytes = self.count * self.data.dtype.itemsize
        split = self.operation.split
        self._source = self.data.values(comm.rank, 0, self.count if split in ("input", "both", "") else self.part)
        self.result = np.empty(self.part if split == "input" else self.count, self.data.dtype)

    def reset(self) -> None:
        """Makes the next call see the same input as every other."""
        if not self.operation.split and self.name != "sendrecv":
            self.result[:] = self._source

    def call(self, codec: str | None) -> None:
        """Makes the collective call once; `codec` as in the communicator's methods."""
        comm, source, result, root = self.comm, self._source, self.result, self.root
        match self.name:
            case "allreduce":
                comm.allreduce(result, self.reduction, codec=codec)
            case "reduce_scatter":
                comm.reduce_scatter(result, source, self.reduction, codec=codec)
            case "all_gather":
                comm.all_gather(result, source, codec=codec)
            case "broadcast":
                comm.broadcast(result, root)
            case "reduce":
                comm.reduce(result, root, self.reduction)
            case "gather":
                comm.gather(source, result if comm.rank == root else None, root)
            case "scatter":
                comm.scatter(result, source if comm.rank == root else None, root)
            case "all_to_all":
                comm.all_to_all(result, source)
            case "sendrecv":
                work = comm.send(source, (comm.rank + 1) % comm.world_size, async_op=True)
                comm.recv(result, (comm.rank - 1) % comm.world_size)
                if work is not None:
                    work.wait()
            case _:
                comm.barrier()

    def check(self, codec: str | None) -> Verdict:
        """Holds the result of the last call against the oracle."""
        lossy = None if codec in (None, "none") else codec
        return check(self.data, self.result, self._segments(), lossy, self.operation.encodings)

    def digest(self) -> int | None:
        """Checksum of a result that all ranks must share bit for bit; None if each rank has its own."""
        if self.name not in ("allreduce", "all_gather", "broadcast"):
            return None
        import google_crc32c

        return int(google_crc32c.value(self.result.view(np.uint8)))

    def _segments(self) -> list[Segment]:
        rank, ranks, part = self.comm.rank, self.comm.world_size, self.part
        everybody = tuple(range(ranks))
        match self.name:
            case "allreduce":
                # The digest shows that all ranks hold the same, so each checks its share.
                first, last = rank * self.count // ranks, (rank + 1) * self.count // ranks
                return [Segment(first, last - first, everybody, first)]
            case "reduce_scatter":
                return [Segment(0, part, everybody, rank * part)]
            case "all_gather":
                return [Segment(rank * part, part, (rank,), 0)]
            case "broadcast":
                first, last = rank * self.count // ranks, (rank + 1) * self.count // ranks
                return [Segment(first, last - first, (self.root,), first)]
            case "reduce":
                return [Segment(0, self.count, everybody, 0)] if rank == self.root else []
            case "gather":
                return [Segment(peer * part, part, (peer,), 0) for peer in everybody] if rank == self.root else []
            case "scatter":
                return [Segment(0, part, (self.root,), rank * part)]
            case "all_to_all":
                return [Segment(peer * part, part, (peer,), rank * part) for peer in everybody]
            case "sendrecv":
                return [Segment(0, self.count, ((rank - 1) % ranks,), 0)]
            case _:
                return []
