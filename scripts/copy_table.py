"""How many steps does the copy task take, for each block and both norm placements?

    python scripts/copy_table.py
    python scripts/copy_table.py --blocks relu,swiglu --seeds 0,1,2 optim.lr=3e-3
    python scripts/copy_table.py --config-dir my/conf --blocks mine,swiglu

Prints a Markdown table of optimiser steps and seconds. Exit status 1 if any run
fails; its cause is printed below.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from ffnlab.cli import guarded
from ffnlab.errors import UserError

PLACEMENTS = ("pre", "post")


def choices(config_dir: Path | None) -> list[str]:
    """Names of the blocks: the user's own first, then those in ``conf/ffn``."""
    from ffnlab.composition import CONF

    folders = [*([config_dir] if config_dir else []), CONF]
    return list(dict.fromkeys(path.stem for folder in folders for path in sorted((folder / "ffn").glob("*.yaml"))))


def solve(block: str, placement: str, seed: str, args: argparse.Namespace) -> tuple[int, float]:
    """Run the copy task once: (steps, seconds of training).

    Raises:
        CopyTaskFailed: with the likely cause.
        UserError: overrides that do not compose.
    """
    from rich.console import Console

    from ffnlab.config import compose
    from ffnlab.training import train

    words = ["experiment=copy_task", f"ffn={block}", f"model.norm_placement={placement}", f"seed={seed}"]
    cfg = compose([*words, *args.overrides], args.config_dir)
    with tempfile.TemporaryDirectory() as folder:
        result = train(cfg, Path(folder) / "run", console=Console(quiet=True))
    return int(result["copy/steps"]), result["seconds"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for train.py, e.g. optim.lr=3e-3")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own YAML groups, with ffn/NAME.yaml in it")
    parser.add_argument("--blocks", metavar="A,B", help="blocks to run (default: all there are, your own first)")
    parser.add_argument("--seeds", metavar="0,1", default="0", help="seeds to run each with (default 0)")
    args = parser.parse_intermixed_args(argv)
    named = [override.partition("=")[2] for override in args.overrides if override.startswith("ffn=")]
    if named:  # as for train.py
        if args.blocks:
            parser.error("name the blocks by --blocks or by ffn=, not by both")
        args.blocks = named[-1]
        args.overrides = [override for override in args.overrides if not override.startswith("ffn=")]
    return args


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 if any run failed."""
    args = parse(argv)
    return guarded(lambda: table(args))


def table(args: argparse.Namespace) -> int:
    """Run the grid and print a row as soon as it is known."""
    if args.config_dir and not args.config_dir.is_dir():
        raise UserError(f"--config-dir {args.config_dir}: there is no such folder")
    print("| block | " + " | ".join(f"{placement}-norm: steps (s)" for placement in PLACEMENTS) + " |")
    print("|---|" + "---|" * len(PLACEMENTS))
    failures = []
    for block in args.blocks.split(",") if args.blocks else choices(args.config_dir):
        cells = []
        for placement in PLACEMENTS:
            runs = []
            for seed in args.seeds.split(","):
                try:
                    steps, seconds = solve(block, placement, seed, args)
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
