"""Text of models and numbers made fit for people: nothing hidden, nothing that disturbs a terminal or a page."""

from __future__ import annotations

import unicodedata
from math import isfinite

_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}  # ␀ … ␟, ␡
_JOINS = {"\u200d", "\ufe0e", "\ufe0f"}  # zero-width joiner, variation selectors: part of the character before


def visible(text: str) -> str:
    """Control characters as symbols (line feed as ␊), other invisible steering (bidirectional overrides, lone
    surrogates) as \\uXXXX; text of every script, joiners within it and emoji stay as they are."""
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    code = ord(char)
    if code in _PICTURES:
        return _PICTURES[code]
    if (
        unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
        or "\u202a" <= char <= "\u202e"
        or ("\u2066" <= char <= "\u2069")
    ):
        return f"\\u{code:04x}"
    return char


def shorten(text: str, limit: int, keep_tail: float = 0.0) -> str:
    """At most `limit` characters and one … for what was cut; `keep_tail` is the share kept from the end. Combining
    marks are not torn from the character before."""
    if len(text) <= limit:
        return text
    tail = round(limit * keep_tail)
    head = limit - tail
    while head > 0 and _belongs_to_previous(text[head]):
        head -= 1
    start = len(text) - tail
    while start < len(text) and _belongs_to_previous(text[start]):
        start += 1
    return text[:head] + "…" + text[start:]


def _belongs_to_previous(char: str) -> bool:
    return char in _JOINS or unicodedata.category(char).startswith("M")


def number(value: float, digits: int = 4) -> str:
    """So many significant digits, and all digits before the point: 0.1234, 12.34, 12345, 1.2e-05, 1.23e+07."""
    if not isfinite(value):
        return str(value)
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.2g}"
    if size >= 1e6:
        return f"{value:.{digits - 1}g}"
    if size >= 10 ** (digits - 1) or value == int(value):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """`0.42 s`, `12.3 s`, `4 min 05 s`, `3 h 20 min`, `2 d 04 h`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"
