"""Makes hosts of network namespaces, each with its own sshd, and runs a command beside them. This script needs root, ip and sshd.

    python scripts/ssh_hosts.py --hosts 2 --slots 4 -- zerojax launch --hostfile {hostfile} --ssh_options {ssh_options} -- COMMAND

{hostfile} and {ssh_options} are replaced. The hosts are 10.77.N.1, 10.77.N.2, ... on a bridge of this machine, with host names of their
own. They share its files. `Hosts.cut` takes a host off the network.
tests/scripts/test_ssh_hosts.py and scripts/soak_launch.py use this too.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

NEEDS = ("ip", "unshare", "ssh", "ssh-keygen", "sshd")


class Hosts:
    """Running hosts.

    Attributes:
      names: their addresses.
      hostfile: the path of a hostfile that lists them.
      ssh_options: the arguments with which ssh reaches them.
      launch_words: the arguments of `zerojax launch` that name them.
    """

    def __init__(self, count: int, slots: int, folder: pathlib.Path):
        tag = os.getpid() % 250  # so that two programs of one machine have hosts of their own
        self._net, self._bridge = f"10.77.{tag}", f"zj{tag}bridge"
        self.names = [f"{self._net}.{index + 1}" for index in range(count)]
        self._links = [f"zj{tag}link{index}" for index in range(count)]
        self._spaces = [f"zj{tag}host{index}" for index in range(count)]
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("".join(f"{name} slots={slots}\n" for name in self.names))
        key = folder / "key"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
        self.ssh_options = (
            f"-F none -i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )
        self.launch_words = ["--hostfile", str(self.hostfile), "--ssh_options", self.ssh_options]
        self._folder, self._sshd = folder, []

    def start(self) -> None:
        """Makes the network and starts an sshd on each host."""
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        known = "127.0.0.1 localhost\n" + "".join(f"{name} {space}\n" for name, space in zip(self.names, self._spaces))
        for index, (name, link) in enumerate(zip(self.names, self._links)):
            space = self._spaces[index]
            etc = pathlib.Path(
                "/etc/netns", space
            )  # which `ip netns exec` mounts over /etc: CPU collectives need the host's name
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(known)
            run("ip", "netns", "add", space)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", link, "master", self._bridge, "up")
            for words in (
                ["addr", "add", f"{name}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                run("ip", "-n", space, *words)
            host_key = self._folder / f"host_key{index}"
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key))
            options = {
                "HostKey": host_key,
                "AuthorizedKeysFile": self._folder / "authorized_keys",
                "PidFile": "none",
                "UsePAM": "no",
                "StrictModes": "no",
                "PermitRootLogin": "yes",
                "ListenAddress": name,
                "MaxStartups": "100",
            }
            words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
            script = f'hostname {space}; exec "$@"'
            command = [
                "unshare",
                "-u",
                "sh",
                "-c",
                script,
                "sh",
                str(shutil.which("sshd") or "/usr/sbin/sshd"),
                "-D",
                "-e",
                "-f",
                "/dev/null",
            ]
            self._sshd.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *command, *words],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        for name in self.names:
            wait_for_port(name)

    def cut(self, index: int) -> None:
        """Takes a host off the network: its packets are lost, and no connection is closed."""
        run("ip", "link", "set", self._links[index], "down")

    def mend(self, index: int) -> None:
        """Brings a host back."""
        run("ip", "link", "set", self._links[index], "up")

    def mend_all(self) -> None:
        """Brings all hosts back."""
        for index in range(len(self.names)):
            self.mend(index)

    def stop(self) -> None:
        """Removes everything."""
        for sshd in self._sshd:
            sshd.kill()
            sshd.wait()
        for index, link in enumerate(self._links):
            subprocess.run(["ip", "link", "del", link], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", self._spaces[index]], stderr=subprocess.DEVNULL)
            shutil.rmtree(f"/etc/netns/{self._spaces[index]}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], stderr=subprocess.DEVNULL)


def why_not() -> str:
    """Returns why this machine cannot make hosts, or ""."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "needs Linux and root"
    missing = [name for name in NEEDS if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]
    if missing:
        return f"needs {', '.join(missing)}"
    done = subprocess.run(["unshare", "-n", "-u", "ip", "link", "add", "zjtry", "type", "bridge"], capture_output=True)
    return "" if done.returncode == 0 else "may not make namespaces and bridges"


@contextlib.contextmanager
def hosts(count: int, slots: int) -> Iterator[Hosts]:
    """Opens hosts for the block."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ssh-hosts-"))
    made = Hosts(count, slots, folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def wait_for_port(name: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((name, 22), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if why := why_not():
        sys.exit(f"ssh_hosts: this machine {why}")
    with hosts(given.hosts, given.slots) as made:
        values = {"{hostfile}": str(made.hostfile), "{ssh_options}": made.ssh_options}
        return subprocess.run(
            [values.get(word, word) for word in given.command if word != "--" or given.command.index(word)]
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
