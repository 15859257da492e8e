"""The model card: true to the run's files, valid for the Hub, unbreakable by generated text, without private paths."""

import ast
import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, read_events
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from transformers import AutoModelForCausalLM

from recipe.command_line import CONFIGS_DIR, load_config
from recipe.config import save_config
from recipe.environment import find_commit
from recipe.publish import card
from recipe.publish.card import write_model_card
from recipe.publish.public import (
    describe_source,
    hub_id,
    last_part,
    public_command,
    public_name,
    write_public_files,
)

HUB = ["--hub_model_id", "jo/tiny", "--hub_license", "mit", "--hub_language", "en", "no"]
TASKS = {"hellaswag_acc": 0.26, "hellaswag_acc_norm": 0.3, "hellaswag_num_examples": 50, "hellaswag_seconds": 9.0}
TASKS |= {"lambada_acc": 0.5, "lambada_perplexity": 40.0, "lambada_num_examples": 20}
START = {
    "event": "start",
    "step": 0,
    "recipe": "demo",
    "command": "accelerate launch recipe/train.py",
    "commit": "0123456789",
    "seed": 1337,
    "data": {
        "source": "HuggingFaceFW/fineweb-edu, sample-10BT",
        "dataset_id": "HuggingFaceFW/fineweb-edu",
        "dataset_config_name": "sample-10BT",
        "validation_split_percentage": 5.0,
        "splits": {
            "train": {"documents": 1_234, "tokens": 256_000, "bytes": 999_999, "rows": 1_000},
            "validation": {"documents": 56, "tokens": 25_600, "bytes": 77_777, "rows": 100},
        },
        "content_sha256": "c0" * 32,
        "tokenizer_sha256": "ab" * 32,
        "tokenizer": "openai-community/gpt2",
    },
    "model": {
        "num_parameters": 7_654_321,
        "n_layer": 4,
        "n_head": 2,
        "n_embd": 128,
        "n_positions": 256,
        "vocab_size": 9,
    },
    "base_model": None,
    "base_model_id": None,
    "num_processes": 2,
    "mixed_precision": "bf16",
    "dynamo_backend": "no",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "environment": {"gpt2_recipe": "0.1.0", "torch": "2.13.0", "device": "NVIDIA H200", "num_cpus": 2, "cuda": "13.0"},
}


def evaluation(step: int, loss: float, **more) -> dict:
    return {
        "event": "eval",
        "step": step,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / 2,
        **more,
    }


def make_events(*starts: dict) -> list[dict]:
    """A run of 1,200 steps of 2,048 tokens that logs every 100 and evaluates every 400."""
    events = [*starts, evaluation(0, 7.5)]
    for step in range(100, 1201, 100):
        numbers = {"tokens_seen": step * 2048, "loss": 6 - step / 1000, "tokens_per_second": 5000, "mfu": 0.25}
        events.append({"event": "train", "step": step, "train_seconds": step * 6.0, **numbers})
        if step % 400 == 0:
            events.append(evaluation(step, 6.125 - step / 1000, num_rows=64, **TASKS))
            events.append({"event": "sample", "step": step, "prompt": "The", "text": f"The text of step {step}."})
    return events


@pytest.fixture
def make_run(tmp_path):
    """Write the files of a run. Returns its folder."""

    def make(*options: str, events: list[dict] | None = None) -> Path:
        directory = tmp_path / "runs" / "private" / "tiny_run"
        directory.mkdir(parents=True)
        save_config(load_config([*options])[0], directory / "training_config.yaml")
        lines = make_events(START) if events is None else events
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return directory

    return make


def check_metadata(text: str) -> dict:
    """Check a card against the Hub's specification (hub-docs, modelcard.md). Returns its metadata."""
    opening, block, _ = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)
    data = yaml.safe_load(block)
    assert opening == "" and isinstance(data, dict)
    lists = {"language": r"[a-z]{2,3}", "tags": r"[\w-]+", "datasets": r"[\w.-]+/[\w.-]+"}
    strings = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": r"[a-z0-9.+-]+"}
    strings["base_model"] = r"[\w.-]+/[\w.-]+"
    for key, value in data.items():
        if key in lists:
            assert value and all(isinstance(item, str) and re.fullmatch(lists[key], item) for item in value), key
        elif key in strings:
            assert isinstance(value, str) and re.fullmatch(strings[key], value), key
        else:
            assert key == "model-index"
    for model in data.get("model-index", []):
        assert model.keys() == {"name", "results"} and isinstance(model["name"], str) and model["results"]
        for result in model["results"]:
            assert result.keys() == {"task", "dataset", "metrics"} and result["task"]["type"] == "text-generation"
            dataset, metrics = result["dataset"], result["metrics"]
            assert {"type", "name"} <= dataset.keys() <= {"type", "name", "config", "split", "revision", "args"}
            assert all(isinstance(value, str) and value for value in dataset.values())
            for metric in metrics:
                assert {"type", "value"} <= metric.keys() <= {"type", "value", "name"}
                assert isinstance(metric["type"], str) and isinstance(metric["name"], str)
                assert isinstance(metric["value"], float) and math.isfinite(metric["value"])
    return data


