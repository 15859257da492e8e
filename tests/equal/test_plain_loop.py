"""The loop equals a plain training loop, whatever the memory and speed switches, and logs what happened."""

import types

import numpy as np
import pytest
import torch
from helpers import BLOCK_SIZE, ONE_STEP, PLAIN, TINY, read_events, read_summary, read_weights, values_of
from tiny_runs import start_from
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import recipe.train
from recipe.data.batches import example_rows
from recipe.errors import UserError
from recipe.model.loss import LanguageModelingLoss

CONSTANT = ["--lr_scheduler_type", "constant_with_warmup"]


def rows_of_step(split, step: int) -> np.ndarray:
    """Return the four rows of a step in the order of a run: the only thing here that comes from recipe/."""
    return split[example_rows(np.arange(4 * step, 4 * step + 4), len(split), 1337)]


def plain_loop(dataset, steps: int, initial: dict) -> tuple[list[float], list[float], dict]:
    """Train a stock model with torch's AdamW and mean loss. Returns losses, gradient norms and weights."""
    size = {"vocab_size": 500, "n_positions": BLOCK_SIZE, "n_layer": 2, "n_head": 2, "n_embd": 32}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    model.load_state_dict(initial)
    model.train()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    norms = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.003 * min(step / 2, 1.0)
        rows = torch.from_numpy(rows_of_step(dataset.train, step))
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


@pytest.fixture(scope="module")
def expected(train_shared, dataset):
    """The plain loop from the run's initial weights, which the first warm-up step, at rate zero, does not change."""
    initial = train_shared(*ONE_STEP, *CONSTANT, "--learning_rate", 1e-30)  # which changes no weight
    return plain_loop(dataset, 12, AutoModelForCausalLM.from_pretrained(initial).state_dict())


@pytest.mark.parametrize(
    "switches",
    [
        *(["--per_device_train_batch_size", size] for size in (4, 2, 1)),
        ["--activation_checkpointing"],
        ["--loss_chunks", "3"],
        ["--optim", "adamw_torch"],
        ["--attn_implementation", "eager"],
        ["--pad_vocab_to_multiple_of", "1"],
        ["--dataloader_num_workers", "1"],
    ],
)
def test_the_loop_is_a_plain_training_loop(train, expected, switches):
    """Losses, gradient norms and weights equal the plain loop's, with all that only changes memory and speed."""
    output_dir = train(*CONSTANT, "--max_steps", "12", *switches)
    losses, norms, weights = expected
    assert values_of(output_dir, "loss") == pytest.approx(losses, abs=1e-5)
    assert values_of(output_dir, "grad_norm") == pytest.approx(norms, rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(output_dir).state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
    assert losses[-1] < losses[0] - 0.3


# ------------------------------------------------------------------ the log


def test_a_log_line_holds_means_over_its_steps_of_every_scalar(train, dataset, expected, monkeypatch):
    """The loss and other returned scalars are averaged over micro-batches and steps. Step 1 has its own line."""
    forward = LanguageModelingLoss.forward

    def with_a_scalar(self, input_ids, targets):
        return {**forward(self, input_ids, targets), "mean_id": input_ids.float().mean()}

    monkeypatch.setattr(LanguageModelingLoss, "forward", with_a_scalar)
    run = train(*CONSTANT, "--per_device_train_batch_size", "2", "--logging_steps", "2")
    mean_ids = [rows_of_step(dataset.train, step)[:, :-1].mean() for step in range(4)]
    for name, each in (("loss", expected[0][:4]), ("mean_id", mean_ids)):
        assert values_of(run, name) == pytest.approx([*each[:2], sum(each[2:]) / 2], rel=1e-5), name


def test_an_output_of_the_module_that_is_no_scalar_is_named(train, monkeypatch):
    forward = LanguageModelingLoss.forward
    monkeypatch.setattr(LanguageModelingLoss, "forward", lambda self, *rows: {**forward(self, *rows), "ids": rows[0]})
    with pytest.raises(UserError, match=" ids "):
        train()


def test_a_run_leaves_the_files_and_fields_that_users_depend_on(train):
    output_dir = train("--max_steps", "5", "--logging_steps", "2", "--eval_steps", "4")
    assert values_of(output_dir, "step") == [1, 2, 4, 5]
    assert values_of(output_dir, "tokens_seen") == [n * 4 * BLOCK_SIZE for n in (1, 2, 4, 5)]
    fields = "event step tokens_seen epoch loss learning_rate grad_norm clipped_share step_ms tokens_per_second mfu"
    fields += " train_seconds skipped_steps share_waiting_for_data memory_bytes peak_memory_bytes"
    for event in read_events(output_dir, "train"):
        assert set(event) == set(fields.split())
    assert values_of(output_dir, "step", "eval") == [0, 4, 5]
    summary = read_summary(output_dir)
    assert (summary["step"], summary["tokens_seen"]) == (5, 5 * 4 * BLOCK_SIZE)
    assert summary["eval_loss"] == values_of(output_dir, "loss", "eval")[-1]
    assert summary["tokens_per_second"] > 0
    assert summary["wall_seconds"] > summary["train_seconds"] > 0
    assert summary["peak_memory_bytes"] > 1e7
    assert summary["environment"]["torch"] == torch.__version__
    for name in ("training_config.yaml", "README.md", "loss_curve.png"):
        assert (output_dir / name).is_file()
    assert AutoTokenizer.from_pretrained(output_dir).model_max_length == BLOCK_SIZE
    assert not list(output_dir.glob("checkpoint-*"))


# ------------------------------------------------------------------ a dataset of one's own


@pytest.fixture
def own(dataset, monkeypatch):
    """Rows in memory and a tokenizer, which a changed `open_dataset` returns."""
    train, validation = (split[np.arange(len(split))] for split in (dataset.train, dataset.validation))
    own = types.SimpleNamespace(train=train, validation=validation, tokenizer=dataset.tokenizer)
    monkeypatch.setattr(recipe.train, "open_dataset", lambda *_: own)
    return own


def test_rows_of_ones_own_train_and_resume_as_the_packed_dataset_of_the_same_rows(train, tmp_path, own, expected):
    """A run does not continue on others."""
    run = train(*CONSTANT, "--save_steps", "2")
    resumed = train(*CONSTANT, *start_from(run, 2), output_dir=tmp_path / "resumed")
    assert read_weights(run) == read_weights(resumed)
    assert values_of(run, "loss") == pytest.approx(expected[0][:4], abs=1e-5)
    own.train = own.train[::-1].copy()
    with pytest.raises(UserError, match="dataset"):
        train(*CONSTANT, "--resume_from_checkpoint", "auto")


def test_the_card_of_rows_of_ones_own_does_not_name_the_demos_text(train, tmp_path, dataset, own):
    options = [*TINY, *PLAIN, "--max_steps", "1", "--tokenizer_name", dataset.directory / "tokenizer"]
    train(*options, "--output_dir", tmp_path / "run", alone=True)
    assert "text that is not published" in (tmp_path / "run" / "README.md").read_text()
