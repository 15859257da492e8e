"""The model card of a real run: true to its files, valid for the Hub, unbreakable by generated text."""

import json
import math
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import yaml
from helpers import BLOCK_SIZE, ROOT, read_events, read_summary
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from recipe.config import hub_id
from recipe.environment import describe_machine, find_commit
from recipe.publish import card
from recipe.publish.card import weights_sha256, write_model_card
from recipe.publish.public import write_public_files

LICENSE = ["--hub_license", "mit", "--hub_language", "en", "no"]


@pytest.fixture(scope="module")
def finished(train_shared) -> Path:
    """A run that evaluated at steps 0, 2 and 4."""
    return train_shared("--eval_steps", "2", "--hub_model_id", "jo/tiny", *LICENSE, real=True)


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
    expected = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": "mit", "step": 4}
    expected |= {"language": ["en", "no"], "run_id": read_events(run, "start")[0]["run_id"]}  # YAML reads no as false
    assert expected.items() <= data.items()
    (model,) = data["model-index"]
    for result in model["results"]:
        assert result["task"]["type"] == "text-generation" and result["dataset"]["type"] and result["dataset"]["name"]
        assert all(math.isfinite(metric["value"]) and metric["name"] for metric in result["metrics"])


def test_a_card_shows_the_numbers_of_the_run(run, dataset_dir):
    text, start, last = read_card(run, 4), read_events(run, "start")[0], read_events(run, "eval")[-1]
    metadata = json.loads((dataset_dir / "metadata.json").read_text())
    split = metadata["splits"]["train"]
    rows, speed = (split["tokens"] - 1) // BLOCK_SIZE, read_summary(run)["tokens_per_second"]
    for expected in (
        f"| loss | {last['loss']:.4f} |",
        f"| train | {split['documents']:,} | {split['tokens']:,} | {split['bytes']:,} | {rows:,} |",
        metadata["content_sha256"],
        f"{start['num_parameters']:,} parameters",
        "a vocabulary of 500 tokens",
        "4 steps, 512 tokens",
        start["environment"]["torch"],
        f"gpt2-recipe {start['environment']['gpt2_recipe']}",
        f", {speed:,.0f} tokens per second",
        "](loss_curve.png)",
        "accelerate launch recipe/train.py --config hf://jo/tiny --dataset_dir DATASET_DIR\n",
    ):
        assert expected in text, expected
    assert results_of(text)["text", "loss"] == round(last["loss"], 4)
    assert (run / "loss_curve.png").read_bytes()[:4] == b"\x89PNG"


def stop_before_the_end(train, *arguments: object, **where: object) -> None:
    """Train to the last checkpoint, but not to the summary."""
    with pytest.raises(KeyboardInterrupt), mock.patch("recipe.train.finish_run", side_effect=KeyboardInterrupt):
        train(*arguments, **where)


def test_a_card_describes_every_start_of_a_fine_tuned_model(train, run, tmp_path):
    """The rows of the run are shorter than the model's context, and its second start has another precision."""
    where = {"output_dir": tmp_path / "tuned", "shape": ["--config_overrides", "resid_pdrop=0.0"]}
    options = ["--model_name_or_path", run, "--block_size", 16, "--save_steps", 2, *LICENSE]
    stop_before_the_end(train, *options, "--max_steps", 4, **where)
    more = ["--resume_from_checkpoint", "auto", "--mixed_precision", "bf16", "--max_steps", 9]
    tuned = train(*options, *more, **where)
    text, laps = read_card(tuned, 9), read_events(tuned, "train")
    environment = read_events(tuned, "start")[-1]["environment"]
    timed = [lap for lap in laps if lap["step"] not in (1, 5)]  # the first of each start compiles
    speed = sum(16 * 4 for _ in timed) / sum(16 * 4 / lap["tokens_per_second"] for lap in timed)
    for expected in (
        f"a context of {BLOCK_SIZE} tokens",
        f"at most {BLOCK_SIZE} tokens of context; it was trained on rows of 16.",
        "fine-tuned from",
        "Precision: fp32, not compiled; from step 5 on, bf16 autocast of fp32 weights, not compiled",
        f"{laps[-1]['train_seconds']:,.0f} s, {speed:,.0f} tokens per second",
        f"Versions: torch {environment['torch']}, transformers {environment['transformers']}",
        f"Hardware: {describe_machine(environment)}",
    ):
        assert expected in text.replace("\\", ""), expected
    assert "It is a base model" not in text


