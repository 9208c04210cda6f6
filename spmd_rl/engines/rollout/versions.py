"""Which weights drew which tokens of a response, as runs; pure."""

from __future__ import annotations

from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]  # (version, tokens), in the order of the tokens; neighbours differ in version


class Versions:
    """The runs of one response, told whenever the weights change and at the end."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs = list(runs)

    def upto(self, tokens: int, version: int) -> Runs:
        """All of the first `tokens` tokens that have no version yet were drawn by `version`; all runs so far."""
        new = tokens - sum(count for _, count in self._runs)
        if new < 0:
            raise ValueError(f"{tokens} tokens, but {tokens - new} have a version already")
        if new and self._runs and self._runs[-1][0] == version:
            self._runs[-1] = (version, self._runs[-1][1] + new)
        elif new:
            self._runs.append((version, new))
        return tuple(self._runs)


def first_version(runs: Runs, otherwise: int) -> int:
    """Of the first token, the oldest; `otherwise` where there is none."""
    return runs[0][0] if runs else otherwise


def each_version(runs: Runs) -> list[int]:
    """The version of every token."""
    return [version for version, count in runs for _ in range(count)]
