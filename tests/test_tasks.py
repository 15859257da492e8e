"""HellaSwag and LAMBADA are scored by lm-eval's rules, on their own and during training."""

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, WORDS, read_events, run_script
from small_model import save_small_model
from transformers import AutoTokenizer, GPT2LMHeadModel

from recipe.errors import UserError
from recipe.evaluation import tasks as tasks_module
from recipe.evaluation import validation
from recipe.evaluation.tasks import (
    Example,
    Score,
    encode_pairs,
    load_tasks,
    read_examples,
    score_task,
    score_windows,
    summarize_hellaswag,
    summarize_lambada,
)
from recipe.metrics import split_scores

HELLASWAG, LAMBADA = (ROOT / "tests" / f"{task}_sample.jsonl" for task in ("hellaswag", "lambada"))
GIVEN = [f"hellaswag={HELLASWAG}", f"lambada={LAMBADA}"]
CONTEXT = 70  # longer than every continuation, shorter than some examples, which are cut off on the left


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):
    return save_small_model(tmp_path_factory.mktemp("model"), tokenizer_dir, n_positions=CONTEXT)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def model(model_dir):
    return GPT2LMHeadModel.from_pretrained(model_dir).eval()


# ------------------------------------------------------------------ the rules


def write_greedy_examples(model, tokenizer, path: Path) -> None:
    """Copy the sample of LAMBADA, and add texts whose last word is the one that greedy decoding writes."""
    lines = LAMBADA.read_text(encoding="utf-8").splitlines()
    assert any(json.loads(line)["text"] == "Hello" for line in lines)  # one word, so its context is empty
    for words in itertools.product(WORDS.split(), repeat=2):
        context = f"the {' '.join(words)}"
        with torch.no_grad():
            likeliest = model(tokenizer.encode(context, return_tensors="pt")).logits[0, -1].argmax()
        word = tokenizer.decode(likeliest)
        if re.fullmatch(r" \S+", word):
            lines.append(json.dumps({"text": context + word}))
    path.write_text("\n".join(lines), encoding="utf-8")


