"""What the base of a fine-tuned model says of tokens: recorded, given, gone, of another; in the index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from index_format.reader import Index
from stride_cli import api
from stride_cli.corpus.build import append_to_index
from stride_cli.data.batches import BEFORE, packed, unpacked
from stride_cli.errors import UsageError
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.tokenizer import load_tokenizer
from stride_cli.models.loading import load_model
from stride_cli.models.spec import ModelSpec
from stride_cli.training.dry_run import FirstChunks
from stride_cli.training.finetuning import finetune_model
from stride_cli.training.options import FinetuneOptions

QUICK = {"rank": 4, "buckets": 32, "project": 48, "batch_tokens": 256}


@pytest.fixture(scope="module")
def tuned(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, pairs.jsonl, model/ (two steps on the pairs), run.stride without operators."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(trained / "model", folder / "base")
    lines = (trained / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:24]
    texts = [json.loads(line) for line in lines]
    pairs = [{"id": t["id"], "prompt": t["text"][:20], "response": t["text"][20:90]} for t in texts]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = FinetuneOptions(steps=2, lr=1e-2, device="cpu", dtype="fp32")
    finetune_model([str(folder / "pairs.jsonl")], str(folder / "base"), folder / "model", options)
    api.build_index([str(folder / "pairs.jsonl")], out=folder / "run.stride", model=str(folder / "model"))
    return folder


@pytest.fixture
def own(tuned: Path, tmp_path: Path) -> Path:
    """The same, to be changed; the recipe still names the first base."""
    return Path(shutil.copytree(tuned, tmp_path / "own"))


def fit(index: Path, **options) -> dict:
    return dict(
        api.fit_index(
            index, api.ClosedOptions(**QUICK, **options), model=ModelSpec(device="cpu", dtype="fp32")
        )
    )


def test_it_is_asked_once_and_kept(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    index = own / "run.stride"
    fit(index)
    assert "before its fine-tuning" not in capfd.readouterr().err
    opened = Index.open(index)
    codes = np.asarray(opened.array(BEFORE))
    assert opened.group_attributes("operators")["averaged"] is True and len(codes) == opened.n_tokens
    np.testing.assert_array_equal(FirstChunks(opened, 2).before, codes)  # as a dry run reads it
    # by hand, of one response
    base = load_model(ModelSpec(own / "base", device="cpu"))
    session = api.Session.open(index)
    ids, weights = session.workspace.chunks.chunk(3)
    logits = base.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    p = logits.softmax(-1)[np.arange(len(ids) - 1), ids[1:].astype(np.int64)].detach().numpy()
    start = int(session.workspace.chunks.offsets[3])
    found = unpacked(codes[start + 1 : start + len(ids)])
    np.testing.assert_array_equal(packed(found), packed(np.where(weights[1:] > 0, 1 - p, 1.0)))
    # an answer reads by it, and is that of the direct readout of the whole corpus
    answer = session.query(api.as_query(session.model, "Nairobi", response=" is the capital"))
    assert answer.to_record()["read"] == 24
    # documents that come later count as the usual token, until they are projected and after
    (own / "more.jsonl").write_text('{"id": "new", "prompt": "Nairobi", "response": " is the capital"}\n')
    tokenizer = load_tokenizer(own / "model")
    append_to_index(
        index,
        [str(own / "more.jsonl")],
        tokenizer=tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
    )
    chunks = api.Session.open(index).workspace.chunks
    scored = np.concatenate([chunks.chunk(row)[1] for row in range(24)]) > 0
    usual = unpacked(codes)[scored].mean()
    np.testing.assert_allclose(chunks.batch(np.array([24])).before[0], usual, rtol=0.02)
    assert fit(index)["projected"] == 25 and len(Index.open(index).array(BEFORE)) == len(codes)
    assert api.Session.open(index).query(api.as_query(session.model, "Nairobi")).supporters


def test_without_it_tokens_count_as_if_nothing_had_been_known(
    own: Path, tuned: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    index = own / "run.stride"
    recipe = json.loads((own / "model/stride_recipe.json").read_text())
    moved = {**recipe, "base": str(own / "gone")}
    (own / "model/stride_recipe.json").write_text(json.dumps(moved))
    fit(index)
    assert "gone', cannot be read: there is no model" in " ".join(capfd.readouterr().err.split())
    assert not Index.open(index).has(BEFORE)
    given = Path(shutil.copytree(tuned / "run.stride", own / "given.stride"))
    fit(given, base=str(own / "base"))
    assert Index.open(given).has(BEFORE)
    last = Path(shutil.copytree(tuned / "run.stride", own / "last.stride"))
    with pytest.raises(UsageError, match="at the training's end"):
        fit(last, residuals="final", base=str(own / "base"))
    fit(last, residuals="final")
    attributes = Index.open(last).group_attributes("operators")
    assert attributes["averaged"] is False and not Index.open(last).has(BEFORE)
