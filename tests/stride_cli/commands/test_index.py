"""`stride index` as a user meets it: exit codes, stdout and stderr apart, nothing half-made left."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.prepared import Prepared

from .conftest import Outcome

WORDS = ["Water", "boils", "at", "one", "hundred", "degrees", "and", "Paris", "is", "in", "France", "now"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory as save_pretrained writes it; its weights are only ever hashed here."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("checkpoint") / "model"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(path)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": np.zeros((300, 8), np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture
def here(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `model` and a corpus of 40 documents."""
    (tmp_path / "model").symlink_to(checkpoint)
    (tmp_path / "corpus.jsonl").write_text(corpus(40))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def corpus(count: int, *, seed: int = 0) -> str:
    rng = random.Random(seed)
    records = (
        {"id": f"{seed}-{n}", "text": " ".join(rng.choices(WORDS, k=rng.randint(3, 120)))}
        for n in range(count)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_build_info_verify(here: Path, run: Callable[..., Outcome]) -> None:
    built = run("index build corpus.jsonl --model model")
    assert built.code == 0
    (record,) = built.records
    assert record["index"] == "run.stride" and record["documents"] == 40
    assert record["block_size"] == 64  # the model's context: shorter than the default
    assert record["subsets"] == min(record["chunks"], 64) > 40 and record["degree"] == 10
    assert record["bytes"] == sum(len(data) for data in contents(here / "run.stride").values())
    assert built.err == "next: stride train --index run.stride\n"
    own = {key: value for key, value in record.items() if key not in ("schema", "seconds")}
    for command in ("index info", "index info run.stride", "STRIDE_GENERAL_INDEX=run.stride index info"):
        (info,) = run(command).records
        assert own.items() <= info.items() and info["operators"] is None and info["model_path"] == "../model"
    brief, full = run("index info --text").out, run("index info --text --verbose").out
    assert len(brief.splitlines()) <= 17 < len(full.splitlines()) and "none: stride train" in brief
    whole, told = run("index verify"), {"schema": "stride.index_verify/1", "index": "run.stride"}
    assert whole.code == 0 and whole.records == [{**told, "whole": True, "stages": []}]
    assert names(here) == {"model", "corpus.jsonl", "run.stride"}


def test_append(here: Path, run: Callable[..., Outcome]) -> None:
    more = corpus(10, seed=1)
    assert run("index build corpus.jsonl --model model --subsets 20").code == 0
    appended = run("index append -", stdin=more)
    assert appended.code == 0, appended.err
    (record,) = appended.records
    assert record["documents"] == 50 and record["subsets"] == 20
    assert run("index verify").code == 0
    again = run("index append - --index run.stride", stdin=more)
    assert again.code == 2 and "first at the index that is appended to" in again.err
    shutil.copytree("model", "few")
    config = json.loads(Path("few/config.json").read_text())
    Path("few/config.json").write_text(json.dumps(config | {"vocab_size": 9}))
    refused = run("index append - --index run.stride --model few", stdin=corpus(1, seed=2))
    assert refused.code == 2 and "for which the model has no row" in refused.err


GOOD = b'{"id": "good", "text": "Water boils at one hundred degrees"}\n'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"id": "a", "text": "x"\n', "expected a JSON object"),
        (b'{"text": "x"}\n', "--number-ids"),
        (GOOD, "expected ids that differ, found id 'good' again, first at"),
        (b'{"id": "a", "text": "\xff"}\n', "expected UTF-8, found the byte 0xff"),
        (b'{"id": "a", "text": "' + b"x" * 17_000_000 + b'"}\n', "at most 16,777,216 bytes"),
        (b'{"id": "a", "body": "x"}\n', "--field text="),
    ],
    ids=["broken JSON", "missing id", "duplicate id", "not UTF-8", "long line", "no text"],
)
def test_bad_records(line: bytes, expected: str, here: Path, run: Callable[..., Outcome]) -> None:
    Path("bad.jsonl").write_bytes(GOOD + line)
    before = names(here)
    result = run("index build bad.jsonl --model model")
    assert result.code == 2 and result.out == "" and names(here) == before
    assert result.err.startswith("error: bad.jsonl:2: ")
    assert expected in result.err and "\n  fix: " in result.err
    skipped = run("index build bad.jsonl --model model --on-bad skip")
    assert skipped.code == 0 and skipped.records[0]["documents"] == 1


