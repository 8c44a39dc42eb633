"""How a study stands: ``python scripts/status.py outputs/STUDY [--watch SECONDS]``.

Cells that are done, running (with step and time left), stopped and failed, and the means so far. It only reads, so a
study can be watched while it runs; with --watch it ends when no cell is running any more.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from ffnlab.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Print the study's state, once or again and again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="STUDY_DIR")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="look again every so many seconds")
    options = parser.parse_args(arguments)

    def show() -> int:
        from rich.console import Console
        from rich.live import Live

        from ffnlab.study.progress import view

        console = Console()
        content, running = view(options.study)
        if options.watch is None:
            console.print(content, highlight=False)
            return 0
        with Live(content, console=console, auto_refresh=False) as live:
            while running:
                time.sleep(max(0.1, options.watch))
                content, running = view(options.study)
                live.update(content, refresh=True)
        return 0

    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end in silence when `| head` has read enough
    try:
        return show()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
