"""Muon is the published update, within its memory, on one process or several."""

import itertools
import json
from collections import Counter, defaultdict

import pytest
import torch
from conftest import TINY, default_arguments, launch, read_events
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.model.loss import LanguageModelingLoss
from recipe.optim import muon
from recipe.optim.muon import orthogonalize
from recipe.optim.optimizers import build_optimizer

MUON = ["--optim", "muon", "--learning_rate", "0.02"]
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_inner": 24, "vocab_size": 64, "n_positions": 8}


def build(*argv, **shape):
    """Return a small module and its optimizer."""
    torch.manual_seed(0)
    module = LanguageModelingLoss(GPT2LMHeadModel(GPT2Config(**SMALL | shape)), SMALL["vocab_size"])
    return module, build_optimizer(load_config(["--dataset_dir", "d", *MUON, *argv])[0], module)


def set_gradients(module, seed):
    noise = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = 0.1 * torch.randn(p.shape, generator=noise)


# ------------------------------------------------------------------ the update


def iterate(x):
    """The paper's quintic, five times, with its coefficients, for numbers: small ones come close to 1."""
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


def orthogonalize_by_svd(matrix):
    """Keep the singular vectors; each singular value becomes the polynomial of its share of the norm."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ iterate(s / s.norm()).diag() @ vh


@pytest.mark.parametrize(("stack_values", "found_inf"), [(2**26, torch.tensor(0.0)), (1, None)])
def test_it_is_the_published_update(monkeypatch, stack_values, found_inf):
    """Five steps equal a plain float64 loop over the matrices, in one stack per shape or in many.

    Nesterov momentum from 0.85 to 0.95 in 300 updates (modded-nanogpt), scale and weight decay of Moonlight (0.2 times
    the root of the longer side), c_attn as three matrices, and NorMuon's factor for each index of the longer side.
    """
    monkeypatch.setattr(muon, "STACK_VALUES", stack_values)
    module, optimizer = build("--weight_decay", "0.5")
    optimizer.found_inf = found_inf
    blocks = {name: p for name, p in module.named_parameters() if ".h." in name and p.dim() == 2}
    pieces = {name: 3 if "c_attn" in name else 1 for name in blocks}
    expected = {name: [m.double() for m in p.detach().chunk(pieces[name], 1)] for name, p in blocks.items()}
    momenta = {name: [torch.zeros_like(m) for m in matrices] for name, matrices in expected.items()}
    neurons = defaultdict(float)  # mean squares
    for t in (0, 150, 299, 300, 1000):
        set_gradients(module, t)
        for name, p in blocks.items():
            if optimizer.state[p]:
                optimizer.state[p]["step"].fill_(t)
            mu = 0.85 + 0.1 * min(t / 300, 1)
            for i, gradient in enumerate(p.grad.double().chunk(pieces[name], 1)):
                weight, momentum = expected[name][i], momenta[name][i]
                momentum.mul_(mu).add_(gradient)
                update = orthogonalize_by_svd(mu * momentum + gradient)
                dim = 0 if weight.shape[0] <= weight.shape[1] else 1
                neurons[name, i] = 0.95 * neurons[name, i] + 0.05 * update.square().mean(dim, keepdim=True)
                normalized = update / neurons[name, i].sqrt()
                update = 0.2 * max(weight.shape) ** 0.5 * normalized * update.norm() / normalized.norm()
                weight -= 0.02 * (update + 0.5 * weight)
        optimizer.step()
    assert len(blocks) == 8
    for name, p in blocks.items():
        torch.testing.assert_close(p.detach().double(), torch.cat(expected[name], 1), rtol=0, atol=1e-5)
        assert optimizer.state[p]["step"] == 1001


def test_no_matrix_overflows_or_divides_by_zero():
    """Zero stays zero, the size does not matter, nor do the other matrices of the stack."""
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(torch.stack([torch.zeros(4, 6), matrix, 1e15 * matrix]))
    assert not found[0].any()
    for same in found[1:]:
        torch.testing.assert_close(same.double(), orthogonalize_by_svd(matrix), rtol=0, atol=1e-5)


def test_everything_else_is_torchs_fused_adamw():
    """Embeddings, biases and LayerNorm have the bits of torch.optim.AdamW."""
    module, optimizer = build("--weight_decay", "0.3")
    other, _ = build()
    groups = [group for group in optimizer.param_groups if "num_matrices" not in group]
    twins = dict(zip(module.parameters(), other.parameters(), strict=True))
    same = [{"params": [twins[p] for p in g["params"]], "weight_decay": g["weight_decay"]} for g in groups]
    expected = torch.optim.AdamW(same, 1e-3, (0.9, 0.95), 1e-8, fused=True)
    for step in range(3):
        for some_module in (module, other):
            set_gradients(some_module, step)
        for group in (*optimizer.param_groups, *expected.param_groups):
            group["lr"] = 1e-3 * (step + 1)
        optimizer.step()
        expected.step()
    for p in (p for group in groups for p in group["params"]):
        assert torch.equal(p, twins[p])


def test_products_in_bf16():
    """With bf16 mixed precision, products are rounded; weights and momenta stay fp32."""
    weights = []
    for precision in ("no", "fp16", "bf16"):
        module, optimizer = build("--mixed_precision", precision, n_inner=64)
        set_gradients(module, 0)
        optimizer.step()
        weight = module.model.transformer.h[0].mlp.c_fc.weight
        assert weight.dtype == optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
        weights.append(weight)
    assert torch.equal(weights[0], weights[1])
    assert 0 < (weights[0] - weights[2]).abs().max() < 0.05 * (0.2 * 64**0.5 * 0.02)


def test_temporary_memory_is_that_of_the_plan(tmp_path):
    """By torch's own record of allocations, a step holds STACK_COPIES fp32 copies of a stack of square matrices."""
    module, optimizer = build(n_layer=4, n_embd=64, n_inner=64)
    set_gradients(module, 0)
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


