"""The first losses and the weights of five tiny runs, which move only in a change that means to move them.

    python tests/equal/losses.py               compare this checkout with losses.json
    python tests/equal/losses.py --write       write losses.json, for a change that is meant to change numbers
    python tests/equal/losses.py CHECKOUT      compare this checkout with another one, run by run, bit by bit

All runs are in fp32 on one thread, with every option typed that a measurement would decide. They go the whole way from
a text: its tokenizer, its rows, the model's initial weights, the order, the optimizer, the schedule.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
from helpers import make_documents, read_weights, values_of  # noqa: E402

FILE = Path(__file__).with_suffix(".json")
MODEL = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32", "--block_size", "32", "--tokenizer_vocab_size", "500"]
MEASURED = ["--mixed_precision", "no", "--dynamo_backend", "no", "--attn_implementation", "sdpa"]
BATCH = ["--global_batch_size", "8", "--per_device_train_batch_size", "2", "--max_steps", "20", "--logging_steps", "1"]
SAVING = ["--eval_steps", "10", "--save_steps", "10", "--load_best_model_at_end", "false", "--cache_dir", "cache"]
COMMON = [*MODEL, *MEASURED, *BATCH, *SAVING, "--seed", "42", "--train_file"]
ADAMW = ["--optim", "adamw_torch_fused", "--learning_rate", "3e-3", "--weight_decay", "0.1"]
COSINE = ["--lr_scheduler_type", "cosine_with_min_lr", "--config_overrides", "attn_pdrop=0.1"]
RUNS = {
    "muon": ["long.jsonl"],
    "adamw": ["long.jsonl", *ADAMW, *COSINE],
    "epochs": ["short.jsonl"],  # two and a half, each of which packs the documents in another order
    "stage": ["short.jsonl", "--resume_from_checkpoint", "muon/checkpoint-10", "--max_steps", "30"],
}
IN_TWO_PROCESSES = ["long.jsonl"]
PROGRAM = """
import json, sys, recipe.train
for sys.argv in json.loads(sys.argv[1]):
    assert recipe.train.main() == 0, sys.argv
"""


def describe_here() -> dict[str, str]:
    """Return what the last bits depend on."""
    found = dict(re.findall(r"(cpu family|model|model name)\t*: *(.*)", Path("/proc/cpuinfo").read_text()))
    return {
        "torch": torch.__version__,
        "processor": "{model name}, family {cpu family}, model {model}".format(**found),
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def measure(checkout: Path) -> dict[str, dict]:
    """Make the runs with the code of a checkout, and return the losses of each, in nats, and its weights' SHA-256."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: object) -> None:
            result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if result.returncode:
                sys.exit(f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}")

        for name, count in (("long", 400), ("short", 30)):
            lines = [json.dumps({"text": text}) + "\n" for text in make_documents(count)]
            Path(folder, f"{name}.jsonl").write_text("".join(lines))
        commands = [["train.py", *COMMON, *options, "--output_dir", name] for name, options in RUNS.items()]
        run(sys.executable, "-c", PROGRAM, json.dumps(commands))
        launcher = ["--config_file", checkout / "accelerate_configs" / "multi_cpu.yaml", "--num_processes", "2"]
        program = [sys.executable, "-m", "accelerate.commands.launch", *launcher, checkout / "recipe" / "train.py"]
        run(*program, *COMMON, *IN_TWO_PROCESSES, "--output_dir", "two processes")
        found = {}
        for name in (*RUNS, "two processes"):
            weights = hashlib.sha256(read_weights(Path(folder, name))).hexdigest()
            found[name] = {"losses": values_of(Path(folder, name), "loss"), "weights": weights}
    return found


def compare(found: dict[str, dict], expected: dict[str, dict]) -> None:
    """Print how far apart the runs are, and exit with 1 if any bit differs."""
    for name, run in expected.items():
        apart = [abs(loss - other) for loss, other in zip(found[name]["losses"], run["losses"], strict=True)]
        losses = "losses equal"
        if any(apart):
            first = next(number for number, of in enumerate(apart, 1) if of)
            losses = f"losses differ by up to {max(apart):.1e}, from the {first}. on"
        weights = "equal" if found[name]["weights"] == run["weights"] else "differ"
        print(f"{name:14} {losses}, weights {weights}")
    sys.exit(found != expected)


def main() -> None:
    here = describe_here()
    print("here:", ", ".join(here.values()))
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(json.dumps({**here, "runs": measure(ROOT)}, indent=1) + "\n")
    elif sys.argv[1:]:
        checkout = Path(sys.argv[1]).resolve()
        if not (checkout / "recipe" / "train.py").is_file():
            sys.exit(f"{sys.argv[1]} is not a checkout of this project")
        compare(measure(ROOT), measure(checkout))
    else:
        there = json.loads(FILE.read_text())
        expected = there.pop("runs")
        print("file:", ", ".join(there.values()))
        if there != here:
            print("Other machines differ in the last bits; CI allows 1e-5. Compare with another checkout instead.")
        compare(measure(ROOT), expected)


if __name__ == "__main__":
    main()
