"""GGUF files as Hugging Face checkpoints: names, order of rows, formats, the config, and damaged files."""

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Format
from gguf import GGUFReader, GGUFWriter, quants

from jaxserve.weights import demo
from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.readers.blocks import dequantize
from jaxserve.weights.readers.gguf import GgufCheckpoint, read_metadata
from tests.weights import gguf_files as files

BLOCKS = [Format.Q8_0, Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1]
K_BLOCKS = [Format.Q2_K, Format.Q3_K, Format.Q4_K, Format.Q5_K, Format.Q6_K]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_come_back_under_their_hugging_face_names(tmp_path, arch):
    weights = files.tensors(biases=arch != "qwen3", qk_norms=arch == "qwen3", head=True)
    checkpoint = GgufCheckpoint(files.write(tmp_path / "m.gguf", arch, weights))
    assert set(checkpoint.names()) == set(weights)
    for name, want in weights.items():
        assert checkpoint.shape(name) == want.shape
        np.testing.assert_array_equal(checkpoint.read(name), want, err_msg=name)
    assert checkpoint.where("lm_head.weight").endswith("m.gguf")


def test_only_llama_permutes():
    weights = files.tensors(biases=True)
    moved = [n for n, w in weights.items() if not np.array_equal(files.pairwise(w, n), w)]
    assert len(moved) == 4 * files.LAYERS


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_blocks_become_the_float32_they_stand_for(tmp_path, fmt):
    weights = files.tensors()
    checkpoint = GgufCheckpoint(files.write(tmp_path / "m.gguf", "llama", weights, fmt=fmt))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        assert checkpoint.dtype(name) == fmt.name
        want = quants.dequantize(quants.quantize(weights[name], fmt), fmt)
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)
    assert checkpoint.config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(Format.F32, np.float32), (Format.F16, np.float16), (Format.BF16, ml_dtypes.bfloat16)]
)
def test_plain_formats_keep_their_dtype(tmp_path, fmt, dtype):
    weights = files.tensors()
    checkpoint = GgufCheckpoint(files.write(tmp_path / "m.gguf", "llama", weights, fmt=fmt))
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"):
        got = checkpoint.read(name)
        assert got.dtype == dtype
        assert checkpoint.dtype(name) == np.dtype(dtype).name == checkpoint.config["torch_dtype"]
        np.testing.assert_array_equal(got, weights[name].astype(dtype))


@pytest.mark.parametrize("fmt", [*BLOCKS, *K_BLOCKS], ids=lambda f: f.name)
def test_every_served_format_equals_the_package(fmt):
    size = quants.GGML_QUANT_SIZES[fmt][1]
    raw = np.random.default_rng(0).integers(0, 256, (6, 3 * size), np.uint8)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantize(raw, fmt), quants.dequantize(raw, fmt))


def test_k_blocks_are_read_from_files(tmp_path):
    rows, size = 4, quants.GGML_QUANT_SIZES[Format.Q6_K][1]
    raw = np.random.default_rng(0).integers(0, 64, (rows, size), np.uint8)
    raw[:, -2:] = np.array([0.5], np.float16).view(np.uint8)
    file = files.write(tmp_path / "m.gguf", "qwen2", files.tensors(), extra={"extra": (raw, Format.Q6_K)})
    checkpoint = GgufCheckpoint(file)
    assert checkpoint.shape("extra") == (rows, 256)
    np.testing.assert_array_equal(checkpoint.read("extra"), quants.dequantize(raw, Format.Q6_K))


def test_config_is_made_from_metadata(tmp_path):
    metadata = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    config = GgufCheckpoint(files.write(tmp_path / "m.gguf", "llama", files.tensors(), metadata=metadata)).config
    want = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert {k: v for k, v in config.items() if k != "rms_norm_eps"} == want


def test_biases_and_heads_show_in_the_config(tmp_path):
    config = GgufCheckpoint(files.write(tmp_path / "m.gguf", "qwen2", files.tensors(biases=True, head=True))).config
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["attention_bias"] is True
    assert config["tie_word_embeddings"] is False


def test_a_window_means_mistral(tmp_path):
    metadata = {"llama.attention.sliding_window": 32}
    config = GgufCheckpoint(files.write(tmp_path / "m.gguf", "llama", files.tensors(), metadata=metadata)).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 32


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, scaling):
    file = files.write(tmp_path / "m.gguf", "llama", files.tensors(), metadata=metadata)
    assert GgufCheckpoint(file).config["rope_scaling"] == scaling


