"""Is this block right? A checklist with measured figures, in seconds, on a CPU.

    python scripts/check_ffn.py ffn=swiglu
    python scripts/check_ffn.py --config-dir my/conf ffn=mine ffn.bias=true
    python scripts/check_ffn.py --config-dir my/conf ffn=mine --like swiglu
    python scripts/check_ffn.py ffn=gelu --json

The checklist asks whether a block keeps the contract. Whether its formula is
right only --like can tell: the same weights are put into ours and into yours,
and outputs and gradients compared in float64.

Exit status 0: every item passes; 1: at least one fails, or the block cannot be
loaded.
"""

import argparse
import shutil
import sys
from pathlib import Path

from ffnlab.cli import guarded


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what is no option is an override, as for ``train.py``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="ffn=NAME", help="the block and its options")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own YAML groups, with ffn/NAME.yaml in it")
    parser.add_argument(
        "--like", metavar="NAME", help="also compare with this project's block NAME: relu, gelu, swiglu, ... (conf/ffn)"
    )
    parser.add_argument("--json", action="store_true", help="print the checklist as JSON")
    parser.add_argument("--d-model", type=int, default=24, help="width to build the block at (default 24)")
    parser.add_argument("--d-ff", type=int, default=64, help="neurons to build it with (default 64)")
    parser.add_argument(
        "--backend",
        default="aot_eager",
        choices=("aot_eager", "inductor"),
        help="for torch.compile; inductor generates code: slower, needs a C++ compiler (default aot_eager)",
    )
    args = parser.parse_intermixed_args(argv)
    if args.d_model < 1 or args.d_ff < 1:
        parser.error("--d-model and --d-ff must be positive")
    if not any(override.startswith("ffn=") for override in args.overrides):
        parser.error("say which block: ffn=NAME")
    return args


def main(argv: list[str] | None = None) -> int:
    """Check one block and print what was found; returns the exit status."""
    args = parse(argv)
    return guarded(lambda: _check(args))


def _check(args: argparse.Namespace) -> int:
    from ffnlab.config import compose
    from ffnlab.contract import check
    from ffnlab.ffn import locate

    cfg = compose(args.overrides, args.config_dir)
    report = check(
        locate(cfg.ffn.target),
        cfg.ffn.options,
        name=cfg.ffn.name,
        d_model=args.d_model,
        d_ff=args.d_ff,
        compile_backend=args.backend,
        like=args.like,
    )
    print(report.json() if args.json else report.text(shutil.get_terminal_size().columns))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
