"""The folder of a run: <out>/<name>/<time>, of its own even for two that begin in the same second."""

import tempfile
import time
from pathlib import Path

from swarmkit.config import Config, config_to_yaml


def make_run_folder(config: Config) -> Path:
    """Make it, with the configuration in it; raises OSError when `out` cannot be written."""
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
