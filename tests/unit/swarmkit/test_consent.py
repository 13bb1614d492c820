"""A run cannot make a joiner read files that its user did not name."""

import pytest

from swarmkit.compose import load_config
from swarmkit.config import config_from_json, config_to_json
from swarmkit.consent import split_paths, with_paths
from swarmkit.data.config import TextConfig
from swarmkit.errors import ConfigError


def test_files_of_a_run_need_a_yes() -> None:
    run = config_from_json(config_to_json(load_config(["data=text", "data.paths=[/home/me/private]"])))
    with pytest.raises(ConfigError, match=r"^data.paths=\[/home/me/private\]: .* join ADDRESS 'data.paths="):
        with_paths(run, [])
    assert with_paths(run, ["data.paths=[/home/me/private]"]) == run


def test_a_joiner_names_its_own_files() -> None:
    run = load_config(["data=text", "data.paths=[/home/me/private]"])
    own = with_paths(run, ["data.paths=[/srv/a.txt,/srv/b.txt]"])
    assert isinstance(own.data, TextConfig)
    assert own.data.paths == ["/srv/a.txt", "/srv/b.txt"]


def test_a_model_folder_needs_a_yes_too() -> None:
    with pytest.raises(ConfigError, match=r"model.folder=\.\./weights"):
        with_paths(load_config(["model=hf", "model.folder=../weights"]), [])


@pytest.mark.parametrize("overrides", [[], ["model=resnet", "data=fashion_mnist"], ["model=hf"]])
def test_a_run_without_files_of_its_own_needs_nothing(overrides: list[str]) -> None:
    run = load_config(overrides)
    assert with_paths(run, []) == run


def test_control_characters_of_strangers_do_not_reach_the_terminal() -> None:
    run = load_config(["data=text", "data.paths=['a']"])
    assert isinstance(run.data, TextConfig)
    run.data.paths = ["\x1b[2J\n" + "x" * 5000]
    with pytest.raises(ConfigError) as caught:
        with_paths(run, [])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_files_for_a_run_that_reads_none_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="paths"):
        with_paths(load_config(), ["data.paths=[x]"])


def test_overrides_are_sorted_apart() -> None:
    overrides = ["device=cpu", "data.paths=[a]", "threads=2"]
    assert split_paths(overrides) == (["data.paths=[a]"], ["device=cpu", "threads=2"])
