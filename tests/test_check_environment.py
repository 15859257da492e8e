"""The environment check: on this machine, and under conditions that this machine does not have."""

import json
import subprocess
from unittest import mock

import pytest
from conftest import ROOT, load_program, run_script

from recipe.command_line import load_config
from recipe.errors import UserError

SCRIPT = "scripts/check_environment.py"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return load_program(SCRIPT)


def test_ten_steps_take_minutes_on_a_cpu(program, monkeypatch):
    """GPT-2 124M with its half a million tokens per step would take days; two rows of 1,024 do not."""
    config = load_config(["--config", "gpt2_124m", "--dataset_dir", "data"])[0]
    saved = mock.Mock(side_effect=UserError("saved"))
    monkeypatch.setattr(program, "save_config", saved)
    with pytest.raises(UserError, match="saved"):
        program.measure(None, config)
    assert saved.call_args.args[0].global_batch_size == 2 and saved.call_args.args[0].max_steps == 10


def test_this_machine_and_ten_real_steps(dataset_dir, tmp_path, monkeypatch, capsys):
    """Every check passes; --measure trains the run's own model, extrapolates to all steps, and publishes nothing.

    Accelerate's launcher and our config for a CPU start these steps.
    """
    (tmp_path / "data").symlink_to(dataset_dir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.whoami", lambda: {"name": "ada"})
    options = "--config_overrides n_layer=2,n_head=2,n_embd=32 --block_size 32 --global_batch_size 4 --max_steps 1000"
    options += " --dataset_dir data --push_to_hub --hub_model_id ada/x --report_to tensorboard"
    launcher = ["--config_file", ROOT / "accelerate_configs" / "cpu.yaml"]
    assert run_script(SCRIPT, "--measure", *launcher, *options.split()) == ""
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.startswith("ok ") for line in lines)
    speed = float(lines[-1].split(" tokens/s")[0].split()[-1].replace(",", ""))
    assert f"{1000 * 4 * 32 / speed / 3600:,.2f} hours for 1,000 steps" in lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failed_check_is_the_exit_status(program, monkeypatch, capsys):
    """The other checks still run."""
    monkeypatch.setattr(program, "check_compiler", mock.Mock(side_effect=RuntimeError("g++ is broken")))
    monkeypatch.setattr("sys.argv", [SCRIPT])
    with pytest.raises(UserError, match="1 of 7 checks failed"):
        program.main()
    found = capsys.readouterr().out
    assert "FAILED  compiler   RuntimeError: g++ is broken" in found and found.count("ok ") == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"distributed_type": "FSDP"}, "FSDP is not supported"), ({"distributed_type": "XLA"}, "TPU.* not supported"),
     ({"distributed_type": "DEEPSPEED"}, "DeepSpeed"), ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM"),
     ({"typo": 1}, "typo"), ({"distributed_type": "MULTI_GPU", "num_processes": 8}, "machine with 2 GPUs")],
)  # fmt: skip
def test_refused_launchers(changes, said, program, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": False, "machine_rank": 0}
    values |= {"num_machines": 1, "num_processes": 1, "mixed_precision": "no"} | changes
    (tmp_path / "mine.json").write_text(json.dumps(values))
    with mock.patch.dict("os.environ"), pytest.raises(UserError, match=said):
        program.check_launch(str(tmp_path / "mine.json"))


def test_what_a_config_of_the_recipe_resolves_to(program):
    with mock.patch.dict("os.environ"):
        found = program.check_launch(str(ROOT / "accelerate_configs" / "single_gpu.yaml"))
        assert found.endswith("1 processes, precision bf16, dynamo inductor")
        assert program.check_precision(load_config([])[0]).startswith("bf16: set by the launcher")


def test_what_a_machine_may_lack(program, monkeypatch):
    """Recent packages, a compiler, and a token, without which only publishing fails."""
    monkeypatch.setattr(program, "version", lambda name: "0.1")
    with pytest.raises(UserError, match="torch 0.1 is not .*pip install -e"):
        program.check_packages()
    monkeypatch.setattr(program, "why_no_inductor", lambda device: "no C++ compiler was found")
    with pytest.raises(UserError, match="no C.. compiler was found .*--dynamo_backend no"):
        program.check_compiler()
    monkeypatch.setattr(program, "get_token", lambda: None)
    assert "not logged in" in program.check_hub(mock.Mock(push_to_hub=False))
    with pytest.raises(UserError, match="hf auth login"):
        program.check_hub(mock.Mock(push_to_hub=True))


def test_a_run_that_fails_is_quoted(program, monkeypatch):
    """With the run's own sentence, not the launcher's traceback."""
    failed = subprocess.CompletedProcess([], 1, "", "error: there is no dataset x\nTraceback\nCalledProcessError\n")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: failed)
    with pytest.raises(UserError, match="training failed: error: there is no dataset x$"):
        program.measure(None, load_config([])[0])