def test_every_example_equals_lm_eval(model, tokenizer, tmp_path, monkeypatch):
    """The real lm-eval, its own HellaSwag and LAMBADA tasks, the same files: equal scores, and equal log-probabilities
    of each continuation but for the rounding of the matrix products."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files = {"hellaswag": ("hellaswag/hellaswag.yaml", "validation", HELLASWAG),
             "lambada": ("lambada/lambada_openai.yaml", "test", tmp_path / "lambada.jsonl")}  # fmt: skip
    write_greedy_examples(model, tokenizer, files["lambada"][2])
    for task, (config, split, path) in files.items():
        (tmp_path / f"{task}.yaml").write_text(
            f"include: {Path(lm_eval.__file__).parent / 'tasks' / config}\ntask: sample_{task}\ntag: null\n"
            f"training_split: null\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs: {{data_files: {{{split}: {path}}}}}\n"
        )
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    yamls = [str(tmp_path / f"{task}.yaml") for task in files]
    theirs = lm_eval.simple_evaluate(lm, tasks=yamls, log_samples=True, bootstrap_iters=0)
    for name, (_, _, path) in files.items():
        examples = read_examples(name, str(path))
        ours = score_task(model, tokenizer, name, examples, 300)
        assert 0 < ours["acc"] < 1 and ours["num_examples"] == len(examples)
        p = ours["acc"]
        assert ours["acc_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (len(examples) - 1)))
        for score, value in theirs["results"][f"sample_{name}"].items():
            if score.endswith(",none") and "stderr" not in score:
                assert ours[score.removesuffix(",none")] == pytest.approx(value, rel=1e-4 * ("perp" in score))
        for sample in theirs["samples"][f"sample_{name}"]:
            example = examples[sample["doc_id"]]
            pairs = [(example.context, " " + choice) for choice in example.choices]
            found = score_windows(model, encode_pairs(tokenizer, pairs, CONTEXT), 300)
            expected = [response[0] for response in sample["resps"]]
            assert [score.log_probability for score in found] == pytest.approx(
                [float(e[0]) for e in expected], abs=1e-3
            )
            assert [score.is_greedy for score in found] == [str(e[1]) == "True" for e in expected]


def test_acc_norm_divides_by_characters_not_by_bytes():
    """Per byte, the first choice would win; per character, the second does."""
    example = Example("a", ["\u00e9\u00e9\u00e9", "abcd"], 1)
    scores = summarize_hellaswag([example], [[Score(-3.3, False), Score(-4.0, False)]])
    assert (scores["acc"], scores["acc_norm"]) == (0.0, 1.0)


def test_the_errors_of_the_last_words():
    """A perplexity has a standard error too; a single example has none."""
    words = summarize_lambada([], [[Score(-1.0, True)], [Score(-3.0, False)]])
    expected = {"acc": 0.5, "acc_stderr": 0.5, "perplexity": math.exp(2), "perplexity_stderr": math.exp(2)}
    assert words == pytest.approx(expected)
    alone = summarize_lambada([], [[Score(-1e6, False)]])
    assert alone == {"acc": 0.0, "acc_stderr": None, "perplexity": math.inf, "perplexity_stderr": None}


def test_fewer_examples_are_a_prefix_of_a_fixed_order(model, tokenizer, monkeypatch):
    """Which is not that of the file."""
    examples, scored = [Example(f"the cat sat {i}", ["on a mat", "off"], i % 2) for i in range(150)], []

    def encode(tokenizer, pairs, context):
        scored.extend(head for head, _ in pairs[::2])
        return encode_pairs(tokenizer, pairs, context)

    monkeypatch.setattr(tasks_module, "encode_pairs", encode)
    assert score_task(model, tokenizer, "hellaswag", examples, 300, max_examples=40)["num_examples"] == 40
    few = scored.copy()
    scored.clear()
    assert score_task(model, tokenizer, "hellaswag", examples, 300)["num_examples"] == 150
    assert scored[:40] == few and few != [example.context for example in examples[:40]]
    assert sorted(scored) == sorted(example.context for example in examples)


HELLASWAG_ROW = '{"activity_label": "a", "ctx_a": "b", "ctx_b": "", "endings": ["c"], "label": %s}'


@pytest.mark.parametrize(
    ("task", "content", "expected"),
    [
        ("lambada", '{"text": "a b"}\n{"texts": "a"}', "row 2 is no lambada example"),
        ("lambada", "not json", "row 1 is no lambada example"),
        ("lambada", "\n", "is empty"),
        ("hellaswag", HELLASWAG_ROW % '""', "row 1 is no hellaswag example"),
        ("hellaswag", HELLASWAG_ROW % "1", "row 1 is no hellaswag example"),
    ],
)
def test_another_schema_stops_a_run_before_its_text_is_prepared(train, tmp_path, task, content, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=expected):
        train("--eval_tasks", f"{task}={path}", dataset_dir=tmp_path / "not_looked_at")


# ------------------------------------------------------------------ during training


def test_training_with_tasks_is_the_same_training(train, tmp_path, capsys):
    """Scoring tasks changes neither losses nor weights, not even with dropout. The scores are logged and shown."""
    shape = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1", "--block_size", "32"]
    with_tasks, without = (tmp_path / name for name in ("with", "without"))
    train("--eval_steps", "2", "--eval_tasks", *GIVEN, output_dir=with_tasks, shape=shape)
    assert re.search(r"^  hellaswag: acc 0\.\d{4}, acc_norm 0\.\d{4} \(20 ex", capsys.readouterr().out, re.MULTILINE)
    train("--eval_steps", "2", output_dir=without, shape=shape)
    losses = [[event["loss"] for event in read_events(run, "train")] for run in (with_tasks, without)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert (with_tasks / "model.safetensors").read_bytes() == (without / "model.safetensors").read_bytes()
    events = read_events(with_tasks, "eval")
    assert [event["step"] for event in events] == [0, 2, 4]
    assert all(event["hellaswag_num_examples"] == event["lambada_num_examples"] == 20 for event in events)
    summary = json.loads((with_tasks / "summary.json").read_text())
    assert summary["tasks"]["lambada"]["perplexity"] == events[-1]["lambada_perplexity"]
    assert json.loads((without / "summary.json").read_text())["tasks"] == {}


def test_the_scores_in_training_are_those_of_the_saved_model(train, monkeypatch):
    """scripts/evaluate_model.py finds those of the last evaluation, whose model had a padded vocabulary.

    An evaluation in training scores a fixed number of examples, however fast the machine is.
    """
    monkeypatch.setattr(validation, "TASK_EXAMPLES", 15)
    run = train("--eval_tasks", ",".join(GIVEN), "--max_steps", "2")
    assert not run_script("scripts/evaluate_model.py", "--model", run, "--tasks", *GIVEN, "--max_task_examples", 15)
    found = json.loads((run / "evaluation.json").read_text())["tasks"]
    for task, scores in split_scores(read_events(run, "eval")[-1]).items():
        assert scores["num_examples"] == 15
        for name in set(scores) - {"seconds"}:
            assert found[task][name] == pytest.approx(scores[name], rel=1e-3), (task, name)


def test_the_padding_of_the_vocabulary_does_not_count(model, tokenizer):
    """A padded model has the scores of the saved one, even if its padding would be the likeliest token."""
    windows = encode_pairs(tokenizer, [("the cat", " sat"), ("a mat while rain", " fell")], CONTEXT)
    expected = score_windows(model, windows, 300)
    padded = GPT2LMHeadModel(model.config).eval()
    padded.load_state_dict(model.state_dict())
    padded.resize_token_embeddings(len(tokenizer) + 12, mean_resizing=False)
    padded.get_output_embeddings().weight.data[len(tokenizer) :] = 3.0
    for score, other in zip(score_windows(padded, windows, 300, len(tokenizer)), expected, strict=True):
        assert score.log_probability == pytest.approx(other.log_probability, abs=1e-4)
        assert score.is_greedy == other.is_greedy


def test_a_task_stops_between_chunks(model, tokenizer):
    answers = iter([False, True])
    examples = [Example("the cat sat", ["on a mat", "off"], 0)] * 150
    assert score_task(model, tokenizer, "hellaswag", examples, 300, must_stop=lambda: next(answers)) is None


def test_a_process_may_get_no_example(model, tokenizer, monkeypatch):
    """The last chunk may have fewer examples than there are processes."""
    examples, parts, alone = load_tasks(GIVEN)["hellaswag"], [], {}
    for processes in ([0], [0, 1]):
        parts.clear()
        monkeypatch.setattr(tasks_module, "gather", lambda found: parts.append(found) or list(parts))
        for index in processes:
            state = SimpleNamespace(num_processes=len(processes), process_index=index)
            monkeypatch.setattr(tasks_module, "PartialState", lambda state=state: state)
            found = score_task(model, tokenizer, "hellaswag", examples, 300, max_examples=1)
        alone = alone or found
    assert parts[1] == {} and found | {"seconds": 0} == alone | {"seconds": 0}


def test_white_space_before_an_ending_belongs_to_it(tokenizer):
    """As in lm-eval: the context is encoded without it."""
    spaced, plain = encode_pairs(tokenizer, [("the cat ", "sat"), ("the cat", " sat")], CONTEXT)
    assert spaced.ids.tolist() == plain.ids.tolist() and spaced.num_targets == plain.num_targets