def results_of(path: Path) -> dict[tuple[str, str], float]:
    """What the Hub's own reader finds in the model-index: {(dataset, metric): value}."""
    loaded = ModelCard.load(path)
    index = loaded.data.to_dict().get("model-index")
    results = model_index_to_eval_results(index)[1] if index else []
    return {(result.dataset_type, result.metric_type): result.metric_value for result in results}


def outside_fences(text: str) -> list[str]:
    """The lines that are not in a code block, by CommonMark's rule for its end."""
    lines, fence = [], ""
    for line in text.splitlines():
        if not fence and (opened := re.match(r" {0,3}(`{3,})[^`]*$", line)):
            fence = opened[1]
        elif fence and re.fullmatch(rf" {{0,3}}{fence}`*\s*", line):
            fence = ""
        elif not fence:
            lines.append(line)
    assert not fence, "a code block has no end"
    return lines


FINE_TUNED = {
    "base_model": "openai-community/gpt2",
    "base_model_id": "openai-community/gpt2",
    "recipe": "gpt2_finetune",
}
NOT_FINITE = [START, evaluation(0, math.nan), evaluation(1200, math.inf)]
CASES = {
    "complete": (make_events(START), HUB),
    "fine-tuned": (make_events(START | FINE_TUNED), HUB),
    "older": (make_events(), []),
    "not finite": (NOT_FINITE, HUB),
    "no evaluation": ([START], HUB),
    "nothing": ([], []),
}


@pytest.mark.parametrize("step", [0, 400, 1200])
@pytest.mark.parametrize("case", CASES)
def test_the_metadata_follow_the_specification(case, step, make_run):
    """Whatever is known of a run, at any of its steps."""
    events, options = CASES[case]
    run = make_run(*options, events=events)
    write_model_card(run, step)
    data = check_metadata((run / "README.md").read_text())
    assert data["library_name"] == "transformers"
    assert data.get("language") == (["en", "no"] if options else None)  # YAML reads an unquoted no as false
    assert data.get("license") == ("mit" if options else None)
    assert data.get("base_model") == ("openai-community/gpt2" if case == "fine-tuned" else None)
    assert bool(data.get("datasets")) == (case not in ("older", "nothing"))


def test_the_check_of_metadata_notices_mistakes(make_run):
    run = make_run(*HUB)
    write_model_card(run, 1200)
    text = (run / "README.md").read_text()
    for right, wrong in (("value: 4.925", "value: .nan"), ("license: mit", "license: MIT"), ("  - 'no'", "  - no")):
        broken = text.replace(right, wrong).replace(right.lstrip(), wrong.lstrip())
        assert broken != text
        with pytest.raises(AssertionError):
            check_metadata(broken)


def test_the_model_index_holds_the_scores_of_its_step(make_run):
    """Loss, perplexity, bits per byte and every task; none if the step was not evaluated."""
    run = make_run(*HUB)
    write_model_card(run, 800, run / "at_800")
    write_model_card(run, 900, run / "at_900")
    name = "HuggingFaceFW/fineweb-edu"
    losses = {(name, "loss"): 5.325, (name, "perplexity"): math.exp(5.325), (name, "bits_per_byte"): 2.6625}
    tasks = {("Rowan/hellaswag", "acc"): 0.26, ("Rowan/hellaswag", "acc_norm"): 0.3}
    tasks |= {("EleutherAI/lambada_openai", "acc"): 0.5, ("EleutherAI/lambada_openai", "perplexity"): 40.0}
    assert results_of(run / "at_800" / "README.md") == pytest.approx(losses | tasks)
    assert results_of(run / "at_900" / "README.md") == {}


