"""Keys of Hugging Face configs that several families share -> our fields."""

from __future__ import annotations

from collections.abc import Mapping

USUAL: Mapping[str, str] = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied",
    "attention_dropout": "attention_dropout",
}
GROUPED: Mapping[str, str] = {**USUAL, "num_key_value_heads": "kv_heads"}
#: Of GPT-2 and those that came after it.
GPT: Mapping[str, str] = {
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_head": "heads",
    "n_inner": "ffn",
    "vocab_size": "vocab",
    "n_positions": "max_positions",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "tie_word_embeddings": "tied",
}
