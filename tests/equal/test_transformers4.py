"""Exported models in other hands: Transformers 4, which converters and most installations have, and its pipelines."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, make_documents, run_training
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

PACKAGES = ("transformers==4.57.6", "tokenizers>=0.22,<0.23.1", "huggingface_hub>=0.34,<1")
SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
TEXT = "the cat <|user|> slept over 1234 <|pad|> naïve 猫\n"


@pytest.fixture(scope="module")
def transformers4(tmp_path_factory):
    """Install Transformers 4 beside this environment, and return the variables with which Python finds it."""
    folder = tmp_path_factory.mktemp("transformers4")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"pip cannot install Transformers 4 here: {result.stderr.strip()[-200:]}")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer_dir):
    """Folders of models: with the tokenizer that the recipe trains, a user's, that one fine-tuned, and a llama."""
    work = tmp_path_factory.mktemp("exported")
    (work / "a.txt").write_text("".join(make_documents(60)))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"], "pad_token": "<|pad|>"})
    tokenizer.save_pretrained(work / "tokenizer")
    path = work / "tokenizer" / "tokenizer_config.json"
    # Transformers 5 saves every class that it does not know as this one.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "TokenizersBackend"}))
    text = ["--train_file", work / "a.txt", "--cache_dir", work / "cache", "--block_size", 32]
    text += ["--global_batch_size", 4, "--max_steps", 2, "--warmup_steps", 1, "--parse_special_tokens"]
    text += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    shape = ["--config_overrides", "n_layer=1,n_head=2,n_embd=16"]
    run_training([*text, *shape, "--tokenizer_vocab_size", 300, "--output_dir", work / "trained"])
    run_training([*text, *shape, "--tokenizer_name", work / "tokenizer", "--output_dir", work / "own"])
    shutil.copytree(work / "own", work / "base")
    shutil.copy(path, work / "base")
    run_training([*text, "--model_name_or_path", work / "base", "--output_dir", work / "tuned"])
    llama = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    llama |= {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "llama3", "rope_theta": 77.0, **SCALING}}
    options = ["--tokenizer_name", work / "tokenizer", "--model_type", "llama"]
    run_training([*text, *options, "--config_overrides", json.dumps(llama), "--output_dir", work / "llama"])
    return [work / name for name in ("trained", "own", "tuned", "llama")]


def test_transformers_4_loads_what_this_one_exports(transformers4, exported):
    """Transformers 4 reads the same ids, special tokens, rotary embeddings and loss, and generates text."""
    command = [sys.executable, ROOT / "tests" / "programs" / "load_with_transformers4.py", TEXT, *exported]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=transformers4)
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["version"].startswith("4.")
    for folder in exported:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = tokenizer(TEXT)["input_ids"][:32]
        found = report["found"][str(folder)]
        assert found["ids"] == ids
        assert set(found["special"]) == set(tokenizer.all_special_tokens)
        rows = torch.tensor([ids])
        assert found["loss"] == pytest.approx(model(rows, labels=rows).loss.item(), abs=1e-5)
        assert found["class"] == "PreTrainedTokenizerFast"


def test_a_pipeline_ends_where_the_positions_do(exported):
    """Whatever the seed: it stops at `max_new_tokens`, not at an index error."""
    generate = pipeline("text-generation", model=str(exported[0]))
    for seed in range(3):
        torch.manual_seed(seed)
        (text,) = generate("the cat", return_tensors=True)
        assert len(text["generated_token_ids"]) <= 32
    assert generate.model.config.n_positions == 32
