"""Tiny Hugging Face models with random weights, split over the ranks of a test by their own tensor-parallel plan."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import device_of
from torch import Tensor

# tp=2 divides all of them; a row of hidden states is half a quantization group.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXACT = "nccl" if torch.cuda.is_available() else "gloo"


def be_a_rank(rank: int, size: int) -> None:
    """What torchrun would set, and silence. transformers reads the number of ranks from here."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1", PYTHONWARNINGS="ignore")
    device_of(rank)


def start(folder: str, rank: int, size: int, name: str, backend: str = "echo", **options: Any) -> None:
    """Make the default group; `name` is unique among the groups of a test. Options: of echo, beside min_bytes=0."""
    import echo_pg

    chosen = echo_pg.Options(**({"min_bytes": 0} | options)) if backend == "echo" else None
    store = dist.FileStore(str(Path(folder) / f"store_{name}"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, pg_options=chosen)


def save(folder: str, kind: str, layers: int, rank: int, **changes: Any) -> str:
    """Write a model of random weights once for all ranks; the path that from_pretrained takes."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path = Path(folder) / "_".join([kind, str(layers), *(f"{name}{value}" for name, value in changes.items())])
    if rank == 0 and not path.exists():
        config_class = getattr(transformers, f"{kind}Config")
        shape = SHAPE | (MOE if "Moe" in kind else {}) | changes
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config_class(num_hidden_layers=layers, eos_token_id=None, **shape), dtype=torch.bfloat16
        )
        model.save_pretrained(path)
    dist.barrier()
    return str(path)


def load(path: str, **plan: Any) -> Any:
    """The model, split over the ranks. Plain attention: fused kernels of GPUs add up in an order of their own."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**(plan or {"tp_plan": "auto"}))
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, distributed_config=config, attn_implementation="eager"
    )


@functools.cache
def splits_vocabulary() -> bool:
    """Whether tp_plan="auto" splits the embedding, too, so that its outputs are summed: transformers 5.17 does not."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(num_hidden_layers=1, **SHAPE)
    return "model.embed_tokens" in AutoModelForCausalLM.from_config(config).tp_plan


def tokens(batch: int = 2, length: int = 16, vocabulary: int = 128, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)


def gradients(model: Any) -> Tensor:
    """All gradients of this rank's shards in one vector, float32."""
    locals_ = (getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters())
    return torch.cat([gradient.float().flatten() for gradient in locals_])
