"""Which names and texts are secret, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.safe_text import (
    MASK,
    is_secret_name,
    looks_secret,
    redacted,
    secret_values,
    without_values,
)
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError

TOKEN = "hf_" + "aB3" * 12
SECRET_NAMES = (
    "HF_TOKEN",
    "hf_token",
    "HfToken",
    "WANDB_API_KEY",
    "NGC_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_KEY",
    "PGPASSWORD",
    "MYSQL_ROOT_PASSWORD",
    "SMB_PASSWD",
    "CLIENT_SECRET",
    "REGISTRY_AUTH",
    "SSH_PRIVATE_KEY",
    "GIT_CREDENTIALS",
    "--api-key",
    "logger.apiKey",
    "password",
)
PLAIN_NAMES = (
    "TOKENIZER_PATH",
    "TOKENS",
    "KEYBOARD",
    "MONKEY",
    "PRIMARY_KEY",
    "AUTHOR",
    "AWS_REGION",
    "AWS_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "SECRET_FILE",
    "RAY_AUTH_MODE",
    "pad_token",
    "--loss-per-token",
    "--max-token",
    "use_auth_token",
    "NCCL_DEBUG",
    "",
    "\u00fc",
)
SECRET_TEXTS = (
    TOKEN,
    "sk-proj-" + "x1" * 20,
    "ghp_" + "a" * 36,
    "github_pat_" + "a" * 40,
    "glpat-" + "a" * 20,
    "AKIA" + "A1" * 8,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----",
    "postgres://user:hunter2@db/x",
    "https://:t0ken@git/x",
)
PLAIN_TEXTS = (
    "hf_home",
    "/data/sk-learn",
    "a" * 40,
    "http://host:8080/x@y",
    "docker://user@registry#image:tag",
    "s3://bucket/key",
    "nvcr.io#nvidia/pytorch:25.08-py3",
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_secret_is_known_by_a_whole_word_of_its_name(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_token_is_known_by_its_form_and_masked(text: str) -> None:
    assert looks_secret(text)
    around = redacted(f"before {text} after")
    assert around.startswith("before ")
    assert around.endswith(" after")
    assert MASK in around
    assert not looks_secret(around)


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert not looks_secret(text)
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("export HF_TOKEN=abc; x", "export HF_TOKEN=***; x"),
        ("--api-key=abc --lr=1", "--api-key=*** --lr=1"),
        ('{"password": "abc", "a": 1}', '{"password": "***", "a": 1}'),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("HF_TOKEN=$(cat f)", "HF_TOKEN=$(cat f)"),
        ("--pad-token=<pad> --token=", "--pad-token=<pad> --token="),
    ],
)
def test_what_a_secret_name_is_given_is_masked(text: str, left: str) -> None:
    assert redacted(text) == left


def test_values_of_secret_variables_are_masked_wherever_they_stand() -> None:
    known = secret_values({"HF_TOKEN": "plainwords", "PATH": "/usr/bin", "PASSWORD": "short"})
    assert known == ("plainwords",)
    assert without_values("it said plainwords, short", known=known) == "it said ***, short"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"env": (("HF_TOKEN", "whatever"),)}, ("--env HF_TOKEN", "export HF_TOKEN", "Secret")),
        ({"env": (("MY_LOGIN", TOKEN),)}, ("--env MY_LOGIN", "export MY_LOGIN")),
        ({"env_setup": ("export WANDB_API_KEY=whatever",)}, ("--env-setup gives WANDB_API_KEY",)),
        ({"env_setup": (f"huggingface-cli login {TOKEN}",)}, ("--env-setup holds a token",)),
        ({"sbatch": (f"--comment={TOKEN}",)}, ("--sbatch holds",)),
        ({"job_name": TOKEN}, ("--job-name holds",)),
        ({"python": "https://u:whatever@host/python"}, ("--python holds",)),
    ],
)
def test_a_job_refuses_secrets_and_does_not_show_them(
    values: dict[str, Any], says: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as refused:
        Job(**values)
    assert all(text in str(refused.value) for text in says)
    assert "whatever" not in str(refused.value)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ("--token=whatever",),
        ("--api-key", "whatever"),
        ("logger.wandb_api_key=whatever",),
        ('{"password": "whatever"}',),
        ("--login", TOKEN),
    ],
)
def test_arguments_of_a_program_hold_no_secret(words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError, match="from its environment") as refused:
        UserProgram(script="train.py", args=words)
    assert "whatever" not in str(refused.value)
    assert TOKEN not in str(refused.value)


def test_a_path_of_the_trainer_holds_no_password() -> None:
    with pytest.raises(SpecError, match="--data holds"):
        Trainer(data="s3://user:whatever@host/tokens.bin")


def test_what_is_no_secret_is_given_on() -> None:
    Job(
        env=(("HF_TOKEN", ""), ("TOKENIZER_PATH", "t.json")),
        env_setup=("export HF_TOKEN=$(cat ~/.token)", 'export API_KEY="$KEY"', "module load cuda"),
        program=UserProgram(
            script="t.py", args=("--pad-token=<pad>", "--token-file", "x", "--use-auth-token", "x")
        ),
    )
