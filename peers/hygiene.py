"""Keeps hivemind's helper processes, sockets and shared memory from outliving the process that owns them."""

import asyncio
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "swarmkit-"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere a no-op)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# Sets the signal in the child itself, then becomes the program. Not preexec_fn: that runs fork hooks in the child, and
# gRPC's crash there once its threads exist.
_EXEC = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
# Put before a command whose program is named by its path, it has the command die with its parent.
DYING_WITH_PARENT = (sys.executable, "-I", "-S", "-c", _EXEC) if _LIBC is not None else ()


@contextmanager
def children_die_with_us() -> Iterator[list[asyncio.subprocess.Process]]:
    """Give every asyncio subprocess started meanwhile a parent-death signal: P2P.create has no hook for it.

    Yields the list of these processes: P2P.create forgets its own when it fails.
    """
    children: list[asyncio.subprocess.Process] = []
    original = asyncio.subprocess.create_subprocess_exec

    async def create(program: str, *args: str, **options: object) -> asyncio.subprocess.Process:
        child = await original(*DYING_WITH_PARENT, program, *args, **options)  # type: ignore[arg-type]
        children.append(child)
        return child

    asyncio.subprocess.create_subprocess_exec = create  # type: ignore[assignment]
    try:
        yield children
    finally:
        asyncio.subprocess.create_subprocess_exec = original


def make_socket_folder(root: Path | None = None) -> Path:
    """Make a folder for unix sockets and remove those that dead processes left.

    The path is short because a unix socket's name may have no more than 107 bytes.
    """
    root = root or Path(tempfile.gettempdir())
    if len(str(root)) > 50:
        root = Path("/tmp")
    for folder in root.glob(f"{PREFIX}[0-9]*-*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
