"""`stride serve` on a small real run: what it answers, whom it refuses, and `stride query` that asks it."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from stride_cli.attribution.options import QueryOptions
from stride_cli.data.workspace import WorkspacePath
from stride_cli.models.spec import ModelSpec
from stride_cli.recovery.problem import dense as solutions_dense
from stride_cli.schema import json_schema
from stride_cli.serve.options import LARGEST_BODY, ServeOptions
from stride_cli.serve.running import Server, kept_secret
from stride_cli.serve.views import verbatim_runs
from tests.prepared import Prepared

pytest.importorskip("starlette", reason="the extra serve is not installed")
testclient = pytest.importorskip("starlette.testclient", reason="httpx is not installed")

PROMPT = "The French Revolution began in"
TOKEN = "a-token-of-tests-0123456789"


@contextmanager
def serving(index: Path) -> Iterator[Server]:
    """One that listens, in a thread."""
    opened = Server([WorkspacePath(index)], ServeOptions(port=0, token=TOKEN))
    listening = threading.Event()
    thread = threading.Thread(target=opened.run, kwargs={"started": listening.set})
    thread.start()
    assert listening.wait(60)
    yield opened
    opened.stop()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(workspace: Path) -> Iterator[Server]:
    with serving(workspace / "run.stride") as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return testclient.TestClient(
        server.app,
        base_url=f"http://127.0.0.1:{server.address.port}",
        headers={"Authorization": f"Bearer {TOKEN}"},
        raise_server_exceptions=False,
    )


def post(client: Any, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code in (200, 202), answer.text
    record = answer.json()
    Draft202012Validator(json_schema(record["schema"])).validate(record)
    return record


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same answer, but for the last digits."""
    assert one["response"] == other["response"]
    assert [hit["document"] for hit in one["hits"]] == [hit["document"] for hit in other["hits"]]
    strengths = [[hit["influence"] for hit in each["hits"]] for each in (one, other)]
    assert strengths[0] == pytest.approx(strengths[1], rel=1e-4, abs=1e-4)


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


@pytest.mark.parametrize(
    "flags, body",
    [
        ("--response 1789 --bottom 2", {"response": "1789", "bottom": 2}),
        ("--read 0 --lambda-ratio 0.1", {"read": 0, "lambda_ratio": 0.1}),
    ],
)
def test_the_answer_is_the_record_that_stride_query_prints(
    run: Callable[..., Any], client: Any, workspace: Path, flags: str, body: dict[str, Any]
) -> None:
    line = f'query "{PROMPT}" --json --index {workspace}/run.stride {flags}'
    (printed,) = run(line).records
    exactly = post(client, "/query", prompt=PROMPT, **body)
    assert without_times(exactly) == without_times(printed)
    assert list(exactly) == list(printed)


def test_a_response_is_compared_with_another(client: Any) -> None:
    asked = {"prompt": "The French Revolution began in", "response": "1789"}
    found = client.post("/query", json={**asked, "instead": "1917"}).json()
    assert found["instead"] == " 1917" and found["comparison"]["probability"] > 0.5
    assert "instead" not in client.post("/query", json=asked).json()  # which is another question
    wrong = client.post("/tokens", json={**asked, "instead": "1917"})
    assert wrong.status_code == 400 and "comparison" in wrong.json()["message"]


def test_several_prompts_come_back_as_lines_in_order(client: Any) -> None:
    given = {"prompt": "Rome was", "response": "built"}
    prompts = [{"prompt": PROMPT, "id": "a"}, "", given, {"id": 7}, "\0"]
    answer = client.post("/query", json={"prompts": prompts, "top": 2})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    records = [json.loads(line) for line in answer.text.splitlines()]
    for record in records:
        Draft202012Validator(json_schema(record["schema"])).validate(record)
    kinds = [record["schema"].split("/")[0].removeprefix("stride.") for record in records]
    assert kinds == ["answer", "bad_input", "answer", "bad_input", "bad_input"]
    assert [record.get("id") for record in records] == ["a", None, None, "7", None]
    assert [record.get("line") for record in records] == [None, 2, None, 4, 5]
    single = post(client, "/query", prompt=PROMPT, top=2)
    assert_alike(records[0], single)


