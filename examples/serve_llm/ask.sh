#!/bin/sh
# Asks the application at $1 (http://127.0.0.1:8000 by default): a completion, and a chat that is streamed.
set -e
url="${1:-http://127.0.0.1:8000}"
curl --silent --show-error --fail-with-body --noproxy '*' "$url/v1/completions" \
    -H 'Content-Type: application/json' \
    -d '{"model": "model", "prompt": "w5 w6 w7 w8", "max_tokens": 16, "temperature": 0}'
echo
curl --silent --show-error --fail-with-body --no-buffer --noproxy '*' "$url/v1/chat/completions" \
    -H 'Content-Type: application/json' \
    -d '{"model": "model", "messages": [{"role": "user", "content": "w5 w6 w7 w8"}], "max_tokens": 16, "temperature": 0,
    "stream": true}'
