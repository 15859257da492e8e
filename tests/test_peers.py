"""Other programs: their model, data and options are ours, and their speed is read correctly."""

import dataclasses
import hashlib
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, ROOT, TINY, load_program, reset_accelerate

from recipe.benchmark.ladder import build_rungs
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import Setting
from recipe.benchmark.peers import NANOGPT_CONTEXT, Peer, build_nanogpt, build_peers, measure_peer
from recipe.environment import count_cpus
from recipe.errors import UserError

CPU = Machine("cpu", "a CPU", bf16=True)
GPU = Machine("cuda", "NVIDIA H200", bf16=True, tf32=True)


def setting_of(dataset_dir) -> Setting:
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32}
    return Setting("a model", {"dataset_dir": str(dataset_dir)}, size, 500, BLOCK_SIZE, 1000, 2, 4)


@pytest.fixture
def nanogpt(tmp_path) -> Path:
    """A program with nanoGPT's line about autocast and its log lines."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.py").write_text(
        f"import time\nfrom contextlib import nullcontext\ndevice_type = 'cpu'\nctx = {NANOGPT_CONTEXT}None\n"
        "for i in range(99):\n    print(f'iter {4 * i}: loss 1.0000, time 1.00ms, mfu 1%')\n    time.sleep(0.1)\n"
    )
    return folder


def test_nanogpt_gets_our_model_and_our_tokens(nanogpt, dataset_dir, dataset, tmp_path):
    """Both unchanged and with the one changed line that enables autocast on CPUs."""
    plain, bf16, bare = build_peers(CPU, setting_of(dataset_dir), build_rungs(CPU), tmp_path, nanogpt, None, 12)
    assert bare.name == "bare_loop" and (plain.name, bf16.name) == ("nanogpt", "bf16")
    assert plain.sha256 == bf16.sha256 == hashlib.sha256((nanogpt / "train.py").read_bytes()).hexdigest()
    for peer, dtype in ((plain, "float32"), (bf16, "bfloat16")):
        given = dict(argument.lstrip("-").split("=") for argument in peer.command[2:])
        expected = {"dtype": dtype, "batch_size": "2", "gradient_accumulation_steps": "2", "n_embd": "32"}
        expected |= {"bias": "True", "compile": "True", "dropout": "0.0", "log_interval": "4"}
        assert expected.items() <= given.items()
        tokens = np.fromfile(peer.directory / "data" / "ladder" / "train.bin", np.uint16)
        assert np.array_equal(tokens, dataset.splits["train"].stream())
        assert peer.tokens_per_step == 4 * BLOCK_SIZE
        assert pickle.loads((peer.directory / "data" / "ladder" / "meta.pkl").read_bytes()) == {"vocab_size": 512}
    assert NANOGPT_CONTEXT in (plain.directory / "train.py").read_text()
    assert NANOGPT_CONTEXT not in (bf16.directory / "train.py").read_text()
    assert NANOGPT_CONTEXT in (nanogpt / "train.py").read_text()


def test_nanogpt_on_a_gpu(nanogpt, dataset_dir, tmp_path):
    """It runs with our micro-batch and with its own, and the latter is compared with our own choice."""
    same, default, _ = build_peers(GPU, setting_of(dataset_dir), build_rungs(GPU), tmp_path, nanogpt, None, 12)
    assert (same.ours, default.ours) == ("ours", "ours_auto")
    assert "--batch_size=12" in default.command and default.tokens_per_step == 12 * BLOCK_SIZE
    assert not any("dtype" in argument for argument in same.command)


def test_a_peer_shares_compiled_code_and_uses_all_cores(monkeypatch):
    """It inherits the cache's folder, which the ladder sets for all its runs, but not a single thread."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "shared")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = "import os; print(*(os.environ[k] for k in ('TORCHINDUCTOR_CACHE_DIR', 'OMP_NUM_THREADS')))"
    found = measure_peer(program(code), 12, time.monotonic() + 60)
    assert found == {"failed": f"shared {count_cpus()}"}


def test_another_program_is_refused(nanogpt, dataset_dir, tmp_path):
    with pytest.raises(UserError, match="has no train.py; run git clone"):
        build_peers(CPU, setting_of(dataset_dir), build_rungs(CPU), tmp_path / "a", tmp_path, None, 12)
    (nanogpt / "train.py").write_text("")
    with pytest.raises(UserError, match="has no line with `nullcontext"):
        build_peers(CPU, setting_of(dataset_dir), build_rungs(CPU), tmp_path / "b", nanogpt, None, 12)
    with pytest.raises(UserError, match="nowhere.py does not exist"):
        build_peers(CPU, setting_of(dataset_dir), build_rungs(CPU), tmp_path / "c", None, Path("nowhere.py"), 12)


def test_a_vocabulary_that_nanogpt_cannot_hold(nanogpt, dataset, tmp_path, monkeypatch):
    """Its data has 16 bits, so larger ids would turn into other ids."""
    monkeypatch.setitem(dataset.metadata, "vocab_size", 70_000)
    with pytest.raises(UserError, match="16-bit token ids, but this vocabulary has 70,000"):
        build_nanogpt(nanogpt, CPU, setting_of(dataset.directory), dataset, tmp_path / "a")


