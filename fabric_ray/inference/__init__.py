"""A small inference engine on torch: paged attention, chunked prefill, batched decode."""
