"""Count dead, dormant and sparse neurons again, on a finished run.

    python scripts/census.py RUN_DIR
    python scripts/census.py RUN_DIR --n 200000 --data my.txt

Prints a line a layer, in percent. docs/metrics.md defines the columns.
"""

import argparse
import sys

from ffnlab.cli import guarded


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory under outputs/")
    parser.add_argument(
        "--n", type=int, help="tokens to count, at most all there are (default: as in the run's last census)"
    )
    parser.add_argument(
        "--data", nargs="+", metavar="FILE", help="text files to count on, instead of the run's validation set"
    )
    parser.add_argument(
        "--best", action="store_true", help="the checkpoint with the best validation loss, not the last"
    )
    return parser.parse_args(arguments)


def show(options: argparse.Namespace) -> None:
    """Print the layer table."""
    from rich.console import Console

    from ffnlab.census.rerun import rerun_table
    from ffnlab.training import load_run

    run = load_run(options.run_dir, best=options.best)
    n = options.n if options.n is not None else run.cfg.census.final_tokens
    title = f"{run.cfg.ffn.name}, {run.source}"
    Console().print(rerun_table(run.network, run.data, n, options.data or [], title))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    return guarded(lambda: show(options))


if __name__ == "__main__":
    sys.exit(main())
