"""Train one Transformer with the feed-forward block of your choice: ``python train.py ffn=swiglu``."""

import sys

from ffnlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
