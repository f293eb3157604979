"""Any Hugging Face model with a tensor-parallel plan, its all-reduces carried by echo:

torchrun --nproc-per-node 4 examples/huggingface.py Qwen/Qwen3-8B "Why is the sky blue?"

Echo leaves small tensors exact, because sending fewer bits of them saves no time: here a prompt of some hundred tokens
is quantized, a short one and the single tokens written afterwards are not. ECHO_MIN_BYTES=0 quantizes them all.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("echo")  # before loading: otherwise transformers makes a group of its own choice

name, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    name, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_plan="auto")
)
tokenizer = AutoTokenizer.from_pretrained(name)
inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
if dist.get_rank() == 0:
    print(tokenizer.decode(output[0], skip_special_tokens=True))
dist.destroy_process_group()
