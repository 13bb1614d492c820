"""The preemption hook: asks, off the hot path, whether this machine is about to be taken away."""

import shlex
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmkit.checks import positive
from swarmkit.errors import ConfigError

ASK_TIMEOUT_S = 10.0
POLL_S = 0.02
MAX_ANSWER_BYTES = 4096
# Google's metadata server answers 200 in either case, and says it in words.
NOT_YET = frozenset({"", "false", "none", "0"})


@dataclass(kw_only=True, slots=True)
class PreemptionConfig:
    """How a peer learns that its machine is about to be taken; it then leaves as after SIGTERM. One is enough."""

    command: str | None = None  # run without a shell; any exit code but 0 says that the machine goes
    url: str | None = None  # asked with GET: 404 and the words FALSE and NONE say no, any other content says yes
    header: str | None = None  # sent with it, as "Metadata-Flavor: Google"
    file: str | None = None  # the machine goes once this file exists
    every_s: float = 5.0  # between two questions

    def __post_init__(self) -> None:
        positive("preemption", self, "every_s")
        if self.command is not None:
            try:
                words = shlex.split(self.command)
            except ValueError as error:
                raise ValueError(f"preemption.command={self.command!r}: {error}") from error
            if not words:
                raise ValueError("preemption.command: is empty")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"preemption.url={self.url!r}: must begin with http:// or https://")
        if self.header is not None and ":" not in self.header:
            raise ValueError(f"preemption.header={self.header!r}: must look like 'Metadata-Flavor: Google'")
        if self.header is not None and any(c in self.header for c in "\r\n"):
            raise ValueError("preemption.header: must be one line")

    @property
    def is_set(self) -> bool:
        """True when there is anything to ask."""
        return any(value is not None for value in (self.command, self.url, self.file))

    def check(self) -> None:
        """Raise ConfigError for a command that cannot be run here: its failure would look like a preemption."""
        if self.command is not None and shutil.which(shlex.split(self.command)[0]) is None:
            raise ConfigError(f"preemption.command={self.command!r}: there is no such program on this machine")


class Unanswered(Exception):
    """A question that could not be asked, which says nothing about the machine."""


def ask(config: PreemptionConfig, give_up: threading.Event) -> str:
    """Ask once; why this machine is about to be taken, or empty. Raises Unanswered, also once `give_up` is set."""
    if config.file is not None and Path(config.file).exists():
        return f"preemption: {config.file} is there"
    if config.command is not None and (reason := _ask_command(config.command, give_up)):
        return reason
    return _ask_url(config.url, config.header) if config.url is not None else ""


def _ask_command(command: str, give_up: threading.Event) -> str:
    try:
        process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise Unanswered(f"{command!r} could not be run: {error.strerror}") from error
    with process:
        deadline = time.monotonic() + ASK_TIMEOUT_S
        while (code := process.poll()) is None:
            if time.monotonic() > deadline or give_up.wait(POLL_S):
                process.kill()
                raise Unanswered(f"{command!r} did not end within {ASK_TIMEOUT_S:.0f} s")
    if code < 0:
        raise Unanswered(f"{command!r} was ended by signal {-code}")
    return f"preemption: {command!r} returned {code}" if code else ""


def _ask_url(url: str, header: str | None) -> str:
    request = urllib.request.Request(url)
    if header is not None:
        name, _, value = header.partition(":")
        request.add_header(name.strip(), value.strip())
    # Such addresses are the machine's own: no proxy of the environment stands between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ASK_TIMEOUT_S) as answer:
            text = answer.read(MAX_ANSWER_BYTES).decode(errors="replace").strip()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return ""
            raise Unanswered(f"{url} answered {error.code}") from error
    except (OSError, ValueError) as error:
        raise Unanswered(f"{url} cannot be asked: {error}") from error
    if text.lower() in NOT_YET:
        return ""
    line = "".join(c for c in text[:100] if c.isprintable())
    return f"preemption: {url} says {line}"


class PreemptionWatch:
    """A thread that asks until the machine goes; it holds nobody up, and ends with the process."""

    def __init__(self, config: PreemptionConfig, leave: Callable[[str], object], say: Callable[[str], object]) -> None:
        """Ask at once and then every `every_s`; `leave` is called once, with the reason."""
        self._config = config
        self._leave = leave
        self._say = say
        self._stop = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="swarmkit-preemption", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                reason, trouble = ask(self._config, self._stop), ""
            except Unanswered as error:
                reason, trouble = "", str(error)
            if reason:
                self._leave(reason)
                return
            if trouble and trouble != self._said and not self._stop.is_set():
                self._say(f"whether this machine is about to be taken is not known: {trouble}")
            self._said = trouble
            self._stop.wait(self._config.every_s)

    def close(self) -> None:
        """Ask no more, and leave no command running."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)  # an address that does not answer is not waited for
