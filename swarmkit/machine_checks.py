"""What `swarmkit doctor` looks at on this machine: versions, disk, p2pd, device."""

import importlib.metadata as metadata
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from swarmkit.config import Config
from swarmkit.errors import ConfigError
from swarmkit.findings import Finding, fail, ok, warn

PRODUCT = "swarmkit-torch"
SHOWN = ("torch", "hivemind", "protobuf", "numpy", "grpcio")
LOW_BYTES, SCARCE_BYTES = 2 << 30, 200 << 20
P2PD_S = 5.0


def check_versions(config: Config) -> list[Finding]:
    """The versions of what matters most, and every requirement of swarmkit's and below that is not met."""
    shown = [f"python {platform.python_version()}", *(f"{name} {_version(name) or 'missing'}" for name in SHOWN)]
    conflicts = sorted(set(find_conflicts(PRODUCT)))
    if not conflicts:
        return [ok("versions", ", ".join(shown))]
    told = f"{', '.join(shown)}; {'; '.join(conflicts[:5])}"
    return [warn("versions", told, "install them anew: pip install -c constraints.txt -e .")]


def find_conflicts(name: str) -> Iterator[str]:
    """Requirements of a distribution, and of what it requires, that are missing or of another version."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        owner = waiting.pop()
        if owner.lower() in seen:
            continue
        seen.add(owner.lower())
        try:
            required = metadata.requires(owner) or []
        except metadata.PackageNotFoundError:
            continue
        for text in required:
            requirement = _needed(text)
            if requirement is None:
                continue
            found = _version(requirement.name)
            if found is None:
                yield f"{owner} needs {requirement.name}, which is missing"
            elif not requirement.specifier.contains(found, prereleases=True):
                yield f"{owner} needs {requirement.name}{requirement.specifier}, there is {found}"
            else:
                waiting.append(requirement.name)


def _needed(text: str) -> Requirement | None:
    """A requirement that counts here, extras left out."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    return requirement


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_disk(config: Config) -> list[Finding]:
    """Whether results can be written, and room for checkpoints."""
    folder = Path(config.out).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            file.write(bytes(1 << 16))
            file.flush()
        free = shutil.disk_usage(there).free
    except OSError as error:
        return [
            fail("disk", f"{there} cannot be written ({error.strerror or error})", "set out=FOLDER to one that can")
        ]
    told = f"{free / 1e9:.1f} GB free in {there}"
    if free < SCARCE_BYTES:
        return [fail("disk", told, "make room, or set out=FOLDER to another disk: checkpoints would not fit")]
    if free < LOW_BYTES:
        return [warn("disk", told, "a few checkpoints fill that: make room, or lower checkpoint.keep")]
    return [ok("disk", told)]


def check_p2pd(config: Config) -> list[Finding]:
    """Whether libp2p's daemon runs on this machine at all."""
    from swarmkit.peers.daemon_checks import check_binary
    from swarmkit.peers.engine import P2PD_PATH
    from swarmkit.peers.errors import DaemonFailed

    again = "install hivemind anew for this platform: pip install --force-reinstall hivemind"
    try:
        check_binary(P2PD_PATH)
        done = subprocess.run([P2PD_PATH, "-help"], capture_output=True, timeout=P2PD_S, check=False)
    except DaemonFailed as error:
        return [fail("p2pd", str(error), again)]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [fail("p2pd", f"{P2PD_PATH} does not run ({error})", again)]
    if b"announceAddrs" not in done.stdout + done.stderr:
        return [fail("p2pd", f"{P2PD_PATH} ended with code {done.returncode}, not as p2pd does", again)]
    return [ok("p2pd", f"{P2PD_PATH} runs")]


def check_device(config: Config) -> list[Finding]:
    """The device that training would use."""
    import torch

    from swarmkit.build import pick_device

    try:
        device = pick_device(config.device)
    except ConfigError as error:
        return [fail("device", str(error), "choose one that torch sees, or device=cpu")]
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return [ok("device", f"{device}: {torch.cuda.get_device_name(device)}, {memory / 1e9:.0f} GB")]
    if torch.version.cuda is not None:
        advice = "if this machine has a GPU: does nvidia-smi work, and does its driver fit torch's CUDA?"
        return [ok("device", f"{device}, though torch is built for CUDA {torch.version.cuda}", advice)]
    return [ok("device", f"{device}, {torch.get_num_threads()} threads; this torch is built for the CPU only")]
