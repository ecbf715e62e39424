#!/usr/bin/env bash
# Generates src/taskd/wire/_pb from src/taskd/wire/*.proto. `make proto` calls it with the Python to use.
# The generator is old on purpose: its output runs with every protobuf from 4.25 on.
set -euo pipefail
cd "$(dirname "$0")/../src"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$1" -m grpc_tools.protoc -I taskd/wire/_pb=taskd/wire \
  --python_out="$out" --grpc_python_out="$out" --pyi_out="$out" \
  $(for file in taskd/wire/*.proto; do echo "taskd/wire/_pb/$(basename "$file")"; done)
rm -f taskd/wire/_pb/*_pb2*
cp "$out"/taskd/wire/_pb/* taskd/wire/_pb/
