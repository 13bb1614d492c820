"""The run's configuration: signed by the run key or by its publisher, found by its hash, offered by whoever has it."""

import hashlib
import json
import logging
from collections import Counter

from swarmkit.peers.engine import DHTNode, get_dht_time
from swarmkit.peers.errors import JoinFailed, PeerUnreachable, ProtocolError
from swarmkit.peers.identity import is_signed
from swarmkit.peers.invitation import RunKey
from swarmkit.peers.records import seal, unseal
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.wire import Message, field

logger = logging.getLogger(__name__)
PURPOSE = "configuration"
LIFETIME_S = 3600.0
MAX_BYTES = 256 << 10
CALL_TIMEOUT_S = 10.0


def config_key(run: str) -> str:
    """Where an open run's configuration lies on the DHT."""
    return f"{run}.config"


def hash_of(text: str) -> str:
    """What heartbeats and hellos say of a configuration."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class RunConfig:
    """The configuration as this peer has it, and how it gets it.

    In a closed run the run key has signed it, and only the invited get it, by call. In an open run it lies on the DHT,
    signed by its publisher; of several the one counts that most replicas say they run by, on a tie that of the first.
    """

    def __init__(self, dht: DHTNode, rpc: Rpc, roster: Roster, run: str, run_key: RunKey | None) -> None:
        self._dht = dht
        self._rpc = rpc
        self._access = rpc.access
        self._roster = roster
        self._run = run
        self._run_key = run_key
        self._text: str | None = None
        self._signature = b""  # of the run key
        rpc.handle("config", self._on_config, onlookers=True)

    def publish(self, text: str) -> None:
        """Have this text; raises ValueError for what no peer would take."""
        if len(text.encode()) > MAX_BYTES:
            raise ValueError(f"configuration of {len(text)} characters: the limit is {MAX_BYTES} bytes")
        json.loads(text)
        if self._access.is_closed:
            if self._run_key is None:
                raise ValueError("only the owner of the run key publishes the configuration of a closed run")
            self._signature = self._run_key.sign(PURPOSE, self._run, text)
        self._text = text
        self._roster.say(config=hash_of(text))

    async def store(self) -> None:
        """Renew the configuration on the DHT, where it is for everybody."""
        if self._text is None or self._access.is_closed:
            return
        identity = self._access.identity
        record = seal(identity, PURPOSE, self._run, self._text.encode())
        await self._dht.store(config_key(self._run), record, get_dht_time() + LIFETIME_S, subkey=identity.peer_id)

    async def fetch(self) -> str:
        """Get the configuration and offer it to others from now on; raises JoinFailed when nobody offers one."""
        await self._roster.refresh()
        wanted = self._wanted()
        text = None if self._access.is_closed else await self._from_dht(wanted)
        text = text or await self._from_peers(wanted)
        if text is None:
            raise JoinFailed(f"nobody offers a configuration for run {self._run!r}: is the name right and the run up?")
        self._text = text
        self._roster.say(config=hash_of(text))
        return text

    def _wanted(self) -> str:
        """The hash of the configuration that counts; empty when nobody says one."""
        said = [r.config for r in self._roster.table() if r.config and r.peer_id != self._access.identity.peer_id]
        counts = Counter(said)
        return max(counts, key=lambda config: counts[config], default="")

    async def _from_dht(self, wanted: str) -> str | None:
        found = await self._dht.get(config_key(self._run), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        for subkey, entry in entries.items():
            try:
                body, _ = unseal(subkey if isinstance(subkey, str) else "", PURPOSE, self._run, entry.value)
                text = body.decode()
            except (ProtocolError, UnicodeDecodeError):
                continue
            if wanted and hash_of(text) == wanted and len(body) <= MAX_BYTES:
                return text
        return None

    async def _from_peers(self, wanted: str) -> str | None:
        for record in self._roster.table():
            if record.peer_id == self._access.identity.peer_id or not record.config:
                continue
            try:
                answer = await self._rpc.call(record.peer_id, "config", {}, timeout=CALL_TIMEOUT_S)
                text = field(answer, "config", str, lambda text: len(text.encode()) <= MAX_BYTES)
                if self._access.is_closed:
                    signature = field(answer, "signature", bytes)
                    if is_signed(self._access.run_key, signature, PURPOSE, self._run, text):
                        self._signature = signature
                        return text
                    logger.warning("%s offers a configuration that the run key has not signed", record.peer_id[-8:])
                elif hash_of(text) == wanted:
                    return text
            except (PeerUnreachable, ProtocolError) as error:
                logger.info("no configuration from %s: %s", record.peer_id[-8:], error)
        return None

    async def _on_config(self, caller: str, message: Message) -> Message:
        if self._text is None:
            raise ProtocolError("this peer has no configuration to offer")
        return {"config": self._text, "signature": self._signature}
