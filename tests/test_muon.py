"""Muon is the published update, for the matrices that it is meant for, on one process or several."""

import itertools
import json
import math
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from conftest import TINY, default_arguments, launch, read_events, reset_accelerate
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.checkpoint import list_checkpoints
from recipe.command_line import load_config
from recipe.hardware.memory import optimizer_bytes
from recipe.model.loss import LanguageModelingLoss
from recipe.optim import muon
from recipe.optim.guard import UpdateGuard
from recipe.optim.muon import orthogonalize
from recipe.optim.optimizers import build_optimizer

MUON = ["--optim", "muon", "--learning_rate", "0.02"]
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 8}


def config_of(*argv):
    return load_config(["--dataset_dir", "d", *MUON, *argv])[0]


def build(*argv, **shape):
    """Return a small module and its optimizer."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SMALL | shape))
    module = LanguageModelingLoss(model, SMALL["vocab_size"])
    return module, build_optimizer(config_of(*argv), module)


def set_gradients(module, noise, value=None):
    """Give every parameter a random gradient, or one whose values are all `value`."""
    for p in module.parameters():
        p.grad = 0.1 * torch.randn(p.shape, generator=noise) if value is None else torch.full_like(p, value)


def content_of(module, optimizer):
    """Return the bytes of all weights and of the optimizer's state."""
    tensors = [*module.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


# ---------------------------------------------------------------------- the update


def iterate(x, steps=5):
    """The paper's quintic, with its coefficients, for numbers."""
    for _ in range(steps):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (1, 5)])
def test_singular_vectors_stay_and_singular_values_become_one(shape):
    """By SVD: the vectors are those of the matrix; each value is the polynomial of the old one, in [0.68, 1.21]."""
    noise = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, *shape, generator=noise)
    for matrix, found in zip(matrices, orthogonalize(1e3 * matrices), strict=True):
        u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = iterate(s / s.norm())
        torch.testing.assert_close(found.double(), u @ values.diag() @ vh, rtol=0, atol=2e-5)
        assert s.min() / s.norm() < 0.0035 or (values.min() > 0.68 and values.max() < 1.21)


def test_extreme_matrices():
    """Zero stays zero, other stacked matrices do not matter, and no size overflows or divides by zero."""
    noise = torch.Generator().manual_seed(0)
    matrix = torch.randn(4, 6, generator=noise)
    stack = torch.stack([torch.zeros(4, 6), matrix, 1e15 * matrix, 1e-30 * matrix, torch.ones(4, 6)])
    found = orthogonalize(stack)
    assert torch.isfinite(found).all() and not found[0].any() and found[3].abs().max() < 1e-10
    alone = orthogonalize(matrix[None])[0]
    torch.testing.assert_close(found[1], alone)
    torch.testing.assert_close(found[2], alone)
    torch.testing.assert_close(found[4], torch.full((4, 6), iterate(1.0) / 24**0.5), rtol=1e-4, atol=0)  # rank one


def newton_schulz(matrix):
    """The paper's loop for one matrix of any shape, in float64."""
    x = matrix.double() / matrix.double().norm()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("stack_values", [2**26, 1])
def test_it_is_the_published_update(monkeypatch, stack_values):
    """Five steps equal a plain float64 loop over the matrices, in one stack per shape or in many.

    Nesterov momentum from 0.85 to 0.95 in 300 updates (modded-nanogpt), scale and weight decay of Moonlight (0.2 times
    the root of the longer side), c_attn as three matrices, and NorMuon's factor for each index of the longer side.
    """
    monkeypatch.setattr(muon, "STACK_VALUES", stack_values)
    module, optimizer = build("--weight_decay", "0.5", n_inner=24)
    blocks = {name: p for name, p in module.named_parameters() if ".h." in name and p.dim() == 2}
    pieces = {name: 3 if "c_attn" in name else 1 for name in blocks}
    expected = {name: [m.double() for m in p.detach().chunk(pieces[name], 1)] for name, p in blocks.items()}
    momenta = {name: [torch.zeros_like(m) for m in matrices] for name, matrices in expected.items()}
    neurons = defaultdict(float)  # mean squares
    noise = torch.Generator().manual_seed(1)
    for t in (0, 150, 299, 300, 1000):
        set_gradients(module, noise)
        for name, p in blocks.items():
            if optimizer.state[p]:
                optimizer.state[p]["step"].fill_(t)
            mu = 0.85 + 0.1 * min(t / 300, 1)
            for i, gradient in enumerate(p.grad.double().chunk(pieces[name], 1)):
                weight, momentum = expected[name][i], momenta[name][i]
                momentum.mul_(mu).add_(gradient)
                update = newton_schulz(mu * momentum + gradient)
                dim = 0 if weight.shape[0] <= weight.shape[1] else 1
                neurons[name, i] = 0.95 * neurons[name, i] + 0.05 * update.square().mean(dim, keepdim=True)
                normalized = update / neurons[name, i].sqrt()
                update = 0.2 * max(weight.shape) ** 0.5 * normalized * update.norm() / normalized.norm()
                weight -= 0.02 * (update + 0.5 * weight)
        optimizer.step()
    assert len(blocks) == 8
    for name, p in blocks.items():
        torch.testing.assert_close(p.detach().double(), torch.cat(expected[name], 1), rtol=0, atol=1e-5)


