"""How programs around Hugging Face come to echo: those that name their backend, those that cannot, and the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from hf_models import SHAPE, splits_vocabulary

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).parent / "huggingface_program.py")
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}


def torchrun(*program: str, **variables: str) -> str:
    """Run a program over two ranks; what it printed on both streams."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(PROGRAM).parent)])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program],
        env={**os.environ, **QUIET, "PYTHONPATH": path, **variables},
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def outcome(text: str) -> dict[str, Any]:
    (line,) = (line for line in text.splitlines() if line.startswith("OUTCOME "))
    return json.loads(line.removeprefix("OUTCOME "))


def tiny_model(folder: Path, **changes: int) -> str:
    """A model of random weights with a tokenizer of 128 words, as save_pretrained leaves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(num_hidden_layers=2, eos_token_id=None, **SHAPE | {"max_position_embeddings": 128} | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    # No special tokens: decoding leaves those out, and which words a random model writes depends on the machine.
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


def test_a_trainer_whose_backend_is_replaced() -> None:
    """Its data-parallel sums all stay exact. Named outright, "echo" is refused: by accelerate on CPU, and by the
    choices of the command line anywhere."""
    found = outcome(torchrun(PROGRAM, "trainer", ECHO_REPLACE="gloo,nccl", ECHO_MIN_BYTES="0"))
    assert found["backend"] == "echo" and found["name"] in ("gloo", "nccl") and len(found["losses"]) == 3
    assert found["stats"]["calls_quantized"] == 0 and found["stats"]["calls_forwarded"] > 0
    if not torch.cuda.is_available():
        assert "echo is not available, please use gloo" in found["named"]

    from transformers import TrainingArguments

    choices = TrainingArguments.__dataclass_fields__["ddp_backend"].metadata["choices"]
    assert "echo" not in choices and {"gloo", "nccl"} <= set(choices)


def test_a_plan_under_the_launcher(tmp_path: Path) -> None:
    """from_pretrained makes the group by a name of its own choice. On CPU accelerate has no Trainer for the model."""
    text = torchrun("-m", "echo_pg", "run", PROGRAM, "plan", tiny_model(tmp_path), ECHO_MIN_BYTES="0")
    found = outcome(text)
    assert found["backend"] == "echo"
    if torch.cuda.is_available():
        assert found["complaint"] == "" and len(found["losses"]) == 3
    else:
        assert "MULTI_CPU" in found["complaint"]
        assert found["stats"]["calls_quantized"] == 2 * 2 + 2 * 5 + 1


def test_the_example_that_writes(tmp_path: Path) -> None:
    """A prompt's sums of 128 KiB are quantized; those of the tokens written, of 512 bytes, are not."""
    width, words = 256, 256
    model = tiny_model(tmp_path, hidden_size=width, intermediate_size=512, max_position_embeddings=512)
    prompt = " ".join(f"w{i % 128}" for i in range(words))
    text = torchrun("examples/huggingface.py", model, prompt, ECHO_MIN_BYTES="64KiB", ECHO_LOG="info")
    assert "quantizing over 2 ranks" in text
    (line,) = (line for line in text.splitlines() if line.startswith(prompt))
    assert len(line.split()) == words + 64, "the prompt and what was written"
    (saved,) = (line for line in text.splitlines() if line.endswith("saved in the quantized ones"))
    quantized, exact, fewer, whole = numbers(saved)
    # Two layers of two sums; the prompt is a pass, and so is each token but the last. The embedding's sums stay exact.
    assert (quantized, exact) == (4, 63 * 4 + 64 * splits_vocabulary())
    assert whole == 4 * words * width * 2 / 2**20, "a ring of two sends as many bytes as the tensor has"
    assert abs(fewer / whole - (1 - 68 / 256)) < 0.01, "128 elements travel in 68 bytes, not 256"
    (differs,) = (line for line in text.splitlines() if line.startswith("logits differ by"))
    error, written, same = numbers(differs)
    assert 0 < error < 20 and written == 64 and 1 <= same <= 64, "weights are random: 10 % when it was written"


def numbers(line: str) -> list[float]:
    return [float(word.rstrip(".,:")) for word in line.split() if word[0].isdigit()]


def test_the_example_that_trains() -> None:
    lines = torchrun("examples/huggingface_train.py").splitlines()
    steps = [numbers(line) for line in lines if line.startswith("step ")]
    assert len(steps) == 6 and steps[-1][1] < steps[0][1], "the loss falls"
    (saved,) = (line for line in lines if line.endswith("% saved"))
    assert numbers(saved)[0] == 6 * (2 * 2 + 2 * 5 + 1), "calls of two layers and of lm_head, per step"
    assert numbers(saved)[-1] >= 73, "128 elements travel in 68 bytes, not 256"
    (differs,) = (line for line in lines if line.startswith("last loss differs"))
    assert numbers(differs)[0] < 1, "per cent"


def test_the_example_of_an_engine() -> None:
    lines = torchrun("examples/engine.py").splitlines()
    likeness = [numbers(line)[0] for line in lines if "cosine" in line]
    assert len(likeness) == 2 and min(likeness) > 0.98, "0.996 and 0.994 when it was written"
    (sent,) = (line for line in lines if "passes" in line and "sent" in line)
    calls, passes, mebibytes, saved, whole = numbers(sent)
    assert (calls, passes) == (8 * 17, 17)
    assert mebibytes < 0.28 * whole and abs(whole - saved - mebibytes) < 0.02
