"""`swarmkit eval` and `swarmkit generate`: what a checkpoint is worth."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from swarmkit import checkpoint
from swarmkit.compose import check_overrides
from swarmkit.config import Config, SampleConfig, config_from_json, with_own_settings
from swarmkit.data.corpus import Corpus, DataSpec
from swarmkit.data.sources import load_corpus
from swarmkit.errors import CheckpointError
from swarmkit.evaluation import continue_text, evaluate
from swarmkit.models.build import build_model, context_of
from swarmkit.training_state import model_tensors


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the newest whole one below a folder of checkpoints, of a peer, or of a run."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if (path / checkpoint.MANIFEST).is_file():
        return path
    folders = sorted({found.parent.parent for found in path.rglob(checkpoint.MANIFEST)})
    # In a run's folder the baseline is not the run.
    folders = [folder for folder in folders if "baseline" not in folder.parts] or folders
    if not folders:
        raise CheckpointError(f"{path}: there is no checkpoint in it")
    newest, reasons = [], []
    for folder in folders:
        try:
            newest.append(checkpoint.latest(folder))
        except CheckpointError as error:
            reasons.append(str(error))
    if not newest:
        raise CheckpointError("; ".join(reasons))
    return max(newest, key=lambda found: found.name)


def _load(path: str) -> tuple[Config, dict[str, torch.Tensor], DataSpec, Path]:
    found = find_checkpoint(Path(path).expanduser())
    tensors, meta = checkpoint.load(found)
    try:
        spec = meta["spec"]
        made_for = DataSpec(kind=spec["kind"], classes=int(spec["classes"]), shape=tuple(spec["shape"]))
        config, state = config_from_json(meta["config"]), model_tensors((tensors, meta))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{found} does not say which model and data it is of: {error!r}") from error
    return config, state, made_for, found


def _model(config: Config, tensors: dict[str, torch.Tensor], spec: DataSpec, path: Path) -> nn.Module:
    model = build_model(config.model, spec, seed=0)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its own configuration: {error}") from error
    return model


def evaluate_checkpoint(path: str, overrides: Sequence[str]) -> None:
    """Print a checkpoint's loss on the held-out data of its run; raises CheckpointError, DataError."""
    config, tensors, spec, found = _load(path)
    check_overrides(overrides)
    config = with_own_settings(config, overrides, ("eval", "batch_size"))
    corpus: Corpus = load_corpus(config.data, context=context_of(config.model))
    score = evaluate(
        _model(config, tensors, spec, found),
        corpus.validation(config.batch_size, config.eval.batches),
        torch.device("cpu"),
    )
    unit = "byte" if spec.kind == "tokens" and spec.classes == 256 else "prediction"
    console = Console()
    console.print(f"{found}", soft_wrap=True)
    console.print(f"loss {score.loss:.4f} nats, {score.bpb:.4f} bits per {unit}, accuracy {score.accuracy:.1%}")
    console.print(f"on {score.targets:,} held-out predictions")


def generate_text(path: str, *, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """Continue a prompt; raises CheckpointError when the model is not one of bytes."""
    config, state, spec, found = _load(path)
    if spec.kind != "tokens" or spec.classes != 256:
        raise CheckpointError(
            f"{found} holds a model of {spec.kind} in {spec.classes} classes, not one that writes bytes"
        )
    if not prompt:
        raise CheckpointError("--prompt is empty: the model needs at least one byte to continue")
    settings = SampleConfig(prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k)
    return continue_text(_model(config, state, spec, found), settings, seed=seed, device=torch.device("cpu"))
