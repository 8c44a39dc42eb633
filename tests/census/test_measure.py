"""The census of whole models."""

import contextlib
import copy
import math

import pytest
import torch
from torch import Tensor, nn

from ffnlab.census import Census, CensusError, NonFiniteError, census
from ffnlab.census.figures import split_layers
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN

D_MODEL, D_FF, LAYERS = 16, 40, 2
DENSE = ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu", "swish", "relu2")
GATED = ("sigmoid", "identity", "relu", "gelu", "silu")
SHIPPED = [("dense", name) for name in DENSE] + [("gated", name) for name in GATED]
EXACT = {"relu", "relu2"}


class Stack(nn.Module):
    """Embedding and FFN blocks with a residual stream: all that a census looks at."""

    def __init__(self, kind: str, activation: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(64, D_MODEL)
        block = {"dense": DenseFFN, "gated": GatedFFN}[kind]
        self.ffns = nn.ModuleList(
            block(D_MODEL, D_FF, activation, bias=True, dropout_hidden=0.5) for _ in range(LAYERS)
        )
        self.head = nn.Linear(D_MODEL, 64)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        for ffn in self.ffns:
            x = x + ffn(x)
        return self.head(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


def tokens(batches: int = 4, rows: int = 8, length: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(63, (rows, length), generator=generator),  # 63 is left for padding
            torch.randint(64, (rows, length), generator=generator),
        )
        for _ in range(batches)
    ]


def take(model: nn.Module, batches: list | None = None, **options) -> Census:
    return census(model, tokens() if batches is None else batches, down=["ffns.*.down"], **options)


def dead_count(model: Stack, name: str) -> float | None:
    """Neurons of layer 1, as a count."""
    value = take(model, loss=model.loss).figures().get(f"{name}_L1")
    return None if value is None else value * D_FF


@torch.no_grad()
def plant(model: Stack, way: str, k: int) -> None:
    ffn = model.ffns[1]
    first = ffn.gate if isinstance(ffn, GatedFFN) else ffn.up
    if way == "incoming":  # zero incoming weights and a negative bias
        first.weight[:k] = 0
        first.bias[:k] = -1
    elif way == "outgoing":  # zero column
        ffn.down.weight[:, :k] = 0
    elif way == "closed":  # the gate never opens, though it moves
        first.weight[:k] *= 0.1
        first.bias[:k] = -3
    elif way == "up":  # the up branch is zero
        ffn.up.weight[:k] = 0
        ffn.up.bias[:k] = 0


WAYS = {"dense": ("incoming", "outgoing", "closed"), "gated": ("incoming", "outgoing", "closed", "up")}


@pytest.mark.parametrize(
    ("kind", "activation", "way"),
    [(kind, activation, way) for kind, activation in SHIPPED for way in WAYS[kind]],
)
def test_planted_neurons_are_seen_by_exactly_the_figures_that_should(kind: str, activation: str, way: str) -> None:
    """The figures of layer 1 rise by exactly k where they should, and stay where they should not."""
    k = 7
    before, planted = Stack(kind, activation), Stack(kind, activation)
    plant(planted, way, k)
    exact = activation in EXACT
    # what is silent: the neuron whose activation is 0 below 0, or whose partner in the product is 0
    zero_at_negative = exact and way in ("incoming", "closed")
    silent = zero_at_negative or way == "up"
    rises = {
        "dead/exact": silent if exact else None,
        "dead/rel": silent,
        "dead/contrib": silent or way == "outgoing",
        "gate/never_open": way in ("incoming", "closed"),
    }
    for name, expected in rises.items():
        was, now = dead_count(before, name), dead_count(planted, name)
        if expected is None:
            assert was is None, name
            assert now is None, name
        else:
            assert was == pytest.approx(0), name
            assert now == pytest.approx(k if expected else 0), name
    # a silent ReLU gets no gradient, nor does a neuron whose way out is cut; a zero `up` still feeds its own weights
    gradient_free = zero_at_negative or way == "outgoing"
    assert dead_count(planted, "dead/gradient") == pytest.approx(k if gradient_free else 0)
    # the other layer is as it was
    assert take(planted).figures()["dead/rel_L0"] == take(before).figures()["dead/rel_L0"] == 0


@pytest.mark.parametrize(("kind", "activation"), SHIPPED)
def test_dead_exact_is_reported_for_half_line_zeros_only(kind: str, activation: str) -> None:
    figures = take(Stack(kind, activation)).figures()
    assert ("dead/exact" in figures) == (activation in EXACT)
    assert ("dead/exact_L0" in figures) == (activation in EXACT)


def test_the_split_into_batches_does_not_matter() -> None:
    model = Stack("gated", "silu")
    inputs, targets = (torch.cat(parts) for parts in zip(*tokens(), strict=True))
    whole = take(model, [(inputs, targets)])
    for size in (1, 5, 32):
        parts = take(model, list(zip(inputs.split(size), targets.split(size), strict=True)))
        # matrix products of other shapes round differently in the last bit; counts must not care
        assert parts.figures() == pytest.approx(whole.figures(), abs=1e-12)


@pytest.mark.slow
def test_compiled_and_eager_count_the_same() -> None:
    model = Stack("dense", "relu")
    plant(model, "closed", 5)
    eager = take(model, blocks=["ffns.*"])
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    in_place(tokens()[0][0])  # compiled by now
    assert take(in_place, blocks=["ffns.*"]).figures() == eager.figures()
    assert take(in_place, blocks=["ffns.*"]).health == eager.health
    assert take(torch.compile(model, backend="eager")).figures() == eager.figures()


def test_a_hook_that_is_skipped_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the eager stance a compiled module passes hooks by; the census must notice."""
    model = Stack("dense", "relu")
    model.compile(backend="eager")
    model.eval()
    with torch.no_grad():
        model(tokens()[0][0])
    monkeypatch.setattr(torch.compiler, "set_stance", lambda _: contextlib.nullcontext())
    with pytest.raises(CensusError, match="ran 0 times"):
        take(model)


def test_the_model_is_left_as_it_was() -> None:
    model = Stack("gated", "gelu")
    model.ffns[0].eval()
    state, random, modes = (
        copy.deepcopy(model.state_dict()),
        torch.get_rng_state(),
        [m.training for m in model.modules()],
    )
    precision = torch.get_float32_matmul_precision()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = take(model, loss=model.loss, blocks=["ffns.*"])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.get_float32_matmul_precision() == precision
    # neither autocast nor dropout had a say
    second = take(model, loss=model.loss, blocks=["ffns.*"])
    assert (first.figures(), first.health) == (second.figures(), second.health)


def test_a_half_precision_model_is_measured_in_float32_and_given_back() -> None:
    model = Stack("gated", "silu").bfloat16()
    result = take(model, loss=model.loss)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    full = copy.deepcopy(model).float()
    assert result.figures() == take(full, loss=full.loss).figures()


def test_padding_and_ignored_positions_do_not_count() -> None:
    model = Stack("dense", "relu")
    batches = tokens()
    padded = []
    for inputs, targets in batches:
        filler = torch.full((8, 5), 63)
        padded.append((torch.cat([inputs, filler], 1), torch.cat([targets, torch.full((8, 5), -100)], 1)))
    with torch.no_grad():
        model.embedding.weight[63] *= 100  # what would be seen if padding counted
    plain = take(model, batches)
    ignored = take(model, padded)
    masked = take(model, [(inputs, targets != -100) for inputs, targets in padded])
    assert plain.n == ignored.n == masked.n == 4 * 8 * 16
    assert ignored.figures() == pytest.approx(plain.figures(), abs=1e-12)
    assert masked.figures() == pytest.approx(plain.figures(), abs=1e-12)


def test_n_cuts_within_a_batch_and_more_than_there_is_means_all() -> None:
    model = Stack("dense", "gelu")
    inputs, targets = (torch.cat(parts) for parts in zip(*tokens(), strict=True))
    assert take(model, n=200).n == 200
    flat = (inputs.flatten()[:200, None], targets.flatten()[:200, None])
    assert take(model, n=200).figures() == pytest.approx(take(model, [flat]).figures(), abs=1e-12)
    assert take(model, n=10**6).figures()["census/n"] == 4 * 8 * 16
    assert take(model, iter(tokens())).n == 4 * 8 * 16


def test_a_zero_down_projection_raises_no_false_alarm() -> None:
    model = Stack("gated", "relu")
    with torch.no_grad():
        for ffn in model.ffns:
            ffn.down.weight.zero_()
            ffn.down.bias.zero_()
    figures = take(model, loss=model.loss).figures()
    assert not any(name.startswith(("dead/contrib", "dead/gradient")) for name in figures)
    assert {name: value for name, value in figures.items() if value and name.startswith(("dead", "gate", "dorm"))} == {}


@pytest.mark.parametrize(
    ("poison", "layer", "tensor"),
    [
        (lambda m: m.embedding.weight, 0, "ffn_input"),
        (lambda m: m.ffns[1].up.weight, 1, "pre_activation"),
        (lambda m: m.ffns[0].down.weight, 0, "ffn_output"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(poison, layer: int, tensor: str) -> None:
    model = Stack("dense", "gelu")
    with torch.no_grad():
        poison(model)[:, 0] = math.nan
    with pytest.raises(NonFiniteError, match=f"{tensor} of layer {layer}") as error:
        take(model, blocks=["ffns.*"])
    assert (error.value.layer, error.value.tensor) == (layer, tensor)


def test_health_is_what_it_says() -> None:
    model = Stack("dense", "gelu").eval()
    seen: dict[str, Tensor] = {}
    handles = [
        model.ffns[0].register_forward_hook(lambda _, args, out: seen.update(input=args[0], output=out)),
        model.ffns[0].down.register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0])),
    ]
    inputs = torch.cat([batch[0] for batch in tokens()])
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    health = take(model, blocks=["ffns.*"]).health  # here a "block" is the FFN itself: its output is the stream
    hidden, output = seen["hidden"].double().flatten(), seen["output"].double()
    centred = hidden - hidden.mean()
    assert health["health/hidden_rms_L0"] == pytest.approx(float(hidden.square().mean().sqrt()), rel=1e-5)
    assert health["health/hidden_max_L0"] == pytest.approx(float(hidden.abs().max()), rel=1e-5)
    kurtosis = centred.pow(4).mean() / centred.square().mean() ** 2
    assert health["health/hidden_kurtosis_L0"] == pytest.approx(float(kurtosis), rel=1e-5)
    assert health["health/ffn_ratio_L0"] == pytest.approx(
        float(output.norm() / seen["input"].double().norm()), rel=1e-5
    )
    assert health["health/residual_rms_L0"] == pytest.approx(float(output.square().mean().sqrt()), rel=1e-5)
    assert health["health/residual_max_L0"] == pytest.approx(float(output.abs().max()), rel=1e-5)


def test_health_counts_the_same_tokens() -> None:
    model = Stack("dense", "gelu")
    inputs, targets = (torch.cat(parts) for parts in zip(*tokens(), strict=True))
    cut = take(model, [(inputs, targets)], n=200, blocks=["ffns.*"]).health
    masked = torch.full_like(targets, -100)
    masked.view(-1)[:200] = 1
    assert cut == pytest.approx(take(model, [(inputs, masked)], blocks=["ffns.*"]).health, rel=1e-12)


def test_gpt2_of_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        mlp = model.transformer.h[1].mlp
        mlp.c_proj.weight[:6] = 0  # Conv1D: a neuron is a row
        mlp.c_fc.weight[:, 6:10] = 0
        mlp.c_fc.bias[6:10] = -1
    batches = [{"input_ids": inputs, "attention_mask": torch.ones_like(inputs)} for inputs, _ in tokens()]
    batches[0]["attention_mask"][:, 12:] = 0
    result = census(
        model,
        batches,
        down=["h.*.mlp.c_proj"],
        loss=lambda batch: model(**batch, labels=batch["input_ids"]).loss,
    )
    figures = result.figures()
    assert result.n == 4 * 8 * 16 - 8 * 4
    assert result.names == [f"transformer.h.{layer}.mlp.c_proj" for layer in range(3)]
    assert [len(layer["neuron"]) for layer in split_layers(result.table)] == [64] * 3
    assert figures["dead/contrib_L1"] == 6 / 64
    assert figures["gate/never_open_L1"] == 4 / 64
    assert figures["dead/gradient_L1"] == 6 / 64
    assert figures["dead/rel"] == 0
    assert "dead/exact" not in figures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "at least 1 token"),
        ({"batches": []}, "no tokens"),
        ({"batches": [(torch.zeros(2, 3).long(), torch.full((2, 3), -100))]}, "no tokens"),
        ({"batches": [(torch.zeros(2, 3).long(), torch.zeros(2).long())]}, "do not fit"),
        ({"blocks": ["head"]}, "1 blocks but 2 down"),
    ],
)
def test_bad_input_is_said_in_a_sentence(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        take(Stack("dense", "relu"), **options)
