"""The loop equals a plain training loop, and writes what it promises."""

import json
import types

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, PLAIN, TINY, read_events
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import recipe.train
from recipe.data.batches import example_rows
from recipe.errors import UserError
from recipe.model.loss import LanguageModelingLoss


def plain_loop(dataset, steps: int, initial: dict) -> tuple[list[float], list[float], dict]:
    """Train without recipe/, except for the order of rows: stock model, torch's AdamW, mean loss."""
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
    split = dataset.train
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


@pytest.fixture(scope="module")
def expected(train_shared, dataset):
    """The plain loop from the run's initial weights, which the first warm-up step, at rate zero, does not change."""
    initial = train_shared("--max_steps", "1", "--lr_scheduler_type", "constant_with_warmup")
    return plain_loop(dataset, 12, AutoModelForCausalLM.from_pretrained(initial).state_dict())


@pytest.fixture(scope="module")
def four_steps(train_shared):
    """A run with default options."""
    return train_shared()


@pytest.mark.parametrize("micro_batch", [4, 2, 1])
def test_the_loop_is_a_plain_training_loop(train, expected, micro_batch):
    """Losses, gradient norms and weights equal the plain loop's for any micro-batch size."""
    output_dir = train(*CONSTANT, "--per_device_train_batch_size", micro_batch)
    losses, norms, weights = expected
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
        ["--attn_implementation", "sdpa"],
        ["--pad_vocab_to_multiple_of", "1"],
        ["--dataloader_num_workers", "1"],
    ],
)
def test_switches_that_do_not_change_the_losses(train, four_steps, switches):
    """Memory and speed switches do not change what the model learns."""
    plain = [e["loss"] for e in read_events(four_steps, "train")]
    assert [e["loss"] for e in read_events(train(*switches), "train")] == pytest.approx(plain, abs=2e-5)


def test_what_a_run_leaves(train):
    """The files and fields that users and tools depend on."""
    output_dir = train("--max_steps", "5", "--logging_steps", "2", "--eval_steps", "4")
    events = read_events(output_dir, "train")
    assert [e["step"] for e in events] == [1, 2, 4, 5]
    assert [e["tokens_seen"] for e in events] == [n * 4 * BLOCK_SIZE for n in (1, 2, 4, 5)]
    fields = {"event", "step", "tokens_seen", "epoch", "loss", "learning_rate", "grad_norm", "clipped_share",
              "step_ms", "tokens_per_second", "mfu", "train_seconds", "skipped_steps",
              "share_waiting_for_data", "memory_bytes", "peak_memory_bytes"}  # fmt: skip
    assert all(set(event) == fields for event in events)
    assert [e["step"] for e in read_events(output_dir, "eval")] == [0, 4, 5]
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["step"], summary["tokens_seen"]) == (5, 5 * 4 * BLOCK_SIZE)
    assert summary["eval_loss"] == read_events(output_dir, "eval")[-1]["loss"]
    assert summary["tokens_per_second"] > 0 and summary["wall_seconds"] > summary["train_seconds"] > 0
    assert summary["peak_memory_bytes"] > 1e7
    assert summary["environment"]["torch"] == torch.__version__
    for name in ("training_config.yaml", "README.md", "loss_curve.png"):
        assert (output_dir / name).is_file()
    assert AutoTokenizer.from_pretrained(output_dir).model_max_length == BLOCK_SIZE
    assert not list(output_dir.glob("checkpoint-*"))


def test_log_lines_hold_means_over_their_interval(train, four_steps):
    """The first step has its own line."""
    each = [e["loss"] for e in read_events(four_steps, "train")]
    pairs = [e["loss"] for e in read_events(train("--logging_steps", "2"), "train")]
    assert pairs == pytest.approx([each[0], each[1], (each[2] + each[3]) / 2], abs=1e-6)


def test_extra_scalars_of_the_module_are_logged_like_the_loss(train, dataset, four_steps, monkeypatch):
    """Their means over micro-batches and steps are in the log, and the training does not change."""
    forward = LanguageModelingLoss.forward

    def with_a_scalar(self, input_ids, targets):
        return {**forward(self, input_ids, targets), "mean_id": input_ids.float().mean()}

    monkeypatch.setattr(LanguageModelingLoss, "forward", with_a_scalar)
    events = read_events(train("--per_device_train_batch_size", "2", "--logging_steps", "2"), "train")
    each = [e["loss"] for e in read_events(four_steps, "train")]
    split = dataset.train
    ids = [split[example_rows(np.arange(4 * step, 4 * step + 4), len(split), 1337)][:, :-1] for step in range(4)]
    for name, expected in (("loss", each), ("mean_id", [rows.mean() for rows in ids])):
        assert [e[name] for e in events] == pytest.approx([*expected[:2], sum(expected[2:]) / 2], rel=1e-5), name


def test_the_module_returns_scalars_only(train, monkeypatch):
    """Its other outputs are named at once."""
    forward = LanguageModelingLoss.forward
    monkeypatch.setattr(LanguageModelingLoss, "forward", lambda self, *rows: {**forward(self, *rows), "ids": rows[0]})
    with pytest.raises(UserError, match=r"returned ids of shape \[4, 32\]; it may return only scalars"):
        train()


def test_a_dataset_of_ones_own(train, tmp_path, dataset, four_steps, monkeypatch):
    """Anything with rows and a tokenizer trains as a packed dataset of the same rows does, and resumes."""
    rows = [split[np.arange(len(split))] for split in (dataset.train, dataset.validation)]
    own = types.SimpleNamespace(train=rows[0], validation=rows[1], tokenizer=dataset.tokenizer)
    monkeypatch.setattr(recipe.train, "open_dataset", lambda *args: own)
    output_dir = train("--save_steps", "2")
    (tmp_path / "half").mkdir()
    (output_dir / "checkpoint-2").rename(tmp_path / "half" / "checkpoint-2")
    resumed = train("--resume_from_checkpoint", "latest", output_dir=tmp_path / "half")
    for run in (output_dir, resumed):
        assert (run / "model.safetensors").read_bytes() == (four_steps / "model.safetensors").read_bytes()
    own.train = rows[0][:6]  # in the epochs after the first, its rows are the same
    few = train("--max_steps", "4", output_dir=tmp_path / "few")
    assert read_events(few, "train")[-1]["epoch"] == pytest.approx(16 / 6)
    own.train = rows[0][::-1].copy()
    with pytest.raises(UserError, match="other options: dataset "):
        train("--resume_from_checkpoint", "latest", output_dir=resumed)
    in_place_of_the_demos = [*TINY, *PLAIN, "--max_steps", "1", "--tokenizer_name", dataset.directory / "tokenizer"]
    shown = train(*in_place_of_the_demos, "--output_dir", tmp_path / "a", output_dir=tmp_path / "a", alone=True)
    card = (shown / "README.md").read_text()
    assert "tokens of text that is not published" in card and "was trained on the training text" not in card
