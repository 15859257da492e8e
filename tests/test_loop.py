"""The loop against a plain one, and what it leaves."""

import json

import pytest
import torch
from conftest import BLOCK_SIZE, read_events
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipe.data.batches import example_rows


def plain_loop(dataset, steps: int, initial: dict) -> tuple[list[float], list[float], dict]:
    """A training loop without any of recipe/, but for the order of rows: stock model, torch AdamW, mean loss."""
    config = GPT2Config(
        vocab_size=500,
        n_positions=BLOCK_SIZE,
        n_layer=2,
        n_head=2,
        n_embd=32,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    model.load_state_dict(initial)
    model.train()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    split = dataset.splits["train"]
    losses, norms = [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.003 * min(step / 2, 1.0)
        rows = torch.from_numpy(split[example_rows(torch.arange(step * 4, step * 4 + 4).numpy(), len(split), 1337)])
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


CONSTANT = ["--lr_scheduler_type", "constant_with_warmup", "--max_steps", "12"]


@pytest.fixture
def initial_weights(train, tmp_path):
    """The weights a run starts from: one step at learning rate zero, the first of a warm-up, leaves them alone."""
    output_dir = train(
        "--max_steps",
        "1",
        "--lr_scheduler_type",
        "constant_with_warmup",
        "--save_steps",
        "0",
        output_dir=tmp_path / "initial",
    )
    return AutoModelForCausalLM.from_pretrained(output_dir).state_dict()


@pytest.mark.parametrize("micro_batch", [4, 2, 1])
def test_the_loop_is_a_plain_training_loop(train, dataset, initial_weights, micro_batch):
    """Losses, gradient norms and final weights equal the plain loop's, however the batch is cut into micro-batches."""
    output_dir = train(*CONSTANT, "--per_device_train_batch_size", micro_batch)
    losses, norms, weights = plain_loop(dataset, 12, initial_weights)
    events = read_events(output_dir, "train")
    assert [e["loss"] for e in events] == pytest.approx(losses, abs=1e-5)
    assert [e["grad_norm"] for e in events] == pytest.approx(norms, rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(output_dir).state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "switches",
    [
        ["--activation_checkpointing"],
        ["--loss_chunks", "3"],
        ["--optim", "adamw_torch"],
        ["--attn_implementation", "eager"],
        ["--attn_implementation", "sdpa_with_mask"],
        ["--pad_vocab_to_multiple_of", "1"],
        ["--no_loss_in_graph"],
        ["--data_placement", "python_lists"],
        ["--dataloader_num_workers", "1"],
    ],
)
def test_switches_that_must_not_change_what_is_learned(train, tmp_path, switches):
    """Memory and speed switches leave the losses as they were."""
    plain = [e["loss"] for e in read_events(train(output_dir=tmp_path / "a"), "train")]
    switched = [e["loss"] for e in read_events(train(*switches, output_dir=tmp_path / "b"), "train")]
    assert switched == pytest.approx(plain, abs=2e-5)


def test_a_rerun_is_bit_identical(train, tmp_path):
    a, b = (train(output_dir=tmp_path / name) for name in "ab")
    for x, y in zip(read_events(a, "train"), read_events(b, "train"), strict=True):
        assert (x["loss"], x["grad_norm"]) == (y["loss"], y["grad_norm"])
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def test_what_a_run_leaves(train):
    """The files of the contract, with their fields; log lines carry the means over their interval."""
    output_dir = train("--max_steps", "5", "--logging_steps", "2", "--eval_steps", "4")
    events = read_events(output_dir, "train")
    assert [e["step"] for e in events] == [1, 2, 4, 5]
    assert [e["tokens_seen"] for e in events] == [n * 4 * BLOCK_SIZE for n in (1, 2, 4, 5)]
    fields = {"event", "step", "tokens_seen", "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu",
              "steps_left_out", "share_outside_training", "peak_memory_bytes"}  # fmt: skip
    assert all(set(event) == fields for event in events)
    assert [e["step"] for e in read_events(output_dir, "eval")] == [0, 4, 5]
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["step"], summary["tokens_seen"]) == (5, 5 * 4 * BLOCK_SIZE)
    assert summary["eval_loss"] == read_events(output_dir, "eval")[-1]["loss"]
    assert summary["tokens_per_second"] > 0 and summary["wall_seconds"] > summary["train_seconds"] > 0
    assert summary["wall_seconds"] > summary["seconds_to_first_step"] > 0 and summary["peak_memory_bytes"] > 1e7
    assert summary["environment"]["torch"] == torch.__version__
    assert (output_dir / "training_config.yaml").is_file() and (output_dir / "README.md").is_file()
    assert AutoTokenizer.from_pretrained(output_dir).model_max_length == BLOCK_SIZE
    assert not list(output_dir.glob("checkpoint-*"))


def test_the_first_learning_rates_are_those_used(train):
    """The log shows the rate each step was taken with."""
    rates = [e["learning_rate"] for e in read_events(train("--lr_scheduler_type", "constant_with_warmup"), "train")]
    assert rates == pytest.approx([0.0, 0.0015, 0.003, 0.003])


def test_interval_means(train, tmp_path):
    """The loss of a log line is the mean over the steps since the line before; the first step has its own."""
    each = [e["loss"] for e in read_events(train(output_dir=tmp_path / "a"), "train")]
    pairs = [e["loss"] for e in read_events(train("--logging_steps", "2", output_dir=tmp_path / "b"), "train")]
    assert pairs == pytest.approx([each[0], each[1], (each[2] + each[3]) / 2], abs=1e-6)


def test_no_host_synchronisation_between_log_lines(train, monkeypatch):
    """Tensors are read on the host at log lines and evaluations only (on a GPU each read waits for the device)."""
    import recipe.train

    monkeypatch.setattr(recipe.train, "sample_from", lambda *args, **kwargs: "no sample")  # it reads every token
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        original = getattr(torch.Tensor, name)

        def record(self, *args, _original=original, _name=name, **kwargs):
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, record)
    counts = {}
    for steps in (4, 44):
        reads.clear()
        train("--max_steps", steps, "--logging_steps", "1000", "--overwrite", "--attn_implementation", "sdpa")
        counts[steps] = len(reads)
    assert counts[4] > 0 and counts[4] == counts[44]
