"""Exported models: pruned and int8, as users load them."""

import importlib.util

import pytest
import torch
from conftest import BLOCK_SIZE, load_program, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipe.errors import UserError

SCRIPT = "scripts/export_model.py"
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason='needs pip install -e ".[quantize]"'
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):
    """A random model of two blocks with a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    eos = tokenizer.eos_token_id
    shape = {"n_positions": BLOCK_SIZE, "n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, **shape)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def matrices(model) -> dict[str, torch.Tensor]:
    """The weights of the four projections of each block, by the names of GPT-2."""
    names = [f"h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    return {name: model.transformer.get_submodule(name).weight for name in names}


def test_pruning_removes_the_smallest_weights(model_dir, dataset_dir, tmp_path, capsys):
    """30% of each matrix, by magnitude; nothing else changes."""
    arguments = ["--model", model_dir, "--prune", 0.3, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "out"]
    assert run_script(SCRIPT, *arguments) == ""
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model_dir, tmp_path / "out"))
    for name, weight in matrices(after).items():
        original = matrices(before)[name]
        kept = weight != 0
        assert (~kept).sum() == round(0.3 * weight.numel())
        assert torch.equal(weight[kept], original[kept]) and original[~kept].abs().max() <= original[kept].abs().min()
    assert torch.equal(before.transformer.wte.weight, after.transformer.wte.weight)
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split()[1:3] == rows[1].split()[1:3]  # megabytes stay
    assert rows[0].split()[-1] != rows[1].split()[-1]  # perplexity changes


@needs_bitsandbytes
def test_int8_shrinks_the_matrices_of_the_blocks(model_dir, dataset_dir, tmp_path, capsys):
    """Every projection is stored in one byte per weight, rounded to its channel's largest value; zeros stay zero."""
    arguments = ["--model", model_dir, "--quantize", "int8", "--prune", 0.3, "--dataset_dir", dataset_dir]
    assert run_script(SCRIPT, *arguments, "--output_dir", tmp_path / "out") == ""
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {weight.dtype for weight in matrices(after).values()} == {torch.int8}
    original = matrices(AutoModelForCausalLM.from_pretrained(model_dir))["h.1.mlp.c_fc"].T  # Conv1D: [in, out]
    found, scales = matrices(after)["h.1.mlp.c_fc"], original.abs().amax(1, keepdim=True)
    pruned = torch.where(original.abs() < original.abs().flatten().quantile(0.3), 0.0, original)
    assert (found - 127 * pruned / scales).abs().max() <= 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size > 0
    before, after = (float(row.split()[1].replace(",", "")) for row in capsys.readouterr().out.splitlines()[:2])
    assert after < before


@needs_bitsandbytes
def test_a_converter_that_skips_layers_is_refused(model_dir, monkeypatch):
    """A converter that knows only `nn.Linear` finds nothing in GPT-2 and reports success."""
    program = load_program(SCRIPT)
    skipping = program.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["c_fc", "lm_head"])
    monkeypatch.setattr(program, "BitsAndBytesConfig", lambda **_: skipping)
    with pytest.raises(UserError, match="only 6 of the 8 matrices"):
        program.load_as_int8(model_dir, torch.device("cpu"))


def test_the_run_of_the_model_is_its_text(train_shared, tmp_path, capsys):
    run = train_shared("--max_steps", 2)
    assert run_script(SCRIPT, "--model", run, "--prune", 0.5, "--output_dir", tmp_path / "out") == ""
    assert "validation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [("", "nothing to do"), ("--prune 1", "between 0 and 1"), ("--prune nan", "between 0 and 1"),
     ("--quantize int4", "invalid choice"), ("--prune 0.3", "is not the folder of a run; pass --text_file"),
     ("--prune 0.3 --text_file nowhere.txt", "nowhere.txt")],
)  # fmt: skip
def test_bad_input_is_one_sentence(options, message, model_dir, tmp_path):
    error = run_script(SCRIPT, "--model", model_dir, "--output_dir", tmp_path / "out", *options.split())
    assert error.startswith("error: ") and message in error and not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_refused(model_dir):
    error = run_script(SCRIPT, "--model", model_dir, "--output_dir", model_dir, "--prune", 0.3)
    assert "is not empty" in error
