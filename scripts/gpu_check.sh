#!/bin/sh
# Is all well on this machine's GPU, and how fast is it? Under five minutes; no network.
#
#     scripts/gpu_check.sh                     tests, then the bench at small and base, for SwiGLU
#     scripts/gpu_check.sh --ffn geglu         the same for another block (any option of scripts/bench.py)
#
# DEVICE=cpu exercises the script where there is no GPU; PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
device=${DEVICE:-cuda}

# A corpus of its own, so that nothing is fetched: random bytes are as fast to learn nothing from as Shakespeare.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" - "$folder/text.txt" <<'PYTHON'
import random, sys
words = [f"word{i}" for i in range(3000)]
text = " ".join(random.Random(0).choices(words, k=400_000))
open(sys.argv[1], "w").write(text.replace("word9", "\n"))
PYTHON
export WANDB_MODE=offline HF_HUB_OFFLINE=1 FFNLAB_CACHE="$folder"

"$python" - "$device" <<'PYTHON'
import sys, torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit(f"error: torch {torch.__version__} sees no GPU here (DEVICE=cpu tries the script without)")
name = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else "the CPU"
print(f"torch {torch.__version__} on {name}")
PYTHON

# The tests under tests/gpu run on the GPU where there is one, and on the CPU elsewhere.
"$python" -m pytest -q tests/gpu

contenders="bare compile products"
if "$python" -c "import liger_kernel" 2>/dev/null; then contenders="bare compile liger products"; fi

# shellcheck disable=SC2086  # several words are meant
"$python" scripts/bench.py --device "$device" --parts race --shapes ${SHAPES:-small base} --ffn swiglu \
    --contenders $contenders --slices ${SLICES:-8} --json outputs/gpu_check.json \
    "data=text" "data.paths=[$folder/text.txt]" "$@"
