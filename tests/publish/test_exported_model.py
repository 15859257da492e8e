"""Exported models: in bf16, pruned and int8, as users load them."""

import pytest
import torch
from helpers import load_program, needs_bitsandbytes, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError
from recipe.evaluation.generation import generate_texts, load_model

SCRIPT = "scripts/export_model.py"


def matrices(model) -> dict[str, torch.Tensor]:
    """The weights of the four projections of each block, by the names of GPT-2."""
    names = [f"h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    return {name: model.transformer.get_submodule(name).weight for name in names}


def read_rows(printed: str) -> list[tuple[float, float]]:
    """Return megabytes and perplexity before and after."""
    rows = [line.replace(",", "").split() for line in printed.splitlines()[:2]]
    return [(float(row[1]), float(row[-1])) for row in rows]


def test_pruning_removes_the_smallest_weights(model_dir, dataset_dir, tmp_path, capsys):
    """30% of each matrix, by magnitude; nothing else changes, and the file keeps its size."""
    arguments = ["--model", model_dir, "--prune", 0.3, "--dataset_dir", dataset_dir, "--output_dir", tmp_path / "out"]
    assert run_script(SCRIPT, *arguments) == ""
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model_dir, tmp_path / "out"))
    for name, weight in matrices(after).items():
        original, kept = matrices(before)[name], weight != 0
        assert (~kept).sum() == round(0.3 * weight.numel())
        assert torch.equal(weight[kept], original[kept]) and original[~kept].abs().max() <= original[kept].abs().min()
    assert torch.equal(before.transformer.wte.weight, after.transformer.wte.weight)
    (megabytes, perplexity), (megabytes_after, perplexity_after) = read_rows(capsys.readouterr().out)
    assert megabytes == megabytes_after and perplexity != perplexity_after


def test_a_model_in_bf16_is_half_as_large(model_dir, dataset_dir, tmp_path, capsys):
    """It loads in bf16, with each weight rounded."""
    arguments = ["--model", model_dir, "--dtype", "bf16", "--dataset_dir", dataset_dir]
    assert run_script(SCRIPT, *arguments, "--output_dir", tmp_path / "out") == ""
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model_dir, tmp_path / "out"))
    assert after.dtype == torch.bfloat16
    for name, weight in matrices(after).items():
        assert torch.equal(weight, matrices(before)[name].bfloat16())
    (megabytes, perplexity), (megabytes_after, perplexity_after) = read_rows(capsys.readouterr().out)
    assert megabytes_after == pytest.approx(megabytes / 2, rel=0.1)
    assert perplexity_after == pytest.approx(perplexity, rel=0.1)


@needs_bitsandbytes
def test_int8_rounds_each_weight_to_one_byte(model_dir, dataset_dir, tmp_path, capsys):
    """In steps of its channel's largest value; zeros stay zero. The folder loads, generates and is evaluated."""
    out = tmp_path / "out"
    data = ["--dataset_dir", dataset_dir]
    options = ["--model", model_dir, "--quantize", "int8", "--prune", 0.3, "--output_dir", out]
    assert run_script(SCRIPT, *options, *data) == ""
    after = AutoModelForCausalLM.from_pretrained(out)
    assert {weight.dtype for weight in matrices(after).values()} == {torch.int8}
    original = matrices(AutoModelForCausalLM.from_pretrained(model_dir))["h.1.mlp.c_fc"].T  # Conv1D: [in, out]
    found, scales = matrices(after)["h.1.mlp.c_fc"], original.abs().amax(1, keepdim=True)
    pruned = torch.where(original.abs() < original.abs().flatten().quantile(0.3), 0.0, original)
    assert (found - 127 * pruned / scales).abs().max() <= 1
    (megabytes, _), (megabytes_after, _) = read_rows(capsys.readouterr().out)
    assert megabytes_after < megabytes
    assert AutoTokenizer.from_pretrained(out).vocab_size > 0
    assert len(generate_texts(*load_model(out, "cpu"), "the cat", max_new_tokens=40)[0]) > 0
    assert run_script("scripts/evaluate_model.py", "--model", out, *data) == ""


@needs_bitsandbytes
def test_a_converter_that_skips_layers_is_refused(model_dir, monkeypatch):
    """A converter that knows only `nn.Linear` finds nothing in GPT-2 and reports success."""
    program = load_program(SCRIPT)
    skipping = program.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["c_fc", "lm_head"])
    monkeypatch.setattr(program, "BitsAndBytesConfig", lambda **_: skipping)
    with pytest.raises(UserError, match="6 of the 8"):
        program.load_as_int8(model_dir, {"device_map": {"": "cpu"}})