def test_a_card_knows_nothing_of_later_steps(make_run):
    """The card of a checkpoint is the same while the run continues and after it."""
    run = make_run(*HUB, "--max_steps", "1200")
    write_model_card(run, 400, run / "later")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= 400) + '{"event": "train", "st')
    write_model_card(run, 400, run / "meanwhile")
    for name in ("README.md", "loss_curve.png"):
        assert (run / "later" / name).read_bytes() == (run / "meanwhile" / name).read_bytes()
    text = (run / "later" / "README.md").read_text()
    assert "after 400 of 1,200 steps" in text and "819,200 tokens" in text and "step 800" not in text.lower()


def test_the_numbers_on_the_card(make_run):
    """Those of the events, in the units that the card names."""
    run = make_run(*HUB)
    write_model_card(run, 1200)
    text = (run / "README.md").read_text()
    for expected in (
        "7,654,321 parameters",
        "2,457,600 tokens",
        "| validation loss | 7.5000 | 4.9250 |",
        "on 64 of 100 held-out rows of 256 tokens",
        "| HellaSwag, acc\\_norm | 0.3000 | 50 |",
        "| training | 1,234 | 256,000 | 999,999 | 1,000 |",
        "c0" * 32,
        "2 x NVIDIA H200",
        "2.0 hours (4.0 GPU hours)",
        "5,000 tokens/s, 25.0% of",
        "9.60 epochs",
        "has seen its text 10 times",
        "`0123456789`",
    ):
        assert expected in text, expected
    assert "![Training and validation loss](loss_curve.png)" in text and (run / "loss_curve.png").is_file()


