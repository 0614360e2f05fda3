"""Real ssh to fake hosts with private keys: a daemon on each host, and a client on a machine outside them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from namespaces import FakeHosts
from waits import wait_until

TOOLS = ("sshd", "ssh", "ssh-keygen")
# Seconds until a cut connection is detected.
LOST_SECONDS = 12

DAEMON = """
HostKey {root}/host_key
AuthorizedKeysFile {root}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
CLIENT = """
Host *
BatchMode yes
IdentityFile {root}/user_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
ConnectTimeout 5
ServerAliveInterval {interval}
ServerAliveCountMax 3
"""


def installed() -> bool:
    return all(shutil.which(tool, path="/usr/bin:/usr/sbin") for tool in TOOLS)


class Ssh:
    """`program` is an ssh that knows the hosts by name. The daemons end with their hosts."""

    def __init__(self, root: Path, hosts: FakeHosts) -> None:
        self._root, self._hosts = root, hosts
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / name], check=True)
        (root / "daemon").write_text(DAEMON.format(root=root))
        places = [f"Host {name}\nHostName {hosts.address(name)}\n" for name in hosts.names]
        client = CLIENT.format(root=root, interval=LOST_SECONDS // 3)
        (root / "client").write_text("".join(places) + client)
        # The launcher recognises ssh by this name.
        self.program = root / "ssh"
        self.program.write_text(
            f'#!/usr/bin/env bash\nexec nsenter --net={hosts.outside} /usr/bin/ssh -F {root}/client "$@"\n'
        )
        self.program.chmod(0o755)
        # The daemon requires this folder to exist and be empty.
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in hosts.names:
            self.serve(name)

    def serve(self, name: str) -> None:
        """Starts the ssh daemon of a host that is up."""
        daemon = ["/usr/sbin/sshd", "-f", self._root / "daemon", "-o", f"ListenAddress={self._hosts.address(name)}"]
        subprocess.run([self._hosts.shell, name, *daemon], check=True)
        answers = [self.program, name, "true"]
        wait_until(
            lambda: not subprocess.run(answers, capture_output=True, check=False).returncode,
            lambda: f"{name} does not answer by ssh",
        )
