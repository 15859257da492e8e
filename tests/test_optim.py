"""AdamW and the guarded update agree with their formulas."""

import math

import pytest
import torch
from accelerate import Accelerator
from conftest import reset_accelerate
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.guard import UpdateGuard
from recipe.optim.optimizers import build_optimizer


def config_of(*argv):
    return load_config(["--config", "gpt2_124m", "--dataset_dir", "d", *argv])[0]


def test_only_matrices_and_embeddings_decay():
    """Every parameter is in exactly one group; biases and LayerNorm do not decay."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=128))
    optimizer = build_optimizer(config_of("--weight_decay", "0.1"), LanguageModelingLoss(model, 128))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, other = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert sorted(decayed + other) == sorted(names.values())
    assert all(name.endswith(".bias") or ".ln_" in name for name in other)
    assert not any(name.endswith(".bias") or ".ln_" in name for name in decayed)
    assert "transformer.wte.weight" in decayed and "transformer.wpe.weight" in decayed


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_adamw_is_the_published_update(optim):
    """Three steps equal Loshchilov and Hutter's formula."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3)
    expected = {name: p.detach().clone() for name, p in layer.named_parameters()}
    config = config_of("--optim", optim, "--learning_rate", "0.01", "--weight_decay", "0.1")
    optimizer = build_optimizer(config, layer)
    assert optimizer.param_groups[0]["fused"] is (True if optim == "adamw_torch_fused" else None)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for t in range(1, 4):
        for name, p in layer.named_parameters():
            p.grad = torch.randn_like(p)
            m, v = moments[name]
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.95).add_(0.05 * p.grad**2)
            if name == "weight":
                expected[name] *= 1 - 0.01 * 0.1
            expected[name] -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        optimizer.step()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------ the guard


@pytest.fixture
def accelerator():
    reset_accelerate()
    yield Accelerator(cpu=True)
    reset_accelerate()


def guarded(accelerator, optim):
    """Return a guard, its optimizer, and a function that takes a step with the given gradient."""
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 1, bias=False)
    module, optimizer = accelerator.prepare(module, build_optimizer(config_of("--optim", optim), module))
    guard = UpdateGuard(accelerator)

    def step(gradient, loss=1.0):
        module.weight.grad = torch.full_like(module.weight, gradient)
        if accelerator.scaler is not None:
            accelerator.scaler.scale(torch.ones(()))  # creates the scale
            module.weight.grad *= accelerator.scaler.get_scale()
            accelerator.scaler.unscale_(optimizer.optimizer)
        guard.step(optimizer, torch.tensor(loss), module.weight.grad.norm())
        return module.weight.detach().clone()

    return guard, optimizer.optimizer, step


OPTIMS = ["adamw_torch_fused", "adamw_torch"]


@pytest.mark.parametrize("optim", OPTIMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_gradients_change_nothing(accelerator, optim, bad):
    """Skipped updates leave no trace: weights and moments are the same bit for bit without them."""
    guard, optimizer, step = guarded(accelerator, optim)
    for gradient, counts in (
        (0.1, [0, 0]),
        (bad, [1, 1]),
        (bad, [2, 2]),
        (-0.3, [2, 0]),
        (bad, [3, 1]),
        (0.2, [3, 0]),
    ):
        weight = step(gradient)
        assert guard.counts.tolist() == counts  # skipped, and bad in a row
    _, expected_optimizer, expected_step = guarded(accelerator, optim)
    for gradient in (0.1, -0.3, 0.2):
        expected = expected_step(gradient)
    assert torch.equal(weight, expected)
    (found,), (state,) = (some.state.values() for some in (optimizer, expected_optimizer))
    assert all(torch.equal(found[key], state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("optim", OPTIMS)
def test_fp16_overflow_is_not_a_bad_step(accelerator, optim):
    """torch's scaler halves its scale, and the update is skipped. A bad loss or a scale below 1 counts."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    guard, _, step = guarded(accelerator, optim)
    before = step(0.1)
    assert torch.equal(step(math.inf), before) and torch.equal(step(math.nan), before)
    assert guard.counts.tolist() == [2, 0] and accelerator.scaler.get_scale() == 1
    assert torch.equal(step(math.nan, loss=math.nan), before)
    assert guard.counts.tolist() == [3, 1]
    assert not torch.equal(step(0.1), before)
    assert guard.counts.tolist() == [3, 0]
    step(math.inf)
    assert guard.counts.tolist() == [4, 1]
