"""A GPT with the layers of Qwen3-0.6B, scaled down, trained by Megatron-core as it is, its tensor-parallel all-reduces
carried by echo:

torchrun --nproc-per-node 2 examples/megatron_core.py
torchrun --nproc-per-node 4 examples/megatron_core.py --layers 28 --hidden 1024 --sequence 2048 --micro-batch 4

It trains twice from the same start, exact and quantized, on the bytes of a text, and prints both losses. Without GPUs
it runs on the CPU. examples/megatron/install.sh installs Megatron-core.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import echo_pg  # for the exact run and the counters

VOCABULARY = 256  # bytes


def make_config(layers: int, hidden: int, tensor_parallel_size: int, **changes) -> TransformerConfig:
    """Qwen3-0.6B has 28 layers of 1,024, and all other widths follow from that one."""
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=hidden // 8,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tensor_parallel_size,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **changes,
    )


def make_model(config: TransformerConfig, sequence: int, device: torch.device, **replication):
    """The model in Megatron's data-parallel wrapper, and its distributed optimizer."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=1_000_000,
        share_embeddings_and_output_weights=True,
    )
    replication = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True} | replication
    replicas = DistributedDataParallelConfig(**replication)
    model = DistributedDataParallel(config, replicas, gpt.to(device, torch.bfloat16))
    adamw = OptimizerConfig(
        lr=3.5e-4,
        adam_beta2=0.95,
        adam_eps=1e-5,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=replicas.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(adamw, [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def loss_of(output):
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def forward_step(batches, model):
    tokens = next(batches)
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device)[None]
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens[:, :-1], positions, future, labels=tokens[:, 1:]), loss_of


def train(config, sequence, micro_batch, micro_batches, steps, device, **replication):
    """The mean loss of each step, on the last pipeline stage; an empty list elsewhere."""
    model, optimizer = make_model(config, sequence, device, **replication)
    text = (Path(__file__).parent.parent / "LICENSE").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(2 + parallel_state.get_data_parallel_rank())
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - sequence, (micro_batches, micro_batch))
        batches = [torch.stack([data[s : s + sequence + 1] for s in row]).to(device) for row in starts.tolist()]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=micro_batches,
            seq_length=sequence,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
        optimizer.step()
        if results:
            losses.append(sum(result["loss"].item() for result in results) / len(results))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="echo", help="nccl or gloo, if started by python -m echo_pg run")
    for name, default in {
        "layers": 2, "hidden": 256, "sequence": 256, "micro-batch": 8, "micro-batches": 1, "steps": 10,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    dist.init_process_group(args.backend)  # the one word that changes
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        from megatron_on_cpu import install

        install()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    shape = args.sequence, args.micro_batch, args.micro_batches, args.steps, device
    with echo_pg.exact():
        exact = train(make_config(args.layers, args.hidden, size), *shape)
    quantized = train(make_config(args.layers, args.hidden, size), *shape)

    if rank == 0:
        print("step  exact loss  echo loss  difference")
        for step, (theirs, ours) in enumerate(zip(exact, quantized, strict=True), start=1):
            print(f"{step:4}  {theirs:10.4f}  {ours:9.4f}  {100 * (ours - theirs) / theirs:+9.3f} %")
        stats = echo_pg.stats()
        ring = 2 * (size - 1) / size * stats["bytes_quantized"]  # what an exact all-reduce sends at least
        print(
            f"{stats['calls_quantized']} all-reduces quantized: {stats['wire_bytes'] / 1e6:.1f} MB sent by this rank, "
            f"{(ring - stats['wire_bytes']) / 1e6:.1f} MB saved ({ring / max(stats['wire_bytes'], 1):.2f} times fewer)"
        )
        print(f"{stats['calls_forwarded']} exact: {stats['forwarded']}; passes: {stats['passes']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
