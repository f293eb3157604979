#!/usr/bin/env bash
# Pre-trains Qwen3-0.6B with Megatron-LM in the paper's configuration (its appendix B), the all-reduces of its four
# tensor-parallel ranks carried by echo:
#
#   MEGATRON=~/Megatron-LM DATA=~/c4_text_document examples/megatron/train.sh [more arguments of pretrain_gpt.py]
#
# DATA is what Megatron-LM's tools/preprocess_data.py made of Dolma C4 with the tokenizer of Qwen/Qwen3-0.6B. Main run:
# four GPUs of one host, 12,716 steps of 786,432 tokens each. ECHO_OFF=1 is the 16-bit run; the paper gives that one
# PEAK_LR=3.0e-4. To try it out, RANKS (default 4) and LAYERS (default 28) make it smaller, and later arguments win over
# those below: `RANKS=2 LAYERS=2 ... --mock-data --train-iters 10`.
set -euo pipefail

: "${MEGATRON:?the folder of a Megatron-LM checkout}"
ranks=${RANKS:-4} layers=${LAYERS:-28}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it where tensor-parallel calls overlap with matrix products
export PYTHONPATH=$MEGATRON${PYTHONPATH:+:$PYTHONPATH}

model=(
  --num-layers "$layers" --hidden-size 1024 --ffn-hidden-size 3072
  --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
  --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
  --position-embedding-type rope --rotary-base 1000000
  --attention-dropout 0 --hidden-dropout 0
  --seq-length 2048 --max-position-embeddings 2048
  # 151,669 tokens, padded to 151,936: a multiple of 1187 times one, two or four ranks.
  --make-vocab-size-divisible-by 1187
)
training=(
  --tensor-model-parallel-size "$ranks" # no pipeline, context, data or sequence parallelism
  --micro-batch-size 24 --global-batch-size 384 --train-iters 12716
  --bf16 # master weights, gradients and optimizer states stay fp32
  --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --weight-decay 0.1 --clip-grad 1.0
  --lr "${PEAK_LR:-3.5e-4}" --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100
)
data=(
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-0.6B
  ${DATA:+--data-path "$DATA"} --split 999,1,0
)

# The one line that names echo: "nccl", Megatron's default backend, means echo in what comes after `-m echo_pg run`.
exec python -m torch.distributed.run --nproc-per-node "$ranks" -m echo_pg run "$MEGATRON/pretrain_gpt.py" \
  "${model[@]}" "${training[@]}" "${data[@]}" \
  --distributed-backend nccl --log-interval 10 --eval-iters 10 --eval-interval 1000 "$@"
