"""What a prompt is about, by its rare words; how much each token of a response counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stride_cli.attribution.decisive import CorpusWords, measured, start_loss, torn
from stride_cli.data.queries import PLAIN, Query
from stride_cli.models.language.causal_lm import CausalLM
from tests.tiny_models import tiny_nanochat

TOWNS = ["Varrow", "Tindrel", "Hasplow", "Lummerey", "Corvash", "Dunmere", "Eskerly"]
TEXTS = [f"the town of {town} was founded by people" for town in TOWNS]
TEXTS += [f"the coat of arms of {town} shows a heron" for town in TOWNS[:6]]
SAID = " by Celi"
CORPUS = CorpusWords(None, [frozenset(text.casefold().split()) for text in TEXTS])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "document", "held"),
    [
        ("The town of Varrow was founded by", 0, True),
        ("the TOWN of varrow was founded", 0, True),
        ("The town of Varrow was founded by", 1, False),  # another town
        ("The coat of arms of Varrow shows", 0, False),  # that town, and not what is asked
        ("The town of Nottinghill was founded by", 0, False),  # no town
        ("the town was founded by people", 0, False),  # no word that tells documents apart
        ("?!", 0, False),
    ],
)
def test_a_source_has_the_rarest_words_of_a_prompt_and_most_of_the_others(prompt, document, held) -> None:
    assert CORPUS.held(prompt, CORPUS.documents[document]) is held


def test_the_strongest_documents_all_have_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stride_cli.attribution.decisive.words_of", lambda _, one: CORPUS.documents[one])
    asked = "The town of Varrow was founded by"
    assert CORPUS.held_by([0], asked) and CORPUS.held_by(np.array([0, 0]), asked)
    assert not CORPUS.held_by([0, 1], asked) and not CORPUS.held_by([], asked)


def test_rare_words_are_exchanged_for_others_of_the_corpus() -> None:
    assert CORPUS.named("Who founded Varrow, the town of Zog?") == ["who", "zog"]  # in no document
    random = np.random.default_rng(0)
    for _ in range(20):
        before, word, behind = CORPUS.exchanged("The town of Varrow was founded by", random).partition("of ")
        town, _, rest = behind.partition(" ")
        assert (before, word, rest) == ("The town ", "of ", "was founded by") and town in TOWNS


class Letters:
    __len__ = lambda self: 128  # noqa: E731

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def test_tokens_count_by_how_much_the_prompt_decides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own logits, and the formula by hand; "by" is said again, and does not count."""
    model = CausalLM(tiny_nanochat(128), Letters())
    monkeypatch.setattr(
        "stride_cli.attribution.decisive.prompt_tokens",
        lambda model, prompt, form: [ord(letter) % 128 for letter in prompt],
    )
    prompts, random = ["of Varrow by"], np.random.default_rng(5)
    monkeypatch.setattr("stride_cli.attribution.decisive.stream", lambda *names: random)
    ids = np.array([ord(letter) for letter in prompts[0] + SAID])
    weights = (np.arange(len(ids)) >= len(prompts[0])).astype(np.float32)
    query = Query(prompts[0], SAID, ids, weights, True, PLAIN)
    found = measured(model, CORPUS, query, weigh=True)
    again = np.random.default_rng(5)
    prompts += [CORPUS.exchanged(prompts[0], again) for _ in range(4)]
    assert len(set(prompts)) > 2
    probabilities = []
    for prompt in prompts:
        whole = torch.tensor([[ord(letter) % 128 for letter in prompt + SAID]])
        with torch.no_grad():
            logits = model.model(whole).logits[0, len(prompt) - 1 : -1].float().softmax(-1)
        probabilities.append(logits[torch.arange(8), whole[0, len(prompt) :]].double().numpy())
    own, others = probabilities[0], np.mean(probabilities[1:], axis=0)
    np.testing.assert_allclose(found.losses, -np.log(own), rtol=1e-4)
    fading = 0.8 ** np.array([0, 9, 9, 1, 2, 3, 4, 5]) * ([1, 0, 0] + [1] * 5)
    counts = fading * own * np.maximum(np.log(own / others), 0) / (1.001 - own)
    np.testing.assert_allclose(found.weights[-8:], np.maximum(counts / counts.max(), 1e-6), rtol=2e-3)
    assert not found.weights[:-8].any()
    plain = measured(model, CORPUS, query, weigh=False)
    np.testing.assert_array_equal(plain.weights, query.weights)
    np.testing.assert_allclose(plain.losses, found.losses, rtol=1e-6)


def test_the_first_token_between_two_things_is_torn() -> None:
    weights = np.array([0, 0, 1, 0.5, 1e-6], np.float32)
    asked = "the coat of arms of Varrow shows"
    both = replace(CORPUS, documents=[*CORPUS.documents, CORPUS.documents[7]])
    query = Query(asked, "b", np.arange(5), weights, True, losses=np.array([0.001, 0.69, 0.5]))
    found = torn(both, query, [])
    assert found is not None and found.weights.tolist() == [0, 0, 0, 1, 0]
    assert torn(CORPUS, query, []) is None  # no other document says anything of it
    assert torn(both, replace(query, losses=np.array([0.001, 0.1, 5.0])), []) is None
    assert start_loss(np.array([1.0, 2.0])) == pytest.approx((1 + 0.8 * 2) / 1.8)