@pytest.mark.parametrize(
    "evil", ["```\n# Heading", "````\n# Heading\n`````python", "---\n---", "<script>&amp;\n</details>", "| a |\n"]
)
def test_no_sample_prompt_or_name_breaks_the_page(evil, make_run):
    """What the model or a file name says stays in its place: the page has the same headings and tables."""
    data = START["data"] | {"source": f"a|b`{evil}", "dataset_id": None}
    events = make_events(START | {"data": data, "command": f"accelerate launch x --train_file '{evil}'"})
    events.append({"event": "sample", "step": 1200, "prompt": "The", "text": f"{evil}\n{evil}"})
    run = make_run(f'--sample_prompt={evil}"', events=events)
    write_model_card(run, 1200)
    lines = outside_fences((run / "README.md").read_text().partition("\n---\n")[2])
    titles = ["How to use it", "Samples", "Data", "Training", "Recipe", "How to reproduce it", "Limitations"]
    assert [line for line in lines if line.startswith("#")] == ["# tiny\\_run", *(f"## {title}" for title in titles)]
    assert not any(re.search(r"(?<!\\)<", line) or line == "---" for line in lines)
    for row in (line for line in lines if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", row)) in (3, 4, 6), row
    assert any("a\\|b\\`" in line for line in lines)


def test_four_samples_from_first_to_last(make_run):
    extra = [{"event": "sample", "step": step, "prompt": "", "text": "x" * 5000} for step in range(10)]
    run = make_run(events=[*extra, *make_events(START)])
    write_model_card(run, 1200)
    text = (run / "README.md").read_text()
    assert re.findall(r"^Step ([\d,]+):$", text, re.MULTILINE) == ["0", "4", "8", "1,200"]
    assert "The text of step 1200." in text and text.count("x") < 2000


@pytest.mark.parametrize("recipe", sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml")))
def test_a_published_recipe_differs_from_itself_in_nothing(recipe, make_run):
    """Also if its length is given in epochs, which a run resolves to steps."""
    data = [] if recipe == "demo" else ["--dataset_dir", "/home/jo/fineweb"]
    length = ["--max_steps", "94"] if recipe == "gpt2_finetune" else []  # 3 epochs of 1,000 rows, 32 per step
    run = make_run("--config", recipe, *data, *length, events=make_events(START | {"recipe": recipe}))
    write_model_card(run, 94)
    text = (run / "README.md").read_text()
    assert f"are those of the published recipe `{recipe}`" in text
    assert "**" not in text.partition("## Recipe")[2].partition("## How")[0]


def test_differences_from_the_published_recipe_are_marked(make_run):
    """With the published value beside them, for options, for the model's shape and for the data."""
    changed = ["--learning_rate", "1e-3", "--config_overrides", "n_layer=6", "--adam_epsilon", "1e-6", "--seed", "7"]
    run = make_run("--train_file", "/home/jo/a.txt", "--tokenizer_vocab_size", "2048", *changed)
    write_model_card(run, 1200)
    rows = re.findall(r"^\| `(\w+)` \| \*\*(.*)\*\* \| (.*) \|$", (run / "README.md").read_text(), re.MULTILINE)
    assert {name: (now, before) for name, now, before in rows} == {
        "learning_rate": ("0.001", "0.01"),
        "n_layer": ("6", "4"),
        "adam_epsilon": ("1e-06", "1e-08"),
        "seed": ("7", "1337"),
        "dataset_name": ("-", "python\\_standard\\_library"),
    }


def test_the_first_start_names_the_recipe_and_the_last_the_hardware(make_run):
    """A resumed run starts from its folder, perhaps on another machine; a later start is not the checkpoint's."""
    resumed = START | {
        "step": 400,
        "recipe": "tiny_run",
        "environment": START["environment"] | {"device": "NVIDIA A100"},
    }
    run = make_run(*HUB, events=sorted([*make_events(START), resumed], key=lambda event: event["step"]))
    for step in (400, 1200):
        write_model_card(run, step, run / f"at_{step}")
    before, after = ((run / f"at_{step}" / "README.md").read_text() for step in (400, 1200))
    assert "published recipe `demo`" in after and "resumed after step 400" in after
    assert "2 x NVIDIA H200, then 2 x NVIDIA A100" in after and "A100" not in before


def test_how_to_load_and_resume(make_run):
    """By the id on the Hub, by revision, and never by a local path."""
    run = make_run(*HUB)
    branches = [f"step-{step:06d}-0.0B" for step in (400, 800)]
    write_model_card(run, 1200, run / "main", branches=branches, resumable=True)
    write_model_card(run, 400, run / "branch", revision=branches[0], branches=branches)
    main, branch = ((run / name / "README.md").read_text() for name in ("main", "branch"))
    assert 'model="jo/tiny")' in main and 'name, revision = "jo/tiny", "step-000400-0.0B"' in main
    assert "--resume_from_checkpoint hf://jo/tiny@step-000800-0.0B" in main
    assert 'model="jo/tiny", revision="step-000400-0.0B")' in branch and "--resume_from_checkpoint" not in branch


def test_an_unpublished_model_is_named_by_its_folder(make_run):
    run = make_run()
    write_model_card(run, 1200)
    text = (run / "README.md").read_text()
    assert 'model="tiny_run")' in text and "private" not in text and str(run.parent) not in text


def test_a_streamed_text_has_only_the_counts_that_are_known(make_run):
    data = START["data"] | {"splits": {"validation": START["data"]["splits"]["validation"]}}
    run = make_run(*HUB, events=make_events(START | {"data": data}))
    write_model_card(run, 1200)
    text = (run / "README.md").read_text()
    assert "It was streamed" in text and "| validation | 56 |" in text
    assert "| training |" not in text and "epochs" not in text


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"tasks": 1, "texts": {}}', '{"tasks": {"arc": {"acc": NaN}, "x": 2}}']
)
def test_a_damaged_evaluation_is_ignored(content, make_run):
    run = make_run(*HUB)
    (run / "model.safetensors").touch()
    (run / "evaluation.json").write_text(content)
    write_model_card(run, 1200)
    check_metadata((run / "README.md").read_text())
    assert ("Rowan/hellaswag", "acc") in results_of(run / "README.md")


def test_an_evaluation_of_this_model_is_on_its_card(make_run):
    """Its tasks replace those of the run, which used fewer examples. That of an older model is not used."""
    run = make_run(*HUB)
    path, weights = run / "evaluation.json", run / "model.safetensors"
    weights.touch()
    texts = [{"name": "/home/jo/wiki.txt", "loss": 4.5, "perplexity": 90.0, "bits_per_byte": 1.5, "num_bytes": 9}]
    path.write_text(json.dumps({"tasks": {"hellaswag": {"acc": 0.31, "num_examples": 10_042}}, "texts": texts}))
    write_model_card(run, 1200)
    assert results_of(run / "README.md")["Rowan/hellaswag", "acc"] == 0.31
    assert results_of(run / "README.md")["wiki.txt", "loss"] == 4.5
    assert "| wiki.txt | 4.5000 | 90.00 | 1.5000 |" in (run / "README.md").read_text()
    write_model_card(run, 800)
    assert results_of(run / "README.md")["Rowan/hellaswag", "acc"] == 0.26
    os.utime(path, (1, 1))
    write_model_card(run, 1200)
    assert results_of(run / "README.md")["Rowan/hellaswag", "acc"] == 0.26


