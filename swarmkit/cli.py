"""The `swarmkit` command."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from swarmkit import __version__
from swarmkit.errors import AddressError
from swarmkit.exits import EXPECTED, exit_code

if TYPE_CHECKING:
    from swarmkit.config import Config

app = typer.Typer(
    name="swarmkit",
    help="Train one PyTorch model with many badly connected, unreliable machines.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong setting, checkpoint or data, 3 no run to join, 4 too few peers, "
    "5 diverged, 130 Ctrl-C. Why a run cannot be joined: 10 not an address, 11 closed port, 12 no answer, 13 unknown "
    "name, 14 wrong peer id, 15 not a peer, 16 other version, 17 unknown run, 18 not invited, 19 p2pd cannot start.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Hydra overrides, as strategy=local_sgd strategy.sync.h=64; `swarmkit config` shows every key.",
        metavar="[KEY=VALUE]...",
        show_default=False,
    ),
]
Invite = Annotated[
    str | None,
    typer.Option(
        "--invite", help="Invitation to a closed run, or a file that holds it; the latter does not show in `ps`."
    ),
]
Address = Annotated[
    str,
    typer.Argument(
        help="Address of any peer of the run, as `start` printed it; several with commas: one that answers is enough."
    ),
]
Target = Annotated[
    str,
    typer.Argument(help="A run's folder, a peer's folder, host:port of a control plane, or an address of the run."),
]
Peer = Annotated[
    str | None, typer.Option(help="Which peer: its number in the run's folder, or the end of its id.", metavar="PEER")
]
RunName = Annotated[str | None, typer.Option(help="Name of the run, when the address knows several.")]
Ca = Annotated[str | None, typer.Option(help="PEM file: who signed the peer's certificate, for control.cert.")]
Cert = Annotated[str | None, typer.Option(help="PEM file: your certificate, for control.client_ca.")]
Key = Annotated[str | None, typer.Option(help="PEM file: your private key.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarmkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one PyTorch model with many badly connected, unreliable machines."""


@app.command()
def local(overrides: Overrides = None) -> None:
    """Train with several peers on this machine, supervised, and write a report.

    Examples:

        swarmkit local

        swarmkit local peers=2 strategy=local_sgd strategy.sync.h=64 steps=1000

        swarmkit local model=resnet data=digits launch.baseline=false
    """
    from swarmkit.compose import load_config

    config = load_config(overrides or [])
    _advise(config)
    from swarmkit.launch import run_local

    raise typer.Exit(run_local(config))


@app.command()
def start(overrides: Overrides = None) -> None:
    """Start a run: be its first peer, and print the line with which others join.

    Examples:

        swarmkit start network=wan

        swarmkit start name=kjv data=text data.paths=[kjv.txt.xz] network.listen=0.0.0.0:31337
    """
    from swarmkit.compose import load_config

    config = load_config(overrides or [])
    _advise(config)
    from swarmkit import peer

    raise typer.Exit(peer.start(config))


@app.command()
def join(
    address: Address,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run, when the address knows several.")] = None,
    invite: Invite = None,
) -> None:
    """Join a run: fetch its configuration and its state from the peers, then train with them.

    Examples:

        swarmkit join /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo...

        swarmkit join /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo... device=cuda network.listen=0.0.0.0:0

        swarmkit join /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo... /ip4/198.51.100.7/tcp/31337/p2p/12D3Koo...
    """
    more = [one for one in overrides or [] if one.startswith("/")]
    addresses = _addresses(address, *more)
    from swarmkit import peer

    settings = [override for override in overrides or [] if override not in more]
    raise typer.Exit(peer.join(addresses, settings, name=name, invitation=invite))


@app.command("invite")
def invite_guest(
    guest: Annotated[str, typer.Argument(help="Name of whoever is invited, by which it can be revoked.")],
    overrides: Overrides = None,
    role: Annotated[str, typer.Option(help="replica, bootstrap (keeps the DHT up) or observer (status).")] = "replica",
    days: Annotated[float, typer.Option(min=0.0, help="How long it is good for.")] = 30.0,
    peer: Annotated[str | None, typer.Option(help="The only peer id that may use it.")] = None,
    to: Annotated[str | None, typer.Option(help="File to write it to, instead of printing it.")] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Revoke the guest's invitations up to now.")] = False,
    at: Annotated[str | None, typer.Option(help="With --revoke: a peer of the run, to tell everybody now.")] = None,
) -> None:
    """Invite somebody to a closed run, with the run key that `start network.closed=true` made.

    Examples:

        swarmkit invite alice name=mine

        swarmkit invite alice --days 7 --to alice.invite name=mine network.run_key=mine.run-key

        swarmkit invite --revoke alice name=mine
    """
    from swarmkit.invite import invite, revoke_guest

    if revoke:
        revoke_guest(guest, overrides or [], addresses=_addresses(at) if at else [])
    else:
        invite(guest, overrides or [], role=role, days=days, peer_id=peer, file=to)


@app.command()
def bootstrap(overrides: Overrides = None, invite: Invite = None) -> None:
    """Keep a run's DHT up without training: an address that stays when trainers come and go.

    Example:

        swarmkit bootstrap name=kjv network=wan network.identity=bootstrap.key
    """
    from swarmkit.compose import load_config

    config = load_config(overrides or [])
    from swarmkit import peer

    raise typer.Exit(peer.bootstrap(config, invitation=invite))


