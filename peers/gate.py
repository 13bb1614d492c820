"""The DHT of a closed run: every request shows the sender's credential and is signed, and others get no answer."""

from typing import Any

from swarmkit.peers.access import Access
from swarmkit.peers.clock import swarm_time
from swarmkit.peers.engine import AuthorizerBase
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.identity import is_signed, public_key

MAX_AGE_S = 60.0


class Gate(AuthorizerBase):
    """hivemind's authorizer for Access: its own needs a server that hands out tokens."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def sign_request(self, request: Any, service_public_key: object) -> None:  # noqa: ANN401 - protobuf
        """Put the credential and a signature into a request."""
        identity, auth = self._access.identity, request.auth
        auth.client_access_token.username = identity.peer_id
        auth.client_access_token.public_key = self._access.credential
        auth.time = swarm_time()
        auth.signature = b""
        auth.signature = identity.sign("dht request", _bytes_of(request))

    async def validate_request(self, request: Any) -> bool:  # noqa: ANN401 - protobuf
        """Whether a request may be answered."""
        auth = request.auth
        peer_id, signature = auth.client_access_token.username, bytes(auth.signature)
        try:
            if not abs(swarm_time() - auth.time) <= MAX_AGE_S:
                return False
            self._access.check(peer_id, bytes(auth.client_access_token.public_key))
            auth.signature = b""
            return is_signed(public_key(peer_id), signature, "dht request", _bytes_of(request))
        except ProtocolError:
            return False

    async def sign_response(self, response: Any, request: Any) -> None:  # noqa: ANN401 - protobuf
        """Show the credential to whoever asked."""
        response.auth.service_access_token.username = self._access.identity.peer_id
        response.auth.service_access_token.public_key = self._access.credential

    async def validate_response(self, response: Any, request: Any) -> bool:  # noqa: ANN401 - protobuf
        """Whether an answer may be used; its records are signed by others, so a false one can only hide them."""
        token = response.auth.service_access_token
        try:
            self._access.check(token.username, bytes(token.public_key))
        except ProtocolError:
            return False
        return True


def _bytes_of(request: Any) -> bytes:  # noqa: ANN401 - protobuf
    data: bytes = request.SerializeToString(deterministic=True)
    return data
