"""Request fields that have no effect here: those refused by name, and those that nobody needs to hear about.

A field that would change the answer is refused unless its value asks for what is done anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

from server.body import Harmless

_EITHER: dict[str, Harmless] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": (),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (0,),
    "prompt_embeds": ([],),
    "repetition_detection": (),
    "watermarking": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "return_weight_versions": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,),
}

REFUSED_IN_COMPLETIONS: Mapping[str, Harmless] = {
    **_EITHER,
    "suffix": ("",),
    "thinking_token_budget": (),
}

REFUSED_IN_CHAT: Mapping[str, Harmless] = {
    **_EITHER,
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

REFUSED_IN_TOKENIZE: Mapping[str, Harmless] = {
    "mm_processor_kwargs": ({},),
}

INSTEAD: Mapping[str, str] = {
    f"guided_{name}": f'structured_outputs: {{"{name}": ...}}'
    for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
}
"""Where vLLM's older fields have gone."""

IGNORED = frozenset(
    """user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention session_id
    stream_interval""".split()
)
"""Bookkeeping: they do not change the answer."""
