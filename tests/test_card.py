"""The model card of a real run: true to its files, valid for the Hub, unbreakable by generated text."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import yaml
from conftest import BLOCK_SIZE, ROOT, read_events
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from recipe.config import hub_id
from recipe.environment import describe_machine, find_commit
from recipe.publish import card
from recipe.publish.card import weights_sha256, write_model_card
from recipe.publish.public import write_public_files

HUB = ["--hub_model_id", "jo/tiny", "--hub_license", "mit", "--hub_language", "en", "no"]


@pytest.fixture(scope="module")
def finished(train_shared) -> Path:
    """A run that evaluated at steps 0, 2 and 4."""
    return train_shared("--eval_steps", "2", *HUB, real=True)


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "tiny_run"))


def change_events(run: Path, change) -> None:
    """Pass each event of a run's log to a function that changes it."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in events:
        change(event)
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def read_card(run: Path, step: int, **options) -> str:
    write_model_card(run, step, **options)
    return (run / "README.md").read_text()


def results_of(text: str) -> dict[tuple[str, str], float]:
    """What the Hub's own reader finds in the model-index: {(dataset, metric): value}."""
    index = ModelCard(text).data.to_dict().get("model-index")
    results = model_index_to_eval_results(index)[1] if index else []
    return {(result.dataset_type, result.metric_type): result.metric_value for result in results}


def test_the_metadata_follow_the_specification_of_the_hub(run):
    """hub-docs, modelcard.md: types and forms of the keys that it names."""
    data = yaml.safe_load(read_card(run, 4).split("---")[1])
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    assert data["license"] == "mit" and data["language"] == ["en", "no"]  # YAML reads an unquoted no as false
    assert data["run_id"] == read_events(run, "start")[0]["run_id"] and data["step"] == 4
    (model,) = data["model-index"]
    for result in model["results"]:
        assert result["task"]["type"] == "text-generation" and result["dataset"]["type"] and result["dataset"]["name"]
        assert all(math.isfinite(metric["value"]) and metric["name"] for metric in result["metrics"])


