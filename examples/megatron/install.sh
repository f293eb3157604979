#!/usr/bin/env bash
# Installs Megatron-core 0.19.2 into the environment of `python`, beside the torch that is there.
#
# Its wheel asks for Python 3.12, but 3.11 runs it too; pip alone would pick an old version there. It imports triton
# whether or not there is a GPU, and torch's CPU build brings none.
set -euo pipefail
python -c 'import triton' 2> /dev/null || python -m pip install -q --no-deps triton==3.9.0
python -m pip install -q --no-deps --ignore-requires-python --only-binary :all: --python-version 3.12 \
  --target "$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" megatron-core==0.19.2