def test_nanogpts_lines_are_timed(nanogpt, dataset_dir, tmp_path):
    """Each line after the first is 4 steps of 128 tokens in 0.1 s. Then the program is killed."""
    peer = build_peers(CPU, setting_of(dataset_dir), build_rungs(CPU), tmp_path, nanogpt, None, 12)[0]
    started_at = time.monotonic()
    found = measure_peer(peer, 12, started_at + 60)
    assert 2000 < found["tokens_per_second"] < 5700 and time.monotonic() - started_at < 30  # a busy machine is late


def program(code: str, line: str = r"^lap") -> Peer:
    return Peer("x", "x", [sys.executable, "-c", code], Path.cwd(), line, 100, "")


def test_a_time_in_a_line_counts():
    """The line's time for 4 steps of 100 tokens counts, not when it arrives: the median of all laps but the first."""
    code = "for ms in (9, 100, 300): print(f'lap {ms} ms')"
    found = measure_peer(program(code, r"lap (\d+) ms"), 8, time.monotonic() + 60)
    assert found == {"tokens_per_second": 2000}


def test_only_the_peers_output_is_removed(tmp_path, monkeypatch):
    """A folder of the same name in the user's folder stays."""
    monkeypatch.chdir(tmp_path)
    for name in ("run_clm", "its"):
        (tmp_path / name).mkdir()
    peer = dataclasses.replace(program("import os; print(os.path.isdir('its'))"), directory=tmp_path)
    assert measure_peer(peer, 4, time.monotonic() + 60) == {"failed": "True"}
    peer = dataclasses.replace(peer, output_dir=tmp_path / "its")
    assert measure_peer(peer, 4, time.monotonic() + 60) == {"failed": "False"}
    assert (tmp_path / "run_clm").is_dir()


def test_a_peer_that_fails_or_hangs():
    """Both end with a reason."""
    assert measure_peer(program("raise ValueError('no')"), 4, time.monotonic() + 60) == {"failed": "ValueError: no"}
    hangs = program("import time; time.sleep(99)")
    assert measure_peer(hangs, 4, time.monotonic() + 1) == {"failed": "not finished after 1 s"}


def test_the_bare_loop(dataset_dir, tmp_path):
    """It accepts the options of recipe/train.py and prints a time every 4 steps."""
    options = ["--dataset_dir", dataset_dir, *TINY, "--max_steps", 12, "--global_batch_size", 4]
    options += ["--dynamo_backend", "no"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bare_loop.py"), *map(str, options)],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("steps to ")]
    assert [line[2] for line in lines] == ["4:", "8:", "12:"] and all(float(line[3]) > 0 for line in lines)


def test_the_bare_loop_trains(dataset_dir, monkeypatch):
    """Its step has everything of ours: bf16, compilation and the optimizer's update."""
    bare_loop = load_program("scripts/bare_loop.py")
    seen = {}

    def build_optimizer(config, module, *precision):
        seen["module"], seen["before"] = module, [p.detach().clone() for p in module.parameters()]
        module.model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda m, i, o: seen.update(dtype=o.dtype))
        return original(config, module, *precision)

    original = bare_loop.build_optimizer
    monkeypatch.setattr(bare_loop, "build_optimizer", build_optimizer)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **kwargs: seen.update(compiled=kwargs["backend"]))
    options = ["--dataset_dir", str(dataset_dir), *TINY, "--max_steps", "1", "--global_batch_size", "4"]
    switches = ["--mixed_precision", "bf16", "--dynamo_backend", "inductor"]
    monkeypatch.setattr(sys, "argv", ["scripts/bare_loop.py", *options, *switches])
    num_threads = torch.get_num_threads()
    reset_accelerate()
    bare_loop.main()
    reset_accelerate()
    torch.set_num_threads(num_threads)
    assert (seen["dtype"], seen["compiled"]) == (torch.bfloat16, "inductor")
    assert not any(torch.equal(a, b) for a, b in zip(seen["before"], seen["module"].parameters(), strict=True))


def test_run_clm_gets_our_model_and_enough_text(dataset_dir, dataset, tmp_path):
    """It has our size and vocabulary, its own micro-batch of 8, and text for all steps."""
    (tmp_path / "run_clm.py").touch()
    peer = build_peers(CPU, setting_of(dataset_dir), build_rungs(CPU), tmp_path, None, tmp_path / "run_clm.py", 12)[0]
    given = dict(zip(peer.command[2::2], peer.command[3::2], strict=True))
    assert (given["--bf16"], given["--torch_compile"]) == ("True", "True")
    assert given["--config_overrides"] == "n_layer=2,n_head=2,n_embd=32,n_positions=32,vocab_size=500"
    assert given["--gradient_accumulation_steps"] == "1" and peer.tokens_per_step == 8 * BLOCK_SIZE
    ids = dataset.load_tokenizer()((tmp_path / "text.txt").read_text()).input_ids
    assert len(ids) >= int(given["--max_steps"]) * 8 * BLOCK_SIZE * 1.4
