"""The `stride` command: its subcommands, and the one place where errors become exit codes."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib
import io
import os
import select as polling
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from index_format.errors import IndexFormatError
from stride_cli import __version__, errors, interrupts
from stride_cli.characters import printable
from stride_cli.commands import completion
from stride_cli.commands.panels import ASK, BUILD, CHECK, RESEARCH, CommandLine
from stride_cli.output import settle_streams
from stride_cli.startup import own_process, share_cores

# typer has a parser of its own, or click's, and does not name the class of its errors
_ParserError: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")
_MAY_BE_EMPTY = {"text", "prompts"}
_REMEDIES = {
    errno.EACCES: "check its permissions, or give another place",
    errno.EPERM: "check its permissions, or give another place",
    errno.EROFS: "give a place that can be written to",
    errno.ENOENT: "check the name",
    errno.ENOTDIR: "check the name: a part of it that should be a directory is a file",
    errno.EISDIR: "give a file in it",
    errno.EEXIST: "give another name, or move away what is there",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free some space, and run the same command again",
    errno.EDQUOT: "free some space, and run the same command again",
    errno.EMFILE: "allow more open files (ulimit -n 4096)",
    errno.EBADF: "open what is read and written: < FILE, > FILE",
}

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
    "evaluate": (RESEARCH, "How good an attribution is, measured by retraining."),
    "config": (RESEARCH, "Settings: stride.yaml, STRIDE_* variables, flags."),
    "tune": (RESEARCH, "Try settings of the operators, and keep the best."),
    "select": (RESEARCH, "Choose training documents for a task."),
    "baseline": (RESEARCH, "Rank documents by any other attribution method."),
    "schema": (RESEARCH, "Print the JSON Schema of the records."),
}

# commands of `stride_cli.research`, found by name: the product does not import research
_RESEARCH = {"evaluate", "tune", "select", "baseline"}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stride {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_version),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if debug:
        os.environ["STRIDE_DEBUG"] = "1"


def main() -> NoReturn:
    """Run the command line; every known error leaves as one line, a remedy and its exit code."""
    own_process()
    share_cores()
    completion.take_named_shell(sys.argv[1:])
    code = errors.EXIT_DONE
    with interrupts.noticed():
        try:
            settle_streams()
            code = _run(sys.argv[1:])
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = interrupts.EXIT_INTERRUPTED
        except Exception as error:
            code = _told(error)
        if code == interrupts.EXIT_INTERRUPTED:
            _say("interrupted\n")
    _leave(code)


def _told(error: Exception) -> int:
    """The exit code of an error, which is told; one that is a defect of this program is raised again."""
    if interrupts.came():
        return interrupts.EXIT_INTERRUPTED  # what was being imported made another error of it
    if isinstance(error, BrokenPipeError) and _reader_left():
        return errors.EXIT_DONE  # `| head`: it has what it wanted
    known = None if os.environ.get("STRIDE_DEBUG") else as_known(error)
    if known is None:
        raise error
    _say(render_error(known))
    return known.exit_code


def _run(arguments: list[str]) -> int:
    """The exit code of a command line.

    Not by `app()`, which handles what comes to it itself: a pipe whose reader has left is an error to it.
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


def _command(first: str) -> Any:
    """The parser of a command line whose first word is ``first``."""
    if first in map(_called, _COMMANDS):
        return _parser_of(first)
    return _parser(command_line())  # anew: of what completion it offers, typer looks when it is made


@functools.cache
def _parser_of(first: str) -> Any:
    return _parser(_line(first))


def command_line() -> CommandLine:
    """All commands."""
    return _line("")


