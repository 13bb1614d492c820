"""`swarmkit doctor`: what would keep this machine from training with others, in under twenty seconds."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence

from swarmkit.config import Config
from swarmkit.exits import Exit, exit_code
from swarmkit.findings import Finding, Verdict, fail
from swarmkit.machine_checks import check_device, check_disk, check_p2pd, check_versions
from swarmkit.peers.hygiene import make_socket_folder

# Torch and hivemind are imported by the checks, in their threads: on a busy machine that takes long, and counts.
TOTAL_S = 18.0
MACHINE = {"versions": check_versions, "disk": check_disk, "p2pd": check_p2pd, "device": check_device}


class Doctor:
    """Runs all checks at once, each in a thread that nobody waits for beyond the end of the time."""

    def __init__(self, say: Callable[[Finding], None], *, total_s: float = TOTAL_S) -> None:
        self.findings: list[Finding] = []
        self.code: int | None = None  # of what kept this machine out of the run
        self._say = say
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._until = self._started + total_s
        self._running: dict[str, threading.Thread] = {}

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def report(self, finding: Finding) -> None:
        """Take a finding, from any thread; what comes after the end is dropped."""
        with self._lock:
            if self.seconds < self._until - self._started:
                self.findings.append(finding)
                self._say(finding)

    def run(self, name: str, check: Callable[[], Sequence[Finding]]) -> None:
        """Start a check."""

        def work() -> None:
            try:
                for finding in check():
                    self.report(finding)
            except Exception as error:  # noqa: BLE001 - a thread's outermost: the other checks go on
                self.report(fail(name, f"the check itself failed ({type(error).__name__}: {error})", "report this"))

        self._running[name] = threading.Thread(target=work, name=f"doctor-{name}", daemon=True)
        self._running[name].start()

    def wait(self) -> None:
        """Wait for all checks, at most until the time is up; who is not done by then has failed."""
        for thread in self._running.values():
            thread.join(max(0.0, self._until - 0.5 - time.monotonic()))
        for name, thread in self._running.items():
            if thread.is_alive() and name not in {finding.name for finding in self.findings}:
                told = f"no result within {self.seconds:.0f} s"
                self.report(fail(name, told, "is the machine very busy, or a disk or network share stuck?"))

    @property
    def is_stuck(self) -> bool:
        """True while a check still runs."""
        return any(thread.is_alive() for thread in self._running.values())

    @property
    def exit_code(self) -> int:
        """0 when nothing failed, the cause's own code when the run could not be entered, 1 otherwise."""
        if self.code is not None:
            return self.code
        return Exit.error if any(finding.verdict is Verdict.fail for finding in self.findings) else Exit.ok


def examine_machine(
    config: Config,
    addresses: Sequence[str],
    *,
    name: str | None = None,
    as_json: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Check this machine and, given addresses of a run, its place in the network; returns the exit code.

    A check that is stuck keeps neither the answer nor the process.
    """
    doctor = Doctor((lambda finding: None) if as_json else lambda finding: say(finding.line))
    sockets = make_socket_folder()

    def network() -> Sequence[Finding]:
        from swarmkit.network_checks import check_network

        until = doctor._started + TOTAL_S - 1.5
        error = check_network(config, addresses, name, doctor.report, sockets=str(sockets), until=until)
        if error is not None:
            doctor.code = exit_code(error)
        return []

    try:
        for what, check in MACHINE.items():
            doctor.run(what, lambda check=check: check(config))  # type: ignore[misc]
        doctor.run("network", network)
        doctor.wait()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    if as_json:
        checks = [finding.as_json() for finding in doctor.findings]
        say(json.dumps({"exit_code": doctor.exit_code, "seconds": round(doctor.seconds, 2), "checks": checks}))
    else:
        count = {verdict: sum(one.verdict is verdict for one in doctor.findings) for verdict in Verdict}
        say(", ".join(f"{number} {verdict}" for verdict, number in count.items()) + f" in {doctor.seconds:.1f} s")
    if doctor.is_stuck:
        # Leaving in order would wait for the locks that its thread holds. p2pd dies with this process.
        sys.stdout.flush()
        os._exit(doctor.exit_code)
    return doctor.exit_code
