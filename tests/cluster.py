"""Hosts for tests: network, mount, process and host name namespaces on one machine, joined by a bridge.

``python cluster.py up FOLDER NODES -- COMMAND`` runs COMMAND on a node ``head``, from which ``node1`` to ``nodeN`` are
reached as by ssh (``python cluster.py agent HOST COMMAND``). A node sees its own processes, temporary folder and shared
memory only, as a machine does; ``power_off`` ends one at once. Everything lives inside one process namespace: when its
first process has ended, for whatever reason, the kernel ends all others and removes networks and mounts.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PORT = 7022
NETWORK = "10.79.0"
WAIT_S = 20.0
_END = b"\0end "


@functools.cache
def why_not() -> str | None:
    """Why there can be no such hosts here; None when there can."""
    if os.geteuid() != 0:
        return "namespaces as hosts need root"
    for tool in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"namespaces as hosts need `{tool}`"
    tried = subprocess.run(
        [*_unshare(), "sh", "-c", "ip link add b0 type bridge && ip link add v0 type veth peer name v1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return None if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


def on_a_cluster(folder: Path, num_nodes: int, command: Sequence[str]) -> list[str]:
    """Command that runs ``command`` on the head of a cluster; it ends with its exit code."""
    words = [sys.executable, __file__, "up", str(folder), str(num_nodes), "--", *command]
    return [*_unshare(), *words]


def agent() -> str:
    """What mpirun is to use in place of ssh: a value for ``--mca plm_rsh_agent``."""
    return f"{sys.executable} {__file__} agent"


def power_off() -> None:
    """Ends the node that this process is on, and with it this process."""
    with socket.create_connection(("127.0.0.1", PORT), 5) as node:
        node.sendall(b'{"off": true}\n')
        node.recv(1)
    time.sleep(60)


def _unshare() -> list[str]:
    return ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=30)


def _wait_for(what: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.01)


def up(folder: Path, num_nodes: int, command: Sequence[str]) -> int:
    """The first process of all: makes the network and the nodes, and waits for the head."""
    names = ["head", *(f"node{number}" for number in range(1, num_nodes + 1))]
    (folder / "local").mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{n + 1} {name}\n" for n, name in enumerate(names))
    )
    _run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "link", "set", "bridge", "up")
    environment = {**os.environ, "TMPDIR": str(folder / "local")}
    nodes = {}
    for number, name in enumerate(names):
        words = ["head", str(folder), str(num_nodes), *command] if name == "head" else ["node", str(folder), name]
        node = subprocess.Popen([*_unshare(), sys.executable, __file__, *words], env=environment)
        nodes[name] = node
        ours = os.readlink("/proc/self/ns/net")
        _wait_for(lambda pid=node.pid, ours=ours: os.readlink(f"/proc/{pid}/ns/net") != ours, f"network of {name}")  # type: ignore[misc]
        inside = ("nsenter", "-t", str(node.pid), "-n", "ip")
        _run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
        _run("ip", "link", "set", f"to-{name}", "master", "bridge", "up")
        _run(*inside, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", "eth0", "up")
    return nodes["head"].wait()


def _settle(folder: Path, name: str) -> None:
    """What makes a node differ from the others: its name, its temporary folder, its shared memory."""
    socket.sethostname(name)
    _run("mount", "-t", "tmpfs", "tmpfs", str(folder / "local"))
    _run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")


def head(folder: Path, num_nodes: int, command: Sequence[str]) -> int:
    """First process of the head: runs the command when all nodes can be reached."""
    _settle(folder, "head")

    def is_reached(name: str) -> bool:
        try:
            socket.create_connection((name, PORT), 1).close()
        except OSError:
            return False
        return True

    for number in range(1, num_nodes + 1):
        _wait_for(lambda name=f"node{number}": is_reached(name), f"node{number}")  # type: ignore[misc]
    return subprocess.run(list(command), check=False).returncode


def node(folder: Path, name: str) -> None:
    """First process of a node: runs the commands that agents bring. When it ends, the kernel ends the node."""
    _settle(folder, name)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = socket.create_server(("0.0.0.0", PORT))
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as file:
        line = file.readline()
        if not line:
            return
        request = json.loads(line)
        if request.get("off"):
            os._exit(0)
        code = subprocess.run(
            ["sh", "-c", request["command"]],
            stdin=subprocess.DEVNULL,
            stdout=connection.fileno(),
            stderr=connection.fileno(),
            start_new_session=True,
            check=False,
        ).returncode
        connection.sendall(_END + str(code).encode())


def run_on(host: str, command: str) -> int:
    """The agent: what ``ssh HOST COMMAND`` does."""
    try:
        connection = socket.create_connection((host, PORT), 10)
    except OSError as error:
        print(f"agent: {host} cannot be reached: {error}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    connection.sendall(json.dumps({"command": command}).encode() + b"\n")
    data = b""
    while chunk := connection.recv(1 << 16):
        data += chunk
        if _END not in data:
            os.write(2, data)
            data = b""
    output, found, code = data.rpartition(_END)
    os.write(2, output)
    return int(code) if found else 255


def main(words: list[str]) -> int:
    what, *rest = words
    if what == "up":
        return up(Path(rest[0]), int(rest[1]), rest[3:])
    if what == "head":
        return head(Path(rest[0]), int(rest[1]), rest[2:])
    if what == "node":
        node(Path(rest[0]), rest[1])
    return run_on(rest[0], " ".join(rest[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
