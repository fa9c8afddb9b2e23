"""Chats: their tokens and their masks are Transformers' own, and how they become sequences."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.options import Options, parse_options
from fsdpplan.trainer.text.chats import ChatSequences, open_chats, overlaps, packed_rows
from fsdpplan.trainer.text.data import data_state, micro_batches, require_same_data
from fsdpplan.trainer.text.packing import IGNORED
from tests.trainer import plans
from tests.trainer.text import chat_cases
from tests.trainer.text.chat_cases import CHATS, turn

SEQ_LEN = 96
CPU = torch.device("cpu")


def asked(data: Path, tokenizer: Path, *others: str) -> Options:
    """The options of a command line."""
    return parse_options(["--sft", "--data", str(data), "--tokenizer", str(tokenizer), *others])


def opened(
    data: Path, tokenizer: Path, *others: str, seq_len: int = SEQ_LEN, seed: int = 0
) -> ChatSequences:
    """The sequences that the trainer makes."""
    plan = parse_plan(plans.plan_text(model={"vocab": 320}, training={"seq_len": seq_len}))
    options = asked(data, tokenizer, *others)
    (share,) = options.data
    return open_chats(plan, options, Path(share.path), seed=seed)


def found_chats(sequences: ChatSequences) -> list[tuple[list[int], list[int]]]:
    """(tokens, which count) of every chat of an epoch, without what fills up."""
    found = []
    for number in range(sequences.windows):
        tokens, counted = sequences(number).tolist(), sequences.counted(number).int().tolist()
        bounds = [*sequences.starts(number).nonzero().flatten().tolist(), len(tokens)]
        pairs = itertools.pairwise(bounds)
        found += [(tokens[begin:end], counted[begin:end]) for begin, end in pairs]
    return [(tokens, counted) for tokens, counted in found if any(counted)]


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "by prefixes"])
@pytest.mark.parametrize("family", chat_cases.MARKED)
def test_tokens_and_masks_are_those_of_transformers(
    family: str, marks: bool, tmp_path: Path
) -> None:
    marked = chat_cases.MARKED[family]
    template = marked if marks else chat_cases.unmarked(marked)
    assert ("generation %" in template) == marks
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", template)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", CHATS)
    for pack in ([], ["--pack"]):
        found = found_chats(opened(data, tokenizer, *pack))
        expected = [chat_cases.expected(tokenizer.parent, chat, marked) for chat in CHATS]
        assert sorted(found) == sorted(expected)


def test_a_template_with_tools_and_a_file_of_its_own(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", None)
    (tmp_path / "own.jinja").write_text(chat_cases.LLAMA3)
    line = {"messages": CHATS[0], "tools": [{"name": "f", "text": "<é>"}]}
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps(line))
    ((tokens, _),) = found_chats(opened(data, tokenizer, f"--chat-template={tmp_path}/own.jinja"))
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer.parent)
    assert tokens == list(
        theirs.apply_chat_template(
            line["messages"],
            tools=line["tools"],
            chat_template=chat_cases.LLAMA3,
            return_dict=True,
        )["input_ids"]
    )
    with pytest.raises(TrainerError, match=r"has no chat template: .* give one by --chat-template"):
        opened(data, tokenizer)


def test_answers_that_a_template_renders_otherwise_later_do_not_count(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.REASONING)
    chat = [*CHATS[2][:3], {"role": "assistant", "content": "done", "reasoning": "hm"}]
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", [chat])
    sequences = opened(data, tokenizer)
    ((tokens, counted),) = found_chats(sequences)
    text = decoded(tokenizer, [t for t, mark in zip(tokens, counted, strict=True) if mark])
    assert text == "<think>hm</think>done<|im_end|>\n"
    assert "1 answers do not count" in sequences.words


def test_marks_inside_of_a_macro_are_found(tmp_path: Path) -> None:
    template = (
        "{% macro say(m) %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ say(m) }};{% endfor %}{% endset %}"
        "{{ bos_token + all }}"
    )
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", template)
    chat = [turn("user", "2"), turn("assistant", "3"), turn("user", "4"), turn("assistant", "5")]
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", [chat])
    ((tokens, counted),) = found_chats(opened(data, tokenizer))
    assert decoded(tokenizer, tokens) == "<s>2;3;4;5;"
    marked = [t for t, mark in zip(tokens, counted, strict=True) if mark]
    assert decoded(tokenizer, marked) == "35"


def decoded(tokenizer: Path, tokens: list[int]) -> str:
    """The text of some tokens, special ones included."""
    from tokenizers import Tokenizer

    text: str = Tokenizer.from_file(str(tokenizer)).decode(tokens, skip_special_tokens=False)
    return text


def test_a_template_whose_beginnings_never_agree_is_refused(tmp_path: Path) -> None:
    template = "{{ messages | length }}" + chat_cases.unmarked(chat_cases.CHATML)
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", template)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(TrainerError, match=r"can be told from its prompt.*{% generation %}"):
        opened(data, tokenizer)


def test_a_prompt_and_its_completion(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    data = tmp_path / "chats.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "what is it?", "completion": " say so"},
        {"prompt": CHATS[2][:3], "completion": CHATS[2][3:]},
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = found_chats(opened(data, tokenizer))
    answers = {
        decoded(tokenizer, [token for token, mark in zip(*chat, strict=True) if mark])
        for chat in found
    }
    assert answers == {" say so</s>", "u umlaut; smile  <|im_end|>\n"}
    whole = {decoded(tokenizer, tokens) for tokens, _ in found}
    assert "what is it? say so</s>" in whole


def test_long_chats_are_cut_and_those_without_an_answer_left_out(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    far = [turn("user", "x" * 90), turn("assistant", "too late")]
    long = [turn("user", "x"), turn("assistant", "y" * 90)]
    none = [turn("user", "nobody answers")]
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", [far, long, none, CHATS[0]])
    sequences = opened(data, tokenizer, seq_len=40)
    assert sequences.windows == 2
    cut = next(tokens for tokens, _ in found_chats(sequences) if len(tokens) == 41)
    whole = chat_cases.expected(tokenizer.parent, long, chat_cases.CHATML)[0]
    assert cut == whole[:41]
    assert "1 are cut to 41 tokens" in sequences.words
    assert "2 are left out, with no answer to learn" in sequences.words
    with pytest.raises(TrainerError, match=r"no answer in .* begins within 8 tokens: plan with"):
        opened(data, tokenizer, seq_len=8)


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60), room=st.integers(8, 30))
def test_each_chat_is_in_one_row_and_rows_are_filled(lengths: list[int], room: int) -> None:
    rows = packed_rows(dict(enumerate(lengths)), room=room)
    assert sorted(chat for row in rows for chat in row) == list(range(len(lengths)))
    filled = [sum(min(lengths[chat], room) for chat in row) for row in rows]
    assert max(filled) <= room
    assert len(rows) <= 11 / 9 * (-(-sum(filled) // room)) + 4 or min(filled) * 2 > room


@given(
    tokens=st.lists(st.integers(0, 4), max_size=30),
    cuts=st.lists(st.integers(0, 60), max_size=8, unique=True),
)
def test_tokens_overlap_spans_that_have_a_character_of_them(
    tokens: list[int], cuts: list[int]
) -> None:
    ends = torch.tensor([0, *tokens]).cumsum(0).tolist()
    offsets = list(itertools.pairwise(ends))
    cuts = sorted(cuts)[: len(cuts) // 2 * 2]
    spans = list(zip(cuts[::2], cuts[1::2], strict=True))
    inside = {place for begin, end in spans for place in range(begin, end)}
    expected = [any(place in inside for place in range(*offset)) for offset in offsets]
    assert overlaps(offsets, spans) == expected


def test_what_a_number_is_follows_from_the_seed_alone(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", CHATS * 2)
    numbers = range(0, 40, 3)
    first = [opened(data, tokenizer)(number).tolist() for number in numbers]
    again = opened(data, tokenizer)
    assert [again(number).tolist() for number in reversed(numbers)] == first[::-1]
    other = opened(data, tokenizer, seed=1)
    assert [other(number).tolist() for number in numbers] != first
    epoch = [tuple(again(number).tolist()) for number in range(8)]
    assert sorted(epoch) == sorted(tuple(again(number).tolist()) for number in range(8, 16))
    saved = data_state(again, packs=False)
    require_same_data(saved, other)
    with pytest.raises(
        TrainerError, match=r"chats of \d+ tokens, one a sequence, this run has .*packed"
    ):
        require_same_data(saved, opened(data, tokenizer, "--pack"))


def test_chats_are_tokenized_once(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    (tmp_path / "data").mkdir()
    data = chat_cases.write_chats(tmp_path / "data" / "chats.jsonl", CHATS)
    opened(data, tokenizer)
    (made,) = set((tmp_path / "data").iterdir()) - {data}
    before = made.stat()
    opened(data, tokenizer, "--pack")
    assert made.stat() == before
    os.utime(data, (1, 1))
    opened(data, tokenizer)
    assert len(list((tmp_path / "data").iterdir())) == 3


def test_a_folder_nobody_may_write_to_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", CHATS)
    whole = Path.open

    def read_only(self: Path, mode: str = "r", **others: Any) -> Any:
        if set(mode) & set("wax+"):
            raise PermissionError(13, "read only", str(self))
        return whole(self, mode, **others)

    monkeypatch.setattr(Path, "open", read_only)
    assert len(found_chats(opened(data, tokenizer))) == len(CHATS)


def test_a_batch_has_the_targets_that_count(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", CHATS)
    plan = parse_plan(plans.plan_text(model={"vocab": 320}, training={"seq_len": SEQ_LEN}))
    sequences = opened(data, tokenizer, "--pack")
    (batch,) = micro_batches(sequences, plan, first=0, rank=0, device=CPU, packs=True)
    assert batch.documents is not None
    assert batch.masked is not None
    assert batch.masked.item() == (batch.targets != IGNORED).sum()
    for number, targets in enumerate(batch.targets):
        answers = sequences.counted(number)[1:]
        assert targets.tolist() == torch.where(answers, sequences(number)[1:], IGNORED).tolist()


BAD = [
    ("{}\n", "a line must be a JSON object with"),
    ('{"messages": "hi"}\n', "a line must be a JSON object with"),
    ('{"messages": []}\n', "a line must be a JSON object with"),
    ('{"text": "hi"}\n', "a line must be a JSON object with"),
    ('{"prompt": "hi", "completion": 3}\n', "a line must be a JSON object with"),
    ("", "has no answer to learn"),
    (json.dumps({"messages": [turn("user", "a")] * 2}), "takes no such chat .*must alternate"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
def test_bad_lines_are_named(text: str, said: str, tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.MISTRAL)
    data = tmp_path / "chats.jsonl"
    data.write_text(text)
    with pytest.raises(TrainerError, match=said):
        opened(data, tokenizer)


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.jsonl", "chats .*none.jsonl cannot be read: .*No such file"), ("x.txt", "no .jsonl")],
)
def test_there_must_be_chats(name: str, said: str, tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.MISTRAL)
    (tmp_path / "x.txt").write_text("hi")
    with pytest.raises(TrainerError, match=said):
        opened(tmp_path / name, tokenizer)


def test_templates_stay_in_their_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", template)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(TrainerError, match=r"takes no such chat .SecurityError"):
        opened(data, tokenizer)


def test_a_model_has_to_know_the_tokens(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", CHATS)
    plan = parse_plan(plans.plan_text(model={"vocab": 61}))
    with pytest.raises(TrainerError, match="but the model 61 tokens: give the model's own"):
        open_chats(plan, asked(data, tokenizer), data, seed=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sft", "--data", "x.jsonl"], "--sft needs --data with chats and their --tokenizer"),
        (["--chat-template", "x"], "--chat-template needs --sft"),
    ],
)
def test_options_that_go_together(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(words)
    assert said in capsys.readouterr().err