def test_a_checkpoint_before_the_first_log_line_of_a_start_has_a_card(train, tmp_path):
    """The card shows the speed that is known so far and, of a branch, what the steps of its origin were made with."""
    options = ["--logging_steps", 4, "--save_steps", 2, "--max_steps", 8, "--lr_scheduler_type", "constant"]
    stop_before_the_end(train, *options, output_dir=tmp_path / "first")
    resume = ["--resume_from_checkpoint", tmp_path / "first" / "checkpoint-6", "--mixed_precision", "bf16"]
    branch = train(*options, *resume, "--max_steps", 10, output_dir=tmp_path / "branch")
    lines = (branch / "metrics.jsonl").read_text().splitlines()
    start, *_, lap = (line for line in lines if json.loads(line)["event"] in ("start", "train"))
    others = [line for line in lines if json.loads(line)["event"] not in ("start", "train")]
    for known in ([start], [start, start], [start, lap, start], [start, start, lap]):
        (branch / "metrics.jsonl").write_text("".join(f"{line}\n" for line in (*known, *others)))
        text = read_card(branch, 10)
        assert "Precision: fp32; from step 7 on, bf16" in text
        assert ("tokens per second" in text) == (lap in known) and "| train |" in text


def test_the_example_of_a_card_runs(run, capsys):
    """The Python code prints a text without a warning, though the context is short and no end of text comes.

    Prompts can have emoji, and can be read in any script.
    """
    prompt = "Да 😀\n"
    change_events(run, lambda event: event.update({"prompt": prompt} if event["event"] == "sample" else {}))
    (example,) = re.findall(r"```python\n(.*?)```", read_card(run, 4), re.DOTALL)
    assert "Да 😀" in example
    exec(example.replace("jo/tiny", str(run)).replace("max_length", "suppress_tokens=[0], max_length"))
    out, err = capsys.readouterr()
    assert out.startswith(prompt) and "max_length" not in err


def test_the_card_of_a_chat_model_shows_a_dialog(run, capsys):
    """Its example asks in the model's own template."""
    change_events(run, lambda event: event.update({"is_chat": True} if event["event"] == "start" else {}))
    (run / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn.content }}{% endfor %}")
    text = read_card(run, 4)
    assert "answers in a dialog" in text and "continues text" not in text
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example.replace("jo/tiny", str(run)))
    assert "role" in example and capsys.readouterr().out.strip()


def test_the_card_of_a_checkpoint_knows_nothing_of_later_steps(run):
    """The card of step 2 is the same while the run continues and after it."""
    later = read_card(run, 2)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    earlier = "".join(line for line in lines if json.loads(line)["step"] <= 2)
    (run / "metrics.jsonl").write_text(earlier + '{"event": "train", "st')  # a kill has cut a line off
    assert read_card(run, 2) == later
    assert "after 2 of 4 steps" in later and "Step 2:" in later and "Step 0:" not in later  # that model is untrained
    not_evaluated = read_card(run, 3)
    assert "| loss |" not in not_evaluated and results_of(not_evaluated) == {}


def test_an_edited_card_of_the_run_stays(run):
    """With the results of the new step; the card of another run does not."""
    (run / "README.md").write_text(read_card(run, 2) + "café\n")
    for _ in range(2):
        edited = read_card(run, 4)
        assert edited.endswith("café\n") and "\nstep: 4\n" in edited and results_of(edited)
    (run / "README.md").write_text(edited.replace("run_id: ", "run_id: b"))
    assert "café" not in read_card(run, 4)


def test_a_branch_is_loaded_and_resumed_by_its_name(run):
    branch = "step-000002-0.3k-3f9a1c"
    main = read_card(run, 4, earlier=[branch], resumable=branch)
    assert f"`{branch}`" in main and f"--resume_from_checkpoint hf://jo/tiny@{branch}" in main
    assert "--max_steps 8" in main  # all four steps are done
    assert "--max_steps" not in read_card(run, 2, resumable=branch).partition("To continue")[2]
    own = read_card(run, 2, revision=branch)
    assert f'model="jo/tiny", revision="{branch}")' in own and "--resume_from_checkpoint" not in own


def outside_fences(text: str) -> list[str]:
    """The lines of the page that are not in a code block, by CommonMark's rule for its end."""
    page = text.partition("\n---\n")[2]
    page = re.sub(r"^ {0,3}(`{3,})[^`\n]*\n.*?^ {0,3}\1`*[ \t]*$", "", page, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"^ {0,3}```", page, re.MULTILINE), "a code block has no end"
    return page.splitlines()


