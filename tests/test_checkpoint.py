"""Checkpoints: complete or absent, loadable as models, and exact to resume from."""

import json
import re
import shlex
import shutil

import pytest
import torch
from conftest import BLOCK_SIZE, make_documents, read_events
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint.load import find_checkpoint, list_checkpoints
from recipe.data.prepare import prepare_dataset
from recipe.data.text import TextSource
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError

DROPOUT = ["--config_overrides", "resid_pdrop=0.1,attn_pdrop=0.1"]


def test_each_checkpoint_is_a_model_folder(train):
    """`from_pretrained` loads model and tokenizer, they agree, and generation gives real tokens only."""
    output_dir = train("--save_steps", "2", "--max_steps", "5")
    assert [p.name for p in list_checkpoints(output_dir)] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    for folder in [*list_checkpoints(output_dir), output_dir]:
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert model.config.vocab_size == len(tokenizer) == 500
        assert model.config.eos_token_id == tokenizer.eos_token_id
        assert tokenizer.model_max_length == model.config.n_positions == BLOCK_SIZE
        ids = model.generate(torch.ones(8, 1, dtype=torch.long), max_new_tokens=30, temperature=100.0, top_k=0)
        assert ids.max() < 500
        assert all(path.stat().st_mode & 0o044 for path in folder.iterdir())  # others may read


@pytest.mark.parametrize("stop_at", [1, 5, 9])
@pytest.mark.parametrize("extra", [[], DROPOUT, ["--per_device_train_batch_size", "2"]])
def test_resume_is_exact(train, tmp_path, dataset, stop_at, extra):
    """Stopped and resumed equals never stopped, bit for bit: losses, norms, weights, optimizer; also with dropout."""
    options = ["--max_steps", "10", "--save_steps", "1", "--global_batch_size", "128", *extra]
    options += [] if "--per_device_train_batch_size" in extra else ["--per_device_train_batch_size", "32"]
    assert 2 * len(dataset.splits["train"]) < 10 * 128  # over two epoch ends
    whole = train(*options, output_dir=tmp_path / "whole")
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    for checkpoint in list_checkpoints(resumed)[stop_at:]:
        shutil.rmtree(checkpoint)
    train(*options, "--resume_from_checkpoint", "latest", output_dir=resumed)
    expected, found = read_events(whole, "train"), read_events(resumed, "train")
    for key in ("step", "loss", "grad_norm", "learning_rate", "tokens_seen"):
        assert [e[key] for e in found] == [e[key] for e in expected], key
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    a, b = (torch.load(run / "checkpoint-10" / "optimizer.pt", weights_only=True) for run in (whole, resumed))
    moments, found = a["optimizer"]["state"], b["optimizer"]["state"]
    assert moments.keys() == found.keys()
    assert all(torch.equal(moments[i][key], found[i][key]) for i in moments for key in moments[i])
    assert all(torch.equal(a["guard"][key], b["guard"][key]) for key in a["guard"])
    assert json.loads((resumed / "summary.json").read_text())["untrained"] == read_untrained(whole)


def read_untrained(output_dir):
    return json.loads((output_dir / "summary.json").read_text())["untrained"]


def test_resume_from_a_path_and_of_a_finished_run(train, tmp_path, capsys):
    """A checkpoint can be gone on with in another folder; a finished run only evaluates and exports again."""
    first = train("--max_steps", "4", "--save_steps", "2", output_dir=tmp_path / "first")
    second = train(
        "--max_steps", "4", "--resume_from_checkpoint", str(first / "checkpoint-2"), output_dir=tmp_path / "b"
    )
    assert [e["step"] for e in read_events(second, "train")] == [3, 4]
    before, summary = (first / "model.safetensors").read_bytes(), (first / "summary.json").read_text()
    assert before == (second / "model.safetensors").read_bytes()
    train("--max_steps", "4", "--save_steps", "2", "--resume_from_checkpoint", str(first), output_dir=first)
    assert "all 4 steps are done" in capsys.readouterr().out
    assert (first / "model.safetensors").read_bytes() == before
    assert [e["step"] for e in read_events(first, "train")] == [1, 2, 3, 4]
    assert (first / "summary.json").read_text() == summary


def test_save_total_limit(train):
    """The newest are kept; a half-written checkpoint is neither counted nor found."""
    output_dir = train("--max_steps", "7", "--save_steps", "2", "--save_total_limit", "2")
    assert [p.name for p in list_checkpoints(output_dir)] == ["checkpoint-6", "checkpoint-7"]
    (output_dir / ".checkpoint-9.partial").mkdir()
    (output_dir / "checkpoint-best").mkdir()
    assert find_checkpoint(output_dir, "latest").name == "checkpoint-7"


def test_nothing_in_a_checkpoint_is_executed(train):
    """JSON, safetensors and tensors that `weights_only=True` reads."""
    checkpoint = train("--save_steps", "4") / "checkpoint-4"
    assert {p.suffix for p in checkpoint.iterdir()} <= {".json", ".safetensors", ".pt", ".txt"}
    for path in checkpoint.glob("*.pt"):
        torch.load(path, weights_only=True)
    load_file(checkpoint / "model.safetensors")


