"""Model types other than GPT-2: llama with grouped queries, qwen3 with QK-norm, wide heads and a tied output."""

import shutil

import pytest
import torch
from conftest import BLOCK_SIZE, read_events, run_script
from datasets import load_from_disk
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from recipe.checkpoint import list_checkpoints
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware.memory import MemoryPlan, estimate_bytes
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_block_matrices, count_flops_per_token, count_inner, count_parameters
from recipe.model.weights import copy_weights, load_weights, write_model
from recipe.optim.muon import find_matrices

SHAPE = "num_hidden_layers=2,hidden_size=32,intermediate_size=88,num_attention_heads=4,num_key_value_heads=2"
SHAPES = {"llama": SHAPE, "qwen3": f"{SHAPE},head_dim=16,tie_word_embeddings=true"}
WIDE = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4"
DENSE = f"{WIDE},intermediate_size=176,num_key_value_heads=4"
OTHERS = {
    "gpt_neox": f"{WIDE},intermediate_size=256",
    "mistral": f"{DENSE},sliding_window=16",
    "olmo2": DENSE,
    "gemma3_text": f"{DENSE},sliding_window=16,head_dim=16",
    "phi": DENSE,
    "phi3": DENSE,
    "opt": f"{WIDE},ffn_dim=256,word_embed_proj_dim=64",
}
EACH_TYPE = pytest.mark.parametrize("model_type", SHAPES)


def options_of(model_type, *changes):
    overrides = ",".join(((SHAPES | OTHERS)[model_type], *changes))
    return ["--model_type", model_type, "--config_overrides", overrides, "--block_size", str(BLOCK_SIZE)]


def tiny(model_type, *changes, attention="sdpa", options=()):
    """Return the model's config and the padded model."""
    config = load_config(["--dataset_dir", "d", *options_of(model_type, *changes), *options])[0]
    model_config = build_model_config(config, 500, 7)
    torch.manual_seed(0)
    return config, model_config, build_model(config, model_config, attention)


def stock_of(model, model_config, folder):
    """Return the saved model as Transformers loads it, with eager attention and its mask."""
    write_model(model, model_config, copy_weights(model, model_config), folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@EACH_TYPE
def test_a_run_saves_a_stock_model_with_the_loss_that_it_reports(train, dataset_dir, model_type):
    """The loss falls, and Transformers' masked model has the last evaluation's loss over all validation rows."""
    run = train("--max_steps", "30", "--max_eval_samples", "all", shape=options_of(model_type))
    first, last = read_events(run, "eval")[0], read_events(run, "eval")[-1]
    assert last["loss"] < first["loss"] - 0.5
    model, info = AutoModelForCausalLM.from_pretrained(run, attn_implementation="eager", output_loading_info=True)
    assert model.config.model_type == model_type and model.config.vocab_size == 500
    assert not info["missing_keys"] and not info["unexpected_keys"]
    rows = torch.tensor(load_from_disk(dataset_dir)["validation"]["input_ids"])
    with torch.no_grad():
        logits = model.eval()(input_ids=rows[:, :-1]).logits
    assert F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item() == pytest.approx(last["loss"], rel=1e-5)
    card = (run / "README.md").read_text()
    assert f"stock `{type(model).__name__}`" in card and f"- {model_type}\n" in card and "GPT-2 language" not in card


@EACH_TYPE
def test_resume_is_exact(train, tmp_path, model_type):
    """With Muon and dropout, a stopped and resumed run ends with an uninterrupted run's weights, bit for bit."""
    options = ["--save_steps", "2", "--optim", "muon"]
    whole = train(*options, shape=options_of(model_type, "attention_dropout=0.1"))
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(list_checkpoints(resumed)[-1])
    (resumed / "model.safetensors").unlink()
    latest = ["--resume_from_checkpoint", "latest"]
    train(*options, *latest, output_dir=resumed, shape=options_of(model_type, "attention_dropout=0.1"))
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="attention_dropout 0.1 -> 0.2"):
        train(*options, *latest, output_dir=resumed, shape=options_of(model_type, "attention_dropout=0.2"))


CASES = [(model_type, *how) for model_type in SHAPES for how in (("sdpa", True), ("sdpa", False), ("eager", True))]


