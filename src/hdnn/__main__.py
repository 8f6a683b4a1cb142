"""`python -m hdnn`: one command; a user's error becomes one message and exit code 2."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from hdnn.errors import HDNNError, MissingExtraError, require


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 if the input was wrong, 130 if it was interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        typer = require("typer", extra="cli")
        from hdnn.app import cli
    except MissingExtraError as error:
        return say(error, 2)
    except KeyboardInterrupt:
        return 130
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"note: {message}")
        try:
            result = cli.app(words, prog_name="hdnn", standalone_mode=False)
            return result or 0
        except HDNNError as error:
            return say(error, 2)
        except cli.WRONG_OPTION as error:
            message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
            return say(f"{message.rstrip('.')}; see hdnn --help.", 2)
        except (typer.Abort, KeyboardInterrupt) as error:
            reason = str(error) or str(error.__cause__ or "")
            return say(reason or "interrupted", 130)
        except BrokenPipeError:
            sys.stderr.close()  # Python would complain about the closed pipe
            return 0
        except OSError as error:
            place = error.filename or "output"
            return say(f"{place}: {error.strerror or error}.", 2)


def say(message: object, code: int = 0) -> int:
    """Print one line on stderr; return the exit code."""
    sys.stderr.write(f"hdnn: {' '.join(str(message).split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
