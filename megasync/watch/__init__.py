"""What a run looks like from outside: a live page (`megasync watch`), reports and comparisons.

It only reads run directories, of runs that are starting, running, finished or crashed, and never changes one.
"""
