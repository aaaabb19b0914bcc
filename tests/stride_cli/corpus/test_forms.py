"""Which text and which of its tokens training saw; against transformers' own templates and masks."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.documents import Document
from stride_cli.corpus.forms import Form, joiner, template_of
from stride_cli.corpus.readers import Fields, ReadOptions, read_documents
from stride_cli.data.queries import build_queries
from stride_cli.data.query_files import prompt_texts
from stride_cli.errors import CorpusError, QueryError

HIDES = (  # as Qwen3's: the reasoning of earlier turns is left out
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>\n{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}{% for call in m['tool_calls'] %}<tool_call>{{ call | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}"
    " {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def scored(tokenizer: Any, form: Form | None = None, **document: Any) -> tuple[str, str]:
    """The text of a document, and what of it is scored."""
    (found,) = DocumentTokenizer(tokenizer, block_size=512, form=form).encode_batch(
        [Document("d", **document)]
    )
    return tokenizer.decode(found.tokens), tokenizer.decode(found.tokens[found.scored])


@pytest.mark.parametrize(
    ("prompt", "response", "between"),
    [
        ("The capital of Torvia is", "Sotra.", " "),
        ("It began in", "1789", " "),
        ("Who founded it?", "Dunstan", " "),
        ("托维国的首都是", "索特拉", ""),
        ("เมืองหลวง", "คือ", ""),
        ("result=compute_alpha(", "delta_value)", ""),
        ("compute_", "gamma(", ""),
        ("The capital of Torvia is ", "Sotra.", ""),
        ("The capital of Torvia is", " Sotra.", ""),
        ("17", "89", ""),
    ],
)
def test_a_space_stands_only_between_words_of_scripts_that_have_spaces(
    make_tokenizer: Any, prompt: str, response: str, between: str
) -> None:
    assert joiner(prompt, response) == between
    tokenizer = make_tokenizer()
    text, answer = scored(tokenizer, Form(), prompt=prompt, response=response)
    whole = tokenizer(prompt + between + response, add_special_tokens=False)["input_ids"]
    assert text == "<s>" + tokenizer.decode(whole)
    # the token that holds the boundary is the answer's
    assert answer.endswith(response) and text == "<s>" + tokenizer.decode(whole)
    assert (prompt + between + response).endswith(answer)


TURNS = (
    said("user", "a"),
    said("assistant", "<think>\nParis\n</think>\n\nis it"),
    said("user", "b"),
    said("assistant", "<think>\nwas\n</think>\n\nWater"),
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


@pytest.mark.parametrize(
    ("template", "messages", "answers"),
    [
        (HIDES, TURNS, "is it<|im_end|><think>\nwas\n</think>\n\nWater<|im_end|>"),
        (MARKS, (said("user", "a"), said("assistant", "Paris")), "Paris<|im_end|>\n"),
        (LLAMA2, (said("user", "a"), said("assistant", "Paris")), " Paris </s>"),
        (MARKS, (said("assistant", "b", weight=0), said("assistant", "Paris")), "Paris<|im_end|>\n"),
        (TOOLS, (said("assistant", "b", train=False), said("assistant", "c")), "c<|im_end|>"),
        (TOOLS, (said("user", "a", loss=True), said("assistant", "c", loss=False)), "a<|im_end|>"),
        (TOOLS, (said("user", "a"), said("assistant", "", tool_calls=[CALL]), said("tool", "12")),
         f"<tool_call>{json.dumps(CALL)}</tool_call><|im_end|>"),
    ],
)  # fmt: skip
def test_answers_are_what_the_template_left_of_them(
    make_tokenizer: Any, template: str, messages: tuple, answers: str
) -> None:
    tokenizer = make_tokenizer(chat_template=template)
    text, found = scored(
        tokenizer, messages=messages, template={"tools": [CALL]} if "tools" in template else None
    )
    assert found.strip() == answers.strip()
    options = {"tools": [CALL]} if "tools" in template else {}
    whole = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    assert ("<s>" + whole).startswith(text)
    if "generation %" in template and not any("weight" in each for each in messages):
        right = tokenizer.apply_chat_template(
            list(messages), return_assistant_tokens_mask=True, return_dict=True
        )
        (mine,) = DocumentTokenizer(tokenizer, block_size=512).encode_batch([Document("", messages=messages)])
        assert mine.scored[1:].tolist() == [bool(bit) for bit in right["assistant_masks"]]


def published_templates() -> list[Path]:
    """Chat templates of some forty model families, as TRL carries them; none where it is not installed."""
    found = importlib.util.find_spec("trl")
    places = (found and found.submodule_search_locations) or []
    return [file for place in places for file in sorted(Path(place, "chat_templates").glob("*.jinja"))]


TALKS = {
    "plain": (said("user", "a"), said("assistant", "Paris"), said("user", "is"), said("assistant", "Water")),
    "thinking": TURNS,
    "tools": (said("user", "a"), said("assistant", "", tool_calls=[CALL]), said("tool", "12", name="weather"),
              said("assistant", "Paris")),
}  # fmt: skip


@pytest.mark.parametrize("file", published_templates(), ids=lambda file: file.stem)
def test_published_templates_are_followed(make_tokenizer: Any, file: Path) -> None:
    """Tokens are those that transformers renders, and masks its own where the template marks answers."""
    tokenizer = make_tokenizer(chat_template=file.read_text(encoding="utf-8"))
    special = ["<|eot_id|>", "<|start_header_id|>", "<end_of_turn>", "<|end|>", "<|call|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    form = Form.choose(tokenizer)
    template = template_of(tokenizer, form)
    for name, talk in TALKS.items():
        try:
            whole = tokenizer.apply_chat_template(
                list(talk), chat_template=template, return_dict=True,
                return_assistant_tokens_mask=re.search(r"{%-?\s*generation", template) is not None,
            )  # fmt: skip
        except Exception:
            continue  # it takes no such conversation
        if re.match("idefics|llava|smolvlm", file.stem):  # of pictures: contents are lists of parts
            continue
        (found,) = DocumentTokenizer(tokenizer, block_size=512, form=form).encode_batch(
            [Document("d", messages=talk)]
        )
        ids, first = whole["input_ids"], int(whole["input_ids"][0] != tokenizer.bos_token_id)
        assert found.tokens[first:].tolist() == ids[: len(found.tokens) - first], name
        if "assistant_masks" in whole:
            mask = [bool(bit) for bit in whole["assistant_masks"]]
            assert found.scored[first:].tolist() == mask[: len(found.tokens) - first], name
            assert not any(mask[len(found.tokens) - first :]), name
        else:
            said_last = tokenizer.decode(found.tokens[found.scored])
            assert talk[-1]["content"].split("</think>")[-1].strip() in said_last, name


def test_templates_are_told_a_fixed_date(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(chat_template="{{ strftime_now('%Y') }}{{ messages[0]['content'] }}is")
    form = Form.choose(tokenizer)
    assert form.clock == "2024-07-26T00:00:00"
    pair = {"prompt": "a", "response": "is"}
    assert scored(tokenizer, form, messages=(said("assistant", "a"),))[0].startswith("<s>2024")
    other = Form("chat", clock="1999-01-01T00:00:00")
    assert scored(tokenizer, other, messages=(said("assistant", "a"),))[0].startswith("<s>1999")
    assert form.fingerprint != other.fingerprint
    assert scored(tokenizer, Form("text"), **pair) == ("<s>a is", "a is")


def test_a_document_that_the_template_refuses_is_kept_unscored_where_bad_ones_are_skipped(
    make_tokenizer: Any, capsys: pytest.CaptureFixture
) -> None:
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('no') }}")
    cutter = DocumentTokenizer(tokenizer, block_size=64, skip=True)
    (found,) = cutter.encode_batch([Document("d", prompt="What", response="Paris")])
    assert not found.scored.any() and len(found.tokens) > 2
    assert "refuses document 'd'" in capsys.readouterr().err


def test_a_token_that_the_model_lacks_is_refused_where_it_occurs(make_tokenizer: Any) -> None:
    from stride_cli.models.language.structure import check_vocabulary

    tokenizer = make_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    check_vocabulary(tokenizer, size)
    cutter = DocumentTokenizer(tokenizer, block_size=64, vocabulary=size)
    assert len(cutter.encode_batch([Document("a", text="Paris")])) == 1
    with pytest.raises(CorpusError, match=r"document 'b' has the token '\[PAD\]'"):
        cutter.encode_batch([Document("b", text="Paris[PAD]")])


def test_fields_in_objects_and_fields_that_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"id": "a", "meta": {"text": "Paris"}, "respnse": "b"}) + "\n")
    (found,) = read_documents([str(path)], ReadOptions(fields=Fields(text="meta.text")))
    assert found.text == "Paris"
    assert "'respnse' of 1 records is not read (is 'response' meant?)" in capsys.readouterr().err


def test_prompts_have_keys_that_are_known_or_are_refused() -> None:
    turns = [said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c")]
    assert prompt_texts({"messages": turns})["prompt"] == "s\na\nb\nc"
    for record, meant in (({"prompt": "a", "completion": "b"}, "response"), ({"promt": "a"}, "prompt")):
        with pytest.raises(QueryError, match=f"is '{meant}' meant"):
            prompt_texts(record)
    assert prompt_texts({"prompt": "a", "response": "b", "answer": "c"}) == {"prompt": "a", "response": "b"}
    with pytest.raises(QueryError, match="content"):
        prompt_texts({"messages": [{"role": "user"}]})


def test_a_later_turn_is_asked_about_as_its_conversation_has_it(make_tokenizer: Any, chatml: str) -> None:
    tokenizer = make_tokenizer(chat_template=chatml)
    turns = [said("system", "a"), said("user", "a"), said("assistant", "Water"), said("user", "is")]
    model: Any = SimpleNamespace(tokenizer=tokenizer, context_length=99, generate_each=lambda prompts, n: [])
    (query,) = build_queries(
        model, [{"prompt": "is", "messages": turns, "response": "Paris"}], form=Form("chat")
    )
    assert not isinstance(query, Exception)
    whole = tokenizer.apply_chat_template([*turns, said("assistant", "Paris")], return_dict=False)
    assert query.ids.tolist() == [tokenizer.bos_token_id, *whole][: len(query.ids)]
    assert tokenizer.decode(query.ids[query.weights > 0]) == "Paris"


def test_scripts_without_spaces_have_words(make_tokenizer: Any) -> None:
    from stride_cli.characters import words
    from stride_cli.models.language.bpe import train_bpe

    assert words("The a capital, 首都是索 x 是") == ["The", "capital", "首都", "都是", "是索", "是"]
    texts = [f"托维国的首都是{name}。" for name in ("索特拉", "马林", "索林")] * 9
    tokens = train_bpe(texts, vocab_size=400, context_length=64)(texts[0], add_special_tokens=False)
    assert len(tokens["input_ids"]) == len(texts[0])


def test_conversations_that_datasets_saved_are_those_of_json_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    other = {"type": "function", "function": {"name": "f", "arguments": {"n": 1, "s": ["x"]}}}
    rows = [
        {
            "id": f"{n}",
            "messages": [said("user", "q"), said("assistant", "A" * n, tool_calls=[call])],
            "tools": [call],
        }
        for n, call in enumerate((CALL, other))
    ]
    lines = tmp_path / "c.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "k"))
    wanted = list(read_documents([str(lines)]))
    kinds = {"id": datasets.Value("string"), "tools": datasets.List(datasets.Json()),
             "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string"),
                                        "tool_calls": datasets.List(datasets.Json())})}  # fmt: skip
    saved = datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
    saved.save_to_disk(str(tmp_path / "saved"))
    saved.to_parquet(str(tmp_path / "saved.parquet"))
    for source in ("saved", "saved.parquet"):
        found = list(read_documents([str(tmp_path / source)]))
        assert [each.messages for each in found] == [each.messages for each in wanted]
        assert [each.template for each in found] == [each.template for each in wanted]
        np.testing.assert_array_equal([each.digest() for each in found], [each.digest() for each in wanted])
