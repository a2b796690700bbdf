"""Ways in which a file goes bad: bits, cuts, repeats, and values that are legal where they stand and mean nothing."""

from __future__ import annotations

import random
import re

BYTES = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\n",
    b"(",
    b"t",
    b"}",
    b"]",
    b"R",
    b".",
    b"u",
    b"\x00\x00\x00\x00",
    b"\xff" * 8,
)
NUMBERS = (
    b"NaN",
    b"Infinity",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"0.5",
    b"null",
    b"true",
    b'"x"',
    b"[]",
    b"{}",
    b"-0",
    b"1e-320",
)
WORDS = (
    b"\xef\xbb\xbf",
    b"\x00",
    b'"',
    b",",
    b":",
    b"- ",
    b"[" * 3000,
    b"&a [*a]",
    b"!!python/object/new:os.system [true]",
    b"\xed\xa0\x80",
)
_NUMBER = re.compile(rb"-?\d+\.?\d*(e-?\d+)?")


def mutate(content: bytes, rng: random.Random, *, text: bool) -> bytes:
    """One to four small accidents."""
    for _ in range(rng.randint(1, 4)):
        content = _accident(content, rng, text=text)
    return content


def _accident(content: bytes, rng: random.Random, *, text: bool) -> bytes:
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.choice((1, 2, 4, 8, 64, 1000)))
    kind = rng.randrange(9 if text else 7)
    if kind == 0 and at < len(content):
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content[:at] + content[end:]
    if kind == 3:
        return content[:end] + content[at:end] * rng.choice((1, 2, 50)) + content[end:]
    if kind == 4:
        return content[:at] + rng.choice(BYTES) + content[at:]
    if kind == 5:
        new = rng.choice(BYTES)
        return content[:at] + new + content[at + len(new) :]
    if kind == 6:
        return content[:at] + rng.randbytes(end - at) + content[end:]
    if kind == 7:
        found = list(_NUMBER.finditer(content))
        if found:
            m = rng.choice(found)
            return content[: m.start()] + rng.choice(NUMBERS) + content[m.end() :]
    return content[:at] + rng.choice(WORDS) + content[at:]
