"""The folder of a run: <out>/<name>/<time>, of its own even for two that begin in the same second."""

import tempfile
import time
from pathlib import Path

from swarmkit.config import Config, config_to_yaml
from swarmkit.errors import ConfigError


def make_run_folder(config: Config) -> Path:
    """Make it, with the configuration in it; raises ConfigError when `out` cannot be written."""
    try:
        return _make(config)
    except OSError as error:
        raise ConfigError(f"out={config.out}: no folder for results can be made ({error})") from error


def _make(config: Config) -> Path:
    parent = Path(config.out, config.name)
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        folder = parent / stamp
        folder.mkdir()
    except FileExistsError:
        folder = Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=parent))
    (folder / "config.yaml").write_text(config_to_yaml(config))
    return folder
