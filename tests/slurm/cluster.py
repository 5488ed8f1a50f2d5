"""A real Slurm of a few emulated nodes on one machine, for as long as a test needs it.

Each node is a set of namespaces with a `slurmd` in it: a host name, a process table and a /dev/shm of its own. So
processes of one node cannot see another's, a node's RAM disk is its own, and killing its first process is what a
power cut is to a machine. The network is one, so servers of different nodes must not want the same ports.
Needs root, and Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from tests.pipeline import eventually, free_ports

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NAMESPACES = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
CONTROLLER = "controller"
CPUS = 4  # that each node claims to have

CONFIG = """\
ClusterName=tests
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again may start once its old credential has expired: in seconds here, not in two minutes.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
MinJobAge=3600
KillWait=5
OverTimeLimit=0
SlurmctldTimeout=30
SlurmdTimeout=10
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def reason_not_to() -> str | None:
    """Why no Slurm can be had here; None if it can. Installs it where it is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "an emulated Slurm needs Linux and root"
    probe = subprocess.run([*NAMESPACES, "hostname", "probe"], check=False, capture_output=True)
    if probe.returncode:
        return "this machine allows no namespaces"
    if all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged"))):
        return None
    if not shutil.which("apt-get"):
        return f"Slurm is not installed, and there is no apt-get to install {' '.join(PACKAGES)}"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in ("update -qq", f"install -y -qq --no-install-recommends {' '.join(PACKAGES)}"):
        done = subprocess.run(["apt-get", *command.split()], check=False, capture_output=True, env=environment)
    return f"apt-get cannot install {' '.join(PACKAGES)}" if done.returncode else None


class Cluster:
    """The controller and its nodes n1, n2, ...

    Args:
        folder: for configuration, state and logs.
        gpus: of each node, as far as Slurm counts them; there are none.
    """

    def __init__(self, folder: Path, gpus: tuple[int, ...] = (2, 1, 1)) -> None:
        self.folder = folder
        self.gpus = {f"n{number}": count for number, count in enumerate(gpus, start=1)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        port = free_ports(1 + len(gpus))
        for name in ("munge", "state", "etc"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port + number} CPUs={CPUS} "
            f"CoresPerSocket={CPUS} Sockets=1 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{count} State=UNKNOWN"
            for number, (name, count) in enumerate(self.gpus.items(), start=1)
        )
        for number in range(max(gpus)):
            # Slurm wants device files; /dev/null is one.
            os.mknod(folder / "etc" / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
        devices = ((name, f"{folder}/etc/nvidia[0-{count - 1}]") for name, count in self.gpus.items())
        gres = "".join(f"NodeName={name} Name=gpu File={files}\n" for name, files in devices)
        (folder / "etc" / "gres.conf").write_text(gres)
        names = ",".join(self.gpus)
        text = CONFIG.format(controller=CONTROLLER, port=port, folder=folder, nodes=nodes, names=names)
        self.config = folder / "etc" / "slurm.conf"
        self.config.write_text(text)
        self.environment = {"SLURM_CONF": str(self.config)}

    def start(self) -> Cluster:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self.folder / "munge").chmod(0o711)
        paths = [f"--{name}={self.folder}/munge/{name}" for name in ("key-file", "socket", "pid-file", "log-file")]
        paths[0] = f"--key-file={key}"
        self._start("munged", ["munged", "--foreground", "--force", f"--seed-file={self.folder}/munge/seed", *paths])
        eventually((self.folder / "munge" / "socket").exists, "munged's socket")
        self._start(CONTROLLER, self._node_command(CONTROLLER, "slurmctld -D"))
        for node in self.gpus:
            self.power_on(node)
        eventually(lambda: set(self.states().values()) == {"idle"}, f"all nodes idle: see {self.folder}")
        return self

    def stop(self) -> None:
        """End everything; a node's processes go with its first one."""
        for name in [*self.gpus, CONTROLLER, "munged"]:
            if name in self._daemons:
                self.power_off(name)

    def power_on(self, node: str) -> None:
        self._start(node, self._node_command(node, f"slurmd -D -N {node}"))

    def power_off(self, node: str) -> None:
        """A power cut: everything on the node is gone at once, and nobody is told."""
        daemon = self._daemons.pop(node)
        for child in _children(daemon.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        daemon.kill()
        daemon.wait()

    def _node_command(self, name: str, command: str) -> list[str]:
        # /etc/slurm is the cluster's own for the node's processes, which may have lost SLURM_CONF.
        own = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount --bind {self.folder}/etc /etc/slurm"
        return [*NAMESPACES, "sh", "-c", f"{own}; exec {command}"]

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as sink:
            self._daemons[name] = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    # As an administrator, or a user, would

    def ask(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        answer = subprocess.run(
            command, check=False, capture_output=True, text=True, env=os.environ | self.environment, timeout=60
        )
        return answer.stdout

    def states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines)

    def jobs(self) -> dict[str, tuple[str, str]]:
        """(state, node) of each job that waits or runs, by id."""
        lines = self.ask("squeue", "--noheader", "--format=%i|%t|%N").splitlines()
        return {job: (state, node) for job, state, node in (line.split("|") for line in lines)}

    def running(self) -> dict[str, str]:
        """Node of each job that runs, by id."""
        return {job: node for job, (state, node) in self.jobs().items() if state == "R"}

    def await_running(self, count: int) -> dict[str, str]:
        return eventually(lambda: len(self.running()) >= count and self.running(), f"{count} jobs running", 120)

    def cancel_all(self) -> None:
        self.ask("scancel", "--user=root")
        eventually(lambda: not self.jobs(), "no jobs left", 120)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


if __name__ == "__main__":  # python -m tests.slurm.cluster FOLDER: a cluster to try things on, until Ctrl-C
    cluster = Cluster(Path(sys.argv[1]).absolute()).start()
    print(f"export SLURM_CONF={cluster.config}", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        cluster.stop()