def test_influences_on_tokens_add_up_to_those_on_the_response(client: Any, server: Server) -> None:
    found = post(client, "/tokens", prompt=PROMPT, top=5)
    answer = post(client, "/query", prompt=PROMPT, top=5)
    assert "".join(piece["text"] for piece in found["pieces"]) == found["response"] == answer["response"]
    rows, whole = np.array(found["influence"]), np.array(found["whole"])
    sizes = len(found["losses"]), whole.size
    assert rows.shape == (answer["scored_tokens"], len(found["documents"])) == sizes
    assert np.mean(found["losses"]) == pytest.approx(answer["loss"], rel=1e-4)
    scale = np.abs(whole).max()
    np.testing.assert_allclose(rows.sum(axis=0), whole, atol=1e-4 * scale)
    assert np.abs(rows).max() > 0.1 * scale
    assert found["documents"][:5] == [hit["document"] for hit in answer["hits"]]
    # what every chunk has by its own gradient, asked of the whole response and not made smaller
    index = server.service.shelf.find(None)
    assert index.record(QueryOptions(read=7))["reads"] == 7  # as the server was told
    session = index.session()
    options = QueryOptions(read=session.index.n_chunks, shrink=False, redundancy=0.0)
    (dense,) = solutions_dense([session.query(PROMPT, options).solution])
    for document, influence in zip(found["documents"], found["whole"], strict=True):
        chunks = session.index.document_chunks(*index.numbers([document]))
        if len(chunks) == 1:
            assert influence == pytest.approx(dense[chunks[0]], abs=1e-4 * scale)


def test_a_document_comes_whole_with_what_it_shares_and_what_of_it_matters(
    client: Any, workspace: Path
) -> None:
    listed = (workspace / "corpus.jsonl").read_text().splitlines()
    texts = {record["id"]: record["text"] for record in map(json.loads, listed)}
    name = "history/french-revolution"
    answer = post(client, "/query", prompt=PROMPT, response="1789")
    beside = post(client, "/document", prompt=PROMPT, response="1789", document=name)
    assert beside["text"] == texts[name] and beside["stored"]
    longest = max(beside["overlaps"], key=lambda each: each["words"])
    assert beside["text"][longest["start"] : longest["stop"]] == "The French Revolution began in 1789"
    hit = next(hit for hit in answer["hits"] if hit["document"] == name)
    assert beside["influence"] == pytest.approx(hit["influence"], rel=1e-3)
    assert beside["influence"] == pytest.approx(sum(chunk["influence"] for chunk in beside["chunks"]))
    (chunk, *_) = beside["chunks"]
    start, stop = chunk["carries"]
    assert 0 <= start < stop <= len(chunk["text"]) and 0 < chunk["held"] <= 1


def test_an_answer_is_saved_as_page_table_and_record(client: Any) -> None:
    saved = {
        form: client.post("/export", json={"prompt": PROMPT, "format": form, "top": 3})
        for form in ("html", "csv", "json")
    }
    for form, answer in saved.items():
        assert answer.status_code == 200
        assert f"answer.{form}" in answer.headers["content-disposition"]
    record = json.loads(saved["json"].text)
    rows = list(csv.DictReader(io.StringIO(saved["csv"].text)))
    assert [row["document"] for row in rows] == [hit["document"] for hit in record["hits"]]
    page = saved["html"].text
    assert page.startswith("<!doctype html>") and record["hits"][0]["document"] in page
    asked = {"prompt": PROMPT, "format": "html", "chat": False, "read": 3, "lambda_ratio": 0.2}
    page = client.post("/export", json=asked).text
    assert "began in&#x27; --no-chat --top 10 --bottom 0 --read 3 --lambda-ratio 0.2 --index" in page
    page = client.post("/export", json={**asked, "response": "1789", "span": "1789"}).text
    assert "<dt>made</dt>" in page and "<dt>again</dt>" not in page  # `stride report` has no --span


