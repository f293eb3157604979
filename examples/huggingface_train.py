"""Training a Hugging Face model whose own plan splits it over the ranks, its all-reduces carried by echo:

torchrun --nproc-per-node 2 examples/huggingface_train.py [MODEL]

Without a name a small Llama with random weights is made, for 2 or 4 ranks. The same steps are done twice, first with
every sum exact, so that the difference can be told; a real program needs neither that nor anything else of echo_pg's.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

import echo_pg

STEPS, BATCH, LENGTH = 6, 16, 256

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="name or folder of a model")
args = parser.parse_args()

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("echo")  # before loading: otherwise transformers makes a group of its own choice


def small_llama(folder: str) -> str:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=512, num_hidden_layers=2, **shape)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    return folder


def train(name: str) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_plan="auto")
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        start = torch.randint(0, 256, (BATCH, 1), generator=generator)
        batch = (start + torch.arange(LENGTH)).to(model.device)  # rows that count upwards
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


with tempfile.TemporaryDirectory() as made:
    folders = [made]
    dist.broadcast_object_list(folders)  # all ranks read what the first one writes
    name = args.model or small_llama(folders[0])
    with echo_pg.exact():
        exact = train(name)
    losses = train(name)
    dist.barrier()

stats, ranks = echo_pg.stats(), dist.get_world_size()
if dist.get_rank() == 0:
    for step, (loss, other) in enumerate(zip(losses, exact, strict=True)):
        print(f"step {step}: loss {loss:.4f}, exact {other:.4f}")
    uncompressed = stats["bytes_quantized"] * 2 * (ranks - 1) / ranks  # what a ring sends per rank
    print(f"{stats['calls_quantized']} all-reduces sent {stats['wire_bytes'] / 2**20:.1f} MiB per rank", end=" ")
    saved = (uncompressed - stats["wire_bytes"]) / max(uncompressed, 1)
    print(f"instead of {uncompressed / 2**20:.1f}: {100 * saved:.0f} % saved")
    print(f"last loss differs by {100 * abs(losses[-1] / exact[-1] - 1):.3f} % from the exact one")
dist.destroy_process_group()
