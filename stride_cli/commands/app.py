"""The `stride` command: its subcommands, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from index_format.errors import IndexFormatError
from stride_cli import __version__, errors
from stride_cli.commands import (
    audit,
    baseline,
    calibrate,
    completion,
    config,
    demo,
    evaluate,
    index,
    model,
    query,
    report,
    schema,
    select,
    train,
    tune,
    verify_hit,
)
from stride_cli.startup import own_process, share_cores

app = typer.Typer(
    name="stride",
    help="Which training documents made this language model say that?",
    epilog="\b\nCompletion for another shell than this one: stride --install-completion zsh",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(index.app, name="index")
app.add_typer(model.app, name="model")
app.command(epilog=demo.EXAMPLE)(demo.demo)
app.command(epilog=train.EXAMPLE)(train.train)
app.command(epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.command(epilog=tune.EXAMPLE)(tune.tune)
app.command(epilog=query.EXAMPLE)(query.query)
app.command(epilog=report.EXAMPLE)(report.report)
app.command(epilog=audit.EXAMPLE)(audit.audit)
app.command(epilog=select.EXAMPLE)(select.select)
app.command("verify-hit", epilog=verify_hit.EXAMPLE)(verify_hit.verify_hit)
app.add_typer(evaluate.app, name="evaluate")
app.command(epilog=baseline.EXAMPLE)(baseline.baseline)
app.command(epilog=schema.EXAMPLE)(schema.schema)
app.add_typer(config.app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stride {__version__}")
        raise typer.Exit()


@app.callback()
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
    try:
        app(prog_name="stride", standalone_mode=True)
    except (errors.StrideError, IndexFormatError) as error:
        if os.environ.get("STRIDE_DEBUG"):
            raise
        sys.stderr.write(render_error(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # the reader of our output left (`| head`): quiet, and nothing more to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(errors.EXIT_DONE)
    except OSError as error:
        if os.environ.get("STRIDE_DEBUG"):
            raise
        where = f" '{error.filename}'" if error.filename else ""
        sys.stderr.write(f"error: the system refused{where}: {error.strerror or error}\n")
        sys.exit(errors.EXIT_USAGE)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(errors.EXIT_INTERRUPTED)
    sys.exit(errors.EXIT_DONE)


def render_error(error: errors.StrideError | IndexFormatError) -> str:
    """`error: …` and, where there is one, `  fix: …`."""
    text = f"error: {error.message}\n"
    if error.fix:
        text += f"  fix: {error.fix}\n"
    return text
