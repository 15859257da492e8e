"""The model that trains is the stock model: its size, loss, gradients, and what is saved."""

import json

import numpy as np
import pytest
import torch
from helpers import BLOCK_SIZE, ONE_STEP, run_script, stock_loss, values_of
from safetensors.torch import load_file
from tiny_runs import SHAPES, options_of
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.model.build import build_model, build_model_config
from recipe.model.check import check_model
from recipe.model.loss import IGNORE_INDEX, LanguageModelingLoss
from recipe.model.size import (
    count_exported_parameters,
    count_flops_per_token,
    count_parameters,
    describe_output_share,
    find_odd_size,
)
from recipe.model.weights import copy_weights, load_weights, names_of_transformers_4, write_config, write_model

EOS = 7


def tiny(model_type="gpt2", *changes, attention="sdpa", options=()):
    """Return the config, the model's config with 500 tokens, and the padded model."""
    options = [*options_of(model_type, *changes), "--attn_implementation", attention, *options]
    config = load_config(["--dataset_dir", "d", *options])[0]
    model_config = build_model_config(config, 500, EOS)
    torch.manual_seed(0)
    return config, model_config, build_model(config, model_config)


def save(model, model_config, folder):
    write_model(model, model_config, {}, copy_weights(model, model_config), folder, {})


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("recipe", "padded", "exported"),
    [
        ("gpt2_124m", 124_475_904, 124_439_808),
        ("gpt2_355m", 354_871_296, 354_823_168),
        ("gpt2_774m", 774_090_240, 774_030_080),
        ("gpt2_1558m", 1_557_686_400, 1_557_611_200),
        ("nanochat_124m", 123_568_128, 123_532_032),
    ],
)
def test_the_recipes_have_the_sizes_that_they_name(recipe, padded, exported):
    """GPT-2's are OpenAI's. The parameters are counted with 50,304 tokens (training) and with 50,257 (saved)."""
    config = load_config(["--config", recipe, "--dataset_dir", "d"])[0]
    with torch.device("meta"):
        model = build_model(config, build_model_config(config, 50257, 50256))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(model.config) == padded
    assert count_exported_parameters(model, 50257) == exported
    assert (model.config.max_position_embeddings, model.config.eos_token_id) == (1024, 50256)
    assert not any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())


def test_an_odd_width_of_heads_is_named_with_the_next_good_one():
    """Three heads of 33 values should have 40, in a model of width 120."""
    found = find_odd_size(tiny("gpt2", "n_head=3", "n_embd=99")[1])
    assert "40" in found and "120" in found and find_odd_size(tiny()[1]) is None


def test_an_output_layer_with_most_of_the_products_is_named():
    """19.3 of 19.3 + 10.6 M multiplications, and those of the scores: 12 layers x width x tokens / 6."""
    config = AutoConfig.for_model("gpt2", n_layer=6, n_head=6, n_embd=384, vocab_size=50304, n_positions=256)
    share = 50304 * 384 / (50304 * 384 + 12 * 6 * 384**2 + 12 * 6 * 384 * 256 / 6)
    for vocab_size, expected in ((50304, f"{share:.0%}"), (8192, None)):
        config.vocab_size = vocab_size
        found = describe_output_share(config, count_flops_per_token(config, count_parameters(config), 256))
        assert found.startswith(expected) if expected else found is None


# ------------------------------------------------------------------ the model that trains


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])
def test_initial_weights_do_not_depend_on_the_padding(model_type):
    padded = tiny(model_type)[2]
    plain = tiny(model_type, options=["--pad_vocab_to_multiple_of", "1"])[2]
    assert (padded.config.vocab_size, plain.config.vocab_size) == (512, 500)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(padded.state_dict()[name][: len(tensor)], tensor), name


