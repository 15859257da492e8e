"""The stock model: its sizes, padding, attention, and what is saved."""

import pytest
import torch
from huggingface_hub import create_repo
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_exported_parameters, padded_vocab_size
from recipe.model.weights import copy_weights, load_pretrained, load_weights, write_model

EOS = 7


def tiny(*argv, vocab_size=500):
    options = ["--dataset_dir", "d", "--block_size", "32", "--config_overrides", "n_layer=2,n_head=2,n_embd=32"]
    config = load_config([*options, *argv])[0]
    model_config = build_model_config(config, vocab_size, EOS)
    torch.manual_seed(0)
    return config, model_config, build_model(config, model_config)


def test_gpt2_124m_has_the_published_size():
    """It has 124,475,904 parameters with vocabulary 50304, and OpenAI's 124,439,808 as saved with 50257."""
    config = load_config(["--config", "gpt2_124m", "--dataset_dir", "d"])[0]
    with torch.device("meta"):
        model = build_model(config, build_model_config(config, 50257, 50256))
    assert isinstance(model, GPT2LMHeadModel)
    assert sum(p.numel() for p in model.parameters()) == 124_475_904
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == 50304
    assert count_exported_parameters(model, 50257) == 124_439_808
    assert (model.config.n_positions, model.config.eos_token_id, model.config.resid_pdrop) == (1024, 50256, 0.0)


@pytest.mark.parametrize(
    ("size", "parameters"), [("355m", 354_823_168), ("774m", 774_030_080), ("1558m", 1_557_611_200)]
)
def test_other_sizes_match_openais(size, parameters):
    """The larger recipes export models with OpenAI's parameter counts."""
    config = load_config(["--config", f"gpt2_{size}", "--dataset_dir", "d"])[0]
    with torch.device("meta"):
        model = build_model(config, build_model_config(config, 50257, 50256))
    assert count_exported_parameters(model, 50257) == parameters


def test_initial_weights_do_not_depend_on_the_padding():
    """The same seed gives the same weights, padded or not."""
    padded, plain = tiny()[2].state_dict(), tiny("--pad_vocab_to_multiple_of", "1")[2].state_dict()
    for name, tensor in plain.items():
        assert torch.equal(padded[name][: len(tensor)], tensor), name
    assert len(padded["lm_head.weight"]) == 512 and len(plain["lm_head.weight"]) == 500


def test_vocabulary_size_is_rounded_up():
    """The padded size is the smallest multiple that is large enough."""
    assert [padded_vocab_size(n, 128) for n in (1, 128, 129, 50257)] == [128, 128, 256, 50304]


def test_initialization_is_gpt2s():
    """Weights have standard deviation 0.02, and 0.02 / sqrt(2 * layers) where a block adds to the residual stream."""
    model = tiny("--config_overrides", "n_layer=8,n_embd=128")[2]
    block = model.transformer.h[3]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for projection in (block.mlp.c_proj, block.attn.c_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.03)


def captured_graphs(module, inputs, targets):
    graphs = []

    def capture(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch.compiler.reset()
    torch.compile(module, backend=capture, fullgraph=True, dynamic=False)(inputs, targets)
    torch.compiler.reset()
    return graphs


@pytest.mark.parametrize("switches", [[], ["--activation_checkpointing"], ["--loss_chunks", "4"]])
def test_compiled_attention_is_causal_without_a_mask(switches):
    """The single graph calls sdpa once per layer with is_causal=True and no mask, as the flash kernels require."""
    config, model_config, model = tiny(*switches)
    module = LanguageModelingLoss(model, 500, num_chunks=4 if config.loss_chunks == 4 else 1).train()
    rows = torch.randint(0, 500, (2, 33))
    graphs = captured_graphs(module, rows[:, :-1], rows[:, 1:])
    assert len(graphs) == 1
    nodes = [node for m in graphs[0].modules() if hasattr(m, "graph") for node in m.graph.nodes]
    attention = [node for node in nodes if node.target is F.scaled_dot_product_attention]
    assert len(attention) == 2
    for node in attention:
        assert node.kwargs["is_causal"] is True and node.kwargs.get("attn_mask") is None


def test_eager_attention_is_causal_without_a_mask(monkeypatch):
    """Without compilation, where stock Transformers asks the device about the mask, sdpa gets no mask either."""
    calls = []

    def record(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    tiny()[2](input_ids=torch.randint(0, 500, (2, 32)), use_cache=False)
    assert [(c["is_causal"], c.get("attn_mask")) for c in calls] == [(True, None)] * 2


def test_logits_equal_the_stock_models():
    """A stock model with eager attention and the same weights returns the same logits."""
    model = tiny()[2].eval()
    stock = GPT2LMHeadModel._from_config(GPT2Config.from_dict(model.config.to_dict()), attn_implementation="eager")
    stock.load_state_dict(model.state_dict())
    ids = torch.randint(0, 500, (3, 32))
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=ids).logits, stock.eval()(input_ids=ids).logits, rtol=1e-5, atol=1e-5
        )


def test_a_bf16_residual_stream_only_adds_rounding():
    """The stream is bf16 in every block, and loss and gradients stay close to the stock model's."""
    stock, model = tiny()[2], tiny("--bf16_residual")[2]
    seen = set()
    for block in model.transformer.h:
        block.register_forward_hook(
            lambda m, i, output: seen.add((output[0] if type(output) is tuple else output).dtype)
        )
    ids, found = torch.randint(0, 500, (3, 32)), []
    for m in (stock, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(m(input_ids=ids, use_cache=False).logits.float().flatten(0, 1), ids.flatten())
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in m.parameters()])))
    assert seen == {torch.bfloat16}
    assert found[0][0] == pytest.approx(found[1][0], abs=0.01)
    assert F.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.999