@pytest.mark.parametrize(("model_type", "attention", "training"), [*CASES, *((name, "sdpa", True) for name in OTHERS)])
def test_loss_and_gradients_equal_the_stock_models(tmp_path, model_type, attention, training):
    """With a padded vocabulary and compiled as one graph, as of the saved model with eager attention.

    Also with a sliding window shorter than the rows, a bias of the output matrix, and fused projections.
    """
    _, model_config, model = tiny(model_type, attention=attention)
    assert model.config.vocab_size == 512
    stock = stock_of(model, model_config, tmp_path)
    module = LanguageModelingLoss(model, 500).train(training)
    module.compile(backend="eager", fullgraph=True, dynamic=False)
    rows = torch.randint(0, 500, (3, BLOCK_SIZE + 1))
    expected = F.cross_entropy(stock(input_ids=rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    loss = module(rows[:, :-1], rows[:, 1:])["loss"]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.compiler.reset()
    gradients = dict(model.named_parameters())
    for name, p in stock.named_parameters():
        torch.testing.assert_close(gradients[name].grad[: len(p)], p.grad, rtol=1e-4, atol=1e-6, msg=name)


@EACH_TYPE
def test_saving_and_loading_keep_every_weight(tmp_path, model_type):
    """Bit for bit, tied or not."""
    config, model_config, model = tiny(model_type)
    stock_of(model, model_config, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is (model_type == "llama")
    torch.manual_seed(99)
    other = build_model(config, model_config)
    load_weights(other, tmp_path, 500)
    for name, saved in copy_weights(model, model_config).items():
        assert torch.equal(saved, copy_weights(other, model_config)[name]), name


@EACH_TYPE
def test_initial_weights_do_not_depend_on_the_padding(model_type):
    config, model_config, padded = tiny(model_type, "initializer_range=0.1")
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(model_config)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(padded.state_dict()[name][: len(tensor)], tensor), name


@EACH_TYPE
def test_a_bf16_residual_stream_reaches_every_block(model_type):
    """Under autocast, each block returns bf16, and the loss stays close to that of an fp32 stream."""
    losses, rows = [], torch.randint(0, 500, (3, BLOCK_SIZE + 1))
    for bf16 in (False, True):
        model, seen = tiny(model_type, options=["--bf16_residual"] * bf16)[2], set()
        for block in model.base_model.layers:
            block.register_forward_hook(lambda m, i, output, seen=seen: seen.add(output.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(LanguageModelingLoss(model, 500)(rows[:, :-1], rows[:, 1:])["loss"].item())
        assert seen == {torch.bfloat16 if bf16 else torch.float32}
    assert losses[0] == pytest.approx(losses[1], abs=0.01)


def test_parameters_and_flops_of_a_published_llama():
    """TinyLlama 1.1B has 1,100,048,384 parameters; its 6 N + 12 L d T leaves out the input embeddings."""
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
    model_config = LlamaConfig(**shape, vocab_size=32000, num_attention_heads=32)
    assert count_parameters(model_config) == 1_100_048_384
    matrices = 22 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632)
    norms = 45 * 2048
    expected = 6 * (matrices + norms + 32000 * 2048) + 12 * 22 * 2048 * 1024
    assert count_flops_per_token(model_config, 1_100_048_384, 1024) == expected


def test_flops_count_the_width_of_the_heads_and_a_tied_output():
    """qwen3's heads may be wider than its hidden size, and its embeddings are also the output matrix."""
    model_config = tiny("qwen3")[1]
    matrices = 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 88)
    vectors = 2 * (2 * 32 + 2 * 16) + 32
    assert count_parameters(model_config) == matrices + vectors + 500 * 32
    expected = 6 * (matrices + vectors + 500 * 32) + 12 * 2 * (4 * 16) * BLOCK_SIZE
    assert count_flops_per_token(model_config, count_parameters(model_config), BLOCK_SIZE) == expected


def test_a_gated_mlp_counts_as_one_of_its_parameters():
    """With as many heads for keys as for queries, 3 matrices of 32 x 88 equal 2 of 32 x 132."""
    assert count_inner(tiny("llama", "num_key_value_heads=4")[1]) == 132
    assert count_inner(AutoConfig.for_model("gpt2", n_embd=24, n_head=2, n_inner=7)) == 7


@EACH_TYPE
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_memory_estimate_is_rough(model_type, precision):
    """Without compilation, autograd keeps 0.7 to 1.25 times the activations that the estimate expects."""
    wide = ("hidden_size=128", "intermediate_size=344", "head_dim=32")
    config, model_config, model = tiny(model_type, *wide)
    module, saved = LanguageModelingLoss(model, 500).train(), {}
    weights = {p.data_ptr() for p in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and 512 not in tensor.shape:  # neither weights nor logits
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is used twice
        return tensor

    rows, kept = torch.randint(500, (8, BLOCK_SIZE + 1)), []
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        module(rows[:, :-1], rows[:, 1:])
    options = ["--attn_implementation", "sdpa", "--mixed_precision", precision, "--dynamo_backend", "no"]
    options = load_config(["--dataset_dir", "d", *options_of(model_type), *options, "--global_batch_size", "256"])[0]
    few, many = (estimate_bytes(MemoryPlan(n, False, 1), options, model_config, "cpu", 1) for n in (64, 128))
    expected = (many - few) / 64 - 12 * BLOCK_SIZE * model_config.vocab_size  # bytes per row without the logits
    casts = 2 * 2 * count_block_matrices(model_config) if precision == "bf16" else 0  # of the weights of two blocks
    assert 0.7 < sum(saved.values()) / (8 * expected + casts) < 1.25


@EACH_TYPE
def test_muon_takes_the_matrices_of_the_blocks(model_type):
    """Seven per block, each one matrix; embeddings, the output matrix and norms are not among them."""
    model = tiny(model_type)[2]
    found = find_matrices(LanguageModelingLoss(model, 500))
    names = {name for name, p in model.named_parameters() if p in found}
    attention = {f"self_attn.{key}_proj.weight" for key in "qkvo"}
    block = attention | {f"mlp.{key}_proj.weight" for key in ("gate", "up", "down")}
    assert names == {f"model.layers.{i}.{name}" for i in range(2) for name in block}
    assert set(found.values()) == {1}


def test_a_run_continues_a_saved_model(train, tmp_path, jsonl_file):
    """From a folder, whose type must be named; the weights are the starting point, the block size its positions."""
    first = train("--max_steps", "2", shape=options_of("llama"), output_dir=tmp_path / "first")
    start = ["--model_name_or_path", first, "--max_steps", "1", "--learning_rate", "1e-9"]
    second = train(*start, shape=["--model_type", "llama"], output_dir=tmp_path / "second")
    before, after = (load_file(run / "model.safetensors") for run in (first, second))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)
    with pytest.raises(UserError, match=f"the model in {first} has type llama; pass --model_type llama"):
        train(*start, shape=[], output_dir=tmp_path / "third")
    error = run_script("scripts/evaluate_model.py", "--model", first, "--text_file", jsonl_file)
    assert not error


@pytest.mark.parametrize(
    ("model_type", "overrides", "expected"),
    [
        ("lama", DENSE, "no causal language model of type 'lama'; did you mean llama?"),
        ("t5", DENSE, "no causal language model of type 't5'; try llama"),
        ("mamba", "num_hidden_layers=2,hidden_size=64", "max_position_embeddings"),
        ("llama", WIDE, "llama requires intermediate_size, num_key_value_heads in config_overrides"),
        ("llama", "n_layer=2", "cannot set 'n_layer'"),
        ("llama", f"{DENSE},num_layers=2", "cannot set 'num_layers'; did you mean num_hidden_layers?"),
        ("llama", f"{DENSE},max_position_embeddings=9", "cannot set 'max_position_embeddings'; set block_size"),
        ("llama", f"{DENSE},pad_token_id=9", "cannot set 'pad_token_id'; it follows the tokenizer"),
        ("llama", f"{DENSE},hidden_size=66", r"hidden size \(66\) is not a multiple of the number of attention heads"),
        ("llama", f"{DENSE},num_hidden_layers=two", "'num_hidden_layers' expected int, got str"),
        ("llama", f"{DENSE},hidden_act=swishy", "cannot be built: KeyError"),
    ],
)
def test_what_cannot_work_is_refused(model_type, overrides, expected):
    """In one sentence, before data is prepared."""
    options = ["--model_type", model_type, "--config_overrides", overrides, "--block_size", "32"]
    with pytest.raises(UserError, match=expected) as error:
        build_model_config(load_config(["--dataset_dir", "d", *options])[0], 1, 0)
    assert "\n" not in str(error.value)


def test_another_type_replaces_the_recipes_shape():
    """GPT-2's names in a recipe do not reach another type, and stay with its own type."""
    data = ["--config", "gpt2_355m", "--dataset_dir", "d"]
    assert load_config([*data, "--model_type", "gpt2"])[0].config_overrides["n_layer"] == 24
    overrides = ["--config_overrides", WIDE]
    assert "n_layer" not in load_config([*data, "--model_type", "llama", *overrides])[0].config_overrides


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("gemma2", DENSE, "logit"),
        ("cohere", DENSE, "logit"),
        ("granite", f"{DENSE},logits_scaling=8.0", "logit"),
        ("bert", WIDE, "encoder"),
        ("mixtral", DENSE, "experts"),
        ("llama", f"{WIDE},intermediate_size=176,num_key_value_heads=3", "cannot be built"),
    ],
)
def test_a_model_that_would_be_wrong_without_a_word_is_refused(model_type, overrides, reason):
    config = load_config(["--dataset_dir", "d", "--model_type", model_type, "--config_overrides", overrides])[0]
    with pytest.raises(UserError, match=reason):
        build_model_config(config, 500, 7)
