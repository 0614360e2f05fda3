"""The programs that run outside this package: the keeper of a process's sandboxes, and the first process of each.

The modules run as scripts of an isolated interpreter, so they import the standard library and each other alone.
"""