@pytest.mark.parametrize(
    "body, status, message",
    [
        (b"", 400, "no JSON"),
        (b"[1]", 400, "a list"),
        (b'{"prompt": NaN}', 400, "no JSON number"),
        (b"\xff", 400, "not UTF-8"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b"{}", 422, "give 'prompt'"),
        (b'{"prompt": ""}', 422, "empty"),
        (b'{"prompt": 3}', 422, "a number"),
        (b'{"prompt": "a\\u0000"}', 422, "NUL"),
        (b'{"prompt": "\\ud800"}', 422, "surrogate"),
        (b'{"prompt": "a", "prompts": ["b"]}', 422, "one of them"),
        (b'{"prompts": []}', 400, "a list of 0"),
        (b'{"prompt": "a", "tpo": 3}', 400, "'tpo'"),
        (b'{"prompt": "a", "top": "3"}', 400, "'top' is a string"),
        (b'{"prompt": "a", "top": -3}', 400, "'top' is -3"),
        (b'{"prompt": "a", "top": true}', 400, "'top' is true or false"),
        (b'{"prompt": "a", "lambda_ratio": 1e999}', 400, "'lambda_ratio' is inf"),
        (b'{"prompt": "a", "passages": "all"}', 400, "carrying, like or none"),
        (b'{"prompt": "a", "span": "b", "response": "c"}', 422, "not in the response"),
        (b'{"prompt": "a", "index": "other"}', 404, "no index 'other'"),
        (b'{"prompt": "' + b"a " * 2000 + b'", "response": "b"}', 422, "context"),
    ],
)
def test_what_is_wrong_with_a_request_is_told(client: Any, body: bytes, status: int, message: str) -> None:
    answer = client.post("/query", content=body, headers={"Content-Type": "application/json"})
    told = answer.json()
    Draft202012Validator(json_schema("stride.error/1")).validate(told)
    assert answer.status_code == status and message in told["message"] and told["fix"], told


