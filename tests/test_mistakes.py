"""Mistakes on the command lines of the programs: each is one sentence, and nothing is written."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import run_script
from small_model import save_small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BertGenerationConfig, BloomConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_dir, dataset_dir) -> Path:
    """A folder with models and files, some of which cannot be used."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "data").symlink_to(dataset_dir)
    save_small_model(folder / "small", tokenizer_dir)
    save_small_model(folder / "short", tokenizer_dir, n_positions=16)
    for name, changes in (("deeper", {"n_layer": 3}), ("fewer", {"vocab_size": 400})):
        shutil.copytree(folder / "small", folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | changes))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_tokens("another")
    save_small_model(folder / "other", tokenizer_dir, vocab_size=501)
    tokenizer.save_pretrained(folder / "other")
    shutil.copytree(folder / "small", folder / "endless")
    config = json.loads((folder / "endless" / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (folder / "endless" / "tokenizer_config.json").write_text(json.dumps(config))
    width = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 500, "eos_token_id": 0}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.5}
    for name, config in {
        "bloom": BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=500),
        "encoder": BertGenerationConfig(**width, **layers, max_position_embeddings=32),
    }.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder / name)
    (folder / "runs" / "broken").mkdir(parents=True)
    (folder / "runs" / "broken" / "config.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "a.txt").write_text("the cat")
    (folder / "blank.txt").write_text(" \n ")
    (folder / "bytes.txt").write_bytes(b"\xff")
    (folder / "rows.jsonl").write_text('{"text": "x"}\n')
    return folder


EVALUATE = "scripts/evaluate_model.py --model"
GENERATE = "scripts/generate_text.py --model"
EXPORT = "scripts/export_model.py --output_dir out --model"
PLAN = "scripts/plan_run.py"
LADDER = "scripts/run_ladder.py --dataset_dir data"
SWEEP = "scripts/benchmarks/sweep.py"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("scripts/prepare_data.py --train_file gone.txt --tokenizer_name t --output_dir out", "no file gone.txt"),
        ("scripts/train_tokenizer.py --train_file gone.txt --output_dir out", "there is no file gone.txt"),
        ("scripts/train_tokenizer.py --train_file blank.txt --output_dir out", "there is no text in blank.txt"),
        # Models
        (f"{GENERATE} gone", "cannot load a model from 'gone'"),
        (f"{GENERATE} user/na--me", "cannot load a model from 'user/na--me'"),
        (f"{GENERATE}=", "the name of a folder or Hub id is empty"),
        (f"{GENERATE} empty", "there is no model in empty"),
        (f"{GENERATE} runs", "there is no model in runs; there is one in runs/broken"),
        (f"{GENERATE} runs/broken", "cannot load a model from 'runs/broken'"),
        (f"{GENERATE} deeper", "lacks weights: transformer.h.2"),  # Transformers would fill them with random numbers
        (f"{GENERATE} endless", "the tokenizer in endless has no end-of-text token"),
        (f"{EVALUATE} bloom --text_file a.txt", "bloom is not supported: it has no max_position_embeddings"),
        (f"{EVALUATE} encoder --text_file a.txt", "encoder is not a causal one: its tokens see later ones"),
        (f"{GENERATE} fewer", "the tokenizer in fewer has 500 tokens, its model only 400"),
        (f"{GENERATE} small --revision step-001000-0.5B", "selects a branch of a Hub model"),
        # Text
        (f"{GENERATE} small --temperature=-1", "temperature"),
        (f"{GENERATE} small --temperature 1e-40", "temperature, if not 0, must be from 0.0001 to 10000"),
        (f"{GENERATE} small --temperature inf", "temperature"),
        (f"{GENERATE} small --top_p 1.5", "top_p"),
        (f"{GENERATE} small --top_p nan", "top_p must be from 0 to 1, got nan"),
        (f"{GENERATE} small --top_k=-1", "top_k"),
        (f"{GENERATE} small --repetition_penalty 0", "penalty"),
        (f"{GENERATE} small --num_samples 0", "num_samples must be at least 1"),
        (f"{GENERATE} gone --prompts_file blank.txt", "there is no prompt in blank.txt"),  # before a model is loaded
        (f"{GENERATE} gone --prompts_file bytes.txt", "expected UTF-8 text"),
        (f"{GENERATE} gone --prompts_file rows.jsonl", 'expected {"prompt": "..."} on each line'),
        # Evaluation
        (f"{EVALUATE} small", "nothing to evaluate; pass --dataset_dir, --text_file or --tasks"),
        (f"{EVALUATE} small --text_file gone.txt", "gone.txt"),
        (f"{EVALUATE} small --text_file blank.txt", "there is no text in blank.txt"),
        (f"{EVALUATE} small --text_file a.txt --stride 0", "stride must be from 1 to 32, the context of small, got 0"),
        (f"{EVALUATE} small --text_file a.txt --context 33", "context must be from 1 to 32, the positions of small"),
        (f"{EVALUATE} small --text_file a.txt --batch_size 0", "batch_size must be at least 1, got 0"),
        (f"{EVALUATE} small --text_file a.txt --output_file no/f.json", "pass a file in an existing folder"),
        (f"{EVALUATE} small --dataset_dir gone", "there is no dataset gone"),
        (f"{EVALUATE} other --dataset_dir data", "was tokenized with another tokenizer than the model's"),
        (f"{EVALUATE} small --tasks lambda", "unknown task 'lambda'; did you mean lambada?"),
        (f"{EVALUATE} small --tasks hellaswag=rows.jsonl", "expected activity_label, ctx_a, ctx_b, endings, label"),
        (f"{EVALUATE} small --tasks hellaswag", "cannot download Rowan/hellaswag"),
        # Export
        (f"{EXPORT} small", "nothing to do"),
        (f"{EXPORT} small --prune 1", "between 0 and 1"),
        (f"{EXPORT} small --quantize int4", "invalid choice"),
        (f"{EXPORT} small --prune 0.3", "is not the folder of a run; pass --text_file"),
        (f"{EXPORT} deeper --prune 0.3 --text_file a.txt", "lacks weights: transformer.h.2"),
        (f"{EXPORT} small --output_dir small --prune 0.3 --text_file a.txt", "small is not empty"),
        # Plans and benchmarks
        (f"{PLAN} --gpu a100", "use a100-80gb"),
        (f"{PLAN} --gpu rtx4900", "did you mean rtx4090?"),
        (f"{PLAN} --gpu t4 --num_gpux 2", "did you mean --num_gpus?"),
        (f"{PLAN} --gpu t4 --num-gpus 0", "num_gpus must be greater than 0"),  # with hyphens, as all programs
        (f"{PLAN} --gpu t4 --mfu 40", "mfu is a share, such as 0.4; got 40"),
        (f"{PLAN} --gpu h100 --num_gpus 3", "global_batch_size 512 is not divisible by 3"),
        (f"{PLAN} --gpu rtx3060 --config gpt2_1558m", "the model does not fit into 12.5 GB"),
        (f"{PLAN} --gpu h100 --config gpt2_finetune", "depends on the dataset"),
        (f"{LADDER} --steps 0", "must be greater than 0"),
        (f"{LADDER} --rungs flush", "invalid choice"),
        (f"{LADDER} --peers nowhere", "git clone"),
        (f"{LADDER} --config demo --micro_batch 100000", "fewer rows than micro_batch"),
        (f"{SWEEP} learning_rat 1", "did you mean --learning_rate?"),
        (f"{SWEEP} seed 1 --max_stepz 1", "did you mean --max_steps?"),
        (f"{SWEEP} seed,optim 1,muon 2", "another number of values"),
        (f"{SWEEP} seed 1 --chart_file a.png", "add --eval_steps"),
    ],
)
def test_a_mistake_is_one_sentence(folder, monkeypatch, command, expected):
    monkeypatch.chdir(folder)
    error = run_script(*command.split())
    assert error.startswith("error: ") and expected in error and "\n" not in error
    assert not list(Path().glob("out/*"))
