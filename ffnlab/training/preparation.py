"""Everything a run needs before its first step, without writing anything but the token cache."""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from ffnlab.budget import Budget, solve
from ffnlab.config import RunConfig
from ffnlab.data import Data, prepare
from ffnlab.errors import UserError
from ffnlab.ffn import blamed_on, make_block, try_block
from ffnlab.model import LanguageModel, build, shared_init_hash
from ffnlab.training.batches import order_hash
from ffnlab.training.memory import check_memory


@dataclass(frozen=True)
class Prepared:
    """What a run needs before its first step: data, sizes, an initialised network."""

    data: Data
    budget: Budget
    network: LanguageModel
    n_steps: int
    tokens_per_step: int
    flops_per_token: int
    hashes: dict[str, str]


def prepare_run(cfg: RunConfig) -> Prepared:
    """Prepare the data, solve the budget, build and initialise the network. Writes nothing but the token cache.

    Raises:
        UserError: sizes that no memory here holds, a block that breaks the contract, a budget that cannot be met, data
            that cannot be read, a length shorter than one batch.
    """
    check_memory(cfg)
    factory = make_block(cfg.ffn.target, cfg.ffn.options)
    wanted = cfg.budget
    with blamed_on(cfg.ffn.target):
        budget = solve(factory, cfg.model.d_model, wanted.kind, wanted.multiple_of, wanted.tolerance, wanted.d_ff)
        try_block(factory, cfg.model.d_model, budget.d_ff)
    data: Data = prepare(cfg.data, cfg.model.context_length)
    tokens_per_step = cfg.train.batch_size * data.context_length
    n_steps = cfg.train.tokens // tokens_per_step
    if n_steps < 1:
        raise UserError(
            f"train.tokens={cfg.train.tokens} is less than one batch of {tokens_per_step} tokens "
            f"(train.batch_size {cfg.train.batch_size} x context {data.context_length})"
        )
    network = build(cfg.model, data.vocab_size, factory, budget.d_ff, cfg.init_seed, cfg.ffn.down_init)
    network.checkpoint_blocks = cfg.train.checkpoint_blocks
    hashes = {
        "data": data.hash,
        "batches": order_hash(data, cfg.data_seed, cfg.train.batch_size, n_steps),
        "shared_init": shared_init_hash(network),
    }
    return Prepared(data, budget, network, n_steps, tokens_per_step, count_flops(cfg, data, budget), hashes)


def count_flops(cfg: RunConfig, data: Data, budget: Budget) -> int:
    """FLOPs per token of a training step at full context: the forward pass counted on the meta device, times three."""
    factory = make_block(cfg.ffn.target, cfg.ffn.options)
    with torch.device("meta"):
        twin = LanguageModel(cfg.model, data.vocab_size, lambda: factory(cfg.model.d_model, budget.d_ff))
        tokens = torch.zeros(1, data.context_length, dtype=torch.long)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            twin(tokens)
    return 3 * int(counter.get_total_flops()) // data.context_length
