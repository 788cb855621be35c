"""The processes of the link benchmark: one a rank, each in its network namespace, driven over pipes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from netns import INTERFACE, Network, codec_threads

_FOLDER = Path(__file__).parent
# Outside a namespace's reach nothing else listens there, so that the numbers need no search.
_PORTS = iter(range(23000, 29000, 2))


class Ranks:
    """`world_size` rank processes. A context manager that ends them whatever happens.

    Args:
        world_size: Number of ranks.
        network: Where they live, as many on each host; None puts all of them on the loopback interface.
        one_host: Without a network, they know that they share a machine; else each takes itself for a host of its own.
        script: What a rank runs: `links_rank.obey` with a class of the benchmark.
    """

    def __init__(
        self, world_size: int, network: Network | None, *, one_host: bool = False, script: str = "links_rank.py"
    ) -> None:
        self.world_size = world_size
        port = next(_PORTS)
        host = network.address(0) if network else "127.0.0.1"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close
        self.started = time.perf_counter()
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._answers: list[queue.Queue[str]] = [queue.Queue() for _ in range(world_size)]
        threads = codec_threads(world_size)
        for rank in range(world_size):
            place = rank * len(network.names) // world_size if network else 0 if one_host else rank
            settings = {
                "rank": rank,
                "world_size": world_size,
                "host": network.names[place] if network else f"host{place}",
                "gloo": f"tcp://{host}:{port}",
                "squinch": f"tcp://{host}:{port + 1}",
                "interface": INTERFACE if network else "lo",
            }
            command = [sys.executable, str(_FOLDER / script), json.dumps(settings)]
            process = subprocess.Popen(
                network.command(place, command) if network else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={"SQUINCH_CODEC_THREADS": threads} | os.environ | {"OMP_NUM_THREADS": "1"},
            )
            self._processes.append(process)
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            reader.start()
            self._readers.append(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, do: str, *, timeout_s: float = 300.0, **fields: Any) -> list[Any]:
        """Has all ranks run a command, a method of their class, at once; their answers in rank order.

        Raises:
            RuntimeError: a rank died or did not answer in time; carries what the ranks wrote to stderr.
        """
        line = json.dumps({"do": do, **fields}) + "\n"
        for process in self._processes:
            if process.stdin is None or process.poll() is not None:
                raise RuntimeError(self._story(f"a rank ended before {do}"))
            process.stdin.write(line)
            process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, waiting in enumerate(self._answers):
            try:
                answer = waiting.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(self._story(f"rank {rank} did not answer {do} within {timeout_s:.0f} s")) from None
            if not answer:
                raise RuntimeError(self._story(f"rank {rank} died in {do}"))
            answers.append(json.loads(answer))
        return answers

    def close(self) -> None:
        """Ends the processes by their ids."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.wait()
            reader.join()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # a command that a dead rank never read
                        pipe.close()
        self._log.close()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._answers[rank].put(line)
        self._answers[rank].put("")

    def _story(self, what: str) -> str:
        time.sleep(0.2)  # the other ranks' last words
        self._log.seek(0)
        return f"{what}; the ranks' stderr:\n{self._log.read()[-4000:]}"
