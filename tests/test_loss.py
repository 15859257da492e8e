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


def real_logits(model, rows):
    """Return the stock model's logits of the vocabulary without its padding."""
    return model(input_ids=rows[:, :-1]).logits[..., :VOCAB].float()


def ignore_some(rows):
    targets = rows[:, 1:].clone()
    targets[1, 5:] = IGNORE_INDEX
    return targets


@pytest.mark.parametrize(
    ("num_chunks", "label_smoothing", "compiled"),
    [(1, 0.0, False), (1, 0.1, False), (7, 0.0, False), (7, 0.1, False), (1, 0.1, True), (3, 0.0, True)],
)
def test_loss_and_gradients_equal_torchs(model, rows, num_chunks, label_smoothing, compiled):
    """Over all positions of a row, except targets of -100, in neither the sum nor the mean."""
    module, targets = LanguageModelingLoss(model, VOCAB, label_smoothing, num_chunks).train(), ignore_some(rows)
    if compiled:  # as for a GPU, without generating code
        module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    logits = real_logits(model, rows).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    outputs = module(rows[:, :-1], targets)
    assert outputs.keys() == {"loss"}  # not the logits, which would take much memory
    outputs["loss"].backward()
    torch.testing.assert_close(outputs["loss"], expected, rtol=1e-6, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    nothing = torch.full_like(targets, IGNORE_INDEX)
    assert module(rows[:, :-1], nothing)["loss"].item() == 0  # not NaN


@pytest.mark.parametrize(("num_chunks", "compiled"), [(1, False), (4, False), (1, True)])
def test_evaluation_returns_the_nats_of_each_target(model, rows, num_chunks, compiled):
    """In eval mode, in fp32 without smoothing, and 0 where a target does not count."""
    module, targets = LanguageModelingLoss(model, VOCAB, 0.3, num_chunks).eval(), ignore_some(rows)
    if compiled:
        module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    found = module(rows[:, :-1], targets)
    expected = -real_logits(model, rows).log_softmax(dim=-1).gather(2, rows[:, 1:, None])[..., 0]
    expected[1, 5:] = 0
    assert found["losses"].dtype == torch.float32
    torch.testing.assert_close(found["losses"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["loss"], expected.sum() / (targets >= 0).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("label_smoothing", "autocast"), [(0.0, False), (0.1, False), (0.1, True)])
def test_the_padding_has_no_part_in_the_loss(model, rows, label_smoothing, autocast):
    """With real logits near -35, as OpenAI's GPT-2 has them, rows of any size get no probability and no gradient."""
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(0.1)
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[:VOCAB] -= 35 / 32
        model.lm_head.weight[VOCAB:] = 1000.0
        assert real_logits(model, rows).median().item() == pytest.approx(-35, abs=3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = LanguageModelingLoss(model, VOCAB, label_smoothing)(rows[:, :-1], rows[:, 1:])["loss"]
        logits = real_logits(model, rows).flatten(0, 1)
    loss.backward()
    expected = F.cross_entropy(logits, rows[:, 1:].flatten(), label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)  # in fp32
    assert not model.lm_head.weight.grad[VOCAB:].any()