def test_unknown_rope_scaling_is_refused(tmp_path):
    metadata = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}
    file = files.write(tmp_path / "m.gguf", "llama", files.tensors(), metadata=metadata)
    with pytest.raises(LoadError, match="rope scaling 'longrope'"):
        GgufCheckpoint(file)


def test_rope_factors_move_into_the_config(tmp_path):
    factors = np.linspace(1, 8, 8).astype(np.float32)
    file = files.write(tmp_path / "m.gguf", "llama", files.tensors(), extra={"rope_freqs.weight": (factors, None)})
    checkpoint = GgufCheckpoint(file)
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert "rope_freqs.weight" not in checkpoint.names()


def test_generation_config_has_every_end(tmp_path):
    metadata = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
        "general.sampling.temp": 0.5,
    }
    file = files.write(tmp_path / "m.gguf", "llama", files.tensors(), metadata=metadata)
    assert GgufCheckpoint(file).generation_config == {"temperature": 0.5, "eos_token_id": [2, 5]}


def test_unserved_files_are_refused(tmp_path):
    gemma = files.write(tmp_path / "g.gguf", "gemma3", files.tensors())
    with pytest.raises(LoadError, match=r"'gemma3' is not served from GGUF files; served: llama, qwen2, qwen3"):
        GgufCheckpoint(gemma)
    experts = files.write(tmp_path / "e.gguf", "llama", files.tensors(), metadata={"llama.expert_count": 8})
    with pytest.raises(LoadError, match="mixtures of experts"):
        GgufCheckpoint(experts)
    raw = np.zeros((1, quants.GGML_QUANT_SIZES[Format.TQ1_0][1]), np.uint8)
    ternary = files.write(tmp_path / "t.gguf", "llama", files.tensors(), extra={"x": (raw, Format.TQ1_0)})
    with pytest.raises(LoadError, match="tensor x has format TQ1_0"):
        GgufCheckpoint(ternary)
    vocabulary = files.write(tmp_path / "v.gguf", "llama", {})
    with pytest.raises(LoadError, match=r"no tensor token_embd\.weight"):
        GgufCheckpoint(vocabulary)


def test_parts_of_a_split_file_are_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "m-00001-of-00003.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(LoadError, match="one of 3 parts"):
        GgufCheckpoint(tmp_path / "m-00001-of-00003.gguf")


def test_metadata_that_is_missing_or_wrong_is_named(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.add_string("llama.attention.head_count", "four")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match=r"llama\.attention\.head_count must be an integer, not 'four'"):
        GgufCheckpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [3, 12, 60, 400])
def test_a_file_cut_off_in_its_header(tmp_path, keep):
    file = files.write(tmp_path / "m.gguf", "llama", files.tensors(), metadata={"tokenizer.ggml.tokens": ["a"] * 50})
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"m\.gguf is not a readable GGUF file"):
        GgufCheckpoint(file)


def test_a_file_cut_off_in_its_data_names_the_tensor(tmp_path):
    file = files.write(tmp_path / "m.gguf", "llama", files.tensors())
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(LoadError, match=r"m\.gguf.*cut off: tensor output_norm\.weight ends at byte"):
        GgufCheckpoint(file)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(LoadError, match="does not exist"):
        GgufCheckpoint(tmp_path / "none.gguf")
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(LoadError, match=r"x\.gguf is not a readable GGUF file"):
        GgufCheckpoint(tmp_path / "x.gguf")


def test_metadata_equals_what_the_package_reads(tmp_path):
    metadata = {"a.strings": ["ä", "", "c d"], "a.integers": [1, -2, 3], "a.numbers": [0.5, 1.5], "a.text": "日本"}
    file = files.write(tmp_path / "m.gguf", "gemma3", {}, metadata=metadata)
    got = read_metadata(file)
    want = {key: field.contents() for key, field in GGUFReader(file).fields.items()}
    assert dict(got) == want
    assert {key: got[key] for key in metadata} == metadata


def test_the_demo_is_what_it_should_be():
    checkpoint = GgufCheckpoint(demo.find())
    assert len(checkpoint.names()) == 272
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert checkpoint.read("model.embed_tokens.weight").shape == (49152, 576)
