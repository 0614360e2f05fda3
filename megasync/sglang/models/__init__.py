"""A package of external models: the SGLang model classes of megasync's families.

SGLang imports all of its architectures, 259 modules, unless it finds the one to serve in such a package. The modules of
`families` are imported by then anyway. For any other architecture SGLang searches its own modules as usual.
"""
