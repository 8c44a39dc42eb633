"""A saved W&B view of a study: loss by block, difference to the baseline, dead neurons.

python scripts/wandb_workspace.py outputs/STUDY --entity NAME
python scripts/wandb_workspace.py outputs/STUDY --out view.json   (no server)
"""

import argparse
import sys
from pathlib import Path

from ffnlab.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Build the view and save or write it; exit status 1 with a message where that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="STUDY_DIR", help="a study's folder under outputs/")
    parser.add_argument("--entity", default="", help="W&B user or team")
    parser.add_argument("--project", default="ffnlab", help="W&B project (default ffnlab)")
    parser.add_argument("--out", type=Path, help="write the specification to this file, without a server")
    options = parser.parse_args(arguments)
    from ffnlab.study import workspace
    from ffnlab.study.analyse import analyse
    from ffnlab.study.load import load_study

    try:
        if not options.entity and options.out is None:
            raise UserError("Say whose project it is with --entity, or write the view to a file with --out.")
        analysis = analyse(load_study(options.study))
        view = workspace.build_workspace(analysis, options.entity, options.project, workspace.count_layers(analysis))
        if options.out is not None:
            workspace.write_specification(view, options.out)
            print(options.out)
        else:
            print(workspace.save(view))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
