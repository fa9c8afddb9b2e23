"""Text that may be passed on: without secrets, and without who somebody is and where.

What stands for a user, a host or an address is numbered, the same wherever the same was: `host-1`.
No rule knows every secret: whoever passes a text on reads it first.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdpplan.emit.safe_text import MASK, is_secret_name, printable, redacted

SHORTEST_SECRET = 4
"""Characters of a variable's value that is looked for in texts: here rather too much is masked."""
LONGEST_LINE = 4000
"""Characters; longer ones are left out whole, since a part of a secret is one, too."""
_LONG_LINE = "(a longer line is left out)"
_NO_SECRETS = frozenset({"true", "false", "none", "null", "auto", "yes", "no"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the user and the machine, none of which may be seen."""

    users: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of variables whose names say that they are secret, the longest first."""
    found = {
        value
        for name, value in environment.items()
        if is_secret_name(name)
        and len(value) >= SHORTEST_SECRET
        and value.lower() not in _NO_SECRETS
    }
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


_NAMED = re.compile(
    r"(?<![\w.-])(?P<name>(?:--?)?[A-Za-z][\w.-]*)"
    r"(?P<between>[\"']?(?:[ \t]*[=:][ \t]*|(?<=[\w-])[ ]+)[\"']?)(?P<value>[^\s\"',;&}]+)"
)
"""What is given to a name: `a=b`, `"a": "b"`, `--a b`."""
_BEARER = re.compile(r"(?i)\b(?P<name>bearer|basic)(?P<between>\s+)(?P<value>[\w.+/=~-]{6,})")
_URL_USER = re.compile(r"(?<=://)[^\s/@]+@")
_URL_QUERY = re.compile(r"(?P<url>://[^\s\"'<>?]+\?)[^\s\"'<>]+")
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*")
_URL_HOST = re.compile(r"(?<=://)(?!\[)[^\s/:\"'<>@,)]+")
_HOME = re.compile(r"(?<![\w.])(?P<folder>/(?:home|Users|export/home)/)(?P<name>[^/\s\"':;,]+)")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%\w+)?(?![\w:])")
_MAC = re.compile(r"(?<![\w:])[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5,19}(?![\w:])")
_DOMAIN = re.compile(
    r"(?i)(?<![\w./-])[a-z0-9-]+(?:\.[a-z0-9-]+)*\."
    r"(?:com|org|net|edu|gov|mil|int|io|ai|dev|cloud|local|localdomain|internal|intra|lan|corp|"
    r"cluster|example|[a-z]{2}\.[a-z]{2}|ac|uk|de|fr|ch|at|it|es|nl|be|se|no|fi|dk|cz|eu|us|ca|au|"
    r"jp|cn|kr|tw|hk|sg|in|br|mx|ru|ua|il|za|nz)(?![\w-]|\.\w)"
)
_LONG = re.compile(r"(?<![\w+/=.~-])(?!/)[\w+/=-]{24,}(?![\w+/=-])")
_SEGMENT = re.compile(r"(?<=/)[\w+=-]{20,}(?![\w+=-])")
_RUN = re.compile(r"[A-Za-z0-9]{16,}")
_OPEN = frozenset({"127.0.0.1", "0.0.0.0", "::", "::1"})


@dataclass(slots=True)
class Scrubber:
    """Replaces, and remembers what stands for what."""

    known: Known
    seen: dict[str, dict[str, int]] = field(default_factory=dict)
    """Kind -> what was found, in lower case -> its number."""
    masked: Counter[str] = field(default_factory=Counter)
    """Secrets, by how they were found."""

    def text(self, text: str) -> str:
        """`text` without any of it, and without lines that nobody reads."""
        if len(text) > LONGEST_LINE:
            lines = text.split("\n")
            text = "\n".join(line if len(line) <= LONGEST_LINE else _LONG_LINE for line in lines)
        for secret in self.known.secrets:
            self.masked["values of secret variables"] += text.count(secret)
            text = text.replace(secret, MASK)
        before = text.count(MASK)
        text = _BEARER.sub(rf"\g<name>\g<between>{MASK}", text)
        text = redacted(text)
        text = _URL_USER.sub(f"{MASK}@", text)
        text = _URL_QUERY.sub(rf"\g<url>{MASK}", text)
        text = _without_given(text)
        self.masked["tokens, keys and passwords"] += max(0, text.count(MASK) - before)
        text = self._numbered(_MAC, "hardware address", text)
        text = self._numbered(_MAIL, "e-mail", text)
        for home in self.known.homes:
            text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
        text = _HOME.sub(lambda m: m["folder"] + self._name("user", m["name"]), text)
        text = self._words("user", self.known.users, text)
        text = self._words("host", self.known.hosts, text)
        text = self._numbered(_IPV4, "address", text, only=_is_address)
        text = self._numbered(_IPV6, "address", text, only=_is_address)
        text = self._numbered(_URL_HOST, "host", text)
        text = self._numbered(_DOMAIN, "host", text)
        text = self._numbered(_SEGMENT, "long-word", text, only=_is_key)
        return self._numbered(_LONG, "long-word", text, only=_is_key)

    def value(self, value: Any) -> Any:
        """A JSON value, in which each text, and each name that is no plain word, is `text`."""
        if isinstance(value, str):
            return printable(self.text(value))
        if isinstance(value, Mapping):
            return {self._key(name): self._named(name, each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            if all(isinstance(each, str) for each in value):
                # A key goes over several lines of a log.
                return printable(self.text("\n".join(value))).split("\n") if value else []
            return [self.value(each) for each in value]
        return value

    def counts(self) -> dict[str, int]:
        """Kind -> how many different ones were found, and how often something secret was."""
        found = {kind: len(numbers) for kind, numbers in self.seen.items()}
        return {**found, **{kind: count for kind, count in self.masked.items() if count}}

    def _key(self, name: object) -> str:
        return printable(self.text(str(name)))

    def _named(self, name: object, value: Any) -> Any:
        if isinstance(value, str) and value and is_secret_name(str(name)):
            self.masked["values of secret variables"] += 1
            return MASK
        return self.value(value)

    def _name(self, kind: str, found: str) -> str:
        if re.fullmatch(rf"{kind}-\d+", found):
            return found
        numbers = self.seen.setdefault(kind, {})
        return f"{kind}-{numbers.setdefault(found.lower(), len(numbers) + 1)}"

    def _numbered(
        self,
        shape: re.Pattern[str],
        kind: str,
        text: str,
        *,
        only: Callable[[str], bool] = bool,
    ) -> str:
        def replaced(match: re.Match[str]) -> str:
            return self._name(kind, match[0]) if only(match[0]) else match[0]

        return shape.sub(replaced, text)

    def _words(self, kind: str, words: tuple[str, ...], text: str) -> str:
        for word in sorted(set(words), key=lambda word: (-len(word), word)):
            shape = re.compile(rf"(?i)(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])")
            text = self._numbered(shape, kind, text)
        return text


def _without_given(text: str) -> str:
    """`text` without what is given to a name that says it is secret; a name may be given another
    name: `a=api_key=b`."""
    kept, at = [], 0
    while (match := _NAMED.search(text, at)) is not None:
        is_given = "=" in match["between"] or ":" in match["between"]
        means = is_secret_name(match["name"]) and (is_given or match["name"].startswith("-"))
        end = match.end() if means else match.start("value")
        kept.append(text[at : match.start("value")])
        kept.append(MASK if means else "")
        at = end
    return "".join(kept) + text[at:]


def _is_address(text: str) -> bool:
    """Whether it is one of somewhere; a time of day is none."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return text not in _OPEN


def _is_key(word: str) -> bool:
    """Whether a long word is rather a key or a hash than words joined together."""
    has = [any(test(c) for c in word) for test in (str.isdigit, str.islower, str.isupper)]
    if "/" in word or "+" in word:
        return all(has) and len(word) >= 32
    runs = [run for run in _RUN.findall(word) if any(map(str.isdigit, run))]
    letters = [run for run in runs if any(map(str.isalpha, run))]
    return bool(letters) or (all(has) and len(word) >= 32)
