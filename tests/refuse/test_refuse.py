"""Command lines that are refused: each is answered in one line that names the option or the file at fault."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers import CPU_ONLY, TINY, default_arguments, load_program, make_documents, run_training
from refusals import check_refusal
from safetensors.torch import load_file, save_file
from small_model import save_small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BertGenerationConfig, BloomConfig, LlamaConfig

from recipe.checkpoint import seal_checkpoint
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import load_tokenizer, train_tokenizer

TRAIN = "recipe/train.py --dataset_dir data"
RESUME = "--resume_from_checkpoint"
WSD = "--lr_scheduler_kwargs"
COSINE = "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs"
EVALUATE = "scripts/evaluate_model.py --model"
GENERATE = "scripts/generate_text.py --model"
EXPORT = "scripts/export_model.py --output_dir out --model"
PREPARE = "scripts/prepare_data.py --output_dir packed --train_file"
NAMED = "scripts/prepare_data.py --output_dir packed --dataset_name"
STREAM = "recipe/train.py --streaming --dataset_name jo/corpus"
PLAN = "scripts/plan_run.py"
LADDER = "scripts/run_ladder.py --dataset_dir data"
SWEEP = "scripts/benchmarks/sweep.py"

WIDE = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4"
DENSE = f"{WIDE},intermediate_size=176,num_key_value_heads=4"

OPTIONS = [  # of recipe/train.py -> what the answer names
    # --- names and values
    ("--lerning_rate 1", "--lerning_rate --learning_rate"),
    ("--seed 1 stray", "'stray'"),
    ("--per_device_train_batch_size 2 --gradient_accumulation_steps 3 --global_batch_size 8", "2 3 8 remove"),
    ("--config_overrides n_layer=2 n_head=2", "'n_head=2' n_layer=2,n_head=2"),
    ("--run_name --sede 3", "--run_name: --run_name=VALUE"),
    ("--report_to --seed 3", "--report_to: --report_to=VALUE"),
    ("--learning_rate nan", "learning_rate 0 nan"),
    ("--max_steps 0", "max_steps 1 0"),
    ("--adam_beta2 1", "adam_beta2 1"),
    ("--mixed_precision bf61", "mixed_precision 'bf61' bf16"),
    ("--output_dir=", "output_dir"),
    ("--max_eval_samples some", "max_eval_samples auto all 'some'"),
    ("--config_overrides a=2020-99-99", "config_overrides n_layer=4,n_embd=128"),
    ("--bf16 maybe", "bf16 'maybe'"),
    ("--config gpt3", "'gpt3' gpt2_124m"),
    (f"{RESUME} True", f"{RESUME} auto"),
    ("--report_to tracki", "'tracki' trackio"),
    ("--report_to aim", "aim --report_to"),  # which is not installed
    ("--expected_loss value=3.2,tolerance=0.1", "expected_loss value, tolerance, tokens, dataset, source"),
    # --- names that other programs have for an option
    ("--batch-size=3", "--batch_size; --per_device_train_batch_size"),
    ("--hub_token x", "--hub_token HF_TOKEN"),
    ("--fp16 --mixed_precision bf16", "fp16 mixed_precision"),
    # --- options that need or exclude each other
    ("--train_file a.txt", "--dataset_dir --train_file --dataset_name"),
    ("--tokenizer_vocab_size 300", "--tokenizer_vocab_size --dataset_dir"),
    ("--validation_file a.txt", "--validation_file --dataset_dir"),
    ("--streaming", "--streaming --dataset_name"),
    ("--push_to_hub", "--push_to_hub --hub_model_id"),
    (f"{RESUME} auto", f"{RESUME} --output_dir"),
    ("--max_steps 3 --num_train_epochs 1", "max_steps num_train_epochs"),
    ("--early_stopping_patience 2 --eval_steps 0", "--early_stopping_patience --eval_steps"),
    ("--optim adamw_torch_fused", "optim adamw_torch_fused learning_rate 0.01 muon"),
    # --- schedules
    (f"{WSD} min_lr_rate=0.1", "min_lr_rate cosine_with_min_lr"),
    (f"{WSD} num_decay_steps=50", "num_decay_steps max_minutes"),
    (f"{WSD} decay_type=square", "decay_type 'square' 1-sqrt"),
    (f"{WSD} min_lr_ratio=2", "min_lr_ratio 2"),
    (f"--max_steps 9 --warmup_steps 8 {WSD} num_decay_steps=3", "warmup_steps num_decay_steps 3 9"),
    ("--max_steps 9 --warmup_steps 9", "9 --warmup_steps"),
    (f"{COSINE} min_lr=1", "min_lr 0.01"),
    (f"{COSINE} min_lr_rate=abc", "min_lr_rate 'abc'"),
    (f"{COSINE} min_lr_rate=0.1,min_lr=0", "min_lr_rate min_lr"),
    # --- mixtures
    ("other --dataset_weights 1", "--dataset_weights --dataset_dir (2)"),
    ("other --dataset_weights 0 0", "--dataset_weights 0"),
    ("foreign", "data foreign --tokenizer_name"),
    # --- the shape of the model, before data are opened
    ("--config_overrides n_layers=4", "config_overrides 'n_layers' n_layer?"),
    ("--config_overrides n_positions=9", "'n_positions' block_size"),
    ("--config_overrides dtype=bfloat16", "'dtype' n_layer"),
    ("--config_overrides n_embd=100,n_head=12", "config_overrides 100 12"),
    ("--config_overrides hidden_size=96", "config_overrides n_embd hidden_size"),  # the recipe's has the other name
    ("--config_overrides activation_function=swishy", "config_overrides swishy"),
    # --- other types of models
    (f"--model_type lama --config_overrides {DENSE}", "'lama' llama?"),
    (f"--model_type llama --config_overrides {WIDE}", "llama intermediate_size, num_key_value_heads config_overrides"),
    (f"--model_type llama --config_overrides {DENSE},num_key_value_heads=3", "llama config_overrides"),
    (f"--model_type mixtral --config_overrides {DENSE}", "mixtral experts"),
    ("--model_type mamba --config_overrides hidden_size=64", "mamba max_position_embeddings"),
    # These would train, and be wrong without a word: its loss would be of other logits, and AutoTokenizer would load
    # any tokenizer.json as a Qwen2Tokenizer.
    (f"--model_type granite --config_overrides {DENSE},logits_scaling=8.0", "granite logits"),
    (f"--model_type qwen2 --config_overrides {DENSE}", "qwen2 Qwen2Tokenizer --model_type"),
]

STARTS = [  # of recipe/train.py, in a folder with runs and models -> what the answer names
    # --- where the run would write
    ("--output_dir a.txt/run", "output_dir a.txt/run"),
    ("--output_dir damaged --seed 5", f"checkpoint-4 damaged/training_config.yaml {RESUME} auto --output_dir"),
    (f"--output_dir damaged {RESUME} auto", "damaged/checkpoint-4 another checkpoint"),
    # --- which model it would start from
    ("--model_name_or_path gone/far/away", "gone/far/away"),
    ("--model_name_or_path small --config_overrides n_layer=3", "n_layer small"),
    ("--model_name_or_path small --block_size 64", "small 32 block_size 64"),
    ("--model_name_or_path llama --model_type gpt2", "llama --model_type"),
    ("--model_name_or_path bare", "tokenizer.json bare --tokenizer_name"),
    # Transformers would fill them with random numbers.
    ("--model_name_or_path hollow", "hollow transformer.h.1.mlp.c_fc.weight"),
    ("--model_name_or_path fewer", "500 400 fewer --tokenizer_name"),
    # --- which data it would read
    ("--dataset_dir other data", "--dataset_dir --dataset_weights"),
    ("--dataset_dir gone", "gone scripts/prepare_data.py"),
    ("--block_size 65536", "65,537 --block_size"),
    ("--tokenizer_name foreign/tokenizer", "data foreign/tokenizer --tokenizer_name"),
]

SCRIPTS = [
    # --- tokenizers and datasets
    ("scripts/prepare_data.py --output_dir out --tokenizer_name small", "--train_file --dataset_name"),
    (f"{PREPARE} gone.txt --tokenizer_name small", "gone.txt"),
    (f"{PREPARE} a.txt", "--tokenizer_name"),
    (f"{PREPARE} a.txt --num_shards 0 --tokenizer_name small", "num_shards 1 0"),
    (f"{PREPARE} a.txt --num_shards 2 --shard_index 2 --tokenizer_name small", "--shard_index 0 2"),
    (f"{PREPARE} a.txt --validation_split_percentage 100 --tokenizer_name small", "validation_split_percentage 100"),
    (f"{PREPARE} a.txt --tokenizer_name nowhere", "'nowhere'"),
    (f"{PREPARE} a.txt --tokenizer_name endless", "endless eos_token"),
    # --- sources of text
    (f"{PREPARE} 'corpus [v2]/*.txt' --tokenizer_name small", "[[]"),
    (f"{PREPARE} empty --tokenizer_name small", "empty"),
    (f"{PREPARE} others/a.pdf --tokenizer_name small", "others/a.pdf .jsonl, .csv,"),
    # Other programs use the suffix .bin, too.
    (f"{PREPARE} others --tokenizer_name small", "others .pdf .zip (1) .bin 'others/*.bin'"),
    (f"{PREPARE} a.txt --validation_file . --tokenizer_name small", "--train_file --validation_file"),
    (f"{NAMED} x --validation_file a.txt --tokenizer_name small", "--validation_file --train_file"),
    (f"{NAMED} empty --tokenizer_name small", "dataset empty"),
    ("recipe/train.py --train_file others/z.bin --tokenizer_vocab_size 300", "z.bin --tokenizer_name"),
    # --- models
    (f"{GENERATE} user/na--me", "'user/na--me'"),
    (f"{GENERATE}=", "empty"),
    (f"{GENERATE} runs", "runs/broken"),
    (f"{GENERATE} fewer", "fewer 500 400"),
    (f"{GENERATE} small --revision step-001000-0.5B", "--revision small"),
    (f"{EVALUATE} bloom --text_file a.txt", "bloom max_position_embeddings"),
    (f"{EVALUATE} encoder --text_file a.txt", "encoder causal"),
    # --- samples
    (f"{GENERATE} small --temperature 1e-40", "temperature 0.0001 1e-40"),
    (f"{GENERATE} small --top_p nan", "top_p nan"),
    (f"{GENERATE} small --num_samples 0", "num_samples 1 0"),
    # --- scores
    (f"{EVALUATE} small", "--dataset_dir --text_file --tasks"),
    (f"{EVALUATE} small --text_file blank.txt", "blank.txt"),
    (f"{EVALUATE} small --text_file ids.jsonl", "ids.jsonl"),  # which holds token ids
    (f"{EVALUATE} small --text_file a.txt --stride 0", "stride 1 32 0"),
    (f"{EVALUATE} small --text_file a.txt --context 33", "context 1 32 33"),
    (f"{EVALUATE} small --text_file a.txt --batch_size 0", "batch_size 1 0"),
    (f"{EVALUATE} small --text_file a.txt --output_file no/f.json", "no/f.json --output_file"),
    (f"{EVALUATE} small --text_file a.txt --output_file rows.jsonl", "rows.jsonl --output_file"),
    (f"{EVALUATE} grown --dataset_dir data", "data tokenizer"),
    (f"{EVALUATE} small --tasks hellaswog", "'hellaswog' hellaswag?"),
    (f"{EVALUATE} small --tasks lambada_openai,hellaswag", "hellaswag lambada_openai"),  # which cannot be downloaded
    (f"{EVALUATE} small --tasks rows.yaml", "rows.yaml"),
    (f"{EVALUATE} small --checkpoints --text_file a.txt", "small"),
    # --- exports
    (f"{EXPORT} small", "--quantize --prune"),
    (f"{EXPORT} small --prune 1", "--prune 0 1"),
    (f"{EXPORT} small --prune 0.3", "small --text_file --dataset_dir"),
    (f"{EXPORT} small --output_dir small --prune 0.3 --text_file a.txt", "small --output_dir"),
    # --- runs
    (f"{STREAM} --dataloader_num_workers 2", "--streaming --dataloader_num_workers"),
    (f"{STREAM} --max_steps -1 --num_train_epochs 1", "--streaming --num_train_epochs --max_steps"),
    ("scripts/push_to_hub.py empty --hub_model_id me/tiny", "empty training_config.yaml"),
    # --- plans and benchmarks
    (f"{PLAN} --gpu a100", "'a100' a100-80gb"),
    (f"{PLAN} --gpu t4 --num_gpux 2", "--num_gpux; --num_gpus?"),
    (f"{PLAN} --gpu t4 --num-gpus 0", "num_gpus 0"),  # with hyphens, as all programs
    (f"{PLAN} --gpu t4 --mfu 40", "mfu 1, 40"),
    (f"{PLAN} --gpu t4 --measure", "--gpu"),
    (f"{PLAN} --gpu rtx3060 --config gpt2_1558m", "12.5"),
    (f"{PLAN} --gpu h100 --price_per_hour 2", "--max_steps"),
    (f"{LADDER} --rungs flush", "--rungs: 'flush'"),
    (f"{LADDER} --per_device_train_batch_size 3", "divides --global_batch_size"),
    (f"{LADDER} --per_device_train_batch_size 100000 --global_batch_size 100000", "micro-batch of 100000"),
    ("scripts/benchmarks/peers.py nowhere --dataset_dir data", "nowhere"),
    ("scripts/run_ladder.py --config mixture.yaml", "several --dataset_dir"),
    (f"{SWEEP} learning_rat 1", "--learning_rat; --learning_rate?"),
    (f"{SWEEP} seed,optim 1,muon 2", "2 seed,optim"),
    (f"{SWEEP} seed 1 --chart_file a.png", "--chart_file --eval_steps"),
    (f"{SWEEP} seed 1 --output_file sweep.json", "sweep.json --output_file"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, dataset_dir, other, tokenizer_dir) -> Path:
    """A folder with data, models, runs and texts, most of which cannot be used."""
    place = tmp_path_factory.mktemp("refuse")
    shutil.copytree(dataset_dir, place / "data")
    shutil.copytree(other, place / "other")
    make_texts(place)
    make_models(place, tokenizer_dir)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ONLY.items():
            patch.setenv(name, value)
        patch.chdir(place)
        make_runs()
    return place


def make_texts(place: Path) -> None:
    (place / "a.txt").write_text("the cat")
    (place / "blank.txt").write_text(" \n ")
    (place / "rows.jsonl").write_text('{"text": "x"}\n')
    (place / "ids.jsonl").write_text('{"text": [1, 2]}\n')
    (place / "mixture.yaml").write_text("dataset_dir: [data, other]\n")
    (place / "sweep.json").write_text('{"option": "optim", "options": [], "runs": []}')
    train_tokenizer(make_documents(50, seed=3), 400).save_pretrained(place / "tokenizer")
    (place / "foreign.txt").write_text("\n\n".join(make_documents(60)))
    source = TextSource((str(place / "foreign.txt"),), document_separator="\n\n")
    prepare_dataset(source, place / "foreign", load_tokenizer(str(place / "tokenizer")))
    for name in ("corpus [v2]/a.txt", "others/a.pdf", "others/z.zip", "others/z.bin"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("the cat ")


def make_models(place: Path, tokenizer_dir: Path) -> None:
    small = save_small_model(place / "small", tokenizer_dir)
    for name, file, changes in (
        ("fewer", "config.json", {"vocab_size": 400}),
        ("endless", "tokenizer_config.json", {"eos_token": None}),
    ):
        shutil.copytree(small, place / name)
        values = json.loads((small / file).read_text())
        (place / name / file).write_text(json.dumps(values | changes))
    shutil.copytree(small, place / "hollow")
    weights = load_file(small / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, place / "hollow" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(small, place / "custom")
    code = {"auto_map": {"AutoConfig": "mygpt.C", "AutoModelForCausalLM": "mygpt.M"}, "model_type": "mygpt"}
    config = json.loads((small / "config.json").read_text()) | code
    (place / "custom" / "config.json").write_text(json.dumps(config))
    module = 'open("code_ran", "w").close()\nfrom transformers import GPT2Config as C, GPT2LMHeadModel as M\n'
    (place / "custom" / "mygpt.py").write_text(module)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    width = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 500, "eos_token_id": 0}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.5}
    for name, config in {
        "bloom": BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=500),
        "encoder": BertGenerationConfig(**width, **layers, max_position_embeddings=32),
    }.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    LlamaConfig().save_pretrained(place / "llama")
    save_small_model(place / "grown", tokenizer_dir, vocab_size=501)
    tokenizer.add_tokens("another")
    tokenizer.save_pretrained(place / "grown")
    (place / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(small / name, place / "bare")
    (place / "runs" / "broken").mkdir(parents=True)
    (place / "runs" / "broken" / "config.json").write_text("{}")
    (place / "empty").mkdir()


def make_runs() -> None:
    """Train a run, and damage its checkpoint."""
    run_training([*default_arguments(Path("data"), Path("damaged"), TINY), "--save_steps", 4, "--max_eval_samples", 4])
    Path("damaged", "checkpoint-4", "optimizer.pt").write_bytes(b"of another version, say")
    seal_checkpoint(Path("damaged", "checkpoint-4"))


@pytest.fixture
def in_place(place, monkeypatch) -> None:
    monkeypatch.chdir(place)


@pytest.mark.parametrize(("options", "names"), OPTIONS)
def test_options_that_cannot_work(in_place, options, names):
    check_refusal(f"{TRAIN} {options}", names)


@pytest.mark.parametrize(("options", "names"), STARTS)
def test_starts_that_cannot_work(in_place, options, names):
    plain = shlex.join(map(str, default_arguments(Path("data"), Path("new"), TINY)))
    check_refusal(f"recipe/train.py {plain} {options}", names)


@pytest.mark.parametrize(("command", "names"), SCRIPTS)
def test_commands_of_scripts_that_cannot_work(in_place, command, names):
    check_refusal(command, names)


@pytest.mark.parametrize(
    "command",
    [
        f"{GENERATE} custom",
        f"{EVALUATE} custom --text_file a.txt",
        f"{EXPORT} custom --prune 0.3 --text_file a.txt",
        f"{TRAIN} --model_name_or_path custom",
        "recipe/train.py --model_name_or_path custom --train_file a.txt",
    ],
)
def test_the_code_that_a_model_brings_is_not_run(in_place, monkeypatch, command):
    """Nobody is asked whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    check_refusal(command, "custom code run")


