"""Optimizer groups and schedule against the formulas they stand for."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.config import UserError, load_config
from recipe.loss import LanguageModelingLoss
from recipe.optim import build_optimizer, build_scheduler, check_schedule


def config_of(*argv):
    return load_config(["--dataset_dir", "d", *argv])[0]


def test_decay_is_on_matrices_and_embeddings_only():
    """Every parameter is in one group; biases and LayerNorm are not decayed."""
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
    """Three steps equal Loshchilov and Hutter's update written out."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3)
    expected = {name: p.detach().clone() for name, p in layer.named_parameters()}
    config = config_of("--optim", optim, "--learning_rate", "0.01", "--weight_decay", "0.1")
    optimizer = build_optimizer(config, layer)
    assert optimizer.param_groups[0]["fused"] is (optim == "adamw_torch_fused")
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


def learning_rates(config):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    scheduler = build_scheduler(config, optimizer)
    values = []
    for _ in range(config.max_steps + 1):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


def test_gpt2_schedule():
    """6e-4 after 715 steps of linear warm-up, then a cosine to 6e-5 at step 19,073."""
    config = config_of("--config", "gpt2_124m")
    values = learning_rates(config)
    for step in (0, 1, 300, 715, 716, 5000, 9894, 15000, 19073):
        if step <= 715:
            expected = 6e-4 * step / 715
        else:
            progress = (step - 715) / (19073 - 715)
            expected = 6e-5 + 0.5 * (6e-4 - 6e-5) * (1 + math.cos(math.pi * progress))
        assert values[step] == pytest.approx(expected, rel=1e-9), step
    assert max(values) == pytest.approx(6e-4) and values[-1] == pytest.approx(6e-5)


def test_warmup_below_one_is_a_share():
    config = config_of("--config", "demo", "--max_steps", "100", "--warmup_steps", "0.2", "--learning_rate", "1.0")
    assert learning_rates(config)[20] == pytest.approx(1.0) and learning_rates(config)[10] == pytest.approx(0.5)


def test_bad_schedule_arguments():
    """Arguments that the schedule does not know, or a schedule that wants metrics, are refused at the start."""
    with pytest.raises(UserError, match="lr_scheduler_type reduce_lr_on_plateau"):
        check_schedule(config_of("--lr_scheduler_type", "reduce_lr_on_plateau"))
    with pytest.raises(UserError, match="lr_scheduler_type linear with lr_scheduler_kwargs"):
        check_schedule(config_of("--lr_scheduler_type", "linear", "--lr_scheduler_kwargs", "min_lr_rate=0.1"))
    with pytest.raises(UserError, match="lr_scheduler_kwargs .*min_lr_rate"):  # noticed after the warm-up only
        check_schedule(config_of("--lr_scheduler_kwargs", "min_lr_rate=abc"))
    check_schedule(config_of("--lr_scheduler_kwargs", "min_lr_rate=1e-1"))
    check_schedule(config_of("--lr_scheduler_type", "linear"))
