"""What is passed on has no secret, user, host or address in it, of whatever shape and wherever."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.emit.anonymous import Known, Scrubber, secrets_of

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def words(alphabet: str, least: int, most: int | None = None) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=least, max_size=most or least)


def keyed(text: str) -> str:
    """As keys are: with a digit, a small letter and a capital one."""
    return f"a1B{text}"


TOKENS = st.one_of(
    words(ALNUM, 30).map(lambda text: f"hf_{text}"),
    words(ALNUM, 36).map(lambda text: f"ghp_{text}"),
    words(ALNUM, 40).map(lambda text: f"sk-{text}"),
    words(string.ascii_uppercase + string.digits, 16).map(lambda text: f"AKIA{text}"),
    words(ALNUM, 20).map(lambda text: f"eyJ{text}.eyJ{text}.{text}"),
    words(HEX, 38).map(lambda text: f"a1{text}"),
    words(ALNUM + "/+", 37).map(keyed).filter(lambda text: not text.startswith("/")),
)
"""Known by their shape, wherever they stand."""
PLAIN = words(string.ascii_lowercase + string.digits, 8, 14).map(lambda text: f"zq{text}")
"""Known by the name that they are given to."""
ASSIGNED = st.sampled_from(
    [
        *("api_key={}", "HF_TOKEN={}", '"password": "{}"', "--api-key {}", "--password={}"),
        *("Authorization: Bearer {}", "wandb_api_key: {}", "https://me:{}@team/x"),
        *("ssh://{}@team/", "https://team/data?sig={}", "export AWS_SECRET_ACCESS_KEY={}"),
    ]
)
NAMES = words(string.ascii_lowercase, 4, 9).map(lambda text: f"qx{text}")
PLACES = st.sampled_from(
    ["{}", "/home/{}/models", "/Users/{}", "/scratch/{}/x.toml", "{}_job", "from {}: done", "'{}'"]
)
HOSTS = NAMES.flatmap(
    lambda name: st.sampled_from([name, f"{name}.team.local", f"{name}.example.com", f"{name}-12"])
)
AROUND = st.sampled_from(["{}", "see {} there", "a={},b", "[{}]", "x\n{}\ny", "`{}`", '"{}"'])


def scrubbed(value: Any, known: Known) -> str:
    return json.dumps(Scrubber(known).value(value)).lower()


@given(token=TOKENS, around=AROUND)
def test_a_token_is_known_by_its_shape(token: str, around: str) -> None:
    assert token.lower() not in scrubbed({"log": ["x", around.format(token)]}, Known())


@given(secret=PLAIN, assigned=ASSIGNED, around=AROUND)
def test_a_secret_is_known_by_its_name(secret: str, assigned: str, around: str) -> None:
    text = around.format(assigned.format(secret))
    assert secret not in scrubbed({"plan": [{"sources": text}, 3, None]}, Known())


@given(secret=PLAIN, around=AROUND, name=st.sampled_from(["DB_PASSWORD", "SLURM_JWT", "X_API_KEY"]))
def test_the_value_of_a_secret_variable_is_masked_wherever_it_is(
    secret: str, around: str, name: str
) -> None:
    known = Known(secrets=secrets_of({name: secret, "TOKENIZER_PATH": "/x", "USE_AUTH": "true"}))
    assert known.secrets == (secret,)
    assert secret not in scrubbed([around.format(secret)], known)


@given(user=NAMES, place=PLACES, around=AROUND, known=st.booleans())
def test_a_user_is_a_number(user: str, place: str, around: str, known: bool) -> None:
    place = place if known else "/home/{}/x"
    text = around.format(place.format(user.title() if known else user))
    of = Known(users=(user,), homes=(f"/home/{user}",)) if known else Known()
    assert user not in scrubbed({"a": text, "b": {text: [text]}}, of)


@given(host=HOSTS, around=AROUND)
def test_a_host_is_a_number(host: str, around: str) -> None:
    known = Known(hosts=(host.partition(".")[0], host))
    text = f"{around.format(host)} {around.format(f'https://{host}:8443/x')}"
    assert host.partition(".")[0] not in scrubbed([text, f"me@{host}"], known)


@given(
    address=st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).filter(
        lambda address: not address.is_loopback and not address.is_unspecified
    ),
    around=AROUND,
)
def test_an_address_is_a_number(address: Any, around: str) -> None:
    assert str(address) not in scrubbed(around.format(address), Known())


def test_what_stands_for_one_is_the_same_everywhere_and_all_else_stays() -> None:
    scrubber = Scrubber(Known(users=("ada",), homes=("/home/ada",), hosts=("n7",)))
    text = "/home/ada/x.toml on N7 and n8.team.local, Ada at 10.0.0.3, 04:30:24 torch 2.13.0"
    assert scrubber.text(text) == (
        "~/x.toml on host-1 and host-2, user-1 at address-1, 04:30:24 torch 2.13.0"
    )
    assert scrubber.text("n7, 10.0.0.3: Ada") == "host-1, address-1: user-1"
    assert scrubber.counts() == {"user": 1, "host": 2, "address": 1}


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:29500",
        "0000:3b:00.0",
        "cost/memory/peak.py, line 12, in peak",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "reduce_scatter_tensor_coalesced_and_waited_for",
        "NCCL 2.27.5+cuda12.9, driver 570.124.06",
        "fsdpplan-0.2.0-py3-none-any.whl",
        "step-00000400 of 2000, 2026-11-26T04:49:54.781889+00:00",
        "https:///NVIDIA/nccl/blob/v2.29.2-1/src/graph/tuning.cc",
        "--tokens 4096 --model llama-3.1-8b --tp 4",
    ],
)
def test_words_that_help_are_left(text: str) -> None:
    assert Scrubber(Known()).text(text) == text


def test_a_key_that_goes_over_lines_is_masked_whole() -> None:
    body = ["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"] * 3
    lines = ["a", "-----BEGIN RSA PRIVATE KEY-----", *body, "-----END RSA PRIVATE KEY-----", "b"]
    assert body[0].lower() not in scrubbed(lines, Known())
    assert body[0].lower() not in scrubbed(lines[3:], Known()), "where its begin was cut off"
