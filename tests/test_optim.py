"""Optimizer, schedule and guarded update agree with their formulas."""

import math
from unittest.mock import create_autospec

import pytest
import torch
from accelerate import Accelerator
from conftest import reset_accelerate
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.guard import GuardedUpdate
from recipe.optim.optimizers import build_optimizer
from recipe.optim.schedule import compute_learning_rates


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


def test_gpt2_schedule():
    """Linear warm-up to 6e-4 in 715 steps, then a cosine to 6e-5 at the last of 19,073 steps."""
    config = config_of("--config", "gpt2_124m")
    values = compute_learning_rates(config)
    for step in (0, 1, 300, 715, 716, 5000, 9894, 15000, 19072):
        if step <= 715:
            expected = 6e-4 * step / 715
        else:
            progress = (step - 715) / (19073 - 715)
            expected = 6e-5 + 0.5 * (6e-4 - 6e-5) * (1 + math.cos(math.pi * progress))
        assert values[step] == pytest.approx(expected, rel=1e-9), step
    assert max(values) == pytest.approx(6e-4) and values[-1] == pytest.approx(6e-5)


def test_warmup_below_one_is_a_share():
    """`warmup_steps` 0.2 of 100 steps warms up for 20 steps."""
    config = config_of("--config", "demo", "--max_steps", "100", "--warmup_steps", "0.2", "--learning_rate", "1.0")
    rates = compute_learning_rates(config)
    assert (rates[10], rates[20]) == (pytest.approx(0.5), pytest.approx(1.0))


def test_bad_schedule_arguments():
    """Unknown or wrong arguments, and a schedule that depends on the loss, are refused before training."""
    cosine = ("--lr_scheduler_type", "cosine_with_min_lr")
    with pytest.raises(UserError, match="unknown lr_scheduler_type 'reduce_lr_on_plateau'"):
        config_of("--lr_scheduler_type", "reduce_lr_on_plateau")
    with pytest.raises(UserError, match="lr_scheduler_type linear with lr_scheduler_kwargs"):
        compute_learning_rates(config_of("--lr_scheduler_type", "linear", "--lr_scheduler_kwargs", "min_lr_rate=0.1"))
    with pytest.raises(UserError, match="lr_scheduler_kwargs .*min_lr_rate"):  # only fails after the warm-up
        compute_learning_rates(config_of(*cosine, "--lr_scheduler_kwargs", "min_lr_rate=abc"))
    compute_learning_rates(config_of(*cosine, "--lr_scheduler_kwargs", "min_lr_rate=1e-1"))
    compute_learning_rates(config_of("--lr_scheduler_type", "linear"))


@pytest.fixture
def accelerator():
    reset_accelerate()
    yield Accelerator(cpu=True)
    reset_accelerate()


def guarded(accelerator, *argv, num_parameters=6):
    """Return a guarded update of one parameter, and a function that takes a step with the given gradient."""
    torch.manual_seed(0)
    module = torch.nn.Linear(num_parameters, 1, bias=False)
    config = config_of("--max_steps", "400", "--warmup_steps", "5", "--max_grad_norm", "0", *argv)
    module, optimizer = accelerator.prepare(module, build_optimizer(config, module))
    update = GuardedUpdate(config, accelerator, optimizer)

    def step(gradient, loss=1.0):
        module.weight.grad = torch.full_like(module.weight, gradient)
        update.step(torch.tensor(loss), module.weight.grad.norm())
        return module.weight.detach().clone()

    return update, step


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_gradients_change_nothing(accelerator, optim, bad):
    """Skipped steps leave no trace: weights, moments and learning rates are the same bit for bit without them."""
    update, step = guarded(accelerator, "--optim", optim)
    for gradient in (0.1, bad, bad, -0.3, bad, 0.2, 0.2):
        weight = step(gradient)
    assert update.numbers().tolist() == [4, 3, 2]
    assert update.numbers().tolist() == [4, 3, 0]  # the most in a row since the last call
    expected_update, expected_step = guarded(accelerator, "--optim", optim)
    for gradient in (0.1, -0.3, 0.2, 0.2):
        expected = expected_step(gradient)
    assert torch.equal(weight, expected)
    (found,), (state,) = (u.optimizer.state.values() for u in (update, expected_update))
    assert all(torch.equal(found[key], state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert float(update.optimizer.param_groups[0]["lr"]) == pytest.approx(update.learning_rates[3])


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_updates_follow_the_schedule(accelerator, optim):
    """Each update uses the learning rate that the schedule has for it."""
    update, step = guarded(accelerator, "--optim", optim)
    for expected in compute_learning_rates(config_of("--max_steps", "400", "--warmup_steps", "5")):
        step(0.1)
        assert float(update.optimizer.param_groups[1]["lr"]) == pytest.approx(expected, rel=1e-6)


def test_a_resumed_guard_continues_its_counts(accelerator):
    """Also of bad steps in a row, which may span a checkpoint."""
    update, step = guarded(accelerator)
    for gradient in (0.1, math.nan, math.nan):
        step(gradient)
    other, other_step = guarded(accelerator)
    other.load_state_dict(update.state_dict())
    other_step(math.nan)
    assert other.numbers().tolist() == [1, 3, 3]


def test_fp16_overflow_is_not_a_bad_step(accelerator):
    """An infinite gradient with a finite loss updates the scaler and skips the step, but is not counted as bad."""
    update, step = guarded(accelerator)
    accelerator.scaler = create_autospec(torch.amp.GradScaler, instance=True)
    before = step(0.1)
    assert torch.equal(step(math.inf), before) and torch.equal(step(math.nan), before)
    assert update.numbers().tolist() == [1, 2, 0] and accelerator.scaler.update.call_count == 3
    assert torch.equal(step(math.nan, loss=math.nan), before)
    assert update.numbers().tolist() == [1, 3, 1]
    for _ in range(60):  # after 50 halvings the loss scale is useless
        step(math.inf)
    assert update.numbers().tolist()[2] > 0