@pytest.mark.parametrize("command", ["build", "append", "plan", "info", "verify"])
def test_every_help_ends_in_an_example_that_runs(
    command: str, here: Path, run: Callable[..., Outcome]
) -> None:
    Path("more.jsonl").write_text(corpus(5, seed=1))
    Path("more.jsonl.gz").write_bytes(gzip.compress(corpus(5, seed=1).encode()))
    if command != "build":
        assert run("index build corpus.jsonl --model model --out run.stride").code == 0
    help = run(f"index {command} --help")
    assert help.code == 0
    examples = help.out.partition("Example:\n")[2].strip().splitlines()
    assert examples
    for example in examples:
        line, stdin = example.strip(), ""
        if "hf://" in line or "--from-run" in line:
            continue  # test_hub_index and test_callback run these
        if line.startswith("zcat "):
            packed, line = line.removeprefix("zcat ").split(" | ")
            stdin = gzip.decompress(Path(packed).read_bytes()).decode()
        assert line.startswith(f"stride index {command} ")
        result = run(line.removeprefix("stride "), stdin=stdin)
        assert result.code == 0, result.err
        assert result.records


def test_a_full_disk(here: Path, run: Callable[..., Outcome], small_disk: Callable[[str], Path]) -> None:
    """Told as such, nothing that looks whole, and the same command goes on once there is room."""
    small = small_disk("300k")
    Path("corpus.jsonl").write_text(corpus(1500))
    Path("corpus.jsonl.gz").write_bytes(gzip.compress(corpus(1500).encode()))  # which says less of its size
    command = "index build corpus.jsonl --model model --commit-seconds 0 --out"
    for source, said in (("corpus.jsonl", "needs about"), ("corpus.jsonl.gz", "no space left")):
        full = run(f"{command.replace('corpus.jsonl', source)} small/x.stride")
        assert full.code == 2 and full.out == "" and said in full.err and "\n  fix: free some" in full.err
        assert names(small) == ({"x.stride.partial"} if source.endswith(".gz") else set())
    small_disk("20m")
    assert run(f"{command} small/x.stride").code == 0
    (here / "large").mkdir()  # as deep: the index records where the model is from there
    assert run(f"{command} large/whole.stride").code == 0
    assert contents(small / "x.stride") == contents(here / "large" / "whole.stride")
    assert names(small) == {"x.stride"}


def test_what_is_planned_is_written(workspace: Path, run: Callable[..., Outcome]) -> None:
    (plan,) = run(f"index plan {workspace}/corpus.jsonl --model {workspace}/model").records
    (bare,) = run("index plan --chunks 60").records
    (sized,) = run(f"index plan --chunks 60 --model {workspace}/model").records
    assert sized["gate_dimension"] < bare["gate_dimension"] and plan["build_memory_bytes"] < 100e6
    written = {name: len(data) for name, data in contents(workspace / "run.stride").items()}
    fitted = sum(size for name, size in written.items() if name.startswith("operators/"))
    judged = sum(size for name, size in written.items() if name.startswith("calibration/"))
    assert plan["total_bytes"] == pytest.approx(sum(written.values()) - fitted - judged, rel=0.2)
    assert sum(plan[f"{of}_bytes"] for of in ("gate", "projection", "pass")) == pytest.approx(fitted, rel=0.2)


REMEDIES = {
    "--model corpus.jsonl --out x": ("is a file; expected a directory", "that save_pretrained wrote\n"),
    "--model model/config.json --out x": ("is a file; expected a", "save_pretrained wrote: model\n"),
    "--model fake.gguf --out x": ("'fake.gguf' cannot be loaded", "no GGUF: copy the file again"),
    "--model model --out corpus.jsonl/x": ("corpus.jsonl/x: cannot be written", "in a directory you may"),
    "--model model --out corpus.jsonl --overwrite": ("is no index, and is not over", "another path"),
}


def test_what_is_no_place_or_model_has_a_remedy(here: Path, run: Callable[..., Outcome]) -> None:
    Path("fake.gguf").write_text("GG")
    for given, (message, fix) in REMEDIES.items():
        refused = run(f"index build corpus.jsonl {given}")
        assert refused.code == 2 and message in refused.err and fix in refused.err.partition("fix: ")[2]
        assert names(here) == {"model", "corpus.jsonl", "fake.gguf"}
    assert run("index build corpus.jsonl --model model --out new/place/x.stride").code == 0  # it is made


@pytest.mark.slow
def test_interrupted_it_ends_quietly_and_can_be_resumed(here: Path, prepared: Prepared) -> None:
    Path("corpus.jsonl").write_text(corpus(20_000))
    line = "index build corpus.jsonl --model model --commit-seconds 0"
    command = ["stride", *line.split()]
    journal = Path("run.stride.partial/journal.jsonl")
    for _ in range(6):  # on a busy machine the signal may come too late, or while a library swallows it
        with Path("out").open("wb") as out, Path("err").open("wb") as err:
            process = prepared.start(command, stdout=out, stderr=err)
            while process.poll() is None and not (journal.exists() and b"commit" in journal.read_bytes()):
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            process.wait()
        if process.returncode == 130 and journal.exists():  # else: it was published just before
            break
        shutil.rmtree("run.stride", ignore_errors=True)
    assert (process.returncode, Path("out").read_bytes()) == (130, b"")
    assert Path("err").read_bytes() in (b"", b"interrupted\n")  # no traceback, no half-finished message
    assert journal.exists() and not Path("run.stride").exists()
    prepared.run(command, check=True)
    assert not journal.exists() and Path("run.stride").is_dir()