@pytest.mark.parametrize(
    ("model_type", "switches"),
    [("gpt2", []), ("gpt2", ["--activation_checkpointing"]), ("llama", []), ("nanochat", [])],
)
def test_compiled_attention_is_causal_without_a_mask(model_type, switches):
    """The single graph calls sdpa once per layer with is_causal=True and no mask, as the flash kernels require."""
    module = LanguageModelingLoss(tiny(model_type, options=switches)[2], 500).train()
    graphs = []

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


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])
def test_a_bf16_residual_stream_only_adds_rounding(model_type):
    """Under autocast, each block returns bf16, and loss and gradients stay close to those of an fp32 stream."""
    losses = []
    gradients = []
    rows = torch.randint(0, 500, (3, BLOCK_SIZE + 1))
    for options, dtype in (([], torch.float32), (["--bf16_residual"], torch.bfloat16)):
        model = tiny(model_type, options=options)[2]
        seen = set()
        for block in model.transformer.h if model_type == "gpt2" else model.base_model.layers:
            block.register_forward_hook(lambda m, i, output, seen=seen: seen.add(output[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss = LanguageModelingLoss(model, 500)(rows[:, :-1], rows[:, 1:])["loss"]
        loss.backward()
        assert seen == {dtype}
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    assert F.cosine_similarity(*gradients, dim=0) > 0.999


# ------------------------------------------------------------------ its loss


def tiny_and_stock(folder, model_type="gpt2", attention="sdpa"):
    """Return a model, and the stock one of its saved weights, without padding, with eager attention and its mask."""
    _, model_config, model = tiny(model_type, attention=attention)
    model.get_input_embeddings().weight.data.mul_(20)  # logits far from uniform
    save(model, model_config, folder)
    return model, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def make_rows():
    """Return input ids and targets, some of which do not count."""
    rows = torch.randint(0, 500, (3, BLOCK_SIZE + 1), generator=torch.Generator().manual_seed(1))
    rows[0, 5] = EOS
    targets = rows[:, 1:].clone()
    targets[1, 5:] = IGNORE_INDEX
    return rows[:, :-1], targets


@pytest.mark.parametrize(
    ("model_type", "attention", "label_smoothing", "num_chunks", "num_pieces", "backend"),
    [
        *(("gpt2", "sdpa", smoothing, num_chunks, 1, None) for smoothing in (0.0, 0.1) for num_chunks in (1, 7)),
        ("gpt2", "sdpa", 0.1, 1, 1, "aot_eager"),  # as for a GPU, without generating code
        ("gpt2", "sdpa", 0.1, 1, 2, "aot_eager"),
        ("gpt2", "sdpa", 0.0, 3, 1, "aot_eager"),
        *((model_type, "sdpa", 0.0, 1, 1, "eager") for model_type in SHAPES),
        ("llama", "eager", 0.0, 1, 1, "eager"),
    ],
)
def test_loss_and_gradients_are_torchs_cross_entropy_of_the_stock_model(
    tmp_path, monkeypatch, model_type, attention, label_smoothing, num_chunks, num_pieces, backend
):
    """The vocabulary is padded. Targets of -100 count in neither the sum nor the mean.

    Evaluation returns the nats of each target, in fp32 without smoothing, and 0 where a target does not count.
    """
    model, stock = tiny_and_stock(tmp_path, model_type, attention)
    module = LanguageModelingLoss(model, 500, label_smoothing, num_chunks).train()
    input_ids, targets = make_rows()
    monkeypatch.setattr("recipe.model.loss.MOST_LOGITS", targets.numel() * module.num_logits // num_pieces)
    if backend:
        module.compile(backend=backend, fullgraph=True, dynamic=False)
    logits = stock(input_ids=input_ids).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)
    outputs = module(input_ids, targets)
    assert outputs.keys() == {"loss"}  # not the logits, which would take much memory
    torch.testing.assert_close(outputs["loss"], expected, rtol=1e-6, atol=1e-6)
    outputs["loss"].backward()
    expected.backward()
    gradients = dict(model.named_parameters())
    for name, p in stock.named_parameters():
        torch.testing.assert_close(gradients[name].grad[: len(p)], p.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert model.get_input_embeddings().weight.grad[EOS].any()  # its embedding is trained, not treated as padding
    nothing = torch.full_like(targets, IGNORE_INDEX)
    assert module(input_ids, nothing)["loss"].item() == 0  # not NaN
    found = module.eval()(input_ids, targets)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none")
    assert found["losses"].dtype == torch.float32
    torch.testing.assert_close(found["losses"].flatten(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["loss"], expected.sum() / (targets >= 0).sum(), rtol=1e-6, atol=1e-6)
    torch.compiler.reset()


@pytest.mark.parametrize(("label_smoothing", "autocast"), [(0.0, False), (0.1, False), (0.1, True)])
def test_the_padding_has_no_part_in_the_loss(label_smoothing, autocast):
    """Real logits are near -35, as in OpenAI's GPT-2: padding of any size gets no probability and no gradient."""
    model = tiny()[2]
    input_ids, targets = make_rows()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(0.1)
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[:500] -= 35 / 32
        model.lm_head.weight[500:] = 1000.0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = LanguageModelingLoss(model, 500, label_smoothing)(input_ids, targets)["loss"]
        logits = model(input_ids=input_ids).logits[..., :500].float().flatten(0, 1)
    assert logits.median().item() == pytest.approx(-35, abs=3)
    loss.backward()
    expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)  # in fp32
    assert not model.lm_head.weight.grad[500:].any()


# ------------------------------------------------------------------ what is saved


@pytest.mark.parametrize(
    ("model_type", "tied"), [("gpt2", True), ("gpt2", False), ("llama", False), ("nanochat", True)]
)
def test_the_saved_model_is_stock_and_keeps_every_weight(tmp_path, model_type, tied):
    """A saved model has no padding and the same logits. A model resumed from it has the same weights, bit for bit."""
    config, model_config, model = tiny(model_type, f"tie_word_embeddings={str(tied).lower()}")
    save(model, model_config, tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    embeddings = loaded.get_input_embeddings().weight
    output = loaded.get_output_embeddings().weight
    assert loaded.config.vocab_size == len(embeddings) == len(output) == 500
    assert (embeddings is output) is tied
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
    # In eval mode, the trial step that finds the micro-batch would use less memory than training.
    assert all(module.training for module in build_model(config, model_config, source=tmp_path).modules())


@pytest.mark.parametrize("model_type", ["llama", "nanochat"])
def test_a_run_of_another_type_leaves_a_stock_model_with_the_loss_that_it_reports(
    train, tmp_path, dataset_dir, jsonl_file, model_type
):
    """The loss falls, and Transformers' masked model has the last evaluation's loss over all validation rows.

    Another run starts from its weights, and takes its type and its number of positions as block size.
    """
    run = train("--max_steps", "30", "--max_eval_samples", "all", shape=options_of(model_type))
    losses = values_of(run, "loss", "eval")
    assert losses[-1] < losses[0] - 0.5
    tokens = torch.from_numpy(np.fromfile(dataset_dir / "validation-00000.bin", np.uint16).astype(np.int64))
    rows = tokens.unfold(0, BLOCK_SIZE + 1, BLOCK_SIZE)
    assert stock_loss(run, rows.numpy()) == pytest.approx(losses[-1], rel=1e-5)
    assert json.loads((run / "config.json").read_text())["architectures"][0] in (run / "README.md").read_text()
    start = ["--model_name_or_path", run, *ONE_STEP, "--learning_rate", "1e-9"]
    second = train(*start, shape=[], output_dir=tmp_path / "second")
    before, after = (load_file(folder / "model.safetensors") for folder in (run, second))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)
    assert not run_script("scripts/evaluate_model.py", "--model", run, "--text_file", jsonl_file)


# ------------------------------------------------------------------ types that are trained right

# Types whose config has positions and no experts, as published.
RIGHT = """
    apertus apertus1p5_text arcee aria_text bamba biogpt bitnet codegen ctrl cwm diffllama dory ernie4_5 exaone exaone4
    falcon gemma gemma3_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neox gptj granite helium hrm_text hyperclovax
    internlm3 iquestcoder jais2 lfm2 lfm3 llama ministral3 mistral moshi olmo olmo2 olmo3 olmo_hybrid opt persimmon phi
    phi3 qwen2 qwen3 qwen3_5_text seed_oss smollm3 stablelm starcoder2 youtu
"""
WRONG = {  # by a word of the reason
    "later": "bert bert-generation big_bird electra ernie megatron-bert rembert roc_bert roformer",
    "logits": "cohere cohere2 gemma2 marian minicpm3 nanochat vaultgemma",
    "gradient": "bart bigbird_pegasus blenderbot-small mbart mvp pegasus plbart trocr",
    "--attn_implementation eager": "gpt_neo gpt_neox_japanese granite_swa openai-gpt xglm",
    "copy": "blt falcon_h1 roberta rwkv",  # cannot be built of defaults, need a padding token, or do not shrink
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Rotary embeddings of a part of a head, of a head alone, and with a factor per dimension; layers of two kinds.
RIGHT_SHAPES = [
    ("gpt2", {"n_embd": 60, "n_head": 3, "n_layer": 1}),
    ("gptj", {"n_embd": 256, "n_head": 8, "rotary_dim": 32}),
    ("gpt_neox", {"hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 10240}),
    ("llama", {"hidden_size": 35, "num_attention_heads": 1, "head_dim": 6, "num_key_value_heads": 1}),
    ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    ("phi", {"hidden_size": 100, "num_attention_heads": 5, "intermediate_size": 401}),
    ("phi3", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 4096}}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("stablelm", {"hidden_size": 96, "num_attention_heads": 1, "num_key_value_heads": 1}),
]
VERDICTS = [(name, {}, "") for name in RIGHT.split()] + [(name, shape, "") for name, shape in RIGHT_SHAPES]
VERDICTS += [(name, {}, reason) for reason, names in WRONG.items() for name in names.split()]


@pytest.mark.parametrize(("model_type", "shape", "reason"), VERDICTS)
def test_a_small_copy_shows_whether_a_model_would_be_trained_right(model_type, shape, reason):
    """The random state stays as it was."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("the installed Transformers does not have it")
    before = torch.get_rng_state()
    refusal = ""
    try:
        check_model(CONFIG_MAPPING[model_type](**shape), "sdpa")
    except UserError as error:
        refusal = str(error)
    assert reason in refusal
    assert bool(reason) == bool(refusal)
    assert torch.equal(torch.get_rng_state(), before)


THETA = {"rope_theta": 1e5}
LINEAR = {"rope_type": "linear", "factor": 2.0}
NEOX = {"rotary_emb_base": 1e5, "rotary_pct": 0.5, "rope_scaling": None}


@pytest.mark.parametrize(
    ("model_type", "rope", "expected"),
    [
        ("gpt2", None, {"n_ctx": 1024}),
        ("llama", THETA, THETA | {"rope_scaling": None}),
        ("llama", THETA | LINEAR, THETA | {"rope_scaling": LINEAR}),
        ("gpt_neox", THETA | {"partial_rotary_factor": 0.5}, NEOX),
        ("opt", None, {}),  # it has none
        ("olmo3", {"full_attention": THETA | {"rope_type": "default"}}, None),  # one for each type of layer
    ],
)
def test_a_config_has_the_names_of_transformers_4(tmp_path, model_type, rope, expected):
    """And this version reads what it read without them."""
    config = AutoConfig.for_model(model_type, **({"rope_parameters": rope} if rope else {}))
    assert names_of_transformers_4(config) == expected
    write_config(config, tmp_path)
    assert (expected or {}).items() <= json.loads((tmp_path / "config.json").read_text()).items()
    found = AutoConfig.from_pretrained(tmp_path)
    assert getattr(found, "rope_parameters", None) == getattr(config, "rope_parameters", None)
