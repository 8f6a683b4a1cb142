"""`python -m hdnn`: the command line, or one sentence on what to install for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hdnn.errors import MissingExtraError, require


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 if the input was wrong, 130 if it was interrupted."""
    try:
        require("typer", extra="cli")
        from hdnn.app import cli

        return cli.run(sys.argv[1:] if arguments is None else arguments)
    except MissingExtraError as error:
        sys.stderr.write(f"hdnn: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
