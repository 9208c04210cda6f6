"""When a response ends: an end token, a stop string, or its length; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Sampling


def finish_of(tokens: Sequence[int], sampling: Sampling, end: frozenset[int], tokenizer: Any) -> Finish | None:
    """Why the response ends with its last token; None: it goes on.

    An end token and the token that completes a stop string belong to the response.
    """
    if tokens[-1] in end or (sampling.stop and _stopped(tokens, sampling.stop, tokenizer)):
        return Finish.STOP
    return Finish.LENGTH if len(tokens) >= sampling.max_tokens else None


def _stopped(tokens: Sequence[int], stop: Sequence[str], tokenizer: Any) -> bool:
    """Whether the text contains a stop string. Only the end is read again: earlier text held none.

    A token is at least one byte of text, so a stop string of n bytes lies within the last n tokens, but for special
    tokens, which are left out of the text; some more tokens are read to allow for them and for split characters.
    """
    longest = max(len(text.encode()) for text in stop)
    text = tokenizer.decode(tokens[-(longest + 16) :], skip_special_tokens=True)
    return any(string in text for string in stop)
