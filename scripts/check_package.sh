#!/usr/bin/env bash
# Build the sdist and the wheel, check their metadata, and install them in empty environments, outside of the tree: the
# wheel in each version of Python, the sdist, from which the same wheel is built, in the first.
#
#     scripts/check_package.sh                            # with every python3.11 to python3.13 on the PATH
#     PYTHONS="python3.12 python3.13" scripts/check_package.sh
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
# Shims of pyenv are on the PATH for versions that are not chosen, too: ask each whether it runs.
: "${PYTHONS:=$(for n in 11 12 13; do ! "python3.$n" -c '' 2>/dev/null || echo "python3.$n"; done)}"
: "${PYTHONS:?no python3.11 to python3.13 on the PATH: name one in PYTHONS}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

builder=$(set -- $PYTHONS; echo "$1")
"$builder" -m venv "$work/builder"
"$work/builder/bin/pip" install --quiet --quiet build twine
# From what git has: a file that was forgotten there must be missed here.
git archive HEAD | (mkdir "$work/tree" && tar -x -C "$work/tree")
"$work/builder/bin/python" -m build --outdir "$work/dist" "$work/tree" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
"$work/builder/bin/twine" check --strict "$work"/dist/*

cd "$work"
packages="dist/*.whl dist/*.tar.gz"
for python in $PYTHONS; do
  for package in $packages; do
    rm -rf empty
    "$python" -m venv empty
    empty/bin/pip install --quiet --quiet "$package"
    empty/bin/scalerl fit "$here/examples/curves/lr6e-6-seed0.csv" --json >fit.json
    empty/bin/scalerl report "$here/examples/curves/lr6e-6-seed0.csv" -o report.html >/dev/null
    test -s report.html
    empty/bin/python -c 'import scalerl.rl, scalerl.study'  # without torch
    echo "$("$python" --version), ${package#dist/}: $(empty/bin/scalerl --version)"
  done
  packages="dist/*.whl"
done