# ------------------------------------------------------------------ runs

RUN = [*MUON, "--max_steps", "4", "--save_steps", "2", "--global_batch_size", "8", "--max_grad_norm", "0.5"]


@pytest.fixture(scope="module")
def one(train_shared):
    """A run in one process with one micro-batch per step, which no test changes."""
    return train_shared(*RUN)


def test_a_new_learning_rate_takes_effect(train, one, tmp_path):
    """A resumed run may change its learning rate, and Muon's matrices follow it."""
    options = [*RUN, "--learning_rate", "0.2", "--resume_from_checkpoint", one / "checkpoint-2"]
    resumed = train(*options, output_dir=tmp_path / "changed")
    name = "transformer.h.0.mlp.c_fc.weight"
    before, same, changed = (
        load_file(path / "model.safetensors")[name] for path in (one / "checkpoint-2", one, resumed)
    )
    assert 5 < (changed - before).norm() / (same - before).norm() < 20


# Trains with stacks of at most three square matrices; prints the hash of the weights after each update, and how many
# matrices each process has orthogonalized.
TWO_PROCESSES = """
import hashlib, json, os
from recipe.optim import muon
from recipe.run.log import RunLog
from recipe.train import main

muon.STACK_VALUES = 3 * 32 * 32
add, orthogonalize = RunLog.add, muon.orthogonalize

def say(**values):
    os.write(1, ("MUON " + json.dumps({"rank": os.environ["RANK"], **values}) + "\\n").encode())

def add_and_hash(self, *numbers):  # called after each update
    add(self, *numbers)
    groups = self.optimizer.param_groups
    content = b"".join(p.detach().numpy().tobytes() for group in groups for p in group["params"])
    say(weights=hashlib.sha256(content).hexdigest())

def count(matrices, dtype):
    say(count=len(matrices))
    return orthogonalize(matrices, dtype)

RunLog.add, muon.orthogonalize = add_and_hash, count
main()
"""


def test_two_processes_share_the_work_and_are_one_run(one, tmp_path, dataset_dir):
    """Both have the same bits after each update, and those of one process to rounding.

    Of stacks of three, three and two square matrices and two of two others, each process has seven, with padding.
    """
    program = tmp_path / "two_processes.py"
    program.write_text(TWO_PROCESSES)
    two = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    arguments = [*default_arguments(dataset_dir, tmp_path / "two", TINY), *RUN]
    result = launch(arguments, tmp_path, two, program, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    said = [json.loads(line.partition("MUON ")[2]) for line in result.stdout.splitlines() if "MUON {" in line]
    assert sorted(Counter(line["weights"] for line in said if "weights" in line).values()) == [2, 2, 2, 2]
    matrices = defaultdict(int)
    for line in said:
        matrices[line["rank"]] += line.get("count", 0)
    assert matrices == {"0": 4 * 7, "1": 4 * 7}
    losses, expected = ([event["loss"] for event in read_events(run, "train")] for run in (tmp_path / "two", one))
    assert losses == pytest.approx(expected, abs=1e-5)
    weights, expected = (load_file(run / "model.safetensors") for run in (tmp_path / "two", one))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
