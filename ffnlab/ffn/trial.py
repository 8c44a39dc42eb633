"""A block's first tokens, so that what cannot work is said in a line, and before anything is written."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.ffn.factory import BlockFactory, locate


def try_block(factory: BlockFactory, d_model: int, d_ff: int) -> None:
    """Pass two tokens through the block on the meta device, in train and in eval mode.

    Nothing may come out but a tensor of the input's shape: a vector of one number, say, would be added to the residual
    stream by broadcasting, and train. The random stream is left as it was found.

    Raises:
        UserError: the output is something else, or ``down`` is not called exactly once, so that no census could see it.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        block = factory(d_model, d_ff)
        calls: list[nn.Module] = []
        block.get_submodule("down").register_forward_hook(lambda module, *_: calls.append(module))
        x = torch.zeros(1, 2, d_model)
        for mode in (True, False):
            calls.clear()
            output = block.train(mode)(x)
            what = f"{type(block).__name__} is given {tuple(x.shape)} in {'train' if mode else 'eval'} mode and"
            if not isinstance(output, Tensor):
                raise UserError(f"{what} returns {_a(output)}, not one tensor of that shape")
            if output.shape != x.shape or not output.is_floating_point():
                raise UserError(f"{what} returns {tuple(output.shape)} of {output.dtype}, not floats of that shape")
            if len(calls) != 1:
                raise UserError(f"{what} calls its down {len(calls)} times; the census needs one call of the module")


def _a(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


@contextmanager
def blamed_on(target: str) -> Iterator[None]:
    """Say in a line what goes wrong in the class ``target``, and where.

    Raises:
        UserError: in place of any other error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        source = inspect.getsourcefile(locate(target))
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename == source), frames[-1])
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{target} fails in {Path(frame.filename).name}, line {frame.lineno}: {type(error).__name__}: {first}; "
            "scripts/check_ffn.py tries all that is asked of a block"
        ) from error
