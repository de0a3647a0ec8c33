"""The config.json of well-known models, as published, so that they can be planned for without a download.

Only what decides shapes and numbers; a downloaded model is read from its own file.
"""

from __future__ import annotations

from collections.abc import Mapping

_LLAMA_31: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
_QWEN_25: Mapping[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "num_hidden_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}

CONFIGS: Mapping[str, Mapping[str, object]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA_31,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        **_LLAMA_31,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **_QWEN_25,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_QWEN_25,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
}
"""By Hugging Face id."""