# ------------------------------------------------------------------ refusals that depend on the machine


@pytest.mark.parametrize(
    ("module", "command", "names"),
    [
        ("bitsandbytes.optim", f"{TRAIN} --optim adamw_bnb_8bit --learning_rate 1e-3", ".[adamw_8bit]"),
        ("bitsandbytes", f"{EXPORT} small --quantize int8", ".[quantize]"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(in_place, monkeypatch, module, command, names):
    monkeypatch.setitem(sys.modules, module, None)
    check_refusal(command, names)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"WORLD_SIZE": "", "LOCAL_RANK": "", "ACCELERATE_USE_FSDP": "", "LOCAL_WORLD_SIZE": ""}, "gone/checkpoint-1"),
        ({"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": ""}, "LOCAL_RANK RANK, WORLD_SIZE"),
        ({"WORLD_SIZE": "4", "ACCELERATE_USE_CPU": ""}, "WORLD_SIZE 4, LOCAL_RANK"),
    ],
)
def test_launcher_variables_that_do_not_fit_together(in_place, monkeypatch, variables, names):
    """Those that fit together change nothing: the run is refused for its checkpoint."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_refusal(f"{TRAIN} --output_dir gone/run {RESUME} gone/checkpoint-1", names)


@pytest.mark.parametrize(
    "name",
    ["prepare_data", "train_tokenizer", "generate_text", "export_model", "push_to_hub", "plan_run", "run_ladder"],
)
def test_a_script_answers_a_mistake_at_once_whatever_the_rank(in_place, monkeypatch, name):
    """It is one process, so it forgets the launcher."""
    for variable, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(variable, value)
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    check_refusal(f"scripts/{name}.py --optoin", "")
    assert waits == [0]


def test_a_home_folder_that_is_unknown(in_place, monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    check_refusal("recipe/train.py --train_file '~/a b'", "~/a HOME")


def test_too_little_text_for_a_step_of_the_bare_loop(in_place, monkeypatch):
    program = load_program("scripts/bare_loop.py")
    monkeypatch.setattr(program, "MICRO_BATCH", 10**6)
    monkeypatch.setattr(sys, "argv", ["bare_loop.py", "data"])
    with pytest.raises(SystemExit, match="data .*1000000"):
        program.main()