@app.command()
def status(
    target: Target,
    name: RunName = None,
    peer: Peer = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object with a list of peers.")] = False,
    invite: Invite = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Show the peers of a run: from their heartbeats, or as a peer of this machine sees them.

    Examples:

        swarmkit status /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo...

        swarmkit status runs/demo/20260101-120000 --json
    """
    from swarmkit.targets import choose, find_targets, is_address

    if is_address(target):
        from swarmkit.status import show_status

        show_status(_addresses(target), name=name, as_json=json, invitation=invite)
        return
    from swarmkit.control_commands import client_tls, show_peer

    targets = find_targets(target)
    show_peer(targets[0] if peer is None else choose(targets, peer), client_tls(ca, cert, key), as_json=json)


@app.command()
def drain(
    target: Target,
    peer: Peer = None,
    reason: Annotated[str, typer.Option(help="For the peer's log and events.")] = "asked by swarmkit drain",
    wait: Annotated[bool, typer.Option(help="Wait until the peer has left.")] = True,
    name: RunName = None,
    invite: Invite = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Have a peer leave in order: its contribution handed in, a checkpoint written, the others told.

    It takes network.drain_timeout_s at most. Exit code 0: it left in order; 1: it did not.

    Examples:

        swarmkit drain runs/demo/20260101-120000 --peer 2

        swarmkit drain gpu7.example.org:31400 --ca ca.pem --cert me.pem --key me.key
    """
    from swarmkit.control_commands import client_tls, drain_peer
    from swarmkit.targets import choose, find_targets

    chosen = choose(find_targets(target, run=name, invitation=invite), peer)
    raise typer.Exit(drain_peer(chosen, client_tls(ca, cert, key), reason=reason, wait=wait))


@app.command()
def checkpoint(
    target: Target,
    peer: Peer = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for it.")] = 60.0,
    name: RunName = None,
    invite: Invite = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Have a peer write a checkpoint after the step that runs, and print where.

    Example:

        swarmkit checkpoint runs/demo/20260101-120000/peer-0
    """
    from swarmkit.control_commands import checkpoint_peer, client_tls
    from swarmkit.targets import choose, find_targets

    chosen = choose(find_targets(target, run=name, invitation=invite), peer)
    raise typer.Exit(checkpoint_peer(chosen, client_tls(ca, cert, key), timeout_s=timeout))


@app.command()
def watch(
    target: Target,
    peer: Peer = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each message.")] = False,
    name: RunName = None,
    invite: Invite = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Print what happens at a peer, a line for each round, until it ends.

    Examples:

        swarmkit watch runs/demo/20260101-120000 --peer 0

        swarmkit watch 127.0.0.1:31400 --json
    """
    from swarmkit.control_commands import client_tls, watch_peer
    from swarmkit.targets import choose, find_targets

    chosen = choose(find_targets(target, run=name, invitation=invite), peer)
    raise typer.Exit(watch_peer(chosen, client_tls(ca, cert, key), as_json=json))


@app.command()
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Addresses of peers of a run, and Hydra overrides with which this machine would join.",
            metavar="[ADDRESS]... [KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run, when the address knows several.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object with a list of checks.")] = False,
) -> None:
    """Check this machine, and with a peer's help its link, clock and reachability; under 20 seconds.

    Examples:

        swarmkit doctor network=wan

        swarmkit doctor /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo... network=wan
    """
    from swarmkit.compose import load_config

    addresses = _addresses(*[one for one in arguments or [] if one.startswith("/")])
    config = load_config([one for one in arguments or [] if not one.startswith("/")])
    from swarmkit.doctor import examine_machine

    raise typer.Exit(examine_machine(config, addresses, name=name, as_json=json, say=typer.echo))


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, a peer's checkpoints folder, or a run's folder.")],
    overrides: Overrides = None,
) -> None:
    """Measure a checkpoint's loss on held-out data.

    Examples:

        swarmkit eval runs/demo/20260101-120000

        swarmkit eval runs/demo/20260101-120000 eval.batches=200
    """
    from swarmkit.inspect import evaluate_checkpoint

    evaluate_checkpoint(checkpoint, overrides or [])


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, a peer's checkpoints folder, or a run's folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Choose among the k likeliest tokens.")] = 40,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="The same seed writes the same text.")] = 0,
) -> None:
    """Let a checkpoint continue a text.

    Example:

        swarmkit generate runs/demo/20260101-120000 --prompt "import "
    """
    from swarmkit.inspect import generate_text

    typer.echo(generate_text(checkpoint, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed))


@app.command()
def config(
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the configuration that these overrides compose, checked.

    Example:

        swarmkit config strategy=local_sgd strategy.sync.rule=qsr strategy.sync.alpha=0.01
    """
    from swarmkit.compose import load_config
    from swarmkit.config import config_to_json, config_to_yaml

    composed = load_config(overrides or [])
    typer.echo(config_to_json(composed) if json else config_to_yaml(composed), nl=json)


def _advise(config: "Config") -> None:
    from swarmkit.advice import notes

    for note in notes(config):
        typer.echo(f"note: {note}", err=True)


def _addresses(*addresses: str) -> list[str]:
    """Check addresses, several of which may stand in one argument separated by commas."""
    from swarmkit.peers.preflight import check_address

    split = [part.strip() for address in addresses for part in address.split(",")]
    for address in split:
        try:
            check_address(address)
        except ValueError as error:
            raise AddressError(str(error)) from error
    return split


def main() -> None:
    """Run the command; expected errors are one line on stderr and an exit code, see `swarmkit --help`."""
    # Read when torch loads; spinning threads of peers that share cores starve each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except EXPECTED as error:
        for line in str(error).splitlines():
            typer.echo(f"swarmkit: {line}", err=True)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
