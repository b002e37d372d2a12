"""What was asked, not how it runs: values before their bytes, nodes, buffers, primitives and their rules."""
