#!/usr/bin/env bash
# Some chat templates print today's date, so that the same messages are other tokens tomorrow.
#
# Versions: transformers 5.24.0, tokenizers 0.23.3, jinja2 3.1.6.
# Behaviour: transformers gives every template a function strftime_now, which reads the machine's clock. Templates of
# Llama 3.1, Granite and SmolLM3 call it. apply_chat_template has no argument that fixes the time.
# Surprise: tokenisation of a fixed corpus by a fixed tokenizer is expected to be a function of both. Two builds of one
# corpus on two days differ in the system turn of every conversation, and a query differs from what training saw.
# A function of that name, given as a keyword, ends in a TypeError.
# Way round: put a macro of that name, which prints the date of the training, before the template.
# Seen: "Today Date: 01 Jan 2025, Today Date: 02 Jan 2025; with a macro: Today Date: 26 Jul 2024 on both"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import datetime
from unittest import mock

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

own = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
own.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]")
tokenizer.chat_template = (
    "Today Date: {{ strftime_now('%d %b %Y') }}\n{% for message in messages %}{{ message.content }}{% endfor %}"
)
messages = [{"role": "user", "content": "Hello"}]


def on(day, template, **given):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2025, 1, day)

    with mock.patch.object(chat_template_utils, "datetime", Clock):
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **given).splitlines()[0]


template = tokenizer.chat_template
first, second = on(1, template), on(2, template)
try:
    refused = on(1, template, strftime_now=lambda form: "26 Jul 2024")
except TypeError as error:
    refused = error
macro = "{%- macro strftime_now(form) -%}26 Jul 2024{%- endmacro -%}" + template
fixed = {on(1, macro), on(2, macro)}
print(f"{first}, {second}; by keyword: {refused!r}; with a macro: {', '.join(fixed)} on both")
assert first != second and isinstance(refused, TypeError) and fixed == {"Today Date: 26 Jul 2024"}
PYTHON
