"""The optimizers: AdamW is torch's, Muon is the published update, and a bad gradient changes nothing."""

import copy
import itertools
import json
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import needs_bitsandbytes, reset_accelerate
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from recipe.command_line import load_config
from recipe.hardware.memory import optimizer_bytes
from recipe.model.loss import LanguageModelingLoss
from recipe.optim import muon
from recipe.optim.guard import UpdateGuard
from recipe.optim.muon import orthogonalize
from recipe.optim.optimizers import build_optimizer

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 128, "n_positions": 32}
LLAMA = LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=88, num_attention_heads=4, vocab_size=128)
NARROW = {"n_embd": 16, "n_inner": 24, "vocab_size": 64, "n_positions": 8}
EIGHT_BIT = pytest.param("adamw_bnb_8bit", marks=needs_bitsandbytes)


def build(optim, *argv, model_config=None, **shape):
    """Return a small module and its optimizer. shape: values of `GPT2Config` that differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config or GPT2Config(**GPT2 | shape))
    module = LanguageModelingLoss(model, model.config.vocab_size)
    options = ["--dataset_dir", "d", "--optim", optim, "--learning_rate", "1e-3", *argv]
    return module, build_optimizer(load_config(options).config, module)


def set_gradients(module, noise, value=None):
    """Set them to random numbers, or all to one value."""
    for p in module.parameters():
        p.grad = 0.1 * torch.randn(p.shape, generator=noise) if value is None else torch.full_like(p, value)


def noise_of(seed):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------ parameters and their state


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
@pytest.mark.parametrize("model_config", [GPT2Config(**GPT2), GPT2Config(**GPT2, tie_word_embeddings=False), LLAMA])
def test_which_parameters_decay(optim, model_config):
    """AdamW decays all matrices and embeddings. Muon decays the blocks' matrices only, with c_attn as three."""
    module, optimizer = build(optim, "--weight_decay", "0.3", model_config=model_config)
    names = {p: name for name, p in module.named_parameters()}
    decays = {}
    pieces = {}
    for group in optimizer.param_groups:
        decays |= {names[p]: group["weight_decay"] for p in group["params"]}
        pieces |= {names[p]: count for p, (count, _) in zip(group["params"], group.get("matrices", ()), strict=False)}
    matrices = {name for p, name in names.items() if p.dim() == 2}
    of_blocks = {name for name in matrices if ".h." in name or ".layers." in name}
    decaying = of_blocks if optim == "muon" else matrices
    assert decays == {name: 0.3 if name in decaying else 0.0 for name in names.values()}
    assert pieces == ({name: 3 if "c_attn" in name else 1 for name in of_blocks} if optim == "muon" else {})


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon", EIGHT_BIT])
def test_the_state_takes_as_many_bytes_as_planned(optim):
    """AdamW has two fp32 moments; in 8 bits, or with Muon only one, for the matrices of the blocks."""
    module, optimizer = build(optim)
    set_gradients(module, noise_of(0))
    optimizer.step()
    ignored = {"step", "qmap1", "qmap2", "neuron_squares"}  # small, or shared by all parameters
    values = [value for of in optimizer.state.values() for name, value in of.items() if name not in ignored]
    found = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    assert found == optimizer_bytes(module.model.config, optim)


# ------------------------------------------------------------------ bad gradients


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "muon", EIGHT_BIT])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_gradients_change_nothing(optim, bad):
    """Weights and moments are, bit for bit, those of a run without these steps; skipped steps are counted."""

    def run(steps):
        reset_accelerate()
        accelerator = Accelerator(cpu=True)
        noise = noise_of(0)
        module, optimizer = build(optim)
        guard = UpdateGuard(accelerator)
        counts = []
        for value in steps:
            set_gradients(module, noise, value)
            norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
            if guard.allows(optimizer, torch.ones(()), norm):
                optimizer.step()
            counts.append(guard.counts.tolist())
        reset_accelerate()
        return counts, copy.deepcopy([dict(module.named_parameters()), optimizer.state_dict()["state"]])

    counts, found = run([None, bad, bad, None, bad, None])
    assert counts == [[0, 0], [1, 1], [2, 2], [2, 0], [3, 1], [3, 0]]  # skipped, and bad in a row
    torch.testing.assert_close(found, run([None] * 3)[1], rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, run([None] * 2)[1], rtol=0, atol=0)


