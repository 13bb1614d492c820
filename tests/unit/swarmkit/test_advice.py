"""Configurations that work but disappoint get a note, others none."""

from swarmkit.advice import notes
from swarmkit.compose import load_config


def test_diloco_with_few_rounds_is_told_what_to_do() -> None:
    [note] = notes(load_config(["strategy=diloco", "steps=320", "strategy.sync.h=32"]))
    assert "10 rounds" in note
    assert "strategy=local_sgd" in note


def test_what_is_fine_gets_no_note() -> None:
    assert not list(notes(load_config([])))
    assert not list(notes(load_config(["strategy=diloco", "steps=4000", "strategy.sync.h=32"])))
