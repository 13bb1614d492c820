"""What children of a nursery do in its tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmkit.processes import Children, Link


def echo(end: socket.socket, arguments: Mapping[str, Any]) -> int:
    """Say who it is, and return the code that it was given."""
    print("printed by the child", flush=True)
    link = Link(end)
    link.send({"pid": os.getpid(), "session": os.getsid(0), "given": dict(arguments)}, patience=5)
    return int(arguments["code"])


def fail(end: socket.socket, arguments: Mapping[str, Any]) -> int:
    """End in an error."""
    raise RuntimeError("told to fail")


def with_helper(end: socket.socket, arguments: Mapping[str, Any]) -> int:
    """Start a helper, as a peer starts p2pd, and wait for a signal; SIGTERM ends it with code 7."""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    Link(end).send({"pid": os.getpid(), "helper": helper.pid}, patience=5)
    while True:
        time.sleep(60)


def deaf(end: socket.socket, arguments: Mapping[str, Any]) -> int:
    """Never end by itself."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Link(end).send({"pid": os.getpid()}, patience=5)
    while True:
        time.sleep(60)


def supervisor(folder: str) -> None:
    """A supervisor that can be killed: starts a child, tells its pids and waits."""
    children = Children([], cleanup=[Path(folder, "sockets")])
    Path(folder, "sockets").mkdir()
    child = children.spawn("child", f"{__name__}:with_helper", {}, log=Path(folder, "log.txt"))
    while not (messages := child.link.receive()):
        time.sleep(0.01)
    print(json.dumps(messages[0]), flush=True)
    time.sleep(600)
