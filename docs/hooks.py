"""What MkDocs is to make beside the pages of this folder: pages of the command line and of the records, the
files of the repository that are pages too, plots, and the files that pages link to.

Links of pages lead to files as they lie in the repository, so that they work there as well; here they are
turned to the page of that file, or to a copy of it under ``files/``.
"""

from __future__ import annotations

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
    "examples/habit.ipynb": "howto/habit.md",
    "examples/leak.ipynb": "howto/leak.md",
}
"""Files of the repository, and the page that each one is."""
LINK = re.compile(r"(?<!`)(\]\()([^)\s]+)(\))")


def on_config(config: Any) -> Any:
    """One entry a command in the navigation, after the page of the root command."""
    for section in config["nav"]:
        for entries in section.values() if isinstance(section, dict) else ():
            if isinstance(entries, list) and "reference/cli.md" in entries:
                entries.remove("reference/cli.md")
                names = [{"stride": "reference/cli.md"}]
                names += [{f"stride {name}": f"reference/cli-{name}.md"} for name in sorted(_root().commands)]
                entries.append({"Command line": names})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is made here, and what pages link to."""
    if str(ROOT) not in sys.path:  # mkdocs forgets what is added while this file is loaded
        sys.path.insert(0, str(ROOT))
    made = {"records.md": _records()}
    for source, page in PAGES.items():
        path = ROOT / source
        if path.is_file() and page != "index.md":
            made[page] = relinked(_page_of(path), source, page)
    made["reference/cli.md"] = _command_page(_root(), "stride", deep=False)
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
    """The page with links as they are on the site."""
    if page.file.generated_by:
        return markdown
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
    found = {name for name, text in texts.items() if name != "README.md"}
    leads = {_within(name, urldefrag(link[2])[0]) for name in found for link in LINK.finditer(texts[name])}
    leads |= {f"tests/benchmarks/results/{path}" for path in _record_files()}
    return {
        each for each in leads
        if (ROOT / each).is_file() and not each.startswith("docs/") and each not in PAGES
    }  # fmt: skip


def _drawings() -> dict[str, str]:
    from tests.benchmarks import plot

    results = plot.RESULTS
    return {
        "assets/recovery.svg": plot.drawing(
            plot.read(results / "recovery.jsonl"), plot.read(results / "solvers.jsonl")
        ),
        "assets/quality.svg": plot.quality(),
        "assets/frontier.svg": plot.frontier(plot.read(results / "frontier_estimates.jsonl")),
        "assets/nats.svg": plot.nats(plot.read(results / "nats.jsonl")),
    }


def _record_files() -> list[str]:
    from tests.benchmarks.figures import RESULTS

    return sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.jsonl"))


def _records() -> str:
    """The page of all records: the files, and every comparison that the suites hold."""
    from tests.benchmarks import figures

    parts = [
        "# Records\n\nEvery benchmark leaves one JSON line a measurement, with the machine and versions. "
        "These are all of them; the [benchmarks](benchmarks.md) say what they mean.\n\n## Files\n"
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


def _command_page(command: Any, name: str, deep: bool = True) -> str:
    """A command and those below it: what each one's --help says."""
    parts = [f"# {name}\n", *_described(command, name)]
    if deep:
        for below, each in sorted(getattr(command, "commands", {}).items()):
            parts += [f"\n## {name} {below}\n", *_described(each, f"{name} {below}")]
    return "\n".join(parts) + "\n"


def _described(command: Any, name: str) -> list[str]:
    context = command.context_class(command, info_name=name, terminal_width=100, max_content_width=100)
    shown = command.get_help(context).replace("\b", "").strip()
    return [f"```text\n$ {name} --help\n{shown}\n```"]
