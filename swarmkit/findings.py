"""What `swarmkit doctor` finds: one line for each check, with a verdict and what to do."""

from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check came out."""

    ok = "ok"
    warn = "warn"  # training works, but not as well as it could, or not for everybody
    fail = "fail"  # training will not work
    skip = "skip"  # could not be looked at


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        """As a terminal shows it; what strangers said stays harmless there."""
        said = f"{self.text}; {self.advice}" if self.advice else self.text
        return f"{self.verdict:4}  {self.name:9}  " + "".join(c if c.isprintable() else "?" for c in said)

    def as_json(self) -> dict[str, str]:
        """As `--json` prints it."""
        return {key: str(value) for key, value in asdict(self).items()}


def ok(name: str, text: str, advice: str = "") -> Finding:
    """All is well; advice then is for other wishes."""
    return Finding(name, Verdict.ok, text, advice)


def warn(name: str, text: str, advice: str) -> Finding:
    """Something should be mended."""
    return Finding(name, Verdict.warn, text, advice)


def fail(name: str, text: str, advice: str) -> Finding:
    """Something must be mended."""
    return Finding(name, Verdict.fail, text, advice)


def skip(name: str, text: str, advice: str = "") -> Finding:
    """Nothing is known."""
    return Finding(name, Verdict.skip, text, advice)
