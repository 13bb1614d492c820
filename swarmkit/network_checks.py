"""What `swarmkit doctor` looks at in the network: the way into a run, the clock, the link, who can dial it."""

import ipaddress
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from swarmkit import __version__
from swarmkit.config import Config
from swarmkit.errors import DaemonFailed, SwarmError
from swarmkit.findings import Finding, fail, ok, skip, warn
from swarmkit.network_config import host_port, listen_for
from swarmkit.peers.daemon_checks import check_port
from swarmkit.peers.examination import Examination, Rate, examine
from swarmkit.peers.node import Node

Report = Callable[[Finding], None]
MEASURED = ("clock", "link", "port", "mode")
SLOW_BYTES_PER_S, LONG_RTT_S = 125_000, 0.3
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 3.0  # hivemind's DHT calls more than 3 s a wrong clock
OPEN_IT = "open TCP port {port} in this machine's firewall and forward it on the router"


def check_network(
    config: Config, addresses: Sequence[str], name: str | None, report: Report, *, sockets: str, until: float
) -> SwarmError | None:
    """Report every finding as it comes, until monotonic time `until`; returns why the run could not be entered."""
    listen = listen_for(addresses, config.network.listen)
    host, port = host_port("network.listen", listen)
    settings = replace(config.network.settings(sockets), identity=None, startup_timeout_s=8.0, host=host, port=port)
    try:
        check_port(host, port, "network.listen")
    except DaemonFailed as error:
        # That may be a peer that runs: then it is the one that is to be reached.
        report(warn("listen", str(error), "a peer that is up on this machine explains it"))
        settings = replace(settings, port=0)
    try:
        run = name if name or addresses else "doctor"
        existing = bool(addresses)
        node = Node.start(run, initial_peers=addresses, settings=settings, role="observer", existing=existing)
    except SwarmError as error:
        report(fail("join", str(error), f"exit codes: docs/joining.md ({type(error).__name__})"))
        for what in MEASURED:
            report(skip(what, "needs a peer that answers"))
        return error
    try:
        _look(node, config, addresses, report, port, until)
    finally:
        node.close()
    return None


def _look(node: Node, config: Config, addresses: Sequence[str], report: Report, port: int, until: float) -> None:
    if not addresses:
        report(announced(node.addresses, config.network.announce, []))
        for what in MEASURED:
            report(skip(what, "needs a peer", "give the address of one: swarmkit doctor ADDRESS"))
        return
    report(entered(node))
    own = port or int(re.findall(r"/tcp/(\d+)", node.addresses[0])[-1])
    told = [int(found) for address in config.network.announce for found in re.findall(r"/tcp/(\d+)", address)[:1]]
    ports = list(dict.fromkeys([*told, own]))
    found = examine(node, ports, timeout=max(1.0, until - time.monotonic()))
    seen_at = [host for outcomes in found.dials.values() for host in outcomes]
    report(announced(node.addresses, config.network.announce, list(dict.fromkeys(seen_at))))
    if not found.peer_id:
        for what in MEASURED:
            report(skip(what, f"no peer helped: {'; '.join(found.problems.values())}"))
        return
    report(clock(found))
    report(link(found))
    for finding in reachability(found, ports[0]):
        report(finding)


def entered(node: Node) -> Finding:
    """Which run is there, and whether versions agree."""
    peers = node.table()
    told = f"run {node.run!r}, {len(peers)} peers, through {', '.join(node.entry.live)}"
    others = sorted({record.version for record in peers if record.version} - {__version__})
    if others:
        return warn(
            "join", f"{told}; they have swarmkit {', '.join(others)[:80]}", f"this is {__version__}: align them"
        )
    if node.entry.notes:
        return warn("join", told, "; ".join(node.entry.notes))
    return ok("join", told)


def clock(found: Examination) -> Finding:
    """This machine's clock against the peer's."""
    if found.skew_s is None or found.rtt_s is None:
        return skip("clock", found.problems.get("time", "not measured"))
    off = f"{abs(found.skew_s):.2f} s {'ahead of' if found.skew_s > 0 else 'behind'} the peer's"
    told = f"{off} (to {found.rtt_s / 2:.3f} s)"
    certain = abs(found.skew_s) - found.rtt_s / 2
    if certain > SKEW_FAIL_S:
        return fail("clock", told, "set it by NTP, here or there: records on the DHT carry times")
    if certain > SKEW_WARN_S:
        return warn("clock", told, "set it by NTP, here or there")
    return ok("clock", told)


