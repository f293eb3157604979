"""An inference engine that calls echo directly, as one with a communicator of its own would: no modules, no hooks.

torchrun --nproc-per-node 2 examples/engine.py

vLLM and SGLang sum activations by kernels and communicators of their own, which naming a backend does not reach. Such a
communicator would do what Communicator does here, and the model runner what `run` does: say where a pass starts, one
per prompt or token.
"""

import os

import torch
import torch.distributed as dist

import echo_pg

HIDDEN, LAYERS, PROMPT, WRITTEN = 512, 8, 512, 16


class Communicator:
    """What an engine keeps per tensor-parallel group; `exact` compares with sums in 16 bits."""

    def __init__(self, group: dist.ProcessGroup, exact: bool) -> None:
        self.group, self.exact = group, exact

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.exact:
            with echo_pg.exact():
                dist.all_reduce(x, group=self.group)
        else:
            echo_pg.all_reduce(x, self.group)  # quantized whatever its size and shape
        return x


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (HIDDEN,))


@torch.inference_mode()
def run(x: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]], communicator: Communicator) -> torch.Tensor:
    """One pass over all layers: x of shape [tokens, HIDDEN]; each rank holds half of every pair of weights."""
    echo_pg.new_pass("forward", communicator.group)
    for up, down in weights:
        x = x + communicator.all_reduce(torch.relu(normed(x) @ up) @ down)
    return x


def generate(prompt: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]], communicator: Communicator):
    """The prompt, then token after token, each made of the one before."""
    outputs = [run(prompt, weights, communicator)]
    for _ in range(WRITTEN):
        outputs.append(run(normed(outputs[-1][-1:]), weights, communicator))
    return torch.cat(outputs)


if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("echo")
group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)  # equal on all ranks; each keeps its columns and rows
whole = [torch.randn(2, HIDDEN, 4 * HIDDEN, generator=generator) * HIDDEN**-0.5 for _ in range(LAYERS)]
weights = [
    (up.chunk(ranks, 1)[rank].to(device, torch.bfloat16), down.T.chunk(ranks, 0)[rank].to(device, torch.bfloat16) / 2)
    for up, down in whole
]
prompt = torch.randn(PROMPT, HIDDEN, generator=generator).to(device, torch.bfloat16)

exact = generate(prompt, weights, Communicator(group, exact=True)).float()
found = generate(prompt, weights, Communicator(group, exact=False)).float()
stats = echo_pg.stats(group)
if rank == 0:
    tokens = {"the prompt": slice(0, PROMPT), "the tokens written": slice(PROMPT, None)}
    for name, part in tokens.items():
        likeness = torch.nn.functional.cosine_similarity(found[part], exact[part]).mean()
        print(f"{name}: cosine {likeness:.4f} to the exact hidden states")
    sent, uncompressed = stats["wire_bytes"], stats["bytes_quantized"] * 2 * (ranks - 1) / ranks
    print(f"{stats['calls_quantized']} all-reduces in {stats['passes']['forward']} passes", end=" ")
    print(
        f"sent {sent / 2**20:.2f} MiB per rank, {(uncompressed - sent) / 2**20:.2f} of {uncompressed / 2**20:.2f} saved"
    )
dist.destroy_process_group()
