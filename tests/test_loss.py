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


def compile_if(module, compiled):
    """Compile as for a GPU, without generating code."""
    if compiled:
        module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    return module


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 3, 7])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_torchs(model, rows, num_chunks, label_smoothing, compiled):
    """Chunks, smoothing, the mask of the padding and compilation change neither value nor gradients."""
    module = compile_if(LanguageModelingLoss(model, VOCAB, label_smoothing, num_chunks).train(), compiled)
    expected = reference(model, rows, label_smoothing)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = module(rows[:, :-1], rows[:, 1:])["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 4])
def test_evaluation_returns_the_nats_of_each_target(model, rows, num_chunks, compiled):
    """In eval mode, fp32 without smoothing, and 0 where a target does not count; training returns only the loss."""
    module = compile_if(LanguageModelingLoss(model, VOCAB, 0.3, num_chunks).eval(), compiled)
    targets = rows[:, 1:].clone()
    targets[1, 5:] = IGNORE_INDEX
    found = module(rows[:, :-1], targets)
    logits = model(input_ids=rows[:, :-1]).logits[..., :VOCAB]
    expected = -logits.log_softmax(dim=-1).gather(2, rows[:, 1:, None])[..., 0]
    expected[1, 5:] = 0
    assert found["losses"].dtype == torch.float32 and found["losses"].shape == targets.shape
    torch.testing.assert_close(found["losses"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["loss"], expected.sum() / (targets >= 0).sum(), rtol=1e-6, atol=1e-6)
    assert module.train()(rows[:, :-1], targets).keys() == {"loss"}


def test_every_position_is_trained(model, rows):
    """All T position embeddings get a gradient (Transformers' own shift leaves the last one without)."""
    LanguageModelingLoss(model, VOCAB)(rows[:, :-1], rows[:, 1:])["loss"].backward()
    assert model.transformer.wpe.weight.grad.abs().sum(dim=1).gt(0).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padding", [0.0, 1000.0])
@pytest.mark.parametrize("autocast", [False, True])
def test_padding_does_not_affect_the_loss(model, rows, label_smoothing, padding, autocast):
    """Real logits near -35, as OpenAI's GPT-2 has them: rows of any size get no probability and no gradient."""
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(0.1)
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[:VOCAB] -= 35 / 32
        model.lm_head.weight[VOCAB:] = padding
        real = model(input_ids=rows[:, :-1]).logits[..., :VOCAB]
    assert real.median().item() == pytest.approx(-35, abs=3)
    module = LanguageModelingLoss(model, VOCAB, label_smoothing)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = module(rows[:, :-1], rows[:, 1:])["loss"]
        real = model(input_ids=rows[:, :-1]).logits[..., :VOCAB].float()
    loss.backward()
    expected = F.cross_entropy(real.flatten(0, 1), rows[:, 1:].flatten(), label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert not model.lm_head.weight.grad[VOCAB:].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_targets_of_minus_100_do_not_count(model, rows, compiled):
    """They are in neither the sum nor the mean; without any other target the loss is zero, not NaN."""
    module = compile_if(LanguageModelingLoss(model, VOCAB), compiled)
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
