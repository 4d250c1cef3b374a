"""The `csc` command: thin, and quick to start; whatever is heavy is imported by the command that needs it."""

import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from csc import __version__
from csc.errors import CscError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input ends in one line and exit code 2."""
    code: int = 128 + signal.SIGPIPE  # unless the work is done when the reader of our output goes away
    try:
        parsed = _parser().parse_args(arguments)
        code = parsed.command.run(parsed)
        sys.stdout.flush()
        return code
    except CscError as error:
        print("csc:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output went away, for instance `csc … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt:
        print("csc: interrupted; the same command takes up the work where it stopped", file=sys.stderr)
        return 130


def _parser() -> ArgumentParser:
    from csc.cli.cluster import LOGS, RETRY, STATUS, STOP
    from csc.cli.doctor import DOCTOR
    from csc.cli.ingest import INGEST
    from csc.cli.lists import METHODS, SCENARIOS
    from csc.cli.predict import PREDICT
    from csc.cli.run import COMPILE, RUN
    from csc.cli.serve import SERVE
    from csc.cli.study import STUDY
    from csc.cli.submit import SUBMIT
    from csc.cli.ui import UI

    commands = {
        "compile": COMPILE,
        "doctor": DOCTOR,
        "ingest": INGEST,
        "logs": LOGS,
        "methods": METHODS,
        "predict": PREDICT,
        "retry": RETRY,
        "run": RUN,
        "scenarios": SCENARIOS,
        "serve": SERVE,
        "status": STATUS,
        "stop": STOP,
        "study": STUDY,
        "submit": SUBMIT,
        "ui": UI,
    }
    parser = ArgumentParser(prog="csc", description="Multi-label class-incremental learning as a pipeline.")
    parser.add_argument("--version", action="version", version=f"csc {__version__}")
    words = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in commands.items():
        sub = words.add_parser(name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.set_defaults(command=command)
    return parser
