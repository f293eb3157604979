"""What the ranks of the DeepSpeed tests run: unmodified DeepSpeed on models of two layers, with echo named once.

Run under pytest by test_deepspeed.py. Each run returns what echo decided about its all-reduces and which passes it saw.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness import Recorder, device_of, record, table
from torch import Tensor, nn

LAYERS, HIDDEN, VOCAB, BATCH, SEQUENCE = 2, 64, 128, 2, 16
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}

Table = Counter[tuple[str, ...]]


def environment(rank: int, size: int, port: int) -> None:
    """What a launcher sets, and no more."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device_of(rank)


def import_deepspeed() -> Any:
    """DeepSpeed without the all-reduce of its own that it compiles for CPUs (90 s): it goes past torch.distributed."""
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def llama(tied: bool = False) -> nn.Module:
    """A random Llama with equal weights on all ranks. Plain attention, which adds up in one order on GPUs too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    chosen = {"max_position_embeddings": 64, "tie_word_embeddings": tied, "attn_implementation": "eager"}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **chosen))


def config(accumulation: int = 1, zero: int = 0, dtype: str = "bf16", **tensor_parallel: Any) -> dict[str, Any]:
    """A DeepSpeed configuration for two tensor-parallel ranks."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        dtype: {"enabled": True},
        "optimizer": ADAM,
        "zero_optimization": {"stage": zero},
        "tensor_parallel": {"autotp_size": 2} | tensor_parallel,
    }


def batches(seed: int = 0) -> Iterator[Tensor]:
    """Token ids [BATCH, SEQUENCE] of a language with three possible successors per token, which a model can learn."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    successors = torch.randint(0, VOCAB, (VOCAB, 3), generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
        choices = torch.randint(0, 3, (BATCH, SEQUENCE), generator=generator)
        for i in range(1, SEQUENCE):
            tokens[:, i] = successors[tokens[:, i - 1], choices[:, i]]
        yield tokens.to(device)


def train(engine: Any, steps: int, data: Iterator[Tensor]) -> list[float]:
    losses = []
    for _ in range(steps):
        tokens = next(data)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def passes() -> dict[str, int]:
    import echo_pg

    return dict(echo_pg.stats().get("passes", dict.fromkeys(("forward", "backward", "recompute"), 0)))


def observed(recorder: Recorder, run: Callable[[], Any]) -> tuple[Table, dict[str, int]]:
    """The decisions of `run` and the passes that it started."""
    recorder.take()
    before = passes()
    run()
    return table(recorder.take()), {name: count - before[name] for name, count in passes().items()}


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks, one process each, one model after the other.


def run_two_ranks(rank: int, size: int, folder: str, port: int) -> dict[str, Any]:
    recorder = record()
    environment(rank, size, port)
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("echo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found: dict[str, Any] = {
        # First: DeepSpeed builds another output layer once it has trained in this process.
        "inference": run_inference(deepspeed, recorder, size),
        "training": run_training(deepspeed, recorder, config(accumulation=2)),
        "overlap": run_training(deepspeed, recorder, config(accumulation=2, tp_overlap_comm=True)),
        "checkpointing": run_training(deepspeed, recorder, config(accumulation=2), checkpointing=True),
        "vocabulary": run_training(deepspeed, recorder, config(vocab_parallel_lm_head=True), tied=True),
        "row head": run_training(deepspeed, recorder, config(partition_config=row_head())),
        "overflow": run_overflow(deepspeed, rank),
        "domino": [run_domino(recorder, size, intra) for intra in (True, False)],
        "injected": run_injected(recorder),
    }
    deepspeed.comm.destroy_process_group()
    found["accelerate"] = run_accelerate(recorder)
    return found


def run_training(
    deepspeed: Any, recorder: Recorder, chosen: dict[str, Any], tied: bool = False, checkpointing: bool = False
) -> tuple[Table, dict[str, int]]:
    """One optimizer step, of as many micro-batches as `chosen` accumulates."""
    model = llama(tied)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    engine = deepspeed.initialize(model=model, config=chosen)[0]
    found = observed(recorder, lambda: train(engine, chosen["gradient_accumulation_steps"], batches()))
    engine.destroy()
    return found


def row_head() -> dict[str, Any]:
    """DeepSpeed's rules for Llama, but for the output layer: it is split by rows, so that logits are summed."""
    row = [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$", r".*lm_head\.weight$"]
    column = [r".*\.[qkv]_proj\.weight$", r".*\.(up|gate)_proj\.weight$"]
    rules = [{"patterns": row, "partition_type": "row"}, {"patterns": column, "partition_type": "column"}]
    return {"use_default_specs": False, "layer_specs": rules}


def run_inference(deepspeed: Any, recorder: Recorder, size: int) -> list[tuple[Table, dict[str, int]]]:
    """A prompt, two tokens by hand, then `generate` for three tokens."""
    engine = deepspeed.init_inference(llama().eval(), tensor_parallel={"tp_size": size}, dtype=torch.bfloat16)
    tokens = next(batches())
    state: dict[str, Any] = {"input_ids": tokens}

    def step() -> None:
        output = engine(**state, use_cache=True)
        state.update(input_ids=output.logits[:, -1:].argmax(-1), past_key_values=output.past_key_values)

    def generate() -> None:
        engine.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)

    with torch.no_grad():
        return [observed(recorder, run) for run in (step, step, step, generate)]


