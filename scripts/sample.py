"""Let a trained network write: ``python scripts/sample.py RUN_DIR --prompt "To be"``."""

import argparse
import sys

from ffnlab.cli import guarded
from ffnlab.errors import UserError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="a run directory, e.g. outputs/20261130-081500-swiglu-s0-557d"
    )
    parser.add_argument("--prompt", default="\n", help="what to continue (default: an empty line)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text (default 0)")
    parser.add_argument(
        "--best", action="store_true", help="the checkpoint with the best validation loss, not the last"
    )
    return parser.parse_args(arguments)


def sample(options: argparse.Namespace) -> None:
    """Print the prompt and its continuation."""
    if options.tokens < 1:
        raise UserError(f"--tokens must be positive, not {options.tokens}")
    if not 0 <= options.temperature < float("inf"):
        raise UserError(f"--temperature must be 0 or more, not {options.temperature}")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed must be between 0 and 2**63, not {options.seed}")
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"--top-k must be positive, not {options.top_k}")

    import torch

    from ffnlab.data import TextTokens
    from ffnlab.training import load_run

    run = load_run(options.run_dir, best=options.best)
    if not isinstance(run.data, TextTokens):
        raise UserError(f"{options.run_dir} was trained on data={run.cfg.data.kind}, which is no text")
    tokenizer = run.data.tokenizer
    prompt_BT = torch.tensor([tokenizer.encode(options.prompt)])
    if prompt_BT.shape[1] == 0:
        raise UserError("--prompt is empty: give at least one character")
    generator = torch.Generator().manual_seed(options.seed)
    text_BT = run.network.generate(prompt_BT, options.tokens, options.temperature, options.top_k, generator)
    print(tokenizer.decode(text_BT[0].tolist()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    return guarded(lambda: sample(options))


if __name__ == "__main__":
    sys.exit(main())