def test_the_host_decides_where_a_fused_kernel_ignores_bad_gradients():
    """On MPS: the loop does not call the optimizer, which would write NaN into every weight."""
    reset_accelerate()
    guard = UpdateGuard(Accelerator(cpu=True))
    _, optimizer = build("adamw_torch_fused")
    guard.accelerator = SimpleNamespace(device=SimpleNamespace(type="mps"), scaler=None)
    assert not guard.allows(optimizer, torch.ones(()), torch.tensor(math.nan))
    assert not hasattr(optimizer, "found_inf")
    assert guard.allows(optimizer, torch.ones(()), torch.ones(()))
    assert guard.counts.tolist() == [1, 0]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_fp16_overflow_is_not_a_bad_step(optim):
    """torch's scaler halves its scale, and the update is skipped. A bad loss or a scale below 1 counts."""
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    module, optimizer = build(optim, **NARROW)
    accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # creates the scale
    guard = UpdateGuard(accelerator)
    weight = module.model.transformer.wpe.weight

    def changes(gradient, loss=1.0):
        """Take a step and return whether it changes the weights."""
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, gradient) * scaler.get_scale()
        scaler.unscale_(optimizer)
        if guard.allows(optimizer, torch.tensor(loss), weight.grad.norm()):
            optimizer.step()
        return not torch.equal(weight, before)

    assert changes(0.1)
    assert not changes(math.inf)
    assert not changes(math.nan)
    assert guard.counts.tolist() == [2, 0]
    assert not changes(math.nan, loss=math.nan)
    assert guard.counts.tolist() == [3, 1]
    assert changes(0.1)
    assert not changes(math.inf)
    assert guard.counts.tolist() == [4, 1]
    reset_accelerate()


# ------------------------------------------------------------------ AdamW


@pytest.mark.parametrize("optim", ["muon", EIGHT_BIT])
def test_what_adamw_updates_follows_torchs_adamw(optim):
    """Embeddings, biases and LayerNorm have its bits beside Muon, and are within 1e-5 of its way beside 8-bit AdamW.

    The matrices of 8-bit AdamW are within 3% after 30 steps (measured: at most 1.9%; up to 11% without weight decay).
    """
    module, optimizer = build(optim, "--weight_decay", "1")
    start = copy.deepcopy(dict(module.named_parameters()))
    reference = copy.deepcopy(module)
    decay = 0.0 if optim == "muon" else 1.0
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in reference.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, 0.003, (0.9, 0.95), 1e-8, fused=True)
    noise = noise_of(1)
    for step in range(30):
        for group in (*optimizer.param_groups, *expected.param_groups):
            group["lr"] = 0.003 if step % 2 else 0.002
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            q.grad = 0.01 * torch.randn(q.shape, generator=noise) + 0.02 * q.detach()
            p.grad = q.grad.clone()
        optimizer.step()
        expected.step()
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        apart = ((p - q).norm() / (q - start[name]).norm()).item()
        if p.dim() == 1 or name.endswith(("wte.weight", "wpe.weight")):
            assert apart == 0 if optim == "muon" else apart < 1e-5, name
        elif optim == "adamw_bnb_8bit":
            assert 1e-5 < apart < 0.03, name  # it does use 8 bits


# ------------------------------------------------------------------ Muon


def iterate(x):
    """The paper's quintic, five times, with its coefficients, for numbers: small ones come close to 1."""
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


