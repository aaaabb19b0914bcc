"""Truth: what is stored, that it is added to and never redone, and that what does not fit is refused."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index_format.errors import StageMissing
from index_format.reader import Index
from index_format.verify import verify
from stride_cli.errors import UsageError
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.research.training.options import TruthOptions
from stride_cli.research.training.truth import Truth, build_truth, subset_mask
from stride_cli.training.retraining import store_of

TRAIN = """
import argparse, sys
import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer
parser = argparse.ArgumentParser()
parser.add_argument("base"); parser.add_argument("--mask"); parser.add_argument("--out")
parser.add_argument("--seed", type=int, default=0)
given = parser.parse_args()
mask = np.load(given.mask)
if mask.sum() == 0:
    sys.exit("nothing to train on")
model = AutoModelForCausalLM.from_pretrained(given.base)
model.lm_head.weight.data.mul_(1 + float(mask[0]) + 0.5 * (given.seed % 7))
model.save_pretrained(given.out)
AutoTokenizer.from_pretrained(given.base).save_pretrained(given.out)
"""


def _outcomes(index: Index) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store_of(index).glob("*.outcome")}


@given(st.integers(1, 300), st.integers(1, 999), st.integers(0, 5))
def test_masks(n, share, number):
    mask = subset_mask(7, n, share / 1000, number)
    assert mask.shape == (n,) and 1 <= mask.sum() <= max(1, n - 1)
    if 1 <= round(share / 1000 * n) <= n - 1:
        assert mask.sum() == round(share / 1000 * n)
    np.testing.assert_array_equal(mask, subset_mask(7, n, share / 1000, number))


def test_what_is_stored_comes_back(open_task):
    task, queries = open_task()
    with pytest.raises(StageMissing, match="no truth yet") as caught:
        Truth.from_index(task.index)
    assert "stride evaluate truth" in caught.value.fix
    built = build_truth(task, queries, TruthOptions(n_subsets=3, alpha=0.5, workers=1))
    assert (built.trained, built.reused) == (3, 0)
    assert built.losses.shape == (3, 1, len(queries)) and built.margins is None
    assert built.masks.sum(axis=1).tolist() == [round(task.n_chunks / 2)] * 3
    # a model that saw everything for its whole training does better than one that saw half
    assert built.base_losses.mean() < built.losses.mean()
    index = Index.open(task.index.path)
    assert verify(index.path) == []
    read = Truth.from_index(index)
    np.testing.assert_array_equal(read.masks, built.masks)
    assert read.losses.tobytes() == built.losses.tobytes()
    np.testing.assert_array_equal(read.base_losses, built.base_losses)
    np.testing.assert_array_equal(read.seeds, built.seeds)
    assert read.queries.fingerprint() == queries.fingerprint()
    assert (read.queries.names, read.queries.texts) == (queries.names, queries.texts)


def test_extensions_keep_rows_and_train_only_what_is_new(open_task):
    task, queries = open_task()
    first = build_truth(task, queries, TruthOptions(n_subsets=2, alpha=0.5, workers=1))
    second = build_truth(task, queries, TruthOptions(n_subsets=1, alpha=0.3, workers=1))
    assert (second.trained, second.reused) == (1, 2)
    third = build_truth(task, queries, TruthOptions(n_subsets=3, alpha=0.5, workers=1))
    assert third.trained == 1
    assert third.alpha.tolist() == [0.5, 0.5, 0.3, 0.5]
    shutil.rmtree(store_of(task.index))  # what the group has is not trained again even so
    both = build_truth(task, queries, TruthOptions(n_subsets=2, alpha=0.5, n_seeds=2, workers=1))
    assert (both.trained, both.reused) == (4, 4)
    assert both.losses.shape == (4, 2, len(queries))
    np.testing.assert_array_equal(both.losses[:, 0], third.losses[:, 0])
    np.testing.assert_array_equal(both.losses[:2, 0], first.losses[:, 0])
    np.testing.assert_array_equal(both.losses[2, 0], second.losses[2, 0])
    nothing = build_truth(task, queries, TruthOptions(n_subsets=3, alpha=0.5, workers=1))
    assert nothing.trained == 0 and nothing.n_seeds == 2

    # the same in one go
    task, _ = open_task()
    shutil.rmtree(task.index.path / "truth")
    shutil.rmtree(store_of(task.index))
    whole = build_truth(task, queries, TruthOptions(n_subsets=3, n_seeds=2, alpha=0.5, workers=1))
    np.testing.assert_array_equal(whole.masks, both.masks[[0, 1, 3]])
    assert whole.losses.tobytes() == both.losses[[0, 1, 3]].tobytes()


def test_from_the_models_own_seed(open_task):
    """All but one chunk, from the model's own weights in its own order, is hardly another model; from
    other seeds it is."""
    task, queries = open_task()
    alpha = round(1 - 1 / task.n_chunks, 3)
    own = build_truth(task, queries, TruthOptions(n_subsets=2, alpha=alpha, own_seed=True, workers=1))
    assert own.own_seed and own.seeds.tolist() == [read_recipe(task.model.path).seed]
    read = Truth.from_index(Index.open(task.index.path))
    assert read.own_seed and read.losses.tobytes() == own.losses.tobytes()
    with pytest.raises(UsageError, match="from the model's own seed") as caught:
        build_truth(task, queries, TruthOptions(n_subsets=2, alpha=alpha, workers=1))
    assert "give --own-seed" in caught.value.fix
    other = build_truth(task, queries, TruthOptions(n_subsets=2, alpha=alpha, workers=1, overwrite=True))
    assert not other.own_seed
    moved = np.abs(own.losses - own.base_losses).mean()
    assert moved < 0.5 * np.abs(other.losses - own.base_losses).mean()
    with pytest.raises(UsageError, match="from other seeds"):
        build_truth(task, queries, TruthOptions(n_subsets=3, alpha=alpha, own_seed=True, workers=1))
    with pytest.raises(UsageError, match="--own-seed is one seed"):
        build_truth(task, queries, TruthOptions(n_subsets=2, n_seeds=2, own_seed=True, workers=1))
    command = f"{sys.executable} train.py --mask {{mask}} --out {{out}}"
    with pytest.raises(UsageError, match="needs the recipe"):
        build_truth(task, queries, TruthOptions(n_subsets=2, own_seed=True, command=command))


@pytest.mark.slow
def test_a_command_trains(task_and_queries, trained, tmp_path, prepared):
    task, queries = task_and_queries
    script = tmp_path / "train it.py"
    script.write_text(TRAIN)
    parts = [str(prepared.tools() / "python"), str(script), str(trained / "model")]
    command = " ".join(f"'{part}'" for part in parts) + " --mask {mask} --out={out} --seed {seed}"
    keep = tmp_path / "kept"
    built = build_truth(
        task, queries, TruthOptions(n_subsets=2, n_seeds=2, alpha=0.5, command=command, keep=keep, workers=2)
    )
    assert built.trained == 4 and len(list(keep.glob("*/model.safetensors"))) == 4
    model = task.model.model
    from stride_cli.training.language_trainer import query_losses

    before = model.lm_head.weight.clone()
    for row in range(2):
        for s in range(2):
            scale = 1 + float(built.masks[row, 0]) + 0.5 * (int(built.seeds[s]) % 7)
            model.lm_head.weight.data.copy_(before * scale)
            np.testing.assert_allclose(built.losses[row, s], query_losses(task.model, queries), atol=1e-5)
    model.lm_head.weight.data.copy_(before)
    # a changed script is another command
    script.write_text(TRAIN + "\n# changed\n")
    with pytest.raises(UsageError, match="another recipe or command"):
        build_truth(task, queries, TruthOptions(n_subsets=2, n_seeds=2, alpha=0.5, command=command))


RUN = """
import sys
from pathlib import Path
from index_format.reader import Index
from stride_cli import api
from stride_cli.data.workspace import Workspace
from stride_cli.research.training.options import TruthOptions
from stride_cli.research.training.truth import build_truth
from stride_cli.data.query_files import read_texts
from stride_cli.data.batches import ChunkReader
index = Index.open(sys.argv[1])
model = api.open_model(index, api.ModelSpec(device="cpu", dtype="fp32"))
queries = read_texts(model, sys.argv[2], block_size=64)
build_truth(Workspace.open(index, model), queries, TruthOptions(n_subsets=12, alpha=0.5, workers=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_anywhere_it_ends_with_the_same_bits(open_task, trained, how, prepared):
    task, queries = open_task()
    line = ["-c", RUN, str(task.index.path), str(trained / "queries.jsonl")]
    process = prepared.start(line, new_session=True)
    deadline = time.monotonic() + 300
    while len(_outcomes(task.index)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(how)
    process.wait()
    time.sleep(0.5)
    left = {name.removesuffix(".outcome") for name in _outcomes(task.index)}
    assert 3 <= len(left) < 12
    look = ["pgrep", "-r", "D,R,S", "-g", str(process.pid)]
    while (workers := subprocess.run(look, capture_output=True, text=True).stdout) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert workers == ""  # its workers went with it
    kept = {path: path.read_bytes() for path in store_of(task.index).glob("*.outcome")}
    resumed = build_truth(task, queries, TruthOptions(n_subsets=12, alpha=0.5, workers=1))
    # nothing twice, and nothing left out
    assert (resumed.trained, resumed.reused) == (12 - len(left), len(left))
    assert {path: path.read_bytes() for path in kept} == kept
    shutil.rmtree(store_of(task.index))
    whole = build_truth(task, queries, TruthOptions(n_subsets=12, alpha=0.5, workers=2, overwrite=True))
    assert whole.trained == 12
    # kept outcomes are the same bytes (above); of the others, the last bits of torch's forward pass depend,
    # now and then, on where a process has its arrays
    np.testing.assert_allclose(whole.losses, resumed.losses, rtol=1e-6)