def test_a_card_shows_the_numbers_of_the_run(run, dataset_dir):
    text, start = read_card(run, 4), read_events(run, "start")[0]
    last = read_events(run, "eval")[-1]
    metadata = json.loads((dataset_dir / "metadata.json").read_text())
    train = metadata["splits"]["train"]
    rows = (train["tokens"] - 1) // BLOCK_SIZE
    for expected in (
        f"| held-out text, validation split | loss | {last['loss']:.4f} |",
        f"| train | {train['documents']:,} | {train['tokens']:,} | {train['bytes']:,} | {rows:,} |",
        metadata["content_sha256"],
        f"{start['model']['num_parameters']:,} parameters",
        "4 steps, 512 tokens",
        start["environment"]["torch"],
        f"gpt2-recipe {start['environment']['gpt2_recipe']}",
        'model="jo/tiny")',
        "![Training and validation loss](loss_curve.png)",
        "accelerate launch recipe/train.py --config hf://jo/tiny --dataset_dir DATASET_DIR\n",
    ):
        assert expected in text, expected
    assert results_of(text)["text", "loss"] == round(last["loss"], 4)
    assert (run / "loss_curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_card_states_what_the_config_the_record_and_the_measurements_say(train, run, tmp_path):
    """Of a model that was fine-tuned on shorter rows than it has positions, and resumed in another precision."""
    base = tmp_path / "base"
    options = ["--model_name_or_path", run, "--block_size", 16, "--save_steps", 2, "--logging_steps", 1, *HUB[2:]]
    shape = ["--config_overrides", "resid_pdrop=0.0"]
    with pytest.raises(KeyboardInterrupt), mock.patch("recipe.train.finish_run", side_effect=KeyboardInterrupt):
        train(*options, "--max_steps", 4, output_dir=base, shape=shape)
    tuned = ["--resume_from_checkpoint", "auto", "--mixed_precision", "bf16", "--max_steps", 9]
    train(*options, *tuned, output_dir=base, shape=shape)
    text = read_card(base, 9)
    config = json.loads((base / "config.json").read_text())
    assert config["n_positions"] == BLOCK_SIZE > 16
    assert f"a context of {config['n_positions']} tokens" in text
    assert f"at most {config['n_positions']} tokens of context; it was trained on rows of 16." in text
    assert "It is a base model" not in text and "It was fine-tuned to continue text" in text
    assert "Precision: fp32, not compiled; from step 5 on, bf16 autocast of fp32 weights, not compiled" in text
    assert f"max_new_tokens={config['n_positions'] // 2})" in text
    laps = read_events(base, "train")
    timed = [lap for lap in laps if lap["step"] not in (1, 5)]  # the first of each start
    speed = sum(16 * 4 for _ in timed) / sum(16 * 4 / lap["tokens_per_second"] for lap in timed)
    assert f"{laps[-1]['train_seconds']:,.0f} s, {speed:,.0f} tokens per second" in text
    once = json.loads((run / "summary.json").read_text())
    assert f", {once['tokens_per_second']:,.0f} tokens per second" in read_card(run, 4)
    environment = read_events(base, "start")[-1]["environment"]
    assert f"Versions: torch {environment['torch']}, transformers {environment['transformers']}" in text
    assert f"Hardware: {describe_machine(environment)}" in text.replace("\\", "")


def test_a_checkpoint_before_the_first_log_line_of_a_start_has_a_card(train, tmp_path):
    """With the speed that is known so far, and of a branch, what the steps of its origin were made with."""
    options = ["--logging_steps", 4, "--save_steps", 2, "--max_steps", 8, "--lr_scheduler_type", "constant"]
    with pytest.raises(KeyboardInterrupt), mock.patch("recipe.train.finish_run", side_effect=KeyboardInterrupt):
        train(*options, output_dir=tmp_path / "first")
    resume = ["--resume_from_checkpoint", tmp_path / "first" / "checkpoint-6", "--mixed_precision", "bf16"]
    branch = train(*options, *resume, "--max_steps", 10, output_dir=tmp_path / "branch")
    lines = (branch / "metrics.jsonl").read_text().splitlines()
    start, *_, lap = (line for line in lines if json.loads(line)["event"] in ("start", "train"))
    others = [line for line in lines if json.loads(line)["event"] not in ("start", "train")]
    for known in ([start], [start, start], [start, lap, start], [start, start, lap]):
        (branch / "metrics.jsonl").write_text("".join(f"{line}\n" for line in (*known, *others)))
        text = read_card(branch, 10)
        assert "Precision: fp32; from step 7 on, bf16 autocast of fp32 weights, not compiled\n" in text
        assert ("tokens per second" in text) == (lap in known) and "| train |" in text


def test_the_example_of_a_card_runs(run, capsys):
    """Also with a context as short as this model's, if no end of text comes; its prompt is that of the samples."""
    (example,) = re.findall(r"```python\n(.*?)```", read_card(run, 4), re.DOTALL)
    exec(example.replace("jo/tiny", str(run)).replace("max_new", "suppress_tokens=[0], max_new"))
    assert capsys.readouterr().out.startswith(read_events(run, "sample")[-1]["prompt"])


def test_the_card_of_a_checkpoint_knows_nothing_of_later_steps(run):
    """It is the same while the run continues and after it."""
    later = read_card(run, 2)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    earlier = "".join(line for line in lines if json.loads(line)["step"] <= 2)
    (run / "metrics.jsonl").write_text(earlier + '{"event": "train", "st')  # a kill has cut a line off
    assert read_card(run, 2) == later
    assert "after 2 of 4 steps" in later and "Step 2:" in later and "Step 0:" not in later  # that model is untrained


def test_a_checkpoint_that_was_not_evaluated_has_no_score_of_its_own(run):
    text = read_card(run, 3)
    assert "It has not been evaluated" in text and "| loss |" not in text and results_of(text) == {}


def test_a_branch_is_loaded_and_resumed_by_its_name(run):
    branch = "step-000002-0.3k-3f9a1c"
    main = read_card(run, 4, earlier=[branch], resumable=branch)
    assert f"`{branch}`" in main and f"--resume_from_checkpoint hf://jo/tiny@{branch}" in main
    assert "--max_steps 8" in main  # all four steps are done
    assert "--max_steps" not in read_card(run, 2, resumable=branch).partition("To continue")[2]
    own = read_card(run, 2, revision=branch)
    assert f'model="jo/tiny", revision="{branch}")' in own and "--resume_from_checkpoint" not in own


@pytest.mark.parametrize(
    "evil", ["```\n# Heading", "````\n# Heading\n`````python", "---\n---", "<script>&amp;\n</details>", "| a |\n"]
)
def test_no_sample_or_name_breaks_the_page(evil, run):
    """What the model says, and names of the Hub, stay in their place: the page has the same headings and tables."""

    def spoil(event):
        if event["event"] == "start":
            event["data"] |= {"tokenizer_id": evil, "dataset_id": "a/b", "dataset_config_name": evil}
        if event["event"] == "sample":
            event |= {"text": f"{evil}\n{evil}", "prompt": evil}

    headings = [line for line in outside_fences(read_card(run, 4)) if line.startswith("#")]
    change_events(run, spoil)
    lines = outside_fences(read_card(run, 4))
    assert [line for line in lines if line.startswith("#")] == headings and len(headings) == 6
    assert not any(re.search(r"(?<!\\)<", line.partition("`")[0]) or line == "---" for line in lines)
    for row in (line for line in lines if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", row)) in (4, 6), row


def outside_fences(text: str) -> list[str]:
    """The lines of the page that are not in a code block, by CommonMark's rule for its end."""
    lines, fence = [], ""
    for line in text.partition("\n---\n")[2].splitlines():
        if not fence and (opened := re.match(r" {0,3}(`{3,})[^`]*$", line)):
            fence = opened[1]
        elif fence and re.fullmatch(rf" {{0,3}}{fence}`*\s*", line):
            fence = ""
        elif not fence:
            lines.append(line)
    assert not fence, "a code block has no end"
    return lines


def test_scores_belong_to_the_weights_that_they_were_measured_with(run):
    """Those of other weights, or of a file that cannot be read, are not on the card; a copy keeps its own."""
    scores = {"tasks": {"hellaswag": {"acc": 0.31, "num_examples": 20, "seconds": 9.0}}, "texts": []}
    for digest, is_shown in ((weights_sha256(run), True), ("0" * 64, False)):
        (run / "evaluation.json").write_text(json.dumps(scores | {"weights_sha256": digest}))
        text = read_card(run, 4)
        assert (("Rowan/hellaswag", "acc") in results_of(text)) == is_shown
        assert ("| HellaSwag (20 of 10,042 examples) | HellaSwag acc | 0.3100 |" in text) == is_shown
        write_model_card(run, 2, run / "checkpoint-2")
        assert ("Rowan/hellaswag", "acc") not in results_of((run / "checkpoint-2" / "README.md").read_text())
    (run / "evaluation.json").write_text("{")
    assert "HellaSwag" not in read_card(run, 4)


def test_a_run_on_a_streamed_text_that_diverged_has_a_card_too(run):
    def change(event):
        if event["event"] == "start":
            event["data"]["splits"].pop("train")
        if event["event"] == "eval":
            event["loss"] = event["perplexity"] = None

    change_events(run, change)
    text = read_card(run, 4)
    assert "It was streamed" in text and "epochs" not in text and "| loss |" not in text
    assert set(results_of(text)) == {("text", "bits_per_byte")}


def test_a_curve_that_cannot_be_drawn_is_a_warning(run, monkeypatch, capsys):
    """The card then has no image, not even that of an earlier step."""

    def fail(*args, **kwargs):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(card, "save_loss_chart", fail)
    assert "loss_curve.png" not in read_card(run, 4) and not (run / "loss_curve.png").exists()
    assert "warning: the loss curve could not be drawn (RuntimeError: no fonts)" in capsys.readouterr().out


def test_only_ids_of_the_hub_are_public_names(tmp_path, monkeypatch):
    """A local folder may look like one."""
    monkeypatch.chdir(tmp_path)
    others = (None, "wikitext", "/home/jo/a", "~/jo", "../a", "a/b/c", "C:\\a/b", "https://jo:x@a.com/b", "a/b.txt ")
    for name in others:
        assert hub_id(name) is None, name
    assert hub_id("jo/corpus") == "jo/corpus"
    (tmp_path / "jo" / "corpus").mkdir(parents=True)
    assert hub_id("jo/corpus") is None


def test_a_later_start_does_not_decide_what_is_of_the_hub(run):
    """A local model of the form a/b may be gone when the run resumes."""
    start = read_events(run, "start")[0] | {"step": 2, "base_model_id": "canary/model"}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(start | {"data": start["data"] | {"tokenizer_id": "canary/tokenizer"}}) + "\n")
    write_public_files(run, run, 4, "jo/tiny")
    published = (run / "metrics.jsonl").read_text()
    assert published.count('"event": "start"') == 2 and "canary" not in published + read_card(run, 4)


def test_the_commit_is_that_of_the_checkout():
    git = ["git", "-C", ROOT]
    found = subprocess.run([*git, "log", "-1", "--format=%H"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("not a git checkout")
    changed = subprocess.run([*git, "diff", "HEAD", "--quiet"], check=False).returncode
    assert find_commit() == found.stdout.strip() + "+" * changed