@pytest.mark.parametrize("tied", [True, False])
def test_the_saved_model_has_no_padding(tmp_path, tied):
    """The saved model is stock, has the real vocabulary with the same logits, and keeps weights tied or untied."""
    config, model_config, model = tiny("--config_overrides", f"tie_word_embeddings={tied}")
    assert model.config.vocab_size == 512
    assert (model.lm_head.weight is model.transformer.wte.weight) is tied
    write_model(model, model_config, copy_weights(model, model_config), tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is GPT2LMHeadModel and not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    assert loaded.config.vocab_size == loaded.lm_head.weight.shape[0] == loaded.transformer.wte.weight.shape[0] == 500
    assert (loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()) is tied
    assert (loaded.config._attn_implementation, loaded.generation_config.eos_token_id) == ("sdpa", EOS)
    assert count_exported_parameters(model, 500) == sum(p.numel() for p in loaded.parameters())
    ids = torch.randint(0, 500, (2, 32))
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits[..., :500]
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)


def test_a_loaded_model_is_in_training_mode(tmp_path):
    """In eval mode, the trial step that finds the micro-batch would use less memory than training."""
    config, model_config, model = tiny()
    write_model(model, model_config, copy_weights(model, model_config), tmp_path)
    loaded = build_model(config, model_config, source=tmp_path)
    assert all(module.training for module in loaded.modules())


def trained(model, steps=3):
    """Train with clipping, weight decay and label smoothing; returns the gradient norms."""
    module = LanguageModelingLoss(model, 500, label_smoothing=0.1).train()
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), []
    noise = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(0, 500, (4, 33), generator=noise)
        module(rows[:, :-1], rows[:, 1:])["loss"].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("tied", [True, False])
def test_the_padding_has_no_part_in_training(tied):
    """Whatever its rows contain, gradient norms and weights stay the same bit for bit."""
    found = []
    for value in (0.0, 0.5, -30.0):
        _, model_config, model = tiny("--config_overrides", f"tie_word_embeddings={tied}")
        with torch.no_grad():
            for embeddings in (model.transformer.wte, model.lm_head):
                embeddings.weight[500:] = value
        found.append((trained(model), copy_weights(model, model_config)))
    for norms, weights in found[1:]:
        assert norms == found[0][0]
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in weights.items())


@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_keep_every_weight(tmp_path, tied):
    """Bit for bit, after training steps with weight decay, although saving drops the padding."""
    config, model_config, model = tiny("--config_overrides", f"tie_word_embeddings={tied}")
    trained(model)
    saved = copy_weights(model, model_config)
    write_model(model, model_config, saved, tmp_path)
    torch.manual_seed(99)
    other = build_model(config, model_config)
    load_weights(other, tmp_path, 500)
    restored = copy_weights(other, model_config)
    assert saved.keys() == restored.keys() and all(torch.equal(saved[name], restored[name]) for name in saved)


def test_weights_of_another_model_are_refused(tmp_path):
    """A missing or an unknown tensor is an error."""
    config, model_config, model = tiny()
    write_model(model, model_config, copy_weights(model, model_config), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for changed in (
        {k: v for k, v in weights.items() if k != "transformer.wpe.weight"},
        {**weights, "x": weights["transformer.wpe.weight"].clone()},
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="missing or unknown tensors: (transformer.wpe.weight|x)$"):
            load_weights(model, tmp_path, 500)


@pytest.mark.parametrize(
    ("name", "revision", "expected"),
    [
        ("someone/gone", None, "'someone/gone'.*not a valid model identifier"),
        ("someone/model", "step-7", "'someone/model'.*step-7"),
    ],
)
def test_what_the_hub_lacks_is_one_sentence(hub, name, revision, expected):
    """A repository that is missing or private, and a missing revision."""
    create_repo("someone/model")
    with pytest.raises(UserError, match=expected) as error:
        load_pretrained(AutoConfig, name, revision=revision)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("n_layers=4", "config_overrides cannot set 'n_layers'; did you mean n_layer?"),
        ("vocab_size=9", "cannot set 'vocab_size'; it follows the tokenizer"),
        ("n_positions=9", "cannot set 'n_positions'; set block_size"),
        ("dtype=bfloat16", "cannot set 'dtype'; it can set "),
        ("n_embd=100,n_head=12", "embed_dim.* must be divisible by num_heads .*100.*12"),
        ("n_layer=0", "cannot be built"),
        ("n_head=0", "cannot be built"),
        ("n_embd=-8", "cannot be built.* negative dimension -8"),
        ("n_layer=two", "'n_layer' expected int, got str"),
        ("n_layer=1.5", "'n_layer' expected int, got float"),
        ("resid_pdrop=2", "dropout probability has to be between 0 and 1, but got 2"),
        ("resid_pdrop=half", "'resid_pdrop' with value 'half' "),
        ("tie_word_embeddings=1", "'tie_word_embeddings' expected bool, got int"),
        ("activation_function=swishy", "cannot be built.*swishy"),
    ],
)
def test_bad_overrides(overrides, expected):
    """Unknown names, wrong types and shapes that cannot be built are one sentence, before text is prepared."""
    config = load_config(["--dataset_dir", "d", "--config_overrides", overrides])[0]
    with pytest.raises(UserError, match=expected) as error:
        build_model_config(config, 1, 0)
    assert "\n" not in str(error.value)