def killed_soon(
    prepared: Prepared, command: list[str], journal: Path, most: float, rng: random.Random
) -> bool:
    """Start a command, wait until it writes its journal, kill it within `most` seconds; whether it was."""
    before = journal.stat().st_mtime_ns if journal.exists() else None
    with Path("err").open("wb") as err:
        process = prepared.start(command, stderr=err)
        while process.poll() is None and not (journal.exists() and journal.stat().st_mtime_ns != before):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, most))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode in (0, -signal.SIGKILL), Path("err").read_text()
    return process.returncode != 0


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_is_bit_identical(here: Path, prepared: Prepared) -> None:
    """kill -9, eight times, wherever the build happens to be; each time the same command goes on."""
    Path("corpus.jsonl").write_text(corpus(6000))
    # commits as often as it can, so that kills fall between, in and after commits
    line = "index build corpus.jsonl --model model --commit-seconds 0 --out"
    command = ["stride", *line.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    prepared.run([*command, "whole"], check=True, env=environment)
    whole = contents(here / "whole")
    killed, journal = Path("killed"), Path("killed.partial/journal.jsonl")
    rng = random.Random(0)
    resumed = 0
    for _ in range(8):
        resumed += journal.exists()
        killed_soon(prepared, [*command, "killed"], journal, 0.2, rng)
        if killed.exists():  # there, hence whole; begin anew
            assert contents(killed) == whole
            shutil.rmtree(killed)
            shutil.rmtree(journal.parent, ignore_errors=True)
    assert resumed >= 4
    prepared.run([*command, "killed"], check=True, env=environment)
    assert contents(killed) == whole
    assert not journal.parent.exists()


def test_ranges_are_built_and_merged(here: Path, run: Callable[..., Outcome]) -> None:
    assert run("index build corpus.jsonl --model model --out whole").code == 0
    for number in (1, 2, 3):
        built = run(f"index build corpus.jsonl --model model --range {number}/3 --out part-{number}")
        assert built.code == 0, built.err
    merged = run("index merge part-3 part-1 part-2 --out merged")
    assert merged.code == 0 and "stride train --index merged" in merged.err
    (record,) = merged.records
    assert record["schema"] == "stride.index/1" and record["documents"] == 40
    ours, theirs = contents(here / "merged"), contents(here / "whole")
    arrays = {name for name in theirs if "/" in name}
    assert {name for name in ours if "/" in name} == arrays
    assert all(ours[name] == theirs[name] for name in arrays)
    assert run("index verify merged").code == 0
    lacking = run("index merge part-1 part-3 --out other")
    assert lacking.code == 3 and "2/3 lacking" in lacking.err and "--range 2/3" in lacking.err
    assert run("index build corpus.jsonl --model model --range 4/3 --out x").code == 2
    empty = run("index build corpus.jsonl --model model --range 999/1000 --out x")
    assert empty.code == 2 and "no" in empty.err and "fewer parts" in empty.err
    assert not list(here.glob("x*")) and not list(here.glob("other*"))


@pytest.mark.slow
def test_a_merge_that_is_killed_leaves_nothing_that_looks_whole(here: Path, prepared: Prepared) -> None:
    """kill -9 wherever the merge happens to be; the same command goes on."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for number in range(1, 5):
        Path(f"{number}.jsonl").write_text(corpus(1500, seed=number))
        line = f"index build {number}.jsonl --model model --out part-{number}"
        prepared.run(["stride", *line.split()], check=True, env=environment)
    line = "index build 1.jsonl 2.jsonl 3.jsonl 4.jsonl --model model --out whole"
    prepared.run(["stride", *line.split()], check=True, env=environment)
    line = "index merge part-1 part-2 part-3 part-4 --out merged"
    command = ["stride", *line.split()]
    journal, rng, killed = Path("merged.partial/journal.jsonl"), random.Random(1), 0
    for _ in range(6):
        killed += killed_soon(prepared, command, journal, 0.1, rng) and not Path("merged").exists()
        if Path("merged").exists():
            break
    assert killed >= 1
    if not Path("merged").exists():
        prepared.run(command, check=True, env=environment)
    ours, theirs = contents(here / "merged"), contents(here / "whole")
    assert all(ours[name] == theirs[name] for name in theirs if "/" in name)
    assert not journal.parent.exists()