@pytest.mark.parametrize(
    "evil",
    [
        "```\n# Heading",
        "````\n# Heading\n`````python",
        "---\n---",
        "<script>&amp;\n</details>",
        "| a |\n",
        "![evil](https://evil.com/a.png)",
        ["# evil"],
        {"evil": "\n# evil"},
    ],
)
def test_no_sample_and_no_log_of_a_stranger_breaks_the_page(evil, run):
    """What the model says stays in its place: the page has the same headings and tables. Other texts are dropped."""
    changes = {"learning_rate": [0.1, evil], "lr_scheduler_type": evil, "# evil": [1, 2]}

    def spoil(event):
        if event["event"] == "start":
            event |= dict.fromkeys(("commit", "architecture", "base_model_id", "n_layer", "mixed_precision"), evil)
            event["data"] |= dict.fromkeys(("content_sha256", "tokenizer_id"), evil)
            event["data"] |= {"dataset_id": "a/b", "dataset_config_name": evil}
            event["environment"] |= dict.fromkeys(("torch", "gpt2_recipe"), evil)
        if event["event"] == "sample":
            event |= {"text": f"{evil}\n{evil}", "prompt": str(evil)}
        if event["step"] == 2:
            event |= {"event": "schedule", "changes": changes}

    headings = [line for line in outside_fences(read_card(run, 4)) if line.startswith("#")]
    change_events(run, spoil)
    lines = outside_fences(read_card(run, 4))
    assert [line for line in lines if line.startswith("#")] == headings and len(headings) == 6
    assert not any(re.search(r"(?<!\\)<", line.partition("`")[0]) or line == "---" for line in lines)
    for row in (line for line in lines if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", row)) in (4, 6), row
    assert [line for line in lines if re.search(r"!\[evil|(?<!\\)# evil", line)] == []


def test_scores_belong_to_the_weights_that_they_were_measured_with(run):
    """Scores of other weights, or of a file that cannot be read, are not on the card; a copy keeps its own.

    Those of the last checkpoint, which holds the same weights, join them; those on local examples stay private.
    """
    hellaswag = {"acc": 0.31, "acc_stderr": 0.1, "num_examples": 20, "total_examples": 10_042, "version": 1.0}
    hellaswag |= {"lm_eval": "0.4.13", "dataset": "Rowan/hellaswag"}
    own = {name: value for name, value in hellaswag.items() if name != "dataset"}
    (run / "checkpoint-4").mkdir()
    of_checkpoint = {"tasks": {"piqa": hellaswag | {"dataset": "baber/piqa"}, "secret": own}}
    for digest, is_shown in ((weights_sha256(run), True), ("0" * 64, False)):
        scores = {"tasks": {"hellaswag": hellaswag}, "texts": [], "weights_sha256": digest}
        (run / "evaluation.json").write_text(json.dumps([scores]))
        (run / "checkpoint-4" / "evaluation.json").write_text(json.dumps([scores | of_checkpoint]))
        text = read_card(run, 4)
        assert ({("Rowan/hellaswag", "acc"), ("baber/piqa", "acc")} <= results_of(text).keys()) == is_shown
        assert ("| hellaswag (20 of 10,042 examples) | hellaswag acc | 0.3100 |" in text) == is_shown
        assert "lm-eval 0.4.13, task version 1.0" in text or not is_shown
        assert "secret" not in text and "stderr" not in text
        write_model_card(run, 2, run / "checkpoint-2")
        assert ("Rowan/hellaswag", "acc") not in results_of((run / "checkpoint-2" / "README.md").read_text())
    (run / "evaluation.json").write_text("{")
    assert "hellaswag" not in read_card(run, 4)


def test_a_run_on_a_streamed_text_that_diverged_has_a_card(run):
    def change(event):
        if event["event"] == "start":
            event["data"]["splits"].pop("train")
        if event["event"] == "eval":
            event["loss"] = event["perplexity"] = None

    change_events(run, change)
    text = read_card(run, 4)
    assert "streamed" in text and "epochs" not in text and "| loss |" not in text
    assert set(results_of(text)) == {("text", "bits_per_byte")}


def test_a_card_whose_curve_cannot_be_drawn_has_none_and_the_reason_is_printed(run, monkeypatch, capsys):
    """The curve of an earlier step does not stay on it."""
    monkeypatch.setattr(card, "save_loss_chart", mock.Mock(side_effect=RuntimeError("no fonts")))
    assert "loss_curve.png" not in read_card(run, 4) and not (run / "loss_curve.png").exists()
    assert "no fonts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [None, "wikitext", "/home/jo/a", "~/jo", "../a", "a/b/c", "C:\\a/b", "https://jo:x@a.com/b", "a/b.txt ", "here/a"],
)
def test_only_ids_of_the_hub_are_public_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "a").mkdir(parents=True)  # a local folder looks like one
    assert hub_id(name) is None
    assert hub_id("jo/corpus") == "jo/corpus"


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
