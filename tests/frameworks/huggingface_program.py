"""What test_huggingface_naming.py starts: programs that never say "echo", and print what they got as JSON.

trainer: TrainingArguments and Trainer make the groups; data-parallel on CPU, where accelerate knows nothing else.
plan FOLDER: from_pretrained makes the group; then a Trainer for the split model.
"""

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from hf_models import SHAPE, load
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

CPU = not torch.cuda.is_available()


def arguments(**more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=2, report_to=[], save_strategy="no",
        use_cpu=CPU, logging_steps=1, disable_tqdm=True, max_grad_norm=0.0, **more,
    )  # fmt: skip


def examples() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 128, (32, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def complaint(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def train(model: Any) -> list[float]:
    trainer = Trainer(model=model, args=arguments(), train_dataset=examples())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(what: str, *folder: str) -> dict[str, Any]:
    import echo_pg

    found: dict[str, Any] = {}
    if what == "trainer":
        arguments()
        torch.manual_seed(0)
        config = LlamaConfig(num_hidden_layers=1, **SHAPE)
        found["losses"] = train(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        if CPU:
            found["named"] = complaint(lambda: arguments(ddp_backend="echo"))
    else:
        model = load(*folder)
        ids = examples()[0]["input_ids"][None].to(model.device)
        model(input_ids=ids, labels=ids).loss.backward()
        losses: list[float] = []
        found["complaint"] = complaint(lambda: losses.extend(train(model)))
        found["losses"] = losses
    # What carries the group; get_backend() says the name that the program or its framework gave.
    backend = dist.group.WORLD._get_backend(torch.device("cpu" if CPU else "cuda")).name()
    return found | {"backend": backend, "name": dist.get_backend(), "stats": echo_pg.stats()}


if __name__ == "__main__":
    outcome = main(*sys.argv[1:])
    if dist.get_rank() == 0:
        print("OUTCOME " + json.dumps(outcome), flush=True)
    dist.destroy_process_group()
