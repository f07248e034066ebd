#!/bin/sh
# Asks a deployment at $1 (http://127.0.0.1:8000 by default) for a completion, for an answer in a chat, and for a
# streamed completion.
set -e
url="${1:-http://127.0.0.1:8000}"
curl --silent --show-error --fail-with-body --noproxy '*' "$url/v1/completions" \
    -H 'Content-Type: application/json' \
    -d '{"prompt": "Pages of a prompt", "max_tokens": 16, "seed": 1}'
echo
curl --silent --show-error --fail-with-body --noproxy '*' "$url/v1/chat/completions" \
    -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Where are the pages?"}], "max_tokens": 16, "seed": 1}'
echo
curl --silent --show-error --fail-with-body --no-buffer --noproxy '*' "$url/v1/completions" \
    -H 'Content-Type: application/json' \
    -d '{"prompt": "Pages of a prompt", "max_tokens": 16, "seed": 1, "stream": true}'
