"""Exported models: pruned and int8, as users load them."""

import importlib.util
import sys

import pytest
import torch
from conftest import load_program, run_script
from small_model import save_small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError
from recipe.evaluation.generation import generate_texts, load_model

SCRIPT = "scripts/export_model.py"
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason='needs pip install -e ".[quantize]"'
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):
    return save_small_model(tmp_path_factory.mktemp("model"), tokenizer_dir)


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
    model, tokenizer = load_model(tmp_path / "out", "cpu")
    assert generate_texts(model, tokenizer, "the cat", max_new_tokens=40)[0].startswith("the cat")
    assert run_script("scripts/evaluate_model.py", "--model", tmp_path / "out", "--dataset_dir", dataset_dir) == ""


@needs_bitsandbytes
def test_a_converter_that_skips_layers_is_refused(model_dir, monkeypatch):
    """A converter that knows only `nn.Linear` finds nothing in GPT-2 and reports success."""
    program = load_program(SCRIPT)
    skipping = program.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["c_fc", "lm_head"])
    monkeypatch.setattr(program, "BitsAndBytesConfig", lambda **_: skipping)
    with pytest.raises(UserError, match="only 6 of the 8 matrices"):
        program.load_as_int8(model_dir, torch.device("cpu"))


def test_without_bitsandbytes_the_extra_is_named(model_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    error = run_script(SCRIPT, "--model", model_dir, "--quantize", "int8", "--output_dir", tmp_path / "out")
    assert error.endswith('run pip install -e ".[quantize]"')


def test_a_runs_own_validation_text_is_measured(train_shared, tmp_path, capsys):
    run = train_shared("--max_steps", 2)
    assert run_script(SCRIPT, "--model", run, "--prune", 0.5, "--output_dir", tmp_path / "out") == ""
    assert "validation" in capsys.readouterr().out