def test_no_checkpoint_to_resume_from(train, tmp_path):
    """A run never starts over silently."""
    with pytest.raises(UserError, match="there is no checkpoint in"):
        train("--resume_from_checkpoint", "latest")
    with pytest.raises(UserError, match="is not a checkpoint"):
        train("--resume_from_checkpoint", str(tmp_path))
    without = train()
    with pytest.raises(UserError) as caught:  # what cannot be done is not advised
        train(output_dir=without)
    assert "holds another run" in str(caught.value) and "--resume" not in str(caught.value)


def test_the_advice_for_a_folder_that_holds_a_run_works(train):
    """Other options are refused; the command that is advised resumes the run with its own."""
    output_dir = train("--save_steps", "4", "--seed", "5")
    with pytest.raises(UserError) as caught:
        train(output_dir=output_dir)
    advised = re.search(r"resume it \((.*?train.py) (--resume.*?)\)", str(caught.value))[2]
    train(*shlex.split(advised), alone=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--learning_rate", "0.1"], "learning_rate 0.003 -> 0.1"),
        (["--max_steps", "9"], "max_steps 4 -> 9"),
        (["--config_overrides", "n_layer=1"], "n_layer 2 -> 1"),
        (["--config_overrides", "layer_norm_epsilon=0.5,scale_attn_weights=false"], "layer_norm_epsilon 1e-05 -> 0.5"),
        (["--seed", "1", "--global_batch_size", "8"], "global_batch_size 4 -> 8; seed 1337 -> 1"),
    ],
)
def test_another_runs_checkpoint_is_refused(train, change, expected):
    """What decides the numbers must agree; the differences are listed."""
    train("--save_steps", "4")
    with pytest.raises(UserError, match=expected):
        train(*change, "--resume_from_checkpoint", "latest")


def test_another_dataset_is_refused(train, tmp_path, tokenizer_dir):
    train("--save_steps", "4")
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in make_documents(99, seed=4)))
    source = TextSource(train_files=(str(tmp_path / "other.jsonl"),))
    prepare_dataset(source, tmp_path / "other", BLOCK_SIZE, load_tokenizer(str(tokenizer_dir)))
    with pytest.raises(UserError, match="was made with other options: dataset [0-9a-f]{12} -> "):
        train("--resume_from_checkpoint", "latest", dataset_dir=tmp_path / "other")


def test_what_may_change_on_resume(train, tmp_path):
    """Micro-batch, logging and saving are the hardware's and the user's business."""
    train("--max_steps", "4", "--save_steps", "2", "--per_device_train_batch_size", "4", output_dir=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    again = train(
        "--max_steps",
        "4",
        "--save_steps",
        "1",
        "--per_device_train_batch_size",
        "1",
        "--logging_steps",
        "2",
        "--resume_from_checkpoint",
        "latest",
        output_dir=tmp_path / "run",
    )
    assert list_checkpoints(again)[-1].name == "checkpoint-4"


def test_another_runs_folder_is_not_touched(train, tmp_path):
    """An output folder with a run in it is refused, and `--overwrite` removes that run's files and nothing else."""
    output_dir = train("--save_steps", "4")
    (output_dir / "my_notes.txt").write_text("keep")
    (output_dir / "lora.safetensors").write_text("keep")
    (output_dir / "checkpoint-best").mkdir()
    with pytest.raises(UserError, match=r"holds another run .*resume_from_checkpoint auto.*\(--overwrite\)"):
        train()
    assert (output_dir / "checkpoint-4").is_dir()
    with pytest.raises(UserError, match="does not divide"):  # a mistake elsewhere must not cost the old run
        train("--overwrite", "--per_device_train_batch_size", "3")
    assert (output_dir / "checkpoint-4").is_dir()
    train("--overwrite", "--max_steps", "1")
    assert not list_checkpoints(output_dir) and (output_dir / "my_notes.txt").read_text() == "keep"
    assert (output_dir / "lora.safetensors").exists() and (output_dir / "checkpoint-best").is_dir()
    assert len(read_events(output_dir, "train")) == 1


def test_output_dir_that_cannot_be_written(train, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a writable folder"):
        train(output_dir=tmp_path / "file" / "run")


def test_resuming_does_not_overrun_another_run(train, tmp_path):
    """A checkpoint of one run is not gone on with in the folder of another."""
    first = train("--save_steps", "2", output_dir=tmp_path / "first")
    other = train("--save_steps", "4", "--seed", "7", output_dir=tmp_path / "other")
    with pytest.raises(UserError, match="other holds another run"):
        train("--resume_from_checkpoint", str(first / "checkpoint-2"), output_dir=other)
    assert (other / "checkpoint-4").is_dir()


def test_a_folder_of_something_else(train, tmp_path):
    """A project's README or another model's config is not replaced."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("a project")
    with pytest.raises(UserError, match=r"holds files that a run would replace \(README.md\)"):
        train(output_dir=tmp_path / "project")
