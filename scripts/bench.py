"""How fast is ffnlab beside a bare PyTorch loop, beside other libraries, and beside the machine itself?

python scripts/bench.py                                everything, some seven minutes on two quiet cores
python scripts/bench.py --quick                        the same with few repeats, some four minutes
python scripts/bench.py --parts race --shapes tiny     one part, one shape
python scripts/bench.py --clock cpu --threads 1        processor time, for a machine that others are using
"""

import argparse
import sys
from pathlib import Path

from ffnlab.errors import UserError

PARTS = ("race", "split", "memory", "startup", "studies")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", help="default: tiny nanogpt-cpu; on a GPU small")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME",
        help="default: ffnlab bare gpt2 gpt2-gelu x-transformers products, as far as installed; also: compile liger",
    )
    parser.add_argument("--ffn", default="gelu", help="the block (default gelu, which the others have too)")
    parser.add_argument("--threads", type=int, help="default: as many as there are cores, at most 2")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--slices", type=int, help="turns of each contender (default 26, quick 6)")
    parser.add_argument("--slice-steps", type=int, default=10, help="steps in a turn (default 10)")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--json", type=Path, default=Path("outputs/bench.json"), help="default outputs/bench.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more configuration, as for train.py")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    args = parse(argv)
    try:
        from rich.console import Console

        from ffnlab.bench.measure import measure
        from ffnlab.bench.report import print_report, write_json

        console = Console() if sys.stdout.isatty() else Console(width=120)  # a log should not break lines
        report = measure(args, say=lambda what: console.print(f"[dim]{what} ...[/dim]"))
        print_report(report, console)
        write_json(report, args.json)
        console.print(f"every figure: {args.json}", highlight=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