def run_overflow(deepspeed: Any, rank: int) -> dict[int, list[dict[str, Any]]]:
    """Four fp16 steps; in the second one, one element of one rank's activation gradient is inf."""
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed asks for a CPU with fp16 arithmetic; torch computes it on any.
    type(get_accelerator()).is_fp16_supported = lambda _: True
    found: dict[int, list[dict[str, Any]]] = {}
    for zero in (0, 1):
        model = llama()
        chosen = config(zero=zero, dtype="fp16")
        chosen["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1}
        engine = deepspeed.initialize(model=model, config=chosen)[0]
        optimizer, data, poison = engine.optimizer, batches(), False

        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient[0, 3, 5] = float("inf")
            return gradient

        def on_output(_module: Any, _inputs: Any, output: Tensor) -> None:
            if poison and rank == 1:  # noqa: B023 - read in the step under way
                output.register_hook(spoil)

        model.model.layers[-1].mlp.up_proj.register_forward_hook(on_output)
        steps = found[zero] = []
        for step in range(4):
            poison = step == 1
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            tokens = next(data)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            gradient = model.model.layers[0].self_attn.q_proj.weight.grad  # ZeRO keeps them elsewhere
            finite = None if gradient is None else bool(gradient.isfinite().all())
            engine.step()
            same = all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
            scale = getattr(optimizer, "cur_scale", None) or optimizer.loss_scale
            steps.append({"overflow": optimizer.overflow, "skipped": same, "scale": scale, "finite": finite})
        engine.destroy()
    return found


def run_domino(recorder: Recorder, size: int, intra_layer: bool) -> dict[str, Any]:
    """Three layers of DeepSpeed Domino: the batch in two halves that run side by side."""
    from types import SimpleNamespace

    from deepspeed.runtime.domino import async_linear
    from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

    import echo_pg

    options = echo_pg.Options(min_bytes=0, diagnostics=True)
    group = dist.new_group(backend="echo", pg_options=options, group_desc="tp")
    async_linear.TP_group = None  # of the model before
    mpu = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: size, get_tensor_model_parallel_group=lambda: group
    )
    sizes = SimpleNamespace(
        kv_channels=16, num_attention_heads=4, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, num_layers=3,
        attention_dropout=0.0, hidden_dropout=0.0, layernorm_epsilon=1e-5, params_dtype=torch.bfloat16,
        add_bias_linear=True, perform_initialization=True, gated_linear_unit=False,
        init_method=nn.init.xavier_normal_, output_layer_init_method=nn.init.xavier_normal_,
        apply_residual_connection_post_layernorm=False, domino_intra_layer_overlap=intra_layer,
    )  # fmt: skip
    device = device_of(dist.get_rank())
    # Its linear layers are made on the device, its norms are not.
    model = DominoTransformer(sizes, mpu, None, ModelType.encoder_or_decoder).to(device, torch.bfloat16)
    x = torch.randn(8, 4, HIDDEN, generator=torch.Generator().manual_seed(5)).to(device, torch.bfloat16)
    decisions, _ = observed(recorder, lambda: model(x.requires_grad_(), None).float().square().sum().backward())
    stats = echo_pg.stats(group)
    sites = {
        direction: [(site["half"], site["lane"], site["rho_l2"], site["delta_l2"]) for site in sites]
        for direction, sites in stats["diagnostics"].items()
    }
    return {"table": decisions, "passes": stats["passes"], "sites": sites}