@pytest.mark.parametrize(
    "path, body, status, message",
    [
        ("/tokens", {"prompts": ["a"]}, 400, "expected 'prompt'"),
        ("/document", {"prompt": "a"}, 400, "there is no 'document'"),
        ("/document", {"prompt": "a", "document": "none"}, 404, "no document 'none'"),
        ("/export", {"prompt": "a", "format": "pdf"}, 400, "html, csv or json"),
        ("/verify", {"prompt": "a", "documents": []}, 400, "no list of ids"),
        ("/verify", {"prompt": "a", "documents": ["none"]}, 404, "no document"),
        ("/verify", {"prompt": "a", "seeds": 0}, 400, "'seeds' is 0"),
        ("/verify", {"prompt": "a", "command": "rm"}, 400, "no key 'command'"),
        ("/nothing", {}, 404, "no such address"),
        ("/indexes", {}, 405, "no such method"),
    ],
)
def test_what_is_wrong_elsewhere_is_told_too(
    client: Any, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status and message in answer.json()["message"], answer.text
    assert client.get("/verify/none").status_code == 404


def test_a_defect_is_told_in_a_line_and_in_full_on_stderr(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("stride_cli.serve.app.document_record", broken)
    answer = client.post("/document", json={"prompt": "a", "document": "history/french-revolution"})
    assert answer.status_code == 500 and "Traceback" not in answer.text
    assert answer.json()["kind"] == "InternalError" and "by zero" in answer.json()["message"]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "headers, status",
    [
        *[({"Authorization": each}, 401) for each in ("", "Bearer wrong", f"Basic {TOKEN}", "Bearer \u00e9")],
        *[({"Host": each}, 421) for each in ("", "127.0.0.1", "127.0.0.1:99999", "evil.example")],
        *[({"Host": each}, 421) for each in ("evil.example:{port}", "127.0.0.1:{port}@evil.example")],
        *[
            ({"Origin": each}, 403)
            for each in ("", "null", "http://evil.example", "https://127.0.0.1:{port}")
        ],
        *[({"Sec-Fetch-Site": each}, 403) for each in ("cross-site", "same-site")],
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, 403),
        ({"Host": "localhost:{port}"}, 200),
        ({"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_who_may_ask(client: Any, server: Server, headers: dict[str, str], status: int) -> None:
    given = {name: value.replace("{port}", str(server.address.port)) for name, value in headers.items()}
    raw = {name: value.encode("utf-8") for name, value in given.items()}
    answer = client.get("/indexes", headers=raw)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["schema"] == "stride.error/1" and answer.json()["fix"]
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_a_link_lets_one_browser_in_and_addresses_hold_no_secret(client: Any, server: Server) -> None:
    bare, address = {"Authorization": ""}, server.address
    opened = client.get("/", headers=bare)
    assert opened.status_code == 200 and TOKEN not in opened.text + address.url
    assert client.get("/indexes", params={"token": TOKEN}, headers=bare).status_code == 401
    link = address.link()
    # a link may be followed from elsewhere; the page is shown in no frame
    linked = bare | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}
    framed = bare | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}
    assert TOKEN not in link and client.get(link, headers=framed).status_code == 403
    first = client.get(link, headers=linked, follow_redirects=False)
    assert first.status_code == 303 and first.headers["location"] == "/"
    cookie, *told = first.headers["set-cookie"].split("; ")
    assert cookie == f"stride-{address.port}={TOKEN}" and {"HttpOnly", "SameSite=Strict"} <= {*told}
    again = client.get(link, headers=linked, follow_redirects=False)
    assert "set-cookie" not in again.headers  # it is used up
    client.cookies.clear()
    for held, status in ((cookie, 200), (f"a=b; {cookie}", 200), (f"stride-1={TOKEN}", 401)):
        assert client.get("/indexes", headers=bare | {"Cookie": held}).status_code == status
    (index,) = client.get("/indexes").json()["indexes"]
    assert len(index["questions"]) == 3 and all(index["questions"])


def test_the_secret_is_kept_over_a_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept = kept_secret()
    assert kept_secret() == kept and len(kept) >= 32
    (folder,) = tmp_path.glob("*/secrets")
    assert folder.stat().st_mode & 0o77 == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert kept_secret() != kept


def test_the_page_may_do_nothing_else(client: Any) -> None:
    bare = {"Authorization": ""}
    opened = client.get("/", headers=bare)
    policy = opened.headers["content-security-policy"]
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for part in ("style=", "<style", "onclick", "http://", "https://"):
        assert part not in opened.text
    for name in ("page.js", "page.css", "icon.svg"):
        part = client.get(f"/{name}", headers=bare)
        assert part.status_code == 200 and name in opened.text
        assert "http://" not in part.text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in client.get("/page.js").text


def test_a_body_that_is_too_large_is_cut_off(client: Any) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(LARGEST_BODY >> 16):
            yield b"a" * (1 << 16)
        yield b'"}'

    answer = client.post("/query", content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "expected at most 1,048,576" in answer.json()["message"]
    plain = client.post("/query", content=b"{}", headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415


def test_an_index_that_changes_is_opened_again(
    client: Any, server: Server, workspace: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run.stride"
    shutil.copytree(workspace / "run.stride", copy)
    from stride_cli.serve.indexes import ServedIndex

    index = ServedIndex("run.stride", WorkspacePath(copy, ModelSpec(str(workspace / "model"))))
    first = index.session()
    assert index.session() is first and first.calibration is not None
    shutil.rmtree(copy / "calibration")
    assert index.session() is not first and index.session().calibration is None


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(
    workspace: Path, tmp_path: Path, prepared: Prepared
) -> None:
    import signal
    import urllib.request

    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, -15)):
        line = ["stride", "serve", str(workspace / "run.stride"), "--port", "0"]
        reading, writing = os.pipe()
        with os.fdopen(reading) as stderr, (tmp_path / "out").open("w+") as stdout:
            process = prepared.start(line, env=environment, stdout=stdout, stderr=writing)
            os.close(writing)
            assert "opening" in stderr.readline()
            told = stderr.readline()
            url = told.split()[2]
            assert url.startswith("http://127.0.0.1:") and "Ctrl-C" in told
            with urllib.request.urlopen(url) as page:
                assert b"Which training documents" in page.read()
            process.send_signal(number)
            rest = stderr.read()
            assert process.wait(20) == code and stdout.read() == ""
            used, *others = rest.splitlines()  # another link for another browser
            assert "?once=" in used and others == ["interrupted"] * (number == signal.SIGINT)


@pytest.mark.slow
def test_a_verification_runs_beside_and_is_told_as_it_goes_on(
    run: Callable[..., Any], trained: Path, tmp_path: Path
) -> None:
    """Real training, in a process of its own; one that is cancelled ends, and what it trained is kept."""
    import httpx

    place = Path(shutil.copytree(trained, tmp_path / "own"))
    index, lines = place / "run.stride", (place / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    every = [json.loads(line)["id"] for line in lines]
    assert run(f"train --index {index} --no-calibration").code == 0
    small = Server([WorkspacePath(index)], ServeOptions(port=0, token=TOKEN))
    thread = threading.Thread(target=small.run)
    thread.start()
    base = f"http://127.0.0.1:{small.address.port}"
    asked = {"prompt": PROMPT, "documents": every[:1], "seeds": 2, "random": 1}
    with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120) as client:
        try:
            job = client.post("/verify", json=asked).json()
            assert job["state"] == "running"
            assert client.post("/verify", json=asked).status_code == 409
            assert client.post("/query", json={"prompt": PROMPT, "read": 0}).status_code == 200  # meanwhile
            events = _events(client, job["id"])
            kinds = [kind for kind, _ in events]
            assert kinds[0] == "progress" and kinds[-2:] == ["result", "end"], events[-2:]
            counts = [record["done"] for kind, record in events if kind == "progress"]
            assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 6
            result = events[-2][1]
            Draft202012Validator(json_schema("stride.verify_hit/1")).validate(result)
            assert result["documents"][0]["document"] == every[0]
            assert result["trained"] == 6
            compared = {"response": "1789", "instead": "1917", "seeds": 100, "random": 8}
            more = client.post("/verify", json={**asked, **compared}).json()
            with client.stream("GET", f"/verify/{more['id']}") as lines:
                assert any('"message": "retraining"' in line for line in lines.iter_lines())
            begun = time.monotonic()
            ended = client.delete(f"/verify/{more['id']}").json()
            assert ended["state"] == "cancelled" and time.monotonic() - begun < 15
            assert _events(client, more["id"])[-1][1]["state"] == "cancelled"
            # there are not as many others
            bad = client.post("/verify", json={"prompt": PROMPT, "documents": every}).json()
            kind, told = _events(client, bad["id"])[-2]
            assert kind == "error" and f"removing {len(every)} documents" in told["message"] and told["fix"]
        finally:
            small.stop()
            thread.join(20)


def _events(client: Any, name: str) -> list[tuple[str, Any]]:
    text = client.get(f"/verify/{name}").text
    pairs = [event.split("\n") for event in text.strip().split("\n\n")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in pairs]


def test_verbatim_runs_are_the_longest_that_say_something() -> None:
    text = "In 1789 the French Revolution began. It was the start; the Revolution, began in Paris."
    runs = verbatim_runs(text, "The french revolution began in 1789")
    found = [("In 1789", 2), ("the French Revolution began", 4), ("Revolution, began in", 3)]
    assert [(text[start:stop], count) for start, stop, count in runs] == found
    assert verbatim_runs("the of and", "the of and") == [] == verbatim_runs("", "a") == verbatim_runs("a", "")
    generator = np.random.default_rng(0)
    for _ in range(200):  # against the definition
        document = generator.choice(list("abc"), 12).tolist()
        asked = generator.choice(list("abc"), 6).tolist()
        joined = " ".join(asked)
        for start, stop, count in verbatim_runs(" ".join(document), joined):
            run = " ".join(document)[start:stop]
            assert run in joined and count == len(run.split())