def test_a_curve_that_cannot_be_drawn_is_a_warning(make_run, monkeypatch, capsys):
    """The card then has no image, not even that of an earlier step."""

    def fail(*args, **kwargs):
        raise RuntimeError("no fonts")

    run = make_run(*HUB)
    write_model_card(run, 400)
    monkeypatch.setattr(card, "save_loss_chart", fail)
    write_model_card(run, 1200)
    assert "warning: the loss curve could not be drawn (RuntimeError: no fonts)" in capsys.readouterr().out
    assert not (run / "loss_curve.png").exists() and "loss_curve.png" not in (run / "README.md").read_text()


def test_matplotlib_is_imported_only_to_draw():
    for path in (ROOT / "recipe").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("matplotlib") for name in names), path


def test_a_run_leaves_its_card(train, dataset_dir, jsonl_file):
    """A real run records facts that agree with its model and its dataset, and no folder of this machine."""
    output_dir = train("--eval_steps", "2", "--save_steps", "2", *HUB)
    train("--eval_steps", "2", "--save_steps", "2", *HUB, "--resume_from_checkpoint", "auto", output_dir=output_dir)
    start, again = read_events(output_dir, "start")
    parameters = {p.data_ptr(): p.numel() for p in AutoModelForCausalLM.from_pretrained(output_dir).parameters()}
    assert start["model"]["num_parameters"] == sum(parameters.values())
    metadata = json.loads((dataset_dir / "metadata.json").read_text())
    assert start["data"]["content_sha256"] == metadata["content_sha256"]
    assert start["data"]["splits"]["train"]["rows"] == metadata["splits"]["train"]["rows"]
    assert (start["data"]["source"], start["recipe"], again["step"]) == (jsonl_file.name, "demo", 4)
    seconds = [event["train_seconds"] for event in read_events(output_dir, "train")]
    assert seconds == sorted(seconds) and seconds[0] > 0
    text = (output_dir / "README.md").read_text()
    check_metadata(text)
    last = read_events(output_dir, "eval")[-1]
    assert results_of(output_dir / "README.md")["text", "loss"] == last["loss"] and last["step"] == 4
    private = str(dataset_dir.parent.parent)  # the folder of corpus, dataset and run
    assert private not in text and private not in (output_dir / "metrics.jsonl").read_text()
    assert (output_dir / "loss_curve.png").is_file()
    write_model_card(output_dir, 2, output_dir / "at_2")
    assert "after 2 of 4 steps" in (output_dir / "at_2" / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user/name", "user/name"),
        ("wikitext", "wikitext"),
        ("/home/jo/data/", "data"),
        ("~/secret/data", "data"),
        ("./secret/data", "data"),
        ("../secret/data", "data"),
        ("secret/project/data", "data"),
        ("C:\\Users\\jo\\data", "data"),
        ("\\\\server\\jo\\data", "data"),
        ("file:///home/jo/data", "data"),
        ("/home/jo/*.txt", "*.txt"),
        ("https://example.com/a/b.txt", "https://example.com/a/b.txt"),
        ("https://jo:token@example.com/a", "https://example.com/a"),
        ("hf://user/name@step-001000-0.5B", "hf://user/name@step-001000-0.5B"),
    ],
)
def test_public_names(name, expected):
    """Ids of the Hub and addresses stay; of a path only the last part."""
    assert public_name(name) == expected
    assert last_part(name) == ("name" if name == "user/name" else expected)


def test_a_local_folder_that_looks_like_an_id_is_not_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_id("jo/corpus") == "jo/corpus"
    (tmp_path / "jo" / "corpus").mkdir(parents=True)
    assert hub_id("jo/corpus") is None and public_name("jo/corpus") == "corpus"
    assert [hub_id(name) for name in (None, "corpus", "hf://a", "a/b/c", "/a")] == [None] * 5


