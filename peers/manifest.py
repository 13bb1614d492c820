"""What a state is before it travels: a safetensors header, sections, and a hash of every piece."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from swarmkit.optim.snapshot import OWN_KINDS
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.layout import MAX_DIMS, MAX_TENSORS

Snapshot = tuple[dict[str, Tensor], dict[str, object]]
PIECE_BYTES = 1 << 19  # one message of a bulk stream; equal everywhere, or pieces of two donors would not fit together
HASH_BYTES = 32
MAX_MANIFEST_BYTES = 64 << 20
# What tells in a snapshot's description which rounds are in it; two that agree here must hold the same shared tensors.
PLACE = ("round", "lineage", "lineages", "missing", "next_round")
# The names that the safetensors format has for dtypes.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def hash_of(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE2b of a piece or a manifest."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor and where it lies in the payload."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def group(self) -> str:
        """What has to come from one donor: empty for what all members share, else a parameter's own state.

        A parameter's first moment from one peer and its second from another could make a step of any length.
        """
        kind, _, rest = self.name.partition("/")
        if kind not in OWN_KINDS:
            return ""
        return f"{kind}/{rest.rpartition('/')[0]}" if kind == "inner" else kind


@dataclass(frozen=True, slots=True)
class Section:
    """A run of tensors that has to come from one donor, unless all donors have the same bytes in it."""

    start: int  # first byte
    stop: int
    first: int  # number of its first piece
    end: int  # number after its last piece
    is_shared: bool


@dataclass(frozen=True)
class Manifest:
    """The whole description of a state: whoever has it can check every piece, whoever sends it."""

    entries: tuple[Entry, ...]  # shared tensors first; offsets follow each other without a gap
    meta: Mapping[str, object]
    hashes: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Payload bytes."""
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The shared tensors, then the donor's own by parameter, small ones together."""
        return tuple(_sections(self.entries))

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """First and last-plus-one byte of every piece."""
        return tuple(
            (start, min(start + PIECE_BYTES, section.stop))
            for section in self.sections
            for start in range(section.start, section.stop, PIECE_BYTES)
        )

    @cached_property
    def shared_digest(self) -> str:
        """Fingerprint of the tensors that all members share."""
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        for entry in self.entries:
            if not entry.group:
                digest.update(f"{entry.name}:{entry.dtype}:{entry.shape};".encode())
        for section in self.sections:
            if section.is_shared:
                digest.update(b"".join(self.hashes[section.first : section.end]))
        return digest.hexdigest()

    @cached_property
    def digest(self) -> str:
        """Fingerprint of everything: names, shapes, description and, through the pieces' hashes, all bytes."""
        return hash_of(self.to_bytes()).hex()

    @property
    def place(self) -> str:
        """Which rounds are in it."""
        return json.dumps([self.meta.get(name) for name in PLACE])

    @property
    def round(self) -> int:
        """The round that comes next, as the donor says; -1 when it does not."""
        found = self.meta.get("round")
        return found if type(found) is int else -1

    def header(self) -> bytes:
        """What a safetensors file of this state begins with; the payload follows."""
        table: dict[str, object] = {"__metadata__": {"meta": json.dumps(self.meta)}}
        for entry in self.entries:
            offsets = [entry.start, entry.stop]
            table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def to_bytes(self) -> bytes:
        """The safetensors header and the hashes of the pieces."""
        return self.header() + b"".join(self.hashes)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> "Manifest":
        """Read what a peer sent; raises ProtocolError."""
        length = int.from_bytes(data[:8], "little")
        if not 2 <= length <= len(data) - 8:
            raise ProtocolError(f"manifest of {len(data)} bytes with a header of {length}")
        try:
            table = json.loads(bytes(data[8 : 8 + length]))
            meta = json.loads(table.pop("__metadata__")["meta"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"manifest without a safetensors header: {error!r}") from error
        if not isinstance(meta, dict) or len(table) > MAX_TENSORS:
            raise ProtocolError("manifest without a description, or of too many tensors")
        hashes = bytes(data[8 + length :])
        manifest = cls(
            tuple(_read_entries(table)),
            meta,
            tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)),
        )
        if len(hashes) != HASH_BYTES * len(manifest.pieces):
            raise ProtocolError(f"{len(hashes)} bytes of hashes for {len(manifest.pieces)} pieces")
        return manifest


