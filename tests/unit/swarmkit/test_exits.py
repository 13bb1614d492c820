"""Every cause has an exit code of its own, and the documentation has them all."""

from pathlib import Path

import pytest

from swarmkit import errors
from swarmkit.errors import AddressError, ConfigError, JoinFailed, RoundFailed
from swarmkit.exits import CODES, Exit, exit_code

ROOT = Path(__file__).parents[3]
CAUSES = JoinFailed.__subclasses__()


def test_every_cause_of_a_failed_join_has_a_code_of_its_own() -> None:
    assert len(CAUSES) == 9
    codes = [exit_code(cause("why")) for cause in [*CAUSES, AddressError, JoinFailed, ConfigError]]
    assert len(set(codes)) == len(codes)
    assert {cause.__name__ for cause in CAUSES} <= set(errors.__all__)


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_no_code_is_hidden_by_that_of_a_wider_kind(kind: type[Exception]) -> None:
    assert exit_code(kind("why")) is CODES[kind]


def test_what_has_no_code_is_an_ordinary_failure() -> None:
    assert exit_code(KeyError("x")) is Exit.error
    assert exit_code(RoundFailed("x")) is Exit.not_joined


def test_the_table_has_every_cause_with_its_code() -> None:
    text = (ROOT / "docs" / "joining.md").read_text(encoding="utf-8")
    for cause in [*CAUSES, AddressError, JoinFailed]:
        assert f"| {int(exit_code(cause('why')))} | `{cause.__name__}` |" in text
