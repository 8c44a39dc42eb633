"""How many steps does the copy task take, for each block and both norm placements?

    python scripts/copy_table.py
    python scripts/copy_table.py --blocks relu,swiglu --seeds 0,1,2 optim.lr=3e-3

Prints a Markdown table of optimiser steps and seconds. Exit status 1 if any run fails; its cause is printed below.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from ffnlab.errors import UserError

PLACEMENTS = ("pre", "post")


def shipped() -> list[str]:
    """Names of the choices in ``conf/ffn``."""
    from ffnlab.composition import CONF

    return sorted(path.stem for path in (CONF / "ffn").glob("*.yaml"))


def solve(block: str, placement: str, seed: str, overrides: list[str]) -> tuple[int, float]:
    """Run the copy task once: (steps, seconds of training).

    Raises:
        CopyTaskFailed: with the likely cause.
        UserError: overrides that do not compose.
    """
    from rich.console import Console

    from ffnlab.config import compose
    from ffnlab.training import train

    words = ["experiment=copy_task", f"ffn={block}", f"model.norm_placement={placement}", f"seed={seed}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        result = train(compose(words), Path(folder) / "run", console=Console(quiet=True))
    return int(result["copy/steps"]), result["seconds"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for train.py, e.g. optim.lr=3e-3")
    parser.add_argument("--blocks", metavar="A,B", help="blocks to run (default: every choice in conf/ffn)")
    parser.add_argument("--seeds", metavar="0,1", default="0", help="seeds to run each with (default 0)")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the grid and print the table, a row as soon as it is known."""
    args = parse(argv)
    print("| block | " + " | ".join(f"{placement}-norm: steps (s)" for placement in PLACEMENTS) + " |")
    print("|---|" + "---|" * len(PLACEMENTS))
    failures = []
    for block in args.blocks.split(",") if args.blocks else shipped():
        cells = []
        for placement in PLACEMENTS:
            runs = []
            for seed in args.seeds.split(","):
                try:
                    steps, seconds = solve(block, placement, seed, args.overrides)
                    runs.append(f"{steps} ({seconds:.1f})")
                except UserError as error:
                    failures.append(f"{block}, {placement}-norm, seed {seed}: {error}")
                    runs.append("failed")
            cells.append(", ".join(runs))
        print(f"| {block} | " + " | ".join(cells) + " |", flush=True)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
