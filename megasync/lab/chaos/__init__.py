"""`megasync chaos`: injects faults into a real run from outside, and reports the outcome."""
