"""Misspelt names: which one is meant, and which there are."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal of `name`."""
    there = list(known)
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    return (f": did you mean {near[0]!r}?" if near else ";") + f" There are {', '.join(there) or 'none'}"
