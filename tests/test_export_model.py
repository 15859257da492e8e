"""Compressed models: pruned, int8, and the program that measures them."""

import functools
import importlib.util
import json
import math

import pytest
import torch
from conftest import BLOCK_SIZE, run_script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError
from recipe.publish import compress
from recipe.publish.compress import compress_model, load_as_int8

NUM_BLOCKS = 2
PROJECTIONS = [f"h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason='needs pip install -e ".[quantize]"'
)


def save_model(directory, tokenizer_dir, **size):
    """Save a random model with a tokenizer and a card."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    eos = tokenizer.eos_token_id
    shape = {"n_positions": BLOCK_SIZE, "n_layer": NUM_BLOCKS, "n_head": 2, "n_embd": 32, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, **{**shape, **size})
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "README.md").write_text("# The card\n")
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer_dir)


@pytest.fixture(scope="module")
def int8_dir(tmp_path_factory, model_dir):
    """The model with int8 projections, and what `compress_model` returned."""
    directory = tmp_path_factory.mktemp("int8") / "out"
    return directory, compress_model(model_dir, load_tokenizer(str(model_dir)), directory, quantize=True)


def projection(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return weights[f"transformer.{name}.weight"]


@needs_bitsandbytes
def test_four_projections_per_block_are_converted(int8_dir):
    """The file holds int8 weights for exactly those layers that the config implies, and reports their number."""
    directory, facts = int8_dir
    weights = load_file(directory / "model.safetensors")
    stored = {name for name, tensor in weights.items() if tensor.dtype == torch.int8 and tensor.ndim == 2}
    assert stored == {f"transformer.{name}.weight" for name in PROJECTIONS}
    assert facts["int8_layers"] == 4 * NUM_BLOCKS


@needs_bitsandbytes
def test_the_saved_folder_is_the_converted_model(model_dir, int8_dir):
    """Stock from_pretrained gives the logits of the model in memory after conversion, bit for bit, and generates."""
    ids = torch.arange(20)[None]
    converted = load_as_int8(model_dir, "cpu")
    reloaded = AutoModelForCausalLM.from_pretrained(int8_dir[0]).eval()
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, converted(ids).logits)
    assert reloaded.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 23)
    assert AutoTokenizer.from_pretrained(int8_dir[0]).encode("the cat") == load_tokenizer(str(model_dir)).encode(
        "the cat"
    )


@needs_bitsandbytes
def test_int8_weights_are_absmax_rounded(model_dir, int8_dir):
    """Each weight is within half a step of the original, step = largest magnitude of its output channel / 127."""
    original = load_file(model_dir / "model.safetensors")
    stored = load_file(int8_dir[0] / "model.safetensors")
    for name in PROJECTIONS:
        weight = projection(original, name).half().float()  # [in, out]
        step = weight.abs().amax(dim=0) / 127
        restored = projection(stored, name).T.float() * step  # stored as [out, in]
        assert ((restored - weight).abs() <= step * 0.501).all(), name


@needs_bitsandbytes
def test_a_converter_that_skips_layers_is_refused(model_dir, tmp_path, monkeypatch):
    """A conversion that leaves out layers is an error that counts them, and leaves no folder."""
    skipping = functools.partial(BitsAndBytesConfig, llm_int8_skip_modules=["c_fc", "lm_head"])
    monkeypatch.setattr(compress, "BitsAndBytesConfig", skipping)
    with pytest.raises(UserError, match="only 6 of the 8 projections"):
        compress_model(model_dir, load_tokenizer(str(model_dir)), tmp_path / "out", quantize=True)
    assert list(tmp_path.iterdir()) == []


@needs_bitsandbytes
def test_pruned_weights_stay_zero_in_int8(model_dir, tmp_path):
    facts = compress_model(model_dir, load_tokenizer(str(model_dir)), tmp_path / "out", quantize=True, amount=0.5)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert facts["int8_layers"] == 4 * NUM_BLOCKS
    assert all((projection(stored, name) == 0).float().mean() >= 0.5 for name in PROJECTIONS)


def test_pruning_removes_the_smallest_weights(model_dir, tmp_path):
    """In each projection exactly 30% of the weights become zero, those of smallest magnitude; no other value changes,
    and the file has the names of the original.
    """
    facts = compress_model(model_dir, load_tokenizer(str(model_dir)), tmp_path / "out", amount=0.3)
    original, pruned = (load_file(folder / "model.safetensors") for folder in (model_dir, tmp_path / "out"))
    assert original.keys() == pruned.keys()
    num_zeros = num_weights = 0
    for name in original:
        zero = pruned[name] == 0
        if name.removeprefix("transformer.").removesuffix(".weight") in PROJECTIONS:
            assert int(zero.sum()) == round(0.3 * zero.numel())
            assert original[name][zero].abs().max() <= original[name][~zero].abs().min()
            num_zeros, num_weights = num_zeros + int(zero.sum()), num_weights + zero.numel()
            assert torch.equal(original[name][~zero], pruned[name][~zero])
        else:
            assert torch.equal(original[name], pruned[name]), name
    assert facts["zero_fraction"] == num_zeros / num_weights


@pytest.mark.parametrize("options", [{"amount": 0.3}, pytest.param({"quantize": True}, marks=needs_bitsandbytes)])
def test_a_model_without_projections_is_refused(options, tokenizer_dir, tmp_path):
    model_dir = save_model(tmp_path / "empty", tokenizer_dir, n_layer=0)
    with pytest.raises(UserError, match="no Conv1D or Linear"):
        compress_model(model_dir, load_tokenizer(str(model_dir)), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_program_measures_before_and_after(model_dir, tmp_path, capsys):
    """Its losses are those of a plain loop over windows of the text; the card keeps its text and gains a table."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the cat sat on a mat while rain fell. " * 9)
    run = ("--model", model_dir, "--prune", 0.6, "--output_dir", out, "--text_file", text)
    assert run_script("scripts/export_model.py", *run) == ""
    report = json.loads((out / "export.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = [tokenizer.eos_token_id, *tokenizer(text.read_text())["input_ids"]]
    for name, folder in (("before", model_dir), ("after", out)):
        model, losses = AutoModelForCausalLM.from_pretrained(folder).eval(), []
        for position in range(1, len(ids)):
            start = min((position - 1) // BLOCK_SIZE * BLOCK_SIZE, len(ids) - 1 - BLOCK_SIZE)  # the last one is full
            with torch.no_grad():
                logits = model(torch.tensor([ids[start:position]])).logits[0, -1]
            losses.append(-logits.log_softmax(-1)[ids[position]].item())
        assert report[name]["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
        assert report[name]["perplexity"] == pytest.approx(math.exp(report[name]["loss"]))
        assert report[name]["disk_bytes"] == (folder / "model.safetensors").stat().st_size
    assert report["before"]["loss"] != report["after"]["loss"]
    assert (out / "README.md").read_text().startswith("# The card\n")
    assert "| perplexity" in (out / "README.md").read_text()
    assert str(tmp_path) not in (out / "export.json").read_text() + (out / "README.md").read_text()
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80


def test_the_run_of_the_model_is_its_text(train_shared, tmp_path):
    """Without an option, the run's validation text is measured. Without a run, there is no perplexity."""
    run = train_shared()
    assert run_script("scripts/export_model.py", "--model", run, "--prune", 0.1, "--output_dir", tmp_path / "a") == ""
    report = json.loads((tmp_path / "a" / "export.json").read_text())
    final = json.loads((run / "summary.json").read_text())
    assert report["before"]["loss"] == pytest.approx(final["eval_loss"], abs=1e-5)
    again = ("--model", tmp_path / "a", "--prune", 0.2, "--output_dir", tmp_path / "b")
    assert run_script("scripts/export_model.py", *again) == ""
    report = json.loads((tmp_path / "b" / "export.json").read_text())
    assert "perplexity" not in report["before"]
    assert report["text"].startswith("Perplexity was not measured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--prune": None}, "nothing to do"),
        ({"--prune": "0"}, "between 0 and 1"),
        ({"--prune": "1"}, "between 0 and 1"),
        ({"--prune": "nan"}, "between 0 and 1"),
        ({"--quantize": "int4"}, "invalid choice: 'int4'"),
        ({"--model": "{tmp}/nothing"}, "there is no model in"),
        ({"--model": "{tmp}"}, "there is one in"),
        ({"--model": "{tmp}/quantized"}, "already quantized"),
        ({"--output_dir": "{model}"}, "the model's own folder"),
        ({"--output_dir": "{tmp}/quantized"}, "not an empty folder"),
        ({"--text_file": "{tmp}/nothing.txt"}, "there is no file"),
        ({"--dataset_dir": "{tmp}/nothing"}, "there is no dataset"),
    ],
)
def test_bad_input_is_one_sentence(options, message, model_dir, tmp_path):
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    values = {"--model": "{model}", "--prune": "0.5", "--output_dir": "{tmp}/out", **options}
    arguments = [part for key, value in values.items() if value for part in (key, value)]
    error = run_script("scripts/export_model.py", *(a.format(tmp=tmp_path, model=model_dir) for a in arguments))
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


def test_a_missing_library_names_its_extra(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e \"\.\[quantize\]\""):
        compress.check_request(model_dir, tmp_path / "out", "int8", None)
