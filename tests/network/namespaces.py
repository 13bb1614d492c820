"""Linux network namespaces joined by a bridge, each behind a link of limited rate: a small internet on one machine."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_PREFIX = "swkit"


def why_not() -> str | None:
    """What is missing here for namespaces, or None."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs {tool} (package iproute2)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "may not make network namespaces"


@dataclass(frozen=True)
class Counters:
    """Bytes that crossed a namespace's link; one set of headers for up to 64 KB, because veth carries them uncut."""

    sent: int
    received: int


class Namespaces:
    """`count` hosts, 10.77.0.1 and up, each with `rate_mbit` in either direction and `delay_ms` on what it sends.

    Everything lives in namespaces of this process (the switch too): nothing is added to the host's own network, and
    `close` removes all. TCP's congestion control is cubic or, where a namespace may not have that, reno. Use
    `namespaces`, which closes in every case but kill -9; the next one removes the leftovers of that.
    """

    def __init__(self, count: int, rate_mbit: float, delay_ms: float = 0.0, congestion: str | None = None) -> None:
        self.count = count
        self.addresses = [f"10.77.0.{index + 1}" for index in range(count)]
        self.congestion = congestion or usual_congestion_control()
        self._names = [f"{_PREFIX}{os.getpid()}-{index}" for index in range(count)]
        self._switch = f"{_PREFIX}{os.getpid()}-switch"
        self._processes: list[subprocess.Popen[str]] = []
        _remove_leftovers()
        try:
            self._build(rate_mbit, delay_ms)
        except BaseException:
            self.close()
            raise

    def _build(self, rate_mbit: float, delay_ms: float) -> None:
        _ip("netns", "add", self._switch)
        for bridge in ("bridge", "other"):
            _ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._switch, "link", "set", bridge, "up")
        for index, name in enumerate(self._names):
            port = f"port{index}"
            _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.addresses[index]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={self.congestion}")
            _ip("-n", name, "link", "set", "eth0", "up")
            # The sender's side limits what it sends, the switch's what it receives.
            _limit(name, "eth0", rate_mbit, delay_ms)
            _limit(self._switch, port, rate_mbit, 0.0)

    def popen(self, index: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process in a namespace; `close` ends it with all its children."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[index], *command], text=True, start_new_session=True, **options
        )
        self._processes.append(process)
        return process

    @property
    def names(self) -> list[str]:
        """Of the namespaces, one for each host."""
        return list(self._names)

    def cut(self, index: int) -> None:
        """Pull a host's plug: nothing goes in or out, and no connection is told."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "nomaster")

    def part(self, *indices: int) -> None:
        """Leave these hosts among themselves, and the others too: neither side is told."""
        for index in indices:
            _ip("-n", self._switch, "link", "set", f"port{index}", "master", "other")

    def mend(self, index: int) -> None:
        """Undo `cut` or `part`."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "master", "bridge")

    def counters(self, index: int) -> Counters:
        """What crossed a namespace's link so far."""
        [link] = json.loads(_ip("-n", self._names[index], "-s", "-j", "link", "show", "eth0"))
        return Counters(sent=link["stats64"]["tx"]["bytes"], received=link["stats64"]["rx"]["bytes"])

    def drop_incoming(self, index: int, *, except_from: int) -> None:
        """Drop what comes in over TCP without a word, unless from this port: a firewall that lets answers through.

        Routing rules do it, as not every kernel has packet filters.
        """
        rules = [
            ("100", "lookup", "local"),
            ("5", "iif", "eth0", "ipproto", "tcp", "sport", str(except_from), "lookup", "local"),
            ("10", "iif", "eth0", "ipproto", "tcp", "blackhole"),
        ]
        for rule in rules if except_from else [rules[0], rules[2]]:
            _ip("-n", self._names[index], "rule", "add", "pref", *rule)
        _ip("-n", self._names[index], "rule", "del", "pref", "0")

    def drop_nothing(self, index: int) -> None:
        """Undo `drop_incoming`."""
        _ip("-n", self._names[index], "rule", "add", "pref", "0", "lookup", "local")
        for pref in ("5", "10", "100"):
            _ip("-n", self._names[index], "rule", "del", "pref", pref)

    def kill(self) -> None:
        """Kill every process in the namespaces."""
        for name in self._names:
            for pid in _pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(10)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._processes.clear()

    def close(self) -> None:
        """Kill what runs in the namespaces and remove them."""
        self.kill()
        for name in [*self._names, self._switch]:
            _remove(name)


@contextlib.contextmanager
def namespaces(
    count: int, rate_mbit: float, delay_ms: float = 0.0, congestion: str | None = None
) -> Iterator[Namespaces]:
    """Make namespaces and remove them in any case, SIGTERM included (use it in the main thread)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        made = Namespaces(count, rate_mbit, delay_ms, congestion)
        try:
            yield made
        finally:
            # A second signal must not cut the removal short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            made.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def usual_congestion_control() -> str:
    """Linux's default, cubic, unless this kernel keeps it from namespaces; reno is the same at short round trips."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else "reno"


def _limit(name: str, link: str, rate_mbit: float, delay_ms: float) -> None:
    """Limit what a link sends with a token bucket."""
    # Ten milliseconds' worth, but no less than a segment that TCP hands over whole (64 KB).
    burst = max(66_000, int(rate_mbit * 1e6 / 8 * 0.01))
    # The queue holds 100 ms: TCP with several streams keeps the link full, and nothing waits for long.
    limit = burst + int(rate_mbit * 1e6 / 8 * (0.1 + delay_ms / 1e3))
    rate = f"{rate_mbit}mbit"
    _tc(name, link, "root", "handle", "1:", "tbf", "rate", rate, "burst", str(burst), "limit", str(limit))
    if delay_ms:
        _tc(name, link, "parent", "1:1", "handle", "2:", "netem", "delay", f"{delay_ms}ms", "limit", "10000")


def _tc(name: str, link: str, *arguments: str) -> None:
    _run("tc", "-n", name, "qdisc", "add", "dev", link, *arguments)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _pids(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def _remove(name: str) -> None:
    deadline = time.monotonic() + 5
    while _pids(name) and time.monotonic() < deadline:
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Remove namespaces of ours whose owner was killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*-*"):
        found = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            for pid in _pids(path.name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _remove(path.name)
