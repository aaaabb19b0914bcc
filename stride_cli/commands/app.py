"""The `stride` command: its subcommands, and the one place where errors become exit codes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import os
import select
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from stride_cli import __version__, errors, interrupts
from stride_cli.characters import printable
from stride_cli.commands.failures import as_known, render_error
from stride_cli.commands.panels import ASK, BUILD, CHECK, RESEARCH, CommandLine
from stride_cli.output import quiet, settle_streams
from stride_cli.startup import own_process, share_cores

# typer has a parser of its own, or click's, and does not name the class of its errors
_ParserError: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")

_COMMANDS: dict[str, tuple[str, str]] = {  # module: panel, and description where help lists it
    "demo": (ASK, "Try it: a small model, its corpus, and ten questions."),
    "ask": (ASK, "Ask a corpus: builds its index, fits, answers."),
    "query": (ASK, "Rank the documents behind what the model says."),
    "report": (ASK, "Write a page of answers, to mail and to open offline."),
    "serve": (ASK, "A local page and API that answer at once."),
    "model": (BUILD, "Train or fine-tune a language model, or look at one."),
    "index": (BUILD, "Build an index of a corpus, and look after it."),
    "train": (BUILD, "Fit the index's operators, which queries need."),
    "calibrate": (BUILD, "Learn to tell clear answers from weak ones and guesses."),
    "audit": (CHECK, "Find benchmark items that leaked into the corpus."),
    "verify_hit": (CHECK, "Retrain without the top documents: did they matter?"),
    "config": (CHECK, "Settings: stride.yaml, STRIDE_* variables, flags."),
    "schema": (CHECK, "Print the JSON Schema of the records."),
    "evaluate": (RESEARCH, "How good an attribution is, measured by retraining."),
    "tune": (RESEARCH, "Try settings of the operators, and keep the best."),
    "select": (RESEARCH, "Choose training documents for a task."),
    "baseline": (RESEARCH, "Rank documents by any other attribution method."),
}


def main() -> NoReturn:
    """Run the command line; every known error leaves as one line, a remedy and its exit code."""
    own_process()
    share_cores()
    code = errors.EXIT_DONE
    with interrupts.noticed():
        try:
            settle_streams()
            code = _run(sys.argv[1:])
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = interrupts.EXIT_INTERRUPTED
        except Exception as error:
            code = _say_error(error)
        if code == interrupts.EXIT_INTERRUPTED:
            _say("interrupted\n")
    _leave(code)


def _run(arguments: list[str]) -> int:
    """Run a command line and return its exit code.

    `app()` would handle errors itself, and takes a pipe whose reader has left for one.
    """
    completing = "_STRIDE_COMPLETE" in os.environ  # a shell asks what may follow
    command = _command("" if completing or not arguments else arguments[0])
    if completing:
        command.main(arguments, prog_name="stride")
    try:
        with command.make_context("stride", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as left:
        return int(left.exit_code)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _ParserError as error:
        told = io.StringIO()
        error.show(file=told)
        _say(printable(told.getvalue()))
        return errors.EXIT_USAGE
    return errors.EXIT_DONE


def command_line() -> CommandLine:
    """All commands."""
    return _line("")


def _command(first: str) -> Any:
    """The parser of a command line whose first word is ``first``."""
    if first in map(_called, _COMMANDS):
        return _parser_of(first)
    return _parser(command_line())  # made anew, for typer looks then which completion to offer


@functools.cache
def _parser_of(first: str) -> Any:
    return _parser(_line(first))


@functools.cache
def _line(first: str) -> CommandLine:
    """The one command that is called ``first``, or all, whose imports take a tenth of a second more.

    Commands of research are found by name: the product does not import research.
    """
    line = CommandLine(
        name="stride",
        help="Which training documents made this language model say that?",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    line.callback()(_root)
    for name, (panel, short) in _COMMANDS.items():
        if first not in ("", _called(name)):
            continue
        room = "research.commands" if panel == RESEARCH else "commands"
        module = importlib.import_module(f"stride_cli.{room}.{name}")
        listed: Any = {"name": _called(name), "short_help": short, "rich_help_panel": panel}
        if hasattr(module, "app"):
            line.add_typer(module.app, **listed)
        else:
            line.command(epilog=module.EXAMPLE, **listed)(getattr(module, name))
    return line


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stride {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quietly: Annotated[
        bool, typer.Option("-q", "--quiet", help="No progress, no notes but warnings.")
    ] = False,
) -> None:
    if quietly:
        quiet()
    if debug:
        os.environ["STRIDE_DEBUG"] = "1"


def _called(module: str) -> str:
    return module.replace("_", "-")


def _parser(line: typer.Typer) -> Any:
    command = typer.main.get_command(line)
    _refuse_empty(command)
    return command


def _refuse_empty(command: Any) -> None:
    """Refuse empty texts as values: '' as a path is the directory one is in. Prompts have their own error."""
    for below in getattr(command, "commands", {}).values():
        _refuse_empty(below)
    for parameter in command.params:
        if parameter.name not in ("text", "prompts") and not parameter.is_eager:
            parameter.process_value = functools.partial(_filled, parameter, parameter.process_value)


def _filled(parameter: Any, convert: Any, context: Any, value: Any) -> Any:
    if value == "" or (isinstance(value, list | tuple) and "" in value):
        name = max(parameter.opts, key=len)
        if parameter.param_type_name == "argument":
            name = (parameter.metavar or name.upper()).strip("[].")
        leave = "" if parameter.required else ", or leave it out"
        raise errors.UsageError(f"{name} is empty (expected some text)", fix=f"give {name} a value{leave}")
    return convert(context, value)


def _say_error(error: Exception) -> int:
    """Tell an error and return its exit code; a defect of this program is raised again."""
    if interrupts.came():
        return interrupts.EXIT_INTERRUPTED  # what was being imported made another error of it
    if isinstance(error, BrokenPipeError) and _reader_left():
        return errors.EXIT_DONE  # `| head`: it has what it wanted
    known = None if os.environ.get("STRIDE_DEBUG") else as_known(error)
    if known is None:
        raise error
    _say(render_error(known))
    return known.exit_code


def _reader_left() -> bool:
    """True where it is our stdout or stderr that nobody reads any more, not a pipe to another process."""
    if not hasattr(select, "poll"):
        return True
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no file
            watched = select.poll()
            watched.register(stream.fileno(), select.POLLOUT)
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0)):
                return True
    return False


def _say(text: str) -> None:
    """Tell it on stderr, if somebody is there."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    """End with this exit code, without the interpreter's words on a closed pipe, or on Ctrl-C at its end."""
    if (parallel := sys.modules.get("stride_cli.parallel")) is not None:
        parallel.close_all()  # the interpreter would wait for their work
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):  # ValueError: closed, or no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    atexit.unregister(_end_quietly)
    atexit.register(_end_quietly)
    sys.exit(code)


def _end_quietly() -> None:
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
