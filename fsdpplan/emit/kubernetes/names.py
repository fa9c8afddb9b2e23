"""Names and amounts as the API server takes them, refused in words before it refuses them.

Source: kubernetes.io/docs/concepts/overview/working-with-objects, "Object Names and IDs" (RFC 1035
labels, RFC 1123 subdomains) and "Labels and Selectors" (keys and values);
kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity.
"""

from __future__ import annotations

import re

from fsdpplan.errors import SpecError

MOST_JOB_NAME = 45
"""Characters: pods, their host names and services add `-worker-123` or `-node-0-123-abcde`, and
must stay within the 63 of a label."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_PART}(\.{_PART})*")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?")


def require_job_name(name: str) -> None:
    """Raise SpecError for a job's name that cannot begin the name of a pod and of a service."""
    if _LABEL.fullmatch(name) and len(name) <= MOST_JOB_NAME:
        return
    raise SpecError(
        f"--job-name {name!r} names pods and services, so it must be of small letters, digits and "
        f"dashes, begin with a letter and have at most {MOST_JOB_NAME} characters: type --job-name "
        f"{_suggested(name)}"
    )


def require_name(option: str, name: str) -> None:
    """Raise SpecError for what is no name of an object (claim, Secret, account, queue, class)."""
    if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
        raise SpecError(
            f"{option}: {name!r} is no name of an object in Kubernetes: use small letters, digits, "
            "dashes and dots, such as team-a"
        )


def require_label(option: str, name: str) -> None:
    """Raise SpecError for what is no name of one label of DNS, such as a namespace."""
    if not re.fullmatch(_PART, name) or len(name) > 63:
        raise SpecError(
            f"{option}: {name!r} is no name of a namespace: use small letters, digits and dashes, "
            "such as team-a"
        )


def require_key(option: str, key: str) -> None:
    """Raise SpecError for what is no key of a label, annotation or resource."""
    prefix, slash, name = key.rpartition("/")
    is_prefixed = not slash or (_SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253)
    if not name or not _VALUE.fullmatch(name) or len(name) > 63 or not is_prefixed:
        raise SpecError(
            f"{option}: {key!r} is no key of Kubernetes: use letters, digits, dashes, underlines "
            "and dots, perhaps behind a domain, such as example.com/rack"
        )


def require_label_value(option: str, value: str) -> None:
    """Raise SpecError for what no label can hold."""
    if not _VALUE.fullmatch(value) or len(value) > 63:
        raise SpecError(
            f"{option}: {value!r} is no value of a label: use at most 63 letters, digits, dashes, "
            "underlines and dots"
        )


def require_quantity(option: str, text: str) -> None:
    """Raise SpecError for what is no amount above 0."""
    if not _QUANTITY.fullmatch(text) or not re.search("[1-9]", text):
        raise SpecError(
            f"{option}: {text!r} is no amount that Kubernetes reads; type one such as 64Gi"
        )


def pair(option: str, text: str, *, example: str) -> tuple[str, str]:
    """KEY=VALUE as the two. Raises SpecError where there is no `=`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"{option}: {text!r} has no =; type one such as {example}")
    return key, value


def _suggested(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"job-{words}"
    return words[:MOST_JOB_NAME].strip("-")