def orthogonalize_by_svd(matrix):
    """Keep the singular vectors; each singular value becomes the polynomial of its share of the norm."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ iterate(s / s.norm()).diag() @ vh


@pytest.mark.parametrize(
    ("model_config", "stack_values", "found_inf"),
    [
        (GPT2Config(**GPT2 | NARROW), 2**26, torch.tensor(0.0)),
        (GPT2Config(**GPT2 | NARROW), 1, None),
        (LLAMA, 1, None),
    ],
)
def test_muon_is_the_published_update(monkeypatch, model_config, stack_values, found_inf):
    """Five steps of different rates equal a plain float64 loop over the matrices, in one stack per shape or in many.

    Nesterov momentum from 0.85 to 0.95 in 300 updates (modded-nanogpt), scale and weight decay of Moonlight (0.2 times
    the root of the longer side), c_attn as three matrices, and NorMuon's factor for each index of the longer side; of
    a square matrix, for each output: a column of a Conv1D, a row of a Linear.
    """
    monkeypatch.setattr(muon, "STACK_VALUES", stack_values)
    module, optimizer = build("muon", "--weight_decay", "0.5", model_config=model_config)
    optimizer.found_inf = found_inf
    blocks = {n: p for n, p in module.named_parameters() if (".h." in n or ".layers." in n) and p.dim() == 2}
    pieces = {name: 3 if "c_attn" in name else 1 for name in blocks}
    expected = {name: [m.double() for m in p.detach().chunk(pieces[name], 1)] for name, p in blocks.items()}
    momenta = {name: [torch.zeros_like(m) for m in matrices] for name, matrices in expected.items()}
    neurons = defaultdict(float)  # mean squares
    for t, rate in ((0, 0.02), (150, 0.01), (299, 0.03), (300, 0.02), (1000, 0.04)):
        set_gradients(module, noise_of(t))
        mu = 0.85 + 0.1 * min(t / 300, 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, p in blocks.items():
            if optimizer.state[p]:
                optimizer.state[p]["step"].fill_(t)
            for i, gradient in enumerate(p.grad.double().chunk(pieces[name], 1)):
                weight = expected[name][i]
                momentum = momenta[name][i]
                momentum.mul_(mu).add_(gradient)
                update = orthogonalize_by_svd(mu * momentum + gradient)
                rows, columns = weight.shape
                dim = 0 if rows < columns or rows == columns and model_config.model_type == "gpt2" else 1
                neurons[name, i] = 0.95 * neurons[name, i] + 0.05 * update.square().mean(dim, keepdim=True)
                normalized = update / neurons[name, i].sqrt()
                update = 0.2 * max(weight.shape) ** 0.5 * normalized * update.norm() / normalized.norm()
                weight -= rate * (update + 0.5 * weight)
        optimizer.step()
    assert len(blocks) == (8 if model_config.model_type == "gpt2" else 14)
    for name, p in blocks.items():
        torch.testing.assert_close(p.detach().double(), torch.cat(expected[name], 1), rtol=0, atol=1e-5)
        assert optimizer.state[p]["step"] == 1001


def test_no_matrix_overflows_or_divides_by_zero():
    """Zero stays zero, the size does not matter, nor do the other matrices of the stack."""
    matrix = torch.randn(4, 6, generator=noise_of(0))
    found = orthogonalize(torch.stack([torch.zeros(4, 6), matrix, 1e15 * matrix]))
    assert not found[0].any()
    for same in found[1:]:
        torch.testing.assert_close(same.double(), orthogonalize_by_svd(matrix), rtol=0, atol=1e-5)


def test_muons_products_are_in_bf16_with_bf16_mixed_precision_only():
    """Weights and momenta stay fp32."""
    weights = []
    for precision in ("no", "fp16", "bf16"):
        options = ["--learning_rate", "0.02", "--mixed_precision", precision]
        module, optimizer = build("muon", *options, **NARROW | {"n_inner": 64})
        set_gradients(module, noise_of(0))
        optimizer.step()
        weight = module.model.transformer.h[0].mlp.c_fc.weight
        assert weight.dtype == optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
        weights.append(weight)
    assert torch.equal(weights[0], weights[1])
    assert 0 < (weights[0] - weights[2]).abs().max() < 0.05 * (0.2 * 64**0.5 * 0.02)


def test_muons_temporary_memory_is_that_of_the_plan(tmp_path):
    """By torch's own record of allocations, a step holds STACK_COPIES fp32 copies of a stack of square matrices."""
    module, optimizer = build("muon", n_layer=4, n_inner=64)
    set_gradients(module, noise_of(0))
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    allocations = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    peak = max(itertools.accumulate(size for _, size in allocations))
    stack = 4 * 4 * 6 * 64 * 64  # bytes of the matrices of four blocks, of which c_attn holds three
    assert peak == pytest.approx(muon.STACK_COPIES * stack, rel=0.01)
