"""What MkDocs is to make beside the pages of this folder: pages of the command line and of the records, the
files of the repository that are pages too, plots, and the files that pages link to.

Links of pages lead to files as they lie in the repository, so that they work there as well; here they are
turned to the page of that file, or to a copy of it under ``files/``.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urldefrag

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    "index_format/SPEC.md": "reference/format.md",
    "SECURITY.md": "security-policy.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "tests/benchmarks/results": "records.md",
    "examples/attribution.ipynb": "reference/notebook.md",
    "examples/habit.ipynb": "guides/habit.md",
    "examples/leak.ipynb": "guides/leak.md",
}
"""Files of the repository, and the page that each one is."""
UNSEARCHED = ("log.md", "records.md")
LINK = re.compile(r"(?<!`)(\]\()([^)\s]+)(\))")


def on_config(config: Any) -> Any:
    """One entry a command in the navigation, after the page of all commands."""
    for section in config["nav"]:
        for entries in section.values() if isinstance(section, dict) else ():
            if isinstance(entries, list) and "reference/commands.md" in entries:
                names = [{f"stride {name}": f"reference/cli-{name}.md"} for name in sorted(_root().commands)]
                entries.insert(entries.index("reference/commands.md") + 1, {"Options": names})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is made here, and what pages link to."""
    if str(ROOT) not in sys.path:  # mkdocs forgets what is added while this file is loaded
        sys.path.insert(0, str(ROOT))
    made = {"records.md": _records()}
    for source, page in PAGES.items():
        path = ROOT / source
        if path.is_file():
            made[page] = relinked(_page_of(path), source, page)
    made["reference/settings.md"], made["reference/schema.md"] = _settings_page(), _schema_page()
    made["reference/paper.md"] = relinked(_paper_page(), "docs/reference/paper.md", "reference/paper.md")
    for name, command in _root().commands.items():
        made[f"reference/cli-{name}.md"] = _command_page(command, f"stride {name}")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for place, drawing in _drawings().items():
        files.append(File.generated(config, place, content=drawing))
    for name in sorted(_linked(files, made)):
        files.append(File.generated(config, _copied(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links as they are on the site; the log and the records are not searched."""
    if page.file.src_uri in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    if page.file.generated_by:
        return markdown
    if page.file.src_uri == "reference/commands.md":
        markdown = markdown.replace("<!-- commands -->", _commands_table())
    if page.file.src_uri == "reference/api.md":
        markdown = _python_page()
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _page_of(path: Path) -> str:
    """A file as Markdown: of a notebook its cells, each with what it gave when it was stored."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if html := "".join(output.get("data", {}).get("text/html", [])):
                parts.append(" ".join(html.split("\n")))
            if text := "".join(output.get("text", [])):
                parts.append(f"```text\n{text}```")
    return "\n\n".join(parts) + "\n"


def relinked(text: str, source: str, page: str) -> str:
    """A text of the repository, at ``source`` there, with its links for ``page`` of the site."""

    def turned(match: re.Match[str]) -> str:
        target, anchor = urldefrag(match[2])
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        there = _within(source, target)
        if there.startswith("docs/"):
            uri = there.removeprefix("docs/")
        elif there.startswith("assets/"):
            uri = there
        else:
            uri = PAGES.get(there.rstrip("/"), _copied(there))
        relative = os.path.relpath(uri, PurePosixPath(page).parent)
        return f"{match[1]}{relative}{'#' + anchor if anchor else ''}{match[3]}"

    return LINK.sub(turned, text)


def _copied(name: str) -> str:
    """Where a file of the repository is copied to; hidden ones without their dot, which sites leave out."""
    return "files/" + "/".join(part.removeprefix(".") for part in name.split("/"))


def _within(source: str, target: str) -> str:
    """Where a relative link of a file leads, from the root of the repository."""
    return os.path.normpath(str(PurePosixPath(source).parent / target))


def _linked(files: Any, made: dict[str, str]) -> set[str]:
    """Files of the repository outside docs/ that pages link to, and that are no page."""
    texts = {f"docs/{each.src_uri}": each.content_string for each in files.documentation_pages()
             if each.src_uri not in made}  # fmt: skip
    texts |= {
        source: (ROOT / source).read_text(encoding="utf-8") for source in PAGES if (ROOT / source).is_file()
    }
    leads = {
        _within(name, urldefrag(link[2])[0]) for name, text in texts.items() for link in LINK.finditer(text)
    }
    leads |= {f"tests/benchmarks/results/{path}" for path in _record_files()}
    return {
        each for each in leads
        if (ROOT / each).is_file() and not each.startswith("docs/") and each not in PAGES
    }  # fmt: skip


def _drawings() -> dict[str, str]:
    from tests.benchmarks import _drawings, figures

    return {
        "assets/quality.svg": _drawings.quality(),
        "assets/nats.svg": _drawings.nats(figures.records("nats")),
    }


def _record_files() -> list[str]:
    from tests.benchmarks.figures import RESULTS

    return sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.jsonl"))


def _records() -> str:
    """The page of all records: the files, and every comparison that the suites hold."""
    from tests.benchmarks import figures

    parts = [
        "# Records\n\nEvery benchmark leaves one JSON line a measurement, with the machine and versions. "
        "These are all of them; the [results](results.md) say what they mean.\n\n## Files\n"
    ]
    parts += [f"- [{name}](files/tests/benchmarks/results/{name})" for name in _record_files()]
    for name in _record_files():
        suite = name.removeprefix("suites/").removesuffix(".jsonl")
        if name.startswith("suites/") and any(
            "spearman" in each for each in figures.records(f"suites/{suite}")
        ):
            about = figures.records(f"suites/{suite}")[0]
            parts.append(
                f"\n## Suite {suite}\n\n`{about['command']}`, n = {about['n']:,}. {about.get('note', '')}\n"
            )
            parts.append(figures.everything(suite))
    return "\n".join(parts)


def _root() -> Any:
    """The command line, as the parser has it."""
    from typer.main import get_command

    from stride_cli.commands.app import command_line

    return get_command(command_line())


def _command_page(command: Any, name: str) -> str:
    """A command and those below it: text, examples, and an anchor for each option."""
    parts = [f"# {name}", *_described(command, name)]
    for below, each in sorted(getattr(command, "commands", {}).items()):
        parts += [f"## {name} {below}", *_described(each, f"{name} {below}")]
    return "\n\n".join(parts) + "\n"


def _described(command: Any, name: str) -> list[str]:
    context = command.context_class(command, info_name=name)
    parts = [_plain(part) for part in inspect.cleandoc(command.help or "").replace("\b", "").split("\n\n")]
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    examples = [line.strip() for line in (command.epilog or "").splitlines()[1:] if line.strip()]
    parts.append("```text\n" + "\n".join([usage, *([""] if examples else []), *examples]) + "\n```")
    slug = name.removeprefix("stride").strip().replace(" ", "-") or "stride"
    for option in command.params:
        record = option.get_help_record(context)
        if record is None or option.name == "help":
            continue
        anchor = f"{slug}-{option.opts[0].strip('-')}"
        parts.append(f"#### `{record[0].split('  ')[0].strip()}` {{ #{anchor} }}\n\n{_plain(record[1])}")
    return parts


def _plain(text: str) -> str:
    """A text as it stands, for Markdown; what is between backticks stays code."""
    pieces = " ".join(text.split()).replace("``", "`").split("`")
    for at in range(0, len(pieces), 2):
        pieces[at] = re.sub(r"([*_\[\]|\\#])", r"\\\1", html.escape(pieces[at], quote=False))
    return "`".join(pieces)


def _commands_table() -> str:
    """Every command, with its short help."""
    from tests.benchmarks.figures import markdown

    rows = [["command", "what it does"]]
    for name, command in sorted(_root().commands.items()):
        below = sorted(getattr(command, "commands", {}))
        page = f"cli-{name}.md"
        shown = f"[stride {name}]({page})" + (f" {', '.join(below)}" if below else "")
        rows.append([shown, _plain(command.get_short_help_str(limit=200))])
    return markdown(rows)


def _paper_page() -> str:
    """For each table of the paper: what has a record on our models, and which command fills an empty cell."""
    from tests.benchmarks import figures

    parts = [
        "# The paper's tables",
        "What of each table has a record on the models of this project, and which commands fill an empty "
        "cell. METHOD is the one in the second column; WORK is what the script before has made. The last "
        "commands are for the paper's sizes, on a machine with a GPU; none of those has a record. Figures "
        "are LDS (Spearman) with the standard error over queries, loss, α = 0.5.",
    ]
    for entry in json.loads((ROOT / "docs/paper.json").read_text(encoding="utf-8")):
        parts += [f"## {entry['table']}", entry["about"]]
        suites, results = entry.get("suites", {}), "../../tests/benchmarks/results"
        if suites:
            heads = [f"[{heading}]({results}/{suite}.jsonl)" for heading, suite in suites.items()]
            rows = [["", "METHOD", *heads]]
            for label, specs in entry["methods"].items():
                for field in entry.get("field", ["spearman"]):
                    cells = [_measured(figures, specs, suite, field) for suite in suites.values()]
                    named = f"{label}: {field}" if "field" in entry else label
                    rows.append([named, f"`{specs[0]}`", *cells])
            parts.append(figures.markdown(rows))
        parts += [f"- [{what}]({results}/{name}.jsonl)" for what, name in entry.get("records", {}).items()]
        parts.append(
            "```sh\n" + "\n".join([*entry["fill"], "", "# at the paper's size", *entry["at_size"]]) + "\n```"
        )
    return "\n\n".join(parts) + "\n"


def _measured(figures: Any, specs: list[str], suite: str, field: str) -> str:
    """The record's mean ± standard error of the first of the methods that has one; empty without."""
    for spec in specs:
        for found in figures.pick(suite, method=spec)[:1]:
            return f"{figures.figure(found[field]['mean'])} ± {figures.figure(found[field]['se'])}"
    return ""


def _settings_page() -> str:
    """Every key of stride.yaml, with its variable."""
    from stride_cli.config import SECTIONS
    from tests.benchmarks.figures import markdown

    parts = [
        "# Settings",
        "A setting comes from `stride.yaml` in the working directory, then from a `STRIDE_*` variable, then "
        "from an option. The later wins; `stride config show` says which it was. Mistyped keys are errors.",
    ]
    for section, entries in SECTIONS.items():
        rows = [["key and variable", "default", "values", "meaning"]]
        for entry in entries.values():
            default = "chosen to fit" if entry.default in (None, ()) else f"`{entry.default}`"
            kinds = ", ".join(kind.__name__ for kind in entry.kinds if kind is not type(None))
            key, variable = f"{section}.{entry.name}", f"STRIDE_{section}_{entry.name}".upper()
            named = f'<a id="{section}-{entry.name}"></a>`{key}` `{variable}`'
            rows.append([named, default, _plain(entry.expected or kinds), _plain(entry.about.help)])
        parts += [f"## {section}", markdown(rows)]
    return "\n\n".join(parts) + "\n"


def _schema_page() -> str:
    """Every record on stdout, key by key."""
    from stride_cli.schema import json_schema, records
    from tests.benchmarks.figures import markdown

    parts = [
        "# Records",
        "What commands write to stdout: one JSON object a line. `stride schema NAME` prints the JSON Schema. "
        "A number that is not finite is null.",
    ]
    for name in records():
        schema = json_schema(name)
        rows = [["key", "type", "meaning"], *_keys(schema, "")]
        parts += [f"## {name}", _plain(schema.get("description", "")), markdown(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _keys(schema: dict[str, Any], above: str) -> list[list[str]]:
    rows = []
    for name, about in schema.get("properties", {}).items():
        either = [about, *about.get("anyOf", [])]
        inside: dict[str, Any] = next((each for each in either if {"properties", "items"} & set(each)), {})
        items = inside.get("items", inside)
        kind = about.get("type") or [each.get("type") for each in about.get("anyOf", [])]
        kind = ", ".join(str(each) for each in (kind if isinstance(kind, list) else [kind]) if each)
        rows.append([f"`{above}{name}`", kind, _plain(about.get("description", ""))])
        if isinstance(items, dict) and "properties" in items:
            rows += _keys(items, f"{above}{name}{'[]' if 'items' in inside else ''}.")
    return rows


def _python_page() -> str:
    """The Python interface: every name of `stride_cli.api`, with its signature and docstring."""
    from stride_cli import api

    functions = [name for name in api.__all__ if not inspect.isclass(getattr(api, name))]
    parts = [(ROOT / "docs/reference/api.md").read_text(encoding="utf-8").strip()]
    shown: list[Any] = []
    for name in [*functions, *(name for name in api.__all__ if name not in functions)]:
        found = getattr(api, name)
        if found in shown:  # another name of the same
            continue
        shown.append(found)
        parts += [f"## {name}", *_documented(found, name)]
        for method, inside in sorted(vars(found).items()) if inspect.isclass(found) else ():
            inside = getattr(inside, "__func__", getattr(inside, "fget", inside))
            if not method.startswith("_") and inspect.isfunction(inside) and inside.__doc__:
                parts += [f"### {name}.{method}", *_documented(inside, method)]
    return "\n\n".join(parts) + "\n"


def _documented(found: Any, name: str) -> list[str]:
    """A signature, and a docstring whose sections are lists of names."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # a union of classes
        return [f"```python\n{name} = {re.sub(r'[a-z_.]+[.]', '', str(found))}\n```"]
    given: list[str] = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(other.startswith("*") for other in given):
            given.append("*")
        if each.annotation is not each.empty:
            each = each.replace(annotation=_Shown(each.annotation))
        if each.name not in ("self", "cls"):
            given.append(re.sub(r"= <.*>", "= …", str(each)))
    back = signature.return_annotation
    ends = f") -> {back}" if isinstance(back, str) else ")"
    line = f"{name}({', '.join(given)}{ends}"
    if len(line) > 88:
        line = f"{name}(\n    " + ",\n    ".join(given) + f",\n{ends}"
    parts = [f"```python\n{line}\n```"]
    title = ""
    for block in _blocks(inspect.cleandoc(found.__doc__ or "")):
        if title := block.pop("title", ""):
            parts.append(f"**{title}**")
        parts += [f"- `{what}`: {_plain(text)}" if what else _plain(text) for what, text in block.items()]
    if dataclasses.is_dataclass(found) and isinstance(found, type):
        about = {field.name: field.metadata.get("option") for field in dataclasses.fields(found)}
        helped = [f"- `{field}`: {_plain(what.help)}" for field, what in about.items() if what and what.help]
        parts += ["**Fields**", *helped] if helped else []
    return parts


class _Shown:
    """An annotation that is written without quotes."""

    def __init__(self, text: Any) -> None:
        self._text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self._text


SECTION = re.compile(r"^(\w+)\n-{3,}\n|^(Args|Returns|Raises|Attributes|Yields):\n", re.MULTILINE)


def _blocks(text: str) -> list[dict[str, str]]:
    """The paragraphs of a docstring, then each section: its title, and the meaning of each name."""
    starts = [*SECTION.finditer(text)]
    opening = text[: starts[0].start()] if starts else text
    blocks: list[dict[str, str]] = [{"": part} for part in opening.split("\n\n") if part.strip()]
    ends = [each.start() for each in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=False):
        body = inspect.cleandoc("\n" + text[start.end() : end])
        block = {"title": start[1] or start[2]}
        last = ""
        for line in body.splitlines():
            named = re.match(r"([\w., `*]+?)(?: ?: |: | {2,})(.*)", line)
            if named and not line.startswith(" "):
                last = named[1].strip("` ")
                block[last] = named[2].strip()
            elif line.strip():
                block[last] = f"{block.get(last, '')} {line.strip()}".strip()
        blocks.append(block)
    return blocks
