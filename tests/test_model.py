"""The stock model, GPT-2 and other types: sizes, padding, attention, what is saved, and what is refused."""

import shutil

import pytest
import torch
from conftest import BLOCK_SIZE, read_events, run_script
from datasets import load_from_disk
from huggingface_hub import create_repo
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig

from recipe.checkpoint import list_checkpoints
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.model.build import build_model, build_model_config
from recipe.model.check import check_model
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_exported_parameters, count_parameters, find_odd_size
from recipe.model.weights import copy_weights, load_pretrained, load_weights, write_model

EOS = 7
GPT2 = "n_layer=2,n_head=2,n_embd=32"
NARROW = "num_hidden_layers=2,hidden_size=32,intermediate_size=88,num_attention_heads=4,num_key_value_heads=2"
WIDE = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4"
DENSE = f"{WIDE},intermediate_size=176,num_key_value_heads=4"
# A tied and an untied output matrix, grouped queries, QK-norm and heads wider than the hidden size, a sliding window
# shorter than the rows, a bias of the output matrix, and fused projections.
SHAPES = {
    "gpt2": GPT2,
    "llama": NARROW,
    "qwen3": f"{NARROW},head_dim=16,tie_word_embeddings=true",
    "gpt_neox": f"{WIDE},intermediate_size=256",
    "gemma3_text": f"{DENSE},sliding_window=16,head_dim=16",
    "phi": DENSE,
    "phi3": DENSE,
}
MAIN_TYPES = pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])
OTHER_TYPES = pytest.mark.parametrize("model_type", ["llama", "qwen3"])


def options_of(model_type, *changes):
    overrides = ",".join((SHAPES[model_type], *changes))
    return ["--model_type", model_type, "--config_overrides", overrides, "--block_size", str(BLOCK_SIZE)]


def tiny(model_type="gpt2", *changes, attention="sdpa", options=()):
    """Return the config, the model's config with 500 tokens, and the padded model."""
    options = [*options_of(model_type, *changes), "--attn_implementation", attention, *options]
    config = load_config(["--dataset_dir", "d", *options])[0]
    model_config = build_model_config(config, 500, EOS)
    torch.manual_seed(0)
    return config, model_config, build_model(config, model_config)


def save(model, model_config, folder):
    write_model(model, model_config, copy_weights(model, model_config), folder)


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("size", "padded", "exported"),
    [
        ("124m", 124_475_904, 124_439_808),
        ("355m", 354_871_296, 354_823_168),
        ("774m", 774_090_240, 774_030_080),
        ("1558m", 1_557_686_400, 1_557_611_200),
    ],
)
def test_the_recipes_have_the_sizes_of_openais_models(size, padded, exported):
    """With vocabulary 50304 in training, and 50257 as saved."""
    config = load_config(["--config", f"gpt2_{size}", "--dataset_dir", "d"])[0]
    with torch.device("meta"):
        model = build_model(config, build_model_config(config, 50257, 50256))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(model.config) == padded
    assert count_exported_parameters(model, 50257) == exported
    assert (model.config.n_positions, model.config.eos_token_id, model.config.resid_pdrop) == (1024, 50256, 0.0)


def test_parameters_of_a_published_llama():
    """TinyLlama 1.1B has 1,100,048,384 parameters."""
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
    assert count_parameters(LlamaConfig(**shape, vocab_size=32000, num_attention_heads=32)) == 1_100_048_384


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("n_head=12,n_embd=768", None),
        ("n_head=3,n_embd=99", ["3 heads of 33 values", "40, a width of 120, is faster"]),
    ],
)
def test_odd_widths_are_named_with_the_next_good_number(shape, words):
    config = build_model_config(load_config(["--dataset_dir", "d", "--config_overrides", shape])[0], 500, EOS)
    found = find_odd_size(config)
    assert found is None if words is None else all(word in found for word in words)


# ------------------------------------------------------------------ the model that trains


def test_initialization_is_gpt2s():
    """Weights have standard deviation 0.02, and 0.02 / sqrt(2 * layers) where a block adds to the residual stream."""
    model = tiny("gpt2", "n_layer=8", "n_embd=128")[2]
    block = model.transformer.h[3]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for projection in (block.mlp.c_proj, block.attn.c_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.03)


@MAIN_TYPES
def test_initial_weights_do_not_depend_on_the_padding(model_type):
    """The same seed gives the same weights, padded or not."""
    padded, plain = tiny(model_type)[2], tiny(model_type, options=["--pad_vocab_to_multiple_of", "1"])[2]
    assert (padded.config.vocab_size, plain.config.vocab_size) == (512, 500)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(padded.state_dict()[name][: len(tensor)], tensor), name