def link(found: Examination) -> Finding:
    """Round trip and rates with the peer."""
    if found.rtt_s is None or found.upload is None or found.download is None:
        return skip("link", found.problems.get("rate", found.problems.get("time", "not measured")))
    told = f"{_rate(found.upload)} up, {_rate(found.download)} down, {1e3 * found.rtt_s:.1f} ms round trip"
    if min(found.upload.bytes_per_s, found.download.bytes_per_s) < SLOW_BYTES_PER_S:
        return warn("link", told, "synchronise rarely (strategy.sync.h) and compress (compression=int4, topk)")
    if found.rtt_s > LONG_RTT_S:
        return warn("link", told, "meet rarely: strategy.sync.h=100 or more; network=wan has longer timeouts")
    return ok("link", told)


def _rate(rate: Rate) -> str:
    return f"{'over ' if rate.at_least else ''}{rate.bytes_per_s * 8 / 1e6:.1f} Mbit/s"


def announced(addresses: Sequence[str], wanted: Sequence[str], seen_at: Sequence[str]) -> Finding:
    """Which address others are told, and why; `seen_at` are those at which a peer sees this machine."""
    first = addresses[0]
    kind = kind_of(first)
    why = "network.announce says so" if wanted else f"the best that this machine has: {kind}"
    told = f"{first.partition('/p2p/')[0]}, {why}"
    port = re.findall(r"/tcp/(\d+)", first)[-1]
    elsewhere = [host for host in seen_at if not ipaddress.ip_address(host).is_loopback]
    hosts = {address.split("/")[2] for address in addresses}
    names = any(address.startswith("/dns") for address in addresses)
    if wanted and elsewhere and not names and not hosts & set(elsewhere):
        return warn("announce", f"{told}, but a peer sees this machine at {elsewhere[0]}", "correct network.announce")
    public = [host for host in elsewhere if host not in hosts and ipaddress.ip_address(host).is_global]
    if kind in ("LAN", "loopback") and public:
        family = "ip6" if ":" in public[0] else "ip4"
        told = f"{told}; a peer sees this machine at {public[0]}, behind a router"
        setting = f"network.announce=[/{family}/{public[0]}/tcp/{port}]"
        return warn("announce", told, f"{OPEN_IT.format(port=port)}, and set {setting}")
    if kind == "loopback":
        return ok("announce", told, "others on this machine only; network=lan or network=wan lets other machines in")
    if kind == "LAN":
        return ok("announce", told, "others on this network only; network.announce names an address for the rest")
    return ok("announce", told)


def kind_of(address: str) -> str:
    """What sort of address it is: loopback, LAN, public, a name or a relay."""
    if "/p2p-circuit" in address:
        return "relay"
    host = address.split("/")[2]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return "name"
    return "loopback" if found.is_loopback else "public" if found.is_global else "LAN"


def reachability(found: Examination, port: int) -> list[Finding]:
    """Whether the peer could dial back, and what follows for the way in which this machine takes part."""
    if "dial" in found.problems or not found.dials.get(port):
        why = found.problems.get("dial", "the peer sees this machine only through a relay")
        return [skip("port", why), skip("mode", "whether others reach this machine is not known")]
    outcomes = found.dials[port]
    reached = [host for host, outcome in outcomes.items() if outcome == "open"]
    if reached:
        near = ipaddress.ip_address(reached[0]).is_loopback
        where = " (on this machine: that says nothing of others)" if near else ""
        return [
            ok("port", f"a peer reached TCP port {port} at {reached[0]}{where}"),
            ok("mode", "full peer: others can join through this one, no relay is needed"),
        ]
    host, outcome = next(iter(outcomes.items()))
    said = {
        "closed": "was refused: the router does not forward it, or the port is another one",
        "silent": "got no answer: a firewall or router drops it",
        "other": "found something there that does not speak libp2p",
    }.get(outcome, outcome)
    return [
        warn("port", f"a peer dialled {host} port {port} and {said}", OPEN_IT.format(port=port)),
        warn(
            "mode",
            "dial-out only: this machine joins through peers that can be reached, and nobody joins through it",
            "two such peers need a third that both reach, or a relay: network.relay=true",
        ),
    ]
