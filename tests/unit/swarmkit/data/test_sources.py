"""Choosing a source, and settings that cannot work."""

import pytest

from swarmkit.data.config import DataConfig, SyntheticConfig, SyntheticKind
from swarmkit.data.sources import load_corpus


def test_the_configuration_chooses_the_source() -> None:
    assert load_corpus(SyntheticConfig(samples=4), context=8).spec.shape == (8,)
    images = SyntheticConfig(kind=SyntheticKind.images, samples=10, side=6)
    assert load_corpus(images, context=8).spec.shape == (1, 6, 6)


def test_an_unknown_source_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data\.name='wiki': no such source"):
        load_corpus(DataConfig(name="wiki"), context=8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alpha": 0.0}, r"data\.alpha=0\.0: must be positive"),
        ({"alpha": float("nan")}, r"data\.alpha=nan: must be positive"),
        ({"validation": 0.0}, r"data\.validation=0\.0: must be positive"),
        ({"validation": 0.95}, r"data\.validation=0\.95: must be at least 0\.0 and below 0\.9"),
        ({"max_bytes": -1}, r"data\.max_bytes=-1: must be at least 0"),
    ],
)
def test_a_setting_that_cannot_work_names_its_key(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig(**settings)
