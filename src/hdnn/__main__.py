"""`python -m hdnn`: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hdnn import __version__
from hdnn.errors import HDNNError

EXAMPLES = """examples:
  hdnn demo                        train 64 layers, write pictures to runs/demo
  hdnn demo --layers 128 --seed 3  a deeper network, another start
  hdnn demo --json | jq .accuracy  for machines
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 if the input was wrong, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="hdnn",
        description="Very deep networks whose gradients provably do not vanish.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hdnn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a deep H2 on the Swiss roll, with pictures and a gradient certificate",
        description="Train a deep H2 on the Swiss roll; print its accuracy and gradient norms.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--layers", type=int, default=64, help="number of layers N (default: 64)")
    demo.add_argument("--epochs", type=int, help="epochs of training (default: what suffices)")
    demo.add_argument("--seed", type=int, default=0, help="of weights and shuffle (default: 0)")
    demo.add_argument("--out", default="runs/demo", help="folder to write to (default: runs/demo)")
    demo.add_argument("--json", action="store_true", help="print the result as JSON")
    demo.add_argument("--quiet", action="store_true", help="no progress display")
    options = parser.parse_args(arguments)
    try:
        return _demo(options)
    except HDNNError as error:
        print(f"hdnn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hdnn: interrupted", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    from hdnn import demo

    result = demo.run(
        layers=options.layers,
        epochs=options.epochs,
        seed=options.seed,
        out=options.out,
        progress=not options.quiet,
    )
    print(json.dumps(result, indent=2) if options.json else demo.summary(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
