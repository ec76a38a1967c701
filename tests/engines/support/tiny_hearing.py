"""A model of a few megabytes that hears, with random weights: Qwen2-Audio, a tower for sounds, a projection and a Qwen2.

A second of sound takes 25 tokens.  The weights are large enough for answers to differ from sound to sound.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.support.tiny_vision import VOCABULARY, write_tokenizer

RATE = 16_000  # samples per second
BINS = 16
SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
HIDDEN, TOWER = 64, 32

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_hearing_model(folder: Path, text_model: Path) -> Path:
    """`text_model` is the folder whose tokenizer it gets."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    folder.mkdir()
    first = write_tokenizer(folder, text_model, SPECIAL)
    config = Qwen2AudioConfig(**_config(first))
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    torch.manual_seed(7)
    model = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed_positions" not in name:
                weight.normal_(0.0, weight[0].numel() ** -0.5)
    weights = {_published(name): weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_EXTRACTOR))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2AudioProcessor"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _published(name: str) -> str:
    """What checkpoints of this family call a weight."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.").removeprefix("model.")
    return f"language_model.{name}" if name.startswith("lm_head.") else name


def _config(first: int) -> dict[str, Any]:
    return {
        "audio_token_index": first,
        "audio_token_id": first,
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": TOWER,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 2 * TOWER,
            "num_mel_bins": BINS,
        },
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
    }


_EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen2AudioProcessor",
    "feature_size": BINS,
    "sampling_rate": RATE,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "nb_max_frames": 3000,
    "n_samples": 30 * RATE,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}
