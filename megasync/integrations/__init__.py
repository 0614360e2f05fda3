"""megasync beside other training systems: thin adapters over the same engine, and checkpoints of Megatron-LM."""
