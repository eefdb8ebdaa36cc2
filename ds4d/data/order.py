"""Which sample comes k-th: a function of the seed and k alone.

Each epoch is a permutation that is computed, not stored: a billion samples cost no memory and no
start-up time, and a resumed run needs only the number of samples consumed. It does not go through
a library's shuffle, whose result may change with the library's version.

The permutation is an unbalanced Feistel network on pairs (left < a, right < b), a * b >= n:
each round adds to one half, modulo its size, a hash of the other, so each round can be undone and
the whole is one to one. a * b exceeds n by less than 2 * sqrt(n); a number that lands outside n
goes through again until it lands inside, which keeps it one to one.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
"""

from __future__ import annotations

import math
from functools import lru_cache

ROUNDS = 8  # of both halves
_MASK = (1 << 64) - 1


class SampleOrder:
    """``order[k]``: index of the k-th sample consumed since training began, across epochs."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        if num_samples < 1:
            raise ValueError(f"an order needs at least one sample, got {num_samples}")
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle
        self._a = math.isqrt(num_samples - 1) + 1
        self._b = -(-num_samples // self._a)

    def __getitem__(self, k: int) -> int:
        if k < 0:
            raise IndexError(f"sample {k} was never consumed: counting begins at 0")
        epoch, index = divmod(k, self.num_samples)
        return self._permute(index, _round_keys(self.seed, epoch)) if self.shuffle else index

    def _permute(self, index: int, keys: tuple[int, ...]) -> int:
        a, b = self._a, self._b
        while True:
            left, right = divmod(index, b)
            for key in keys:
                left = (left + _hash(key ^ right)) % a
                right = (right + _hash(key + left)) % b
            index = left * b + right
            if index < self.num_samples:
                return index


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    start = _hash(_hash(seed & _MASK) ^ epoch)
    return tuple(_hash(start + i) for i in range(ROUNDS))


def _hash(value: int) -> int:
    """SplitMix64: 64 well-mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
