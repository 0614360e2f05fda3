"""The model classes that SGLang serves megasync's families with, as a package of external models.

SGLang imports every architecture it has, 259 modules, unless it finds the one that it is to serve in such a package; those
of `families` it has imported by then anyway. What is not among them it looks for among all of its own, as ever.
"""
