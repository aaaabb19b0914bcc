"""The tokenizer of a plain checkpoint says what transformers' own says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli.models.language.files import find_checkpoint
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.tokenizer import (
    OwnTokenizer,
    load_tokenizer,
    own_tokenizer,
    transformers_tokenizer,
)

TEXTS = [
    *("Ada lives in Oslo", "", " ", "\n\n two  lines\r\n", "Zürich – 🦒🦒 naïve", "a\u0000b\ufffd", "名前"),
    *("<|bos|>written <|end|> out<|user|>", "<|end|", "x" * 300),
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Who lives in Oslo?"}],
    [{"role": "user", "content": " a \n"}, {"role": "assistant", "content": "<b>&amp;{{ 1 }}"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def both(saved_model: Path) -> tuple[OwnTokenizer, Any]:
    own = load_tokenizer(saved_model)
    assert isinstance(own, OwnTokenizer)
    return own, transformers_tokenizer(find_checkpoint(saved_model))


def test_what_it_is(both: tuple[OwnTokenizer, Any]) -> None:
    own, theirs = both
    assert tokenizer_fingerprint(own) == tokenizer_fingerprint(theirs)
    for name in (
        *("bos_token", "bos_token_id", "eos_token", "eos_token_id", "all_special_tokens", "all_special_ids"),
        *("special_tokens_map", "chat_template", "split_special_tokens", "model_max_length"),
    ):
        assert getattr(own, name) == getattr(theirs, name), name
    assert len(own) == len(theirs) and own.get_vocab() == theirs.get_vocab()
    assert str(own.added_tokens_decoder) == str(theirs.added_tokens_decoder)


def test_text_to_tokens_and_back(both: tuple[OwnTokenizer, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = both
    plain = {"add_special_tokens": False, "verbose": False}
    batch, wanted = own(TEXTS, **plain), theirs(TEXTS, **plain)
    assert batch["input_ids"] == batch.input_ids == wanted["input_ids"]
    for number, text in enumerate(TEXTS):
        ids = wanted["input_ids"][number]
        assert own(text, **plain)["input_ids"] == ids == theirs(text, **plain)["input_ids"]
        places = range(len(text))
        assert [batch.char_to_token(number, place) for place in places] == [
            wanted.char_to_token(number, place) for place in places
        ]
        for token in range(len(ids)):
            assert batch.token_to_chars(number, token) == wanted.token_to_chars(number, token)
        for given in (ids, tuple(ids), np.array(ids, np.int64), ids[:3]):
            for skip in (False, True):
                assert own.decode(given, skip_special_tokens=skip) == theirs.decode(
                    given, skip_special_tokens=skip
                )
    assert own.decode(5) == theirs.decode(5)
    assert own.decode(np.array([0, 40, 3], np.uint16)) == theirs.decode([0, 40, 3])
    # and what it is not asked for here
    assert own("Ada")["attention_mask"] == theirs("Ada")["attention_mask"]
    assert own.convert_ids_to_tokens([40]) == theirs.convert_ids_to_tokens([40])


@pytest.mark.parametrize("chat", CHATS)
def test_chats(chat: list[dict[str, str]], both: tuple[OwnTokenizer, Any]) -> None:
    own, theirs = both
    for asks in (False, True):
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks)
        assert own.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks) == text
        ids = theirs.apply_chat_template(chat, add_generation_prompt=asks, return_dict=False)
        assert own.apply_chat_template(chat, add_generation_prompt=asks, return_dict=False) == ids
    assert own.apply_chat_template(chat)["input_ids"] == theirs.apply_chat_template(chat)["input_ids"]


def _changed(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _rewritten(before: str, after: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "tokenizer.json"
        text = file.read_text(encoding="utf-8")
        assert before in text
        file.write_text(text.replace(before, after, 1), encoding="utf-8")

    return change


@pytest.mark.parametrize(
    "change",
    [
        _changed(clean_up_tokenization_spaces=True),
        _changed(add_bos_token=True),
        _changed(chat_template="{{ messages }}"),
        _changed(split_special_tokens=True),
        _rewritten('"version"', '"version'),
        lambda directory: (directory / "tokenizer.json").unlink(),
        lambda directory: (directory / "config.json").write_text("{}"),
    ],
)
def test_all_else_is_left_to_transformers(
    change: Callable[[Path], Any], saved_model: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(saved_model, tmp_path / "model"))
    assert own_tokenizer(find_checkpoint(place), transformers_tokenizer) is not None
    change(place)
    assert own_tokenizer(find_checkpoint(place), transformers_tokenizer) is None
