"""Any Hugging Face model with a tensor-parallel plan, its all-reduces carried by echo:

torchrun --nproc-per-node 4 examples/huggingface.py Qwen/Qwen3-8B "Why is the sky blue?"

The number of ranks must divide the model's heads, those of keys and values, too.

Echo leaves small tensors exact, because sending fewer bits of them saves no time: here a prompt of some hundred tokens
is quantized, a short one and the single tokens written afterwards are not. ECHO_MIN_BYTES=0 quantizes them all.

What is written is then read once more, exact and quantized, so that the difference can be told; a real program needs
neither that nor anything else of echo_pg's.
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="name or folder of a model")
parser.add_argument("prompt", help="text to go on from")
args = parser.parse_args()

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("echo")  # before loading: otherwise transformers makes a group of its own choice

model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_plan="auto")
)
tokenizer = AutoTokenizer.from_pretrained(args.model)
inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
output = model.generate(**inputs, max_new_tokens=64, do_sample=False)

# What follows only tells what happened.
import echo_pg  # noqa: E402

stats, ranks = echo_pg.stats(), dist.get_world_size()
with torch.no_grad():
    found = model(output).logits[0].float()
    with echo_pg.exact():
        expected = model(output).logits[0].float()
        exact_output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
if dist.get_rank() == 0:
    print(tokenizer.decode(output[0], skip_special_tokens=True))
    sent, uncompressed = stats["wire_bytes"], stats["bytes_quantized"] * 2 * (ranks - 1) / ranks  # a ring's, per rank
    print(f"{stats['calls_quantized']} all-reduces quantized, {stats['calls_forwarded']} exact", end=": ")
    print(f"{(uncompressed - sent) / 2**20:.3f} of {uncompressed / 2**20:.3f} MiB saved in the quantized ones")
    error = (found - expected).norm() / expected.norm()
    start = inputs["input_ids"].shape[1]
    written, exact = output[0, start:].tolist(), exact_output[0, start:].tolist()
    same = [a == b for a, b in zip(written, exact, strict=False)] + [False]
    print(f"logits differ by {100 * error:.3f} % from those of the exact backend", end=", ")
    print(f"and of {len(written)} tokens written the first {same.index(False)} are the same")
dist.destroy_process_group()
