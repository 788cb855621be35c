"""A real Slurm cluster on one machine: each node a network namespace with a host name of its own. Needs root.

Configuration, keys, spool and logs lie in one folder, daemons listen inside the namespaces, and each node's processes live in a
process namespace that ends with it: nothing of it is left when the cluster is closed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import netns

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare", "setpriv")
_SEARCH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
_CPUS = 2  # a node says it has, whatever the machine has: jobs here wait more than they compute
_MUNGE_FILES = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}

_CONF = """\
ClusterName=squinch
SlurmctldHost=sq0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
KillWait=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
MailProg=/bin/true
NodeName=sq[0-{last}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def unavailable() -> str | None:
    """Why no cluster can be had here, or None."""
    if reason := netns.available():
        return f"a Slurm cluster cannot be started: {reason}"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_SEARCH) is None]:
        return (
            f"needs {', '.join(missing)} (Debian packages slurmctld, slurmd, slurm-client, munge: make test-full installs them)"
        )
    return None


class SlurmCluster:
    """`nodes` nodes sq0, sq1, ... with slurmctld on sq0. A context manager; `folder` should be new and readable by root alone."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = nodes
        self._network = netns.Network(nodes)
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._network.__enter__()
            self._write_files()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the cluster and removes its network. Idempotent."""
        for daemon in reversed(self._daemons):
            _kill_namespace(daemon)
        for daemon in self._daemons:
            daemon.wait(20)
        self._daemons.clear()
        self._network.close()

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 30) -> str:
        """Standard output of a command such as sbatch, run on sq0; raises AssertionError with its output if it fails."""
        done = subprocess.run(
            self._on(0, [str(part) for part in command], own_processes=False),
            env=self._environment(env),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> int:
        """Number of the job that `sbatch ARGUMENTS...` makes; its output goes to `output(job)`."""
        log = self.folder / "job-%j.log"
        return int(self.run("sbatch", "--parsable", "--output", log, *arguments, env=env))

    def wait(self, job: int, timeout_s: float) -> str:
        """The final state of a job, such as COMPLETED or FAILED; AssertionError if it has not ended in time."""
        states: list[str] = []

        def ended() -> bool:
            states.append(self.state(job))
            return states[-1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

        self._await(ended, timeout_s, f"job {job}")
        return states[-1]

    def state(self, job: int) -> str:
        """State of a job as scontrol names it."""
        return self.run("scontrol", "show", "job", "--oneliner", str(job)).partition("JobState=")[2].split()[0]

    def output(self, job: int) -> str:
        """What a job has printed so far."""
        path = self.folder / f"job-{job}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """The last lines of each daemon's log, for messages of failures."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("slurm*.log")))

    def _environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SQUINCH_", "SLURM_"))}
        return {**kept, "PATH": _SEARCH, "SLURM_CONF": str(self.folder / "slurm.conf"), **(extra or {})}

    def _write_files(self) -> None:
        self.folder.chmod(0o700)
        (self.folder / "state").mkdir()
        for node in range(self.nodes):
            (self.folder / f"spool-sq{node}").mkdir()
        lines = [f"{self._network.address(node)} sq{node}" for node in range(self.nodes)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, never used; the default looks for mounts
        (self.folder / "slurm.conf").write_text(_CONF.format(folder=self.folder, last=self.nodes - 1, cpus=_CPUS))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def _on(self, node: int, command: list[str], own_processes: bool) -> list[str]:
        """`command` as it has to be started to run on a node: its network, its host name, the cluster's /etc/hosts."""
        processes = ["--pid", "--fork", "--kill-child", "--mount-proc"] if own_processes else []
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        enter = ["unshare", "--mount", "--uts", *processes, "sh", "-c", script, "sh", f"sq{node}", str(self.folder / "hosts")]
        return [*self._network.command(node, enter), *command]

    def _start(self) -> None:
        munge = [f"--{what}={self.folder}/munge.{ending}" for what, ending in _MUNGE_FILES.items()]
        self._daemon(0, "munged", "--foreground", "--force", *munge)
        self._await((self.folder / "munge.socket").exists, 20, "munged")
        self._daemon(0, "slurmctld", "-D")
        for node in range(self.nodes):
            self._daemon(node, "slurmd", "-D", "-N", f"sq{node}")
        self._await(self._all_idle, 40, "the nodes")

    def _daemon(self, node: int, *command: str) -> None:
        with open(self.folder / f"{command[0]}-{node}.out", "wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    # Ends with us, even if we are killed.
                    ["setpriv", "--pdeathsig", "KILL", *self._on(node, list(command), own_processes=True)],
                    env=self._environment(None),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def _all_idle(self) -> bool:
        try:
            return self.run("sinfo", "--noheader", "--Node", "--format", "%T").split() == ["idle"] * self.nodes
        except AssertionError:  # slurmctld does not answer yet
            return False

    def _await(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"daemons ended: {ended}\n{self.logs()}"
            assert time.monotonic() < deadline, f"{what}: not ready after {timeout_s} s\n{self.logs()}"
            time.sleep(0.2)


def _kill_namespace(unshare: subprocess.Popen[bytes]) -> None:
    """Ends the first process of a process namespace, and so all of them; `unshare` reaps it and ends, too."""
    try:
        first = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
    except OSError:
        first = []
    for pid in first or [str(unshare.pid)]:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
