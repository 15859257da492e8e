"""HellaSwag and LAMBADA are scored by lm-eval's rules, on their own and during training."""

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, WORDS, read_events, read_summary, read_weights, run_script, values_of
from small_model import save_small_model
from transformers import AutoTokenizer, GPT2LMHeadModel

from recipe.evaluation import tasks, validation
from recipe.evaluation.tasks import Example, Score, encode_pairs, score_task, score_windows
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


@pytest.mark.parametrize(
    ("task", "config", "split"),
    [("hellaswag", "hellaswag/hellaswag.yaml", "validation"), ("lambada", "lambada/lambada_openai.yaml", "test")],
)
def test_every_example_equals_lm_eval(model, tokenizer, tmp_path, monkeypatch, task, config, split):
    """The real lm-eval, its own task, the same file: equal scores, and equal log-probabilities of each continuation
    but for the rounding of the matrix products."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = HELLASWAG
    if task == "lambada":
        path = tmp_path / "lambada.jsonl"
        write_greedy_examples(model, tokenizer, path)
    yaml = tmp_path / "task.yaml"
    yaml.write_text(
        f"include: {Path(lm_eval.__file__).parent / 'tasks' / config}\ntask: sample\ntag: null\n"
        f"training_split: null\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{{split}: {path}}}}}\n"
    )
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    theirs = lm_eval.simple_evaluate(lm, tasks=[str(yaml)], log_samples=True, bootstrap_iters=0)
    examples = tasks.read_examples(task, str(path))
    ours = score_task(model, tokenizer, task, examples, 300)
    p = ours["acc"]
    assert 0 < p < 1
    assert ours["acc_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (len(examples) - 1)))
    for score, value in theirs["results"]["sample"].items():
        if score.endswith(",none") and "stderr" not in score:
            assert ours[score.removesuffix(",none")] == pytest.approx(value, rel=1e-4 * ("perp" in score))
    assert len(theirs["samples"]["sample"]) == ours["num_examples"] == len(examples)
    for sample in theirs["samples"]["sample"]:
        example = examples[sample["doc_id"]]
        pairs = [(example.context, " " + choice) for choice in example.choices]
        found = score_windows(model, encode_pairs(tokenizer, pairs, CONTEXT), 300)
        expected = [response[0] for response in sample["resps"]]
        nats = [float(e[0]) for e in expected]
        assert [score.log_probability for score in found] == pytest.approx(nats, abs=1e-3)
        assert [score.is_greedy for score in found] == [str(e[1]) == "True" for e in expected]


def test_white_space_before_an_ending_belongs_to_it(tokenizer):
    """As in lm-eval: the context is encoded without it."""
    spaced, plain = encode_pairs(tokenizer, [("the cat ", "sat"), ("the cat", " sat")], CONTEXT)
    assert spaced.ids.tolist() == plain.ids.tolist()
    assert spaced.num_targets == plain.num_targets


def test_acc_norm_divides_by_characters_not_by_bytes():
    """Per byte, the first choice would win; per character, the second does."""
    example = Example("a", ["\u00e9\u00e9\u00e9", "abcd"], 1)
    scores = tasks.summarize_hellaswag([example], [[Score(-3.3, False), Score(-4.0, False)]])
    assert (scores["acc"], scores["acc_norm"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([Score(-1.0, True), Score(-3.0, False)], (0.5, 0.5, math.exp(2), math.exp(2))),
        ([Score(-1e6, False)], (0.0, None, math.inf, None)),
    ],
)
def test_accuracy_and_perplexity_of_last_words_have_errors_unless_there_is_only_one(words, expected):
    scores = tasks.summarize_lambada([], [[word] for word in words])
    names = ("acc", "acc_stderr", "perplexity", "perplexity_stderr")
    assert scores == pytest.approx(dict(zip(names, expected, strict=True)))


def test_fewer_examples_are_a_prefix_of_a_fixed_order(model, tokenizer, monkeypatch):
    """Which is not that of the file."""
    examples, scored = [Example(f"the cat sat {i}", ["on a mat", "off"], i % 2) for i in range(150)], []

    def encode(tokenizer, pairs, context):
        scored.extend(head for head, _ in pairs[::2])
        return encode_pairs(tokenizer, pairs, context)

    monkeypatch.setattr(tasks, "encode_pairs", encode)
    assert score_task(model, tokenizer, "hellaswag", examples, 300, max_examples=40)["num_examples"] == 40
    few = scored.copy()
    scored.clear()
    assert score_task(model, tokenizer, "hellaswag", examples, 300)["num_examples"] == 150
    contexts = [example.context for example in examples]
    assert scored[:40] == few != contexts[:40]
    assert sorted(scored) == sorted(contexts)


def test_the_padding_of_the_vocabulary_does_not_count(model, tokenizer):
    """A padded model has the scores of the saved one, even if its padding would be the likeliest token."""
    windows = encode_pairs(tokenizer, [("the cat", " sat"), ("a mat while rain", " fell")], CONTEXT)
    padded = GPT2LMHeadModel(model.config).eval()
    padded.load_state_dict(model.state_dict())
    padded.resize_token_embeddings(len(tokenizer) + 12, mean_resizing=False)
    padded.get_output_embeddings().weight.data[len(tokenizer) :] = 3.0
    found, expected = score_windows(padded, windows, 300, len(tokenizer)), score_windows(model, windows, 300)
    for score, other in zip(found, expected, strict=True):
        assert score.log_probability == pytest.approx(other.log_probability, abs=1e-4)
        assert score.is_greedy == other.is_greedy


def test_a_task_stops_between_chunks(model, tokenizer):
    answers = iter([False, True])
    examples = [Example("the cat sat", ["on a mat", "off"], 0)] * 150
    assert score_task(model, tokenizer, "hellaswag", examples, 300, must_stop=lambda: next(answers)) is None


def test_a_process_may_get_no_example(model, tokenizer, monkeypatch):
    """The last chunk may have fewer examples than there are processes."""
    examples, parts = tasks.load_tasks(GIVEN)["hellaswag"], []
    alone = score_task(model, tokenizer, "hellaswag", examples, 300, max_examples=1)
    monkeypatch.setattr(tasks, "gather", lambda found: parts.append(found) or list(parts))
    for index in (0, 1):
        state = SimpleNamespace(num_processes=2, process_index=index)
        monkeypatch.setattr(tasks, "PartialState", lambda state=state: state)
        found = score_task(model, tokenizer, "hellaswag", examples, 300, max_examples=1)
    assert parts[1] == {}
    assert found | {"seconds": 0} == alone | {"seconds": 0}


# ------------------------------------------------------------------ during training


@pytest.fixture(scope="module")
def with_tasks(train_shared):
    """A run with dropout, which scores 15 of the 20 examples of each task at the steps 0, 2 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "TASK_EXAMPLES", 15)
        return train_shared(*WITH_DROPOUT, "--eval_steps", "2", "--eval_tasks", ",".join(GIVEN))


