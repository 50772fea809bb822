"""What other programs call the fields of a model."""

from __future__ import annotations

from collections.abc import Mapping

#: One concept, many spellings (Megatron, Hugging Face, NeMo, llm-foundry).
SPELLINGS: Mapping[str, str] = {
    "num_layers": "layers",
    "num_hidden_layers": "layers",
    "n_layer": "layers",
    "n_layers": "layers",
    "hidden_size": "hidden",
    "n_embd": "hidden",
    "d_model": "hidden",
    "num_attention_heads": "heads",
    "num_heads": "heads",
    "n_head": "heads",
    "n_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_query_groups": "kv_heads",
    "num_kv_heads": "kv_heads",
    "n_kv_heads": "kv_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "intermediate_size": "ffn",
    "n_inner": "ffn",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_positions",
    "n_positions": "max_positions",
    "tie_word_embeddings": "tied",
    "sliding_window": "window",
    "hidden_dropout": "dropout",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": "token_types",
    "image_size": "image",
    "patch_size": "patch",
    "num_channels": "channels",
    "max_predictions_per_seq": "masked",
    "num_decoder_layers": "decoder_layers",
    "d_kv": "head_dim",
    "d_ff": "ffn",
    "dropout_rate": "dropout",
    "relative_attention_num_buckets": "buckets",
    "word_embed_proj_dim": "projection",
}
