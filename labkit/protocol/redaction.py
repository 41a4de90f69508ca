"""What is a secret, by its name and by how it looks, and what is shown in its place.

For whatever leaves the process in which a value was given: reports of failures. A secret that is shown cannot be taken
back, so what may be one is left out; numbers are not where only a token's or a key's name speaks for it, for models
have those too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import islice
from typing import Any

LEFT_OUT = "left out: its name is a secret's"

_STRONG = (
    r"api_?keys?|(access|private|secret|encryption|signing|account|master)_?(keys?|tokens?)|auth(entication|orization)?"
    r"|pass(word|wd|phrase|code)s?|pwd|secrets?|credentials?|creds?"
)
SECRET = re.compile(rf"(^|_)({_STRONG})(_|$)", re.I)
"""Names whose values are secrets, whatever they are."""

MAY_BE = re.compile(r"(^|_)(token|key|pas)s?(_|$)", re.I)
"""Names whose values are secrets unless they are numbers: `max_tokens`, `key_dim` …"""

IS_NONE = re.compile(
    r"(^|_)(eos|bos|pad|unk|mask|sep|cls|special|image|start|end|stop|sort|group|dict|cache|primary|foreign|monitor|metric)"
    r"_(token|key)s?(_|$)|(^|_)(token|key)s?_(type|name|size|dim|length|count|id|ids)s?(_|$)",
    re.I,
)
"""… and but for these."""

SUSPICIOUS = re.compile(
    r"(^|_)(session|cookie|jwt|bearer|signature|sig|sas|webhook|dsn|login|licen[cs]e|cert)(_|$)", re.I
)
"""Names whose values are secrets if they look random."""

SECRET_TEXT = re.compile(
    r"(?<=://)(?![{%<$]|git@|anonymous@)([^\s/]+|[^\s/:@]*:\S+)(?=@)"  # a password in an address
    r"|\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|npm_|pypi-|dckr_pat_|shpat_|SG\.|ya29\.|r8_)[\w.-]{6,}"
    r"|\b(AKIA|ASIA|AIza)[\w-]{6,}"
    r"|\beyJ[\w-]{6,}\.[\w-]+\.[\w-]*"  # a JSON web token
    r"|(?<=Bearer )(?![{%<$])\S+|(?<=Basic )(?![{%<$])[\w+/=]{8,}"
    r"|(?P<named>(?i:\b(password|passwd|pwd|api_?key|access_?key|secret|token|sig)=))(?![{%<$])[^\s&;,'\"]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END|\Z)"
)
"""Parts of texts that are secrets: passwords in addresses, and keys as services write them; no places for either."""

RANDOM_CHARACTERS, RANDOM_BITS = 20, 3.0
"""Least length of a text that looks random, and least information in each of its characters; of 32 hexadecimal digits
each has 3.6 bits on average."""


def redact(text: str) -> str:
    """Return a text with "…" in the place of what looks like a secret."""
    return SECRET_TEXT.sub(r"\g<named>…", text)


def has_secret_name(name: Any, value: Any) -> bool:
    """Return whether a value is a secret by its name. Calls no method of the value."""
    words = _words(name)
    if value is None or type(value) is bool:
        return False
    if SECRET.search(words):
        return True
    if MAY_BE.search(words):
        return not (_is_numbers(value) or IS_NONE.search(words))
    return type(value) is str and SUSPICIOUS.search(words) is not None and looks_random(value)


def _words(name: Any) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:100]).replace("-", "_") if type(name) is str else ""


def _is_numbers(value: Any) -> bool:
    parts = islice(value, 100) if type(value) in (list, tuple, set, frozenset) else (value,)
    return all(type(part) in (int, float, complex, bool) for part in parts)


def looks_random(text: str) -> bool:
    """Return whether a text may be a key: long, without spaces, and of many different characters."""
    if len(text) < RANDOM_CHARACTERS or not re.fullmatch(r"[\w+/=.~-]+", text):
        return False
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares) >= RANDOM_BITS


def shown(name: str, value: Any) -> Any:
    """Return a plain value as it may be shown: itself, a text without the secrets in it, or that it is left out."""
    if has_secret_name(name, value):
        return LEFT_OUT
    return redact(value) if type(value) is str else value
