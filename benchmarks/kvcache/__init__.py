"""KV cache transfer, beside peers and floors."""