def test_the_source_on_the_card(tmp_path):
    """The card names text files and local datasets without their folders, and a dataset of the Hub by its id."""
    for folder in (tmp_path, tmp_path / "on_another_machine"):
        assert describe_source({"dataset_name": str(folder), "dataset_config_name": None}) == folder.name
    assert describe_source({"train_files": ["/a/b.txt", "c/d.txt"], "validation_files": []}) == "b.txt, d.txt"
    fineweb = {"dataset_name": "HuggingFaceFW/fineweb-edu", "dataset_config_name": "sample-10BT"}
    assert describe_source(fineweb) == "HuggingFaceFW/fineweb-edu, sample-10BT"


def test_the_command_has_no_local_path():
    """Neither of the program, nor in `--option=value`, nor in any value of a list; the rest stays as it was typed."""
    argv = [
        "/home/jo/gpt2-recipe/recipe/train.py",
        "--train_file=/home/jo/a.txt",
        "--dataset-dir",
        "runs/data/fineweb",
    ]
    argv += ["--validation_file", "/home/jo/b.txt", "secret/c d.txt", "~/e.txt", "--hub_model_id", "jo/tiny"]
    argv += ["--sample_prompt", "Once upon", "--config_overrides", "n_layer=4,n_embd=128", "--deterministic"]
    assert public_command(argv) == (
        "accelerate launch recipe/train.py --train_file=a.txt --dataset-dir fineweb --validation_file b.txt 'c d.txt' "
        "e.txt --sample_prompt 'Once upon' --config_overrides n_layer=4,n_embd=128 --deterministic"
    )


def test_public_files_have_no_local_path_and_are_strict_json(make_run, tmp_path):
    """And contain nothing after their step."""
    options = ["--train_file", "/home/jo/secret/a.txt", "secret/b.txt", "--tokenizer_name", "/home/jo/secret/tok"]
    note = {
        "event": "other",
        "step": 400,
        "trace": "see '/home/jo/secret/trace.json'",
        "nan": math.nan,
        "x": [math.inf],
    }
    sample = {"event": "sample", "step": 400, "prompt": "", "text": "a path: /usr/lib/python3"}
    run = make_run(*options, *HUB, events=[*make_events(START), note, sample])
    command = "/home/jo/secret/train.py --train_file '/home/jo/secret/a.txt' --hub_model_id jo/tiny"
    summary = {"step": 1200, "command": command, "perplexity": math.inf, "environment": {"device": "CPU @ 2.20GHz"}}
    (run / "summary.json").write_text(json.dumps(summary))
    written = write_public_files(run, tmp_path / "public", 1200)
    assert {path.name for path in written} == {"training_config.yaml", "metrics.jsonl", "summary.json"}
    assert not any("secret" in path.read_text() for path in written)

    def refuse(constant: str):
        raise AssertionError(constant)

    events = [json.loads(line, parse_constant=refuse) for line in written[1].read_text().splitlines()]
    assert note | {"trace": "see 'trace.json'", "nan": None, "x": [None]} in events and sample in events
    shown = json.loads(written[2].read_text(), parse_constant=refuse)
    assert shown["perplexity"] is None and shown["environment"] == summary["environment"]
    config = yaml.safe_load(written[0].read_text())
    assert (config["train_file"], config["tokenizer_name"]) == (["a.txt", "b.txt"], "tok")
    assert load_config(["--config", str(written[0])])[0].hub_language == ["en", "no"]
    earlier = write_public_files(run, tmp_path / "earlier", 800)
    assert [path.name for path in earlier] == ["training_config.yaml", "metrics.jsonl"]
    assert max(json.loads(line)["step"] for line in earlier[1].read_text().splitlines()) == 800


def test_the_commit_is_that_of_the_checkout():
    git = ["git", "-C", ROOT]
    found = subprocess.run([*git, "log", "-1", "--format=%H"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("not a git checkout")
    changed = subprocess.run([*git, "diff", "HEAD", "--quiet"], check=False).returncode
    assert find_commit() == found.stdout.strip() + "+" * changed


def test_a_start_on_another_base_model_is_a_difference(make_run):
    """The shape that the base model set is compared with the published one."""
    start = START | {"base_model": "openai-community/gpt2", "model": START["model"] | {"n_layer": 12}}
    run = make_run("--config", "demo", "--model_name_or_path", "openai-community/gpt2", events=make_events(start))
    write_model_card(run, 1200)
    text = (run / "README.md").read_text()
    assert "| `n_layer` | **12** | 4 |" in text and "| `n_embd` |" not in text
    assert "| `model_name_or_path` | **openai-community/gpt2** | - |" in text