@functools.cache
def _line(first: str) -> CommandLine:
    """The one command that is called ``first``, or all: to import these and make their parsers takes a tenth
    of a second more."""
    line = CommandLine(
        name="stride",
        help="Which training documents made this language model say that?",
        epilog="\b\nCompletion for another shell than this one: stride --install-completion zsh",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    line.callback()(_root)
    for name, (panel, short) in _COMMANDS.items():
        if first not in ("", _called(name)):
            continue
        room = "research.commands" if name in _RESEARCH else "commands"
        module = importlib.import_module(f"stride_cli.{room}.{name}")
        listed: Any = {"name": _called(name), "short_help": short, "rich_help_panel": panel}
        if hasattr(module, "app"):
            line.add_typer(module.app, **listed)
        else:
            line.command(epilog=module.EXAMPLE, **listed)(getattr(module, name))
    return line


def _called(module: str) -> str:
    return module.replace("_", "-")


def _parser(line: typer.Typer) -> Any:
    command = typer.main.get_command(line)
    _refuse_empty(command)
    return command


def _refuse_empty(command: Any) -> None:
    """Refuse an option, or an argument, that is an empty text: '' as a path is the directory one is in.

    But for names of fields, which are switched off so, and prompts, whose own error says more.
    """
    for below in getattr(command, "commands", {}).values():
        _refuse_empty(below)
    for parameter in command.params:
        if parameter.name in _MAY_BE_EMPTY or parameter.is_eager:
            continue
        parameter.process_value = functools.partial(_filled, parameter, parameter.process_value)


def _filled(parameter: Any, convert: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """A parameter's value from what was given; UsageError where that is empty."""
    if value == "" or (isinstance(value, list | tuple) and "" in value):
        option = parameter.param_type_name == "option"
        name = (
            max(parameter.opts, key=len)
            if option
            else (parameter.metavar or parameter.name.upper()).strip("[].")
        )
        raise errors.UsageError(
            f"{name} is empty (expected some text)",
            fix=f"give {name} a value" + (", or leave it out" if not parameter.required else ""),
        )
    return convert(context, value)


def as_known(error: Exception) -> errors.StrideError | IndexFormatError | None:
    """An error that a user can act on, as that; None for a defect of this program."""
    if isinstance(error, errors.StrideError | IndexFormatError):
        return error
    if errors.out_of_memory(error):
        return errors.UsageError(
            f"there is not enough memory for this: {errors.first_line(error)}",
            fix="ask for less (smaller numbers, fewer at once; a large model with --stream), or use a "
            "machine with more memory",
        )
    if isinstance(error, OverflowError) or _too_large(error):
        return errors.UsageError(
            f"a number is too large: {errors.first_line(error)}", fix="give smaller numbers"
        )
    if isinstance(error, UnicodeEncodeError):
        return errors.UsageError(
            f"a name or a text has a character that cannot be written: {error.object[error.start]!a}",
            fix="give files and directories names in UTF-8",
        )
    if isinstance(error, EOFError):
        if (compiled := _cut_short(error)) is not None:
            return errors.StorageError(
                f"Python's compiled file '{compiled}' is cut short, as a full disk leaves it",
                fix="remove that file: Python makes it again",
            )
        return errors.UsageError(
            f"a file ends before what it should hold: {errors.first_line(error)}",
            fix="copy it again; where it is an index: stride index verify",
        )
    if isinstance(error, RecursionError):
        return errors.UsageError(
            "what was read is nested too deeply", fix="write it with fewer levels of brackets"
        )
    if isinstance(error, OSError):
        where = f" '{os.fsdecode(error.filename)}'" if isinstance(error.filename, str | bytes) else ""
        return errors.StorageError(
            f"the system refused{where}: {error.strerror or error}",
            fix=_remedy(error),
        )
    return None


def _cut_short(error: EOFError) -> str | None:
    """The compiled Python file that an import found cut short; None where no import ended so."""
    found, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_name == "_compile_bytecode":
            found = frame.tb_frame.f_locals.get("bytecode_path")
        frame = frame.tb_next
    return found


def _remedy(error: OSError) -> str:
    # of `tempfile`, which says that it found nothing there, also where disks are full
    if error.filename is None and "temporary directory" in str(error):
        return "free some space there, or name another directory: TMPDIR=DIR"
    return _REMEDIES.get(error.errno or 0, "see where with stride --debug")


def _too_large(error: Exception) -> bool:
    """Whether torch or NumPy cannot count so far, which they say in words alone."""
    return isinstance(error, RuntimeError | ValueError) and any(
        words in str(error)
        for words in (
            "calculation overflowed",
            "without overflow",
            "array is too big",
            "Maximum allowed dimension exceeded",
            "Maximum allowed size exceeded",
        )
    )


def _reader_left() -> bool:
    """Whether it is our stdout or stderr that nobody reads any more, and not a pipe to another process."""
    if not hasattr(polling, "poll"):
        return True
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no file
            watched = polling.poll()
            watched.register(stream.fileno(), polling.POLLOUT)
            if any(event & (polling.POLLERR | polling.POLLHUP) for _, event in watched.poll(0)):
                return True
    return False


def _say(text: str) -> None:
    """Tell it on stderr, if somebody is there."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def render_error(error: errors.StrideError | IndexFormatError) -> str:
    """`error: …` and, where there is one, `  fix: …`; no text from elsewhere can look like either."""
    text = f"error: {_lines(error.message)}\n"
    if error.fix:
        text += f"  fix: {_lines(error.fix)}\n"
    return text


def _lines(text: str) -> str:
    """A message for stderr: lines after the first are marked as its."""
    first, *others = printable(text).split("\n")
    return "\n".join([first, *(line if line.startswith("  | ") else f"  | {line}" for line in others)])


def _leave(code: int) -> NoReturn:
    """End with this exit code, without a word of the interpreter's on what cannot be written any more, or on
    Ctrl-C while it ends."""
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
