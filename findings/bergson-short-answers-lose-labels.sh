#!/usr/bin/env bash
# bergson scores the mark of a chat template instead of a short answer whose letters the mark contains.
#
# Versions: bergson 2.5.1, transformers 5.24.0, torch 2.13.0.
# Behaviour: an answer's tokens are found as the last place of its text in the rendered conversation. After the answer
# comes the template's end mark. "end" is inside "<|im_end|>", so the span is within that one token, and is empty.
# Surprise: no label is left, so the row's gradient is zero and it is never retrieved. The other rows are right, nothing is
# raised, and classification answers (a letter, "end", "turn", "text") are exactly those that marks contain.
# Way round: an answer with a mark of its own around it, or labels made beforehand from the template's mask.
# Seen: "answer 'start': 1 token with a label, answer 'end': 0"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate datasets jaxtyping ml_dtypes natsort \
    peft petname scipy simple-parsing torchopt
"$work/venv/bin/pip" install --quiet --no-deps bergson==2.5.1 # without its requirements for images, sound and 4 bits
cd "$work"
HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PYTHON'
from bergson.config.config import DataConfig
from bergson.data import tokenize
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "which", "start", "end"]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
)
fast.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
batch = {"prompt": ["which", "which"], "completion": ["start", "end"]}
columns = DataConfig(prompt_column="prompt", completion_column="completion")
rows = tokenize(batch, args=columns, tokenizer=fast)["labels"]
labelled = [[fast.convert_ids_to_tokens(label) for label in row if label >= 0] for row in rows]
print(f"answer 'start': {len(labelled[0])} token with a label, answer 'end': {len(labelled[1])}")
assert labelled == [["start"], []]
PYTHON
