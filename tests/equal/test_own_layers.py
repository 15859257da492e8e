"""A model class of one's own, as recipe/README.md shows it, registered by a module that train.py imports."""

import importlib
import json
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, TWO_STEPS, make_documents, read_weights, run_script
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.config import TrainConfig
from recipe.model.build import SDPA_WITHOUT_MASK, build_model, build_model_config

OWN = ["--model_type", "gated_gpt2", "--config_overrides", "gate_size=48"]


@pytest.fixture(scope="module", autouse=True)
def gated_gpt2(tmp_path_factory):
    (code,) = re.findall(r"```python\n(.*?gated_gpt2.*?)```", (ROOT / "recipe" / "README.md").read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("code")
    (folder / "gated_gpt2.py").write_text(code)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("gated_gpt2")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def run(train_shared):
    return train_shared(*OWN, "--save_steps", "2")


def test_a_subclass_of_gpt2_keeps_what_is_gpt2s(run, gated_gpt2):
    """Attention without a mask, the residual stream in bf16, and the name that converters read."""
    shape = {"num_hidden_layers": 1, "n_head": 2, "hidden_size": 32, "gate_size": 48}  # either name of a size
    config = TrainConfig(dataset_dir=["x"], model_type="gated_gpt2", config_overrides=shape, bf16_residual=True)
    model = build_model(config, build_model_config(config, 500, 0))
    assert isinstance(model, gated_gpt2.GatedGPT2) and model.transformer.h[0].mlp.up.out_features == 48
    assert model.config._attn_implementation == SDPA_WITHOUT_MASK
    with torch.autocast("cpu", torch.bfloat16):
        assert model.base_model(torch.zeros(1, 4, dtype=torch.int64), output_hidden_states=True)[0].dtype
        assert model.transformer.drop(torch.ones(1, 4, 32)).dtype == torch.bfloat16
    assert json.loads((run / "config.json").read_text())["n_ctx"] == 32


def test_the_run_resumes_and_its_model_is_tuned(train, run, tmp_path):
    """A checkpoint continues to the same weights, and the exported model is a base model of another run."""
    resume = ["--resume_from_checkpoint", run / "checkpoint-2", "--save_steps", "2"]
    assert read_weights(train(*OWN, *resume, output_dir=tmp_path / "resumed")) == read_weights(run)
    tuned = train("--model_name_or_path", run, *TWO_STEPS, shape=[], output_dir=tmp_path / "tuned")
    assert json.loads((tuned / "config.json").read_text())["gate_size"] == 48


def test_checkpoints_and_exports_bring_the_code_which_runs_only_if_asked(run, tmp_path):
    """In a process that does not know the class: generated, evaluated and exported with --trust_remote_code."""
    (tmp_path / "a.txt").write_text("".join(make_documents(3)))
    trusted = ["--trust_remote_code"]
    text = ["--text_file", f"{tmp_path}/a.txt"]
    out = f"{tmp_path}/out"
    calls = [
        ("generate_text", run, []),
        ("generate_text", run / "checkpoint-2", trusted),
        ("evaluate_model", run, [*trusted, *text]),
        ("export_model", run, [*trusted, *text, "--dtype", "bf16", "--output_dir", out]),
        ("generate_text", out, trusted),
    ]
    lines = [f"run_script('scripts/{name}.py', '--model', '{model}', *{options})" for name, model, options in calls]
    code = f"import json; from helpers import run_script; print(json.dumps([{', '.join(lines)}]))"
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "PATH": "/usr/bin:/bin",
        "HF_HOME": str(tmp_path / "home"),
    }
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    refused, *errors = json.loads(result.stdout.splitlines()[-1])
    assert "code" in refused and "--trust_remote_code" in refused and errors == ["", "", "", ""]
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(run).auto_map.keys() == {"AutoConfig", "AutoModelForCausalLM"}


def test_such_a_model_is_not_uploaded(train, run, tmp_path, hub):
    """Its code is private."""
    upload = ["--push_to_hub", "--hub_model_id", "someone/own"]
    assert "gated_gpt2" in run_script("recipe/train.py", *OWN, *upload, "--train_file", __file__)
    assert "gated_gpt2" in run_script("scripts/push_to_hub.py", run, "--hub_model_id", "someone/own")
    assert all(not any("own" in name for name in repository.files("main")) for repository in hub.repositories.values())


def test_a_class_of_the_program_itself_is_refused(run, gated_gpt2, monkeypatch):
    """Nobody could load it: its checkpoints have no module to bring."""
    own_code = importlib.import_module("recipe.model.own_code")
    monkeypatch.setattr(gated_gpt2.GatedGPT2, "__module__", "__main__")
    with pytest.raises(own_code.UserError, match="GatedGPT2"):
        own_code.own_code(AutoConfig.from_pretrained(run))