@pytest.mark.parametrize("switches", [[], ["--activation_checkpointing"]])
def test_compiled_attention_is_causal_without_a_mask(switches):
    """The single graph calls sdpa once per layer with is_causal=True and no mask, as the flash kernels require."""
    module, graphs = LanguageModelingLoss(tiny(options=switches)[2], 500).train(), []

    def capture(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    module.compile(backend=capture, fullgraph=True, dynamic=False)
    module(*torch.randint(0, 500, (2, 2, BLOCK_SIZE)))
    torch.compiler.reset()
    (graph,) = graphs
    nodes = [node for m in graph.modules() if hasattr(m, "graph") for node in m.graph.nodes]
    attention = [node.kwargs for node in nodes if node.target is F.scaled_dot_product_attention]
    assert [(kwargs["is_causal"], kwargs.get("attn_mask")) for kwargs in attention] == [(True, None)] * 2


@pytest.mark.parametrize(("model_type", "attention"), [*((name, "sdpa") for name in SHAPES), ("llama", "eager")])
def test_loss_and_gradients_equal_the_stock_models(tmp_path, model_type, attention):
    """With a padded vocabulary and compiled as one graph, as of the saved model with eager attention and its mask."""
    _, model_config, model = tiny(model_type, attention=attention)
    save(model, model_config, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    module = LanguageModelingLoss(model, 500).train()
    module.compile(backend="eager", fullgraph=True, dynamic=False)
    rows = torch.randint(0, 500, (3, BLOCK_SIZE + 1))
    rows[0, 5] = EOS
    expected = F.cross_entropy(stock(input_ids=rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    loss = module(rows[:, :-1], rows[:, 1:])["loss"]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.compiler.reset()
    gradients = dict(model.named_parameters())
    for name, p in stock.named_parameters():
        torch.testing.assert_close(gradients[name].grad[: len(p)], p.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert model.get_input_embeddings().weight.grad[EOS].any()  # its embedding is trained, not treated as padding


@MAIN_TYPES
def test_a_bf16_residual_stream_only_adds_rounding(model_type):
    """Under autocast, each block returns bf16, and loss and gradients stay close to those of an fp32 stream."""
    found, rows = [], torch.randint(0, 500, (3, BLOCK_SIZE + 1))
    for bf16 in (False, True):
        model, seen = tiny(model_type, options=["--bf16_residual"] * bf16)[2], set()
        for block in model.transformer.h if model_type == "gpt2" else model.base_model.layers:
            block.register_forward_hook(lambda m, i, output, seen=seen: seen.add(output[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss = LanguageModelingLoss(model, 500)(rows[:, :-1], rows[:, 1:])["loss"]
        loss.backward()
        assert seen == {torch.bfloat16 if bf16 else torch.float32}
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    assert found[0][0] == pytest.approx(found[1][0], abs=0.01)
    assert F.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.999


# ------------------------------------------------------------------ what is saved


@pytest.mark.parametrize(("model_type", "tied"), [("gpt2", True), ("gpt2", False), ("llama", False), ("qwen3", True)])
def test_the_saved_model_is_stock_and_keeps_every_weight(tmp_path, model_type, tied):
    """It has no padding and the same logits, and a model that is resumed from it the same weights, bit for bit."""
    config, model_config, model = tiny(model_type, f"tie_word_embeddings={str(tied).lower()}")
    save(model, model_config, tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    embeddings, output = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert loaded.config.vocab_size == len(embeddings) == len(output) == 500 and (embeddings is output) is tied
    assert loaded.generation_config.eos_token_id == EOS
    assert count_exported_parameters(model, 500) == sum(p.numel() for p in loaded.parameters())
    ids = torch.randint(0, 500, (2, BLOCK_SIZE))
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits[..., :500]
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
    torch.manual_seed(99)
    other = build_model(config, model_config)
    load_weights(other, tmp_path, 500)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor[:500], model.state_dict()[name][:500]), name


def test_a_loaded_model_is_in_training_mode(tmp_path):
    """In eval mode, the trial step that finds the micro-batch would use less memory than training."""
    config, model_config, model = tiny()
    save(model, model_config, tmp_path)
    assert all(module.training for module in build_model(config, model_config, source=tmp_path).modules())


@OTHER_TYPES
def test_a_run_of_another_type_leaves_a_stock_model_with_the_loss_that_it_reports(train, dataset_dir, model_type):
    """The loss falls, and Transformers' masked model has the last evaluation's loss over all validation rows."""
    run = train("--max_steps", "30", "--max_eval_samples", "all", shape=options_of(model_type))
    first, last = read_events(run, "eval")[0], read_events(run, "eval")[-1]
    assert last["loss"] < first["loss"] - 0.5
    model = AutoModelForCausalLM.from_pretrained(run, attn_implementation="eager").eval()
    tokens = torch.tensor(load_from_disk(dataset_dir)["validation"]["input_ids"][:])
    rows = tokens.unfold(0, BLOCK_SIZE + 1, BLOCK_SIZE)
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    assert F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item() == pytest.approx(last["loss"], rel=1e-5)
    card = (run / "README.md").read_text()
    assert f"stock `{type(model).__name__}`" in card and f"- {model_type}\n" in card and "GPT-2 language" not in card


@OTHER_TYPES
def test_a_run_of_another_type_resumes_exactly(train, tmp_path, model_type):
    """With Muon and dropout, a stopped and resumed run ends with an uninterrupted run's weights, bit for bit."""
    options, shape = ["--save_steps", "2", "--optim", "muon"], options_of(model_type, "attention_dropout=0.1")
    whole = train(*options, shape=shape)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(list_checkpoints(resumed)[-1])
    (resumed / "model.safetensors").unlink()
    train(*options, "--resume_from_checkpoint", "latest", output_dir=resumed, shape=shape)
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()


def test_a_run_continues_a_saved_model_of_another_type(train, tmp_path, jsonl_file):
    """Its type is read; the weights are the starting point, the block size that of the positions."""
    first = train("--max_steps", "2", shape=options_of("llama"), output_dir=tmp_path / "first")
    start = ["--model_name_or_path", first, "--max_steps", "1", "--learning_rate", "1e-9"]
    second = train(*start, shape=[], output_dir=tmp_path / "second")
    before, after = (load_file(run / "model.safetensors") for run in (first, second))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)
    with pytest.raises(UserError, match=f"the model in {first} has type llama; omit --model_type gpt2"):
        train(*start, shape=["--model_type", "gpt2"], output_dir=tmp_path / "third")
    assert not run_script("scripts/evaluate_model.py", "--model", first, "--text_file", jsonl_file)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("model_type", "overrides", "expected"),
    [
        ("gpt2", "n_layers=4", "config_overrides cannot set 'n_layers'; did you mean n_layer?"),
        ("gpt2", "vocab_size=9", "cannot set 'vocab_size'; it follows the tokenizer"),
        ("gpt2", "n_positions=9", "cannot set 'n_positions'; set block_size"),
        ("gpt2", "dtype=bfloat16", "cannot set 'dtype'; it can set "),
        ("gpt2", "n_embd=100,n_head=12", "embed_dim.* must be divisible by num_heads .*100.*12"),
        ("gpt2", "n_head=0", "cannot be built"),
        ("gpt2", "n_layer=two", "'n_layer' expected int, got str"),
        ("gpt2", "resid_pdrop=2", "dropout probability has to be between 0 and 1, but got 2"),
        ("gpt2", "activation_function=swishy", "cannot be built.*swishy"),
        ("lama", DENSE, "no causal language model of type 'lama'; did you mean llama?"),
        ("llama", WIDE, "llama requires intermediate_size, num_key_value_heads in config_overrides"),
        ("llama", f"{DENSE},max_position_embeddings=9", "cannot set 'max_position_embeddings'; set block_size"),
        ("llama", f"{DENSE},hidden_size=66", r"hidden size \(66\) is not a multiple of the number of attention heads"),
        ("llama", f"{WIDE},intermediate_size=176,num_key_value_heads=3", "cannot be built"),
        # These would train, and be wrong without a word.
        ("gemma2", DENSE, "gemma2 is not supported: its logits are not the output matrix times the last hidden state"),
        ("granite", f"{DENSE},logits_scaling=8.0", "its logits are not"),
        ("bert", f"{WIDE},intermediate_size=176", "its tokens see later ones; use a dense decoder, such as llama"),
        ("bert-generation", f"{WIDE},intermediate_size=176", "its tokens see later ones"),
        ("trocr", f"{WIDE},d_model=64,decoder_layers=2", "pass --attn_implementation eager|get no gradient"),
        ("xglm", f"{WIDE},ffn_dim=176", "its sdpa attention fails; pass --attn_implementation eager"),
        ("mixtral", DENSE, "experts"),
        ("mamba", "num_hidden_layers=2,hidden_size=64", "max_position_embeddings"),
    ],
)
def test_what_cannot_work_is_one_sentence(model_type, overrides, expected):
    """Before text is prepared."""
    config = load_config(["--dataset_dir", "d", "--model_type", model_type, "--config_overrides", overrides])[0]
    with pytest.raises(UserError, match=expected) as error:
        build_model_config(config, 1, 0)
    assert "\n" not in str(error.value)


# All types whose config has positions and no experts, as published: 110 in 9 s on two cores of an EPYC (Zen 4).
ACCEPTED = """
    apertus apertus1p5_text arcee aria_text bamba biogpt bitnet codegen ctrl cwm diffllama dory ernie4_5 exaone exaone4
    falcon gemma gemma3_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neox gptj granite helium hrm_text hyperclovax
    internlm3 iquestcoder jais2 lfm2 lfm3 llama ministral3 mistral moshi olmo olmo2 olmo3 olmo_hybrid opt persimmon phi
    phi3 qwen2 qwen3 qwen3_5_text seed_oss smollm3 stablelm starcoder2 youtu
"""
REFUSED = {
    "see later ones": "bert bert-generation big_bird electra ernie megatron-bert rembert roc_bert roformer",
    "logits are not": "cohere cohere2 gemma2 marian minicpm3 nanochat vaultgemma",
    "get no gradient": "bart bigbird_pegasus blenderbot-small mbart mvp pegasus plbart trocr",
    "--attn_implementation eager": "gpt_neo gpt_neox_japanese granite_swa openai-gpt xglm",
    # Types that need a padding token, whose defaults Transformers cannot build, or that do not shrink.
    "copy of it fails": """
        blenderbot blt camembert cohere_compass_text data2vec-text dbrx falcon_h1 gemma3n_text gemma4_text
        gemma4_unified_text git hunyuan_v1_dense ministral modernbert-decoder nemotron phi4_multimodal prophetnet
        reformer roberta roberta-prelayernorm rwkv xlm xlm-roberta xlm-roberta-xl xmod zamba zamba2
    """,
}
VERDICTS = [(name, "") for name in ACCEPTED.split()]
VERDICTS += [(name, reason) for reason, names in REFUSED.items() for name in names.split()]


@pytest.mark.parametrize(("model_type", "reason"), VERDICTS)
def test_a_copy_shows_which_types_are_trained_right(model_type, reason):
    """The random state stays as it was."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("the installed Transformers does not have it")
    before, refusal = torch.get_rng_state(), ""
    try:
        check_model(CONFIG_MAPPING[model_type](), "sdpa")
    except UserError as error:
        refusal = str(error)
    assert reason in refusal and bool(reason) == bool(refusal)
    assert torch.equal(torch.get_rng_state(), before)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("gpt2", {"n_embd": 60, "n_head": 3, "n_layer": 1}),
        ("gptj", {"n_embd": 256, "n_head": 8, "rotary_dim": 32}),
        ("gpt_neox", {"hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 10240}),
        ("llama", {"hidden_size": 35, "num_attention_heads": 1, "head_dim": 6, "num_key_value_heads": 1}),
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
        ("phi", {"hidden_size": 100, "num_attention_heads": 5, "intermediate_size": 401}),
        ("phi3", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 4096}}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("stablelm", {"hidden_size": 96, "num_attention_heads": 1, "num_key_value_heads": 1}),
    ],
)
def test_a_shape_that_works_shrinks(model_type, values):
    """Rotary embeddings of a part of a head, of a head alone, and with a factor per dimension; layers of two kinds."""
    check_model(CONFIG_MAPPING[model_type](**values), "sdpa")


def test_another_type_replaces_the_recipes_shape():
    """GPT-2's names in a recipe do not reach another type, and stay with its own type."""
    data = ["--config", "gpt2_355m", "--dataset_dir", "d"]
    assert load_config([*data, "--model_type", "gpt2"])[0].config_overrides["n_layer"] == 24
    overrides = ["--config_overrides", WIDE]
    assert "n_layer" not in load_config([*data, "--model_type", "llama", *overrides])[0].config_overrides


def test_a_repository_or_revision_that_the_hub_lacks_is_one_sentence(hub):
    create_repo("someone/model")
    for name, revision, expected in (("someone/gone", None, "not a valid model"), ("someone/model", "v7", "v7")):
        with pytest.raises(UserError, match=f"'{name}'.*{expected}") as error:
            load_pretrained(AutoConfig, name, revision=revision)
        assert "\n" not in str(error.value)
