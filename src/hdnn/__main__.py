"""`python -m hdnn`: the command line, or one sentence on what to install for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hdnn.base import interrupted, launched
from hdnn.errors import MissingExtraError, require


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 if the input was wrong, 130 if it was interrupted."""
    try:
        require("typer", extra="cli")
        require("rich", extra="cli")
        from hdnn.app import cli

        code = cli.main(arguments)
        if launched.several():
            from hdnn.training.processes import torchrun

            return torchrun.leave(code)
        return code
    except MissingExtraError as error:
        interrupted.say(str(error))
        return 2
    except KeyboardInterrupt:
        return interrupted.exit_code()
    finally:
        interrupted.ended()


if __name__ == "__main__":
    sys.exit(main())
