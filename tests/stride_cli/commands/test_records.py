"""Every command in turn: what it prints, `stride schema` describes; what it says on stderr is ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_app import commands

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
DEMO = ROOT / "stride_cli" / "demo" / "corpus.jsonl"
TINY = "--layers 2 --width 32 --heads 2 --vocab 512 --context 128 --epochs 2 --batch-tokens 512 --device cpu"
ASKED = "--index run.stride --queries queries.jsonl"
SELECTED = "--model model --queries queries.jsonl --seeds 1 --batch-tokens 256 --max-new-tokens 2"

# in the order in which a person needs them; a new command is added here, with a small line of its own
LINES = (
    ("model train", f"corpus.jsonl --out model {TINY}", ["stride.model/1"]),
    ("model train", "digits.npz --out mlp --width 4 --rows 20 --epochs 1", ["stride.classifier/1"]),
    ("model finetune", "more.jsonl --model model --out tuned --steps 1 --device cpu", ["stride.model/1"]),
    ("model info", "model", ["stride.model_info/1"]),
    ("model info", "mlp", ["stride.model_info/1"]),
    ("index plan", "--chunks 1000", ["stride.index_plan/1"]),
    ("index plan", "corpus.jsonl --model model", ["stride.index_plan/1"]),
    ("index build", "corpus.jsonl --model model", ["stride.index/1"]),
    ("index build", "--from-run model --out again.stride", ["stride.index/1"]),
    *(
        ("index build", f"corpus.jsonl --model model --range {i}/2 --out {i}.stride", ["stride.index/1"])
        for i in (1, 2)
    ),
    ("index merge", "1.stride 2.stride --out merged.stride", ["stride.index/1"]),
    ("index build", "digits.npz --model mlp --out mlp.stride", ["stride.index/1"]),
    ("index info", "run.stride", ["stride.index_info/1"]),
    ("train", "--index run.stride --device cpu --dry-run", ["stride.train_estimate/1"]),
    ("train", "--index run.stride --device cpu", ["stride.train/1"]),
    ("train", "--index mlp.stride --device cpu", ["stride.train/1"]),
    ("index info", "run.stride", ["stride.index_info/1"]),
    ("calibrate", "--index run.stride --nulls 40", ["stride.calibration/1"]),
    ("query", "'The French' --bottom 2 --verbose --index run.stride", ["stride.answer/1"]),
    ("ask", "corpus.jsonl 'The French' --index run.stride", ["stride.answer/1"]),
    ("query", "3 --bottom 2 --index mlp.stride", ["stride.answer/1"]),
    ("query", "'The French' --response x --show-tokens --index run.stride", ["stride.query_tokens/1"]),
    ("report", "'The French' --index run.stride", ["stride.report/1"]),
    ("audit", "queries.jsonl --index run.stride", ["stride.audit/2"] * 3),
    ("select", "queries.jsonl --index run.stride --size 4", ["stride.selection/1"]),
    ("evaluate selection", f"selection {SELECTED}", ["stride.selection_score/1"] * 4),
    ("evaluate truth", f"{ASKED} --subsets 3 --workers 1", ["stride.truth/1"]),
    ("evaluate lds", "--index run.stride --methods tfidf,chance --draws 100", ["stride.lds/1"] * 2),
    (
        "evaluate compare",
        "--index run.stride --methods tfidf,chance --draws 100",
        ["stride.comparison/1"] * 2,
    ),
    ("evaluate distribution", f"{ASKED} --method chance", ["stride.distribution/1"]),
    (
        "evaluate causes",
        "--index run.stride --queries causes.jsonl --methods tfidf,chance",
        [*["stride.cause_ranks/1"] * 2, *["stride.causes/1"] * 2],
    ),
    ("baseline", "--list", ["stride.method/1"]),
    ("baseline", f"tfidf {ASKED} --top 2", ["stride.ranking/1"] * 3),
    ("index append", "more.jsonl --index run.stride", ["stride.index/1"]),
    ("index show", "--tokens --index mlp.stride", ["stride.index_document/1"] * 10),
    ("index verify", "run.stride", ["stride.index_verify/1"]),
    ("config show", "", ["stride.setting/1"]),
)
ELSEWHERE = {
    "serve",  # test_serve.py; it writes none
    *("demo", "schema"),  # minutes long, in tests/test_readme.py; the schemas themselves
    # train models again and again: their own tests run them, where conftest.py looks at every record
    *("evaluate tail-patch", "evaluate removal", "evaluate loo", "tune", "verify-hit"),
}


def test_no_command_is_left_out() -> None:
    assert {command for command, _, _ in LINES} | ELSEWHERE == set(commands())


# runs command lines one after the other, then ends as a command does; what our own code writes to stderr, by
# itself or through rich, is put between \x02 and \x03
ALL = r"""
import contextlib, io, json, os, shlex, sys
from stride_cli.__main__ import main

def package(frame):
    return frame.f_globals["__name__"].partition(".")[0]

class Marked(io.TextIOBase):
    def write(self, text):
        frame = sys._getframe(1)
        while frame.f_back and package(frame) in ("rich", "typer", "contextlib"):
            frame = frame.f_back
        ours = package(frame) in ("stride_cli", "index_format")
        os.write(2, (f"\x02{text}\x03" if ours else text).encode())
        return len(text)

sys.stderr = Marked()
for line in json.loads(sys.stdin.read()):
    sys.argv, out, code = ["stride", *shlex.split(line)], io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps({"line": line, "code": code, "out": out.getvalue()}), flush=True)
    os.write(2, f"\x04{line}\n".encode())
"""


def test_every_record_is_as_described(run, tmp_path: Path) -> None:
    """And no library's warning, leak report or progress bar is among what commands say on stderr."""
    import numpy as np
    from jsonschema import Draft202012Validator

    documents = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()[:33]]
    for name, chosen in (("corpus", documents[:30]), ("queries", documents[:3]), ("more", documents[30:])):
        rows = [{"id": document["id"], "text": document["text"][:160]} for document in chosen]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    asked = {"id": "a", "prompt": "The French", "response": "Revolution", "causes": [documents[0]["id"]]}
    (tmp_path / "causes.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    random = np.random.default_rng(0)
    images = random.integers(0, 17, (24, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "digits.npz", images=images, labels=np.arange(24) % 3)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-c", ALL],
        input=json.dumps([f"{command} {line}" for command, line, _ in LINES]),
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(results) == len(LINES), done.stderr
    described = {schema["title"]: schema for schema in run("schema").records}
    for (command, _, expected), result in zip(LINES, results, strict=True):
        assert not result["code"], f"stride {result['line']}\n{done.stderr}"
        records = [json.loads(line) for line in result["out"].splitlines()]
        found = [record["schema"] for record in records]
        assert found[: len(expected)] == expected and set(found) == set(expected), command
        for record in records:
            Draft202012Validator(described[record["schema"]]).validate(record)
    assert "\x02" in done.stderr  # ours are marked
    foreign = [re.sub("\x02[^\x03]*\x03", "", part) for part in done.stderr.split("\x04")]
    said = {part.partition("\n")[2].strip() for part in ["\n" + foreign[0], *foreign[1:]]}
    assert said == {""}
