"""A DeepSpeed program that knows nothing of echo: tensor parallelism 2, the other ranks data parallelism, ZeRO stage 1.

Run by test_deepspeed.py under echo's launcher. DeepSpeed names the backend itself.
"""

import deepspeed_runs as runs
import torch.distributed as dist

deepspeed = runs.import_deepspeed()
chosen = runs.config(accumulation=2, zero=1)
engine = deepspeed.initialize(model=runs.llama(), config=chosen)[0]
runs.train(engine, 2, runs.batches(seed=dist.get_rank() // 2))