def test_it_is_torchs_muon(monkeypatch):
    """Five steps equal `torch.optim.Muon` on square, wide and tall matrices, all in fp32.

    That is without the warm-up of momentum and without NorMuon's factors.
    """
    monkeypatch.setattr(muon, "even_out_neurons", lambda updates, squares: (torch.ones_like(squares), squares))
    monkeypatch.setattr(muon, "FIRST_MOMENTUM", muon.MOMENTUM)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # torch's products are bf16
    module, optimizer = build("--weight_decay", "0.5", n_inner=24)
    blocks = {name: p for name, p in module.named_parameters() if ".h." in name and p.dim() == 2}
    twins = {
        name: [torch.nn.Parameter(m.detach().clone()) for m in p.chunk(3 if "c_attn" in name else 1, 1)]
        for name, p in blocks.items()
    }
    options = {"momentum": 0.95, "weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 5}
    options["ns_coefficients"] = (3.4445, -4.775, 2.0315)
    reference = torch.optim.Muon([m for matrices in twins.values() for m in matrices], lr=0.02, **options)
    noise = torch.Generator().manual_seed(1)
    for _ in range(5):
        set_gradients(module, noise)
        for name, p in blocks.items():
            for twin, gradient in zip(twins[name], p.grad.chunk(len(twins[name]), 1), strict=True):
                twin.grad = gradient.clone()
        optimizer.step()
        reference.step()
    for name, p in blocks.items():
        torch.testing.assert_close(p, torch.cat(twins[name], 1), rtol=0, atol=1e-5)


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
            set_gradients(some_module, torch.Generator().manual_seed(step))
        for group in (*optimizer.param_groups, *expected.param_groups):
            group["lr"] = 1e-3 * (step + 1)
        optimizer.step()
        expected.step()
    for p in (p for group in groups for p in group["params"]):
        assert torch.equal(p, twins[p])
        assert all(torch.equal(value, expected.state[twins[p]][name]) for name, value in optimizer.state[p].items())


@pytest.mark.parametrize("tied", [True, False])
def test_where_each_parameter_goes(tied):
    """Muon has the projections of the blocks; embeddings, head, biases and LayerNorm stay with AdamW."""
    module, optimizer = build(tie_word_embeddings=tied)
    names = {p: name.removeprefix("model.") for name, p in module.named_parameters()}
    by_muon, decayed, others = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert by_muon == [f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in layers]
    assert optimizer.param_groups[0]["num_matrices"] == [3, 1, 1, 1] * 2
    assert decayed == ["transformer.wte.weight", "transformer.wpe.weight"] + ["lm_head.weight"] * (not tied)
    assert sorted(by_muon + decayed + others) == sorted(names.values())


def test_frozen_weights_and_weights_without_a_gradient_stay():
    """A frozen layer is in no group; a layer that the loss did not use keeps its weights and has no state."""
    module, _ = build()
    frozen, unused = (block.mlp.c_fc.weight for block in module.model.transformer.h)
    frozen.requires_grad_(False)
    optimizer = build_optimizer(config_of(), module)
    set_gradients(module, torch.Generator().manual_seed(0))
    unused.grad = module.model.transformer.wpe.weight.grad = None
    before = unused.clone()
    optimizer.step()
    assert all(frozen is not p for group in optimizer.param_groups for p in group["params"])
    assert torch.equal(unused, before) and unused not in optimizer.state


def test_products_in_bf16():
    """With bf16 mixed precision, products are bf16 and close to those in fp32; weights and momenta stay fp32."""
    noise = torch.Generator().manual_seed(0)
    matrices = torch.randn(4, 32, 64, generator=noise)
    exact, rounded = orthogonalize(matrices), orthogonalize(matrices, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert 1e-4 < (rounded.float() - exact).norm() / exact.norm() < 0.03
    weights = []
    for precision in ("no", "fp16", "bf16"):
        module, optimizer = build("--mixed_precision", precision)
        set_gradients(module, torch.Generator().manual_seed(0))
        optimizer.step()
        weight = module.model.transformer.h[0].mlp.c_fc.weight
        assert weight.dtype == optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
        weights.append(weight)
    assert torch.equal(weights[0], weights[1])
    assert 0 < (weights[0] - weights[2]).abs().max() < 0.05 * (0.2 * 64**0.5 * 0.02)


def test_the_state_takes_as_many_bytes_as_planned():
    """One fp32 moment for the matrices of the blocks, two for the rest."""
    module, optimizer = build()
    set_gradients(module, torch.Generator().manual_seed(0))
    optimizer.step()
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim() in (1, 2)]
    assert sum(4 * tensor.numel() for tensor in tensors) == optimizer_bytes(module.model.config, "muon")


def test_temporary_memory_is_that_of_the_plan(tmp_path):
    """By torch's own record of allocations, a step needs at most STACK_COPIES fp32 copies of its largest stack."""
    module, optimizer = build(n_layer=4, n_embd=64)
    set_gradients(module, torch.Generator().manual_seed(0))
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    allocations = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    peak = max(itertools.accumulate(size for _, size in allocations))
    stack = 4 * 2 * 4 * 64 * 256  # c_fc and c_proj of four blocks
    assert (muon.STACK_COPIES - 1.5) * stack < peak < (muon.STACK_COPIES + 0.1) * stack


# ---------------------------------------------------------------------- the guard


@pytest.fixture
def guarded():
    """Build a guard: `guard, module, step = guarded()`; step takes a value for all gradients, or None."""

    def build_guarded():
        reset_accelerate()
        accelerator = Accelerator(cpu=True)
        module, optimizer = build()
        guard, prepared = UpdateGuard(accelerator), accelerator.prepare(optimizer)
        noise = torch.Generator().manual_seed(0)

        def step(value=None, norm=None):
            set_gradients(module, noise, value)
            if norm is None:
                norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
            guard.step(prepared, torch.ones(()), norm)
            return content_of(module, optimizer)

        return guard, module, step

    yield build_guarded
    reset_accelerate()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_gradients_change_nothing(guarded, bad):
    """Weights, momenta and counts keep every bit, and the next step is the one that it would have been."""
    guard, _, step = guarded()
    step()
    before = step()
    assert step(bad) == before and step(bad) == before
    assert guard.counts.tolist() == [2, 2]
    after = step()
    assert guard.counts.tolist() == [2, 0]
    _, _, step = guarded()
    assert [step() for _ in range(3)][-1] == after != before


def test_negative_zeros_and_huge_gradients_stay_as_they_are():
    """found_inf 1 copies what was there; a sum with zero would turn -0.0 into 0.0."""
    module, optimizer = build()
    set_gradients(module, None, -0.0)
    optimizer.step()
    weight = module.model.transformer.h[0].attn.c_attn.weight
    with torch.no_grad():
        weight.fill_(-0.0)
        optimizer.state[weight]["momentum_buffer"].fill_(-0.0)
    before = content_of(module, optimizer)
    optimizer.found_inf = torch.tensor(1.0)
    set_gradients(module, None, 3e38)
    optimizer.step()
    assert content_of(module, optimizer) == before


def test_a_good_step_is_the_step_without_a_guard():
    """found_inf 0 and no found_inf give the same bits."""
    contents = []
    for found_inf in (None, torch.tensor(0.0)):
        module, optimizer = build()
        noise = torch.Generator().manual_seed(0)
        for _ in range(2):
            set_gradients(module, noise)
            optimizer.found_inf = found_inf
            optimizer.step()
        contents.append(content_of(module, optimizer))
    assert contents[0] == contents[1]


class NoValues(TorchDispatchMode):
    """Fails where the host asks for the value of a tensor, which on a GPU waits for the device."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        assert operator is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return operator(*args, **(kwargs or {}))


def test_a_step_asks_for_no_value(guarded):
    """Neither the first step nor a later one, with the check for bad gradients."""
    _, module, step = guarded()
    set_gradients(module, torch.Generator().manual_seed(0))
    norm = torch.ones(())
    with mock.patch(f"{__name__}.content_of"), mock.patch(f"{__name__}.set_gradients"), NoValues():
        for _ in range(2):
            step(norm=norm)
        with pytest.raises(AssertionError, match="a value was read"):
            norm.item()


# ---------------------------------------------------------------------- runs

RUN = [*MUON, "--max_steps", "4", "--save_steps", "2", "--global_batch_size", "8", "--max_grad_norm", "0.5"]


@pytest.fixture(scope="module")
def one(train_shared):
    """A run in one process with one micro-batch per step, which no test changes."""
    return train_shared(*RUN)


def assert_close(run, expected):
    """Losses and weights agree to fp32 rounding."""
    found, losses = ([event["loss"] for event in read_events(path, "train")] for path in (run, expected))
    assert found == pytest.approx(losses[-len(found) :], abs=1e-5)
    torch.testing.assert_close(*(load_file(path / "model.safetensors") for path in (run, expected)), rtol=0, atol=1e-5)


def test_resume_is_exact(train, one, tmp_path):
    """A stopped and resumed run has the losses, weights and momenta of an uninterrupted one, bit for bit."""
    resumed = Path(shutil.copytree(one, tmp_path / "resumed"))
    shutil.rmtree(list_checkpoints(resumed)[-1])
    train(*RUN, "--resume_from_checkpoint", "latest", output_dir=resumed)
    found, uninterrupted = ([event["loss"] for event in read_events(run, "train")] for run in (resumed, one))
    assert found == uninterrupted and len(found) == 4
    assert (one / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    states = [torch.load(run / "checkpoint-4" / "optimizer.pt", weights_only=True) for run in (resumed, one)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    names = Counter(name for state in states[0]["optimizer"]["state"].values() for name in state)
    assert names["momentum_buffer"] == 8 and names["exp_avg"] == len(states[0]["optimizer"]["state"]) - 8


def test_a_new_learning_rate_takes_effect(train, one, tmp_path):
    """A resumed run may change its learning rate, and Muon's matrices follow it."""
    options = [*RUN, "--learning_rate", "0.2", "--resume_from_checkpoint", one / "checkpoint-2"]
    resumed = train(*options, output_dir=tmp_path / "changed")
    before, same, changed = (load_file(path / "model.safetensors") for path in (one / "checkpoint-2", one, resumed))
    name = "transformer.h.0.mlp.c_fc.weight"
    moved, moved_usually = ((weights[name] - before[name]).norm() for weights in (changed, same))
    assert 5 < moved / moved_usually < 20


# Trains with stacks of at most three square matrices; prints the hash of the weights after each update, and how many
# matrices each process has orthogonalized.
TWO_PROCESSES = """
import hashlib, json, os
from recipe.optim import muon
from recipe.optim.guard import UpdateGuard
from recipe.train import main

muon.STACK_VALUES = 3 * 32 * 32
step, orthogonalize = UpdateGuard.step, muon.orthogonalize

def say(**values):
    os.write(1, ("MUON " + json.dumps({"rank": os.environ["RANK"], **values}) + "\\n").encode())

def step_and_hash(self, optimizer, *numbers):
    step(self, optimizer, *numbers)
    groups = optimizer.param_groups
    content = b"".join(p.detach().numpy().tobytes() for group in groups for p in group["params"])
    say(weights=hashlib.sha256(content).hexdigest())

def count(matrices, dtype):
    say(count=len(matrices))
    return orthogonalize(matrices, dtype)

UpdateGuard.step, muon.orthogonalize = step_and_hash, count
main()
"""


def test_two_processes_share_the_work_and_are_one_run(train, one, tmp_path, dataset_dir):
    """Both have the same bits after each update, those of one process to rounding, and so has a resume by one process.

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
    assert_close(tmp_path / "two", one)
    shutil.copytree(tmp_path / "two" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert_close(train(*RUN, "--resume_from_checkpoint", "latest", output_dir=tmp_path / "resumed"), one)