def run_injected(recorder: Recorder) -> Table:
    """DeepSpeed's own MLP for inference, around stand-ins for its kernels, which exist for GPUs only."""
    from deepspeed.ops.transformer.inference.ds_mlp import DeepSpeedMLP

    mlp = DeepSpeedMLP.__new__(DeepSpeedMLP)
    nn.Module.__init__(mlp)
    mlp.mp_group, mlp.attn_nw = dist.group.WORLD, None
    device = device_of(dist.get_rank())
    mlp.inter_w = mlp.inter_b = mlp.output_w = mlp.output_b = torch.ones(1, device=device)
    mlp.fused_gemm_gelu = lambda input, **_: input
    mlp.residual_add_func = lambda hidden_state, residual, **_: hidden_state + residual
    x = torch.ones(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        return observed(recorder, lambda: mlp(x, x, x, None))[0]


def run_accelerate(recorder: Recorder) -> dict[str, Any]:
    """accelerate's DeepSpeed path, and the groups that DeepSpeed makes without splitting, as on GPUs."""
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    state = PartialState(backend="echo")
    chosen = config()
    del chosen["optimizer"]
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=chosen))
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> None:
        tokens = next(batches())
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()

    decisions, started = observed(recorder, step)
    backends = (state.backend, dist.get_backend(), accelerator.state.backend)
    return {"backends": backends, "type": str(accelerator.distributed_type), "table": decisions, "passes": started}


# ---------------------------------------------------------------------------------------------------------------------
# Four ranks: two pipeline stages, each split in two by tensor parallelism.


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)  # type: ignore[no-any-return]


class Block(nn.Module):
    """An MLP of DeepSpeed's own tensor-parallel layers."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

        self.up = LinearLayer(nn.Linear(HIDDEN, 2 * HIDDEN, bias=False, dtype=torch.bfloat16), group)
        self.down = LinearAllreduce(nn.Linear(2 * HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16), group)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def run_pipeline(
    rank: int, size: int, folder: str, micro_batches: int, checkpointing: str
) -> tuple[Table, dict[str, Any], float]:
    """One step of DeepSpeed's 1F1B schedule; four blocks, so two per stage. Also the stage's TP group's statistics.
    `checkpointing` of every block: "none", "reentrant" or "non-reentrant"."""
    recorder = record()
    environment(rank, size, 1)
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("echo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    import echo_pg

    set_autotp_mode(training=True)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    members = topology.get_axis_comm_lists("model")
    groups = [dist.new_group(ranks) for ranks in members]
    group = next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)
    torch.manual_seed(0)
    blocks = [LayerSpec(Block, group) for _ in range(4)]
    layers = [LayerSpec(Embed), *blocks, LayerSpec(nn.Linear, HIDDEN, VOCAB, bias=False)]
    # Of token numbers, which have no gradient, reentrant checkpointing makes none either.
    model = PipelineModule(
        layers, topology=topology, loss_fn=cross_entropy, partition_method="uniform", checkpointable_layers=["Block"]
    )
    chosen = config(accumulation=micro_batches)
    del chosen["tensor_parallel"]
    if checkpointing != "none":
        chosen["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": checkpointing == "reentrant"}
    engine = deepspeed.initialize(model=model, config=chosen)[0]
    recorder.take()
    loss = engine.train_batch((tokens, tokens.roll(-1, 1)) for tokens in batches()).item()
    return table(recorder.take()), echo_pg.stats(group), loss


# ---------------------------------------------------------------------------------------------------------------------
# The same training with several backends, one after the other.

BACKENDS: dict[str, tuple[str, dict[str, str]]] = {
    "inner": ("nccl" if torch.cuda.is_available() else "gloo", {}),
    "off": ("echo", {"ECHO_POLICY": "off"}),
    "echo": ("echo", {}),
    "no feedback": ("echo", {"ECHO_FEEDBACK": "0"}),
}


def run_losses(rank: int, size: int, folder: str, steps: int, seed: int) -> dict[str, list[float]]:
    """The losses of every backend on the data of this seed. Once per process: in a second default group of NCCL torch
    2.11 crashes when DeepSpeed has it split."""
    environment(rank, size, 1)
    deepspeed = import_deepspeed()
    found: dict[str, list[float]] = {}
    for name, (backend, variables) in BACKENDS.items():
        os.environ.update(variables)
        store = f"file://{folder}/{seed}-{name.replace(' ', '-')}"
        deepspeed.init_distributed(backend, init_method=store, rank=rank, world_size=size)
        engine = deepspeed.initialize(model=llama(), config=config())[0]
        found[name] = train(engine, steps, batches(seed))
        engine.destroy()
        deepspeed.comm.destroy_process_group()
        for variable in variables:
            del os.environ[variable]
    return found
