"""What attacks, rehearses or simulates a run: `sim`, `rehearsal`, `chaos` and the check of a model's layout.

The core never imports it. It uses the core's public classes and reads run directories.
"""
