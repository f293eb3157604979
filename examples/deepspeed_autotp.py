"""Training with DeepSpeed AutoTP, its tensor-parallel all-reduces carried by echo:

torchrun --nproc-per-node 2 examples/deepspeed_autotp.py

The same training runs twice, over the exact backend and over echo; nothing but the backend's name differs. On GPUs if
there are any, else on the CPU.
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import echo_pg  # only for the comparison and the counters printed at the end

STEPS, BATCH, LENGTH, VOCAB = 12, 4, 512, 512
EXACT = "nccl" if torch.cuda.is_available() else "gloo"
if EXACT == "gloo":  # an all-reduce that DeepSpeed compiles for CPUs, past torch.distributed; training does not use it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train(backend: str) -> tuple[list[float], dict]:
    """The losses of a small random Llama, and what echo counted."""
    deepspeed.init_distributed(backend)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "tensor_parallel": {"autotp_size": dist.get_world_size()},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        starts, strides = torch.randint(VOCAB, (2, BATCH, 1), generator=generator)
        counts = starts + (1 + strides % 3) * torch.arange(LENGTH)  # counting in steps of 1, 2 or 3
        tokens = (counts % VOCAB).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    stats = echo_pg.stats()
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    return losses, stats


with echo_pg.exact():  # in case a launcher made that name mean echo
    exact, _ = train(EXACT)
losses, stats = train("echo")  # the one word that changes
if int(os.environ["RANK"]) == 0:
    ranks = int(os.environ["WORLD_SIZE"])
    sent_exactly = stats["bytes_quantized"] * 2 * (ranks - 1) / ranks  # what a ring sends of the same tensors
    last, last_exact = losses[-1], exact[-1]
    saved = sent_exactly - stats["wire_bytes"]
    print(
        f"{stats['calls_quantized']} all-reduces quantized: {saved / 2**20:.1f} of {sent_exactly / 2**20:.1f} MiB saved"
    )
    print(f"{stats['calls_forwarded']} exact: {stats['forwarded']}; passes: {stats['passes']}")
    print(f"loss {last:.4f}, with the exact backend {last_exact:.4f}, {abs(last / last_exact - 1):.2%} apart")
