"""The ``gradweave`` command: its sub-commands, and how errors reach the terminal."""

from __future__ import annotations

import errno
import os
import sys
from itertools import pairwise
from typing import Annotated

import typer

from gradweave import __version__
from gradweave.cli.compare import compare_command
from gradweave.cli.plan import PLAN_EPILOG, plan_command
from gradweave.cli.simulate import simulate_app
from gradweave.errors import GradweaveError

INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="gradweave",
    help="PyTorch training made faster by weaving the work of a training step together.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("compare")(compare_command)
app.command("plan", epilog=PLAN_EPILOG)(plan_command)
app.add_typer(simulate_app, name="simulate")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradweave {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit status 2."""
    os.environ["MPLBACKEND"] = "agg"  # pictures only go to files; the backend of a notebook need not exist here
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except GradweaveError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except Exception as error:
        if type(error).__name__ == "Abort":  # click turns Ctrl-C into it
            sys.exit(INTERRUPTED)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _drop_output()
            _fail(f"cannot write{f' {error.filename}' if error.filename else ''}: {error.strerror}")
        # Typer may or may not bring its own copy of click: its usage errors are recognised by their method.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _fail(_with_value(error, format_message()))
    sys.exit(status if isinstance(status, int) else 0)


def _drop_output() -> None:
    """Redirect stdout to nowhere: at exit Python would try to write the rest of the buffer, and complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_value(error: Exception, message: str) -> str:
    """Return a usage error's message with the given value, which click leaves out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for name, value in pairwise(sys.argv):
        if name in names and value not in message:
            return f"{name}={value!r}: {message}"
    return message


def _fail(message: str) -> None:
    line = " ".join(message.split())
    if line:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(2)
