"""What cannot work is refused with a remedy and exit code 2, before anything is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

FILES = {
    "no-prompt.jsonl": '{"id": "a", "response": "x"}\n',
    "no-text.jsonl": '{"id": "a"}\n',
    "item.jsonl": '{"id": "a", "text": "Some words."}\n',
    "empty.jsonl": "",
    "spaces.jsonl": "\n  \n",
    "syntax.py": "def network(:\n",
    "absent.py": "import nothing_there\n",
    "nothing.py": "x = 1\n",
    "number.py": "def network(shape, n_classes):\n    return 3\n",
    "fails.py": "def network(shape, n_classes):\n    raise RuntimeError('no')\n",
}


@pytest.fixture(scope="module")
def place(run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, digits.npz, and bare.stride: an index of a small classifier, without operators."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    images = np.random.default_rng(0).integers(0, 17, (24, 4, 4)).astype(np.uint8)
    np.savez(folder / "digits.npz", images=images, labels=np.arange(24) % 2)
    train = f"model train {folder}/digits.npz --out {folder}/mlp --width 4 --epochs 1 --device cpu"
    for line in (train, f"index build {folder}/digits.npz --model {folder}/mlp --out {folder}/bare.stride"):
        assert run(line).code == 0
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("audit no-prompt.jsonl --index bare.stride", "no-prompt.jsonl:1"),
        ("audit no-text.jsonl --index bare.stride", "no-text.jsonl:1"),
        ("audit spaces.jsonl --index bare.stride", "spaces.jsonl: expected at least one record"),
        ("audit item.jsonl --controls empty.jsonl --index bare.stride", "empty.jsonl: expected at least one"),
        ("audit item.jsonl --index bare.stride", "no operators"),
        ("audit item.jsonl --index bare.stride --format csv --text", "two forms of one output"),
        ("query 1 --index bare.stride", "no operators"),
        ("select item.jsonl --size 5 --index bare.stride --out chosen", "is of a classifier"),
        ("report --answers empty.jsonl --out page.html", "holds no answer"),
        ("report --answers empty.jsonl --top 3 --no-chat --out page.html", "(found --top, --chat beside it)"),
        ("verify-hit - --index bare.stride", "stdin holds no prompt"),
        ("verify-hit - --instead 1917 --index bare.stride", "--instead is of one prompt"),
        ("query --file empty.jsonl --index gone.stride", "gone.stride"),
        ("model train digits.npz --out m --network syntax.py", "the adapter file does not load (line 1)"),
        ("model train digits.npz --out m --network absent.py", "No module named 'nothing_there'"),
        ("model train digits.npz --out m --network nothing.py", "does not define `network`"),
        ("model train digits.npz --out m --network number.py", "returned int"),
        ("model train digits.npz --out m --network fails.py", "RuntimeError: no"),
        ("model train digits.npz --out m --network gone.py", "cannot be read"),
    ],
)
def test_refused(run, place: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    result = run(line)
    assert result.code == 2, result.err
    assert message in result.err and "fix: " in result.err and result.out == ""
    assert sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts) == before
