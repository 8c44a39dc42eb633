"""Answer a study: which block is better, by how much, and how sure that is.

    python scripts/report.py outputs/first
    python scripts/report.py outputs/first outputs/second --out both

Writes into the (first) study's folder: report.html, report.md and a PNG of each
chart; report.json and cells.csv, with a row a run, for programs. Prints the table.
"""

import argparse
import sys
from pathlib import Path

from ffnlab.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Write the report; exit status 1 with a message where the study cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY_DIR", help="a study's folder under outputs/")
    parser.add_argument("--out", type=Path, help="folder to write into (default: the first study)")
    parser.add_argument("--baseline", help="block to compare with (default: as the study declared)")
    parser.add_argument("--kind", choices=["blocks", "noise_floor", "lr_sensitivity"], help="what the study asks")
    parser.add_argument("--no-pictures", action="store_true", help="leave the PNGs away")
    options = parser.parse_args(arguments)
    from ffnlab.study.report import write_report
    from ffnlab.study.terminal import show

    try:
        analyses = write_report(options.studies, options.out, options.baseline, options.kind, not options.no_pictures)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for analysis in analyses:
        show(analysis)
    print(f"\n{(options.out or options.studies[0]) / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