def _read_entries(table: Mapping[str, object]) -> Iterator[Entry]:
    position, own = 0, False
    for name, found in table.items():
        values = found if isinstance(found, dict) else {}
        dtype, shape, offsets = values.get("dtype"), values.get("shape"), values.get("data_offsets")
        if not (isinstance(dtype, str) and dtype in DTYPES and isinstance(shape, list) and len(shape) <= MAX_DIMS):
            raise ProtocolError(f"manifest entry {name[:80]!r} is not a tensor")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ProtocolError(f"manifest entry {name[:80]!r} has shape {str(shape)[:80]}")
        stop = position + math.prod(shape) * DTYPES[dtype].itemsize
        if offsets != [position, stop]:
            raise ProtocolError(f"manifest entry {name[:80]!r} does not lie where the one before it ends")
        entry = Entry(name, dtype, tuple(shape), position, stop)
        if own and not entry.group:
            raise ProtocolError(f"shared tensor {name[:80]!r} after a donor's own")
        position, own = stop, bool(entry.group)
        yield entry


def _sections(entries: Sequence[Entry]) -> Iterator[Section]:
    piece = 0
    for run in _runs(entries):
        start, stop = run[0].start, run[-1].stop
        count = -(-(stop - start) // PIECE_BYTES)
        yield Section(start, stop, piece, piece + count, is_shared=not run[0].group)
        piece += count


def _runs(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    run: list[Entry] = []
    for i, entry in enumerate(entries):
        begins_group = i == 0 or entries[i - 1].group != entry.group
        if run and begins_group:
            # A group is never cut; groups too small for a piece of their own share one.
            end = next((j for j in range(i, len(entries)) if entries[j].group != entry.group), len(entries))
            if not run[0].group or entries[end - 1].stop - run[0].start > PIECE_BYTES:
                yield run
                run = []
        run.append(entry)
    if run:
        yield run


class Frozen:
    """A snapshot that does not change any more, cut into pieces, each of them hashed."""

    def __init__(self, snapshot: Snapshot) -> None:
        tensors, meta = snapshot
        placed, position = [], 0
        groups: dict[str, list[tuple[str, Tensor]]] = {"": []}
        for name, tensor in tensors.items():
            groups.setdefault(Entry(name, "", (), 0, 0).group, []).append((name, tensor))
        self._parts: list[memoryview] = []
        for name, tensor in (pair for group in groups.values() for pair in group):
            if tensor.dtype not in NAMES:
                raise ProtocolError(f"state tensor {name!r} has dtype {tensor.dtype}, which does not travel")
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            stop = position + flat.numel()
            placed.append(Entry(name, NAMES[tensor.dtype], tuple(tensor.shape), position, stop))
            self._parts.append(flat.numpy().data)
            position = stop
        self._starts = [entry.start for entry in placed]
        bare = Manifest(tuple(placed), meta, ())
        hashes = tuple(hash_of(self._read(start, stop)) for start, stop in bare.pieces)
        self.manifest = Manifest(tuple(placed), meta, hashes)
        self.encoded = self.manifest.to_bytes()

    def piece(self, number: int) -> bytes:
        """One piece; raises ProtocolError for a number that there is not."""
        if not 0 <= number < len(self.manifest.pieces):
            raise ProtocolError(f"piece {number} of {len(self.manifest.pieces)}")
        return self._read(*self.manifest.pieces[number])

    def _read(self, start: int, stop: int) -> bytes:
        index = bisect_right(self._starts, start) - 1
        found = bytearray()
        while start + len(found) < stop:
            offset = start + len(found) - self._starts[index]
            found += self._parts[index][offset : stop - self._starts[index]]
            index += 1
        return bytes(found)
