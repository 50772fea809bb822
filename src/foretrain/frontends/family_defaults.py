"""What is usual in each family of transformers where a model says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GPT: Mapping[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tied": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
_LLAMA: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "tied": False,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_positions": None,
}

_NO_BIAS: Mapping[str, Any] = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
#: Layers of gpt without dropout and without a table of positions.
_PLAIN: Mapping[str, Any] = {
    **_GPT,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_positions": None,
}
_BERT: Mapping[str, Any] = {
    **_GPT,
    "causal": False,
    "norm_order": "post",
    "embedding_norm": True,
    "final_norm": False,
    "max_positions": 512,
}
_GEMMA: Mapping[str, Any] = {
    **_LLAMA,
    "vocab": 256000,
    "activation": "geglu",
    "tied": True,
    "scaled_embedding": True,
}
_T5: Mapping[str, Any] = {
    **_NO_BIAS,
    "vocab": 32128,
    "norm": "rmsnorm",
    "norm_bias": False,
    "positions": "relative",
    "max_positions": None,
    "tied": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "inner_dropout": 0.1,
}

#: What each family usually is. Vocabulary of gpt: 50257 padded by Megatron for 8-way tensor
#: parallelism; of the others: that of the first released checkpoint.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {**_GPT, "vocab": 51200, "max_positions": 2048},
    "gpt2": {**_GPT, "vocab": 50257, "max_positions": 1024},
    "llama": {**_LLAMA, "vocab": 32000},
    "mistral": {**_LLAMA, "vocab": 32000},
    "qwen2": {**_LLAMA, "vocab": 151936, "qkv_bias": True},
    "qwen3": {**_LLAMA, "vocab": 151936, "qk_norm": True},
    "phi3": {**_LLAMA, "vocab": 32064},
    "gemma": _GEMMA,
    "gemma2": {
        **_GEMMA,
        "norm_order": "both",
        "window": 4096,
        "window_alternates": True,
        "softcap": True,
        "head_softcap": True,
    },
    "gpt_neox": {
        **_PLAIN,
        "vocab": 50432,
        "positions": "rotary",
        "rotary_fraction": 0.25,
        "tied": False,
        "parallel": True,
    },
    "opt": {
        **_GPT,
        "vocab": 50272,
        "activation": "relu",
        "max_positions": 2048,
        "position_padding": 2,
        "attention_dropout": 0.0,
    },
    "bloom": {**_PLAIN, "vocab": 250880, "positions": "alibi", "embedding_norm": True},
    "mpt": {**_PLAIN, **_NO_BIAS, "vocab": 50432, "positions": "alibi", "norm_bias": False},
    "falcon": {
        **_PLAIN,
        **_NO_BIAS,
        "vocab": 65024,
        "positions": "rotary",
        "parallel": True,
        "shared_norm": True,
    },
    "phi": {
        **_PLAIN,
        "vocab": 51200,
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "tied": False,
        "head_bias": True,
        "parallel": True,
        "shared_norm": True,
    },
    "starcoder2": {**_PLAIN, "vocab": 49152, "positions": "rotary"},
    "gpt_bigcode": {**_GPT, "vocab": 49152, "max_positions": 8192},
    "gptj": {
        **_PLAIN,
        "vocab": 50400,
        "positions": "rotary",
        "tied": False,
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
        "parallel": True,
        "shared_norm": True,
    },
    "granite": {**_LLAMA, "vocab": 49155, "scaled_embedding": True},
    "olmo": {**_LLAMA, "vocab": 50304, "norm": "layernorm"},
    "olmo2": {**_LLAMA, "vocab": 100352, "norm_order": "post", "qk_norm": True},
    "smollm3": {**_LLAMA, "vocab": 128256, "tied": True},
    "stablelm": {
        **_LLAMA,
        "vocab": 50304,
        "norm": "layernorm",
        "norm_bias": True,
        "rotary_fraction": 0.25,
    },
    "cohere": {
        **_LLAMA,
        "vocab": 256000,
        "norm": "layernorm",
        "tied": True,
        "parallel": True,
        "shared_norm": True,
    },
    "glm": {**_LLAMA, "vocab": 151552, "rotary_fraction": 0.5},
    "chatglm": {**_LLAMA, "vocab": 65024, "rotary_fraction": 0.5},
    "internlm2": {**_LLAMA, "vocab": 92544},
    "t5": {**_T5, "activation": "relu"},
    "mt5": {**_T5, "vocab": 250112, "activation": "geglu", "tied": False},
    "bert": {**_BERT, "vocab": 30522, "token_types": 2, "head": "pretraining", "pooler": True},
    "roberta": {
        **_BERT,
        "vocab": 50265,
        "token_types": 1,
        "position_padding": 2,
        "head": "mlm",
    },
    "distilbert": {**_BERT, "vocab": 30522, "head": "mlm"},
    "vit": {
        **_PLAIN,
        "vocab": 0,
        "causal": False,
        "tied": False,
        "head": "classification",
        "classes": 1000,
        "image": 224,
        "patch": 16,
        "class_token": True,
    },
}
