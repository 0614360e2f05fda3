"""Commands on checkpoints and model folders, outside of any run: `megasync eval`, `export` and `quantize`."""
