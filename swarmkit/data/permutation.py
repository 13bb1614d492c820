"""A seeded permutation that is computed, not stored: a Feistel network with cycle walking."""

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# Each round changes one half; with eight, every bit of the input reaches every bit of the output several times.
_ROUNDS = 8


class Permutation:
    """Maps the positions 0 .. size - 1 onto the same numbers in an order that depends on the key alone.

    Its memory does not grow with the size, and it uses no random generator of a library: peers with other versions of
    NumPy or torch get the same order, or their samples would overlap.
    """

    def __init__(self, size: int, *key: int) -> None:
        if size < 1:
            raise ValueError(f"size={size}: there must be something to permute")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        self._high_mask = np.uint64((1 << bits - bits // 2) - 1)
        seed = ",".join(str(part) for part in key).encode()
        digest = hashlib.blake2b(seed, digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """Where each of the positions goes; vectorised."""
        if positions.size and (positions.min() < 0 or positions.max() >= self.size):
            raise ValueError(f"positions from {positions.min()} to {positions.max()}: the size is {self.size}")
        result = self._encrypt(positions.astype(np.uint64))
        # The network permutes a power of two of numbers: those that leave the range walk on until they are back.
        outside = np.flatnonzero(result >= self.size)
        while outside.size:
            result[outside] = self._encrypt(result[outside])
            outside = outside[result[outside] >= self.size]
        return result.astype(np.int64)

    def _encrypt(self, values: _Words) -> _Words:
        high, low = values >> self._low_bits, values & self._low_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_mix(high, key) & self._low_mask)
            else:
                high = high ^ (_mix(low, key) & self._high_mask)
        return (high << self._low_bits) | low


def _mix(values: _Words, key: np.uint64) -> _Words:
    """Hash each value: the finaliser of splitmix64."""
    values = values + key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
