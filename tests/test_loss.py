"""The loss equals torch's cross-entropy on a stock model's logits."""

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.model.loss import IGNORE_INDEX, LanguageModelingLoss

VOCAB, PADDED, T = 500, 512, 32


@pytest.fixture
def model():
    torch.manual_seed(0)
    size = {"vocab_size": PADDED, "n_positions": T, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        model.transformer.wte.weight.mul_(20)  # logits far from uniform
    return model


@pytest.fixture
def rows():
    return torch.randint(0, VOCAB, (3, T + 1), generator=torch.Generator().manual_seed(1))


def reference(model, rows, label_smoothing=0.0):
    """Return torch's mean cross-entropy over the real vocabulary, for T targets per row."""
    logits = model(input_ids=rows[:, :-1]).logits[..., :VOCAB]
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), label_smoothing=label_smoothing)


@pytest.mark.parametrize("num_chunks", [1, 3, 7])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_torchs(model, rows, num_chunks, label_smoothing):
    """Chunks, smoothing and the mask of the padding change neither value nor gradients."""
    module = LanguageModelingLoss(model, VOCAB, label_smoothing, num_chunks).train()
    expected = reference(model, rows, label_smoothing)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = module(rows[:, :-1], rows[:, 1:])["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_evaluation_is_not_smoothed(model, rows):
    """In eval mode, label smoothing does not change the loss."""
    module = LanguageModelingLoss(model, VOCAB, label_smoothing=0.3).eval()
    torch.testing.assert_close(module(rows[:, :-1], rows[:, 1:])["loss"], reference(model, rows), rtol=1e-6, atol=1e-6)


def test_every_position_is_trained(model, rows):
    """All T position embeddings get a gradient (Transformers' own shift leaves the last one without)."""
    LanguageModelingLoss(model, VOCAB)(rows[:, :-1], rows[:, 1:])["loss"].backward()
    assert model.transformer.wpe.weight.grad.abs().sum(dim=1).gt(0).all()


def test_padding_does_not_affect_the_loss(model, rows):
    """The padding's rows do not change the loss and get no gradient, however large they are."""
    module = LanguageModelingLoss(model, VOCAB, label_smoothing=0.1)
    before = module(rows[:, :-1], rows[:, 1:])["loss"].item()
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 1000.0
    loss = module(rows[:, :-1], rows[:, 1:])["loss"]
    loss.backward()
    assert loss.item() == before
    assert not model.lm_head.weight.grad[VOCAB:].any()


def test_targets_of_minus_100_do_not_count(model, rows):
    """They are in neither the sum nor the mean; without any other target the loss is zero, not NaN."""
    module = LanguageModelingLoss(model, VOCAB)
    targets = rows[:, 1:].clone()
    targets[1:] = IGNORE_INDEX
    torch.testing.assert_close(module(rows[:, :-1], targets)["loss"], reference(model, rows[:1]), rtol=1e-6, atol=1e-6)
    assert module(rows[:, :-1], torch.full_like(targets, IGNORE_INDEX))["loss"].item() == 0


def test_the_loss_is_an_fp32_scalar(model, rows):
    """The loss stays fp32 under bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = LanguageModelingLoss(model, VOCAB)(rows[:, :-1], rows[:, 1:])["loss"]
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(reference(model, rows).item(), abs=0.05)