WITH_DROPOUT = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1"]


def test_training_with_tasks_is_the_same_training(with_tasks, train):
    """Scoring tasks changes neither losses nor weights, not even with dropout."""
    without = train(*WITH_DROPOUT, "--eval_steps", "2")
    losses = [values_of(run, "loss") for run in (with_tasks, without)]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    assert read_weights(with_tasks) == read_weights(without)


def test_every_evaluation_of_a_run_scores_the_tasks(with_tasks):
    """Each evaluation scores the same number of examples on any machine. The last scores are the run's."""
    events = read_events(with_tasks, "eval")
    assert [event["step"] for event in events] == [0, 2, 4]
    assert {event[f"{task}_num_examples"] for event in events for task in ("hellaswag", "lambada")} == {15}
    assert read_summary(with_tasks)["tasks"]["lambada"]["perplexity"] == events[-1]["lambada_perplexity"]


def test_the_scores_in_training_are_those_of_the_saved_model(with_tasks):
    """scripts/evaluate_model.py finds those of the last evaluation, whose model had a padded vocabulary."""
    limit = ["--max_task_examples", 15]
    assert not run_script("scripts/evaluate_model.py", "--model", with_tasks, "--tasks", *GIVEN, *limit)
    found = json.loads((with_tasks / "evaluation.json").read_text())["tasks"]
    for task, scores in split_scores(read_events(with_tasks, "eval")[-1]).items():
        assert scores["num_examples"] == 15
        for name in set(scores) - {"seconds"}:
            assert found[task][name] == pytest.approx(scores[name], rel=1e-3), (task, name)
