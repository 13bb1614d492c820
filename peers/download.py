"""Download: which pieces of a state are here, in memory, whoever they came from; it outlives the donors."""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.manifest import DTYPES, Manifest, Snapshot, hash_of


@dataclass(frozen=True, slots=True)
class Adopted:
    """What changing over to another donor's manifest came to."""

    kept: int  # bytes that need not be fetched again
    lost: int  # bytes that were here and do not belong to it


class Download:
    """A state in the making: the manifest that it follows and the pieces that are here, each of them checked."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.received = 0  # bytes of pieces, those that had to be fetched again included
        self._hashes: list[bytes] = []  # of each piece: the manifest's, or of another donor's own state that is here
        self._data = torch.empty(0, dtype=torch.uint8)
        self._held: set[int] = set()
        self._bytes_held = 0

    @property
    def size(self) -> int:
        """Payload bytes of the state; 0 before there is a manifest."""
        return self.manifest.size if self.manifest is not None else 0

    @property
    def done(self) -> int:
        """Payload bytes that are here."""
        return self._bytes_held

    @property
    def is_complete(self) -> bool:
        """True once every piece is here."""
        return self.manifest is not None and len(self._held) == len(self.manifest.pieces)

    def missing(self) -> list[int]:
        """Numbers of the pieces that are not here, in order."""
        return [number for number in range(len(self._hashes)) if number not in self._held]

    def serves(self, manifest: Manifest, number: int) -> bool:
        """True when a donor of that manifest has the piece that is wanted here."""
        assert self.manifest is not None
        return (
            number < len(manifest.pieces)
            and manifest.hashes[number] == self._hashes[number]
            and manifest.pieces[number] == self.manifest.pieces[number]
        )

    def adopt(self, manifest: Manifest) -> Adopted:
        """Follow this manifest from here on, and keep what fits it.

        A piece with the same place and hash is the same piece. Of the donors' own state, which differs between them, a
        section that is whole stays as well, if the shared tensors are the same: any donor's will do.
        """
        old = self.manifest
        kept = {
            number
            for number in self._held
            if old is not None
            and number < len(manifest.pieces)
            and manifest.pieces[number] == old.pieces[number]
            and manifest.hashes[number] == self._hashes[number]
        }
        hashes = list(manifest.hashes)
        if old is not None and old.shared_digest == manifest.shared_digest and old.entries == manifest.entries:
            for section in manifest.sections:
                numbers = range(section.first, section.end)
                if not section.is_shared and self._held.issuperset(numbers):
                    kept |= set(numbers)
                    hashes[section.first : section.end] = self._hashes[section.first : section.end]
        if manifest.size != self._data.numel():
            data = torch.empty(manifest.size, dtype=torch.uint8)
            for number in kept:
                start, stop = manifest.pieces[number]
                data[start:stop] = self._data[start:stop]
            self._data = data
        before = self._bytes_held
        self.manifest, self._hashes, self._held = manifest, hashes, kept
        self._bytes_held = sum(stop - start for start, stop in (manifest.pieces[number] for number in kept))
        return Adopted(kept=self._bytes_held, lost=before - self._bytes_held)

    def put(self, number: int, data: bytes, manifest: Manifest) -> None:
        """Take a piece from a donor of this manifest; raises ProtocolError when it is not what that manifest says.

        What is here already, or is not wanted any more since another manifest is followed, is dropped.
        """
        self.received += len(data)
        start, stop = manifest.pieces[number]
        if len(data) != stop - start or hash_of(data) != manifest.hashes[number]:
            raise ProtocolError(f"piece {number} is damaged: {len(data)} of {stop - start} bytes, or a wrong hash")
        if number not in self._held and self.serves(manifest, number):
            self._data[start:stop] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._held.add(number)
            self._bytes_held += len(data)

    def snapshot(self) -> Snapshot:
        """The whole state: tensors that share the download's memory, and its description."""
        assert self.manifest is not None
        assert self.is_complete
        tensors: dict[str, Tensor] = {}
        for entry in self.manifest.entries:
            dtype = DTYPES[entry.dtype]
            flat = self._data[entry.start : entry.stop]
            if entry.start % dtype.itemsize:
                flat = flat.clone()  # in an odd place: it cannot be seen as numbers there
            tensors[entry.name] = flat.view(dtype).reshape(entry.shape)
        return tensors, json.loads(json.dumps(self.manifest.meta))
