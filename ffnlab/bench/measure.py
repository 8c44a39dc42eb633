"""One call of the bench: the parts that were asked for, in order."""

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Literal

import torch

from ffnlab.bench.contenders import missing
from ffnlab.bench.memory import measure_memory
from ffnlab.bench.race import Spread, run_race
from ffnlab.bench.report import Report
from ffnlab.bench.setting import SHAPES, Setting
from ffnlab.bench.split import split_step
from ffnlab.bench.startup import corpus_seconds, first_step_seconds, help_seconds
from ffnlab.bench.studies import measure_studies
from ffnlab.errors import UserError

USUAL = ("ffnlab", "bare", "gpt2", "gpt2-gelu", "x-transformers", "products")


def measure(args: Namespace, say: Callable[[str], None]) -> Report:
    """Measure what ``args`` (of ``scripts/bench.py``) ask for; ``say`` hears what comes next.

    Raises:
        UserError: an unknown shape, a peer that is not installed, a run that failed.
    """
    device: Literal["cpu", "cuda"] = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU here")
    threads = args.threads or min(2, os.cpu_count() or 1)
    shapes = args.shapes or (["small"] if device == "cuda" else ["tiny", "nanogpt-cpu"])
    for shape in shapes:
        if shape not in SHAPES:
            raise UserError(f"unknown shape '{shape}'; choose one of {', '.join(SHAPES)}")
    settings = [Setting(shape, args.ffn, threads, device, args.clock, list(args.overrides)) for shape in shapes]
    report = Report()
    contenders = args.contenders
    if contenders is None:
        contenders = [name for name in USUAL if not missing(name)]
        for lack in (lack for name in USUAL if (lack := missing(name))):
            say(f"left out: {lack}")
    if "race" in args.parts:
        slices = args.slices or (6 if args.quick else 26)
        for setting in settings:
            say(f"racing at {setting.shape}")
            report.races.append(run_race(contenders, setting, slices, args.slice_steps))
    if "split" in args.parts:
        for setting in settings:
            say(f"splitting a step at {setting.shape}")
            report.splits[setting.shape] = split_step(setting, 6 if args.quick else 30)
    if "memory" in args.parts:
        say("measuring memory")
        vocab_sizes, contexts = ([2048, 32768], [512]) if args.quick else ([2048, 8192, 32768], [128, 512, 1024])
        report.memory = measure_memory(settings[0], vocab_sizes, contexts)
    if "startup" in args.parts:
        say("starting train.py")
        repeats = 1 if args.quick else 3
        report.startup["python train.py --help"] = help_seconds(repeats)
        report.startup["first training step"] = first_step_seconds(repeats, args.overrides)
        report.startup["preparing the default corpus"] = Spread.of([corpus_seconds()])
    if "studies" in args.parts:
        say("running cells two at a time and in turn")
        report.studies = measure_studies(40_960 if args.quick else 204_800, overrides=args.overrides)
    return report
